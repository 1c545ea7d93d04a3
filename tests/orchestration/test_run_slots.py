"""A run queue that cannot hold all streams is reported, once."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.orchestration._compat import RunSlots, run_slots
from dagster_ckpt.orchestration.jobs.operator_jobs import build_operator_jobs
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import STREAM_ID_TAG
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor, describe_slots


def queue(total: int, *limits: dict[str, Any]) -> dict[str, Any]:
    return {"concurrency": {"runs": {"max_concurrent_runs": total, "tag_concurrency_limits": list(limits)}}}


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, RunSlots(10, None)),
        (
            queue(-1, {"key": STREAM_ID_TAG, "limit": 11}, {"key": STREAM_ID_TAG, "value": "orders", "limit": 1}),
            RunSlots(None, 11),
        ),
        ({"run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}}, None),
    ],
)
def test_the_slots_are_those_of_the_run_queue(settings: dict[str, Any], slots: RunSlots | None) -> None:
    with dg.instance_for_test(overrides=settings) as instance:
        assert run_slots(instance, STREAM_ID_TAG) == slots


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (RunSlots(12, None), None),
        (RunSlots(11, None), "max_concurrent_runs is 11, and this code location has 11 streams"),
        (RunSlots(25, 12), None),
        (RunSlots(25, 11), f"no slot to spare: the limit of {STREAM_ID_TAG} is 11"),
        (RunSlots(None, None), None),
    ],
)
def test_a_queue_needs_more_slots_than_there_are_streams(slots: RunSlots, words: str | None) -> None:
    warning = describe_slots(slots, 11)
    assert (warning is None) if words is None else (words in str(warning))


def test_the_supervisor_sensor_says_so_once(
    catalog_resource: CheckpointCatalogResource,
    catalog: Catalog,
    orders: StreamingAsset,
    payments: StreamingAsset,
    capfd: pytest.CaptureFixture[str],
) -> None:
    jobs = {job.name: job for job in build_operator_jobs([orders, payments])}
    sensor = build_supervisor_sensor([orders, payments], jobs["apply_retention_job"], jobs["roll_back_upgrade_job"])
    with dg.instance_for_test(overrides=queue(2)) as instance:
        for _ in range(2):
            sensor.evaluate_tick(dg.build_sensor_context(instance, resources={"checkpoint_catalog": catalog_resource}))

    assert capfd.readouterr().err.count("max_concurrent_runs is 2, and this code location has 2 streams") == 1
