"""The supervisor sensor reports streams that run although no asset defines them any more."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import begin_execution, register
from supervised_streams import Supervised

from dagster_ckpt.catalog.records import (
    ExecutionStatus,
)
from dagster_ckpt.orchestration import observed_runs
from dagster_ckpt.orchestration.observed_runs import UNDEFINED_GRACE_MS, Claims, Silences, undefined_streams
from dagster_ckpt.values.modes import DesiredState
from tests.support.as_writer import as_writer


def test_a_stream_that_runs_and_that_no_asset_defines_any_more_is_reported_with_both_ways_on(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its asset was renamed: the old query runs on, and nothing supervises it."""
    monkeypatch.setattr(observed_runs, "UNDEFINED_GRACE_MS", 0)
    register(supervised.catalog, "renamed")
    run = supervised.run(DagsterRunStatus.STARTED)
    execution = begin_execution(supervised.catalog, "renamed", run.run_id)
    context = dg.build_sensor_context(supervised.instance, resources={"checkpoint_catalog": supervised.resource})

    message = supervised.sensor.evaluate_tick(context).skip_message

    assert message == (
        f"renamed: it is not settled (run {run.run_id}), and no asset of this code location has this stream id, so "
        "nothing supervises it. Set stream_id='renamed' in the definition that continues it, or retire it: "
        "dagster-ckpt retire renamed"
    )
    as_writer(supervised.catalog, "renamed").executions.end(
        execution.execution_id, ExecutionStatus.CANCELED, "retired", settled=True
    )
    assert "renamed" not in (supervised.sensor.evaluate_tick(context).skip_message or "")
    supervised.catalog.desired_states.put("renamed", DesiredState.RUNNING, origin="a test")
    assert "renamed: it is to run" in (supervised.sensor.evaluate_tick(context).skip_message or "")


def test_a_stream_of_another_code_location_is_its_own_to_report(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(supervised.catalog, "theirs")
    run = supervised.run(DagsterRunStatus.STARTED)
    begin_execution(supervised.catalog, "theirs", run.run_id)
    streams = {"orders": None}
    now_ms = 0
    silences, claims = Silences(lambda: now_ms), Claims("sensor")

    class Origin:
        location_name = "theirs"

    monkeypatch.setattr(dg.DagsterRun, "remote_job_origin", Origin())

    def undefined(location: str) -> list[str]:
        known = (supervised.instance, supervised.catalog, streams, location)
        return undefined_streams(*known, silences=silences, claims=claims)  # type: ignore[arg-type]

    assert undefined("theirs") == [], "its code location may be about to be replaced"
    now_ms = UNDEFINED_GRACE_MS
    assert undefined("ours") == []
    assert supervised.catalog.desired_states.find("theirs") is None
    assert len(undefined("theirs")) == 1
    assert len(undefined("theirs")) == 1
    row = supervised.catalog.desired_states.find("theirs")
    assert row is not None
    assert (row.desired, (row.alert or "")[:16]) == (None, "it is not settle")

    streams["theirs"] = None
    assert undefined("theirs") == []
    row = supervised.catalog.desired_states.find("theirs")
    assert row is not None
    assert (row.alert, row.alert_until) == (None, None)


def test_a_stream_whose_asset_moved_to_another_code_location_is_not_reported_by_the_former_one(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two sensors undid the other's alert, whose advice was to retire the stream."""
    register(supervised.catalog, "moved")
    begin_execution(supervised.catalog, "moved", supervised.run(DagsterRunStatus.STARTED).run_id)
    now_ms = 0

    class Origin:
        location_name = "former"

    monkeypatch.setattr(dg.DagsterRun, "remote_job_origin", Origin())
    monkeypatch.setattr(observed_runs, "UNDEFINED_GRACE_MS", 1)
    sensors = {name: (Silences(lambda: now_ms), Claims("sensor", lambda: now_ms)) for name in ("former", "new")}

    def tick(location: str, *stream_ids: str) -> list[str]:
        silences, claims = sensors[location]
        known = (supervised.instance, supervised.catalog, dict.fromkeys(stream_ids), location)
        return undefined_streams(*known, silences=silences, claims=claims)  # type: ignore[arg-type]

    for _ in range(10):
        now_ms += 60_000
        assert tick("new", "moved") == tick("former") == []
    assert supervised.catalog.desired_states.find("moved") is None
    # The other code location is gone.
    for _ in range(4):
        now_ms += 60_000
        messages = tick("former")
    assert len(messages) == 1
    # One that forgets its own stream says so at once.
    tick("former", "moved")
    now_ms += 60_000
    tick("former")
    now_ms += 60_000
    assert len(tick("former")) == 1
