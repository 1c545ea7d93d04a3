"""Methods of the client that stop, start, rewind, fork, adopt and export streams, and set their desired states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.connection import Connection, given_folder
from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.modes import DesiredState

if TYPE_CHECKING:
    from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradeRecord
    from dagster_ckpt.catalog.records import RequestRecord
    from dagster_ckpt.operations.export import Export
    from dagster_ckpt.operations.lifecycle import StopResult
    from dagster_ckpt.recovery.adopt import Adoption
    from dagster_ckpt.recovery.fork import Fork
    from dagster_ckpt.recovery.rewind_preview import RewindPreview
    from dagster_ckpt.spark.checkpoint_dir.restore import Progress
    from dagster_ckpt.stream.start_from import StartFrom

_LOG = logging.getLogger(__name__)


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
        """Stop a stream and keep everything, so that it can be started again.

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
        from dagster_ckpt.operations import lifecycle

        opened = self._open(stream)
        if savepoint:
            return lifecycle.stop_with_savepoint(
                opened,
                origin=self._origin,
                label=label,
                target_directory=given_folder(target_directory),
                timeout_s=timeout_s,
            )
        if label is not None or target_directory is not None:
            raise OptionError("label and target_directory are for a savepoint, but savepoint is False. Leave them out.")
        return lifecycle.suspend(opened, origin=self._origin, timeout_s=timeout_s)

    def cancel(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> StopResult:
        """Cancel a stream; its clean-up option decides whether checkpoints are kept or deleted.

        Raises:
            RequestFailedError: The stream is not running, and no restart is pending.
            RequestTimeoutError: It did not stop in time.
        """
        from dagster_ckpt.operations import lifecycle

        return lifecycle.cancel(self._open(stream), origin=self._origin, timeout_s=timeout_s)

    def preview_rewind(self, stream: str, *, start_from: str | StartFrom = "latest") -> RewindPreview:
        """What a start would undo and process again, and the effect on each sink. Changes nothing.

        Args:
            stream: The stream; it may be running.
            start_from: As in `restart`.

        Raises:
            SnapshotNotFoundError: The named snapshot does not exist.
            LiveDirectoryError: There is no state to start from, or the batch is not retained.
            StateRewriteError: The state cannot be rewritten to `state_partitions`.
            UnsupportedSparkError: The installed Spark cannot rewrite state.
        """
        from dagster_ckpt.operations import lifecycle
        from dagster_ckpt.stream.start_from import StartFrom, StartPoint

        start = StartFrom.of(start_from)
        if start.point is StartPoint.EMPTY:
            # A preview discards no state, so it needs no confirmation.
            start = replace(start, discard_state=True)
        return lifecycle.preview(self._open(stream), start)

    def restart(
        self,
        stream: str,
        *,
        start_from: str | StartFrom = "latest",
        timeout_s: float = REQUEST_TIMEOUT_S,
        report: Callable[[str], None] = _LOG.info,
        suspend_first: bool = False,
    ) -> RewindPreview:
        """Start a stream, suspending it first if it is running. Returns once the query is started.

        The run is launched by the supervisor sensor, which must be turned on. It checks its code beside the running
        query, which runs on if the start is refused. If a person or a service runs the program of the stream instead,
        the query is suspended first, and the next start of the program checks its code.

        Args:
            stream: The stream.
            start_from: Where to start; a `StartFrom` if the start has options.
            timeout_s: How long to wait for each step.
            report: Called with a message for every step.
            suspend_first: Suspend a running query before the new run is launched, where both have no room.

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
        from dagster_ckpt.operations.restart import restart
        from dagster_ckpt.stream.start_from import StartFrom

        return restart(
            self._open(stream),
            StartFrom.of(start_from),
            origin=self._origin,
            timeout_s=timeout_s,
            report=report,
            suspend_first=suspend_first,
        )

    def request_start(self, stream: str, *, start_from: str | StartFrom = "latest") -> RequestRecord:
        """Request a start without waiting for it; see `await_request`. The starting point is checked first.

        Args:
            stream: The stream.
            start_from: As in `restart`.
        """
        from dagster_ckpt.operations import lifecycle
        from dagster_ckpt.stream.start_from import StartFrom

        return lifecycle.request_start(self._open(stream), StartFrom.of(start_from), origin=self._origin)

    def accept_plan_change(self, stream: str, fingerprint: str) -> None:
        """Accept, once, that code with a different plan continues from a stream's state.

        Args:
            stream: The stream.
            fingerprint: Fingerprint of the plan, as shown in the error; other changes are still refused.
        """
        from dagster_ckpt.operations import lifecycle

        lifecycle.accept_plan_change(self._open(stream), fingerprint)

    def fork(
        self,
        stream: str,
        *,
        into: str,
        start_from: str = "latest",
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
        from dagster_ckpt.stream.start_from import StartFrom

        start = StartFrom(start_from, accept_loss=accept_loss)
        original = self._open(stream)
        made = self._open(into, new_like=original.stream_id)
        return fork(original, made, start, origin=self._origin, outputs=outputs, replace_state=replace_state)

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
        from dagster_ckpt.operations.export import export_snapshot

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
        from dagster_ckpt.operations import lifecycle

        return lifecycle.set_desired_state(
            self._open(stream),
            DesiredState(state) if state is not None else None,
            origin=self._origin,
            retry_refused=retry_refused,
            accept_plan_change=accept_plan_change,
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
        from dagster_ckpt.operations.rollback import roll_back

        return roll_back(self._open(stream), run_id=run_id or self._origin, report=report)
