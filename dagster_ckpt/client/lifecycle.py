"""Methods of the client that stop, start, rewind, fork, adopt and export streams, and set their desired states."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from dagster_ckpt.catalog.records import HANDS_OVER, IS_LAUNCHED, RequestKind
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.connection import Connection, checked_target, given_folder
from dagster_ckpt.errors import CkptError, LeaseHeldError, OptionError, RequestFailedError, RequestTimeoutError
from dagster_ckpt.values.modes import DesiredState, RecoveryClaimMode, TerminalState

if TYPE_CHECKING:
    from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradeRecord
    from dagster_ckpt.catalog.records import ExecutionRecord, RequestRecord, SnapshotRecord
    from dagster_ckpt.client.export import Export
    from dagster_ckpt.recovery.adopt import Adoption
    from dagster_ckpt.recovery.fork import Fork
    from dagster_ckpt.recovery.retention import RetentionReport
    from dagster_ckpt.recovery.rewind_preview import RewindPreview
    from dagster_ckpt.spark.checkpoint_dir.restore import Progress
    from dagster_ckpt.stream.handle import StreamHandle
    from dagster_ckpt.stream.start_from import StartFrom

_LOG = logging.getLogger(__name__)


class StartOptions(TypedDict, total=False):
    """Options of a start, besides its starting point; see `StartFrom`.

    Attributes:
        new_query_id: Continue under a new query id: sinks that remember query ids (Delta, Iceberg) write
            the rewound batches again instead of skipping them.
        accept_loss: Start even if a sink would lose rows.
        claim_mode: Who owns the snapshot that the stream starts from.
        accept_plan_change: Start even if the code needs different state from what is stored.
        discard_state: Confirms that an empty start may discard all existing state.
        no_safety_savepoint: Do not take a savepoint of the current state before a rewind.
        source_offsets: Where Kafka sources continue, as JSON; see `StartFrom.parse`.
        state_partitions: Rewrite the state to this number of partitions before the query starts.
    """

    new_query_id: bool
    accept_loss: bool
    claim_mode: RecoveryClaimMode | str
    accept_plan_change: bool
    discard_state: bool
    no_safety_savepoint: bool
    source_offsets: str
    state_partitions: int | None


@dataclass(frozen=True)
class StopResult:
    """How a stream was stopped.

    Attributes:
        stream_id: The stream.
        was_running: Whether a query was running; otherwise the stream was between two restarts.
        savepoint: The savepoint that it was stopped with, or None.
        retention: What the clean-up option deleted and kept, if it was applied here. The process of a
            running query applies it itself.
    """

    stream_id: str
    was_running: bool
    savepoint: SnapshotRecord | None = None
    retention: RetentionReport | None = None

    def messages(self) -> list[str]:
        """The result as log messages."""
        from dagster_ckpt.stream.snapshots import describe_snapshot

        if self.was_running:
            lines = [f"the running query of {self.stream_id} was stopped"]
        else:
            lines = [f"{self.stream_id} was between two restarts, and will not be restarted"]
        if self.savepoint is not None:
            lines.append(f"{describe_snapshot(self.savepoint)}: {self.savepoint.location}")
        return [*lines, *(self.retention.messages() if self.retention is not None else ())]


_UNCHECKED = (
    "the plan and the sources of the new code are checked by its start only, after the running query is suspended: if "
    "they are refused, the stream is down until you put the previous code back and start it"
)


class LifecycleMethods(Connection):
    """Stops, starts, rewinds, forks, adoptions, exports, desired states."""

    def stop(
        self,
        stream: str,
        *,
        savepoint: bool = True,
        label: str | None = None,
        target_directory: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> StopResult:
        """Stop a stream and keep everything, so that it can be started again. It is not restarted if it failed.

        Args:
            stream: The stream.
            savepoint: Stop it at a batch boundary with a savepoint of the final state. If the savepoint
                fails, the query continues.
            label: A name for the savepoint.
            target_directory: Folder for the savepoint, instead of the configured one.
            timeout_s: How long to wait.

        Raises:
            RequestFailedError: The stream is not running, or the savepoint failed. Without a savepoint,
                a stream that waits for its restart can be stopped too.
            RequestTimeoutError: It did not stop in time.
        """
        from dagster_ckpt.client.requests import ask, await_stop, require_running, snapshot_of

        opened = self._open(stream)
        if not savepoint:
            if label is not None or target_directory is not None:
                raise OptionError(
                    "label and target_directory are for a savepoint, but savepoint is False. Leave them out."
                )
            return self._end(opened, RequestKind.SUSPEND, timeout_s)
        arguments = {"label": label, "target_directory": checked_target(label, target_directory)}
        require_running(opened, "stopped with a savepoint")
        answer = ask(opened, RequestKind.STOP_WITH_SAVEPOINT, arguments, origin=self._origin, timeout_s=timeout_s)
        taken = snapshot_of(opened, answer)
        await_stop(opened, timeout_s)
        return StopResult(opened.stream_id, was_running=True, savepoint=taken)

    def cancel(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
        """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted.

        Raises:
            RequestFailedError: The stream is not running, and no restart is pending.
            RequestTimeoutError: It did not stop in time.
        """
        return self._end(self._open(stream), RequestKind.CANCEL, timeout_s)

    def _end(self, stream: StreamHandle, kind: RequestKind, timeout_s: float) -> StopResult:
        """Suspend or cancel a stream that is running, or that failed and waits for its restart."""
        from dagster_ckpt.client.requests import ask, await_stop, require_running
        from dagster_ckpt.runtime.settlement import settle_execution

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
        """Keep a stream down whose last execution awaits a restart; returns that execution, or None."""
        from dagster_ckpt.client.requests import is_running
        from dagster_ckpt.runtime.run import EndKind, QueryEnd
        from dagster_ckpt.runtime.settlement import stop_before_restart
        from dagster_ckpt.stream.lease import LeaseKeeper, acquire
        from dagster_ckpt.stream.liveness import this_holder

        last = self._catalog.executions.latest(stream.stream_id)
        if last is None or last.settled or is_running(stream):
            return None
        try:
            # A restart that begins in the meantime holds the lease and gets a request like any running
            # stream.
            acquired = acquire(self._catalog, stream.stream_id, this_holder(f"stop-{uuid.uuid4()}", self._origin, None))
        except LeaseHeldError:
            return None
        verb = "canceled" if cancels else "suspended"
        reason = f"{verb} by {self._origin} between two restarts; it had ended {last.status.value}: {last.reason}"
        end = QueryEnd(EndKind.CANCEL_REQUESTED if cancels else EndKind.SUSPENDED, reason)
        with LeaseKeeper(self._catalog, acquired.record) as lease:
            found = stop_before_restart(self._catalog, lease.record, last.execution_id, end)
        return last.execution_id if found else None

    def preview_rewind(
        self, stream: str, *, start_from: str | StartFrom = "latest", **options: Unpack[StartOptions]
    ) -> RewindPreview:
        """What a start would undo and process again, and the effect on each sink. Changes nothing.

        Args:
            stream: The stream; it may be running.
            start_from: As in `restart`.
            options: See `StartOptions`.

        Raises:
            SnapshotNotFoundError: The named snapshot does not exist.
            LiveDirectoryError: There is no state to start from, or the batch is not retained.
            StateRewriteError: The state cannot be rewritten to `state_partitions`.
            UnsupportedSparkError: The installed Spark cannot rewrite state.
        """
        from dagster_ckpt.client.start_check import start_preview
        from dagster_ckpt.stream.start_from import StartPoint

        point = _start_from(start_from, options)
        if point.point is StartPoint.EMPTY:
            # A preview discards no state, so it needs no confirmation.
            point = replace(point, discard_state=True)
        return start_preview(self._open(stream), point)

    def restart(
        self,
        stream: str,
        *,
        start_from: str | StartFrom = "latest",
        ahead: RewindPreview | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        report: Callable[[str], None] = _LOG.info,
        suspend_first: bool = False,
        **options: Unpack[StartOptions],
    ) -> RewindPreview:
        """Start a stream, suspending it first if it is running. Returns once the query is started.

        What the catalog, the storage and the sinks tell is checked first. The run is launched by the supervisor
        sensor, which must be turned on. It checks what only the new code tells (its plan, its sources and its sink)
        beside the running query, and then suspends it. If the start is refused, or no run is launched, the query runs
        on. If a person or a service runs the program of the stream instead, or with `suspend_first`, the query is
        suspended first and the start checks the code: if that is refused, the query is started again from where it
        stopped, unless that is what was refused. The snapshot to start from is held all the time.

        Args:
            stream: The stream.
            start_from: `latest` (continue where the query stopped), `latest-checkpoint`,
                `latest-savepoint`, `preferred-savepoint`, `empty` (discard all state), `batch-<n>` (back
                to a batch that Spark still retains), or the name of a snapshot.
            ahead: What `preview_rewind` has returned for this start, with the same options: the sinks are not asked
                again, unless the stream would now start from another point.
            timeout_s: How long to wait for each step.
            report: Called with a message for every step.
            suspend_first: Suspend a running query before the new run is launched, where both have no room.
            options: See `StartOptions`.

        Returns:
            What the start undid.

        Raises:
            SnapshotNotFoundError: The named snapshot does not exist; a running stream continues.
            LiveDirectoryError: There is no state to start from; a running stream continues.
            RowsAtRiskError: A sink could lose rows, and `accept_loss` is not set; a running stream
                continues.
            StateRewriteError: The state cannot be rewritten to `state_partitions`; a running stream
                continues.
            RequestFailedError: The start failed.
            RequestTimeoutError: No run was launched in time.
        """
        from dagster_ckpt.client.requests import await_answer, await_stop, is_running, withdrawing
        from dagster_ckpt.client.start_check import start_preview
        from dagster_ckpt.recovery.rewind_preview import refuse_loss
        from dagster_ckpt.stream.snapshots import holding
        from dagster_ckpt.stream.start_from import StartFrom

        opened, point = self._open(stream), _start_from(start_from, options)
        ahead = start_preview(opened, point, ahead)
        for message in ahead.messages():
            report(message)
        refuse_loss(opened, ahead, accept_loss=point.accept_loss)
        self._refuse_undefined(opened)
        was_running, before = is_running(opened), self._catalog.executions.latest(opened.stream_id)
        is_launched = before is not None and bool((before.recovery or {}).get(IS_LAUNCHED))
        hands_over = was_running and is_launched and not suspend_first
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
                request = self._ask_for_start(opened, point, ahead, request_id=request_id, hands_over=hands_over)
            except CkptError as error:
                # For example a batch that Spark has purged in the meantime.
                if suspends:
                    self._go_on(opened, report, error)
                raise
            if hands_over:
                report("the new run checks its code while the query runs, and then suspends it")
            report(
                "waiting for the supervisor sensor, which must be on, or for the service that runs the program, to "
                "start it"
            )
            try:
                await_answer(opened, request, timeout_s=timeout_s)
            except (RequestFailedError, RequestTimeoutError) as error:
                if hands_over and self._is_same_query(opened, before):
                    _explain(error, report)
                    raise
                if isinstance(error, RequestFailedError):
                    # The process that has refused the start answers before it ends.
                    await_stop(opened, timeout_s)
                if was_running and point != StartFrom() and not is_running(opened):
                    self._go_on(opened, report, error)
                raise
        return ahead

    def _refuse_undefined(self, stream: StreamHandle) -> None:
        """Refuse to stop a query that no loaded code could start again, as far as the supervisor has reported it."""
        from dagster_ckpt.catalog.desired_states import AlertUntil
        from dagster_ckpt.client.requests import is_running

        row = self._catalog.desired_states.find(stream.stream_id)
        if row is not None and row.alert_until is AlertUntil.DEFINED and is_running(stream):
            raise RequestFailedError(f"Stream {stream.stream_id!r} is not restarted, nothing was changed: {row.alert}.")

    def _is_same_query(self, stream: StreamHandle, before: ExecutionRecord | None) -> bool:
        """Whether the query of an execution still runs."""
        from dagster_ckpt.client.requests import is_running

        now = self._catalog.executions.latest(stream.stream_id)
        return is_running(stream) and now is not None and before is not None and now.execution_id == before.execution_id

    def _go_on(self, stream: StreamHandle, report: Callable[[str], None], error: CkptError) -> None:
        """Start a query again that was suspended for a start that is refused."""
        self._ask_for_start(stream, _start_from("latest", {}))
        report(f"the start was refused ({error}), so the query is started again where it stopped")

    def _ask_for_start(
        self,
        stream: StreamHandle,
        start_from: StartFrom,
        ahead: RewindPreview | None = None,
        *,
        request_id: str | None = None,
        hands_over: bool = False,
    ) -> RequestRecord:
        """Check a start and request it. `hands_over`: the run that is launched checks its code beside the query."""
        from dagster_ckpt.client.start_check import listed_snapshot, start_preview
        from dagster_ckpt.recovery.rewind_preview import refuse_loss

        ahead = start_preview(stream, start_from, ahead)
        refuse_loss(stream, ahead, accept_loss=start_from.accept_loss)
        listed = listed_snapshot(stream, ahead.plan.snapshot)
        return self._catalog.requests.submit(
            stream.stream_id,
            RequestKind.START,
            arguments={**start_arguments(start_from), **({HANDS_OVER: True} if hands_over else {})},
            origin=self._origin,
            request_id=request_id,
            holding=listed.snapshot_id if listed is not None else None,
        )

    def request_start(
        self, stream: str, *, start_from: str | StartFrom = "latest", **options: Unpack[StartOptions]
    ) -> RequestRecord:
        """Request a start without waiting for it; see `await_request`. The starting point is checked first.

        Args:
            stream: The stream.
            start_from: As in `restart`.
            options: See `StartOptions`.
        """
        return self._ask_for_start(self._open(stream), _start_from(start_from, options))

    def accept_plan_change(self, stream: str, fingerprint: str) -> None:
        """Accept, once, that code with a different plan continues from a stream's state.

        Args:
            stream: The stream.
            fingerprint: Fingerprint of the plan, as shown in the error; other changes are still refused.
        """
        self._catalog.streams.accept_plan(self._id_of(stream), fingerprint)

    def fork(
        self,
        stream: str,
        *,
        into: str,
        start_from: str | StartFrom = "latest",
        outputs: Mapping[str, str] | None = None,
        replace_state: bool = False,
        accept_loss: bool = False,
    ) -> Fork:
        """Fork a stream into another one, an independent query whose next start continues from there.

        Args:
            stream: The stream to fork; it may be running and is not changed.
            into: The stream that continues from it; it must not be running.
            start_from: `latest` (the newest committed batch), `batch-<n>`, or the name of a snapshot.
            outputs: Folders of the original's file sinks, mapped to folders of the fork that receive the
                rows up to the fork.
            replace_state: Discard what the other stream itself has committed.
            accept_loss: Fork even if files that the original has read since no longer exist.
        """
        from dagster_ckpt.recovery.fork import fork

        point = _start_from(start_from, {"accept_loss": True} if accept_loss else {})
        original = self._open(stream)
        made = self._open(into, new_like=original.stream_id)
        return fork(original, made, point, origin=self._origin, outputs=outputs, replace_state=replace_state)

    def import_snapshot(
        self,
        location: str,
        *,
        into: str,
        outputs: Mapping[str, str],
        with_rows: bool = False,
        replace_state: bool = False,
        progress: Progress | None = None,
    ) -> Fork:
        """Import a snapshot of another deployment into a stream, whose next start continues from there.

        Args:
            location: Location of the snapshot; it is read and not changed.
            into: The stream that continues from it; it must not be running.
            outputs: Each sink that the snapshot names, mapped to where the stream writes instead.
            with_rows: Copy the rows of the original's file sinks up to the snapshot.
            replace_state: Discard what the stream itself has committed.
            progress: Called after each file of the snapshot with the number of files that are done and of all.
        """
        from dagster_ckpt.recovery.import_snapshot import import_snapshot

        return import_snapshot(
            self._open(into, new_like=into),
            location,
            outputs=outputs,
            origin=self._origin,
            with_rows=with_rows,
            replace_state=replace_state,
            progress=progress,
        )

    def adopt(
        self,
        stream: str,
        *,
        checkpoint_location: str,
        sinks: Sequence[str] = (),
        in_place: bool = False,
        label: str | None = None,
        dry_run: bool = False,
    ) -> Adoption:
        """Take the checkpoint directory of a plain Spark query under management; the stream's next start continues it.

        The directory is only read, and the first snapshot is taken of it; the query may keep running until
        that start, which fences it. If it is interrupted, repeat it, or drop it with `undo_adoption`.

        Args:
            stream: The stream that continues the query; it must not have any state yet.
            checkpoint_location: The `checkpointLocation` of the query.
            sinks: Where the query writes: a folder of files, a Delta table by its path, or another
                sink by Spark's name; an Iceberg table as `IcebergTable[lake.sales.orders]`.
            in_place: Continue in the directory itself, instead of in a copy.
            label: A name of the first snapshot.
            dry_run: Only examine the directory.

        Raises:
            LiveDirectoryError: The directory is damaged, managed by a stream, or was taken over before.
            SharedSinkError: The log of a named sink is not that of this query.
            RequestFailedError: The stream already has state, or has adopted another directory.
        """
        from dagster_ckpt.recovery.adopt import adopt
        from dagster_ckpt.stream.start_from import checked_label

        location = given_folder(checkpoint_location, "checkpoint_location") or ""
        return adopt(
            self._open(stream, new_like=stream),
            location,
            sinks=sinks,
            in_place=in_place,
            label=checked_label(label),
            dry_run=dry_run,
            origin=self._origin,
        )

    def undo_adoption(self, stream: str) -> list[str]:
        """Drop an adoption, finished or not, that no start has taken over; returns what was done.

        The snapshots that were taken of the adopted directory are deleted; the directory is not touched.

        Args:
            stream: The stream, which has no state afterwards.

        Raises:
            RequestFailedError: There is no such adoption, or a snapshot of it is still in use.
        """
        from dagster_ckpt.recovery.adopt import undo_adoption

        return undo_adoption(self._open(stream), origin=self._origin)

    def export(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        to: str,
        outputs: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Export:
        """Export a snapshot as a checkpoint directory in which plain Spark continues, without this package.

        Args:
            stream: The stream; it may be running and is not changed.
            snapshot: `latest`, or the name of a snapshot.
            to: The directory to create; it must not exist.
            outputs: Folders of the snapshot's file sinks, mapped to new folders that receive their rows up
                to the snapshot.
            progress: As in `import_snapshot`.

        Raises:
            SnapshotNotFoundError: There is no such snapshot.
            RestoreError: The directory exists.
            SharedSinkError: A new folder is in use.
        """
        from dagster_ckpt.client.export import export_snapshot

        folder = given_folder(to, "to") or ""
        for new in (outputs or {}).values():
            given_folder(new, "outputs")
        return export_snapshot(self._open(stream), snapshot, folder, outputs=outputs, progress=progress)

    def desired_state(self, stream: str) -> DesiredRecord | None:
        """The desired state of a stream and the progress of its last upgrade; None if it is not managed."""
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
            stream: The stream.
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

    def roll_back_upgrade(
        self, stream: str, *, run_id: str | None = None, report: Callable[[str], None] = _LOG.info
    ) -> UpgradeRecord:
        """Roll a stream back to the snapshot taken before a failed upgrade; its next start continues there.

        Args:
            stream: The stream; it must not be running.
            run_id: The Dagster run that does it, if any, as the lease shows it.
            report: Called with a message for every step.
        """
        from dagster_ckpt.client.reconciliation import roll_back

        return roll_back(self._open(stream), run_id=run_id or self._origin, report=report)


def _start_from(start_from: str | StartFrom, options: StartOptions) -> StartFrom:
    from dagster_ckpt.stream.start_from import StartFrom

    if isinstance(start_from, str):
        return StartFrom.parse(start_from, **options)
    if options:
        raise OptionError(f"start_from is a StartFrom, which has {', '.join(options)} itself. Set them there.")
    return start_from


def start_arguments(start_from: StartFrom) -> dict[str, str | bool | int]:
    """The arguments of a START request for a starting point."""
    partitions = start_from.state_partitions
    return {
        "start_from": str(start_from),
        "new_query_id": start_from.new_query_id,
        "accept_loss": start_from.accept_loss,
        "claim_mode": start_from.claim_mode.value,
        "accept_plan_change": start_from.accept_plan_change,
        "discard_state": start_from.discard_state,
        "no_safety_savepoint": start_from.no_safety_savepoint,
        **({"source_offsets": start_from.source_offsets} if start_from.source_offsets else {}),
        **({} if partitions is None else {"state_partitions": partitions}),
    }


def _explain(error: CkptError, report: Callable[[str], None]) -> None:
    report("the running query was not stopped and goes on")
    if isinstance(error, RequestTimeoutError):
        report(
            "no run has checked the start: is the supervisor sensor on, does a loaded code location define the stream, "
            "and is there room for a second run beside the running one? suspend_first stops the query before that"
        )
