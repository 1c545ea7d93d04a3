"""How each end of a stream shows in Dagster, and when externalized retention is applied for it.

The lifecycle is replaced by one that ends as a test says; everything around it is Dagster's own.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import HOST, begin_execution, begin_snapshot, register, take_snapshot

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.catalog.records import (
    EventType,
    ExecutionStatus,
    LeaseRecord,
    RequestKind,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import CatalogError, LeaseHeldError
from dagster_ckpt.orchestration import downstream, stream_run
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.run_status import (
    PARENT_RUN_ID_TAG,
    RESTART_OF_TAG,
    RETRY_NUMBER_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
    TERMINAL_FAILURE_TAG,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
from dagster_ckpt.runtime import execution_end
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.runtime.run_request import EndKind, Outcome, QueryEnd, RunRequest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.modes import SnapshotKind, TerminalState
from tests.support.as_writer import as_writer
from tests.support.logged_life import comparable
from tests.support.played_query import PlayedQuery

EXECUTION = "the execution"
Life = Callable[[RunRequest], QueryEnd]


class _Session:
    """Stands where the `pyspark` resource is."""

    spark_session = None


class Stage:
    """Runs the stream's job with a lifecycle of the test's own."""

    def __init__(self, job: dg.JobDefinition, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = job
        self.instance = instance
        self.retained: list[tuple[str, TerminalState]] = []
        self.request: RunRequest | None = None
        self.ran: StreamHandle | None = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(stream_run, "apply_state_backend", lambda _spark, _backend: None)
        monkeypatch.setattr(stream_run, "jvm_pid", lambda _spark: None)
        monkeypatch.setattr(execution_end, "apply_terminal_retention", self._retain)

    def _retain(self, job: StreamHandle, execution_id: str, state: TerminalState) -> RetentionReport:
        self.retained.append((execution_id, state))
        return RetentionReport()

    def run(
        self,
        life: Life,
        *,
        start_from: str = "latest",
        raise_on_error: bool = False,
        checkpointing: Any = None,
        preflight: bool = False,
        **tags: str,
    ) -> tuple[dg.DagsterRun, Any]:
        """The run as it is recorded in the end, and the failure of its step, if it failed."""

        def execute_stream(job: StreamHandle, request: RunRequest) -> Outcome:
            self.request, self.ran = request, job
            job.register()
            if not job.catalog.executions.of_stream(job.stream_id):
                as_writer(job.catalog, job.stream_id).executions.start(
                    EXECUTION, run_id=request.run_id, cause=request.cause, holder=HOST
                )
            return Outcome(life(request), EXECUTION, terminal_failure="All restarts are used up.")

        self._monkeypatch.setattr(stream_run, "execute_stream", execute_stream)
        result = self.job.execute_in_process(
            {
                "ops": {
                    "orders": {
                        "config": {"start_from": start_from, "checkpointing": checkpointing, "preflight": preflight}
                    }
                }
            },
            instance=self.instance,
            raise_on_error=raise_on_error,
            tags={name.replace("__", "/"): value for name, value in tags.items()},
        )
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        failures = [event.step_failure_data.user_failure_data for event in result.all_events if event.is_step_failure]
        materialized = [event for event in result.all_events if event.is_step_materialization]
        assert not materialized, "only the catalog sensor materializes a stream"
        return run, next(iter(failures), None)

    def terminated(self, request: RunRequest) -> QueryEnd:
        """What a person does who terminates the run on the page."""
        run = self.instance.get_run_by_id(request.run_id)
        assert run is not None
        self.instance.report_run_canceling(run)
        return interrupted(request)


def interrupted(request: RunRequest) -> QueryEnd:
    assert not request.interrupted()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.interrupted()
    return QueryEnd(EndKind.INTERRUPTED, "the process was asked to stop")


def ends(kind: EndKind, **more: Any) -> Life:
    return lambda _request: QueryEnd(kind, "as the test says", **more)


@pytest.fixture
def stage(
    instance: dg.DagsterInstance,
    orders: StreamingAsset,
    catalog_resource: CheckpointCatalogResource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Stage]:
    definitions = dg.Definitions.merge(
        stream_definitions(orders),
        dg.Definitions(
            resources={
                "pyspark": dg.ResourceDefinition.hardcoded_resource(_Session()),
                "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/checkpoints"),
                "state_backend": StateBackendResource(live_directory=f"{tmp_path}/live"),
                "checkpoint_catalog": catalog_resource,
            }
        ),
    )
    before = signal.getsignal(signal.SIGTERM)
    yield Stage(definitions.resolve_job_def("orders_stream"), instance, monkeypatch)
    signal.signal(signal.SIGTERM, before)


class TestEnds:
    def test_stopped_with_a_savepoint_is_a_success_and_finished(self, stage: Stage, catalog: Catalog) -> None:
        savepoint = take_snapshot(catalog, "orders", kind=SnapshotKind.SAVEPOINT)

        run, failure = stage.run(ends(EndKind.FINISHED, savepoint=savepoint))

        assert (run.status, failure) == (DagsterRunStatus.SUCCESS, None)
        assert stage.retained == [(EXECUTION, TerminalState.FINISHED)]

    @pytest.mark.parametrize("end", [EndKind.ENDED_BY_ITSELF, EndKind.SUSPENDED])
    def test_used_up_input_and_a_stop_for_a_restart_are_successes_that_keep_everything(
        self, stage: Stage, end: EndKind
    ) -> None:
        run, failure = stage.run(ends(end))

        assert (run.status, failure) == (DagsterRunStatus.SUCCESS, None)
        assert stage.retained == []

    def test_the_end_is_reported_on_the_asset_with_the_newest_snapshots_first(
        self, stage: Stage, catalog: Catalog
    ) -> None:
        def life(_request: RunRequest) -> QueryEnd:
            for _ in range(6):
                take_snapshot(catalog, "orders", execution_id=EXECUTION)
            begin_snapshot(catalog, "orders", execution_id=EXECUTION)
            return QueryEnd(EndKind.SUSPENDED, "a person asked")

        stage.run(life)

        [record] = stage.instance.fetch_observations(dg.AssetKey("orders"), limit=5).records
        observation = record.event_log_entry.asset_observation
        assert observation.description == "run ended: SUSPENDED"
        facts = observation.metadata["dagster_ckpt/run"].value
        assert "| end | SUSPENDED: a person asked |" in facts
        assert "| snapshots | 6 completed, " in facts
        shown = re.findall(r"chk-(\d+)", observation.metadata["dagster_ckpt/last_snapshots"].value)
        assert len(shown) == 5
        assert shown == sorted(shown, key=int, reverse=True)

    def test_a_failure_carries_the_report_and_an_unreadable_catalog_does_not_change_the_end(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, failure = stage.run(ends(EndKind.FAILED))
        assert "| end | FAILED: as the test says |" in failure.metadata["dagster_ckpt/run"].value

        def unavailable(*_: object) -> None:
            raise CatalogError("The catalog is unavailable.")

        monkeypatch.setattr(stream_run, "_report_of", unavailable)
        _, failure = stage.run(ends(EndKind.LEASE_LOST))
        assert failure.metadata["dagster_ckpt/end"].value == "LEASE_LOST"

    @pytest.mark.parametrize("kind", [EndKind.FAILED, EndKind.CANCEL_REQUESTED, EndKind.LEASE_LOST])
    def test_dagster_is_told_not_to_retry(self, stage: Stage, kind: EndKind) -> None:
        with pytest.raises(dg.Failure) as raised:
            stage.run(ends(kind), raise_on_error=True)

        assert not raised.value.allow_retries

    def test_failed_for_good_is_a_failure(self, stage: Stage) -> None:
        run, failure = stage.run(ends(EndKind.FAILED))

        assert run.status is DagsterRunStatus.FAILURE
        assert failure.description == "The stream failed and will not be restarted: as the test says"
        assert stage.retained == [(EXECUTION, TerminalState.FAILED)]

    def test_a_failure_for_good_is_told_of_in_the_run_its_tags_and_the_catalog(
        self, stage: Stage, catalog: Catalog
    ) -> None:
        run, _ = stage.run(ends(EndKind.FAILED))

        assert run.tags[TERMINAL_FAILURE_TAG] == "All restarts are used up."
        assert any("has failed for good" in entry.message for entry in stage.instance.all_logs(run.run_id))
        [event] = [event for event in catalog.events.after(0) if event.type is EventType.TERMINALLY_FAILED]
        assert (event.stream_id, event.payload) == ("orders", {"reason": "All restarts are used up."})

    def test_whatever_breaks_is_a_failure_that_dagster_does_not_retry_in_the_same_process(self, stage: Stage) -> None:
        def break_down(_request: RunRequest) -> QueryEnd:
            raise ConnectionRefusedError("[Errno 111] Connection refused")

        with pytest.raises(dg.Failure) as raised:
            stage.run(break_down, raise_on_error=True)

        assert not raised.value.allow_retries
        assert raised.value.description == (
            "The stream crashed: ConnectionRefusedError: [Errno 111] Connection refused. The JVM of the Spark session "
            "has ended: it was killed, or ran out of memory (see spark.driver.memory). The restart strategy decides "
            "about a restart."
        )

    def test_canceled_by_an_operator_is_a_canceled_run(self, stage: Stage) -> None:
        run, failure = stage.run(ends(EndKind.CANCEL_REQUESTED))

        assert run.status is DagsterRunStatus.CANCELED
        assert failure.metadata["dagster_ckpt/end"].value == "CANCELED"
        assert stage.retained == [(EXECUTION, TerminalState.CANCELED)]

    def test_a_lost_lease_is_a_failure_that_touches_nothing(self, stage: Stage) -> None:
        run, failure = stage.run(ends(EndKind.LEASE_LOST))

        assert run.status is DagsterRunStatus.FAILURE
        assert failure.metadata["dagster_ckpt/end"].value == "LEASE_LOST"
        assert stage.retained == []

    def test_our_own_errors_are_failures_with_their_message(self, stage: Stage) -> None:
        def refuse(_request: RunRequest) -> QueryEnd:
            raise LeaseHeldError("Stream 'orders' is being written by another run.")

        run, failure = stage.run(refuse)

        assert run.status is DagsterRunStatus.FAILURE
        assert failure.description == "Stream 'orders' is being written by another run."
        assert failure.metadata["dagster_ckpt/end"].value == "LeaseHeldError"
        assert stage.retained == []

    def test_a_start_that_is_refused_tells_who_asked_for_it_why(self, stage: Stage, catalog: Catalog) -> None:
        def refuse(_request: RunRequest) -> QueryEnd:
            raise LeaseHeldError("Stream 'orders' is being written by another run.")

        register(catalog, "orders")
        asked = catalog.requests.submit("orders", RequestKind.START, origin="a person")
        stage.run(refuse, **{START_REQUEST_TAG: asked.request_id})

        answer = catalog.requests.get(asked.request_id)
        assert answer.status is RequestStatus.FAILED
        assert answer.error == "LeaseHeldError: Stream 'orders' is being written by another run."


class TestOptionsOfOneRun:
    def test_a_run_may_be_given_options_in_place_of_its_assets(self, stage: Stage, orders: StreamingAsset) -> None:
        stage.run(ends(EndKind.SUSPENDED), checkpointing={"interval": 50, "cleanup": "RETAIN_ON_CANCELLATION"})

        assert stage.ran.options == CheckpointConfig(interval=50, cleanup="RETAIN_ON_CANCELLATION").options

    def test_what_a_run_is_not_given_stays_as_the_asset_says(self, stage: Stage, orders: StreamingAsset) -> None:
        stage.run(ends(EndKind.SUSPENDED), checkpointing={"num_retained": 7})
        assert stage.ran.options == replace(orders.spec.options, num_retained=7)

        stage.run(ends(EndKind.SUSPENDED))
        assert stage.ran.options == orders.spec.options

    def test_an_option_out_of_range_ends_the_run_before_anything_starts(self, stage: Stage) -> None:
        run, failure = stage.run(ends(EndKind.SUSPENDED), checkpointing={"interval": 9})

        assert run.status is DagsterRunStatus.FAILURE
        assert "checkpoint interval is 9" in failure.description


class TestInterrupts:
    def test_a_run_terminated_on_the_page_is_canceled(self, stage: Stage) -> None:
        run, failure = stage.run(stage.terminated)

        assert run.status is DagsterRunStatus.CANCELED
        assert failure.metadata["dagster_ckpt/end"].value == "CANCELED"
        assert stage.retained == [(EXECUTION, TerminalState.CANCELED)]

    def test_a_run_with_a_time_limit_is_left_to_what_is_recorded_in_the_end(self, stage: Stage) -> None:
        _, failure = stage.run(stage.terminated, dagster__max_runtime="3600")

        assert failure.metadata["dagster_ckpt/end"].value == "INTERRUPTED"
        assert stage.retained == []

    def test_a_signal_that_nobody_recorded_a_cancel_for_fails_the_run_and_keeps_everything(self, stage: Stage) -> None:
        run, failure = stage.run(interrupted)

        assert run.status is DagsterRunStatus.FAILURE
        assert failure.metadata["dagster_ckpt/end"].value == "INTERRUPTED"
        assert stage.retained == []

    @pytest.mark.parametrize(
        ("max_runtime", "forced", "canceled"), [("0", False, True), ("0", True, True), ("3600", False, False)]
    )
    def test_the_execution_is_told_whether_a_person_canceled_it_while_it_holds_the_lease(
        self, stage: Stage, max_runtime: str, forced: bool, canceled: bool
    ) -> None:
        answers: list[bool] = []

        def life(request: RunRequest) -> QueryEnd:
            answers.append(request.interrupted_as() is ExecutionStatus.CANCELED)
            end = stage.terminated(request)
            if forced:
                run = stage.instance.get_run_by_id(request.run_id)
                assert run is not None
                stage.instance.report_run_canceled(run)
            answers.append(request.interrupted_as() is ExecutionStatus.CANCELED)
            return end

        stage.run(life, dagster__max_runtime=max_runtime)

        assert answers == [False, canceled]
        run = stage.instance.get_run_by_id(stage.request.run_id)
        assert run is not None
        # Also one that was forced to it while its process went on.
        assert run.status is DagsterRunStatus.CANCELED
        # What was forced to its end is cleaned up after by the supervisor sensor.
        assert stage.retained == ([(EXECUTION, TerminalState.CANCELED)] if canceled and not forced else [])


class TestRequest:
    def requested(self, stage: Stage, **more: str) -> RunRequest:
        run, _ = stage.run(ends(EndKind.SUSPENDED), **more)
        assert stage.request is not None
        assert stage.request.run_id == run.run_id
        return stage.request

    def test_a_run_of_a_person_begins_a_new_history_of_failures(self, stage: Stage) -> None:
        request = self.requested(stage)

        assert request.cause is StartCause.MANUAL
        assert request.start_request_id is None

    @pytest.mark.parametrize("status", [None, RequestStatus.FAILED, RequestStatus.COMPLETED])
    def test_a_run_that_is_executed_again_does_not_wait_for_a_start_that_was_answered(
        self, stage: Stage, catalog: Catalog, status: RequestStatus | None
    ) -> None:
        asked = catalog.requests.submit("orders", RequestKind.START, origin="a person").request_id
        if status is not None:
            as_writer(catalog).requests.resolve(asked, status)

        assert self.requested(stage, **{START_REQUEST_TAG: asked}).start_was_answered is (status is not None)

    def test_the_batch_assets_between_other_streams_and_this_one_are_recorded(
        self, stage: Stage, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.requested(stage).batch_inputs == []
        report = dg.AssetSpec("report", deps=["payments"])
        graph = dg.Definitions([report, dg.AssetSpec("orders", deps=[report])]).resolve_asset_graph()
        monkeypatch.setattr(downstream, "asset_graph_of", lambda _context: graph)
        catalog.streams.ensure("money", name="money", asset_key="refunds, payments", options={})

        assert self.requested(stage).batch_inputs == [("money", "report")]

    def test_a_run_of_the_supervisor_goes_on_with_the_history(self, stage: Stage) -> None:
        assert self.requested(stage, **{RESTART_OF_TAG: "before"}).cause is StartCause.RESTART_NEW_RUN

    def test_a_retry_of_dagsters_own_goes_on_with_the_history(self, stage: Stage) -> None:
        assert self.requested(stage, **{RETRY_NUMBER_TAG: "1"}).cause is StartCause.RESTART_NEW_RUN

    def test_a_person_who_executes_a_restart_again_begins_a_new_history(self, stage: Stage) -> None:
        tags = {RESTART_OF_TAG: "before", PARENT_RUN_ID_TAG: "the run before"}
        assert self.requested(stage, **tags).cause is StartCause.MANUAL

    @pytest.mark.parametrize("started", [True, False])
    def test_a_retry_rewinds_only_what_the_run_before_did_not(
        self, stage: Stage, catalog: Catalog, started: bool
    ) -> None:
        begin_execution(catalog, "orders", "the run before", running=started)
        tags = {RETRY_NUMBER_TAG: "1", PARENT_RUN_ID_TAG: "the run before"}

        request = self.requested(stage, start_from="chk-7", **tags)

        assert ("chk-7" in str(request.start_from)) is not started

    def test_a_run_says_whose_it_is_however_it_was_launched(self, stage: Stage) -> None:
        run, _ = stage.run(ends(EndKind.SUSPENDED))
        assert run.tags[STREAM_ID_TAG] == "orders"

    def test_a_run_that_was_asked_for_answers_its_request(self, stage: Stage) -> None:
        assert self.requested(stage, **{START_REQUEST_TAG: "the request"}).start_request_id == "the request"

    def test_where_to_start_is_what_the_launchpad_says(self, stage: Stage) -> None:
        assert "chk-7" in str(self.requested(stage, start_from="chk-7").start_from)

    @pytest.mark.parametrize(
        ("status", "over"),
        [
            (DagsterRunStatus.STARTED, False),
            (DagsterRunStatus.CANCELING, False),
            (DagsterRunStatus.FAILURE, True),
            (DagsterRunStatus.CANCELED, True),
        ],
    )
    def test_a_lease_is_over_when_dagster_says_so_of_its_run(
        self, stage: Stage, status: DagsterRunStatus, over: bool
    ) -> None:
        holder = stage.instance.add_run(dg.DagsterRun("orders_stream", status=status))
        lease = LeaseRecord(
            "e",
            holder.run_id,
            "here",
            1,
            1,
            "b",
            stream_id="orders",
            token=1,
            acquired_at_ms=0,
            renewed_at_ms=0,
            expires_at_ms=0,
            expired=False,
        )

        assert self.requested(stage).holder_is_over(lease) is over


@pytest.mark.parametrize(("passed", "status"), [(True, DagsterRunStatus.SUCCESS), (False, DagsterRunStatus.FAILURE)])
def test_a_run_that_only_tries_the_code_starts_nothing_and_ends_as_the_trial_did(
    stage: Stage, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, passed: bool, status: DagsterRunStatus
) -> None:
    def tried(job: StreamHandle, *_: Any, **__: Any) -> PreflightRecord:
        return PreflightRecord("2", passed, f"{job.stream_id} has another key", 7, 1)

    monkeypatch.setattr(stream_run, "preflight", tried)
    monkeypatch.setattr(stream_run, "apply_state_backend", lambda _spark, _backend: None)

    run, failure = stage.run(ends(EndKind.FINISHED), preflight=True)

    assert (run.status, stage.request, stage.retained) == (status, None, [])
    assert (
        passed
        or "Code version 2 cannot continue from the state of orders: orders has another key" in failure.description
    )


def test_the_log_of_a_run_shows_what_the_stream_does(
    stage: Stage, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known defect 17: nothing after "start empty", for as long as the stream ran."""
    monkeypatch.setattr(stream_run, "start_stream_query", lambda *_: PlayedQuery(ends=True))
    monkeypatch.setattr(stream_run, "application_of", lambda _spark: None)
    monkeypatch.setattr(stream_run.QueryToStart, "take", lambda _self: None)
    for name in ("named_output", "plan_of_writer"):
        monkeypatch.setattr(starting, name, lambda _writer: None)
    monkeypatch.setattr(stream_run.QueryToStart, "described", lambda _self: None)
    result = stage.job.execute_in_process(instance=stage.instance)

    lines = [each.user_message for each in stage.instance.all_logs(result.run_id) if each.dagster_event is None]
    assert comparable(lines) == [
        "Acquired the lease of stream orders: token N, run RUN (process N on HOST)",
        "Starting stream orders: run RUN",
        "Stream orders: the stream has no live directory yet and there is no snapshot: start empty",
        "Reset stream orders to empty state: PLACE",
        "Stream orders is running: from empty state",
        "Stream orders is SUSPENDED after N ms: the query has processed all its input and ended",
        "Released the lease of stream orders: token N",
    ]
