"""Runs whose process was killed together with the process that would have reported it."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.events import EngineEventData
from orchestration_catalog import register

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import Holder, StartCause
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.orchestration.observed_runs import Silences, report_lost_runs
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import STREAM_ID_TAG
from dagster_ckpt.orchestration.supervisor_sensor import describe_monitoring
from dagster_ckpt.stream.liveness import LIVELY_MS, SLOW_START_MS, this_holder
from tests.support.as_writer import as_writer

# No process has it: Linux' numbers end at 4194304.
NOBODY = 2**31 - 1
HERE = replace(this_holder("", "", None), pid=NOBODY)
ELSEWHERE = replace(HERE, host="another-machine")
THE_BOOT_BEFORE = replace(HERE, boot_id="the boot before")


class Lost:
    """Runs with a process each, and the executions that they left behind."""

    def __init__(self, instance: dg.DagsterInstance, catalog: Catalog) -> None:
        self.instance = instance
        self.catalog = catalog
        self.later_ms = 0
        self.silences = Silences(lambda: self.later_ms)
        self.alerts: list[str] = []

    def run(
        self,
        pid: int | None = NOBODY,
        *,
        status: DagsterRunStatus = DagsterRunStatus.STARTED,
        stream_id: str = "orders",
    ) -> str:
        run = self.instance.add_run(dg.DagsterRun("orders_stream", status=status, tags={STREAM_ID_TAG: stream_id}))
        if pid is not None:
            event = EngineEventData({"pid": dg.MetadataValue.text(str(pid))})
            self.instance.report_engine_event("Started process for run", run, event)
        return run.run_id

    def execution(self, run_id: str, *, process: Holder = HERE, lease_ms: int | None = None) -> None:
        holder = replace(process, execution_id=run_id, run_id=run_id)
        as_writer(self.catalog).executions.start(run_id, run_id=run_id, cause=StartCause.MANUAL, holder=holder)
        if lease_ms is not None:
            self.catalog.leases.acquire("orders", holder, lease_ms)

    def look(self, *, after_ms: int = LIVELY_MS) -> list[str]:
        """The runs found lost, among those observed for this long, once their heartbeats are old."""
        messages = []
        for self.later_ms in [LIVELY_MS, LIVELY_MS + after_ms] if after_ms else [0]:
            messages += report_lost_runs(self.instance, self.catalog, {"orders", "broken"}, self.silences, self.alerts)
        return messages

    def status(self, run_id: str) -> DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status


@pytest.fixture
def lost(
    instance: dg.DagsterInstance, catalog_resource: CheckpointCatalogResource, monkeypatch: pytest.MonkeyPatch
) -> Lost:
    catalog = catalog_resource.catalog()
    register(catalog, "orders")
    lost = Lost(instance, catalog)
    now_ms = catalog.now_ms
    monkeypatch.setattr(catalog, "now_ms", lambda: now_ms() + lost.later_ms)
    return lost


@pytest.mark.parametrize(
    ("status", "end"),
    [
        (DagsterRunStatus.STARTED, DagsterRunStatus.FAILURE),
        (DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED),
    ],
)
def test_a_run_whose_process_is_gone_from_this_machine_ends_as_what_it_was_about_to(
    lost: Lost, status: DagsterRunStatus, end: DagsterRunStatus
) -> None:
    run = lost.run(status=status)
    lost.execution(run)

    [message] = lost.look()

    assert lost.status(run) is end
    assert run in message
    assert any("has ended without recording it" in entry.message for entry in lost.instance.all_logs(run))
    assert lost.look() == []


def test_a_run_whose_lease_cannot_be_read_keeps_no_other_from_being_reported(lost: Lost) -> None:
    register(lost.catalog, "broken")
    broken, run = lost.run(stream_id="broken"), lost.run()
    lost.catalog.leases.acquire("broken", replace(HERE, execution_id="x", run_id=broken), 1)
    with lost.catalog.database.writing() as connection:
        connection.execute(leases.update().values(host=None))
    lost.execution(run)

    assert len(lost.look()) == 1
    assert (lost.status(run), lost.status(broken)) == (DagsterRunStatus.FAILURE, DagsterRunStatus.STARTED)
    assert lost.alerts[0].startswith("broken: no action: The lease of stream 'broken' cannot be read: host is missing")


def test_a_run_that_a_later_one_has_settled_is_recorded_as_over_too(lost: Lost) -> None:
    run = lost.run()
    lost.execution(run)
    lost.execution(lost.run(os.getpid()))

    lost.look()

    assert lost.status(run) is DagsterRunStatus.FAILURE


def test_a_run_whose_process_lives_is_left_alone_however_silent(lost: Lost) -> None:
    run = lost.run(os.getpid())
    lost.execution(run)

    assert lost.look(after_ms=10 * SLOW_START_MS) == []
    assert lost.status(run) is DagsterRunStatus.STARTED


def test_a_process_that_began_later_under_the_same_number_is_another_one(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before_this_process:
        before_this_process.setattr(time, "time", lambda: 1_000_000.0)
        run = lost.run(os.getpid())
    lost.execution(run)

    lost.look()

    assert lost.status(run) is DagsterRunStatus.FAILURE


def test_one_with_a_young_heartbeat_is_not_even_looked_at(lost: Lost) -> None:
    lost.execution(lost.run())

    assert lost.look(after_ms=0) == []


def test_the_orphaned_step_of_a_run_whose_process_is_gone_is_waited_for_as_long_as_it_holds_the_lease(
    lost: Lost,
) -> None:
    run = lost.run()
    lost.execution(run, process=this_holder("", "", None), lease_ms=3_600_000)

    assert lost.look() == []
    assert lost.status(run) is DagsterRunStatus.STARTED


@pytest.mark.parametrize("process", [ELSEWHERE, THE_BOOT_BEFORE])
def test_one_of_another_machine_or_boot_is_given_up_only_after_a_long_silence(lost: Lost, process: Holder) -> None:
    run = lost.run()
    lost.execution(run, process=process)

    assert lost.look(after_ms=SLOW_START_MS - 1000) == []
    lost.look(after_ms=SLOW_START_MS + 1000)
    assert lost.status(run) is DagsterRunStatus.FAILURE


def test_so_is_one_that_went_down_before_it_could_begin_an_execution(lost: Lost) -> None:
    run = lost.run()

    assert lost.look() == []
    lost.look(after_ms=SLOW_START_MS + 1000)
    assert lost.status(run) is DagsterRunStatus.FAILURE


@pytest.mark.parametrize("off_ms", [-315_360_000_000, -86_400_000, 86_400_000, 315_360_000_000])
def test_a_machine_whose_clock_is_off_gives_no_run_up_before_its_time(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, off_ms: int
) -> None:
    with monkeypatch.context() as off:
        real_s = time.time
        off.setattr(time, "time", lambda: real_s() + off_ms / 1000)
        started = lost.run()
        lost.execution(lost.run(), process=ELSEWHERE)

    assert lost.look(after_ms=SLOW_START_MS - 1000) == []
    assert lost.status(started) is DagsterRunStatus.STARTED


def test_a_sign_of_life_begins_the_silence_anew(lost: Lost) -> None:
    run = lost.run()
    lost.execution(run, process=ELSEWHERE)
    lost.look(after_ms=SLOW_START_MS - 1000)
    as_writer(lost.catalog).executions.heartbeat(run, {})

    assert lost.look(after_ms=2000) == []


def test_runs_that_are_not_ours_or_have_no_process_yet_are_none_of_this(lost: Lost) -> None:
    lost.run(stream_id="elsewhere")
    lost.run(None)
    lost.run(status=DagsterRunStatus.STARTING)

    assert lost.look(after_ms=10 * SLOW_START_MS) == []


@pytest.mark.parametrize("monitoring", [False, True])
def test_a_launcher_that_can_look_by_itself_is_trusted_if_dagster_asks_it(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, monitoring: bool
) -> None:
    lost.execution(lost.run())
    launcher = type(lost.instance.run_launcher)
    monkeypatch.setattr(launcher, "supports_check_run_worker_health", property(lambda _self: True))
    monkeypatch.setattr(type(lost.instance), "run_monitoring_enabled", property(lambda _self: monitoring))

    assert bool(lost.look(after_ms=10 * SLOW_START_MS)) is not monitoring
    assert ("run_monitoring.enabled is not true" in (describe_monitoring(lost.instance) or "")) is not monitoring
