"""Client methods that examine streams, apply retention and rebuild a lost catalog."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.client.connection import Connection, given_folder
from dagster_ckpt.errors import CkptError, NothingCommittedError, OptionError
from dagster_ckpt.values.modes import TerminalState
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from dagster_ckpt.catalog.history import PrunedHistory
    from dagster_ckpt.catalog.records import SnapshotRecord, StreamRecord
    from dagster_ckpt.client.cost import RequestBill
    from dagster_ckpt.client.examination import StreamExamination
    from dagster_ckpt.client.health import StreamHealth
    from dagster_ckpt.client.health_facts import HealthSettings
    from dagster_ckpt.client.outputs import RebuiltOutput, SinkCleaning
    from dagster_ckpt.client.rebuild import CatalogRebuild, ContinueFrom, RebuildReport
    from dagster_ckpt.client.retention_preview import RetentionPreview
    from dagster_ckpt.policies.retention import RetentionPolicy
    from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
    from dagster_ckpt.sinks.file_sink_repair import Relocation

HISTORY_DAYS = 90
DAY_MS = 86_400_000


class MaintenanceMethods(Connection):
    def doctor(
        self, stream: str, *, directory: str | None = None, deep: bool = True, deep_snapshots: bool = False
    ) -> StreamExamination:
        """Examine a stream's live directory: what is wrong, how far back it is intact, which snapshot to use.

        Args:
            directory: Another directory than the stream's own.
            deep: Read the content of every state file that a resume needs.
            deep_snapshots: Compare every byte of the recommended snapshot with its digest.
        """
        from dagster_ckpt.client.examination import examine_live_directory

        return examine_live_directory(
            self._open(stream), url=given_folder(directory, "directory"), deep=deep, deep_snapshots=deep_snapshots
        )

    def health(self, stream: str, *, settings: HealthSettings | None = None) -> StreamHealth:
        """Evaluate the health checks of a stream from the catalog; default thresholds: `HealthSettings()`."""
        from dagster_ckpt.client.health import stream_health
        from dagster_ckpt.client.health_facts import HealthSettings

        return stream_health(self._open(stream), settings or HealthSettings())

    def cost(self, stream: str, *, prices: Mapping[str, float] | None = None) -> RequestBill:
        """Estimate the requests, bytes and cost of a stream in an object store for a day.

        Args:
            prices: By name, as in `Prices`; default: the list price of S3 Standard.

        Raises:
            NothingCommittedError: The stream has not taken two checkpoints within a day.
        """
        from dagster_ckpt.client.cost import Prices, request_bill

        return request_bill(self._open(stream), Prices.of(prices or {}))

    def apply_retention(
        self,
        stream: str,
        *,
        state: TerminalState | str | None = None,
        execution_id: str | None = None,
        dry_run: bool = False,
    ) -> RetentionReport:
        """Finish interrupted deletions, remove orphaned bytes and, on request, apply the clean-up option.

        Args:
            state: How it ended (FINISHED, CANCELED, FAILED, SUSPENDED); None: no completed snapshot is deleted.
            execution_id: The execution that ended; default: the newest one.
            dry_run: Only report what would be deleted and removed.
        """
        from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, housekeeping
        from dagster_ckpt.runtime.execution_end import settle_execution

        opened, ended = self._open(stream), TerminalState(state) if state is not None else None
        finished = housekeeping(opened, dry_run=dry_run)
        if ended is None:
            return finished
        if execution_id is None:
            latest = self._catalog.executions.latest(opened.stream_id)
            if latest is None:
                raise NothingCommittedError(
                    f"Stream {opened.stream_id!r} was never started: there is nothing to keep or delete."
                )
            execution_id = latest.execution_id
        if dry_run:
            return finished.and_then(apply_terminal_retention(opened, execution_id, ended, dry_run=True))
        return finished.and_then(settle_execution(opened, execution_id, ended))

    def apply_retention_to_all(
        self, *, dry_run: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, RetentionReport]:
        """Finish interrupted deletions and remove orphaned bytes of every stream; returns the reports by stream id.

        A stream that cannot be opened is reported as failed. `progress` is called with (done, all) after each stream.
        """
        from dagster_ckpt.recovery.checkpoint_retention import RetentionReport

        reports = {}
        streams = [record.stream_id for record in self._catalog.streams.all()]
        for stream in streams:
            try:
                reports[stream] = self.apply_retention(stream, dry_run=dry_run)
            except CkptError as error:
                reports[stream] = RetentionReport(failed=(str(error),), dry_run=dry_run)
            if progress is not None:
                progress(len(reports), len(streams))
        return reports

    def preview_retention(
        self, stream: str, policy: RetentionPolicy | Mapping[str, object] | None = None, *, history: bool = False
    ) -> RetentionPreview:
        """Report what a retention policy would keep of a stream's checkpoints, and why. Deletes nothing.

        Args:
            policy: Also as data, such as {"keep_rules": {"daily": 7}}. Default: the stream's own.
            history: As if it had decided after each checkpoint that the catalog remembers, deleted ones included.

        Example:
            >>> client.preview_retention("orders", MaxBytes(500 * 10**9, of=KeepRules(last=3, daily=30))).kept_bytes
            411270311936
        """
        from dagster_ckpt.client.retention_preview import preview_retention
        from dagster_ckpt.policies.retention import checked_retention
        from dagster_ckpt.policies.serialization import read_retention

        opened = self._open(stream)
        chosen = read_retention(policy) if isinstance(policy, Mapping) else policy or opened.options.retention_policy
        return preview_retention(opened, checked_retention(chosen), history=history)

    def apply_savepoint_history(self, stream: str, *, schedule: str, history: RetentionPolicy) -> RetentionReport:
        """Delete the savepoints that a schedule took and that its history does not keep.

        Savepoints that another schedule or a user took, or that a start claimed, stay, as do the preferred, newest and
        newest proven ones, the newest one without known damage, and the one that the current timeline began with. Ages
        are by the catalog's clock.
        """
        from dagster_ckpt.policies.retention import KeptBecause, RetentionContext, decide_retention, needed_of_history
        from dagster_ckpt.recovery.checkpoint_retention import RetentionReport, discard, newest_proven
        from dagster_ckpt.stream.snapshots import describe_snapshot, retained
        from dagster_ckpt.values.modes import SnapshotKind
        from dagster_ckpt.values.validation import policy_name

        opened, snapshots = self._open(stream), self._catalog.snapshots
        record = self._catalog.streams.get(opened.stream_id)
        proven = newest_proven(snapshots.restorable(opened.stream_id))
        listed = snapshots.of_stream(opened.stream_id, kind=SnapshotKind.SAVEPOINT, status=SnapshotStatus.COMPLETED)
        taken = {each.snapshot_id: each for each in reversed(listed) if each.schedule == schedule and not each.claimed}
        held = {
            each.snapshot_id: why for each in taken.values() if (why := _held_because(each, record, proven)) is not None
        }
        queue = [retained(each) for each in taken.values()]
        context = RetentionContext(self._catalog.now_ms())
        broken = {each.snapshot_id for each in taken.values() if each.verified_problem is not None}
        decision = decide_retention(history, queue, context, needed=needed_of_history(queue, held, broken=broken))
        because = {
            snapshot_id: "the newer ones are known to be broken"
            for snapshot_id, why in decision.kept.items()
            if why is KeptBecause.NEWEST and snapshot_id != queue[-1].snapshot_id
        }
        kept = tuple(f"{describe_snapshot(taken[name])}: {why}" for name, why in {**held, **because}.items())
        if decision.problem is not None:
            kept += (f"everything: the history of {schedule} failed: {decision.problem}",)
        doomed = [taken[each.snapshot_id] for each in decision.dropped]
        why = f"history of {schedule}: {policy_name(history)}"
        return RetentionReport(kept=kept).and_then(discard(opened, doomed, reason=why, lease=None))

    def prune_history(
        self, stream: str, *, older_than_days: int = HISTORY_DAYS, dry_run: bool = False
    ) -> PrunedHistory:
        """Delete old rows of a stream's history from the catalog; `PruningRecords.prune` says which stay.

        Args:
            older_than_days: Younger rows stay. The catalog sensor must have read the older events.
        """
        if older_than_days < 1:
            raise OptionError(f"older_than_days is {older_than_days}, but must be at least 1.")
        before_ms = self._catalog.now_ms() - older_than_days * DAY_MS
        return self._catalog.pruning.prune(self._id_of(stream), before_ms=before_ms, dry_run=dry_run)

    def sweep(self, stream: str, *, dry_run: bool = True, older_than_ms: int | None = None) -> RetentionReport:
        """Report, or without `dry_run` remove, bytes in the storage that no snapshot refers to.

        Args:
            older_than_ms: Younger bytes stay, by the storage's clock. Default: six hours, or twice the checkpoint
                timeout if that is longer.
        """
        from dagster_ckpt.recovery.checkpoint_retention import housekeeping

        return housekeeping(self._open(stream), older_than_ms=older_than_ms, dry_run=dry_run)

    def output_files(self, stream: str) -> list[str]:
        """List the files that a stream's file sinks have committed, sorted.

        Readers that do not follow Spark's log of the folder (pandas, Polars, DuckDB) would also read undone and
        unfinished batches. List the files again after a rewind.

        Example:
            >>> pandas.concat(pandas.read_parquet(path) for path in client.output_files("orders"))

        Raises:
            SinkRollbackError: A log is incomplete, lists files of another folder, or the next start undoes batches.
        """
        from dagster_ckpt.client.outputs import output_files

        return output_files(self._open(stream))

    def clean_sinks(self, stream: str, *, dry_run: bool = True, grace_ms: int | None = None) -> SinkCleaning:
        """Report, or without `dry_run` delete, part files that the logs of rolled-back file sinks no longer name.

        Args:
            dry_run: Only report what would be deleted.
            grace_ms: Younger files stay. Default: one day.

        Raises:
            SharedSinkError: A folder no longer belongs to the stream, or its log is missing.
        """
        from dagster_ckpt.client.outputs import clean_sinks

        return clean_sinks(self._open(stream), dry_run=dry_run, grace_ms=grace_ms)

    def relocate_output(self, folder: str, *, dry_run: bool = False) -> Relocation:
        """Let the log of a file sink list the files in its folder, after that was moved or copied.

        No stream that writes there may be running. Files are found by name and length; if one is missing, nothing
        changes.
        """
        from dagster_ckpt.client.outputs import relocate_output

        return relocate_output(self._catalog, location_url("folder", folder), dry_run=dry_run)

    def rebuild_output_logs(self, stream: str, *, dry_run: bool = False) -> list[RebuiltOutput]:
        """Rebuild the lost or incomplete logs of a stream's file sinks from the snapshots that captured them.

        Every file that the logs list must exist.

        Args:
            stream: The stream; it must not be running.

        Raises:
            SinkRollbackError: The log cannot be rebuilt; nothing was changed.
        """
        from dagster_ckpt.client.outputs import rebuild_output_logs

        return rebuild_output_logs(self._open(stream), dry_run=dry_run, origin=self._origin)

    def rebuild(
        self, stream: str, *, take_over_deployment: str | None = None, continue_from: str | None = None
    ) -> RebuildReport:
        """Rebuild a lost catalog: register the existing snapshots and live directories of a stream.

        Args:
            stream: The stream; it must not be running, not even under another catalog.
            take_over_deployment: Id of the deployment whose catalog was lost, as errors name it; nothing of it may run.
            continue_from: "live" or "newest": where the stream continues if its live directory is older than a snapshot
                of it; None: refuse.

        Raises:
            CatalogError: This catalog is in use by its own deployment.
            LiveDirectoryError: The files belong to another deployment, named in the message, or the live directory is
                an old copy.
            StorageAccessError: A snapshot could not be read; nothing was registered.
        """
        from dagster_ckpt.client.rebuild import rebuild

        opened, chosen = self._open(stream, new_like=stream), _continue_from(continue_from)
        return rebuild(opened, origin=self._origin, take_over_deployment=take_over_deployment, continue_from=chosen)

    def rebuild_all(
        self, *, take_over_deployment: str | None = None, continue_from: str | None = None
    ) -> CatalogRebuild:
        """Rebuild a lost catalog from storage alone: every stream found in `storage` and `live_root`."""
        from dagster_ckpt.client.rebuild import CatalogRebuild

        chosen, done, refused = _continue_from(continue_from), [], {}
        ours = {None, self._catalog.deployment_id, take_over_deployment}
        for stream, deployment in sorted(self._streams.on_storage().items()):
            if deployment not in ours:
                continue
            try:
                done.append(self.rebuild(stream, take_over_deployment=take_over_deployment, continue_from=chosen))
            except CkptError as error:
                refused[stream] = str(error)
        return CatalogRebuild(tuple(done), refused)


def _continue_from(value: str | None) -> ContinueFrom | None:
    from dagster_ckpt.client.rebuild import ContinueFrom

    if value is None:
        return None
    try:
        return ContinueFrom(value)
    except ValueError as error:
        raise OptionError(f"continue_from is {value!r}, but must be 'live' or 'newest'.") from error


def _held_because(snapshot: SnapshotRecord, stream: StreamRecord, proven: Collection[str]) -> str | None:
    if snapshot.snapshot_id == stream.preferred_savepoint_id:
        return "it is the preferred savepoint"
    if snapshot.snapshot_id == stream.restored_snapshot_id:
        return "the current timeline began with it"
    if snapshot.snapshot_id in proven:
        return "it is the newest snapshot whose state was loaded with success"
    return None
