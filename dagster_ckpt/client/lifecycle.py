"""Client methods that stop, preview and start a stream, and set its desired state."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.desired_states import AlertUntil
from dagster_ckpt.catalog.records import HANDS_OVER, IS_LAUNCHED, LAUNCH_OF, ExecutionStatus, RequestKind
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.connection import Connection, checked_target
from dagster_ckpt.client.requests import (
    ask,
    await_answer,
    await_stop,
    is_running,
    require_running,
    snapshot_of,
    start_again,
    withdrawing,
)
from dagster_ckpt.errors import CkptError, LeaseHeldError, OptionError, RequestFailedError, RequestTimeoutError
from dagster_ckpt.values.modes import DesiredState, TerminalState

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradeRecord
    from dagster_ckpt.catalog.records import ExecutionRecord, RequestRecord, SnapshotRecord
    from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
    from dagster_ckpt.recovery.compatibility_report import CompatibilityReport
    from dagster_ckpt.recovery.rewind_preview import RewindPreview
    from dagster_ckpt.state.migration import StateMigration
    from dagster_ckpt.stream.handle import StreamHandle
    from dagster_ckpt.stream.start_from import StartFrom

_LOG = logging.getLogger(__name__)
_UNCHECKED = (
    "the plan and the sources of the new code are checked by its start only, after the running query is suspended: if "
    "they are refused, the stream is down until you put the previous code back and start it"
)


@dataclass(frozen=True)
class StopResult:
    """Result of `Client.stop`, `Client.cancel` and `Client.retire`.

    Attributes:
        was_running: If not, the stream was between two restarts, or had ended.
        retention: What the clean-up option deleted and kept; None if the running query applied it.
    """

    stream_id: str
    was_running: bool
    savepoint: SnapshotRecord | None = None
    retention: RetentionReport | None = None

    def messages(self) -> list[str]:
        from dagster_ckpt.stream.snapshots import describe_snapshot

        if self.was_running:
            lines = [f"the running query of {self.stream_id} was stopped"]
        else:
            lines = [f"{self.stream_id} was not running, and will not be restarted"]
        if self.savepoint is not None:
            lines.append(f"{describe_snapshot(self.savepoint)}: {self.savepoint.location}")
        return [*lines, *(self.retention.messages() if self.retention is not None else ())]


class LifecycleMethods(Connection):
    def stop(
        self,
        stream: str,
        *,
        savepoint: bool = True,
        label: str | None = None,
        target_directory: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> StopResult:
        """Stop a stream, so that its next start continues from there.

        Args:
            savepoint: Stop it at a batch boundary with a savepoint of the final state. If the savepoint fails, the
                query continues.

        Raises:
            RequestFailedError: The stream is not running, or the savepoint failed. Without a savepoint, a stream that
                waits for its restart can be stopped too.
        """
        opened = self._open(stream)
        if not savepoint:
            if label is not None or target_directory is not None:
                raise OptionError(
                    "label and target_directory are for a savepoint, but savepoint is False. Leave them out."
                )
            return self._end(opened, RequestKind.SUSPEND, timeout_s)
        arguments = {"label": label, "target_directory": checked_target(label, target_directory)}
        self._refuse_taken(opened.stream_id, label)
        require_running(opened, "stopped with a savepoint")
        answer = ask(opened, RequestKind.STOP_WITH_SAVEPOINT, arguments, origin=self._origin, timeout_s=timeout_s)
        taken = snapshot_of(opened, answer)
        await_stop(opened, timeout_s)
        return StopResult(opened.stream_id, was_running=True, savepoint=taken)

    def cancel(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
        """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted."""
        return self._end(self._open(stream), RequestKind.CANCEL, timeout_s)

    def retire(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
        """End a stream for good, such as one that no code defines any more; repeatable.

        Its desired state becomes CANCELED, open start requests are withdrawn, and a running query is canceled. Its
        clean-up option decides about checkpoints; savepoints stay.
        """
        from dagster_ckpt.runtime.execution_end import settle_execution

        opened = self._open(stream)
        self.set_desired_state(stream, DesiredState.CANCELED)
        for request in self._catalog.requests.pending(opened.stream_id):
            if request.kind is RequestKind.START:
                self._catalog.requests.withdraw(request.request_id)
        try:
            return self._end(opened, RequestKind.CANCEL, timeout_s)
        except RequestFailedError:
            if is_running(opened):
                raise
        latest = self._catalog.executions.latest(opened.stream_id)
        applied = settle_execution(opened, latest.execution_id, TerminalState.CANCELED) if latest is not None else None
        return StopResult(opened.stream_id, was_running=False, retention=applied)

    def _end(self, stream: StreamHandle, kind: RequestKind, timeout_s: float) -> StopResult:
        from dagster_ckpt.runtime.execution_end import settle_execution

        cancels = kind is RequestKind.CANCEL
        stopped = self._end_between_restarts(stream, cancels=cancels)
        if stopped is not None:
            retention = settle_execution(stream, stopped, TerminalState.CANCELED) if cancels else None
            return StopResult(stream.stream_id, was_running=False, retention=retention)
        require_running(stream, "canceled" if cancels else "suspended")
        ask(stream, kind, {}, origin=self._origin, timeout_s=timeout_s)
        await_stop(stream, timeout_s)
        return StopResult(stream.stream_id, was_running=True)

    def _end_between_restarts(self, stream: StreamHandle, *, cancels: bool) -> str | None:
        from dagster_ckpt.runtime.execution_end import stop_before_restart
        from dagster_ckpt.runtime.run_request import EndKind, QueryEnd
        from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for

        last = self._catalog.executions.latest(stream.stream_id)
        if last is None or last.settled or is_running(stream):
            return None
        try:
            acquired = acquire_for(self._catalog, stream.stream_id, "stop", self._origin)
        except LeaseHeldError:
            # A restart has begun meanwhile, so its process must be asked to stop.
            return None
        verb = "canceled" if cancels else "suspended"
        reason = f"{verb} by {self._origin} between two restarts; it had ended {last.status.value}: {last.reason}"
        end = QueryEnd(EndKind.CANCEL_REQUESTED if cancels else EndKind.SUSPENDED, reason)
        with LeaseKeeper(self._catalog, acquired.record) as lease:
            found = stop_before_restart(self._catalog, lease.record, last.execution_id, end)
        return last.execution_id if found else None

    def preview_rewind(self, stream: str, *, start_from: str | StartFrom = "latest") -> RewindPreview:
        """Preview what a start would undo, process again, and do to each sink. Changes nothing.

        Raises:
            LiveDirectoryError: There is no state to start from, or the batch is not retained.
            RecoveryExhaustedError: Every point that the stream could continue from is damaged.
            StateRewriteError: The state cannot be rewritten to `state_partitions`.
        """
        from dagster_ckpt.client.preflight import start_preview
        from dagster_ckpt.stream.start_from import StartFrom, StartPoint

        start = StartFrom.of(start_from)
        if start.point is StartPoint.EMPTY:
            # A preview discards no state, so it needs no confirmation.
            start = replace(start, discard_state=True)
        return start_preview(self._open(stream), start)

    def check(
        self,
        stream: str,
        query: Callable[[], DataStreamWriter],
        *,
        start_from: str | StartFrom = "latest",
        state_migrations: Sequence[StateMigration] | None = None,
    ) -> CompatibilityReport:
        """Compare the code of a stream with the state that a start would continue from.

        Sources, operators, state layout and sink are judged as by the start. If only the catalog can be reached, the
        code is compared with the newest recorded snapshot.

        Args:
            query: Describes the query without starting it.
            state_migrations: Those of the code; default: those that the stream is defined with.

        Raises:
            RecoveryExhaustedError: Every point that the stream could continue from is damaged.
            StorageAccessError: Nothing to compare with can be reached.

        Example:
            >>> client.check("orders", lambda: describe_orders(spark)).verdict
            <Compatibility.SAME: 'SAME'>
        """
        from dagster_ckpt.client.code_check import check_code
        from dagster_ckpt.stream.start_from import StartFrom

        handle = self._open(stream)
        if state_migrations is not None:
            handle = replace(handle, state_migrations=tuple(state_migrations))
        return check_code(handle, query, StartFrom.of(start_from))

    def restart(
        self,
        stream: str,
        *,
        start_from: str | StartFrom = "latest",
        ahead: RewindPreview | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        report: Callable[[str], None] = _LOG.info,
        suspend_first: bool = False,
    ) -> RewindPreview:
        """Start a stream, suspending it first if it is running. Returns what it undid, once the query is started.

        The start is first checked against catalog, storage and sinks. Then the supervisor sensor, which must be on,
        launches a run that checks plan, sources and sink of the new code, and only then suspends the old query. If the
        start is refused, or no run is launched, the old query runs on.

        With `suspend_first`, or if something else runs the stream's program, the query is suspended before the code is
        checked, and started again where it stopped if the start is refused.

        Args:
            start_from: A `StartFrom` if the start has options.
            ahead: Result of `preview_rewind`; sinks are asked again only if the stream would now start elsewhere.
            timeout_s: For each step.
            suspend_first: Suspend a running query before the new run is launched, where both have no room.

        Raises:
            LiveDirectoryError: There is no state to start from.
            RowsAtRiskError: A sink could lose rows, and `accept_loss` is not set.
            SinkRollbackError: A sink that must be rolled back cannot be.
            StateRewriteError: The state cannot be rewritten to `state_partitions`.
            RequestFailedError: The start failed, or no code location defines the stream.
        """
        return self._restart(
            stream, start_from, ahead=ahead, timeout_s=timeout_s, report=report, suspend_first=suspend_first
        )

    def _restart(
        self,
        stream: str,
        start_from: str | StartFrom,
        *,
        ahead: RewindPreview | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        report: Callable[[str], None] = _LOG.info,
        suspend_first: bool = False,
        launch_of: str | None = None,
    ) -> RewindPreview:
        """`launch_of` is the execution whose driver is launched again."""
        from dagster_ckpt.client.preflight import start_preview
        from dagster_ckpt.recovery.rewind_preview import refuse_loss
        from dagster_ckpt.stream.snapshots import holding
        from dagster_ckpt.stream.start_from import StartFrom

        opened, start = self._open(stream), StartFrom.of(start_from)
        ahead = start_preview(opened, start, ahead)
        for message in ahead.messages():
            report(message)
        refuse_loss(opened, ahead, accept_loss=start.accept_loss)
        self._refuse_undefined(opened)
        was_running, before = is_running(opened), self._catalog.executions.latest(opened.stream_id)
        is_launched = before is not None and bool((before.recovery or {}).get(IS_LAUNCHED))
        # Also for a stream that is down, because a restart may be under way.
        hands_over = is_launched and not suspend_first
        request_id = str(uuid.uuid4())
        with (
            holding(self._catalog, [ahead.plan.snapshot], f"restart by {self._origin}"),
            withdrawing(opened, request_id),
        ):
            suspends = not hands_over and is_running(opened)
            if suspends:
                report(_UNCHECKED)
                self._end(opened, RequestKind.SUSPEND, timeout_s)
                report("suspended the running query")
            try:
                request = self._ask_for_start(
                    opened, start, ahead, request_id=request_id, hands_over=hands_over, launch_of=launch_of
                )
            except CkptError as error:
                # For example, Spark has purged the batch since the preview.
                if suspends:
                    self._start_where_it_stopped(opened, report, error)
                raise
            if was_running and hands_over:
                report("the new run checks its code while the query runs, and then suspends it")
            report(
                "waiting for the supervisor sensor, which must be on, or for the service that runs the program, to "
                "start it"
            )
            try:
                await_answer(opened, request, timeout_s=timeout_s)
            except (RequestFailedError, RequestTimeoutError) as error:
                if hands_over and self._still_runs(opened, before):
                    _explain(error, report)
                    raise
                if isinstance(error, RequestFailedError):
                    # The process that refused the start answers before it ends.
                    await_stop(opened, timeout_s)
                if not is_running(opened):
                    if start_again(opened, request_id, origin=self._origin):
                        report(f"the start failed ({error}), so the query is started again where it stopped")
                    elif was_running and start != StartFrom():
                        self._start_where_it_stopped(opened, report, error)
                raise
        return ahead

    def _refuse_undefined(self, stream: StreamHandle) -> None:
        row = self._catalog.desired_states.find(stream.stream_id)
        if row is not None and row.alert_until is AlertUntil.DEFINED and is_running(stream):
            raise RequestFailedError(f"Stream {stream.stream_id!r} is not restarted, nothing was changed: {row.alert}.")

    def _still_runs(self, stream: StreamHandle, before: ExecutionRecord | None) -> bool:
        now = self._catalog.executions.latest(stream.stream_id)
        if now is None or before is None or now.status is ExecutionStatus.SUSPENDED:
            return False
        return is_running(stream) and now.execution_id == before.execution_id

    def _start_where_it_stopped(self, stream: StreamHandle, report: Callable[[str], None], error: CkptError) -> None:
        self.request_start(stream.stream_id)
        report(f"the start was refused ({error}), so the query is started again where it stopped")

    def request_start(self, stream: str, *, start_from: str | StartFrom = "latest") -> RequestRecord:
        """Check a start as `restart` does and request it; see `await_request`."""
        from dagster_ckpt.stream.start_from import StartFrom

        return self._ask_for_start(self._open(stream), StartFrom.of(start_from))

    def _ask_for_start(
        self,
        stream: StreamHandle,
        start: StartFrom,
        ahead: RewindPreview | None = None,
        *,
        request_id: str | None = None,
        hands_over: bool = False,
        launch_of: str | None = None,
    ) -> RequestRecord:
        """With `hands_over`, the launched run checks its code while the query runs."""
        from dagster_ckpt.client.preflight import listed_snapshot, start_preview
        from dagster_ckpt.recovery.rewind_preview import refuse_loss

        ahead = start_preview(stream, start, ahead)
        refuse_loss(stream, ahead, accept_loss=start.accept_loss)
        listed = listed_snapshot(stream, ahead.plan.snapshot)
        return self._catalog.requests.submit(
            stream.stream_id,
            RequestKind.START,
            arguments={
                **start.as_record(),
                **({HANDS_OVER: True} if hands_over else {}),
                **({LAUNCH_OF: launch_of} if launch_of is not None else {}),
            },
            origin=self._origin,
            request_id=request_id,
            holding=listed.snapshot_id if listed is not None else None,
        )

    def accept_plan_change(self, stream: str, fingerprint: str) -> None:
        """Accept, once, that code with the plan of this fingerprint continues from a stream's state."""
        self._catalog.streams.accept_plan(self._id_of(stream), fingerprint)

    def desired_state(self, stream: str) -> DesiredRecord | None:
        """Return a stream's desired state, with the progress of its last upgrade; None if it is not managed."""
        return self._catalog.desired_states.find(self._id_of(stream))

    def set_desired_state(
        self,
        stream: str,
        state: DesiredState | str | None,
        *,
        retry_refused: bool = False,
        accept_plan_change: bool = False,
    ) -> DesiredRecord:
        """Set the desired state of a stream. The supervisor sensor, which must be running, reconciles it.

        Args:
            state: RUNNING, SUSPENDED or CANCELED; None to use the one in the asset's definition.
            retry_refused: Retry a code version that a preflight refused, or that was rolled back.
            accept_plan_change: Accept the plan that the last preflight refused, and retry it.
        """
        opened, desired = self._open(stream), DesiredState(state) if state is not None else None
        opened.register()
        if accept_plan_change:
            row = self._catalog.desired_states.find(opened.stream_id)
            refused = row.preflight.refused_plan if row is not None and row.preflight is not None else None
            if refused is None:
                raise RequestFailedError(
                    f"Stream {opened.stream_id!r} has no plan change to accept: its last preflight did not refuse one. "
                    "Run a preflight first, which shows the differences."
                )
            self._catalog.streams.accept_plan(opened.stream_id, refused)
            retry_refused = True
        return self._catalog.desired_states.put(
            opened.stream_id, desired, origin=self._origin, retry_refused=retry_refused
        )

    def rolls_back_launch(self, stream: str) -> bool:
        """Whether `roll_back_launch` applies: Dagster launches the drivers, and recorded no upgrade."""
        stream_id = self._open(stream).stream_id
        row = self._catalog.desired_states.find(stream_id)
        launched = any(each.launch for each in self._catalog.executions.of_stream(stream_id))
        return launched and (row is None or row.upgrade is None)

    def roll_back_launch(
        self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S, report: Callable[[str], None] = _LOG.info
    ) -> RewindPreview:
        """Return a stream whose drivers Dagster launches to its previous code, and roll back its output.

        The previous driver is launched again, as recorded, from the newest snapshot of its code. Later starts do the
        same until another launch is loaded. The supervisor sensor must be on.

        Args:
            timeout_s: For each step.

        Raises:
            RequestFailedError: No other code ran before, no snapshot of it is left, or its launch cannot be repeated:
                the message says which code to deploy.
            RowsAtRiskError: A sink could lose rows; nothing was changed.
            RequestTimeoutError: No run was launched in time.
        """
        from dagster_ckpt.stream.predecessor import predecessor

        opened = self._open(stream)
        before = predecessor(self._catalog, opened.stream_id)
        if before is None or before.snapshot is None:
            why = "no other code has run before" if before is None else f"no snapshot of {before.describe()} is left"
            raise RequestFailedError(f"Stream {opened.stream_id!r} is not rolled back, nothing was changed: {why}.")
        if before.cannot is not None:
            raise RequestFailedError(
                f"Stream {opened.stream_id!r} is not rolled back, nothing was changed: {before.cannot}. Deploy "
                f"{before.describe()}, and restart the stream from {before.snapshot.snapshot_id}."
            )
        report(f"launching {before.describe()} again")
        start = before.snapshot.snapshot_id
        return self._restart(stream, start, timeout_s=timeout_s, report=report, launch_of=before.execution.execution_id)

    def roll_back_upgrade(
        self, stream: str, *, run_id: str | None = None, report: Callable[[str], None] = _LOG.info
    ) -> UpgradeRecord:
        """Roll a stream back to the snapshot taken before an upgrade; its next start continues there.

        If the new code has started, the upgrade is only marked ROLLING_BACK: the supervisor sensor, which must be
        running, stops the stream and calls this again. If the roll-back is interrupted, repeat it.

        Raises:
            RequestFailedError: The stream has no upgrade to roll back, or no snapshot from before it is left.
            RowsAtRiskError: A sink could lose rows; nothing was changed.
        """
        from dagster_ckpt.client.reconciliation import roll_back

        return roll_back(self._open(stream), run_id=run_id or self._origin, report=report)


def _explain(error: CkptError, report: Callable[[str], None]) -> None:
    report("the running query was not stopped and goes on")
    if isinstance(error, RequestTimeoutError):
        report(
            "no run has checked the start: is the supervisor sensor on, does a loaded code location define the stream, "
            "and is there room for a second run beside the running one? suspend_first stops the query before that"
        )
