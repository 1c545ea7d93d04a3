"""Jobs that take a savepoint set of a selection, and restart its streams from one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.orchestration import downstream
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from tests.client.test_savepoint_sets import Pipeline
from tests.support.places import catalog_at, place


class Location:
    """A code location with `orders`, `left`, which reads it, and a batch asset downstream of both."""

    def __init__(self, root: Path, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.pipeline = Pipeline(root, whole=False)

        @streaming_asset()
        def orders(context: Any) -> Any: ...

        @streaming_asset(deps=["orders"])
        def left(context: Any) -> Any: ...

        @dg.asset(deps=["left"])
        def revenue() -> None: ...

        self.revenue = revenue
        resources = {
            "pyspark": "unused",
            "checkpoint_catalog": CheckpointCatalogResource(url=catalog_at(root)),
            "checkpoint_storage": CheckpointStorageResource(path=place(root / "snapshots")),
            "state_backend": StateBackendResource(live_directory=place(root / "live")),
        }
        others = dg.Definitions(assets=[revenue], resources=resources)
        self.definitions = dg.Definitions.merge(stream_definitions(orders, left), others)

    def launch(self, job: str, *, fails: bool = False, **config: Any) -> dict[str, Any]:
        """The metadata that it shows."""
        run_config = {"ops": {job.removesuffix("_job"): {"config": config}}}
        result = self.definitions.resolve_job_def(job).execute_in_process(
            run_config=run_config, instance=self.instance, raise_on_error=False
        )
        assert result.success is not fails, result.all_events
        if fails:
            return {
                event.step_failure_data.user_failure_data.description: 1 for event in result.get_step_failure_events()
            }
        (output,) = [event for event in result.all_events if event.is_successful_output]
        return {
            name.removeprefix("dagster_ckpt/"): each.value for name, each in output.step_output_data.metadata.items()
        }


@pytest.fixture
def location(tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Location]:
    made = Location(tmp_path, instance)
    made.pipeline.commit(2)
    yield made
    made.pipeline.catalog.close()


def test_job_takes_a_set_of_a_selection(location: Location) -> None:
    shown = location.launch("savepoint_set_job", selection="orders+", label="june")

    (made,) = location.pipeline.client.savepoint_sets()
    assert (made.label, made.streams, made.selection) == ("june", ("orders", "left"), "orders+")
    assert made.origin.startswith("savepoint_set_job run ")
    assert (shown["savepoint_set"], shown["unproven"]) == ("june", [])
    assert all(str(each.location) in shown["savepoints"] for each in made.savepoints.values())


def test_schedule_keeps_the_newest_sets(location: Location) -> None:
    for _ in range(3):
        location.launch("savepoint_set_job", selection="orders+", keep=2)

    assert len(location.pipeline.client.savepoint_sets()) == 2


def test_restart_job_shows_what_is_built_on_undone_data_and_takes_all_streams_back(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a launched run knows its code location.
    graph = location.definitions.get_repository_def().asset_graph
    monkeypatch.setattr(downstream, "asset_graph_of", lambda _context: graph)
    location.launch("savepoint_set_job", selection="orders+", label="june")
    location.pipeline.commit(2)
    assert dg.materialize(
        [location.revenue, dg.AssetSpec("left")], instance=location.instance, selection=["revenue"]
    ).success

    ahead = location.launch("restart_savepoint_set_job", savepoint_set="june", preview=True)
    before = location.pipeline.batches
    done = location.launch("restart_savepoint_set_job", savepoint_set="june", start=False)

    assert before == [3, 3]
    assert location.pipeline.batches == [1, 1]
    for shown in (ahead, done):
        assert shown["downstream"].count("revenue") == 1
        assert "| orders |" in shown["rewind"]


def test_restart_from_an_unknown_set_fails_and_names_those_that_exist(location: Location) -> None:
    location.launch("savepoint_set_job", selection="orders+", label="june")

    (why,) = location.launch("restart_savepoint_set_job", fails=True, savepoint_set="july")

    assert "no savepoint set 'july'. It has: june" in why
