"""The catalog sensor reports few of many checkpoints, says how many there were, and stays exact whoever dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import begin_execution, begin_snapshot, register, take_snapshot
from test_catalog_sensor import Daemon, ids, on_asset

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotRecord
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock


class Story:
    """A stream that takes checkpoints, and the daemon that reports them."""

    def __init__(
        self, instance: dg.DagsterInstance, resource: CheckpointCatalogResource, orders: StreamingAsset
    ) -> None:
        # The begin of a minute, near the real time: Dagster stamps what it stores with that.
        self.clock = ManualClock(time.time_ns() // 60_000_000_000 * 60_000 - 3_600_000)
        self.catalog = Catalog(resource.url, clock=self.clock)
        register(self.catalog, "orders")
        self.instance = instance
        self.key = orders.key
        self.daemon = Daemon(instance, build_catalog_sensor([orders]), resource)

    def checkpoints(self, count: int, *, every_s: int, **facts: Any) -> list[SnapshotRecord]:
        taken = []
        for _ in range(count):
            taken.append(take_snapshot(self.catalog, "orders", **facts))
            self.clock.now_ms += every_s * 1000
        return taken

    def metadata(self) -> list[dict[str, Any]]:
        """Of each materialization, oldest first."""
        records = self.instance.fetch_materializations(self.key, limit=100, ascending=True).records
        found = [record.asset_materialization for record in records if record.asset_materialization]
        return [
            {name.removeprefix("dagster_ckpt/"): entry.value for name, entry in each.metadata.items()} for each in found
        ]


@pytest.fixture
def story(
    instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, orders: StreamingAsset
) -> Iterator[Story]:
    story = Story(instance, catalog_resource, orders)
    yield story
    story.catalog.close()


def test_one_checkpoint_a_minute_is_reported_with_what_came_since_the_one_before(story: Story) -> None:
    snapshots = story.checkpoints(13, every_s=10, rows=100, incremental_bytes=7_000)

    story.daemon.tick()

    assert on_asset(story.instance, story.key) == ids([snapshots[0], snapshots[6], snapshots[12]])
    first, second, third = story.metadata()
    assert "new_checkpoints" not in first
    for each in (second, third):
        assert (each["new_checkpoints"], each["new_rows"], each["new_mb"]) == (6, 600, 0.042)


@pytest.mark.parametrize("stored", range(4))
def test_a_daemon_that_dies_in_the_middle_of_a_tick_reports_what_it_would_have_reported(
    story: Story, stored: int
) -> None:
    snapshots = story.checkpoints(13, every_s=10)

    story.daemon.tick(dies_after=stored)
    story.daemon.tick()

    assert on_asset(story.instance, story.key) == ids([snapshots[0], snapshots[6], snapshots[12]])
    assert story.daemon.tick().asset_events == []


@pytest.mark.parametrize("events_per_tick", [1, 2, 5])
def test_it_does_not_matter_how_events_fall_into_ticks(
    story: Story, monkeypatch: pytest.MonkeyPatch, events_per_tick: int
) -> None:
    monkeypatch.setattr("dagster_ckpt.orchestration.catalog_sensor.EVENTS_PER_TICK", events_per_tick)
    snapshots = story.checkpoints(13, every_s=10)
    for _ in range(13):
        story.daemon.tick()

    assert on_asset(story.instance, story.key) == ids([snapshots[0], snapshots[6], snapshots[12]])
    assert [each.get("new_checkpoints") for each in story.metadata()] == [None, 6, 6]
    # A person resets the cursor: nothing is reported twice, and nothing that was left out before.
    story.daemon.cursor = None
    for _ in range(13):
        assert story.daemon.tick().asset_events == []


def test_the_last_checkpoint_of_a_stream_that_stops_is_on_its_asset(story: Story) -> None:
    execution = begin_execution(story.catalog, "orders", "run")
    snapshots = story.checkpoints(3, every_s=5)
    story.daemon.tick()
    assert on_asset(story.instance, story.key) == ids(snapshots[:1])

    story.catalog.executions.end_unheld(execution.execution_id, ExecutionStatus.CANCELED, "a person stopped it")
    story.daemon.tick()

    assert on_asset(story.instance, story.key) == ids([snapshots[0], snapshots[2]])
    assert story.daemon.tick().asset_events == []


def test_a_failed_attempt_is_an_observation_once_and_no_materialization(story: Story) -> None:
    for _ in range(3):
        as_writer(story.catalog).snapshots.fail(begin_snapshot(story.catalog, "orders").snapshot_id, "the disk is full")

    [observation] = story.daemon.tick(dies_after=1).asset_events
    assert isinstance(observation, dg.AssetObservation)
    assert observation.metadata["dagster_ckpt/failure"].value == "the disk is full"

    assert story.daemon.tick().asset_events == []
    assert len(story.instance.fetch_observations(story.key, limit=10).records) == 1
    assert story.metadata() == []
