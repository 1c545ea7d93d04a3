"""Schedules ask for savepoints with their own name, keep still in blackouts, and verify what can be verified."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.jobs.operator_jobs import HistoryConfigSchema, build_operator_jobs
from dagster_ckpt.orchestration.jobs.schedules import PeriodicReplication, PeriodicSavepoints, build_savepoint_schedule
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.policies.retention import KeepRules, Latest, NewestPer, SavepointHistory
from dagster_ckpt.policies.serialization import read_retention
from dagster_ckpt.policies.trigger import Blackout


def evaluate(schedule: dg.ScheduleDefinition, at: str, **resources: Any) -> Any:
    context = dg.build_schedule_context(
        scheduled_execution_time=datetime.fromisoformat(at).replace(tzinfo=UTC), resources=resources
    )
    return schedule.evaluate_tick(context)


def schedule_of(orders: StreamingAsset, **options: Any) -> tuple[dg.ScheduleDefinition, dg.JobDefinition]:
    job = next(job for job in build_operator_jobs([orders]) if job.name == "trigger_savepoint_job")
    return build_savepoint_schedule(orders, job, PeriodicSavepoints("0 * * * *", **options)), job


@pytest.mark.parametrize(
    ("options", "history"),
    [
        ({}, {"schedule": "orders_savepoint_schedule", "max_count": 10}),
        ({"history": None}, {"schedule": "orders_savepoint_schedule"}),
        (
            {"name": "nightly", "history": SavepointHistory(max_count=None, max_age_ms=5000)},
            {"schedule": "nightly", "max_age_ms": 5000},
        ),
        (
            {"history": Latest(3) | NewestPer("day", 7)},
            {
                "schedule": "orders_savepoint_schedule",
                "keep": {
                    "any_of": [
                        {"latest": {"count": 3}},
                        {"newest_per": {"period": "day", "count": 7, "timezone": "UTC"}},
                    ]
                },
            },
        ),
    ],
)
def test_a_schedule_asks_with_its_name_and_its_history(
    orders: StreamingAsset, options: dict[str, Any], history: dict[str, Any]
) -> None:
    schedule, job = schedule_of(orders, **options)

    [request] = evaluate(schedule, "2026-03-10T22:00").run_requests

    config = request.run_config["ops"]["trigger_savepoint"]["config"]
    assert config == {"stream_id": "orders", "label": "scheduled-2026-03-10T22-00", "history": history}
    assert dg.validate_run_config(job, request.run_config)


def test_the_hour_that_comes_twice_has_two_labels(orders: StreamingAsset) -> None:
    schedule, _ = schedule_of(orders, execution_timezone="Europe/Berlin")

    requests = [evaluate(schedule, f"2026-10-25T0{hour}:00").run_requests[0] for hour in (0, 1)]

    labels = [each.run_config["ops"]["trigger_savepoint"]["config"]["label"] for each in requests]
    assert labels == ["scheduled-2026-10-25T02-00", "scheduled-2026-10-25T02-00-second"]
    assert len({each.run_key for each in requests}) == 2


def test_a_history_that_no_run_config_can_name_is_refused_when_the_schedule_is_built(orders: StreamingAsset) -> None:
    class OfThisTest:
        def keep(self, snapshots: Any, context: Any) -> Any:
            return snapshots

    with pytest.raises(OptionError, match=r"OfThisTest\(\), which cannot be written as data"):
        schedule_of(orders, history=OfThisTest())


def test_a_config_with_a_policy_and_a_limit_is_refused() -> None:
    assert HistoryConfigSchema(schedule="nightly", keep={"latest": 2}).policy() == Latest(2)
    assert HistoryConfigSchema(schedule="nightly", max_count=2).policy() == SavepointHistory(2)
    with pytest.raises(OptionError, match="max_count or max_age_ms is set too"):
        HistoryConfigSchema(schedule="nightly", keep={"latest": 2}, max_count=2).policy()


def test_no_savepoint_is_taken_in_a_blackout_and_the_tick_says_until_when(orders: StreamingAsset) -> None:
    window = Blackout("22:00", "04:00", timezone="Europe/Berlin")
    schedule, _ = schedule_of(orders, blackouts=[window], execution_timezone="Europe/Berlin")

    skipped = evaluate(schedule, "2026-03-10T22:00")

    assert not skipped.run_requests
    assert skipped.skip_message == "no savepoint in a blackout; it lasts until 2026-03-11 04:00:00"
    assert len(evaluate(schedule, "2026-03-11T03:00").run_requests) == 1


def test_a_code_location_names_schedules_by_cron_or_in_full(orders: StreamingAsset, payments: StreamingAsset) -> None:
    wanted: dict[str, str | PeriodicSavepoints] = {
        "orders": "0 3 * * *",
        "shop.payments": PeriodicSavepoints("0 4 * * *", name="payments_nightly", history=SavepointHistory(3)),
    }
    definitions = stream_definitions(orders, payments, savepoint_schedules=wanted)

    crons = {schedule.name: schedule.cron_schedule for schedule in definitions.schedules or ()}
    assert crons["orders_savepoint_schedule"] == "0 3 * * *"
    assert crons["payments_nightly"] == "0 4 * * *"


def test_only_streams_with_a_snapshot_are_verified_by_schedule(
    catalog: Catalog,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> None:
    take_snapshot(catalog, "orders")
    definitions = stream_definitions(orders, payments)
    [schedule] = [each for each in definitions.schedules or () if each.name == "checkpoint_verification_schedule"]
    assert isinstance(schedule, dg.ScheduleDefinition)

    requests = evaluate(schedule, "2026-03-10T04:30", checkpoint_catalog=catalog_resource).run_requests

    configs = [request.run_config["ops"]["verify_snapshots"]["config"] for request in requests]
    assert configs == [{"stream_id": "orders", "snapshot": "latest", "deep": True}]


def test_copies_to_a_second_bucket_are_scheduled_with_their_policy(
    catalog: Catalog,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
) -> None:
    take_snapshot(catalog, "orders")
    replication = PeriodicReplication("s3://second/checkpoints", keep=KeepRules(last=3, daily=7))
    definitions = stream_definitions(orders, payments, replication=replication, operator_jobs=[])
    [schedule] = [each for each in definitions.schedules or () if each.name == "checkpoint_replication_schedule"]
    assert isinstance(schedule, dg.ScheduleDefinition)

    [request] = evaluate(schedule, "2026-03-10T04:15", checkpoint_catalog=catalog_resource).run_requests

    config = request.run_config["ops"]["replicate_snapshots"]["config"]
    assert (config["stream_id"], config["to"], config["snapshot"]) == ("orders", "s3://second/checkpoints", "all")
    assert read_retention(config["keep"]) == replication.keep
    [job] = [each for each in definitions.jobs or () if each.name == "replicate_snapshots_job"]
    assert isinstance(job, dg.JobDefinition)
    assert dg.validate_run_config(job, request.run_config)


@pytest.mark.parametrize("wrong", [{"to": "second/checkpoints"}, {"to": "/second", "keep": "daily"}, {"to": None}])
def test_copies_to_nowhere_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((OptionError, OptionTypeError)):
        PeriodicReplication(**wrong)
