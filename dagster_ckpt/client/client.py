"""`Client`, which needs neither Dagster nor Spark.

A running stream receives a request through the catalog; one that is not running is changed directly, under the lease
that a run would take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.client.connection import given_folder
from dagster_ckpt.client.graph import GraphMethods
from dagster_ckpt.client.maintenance import MaintenanceMethods
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.records import SnapshotRecord
    from dagster_ckpt.client.debugging import BatchDebug
    from dagster_ckpt.client.derived_savepoint import EditedState, RemainingState
    from dagster_ckpt.client.description import SnapshotDescription, StreamDescription, StreamSummary
    from dagster_ckpt.client.export import Export
    from dagster_ckpt.client.replication import Replication
    from dagster_ckpt.client.state_browsing import StreamState, StreamStateDiff
    from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
    from dagster_ckpt.policies.retention import RetentionPolicy
    from dagster_ckpt.recovery.adopt import Adoption
    from dagster_ckpt.recovery.fork import Fork
    from dagster_ckpt.snapshot.writer import Progress
    from dagster_ckpt.state.editing import StateEdit
    from dagster_ckpt.values.metrics import Sample

_LOG = logging.getLogger(__name__)


class Client(GraphMethods, MaintenanceMethods):
    """Every operation on the streams of a catalog.

    The catalog records the places and options of each stream that has run, so it is enough unless the storage needs
    credentials or the catalog was lost. Name a stream by its stream id or by the key of an asset that it writes, and a
    snapshot by its id, number (`chk-7`), label or location, or by `latest`. The stream may be running, unless a method
    says otherwise.

    Methods raise `StreamNotFoundError` and `SnapshotNotFoundError` for unknown names, `StorageAccessError` if a storage
    cannot be reached, and `LeaseHeldError` if a stream is running that must not be. Those that need the process of a
    stream raise `RequestFailedError` if it is not running or fails, and `RequestTimeoutError`, with the request
    withdrawn, if it is too slow. Each method lists only its other errors.

    Args:
        catalog: SQLAlchemy URL of the catalog, or an open `Catalog`, which the client does not close.
        storage: Credentials for the storage, and the place of snapshots of streams that the catalog does not know: a
            path, URL or storage object.
        live_root: Folder of live directories of streams that the catalog does not know.
        checkpointing: Checkpointing options by stream id, instead of the recorded ones.
        origin: Who operates, as the catalog shows it; default: user and host.

    Example:
        >>> with Client("sqlite:////var/lib/streams/catalog.db") as client:
        ...     client.trigger_savepoint("orders", label="before-release-42")
        SnapshotRecord(savepoint before-release-42 of orders at batch 812, COMPLETED, 12.3 MB, 0.4 MB new)
    """

    def list_streams(self) -> list[StreamSummary]:
        """List all streams of the catalog, by id."""
        from dagster_ckpt.client import description

        return description.summarize_streams(self._catalog)

    def metrics(self, stream: str | None = None) -> list[Sample]:
        """Return counts and last figures of one stream or all, from the catalog; docs/guides/metrics.md lists them."""
        return self._catalog.metrics.read(None if stream is None else [self._id_of(stream)])

    def describe_stream(self, stream: str, *, limit: int = 20) -> StreamDescription:
        """Return settings, desired state, open requests, and up to `limit` executions and snapshots."""
        from dagster_ckpt.client import description

        return description.describe_stream(self._catalog, self._id_of(stream), limit=limit)

    def list_snapshots(
        self,
        stream: str,
        *,
        kind: SnapshotKind | str | None = None,
        status: SnapshotStatus | str | None = SnapshotStatus.COMPLETED,
    ) -> list[SnapshotRecord]:
        """List a stream's snapshots, newest first; with `status` None also failed and deleted ones."""
        return self._catalog.snapshots.of_stream(
            self._id_of(stream),
            kind=SnapshotKind(kind) if kind is not None else None,
            status=SnapshotStatus(status) if status is not None else None,
        )

    def describe_snapshot(self, stream: str, snapshot: str = "latest") -> SnapshotDescription:
        """Return the metadata of a snapshot, and the holds that protect it from deletion."""
        from dagster_ckpt.client import description

        return description.describe_snapshot_of(self._open(stream), snapshot)

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
        """Fork a stream into another one: an independent query whose next start continues from there.

        Args:
            stream: The stream to fork, which is not changed.
            into: The stream that continues from it; it must not be running.
            start_from: `latest` (where its next start would begin), `batch-<n>`, or the name of a snapshot.
            outputs: Folders of the original's file sinks, mapped to folders of the fork, which receive their rows.
            replace_state: Discard what the other stream itself has committed.
            accept_loss: Fork even if files that the original has read since are gone.
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
            location: Location of the snapshot, which is not changed.
            into: The stream that continues from it; it must not be running.
            outputs: Each sink that the snapshot names, mapped to where the stream writes instead.
            with_rows: Copy the rows of the original's file sinks up to the snapshot.
            replace_state: Discard what the stream itself has committed.
            progress: Called with (done, all) after each file.
        """
        from dagster_ckpt.recovery.fork import import_snapshot

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

        The directory is only read, for the first snapshot. The query may run until that start, which fences it. After
        an interruption, repeat the call, or use `undo_adoption`.

        Args:
            stream: The stream that continues the query; it must not have any state yet.
            checkpoint_location: The `checkpointLocation` of the query.
            sinks: Where the query writes: a folder of files, a Delta table by its path, an Iceberg table as
                `IcebergTable[lake.sales.orders]`, or another sink by Spark's name.
            in_place: Continue in the directory itself, instead of in a copy.
            dry_run: Only examine the directory.

        Raises:
            LiveDirectoryError: The directory is damaged, or belongs to a stream.
            SharedSinkError: The log of a named sink is not that of this query.
            RequestFailedError: The stream already has state, or has adopted another directory.
        """
        from dagster_ckpt.recovery.adopt import adopt
        from dagster_ckpt.stream.start_from import checked_label

        location = location_url("checkpoint_location", checkpoint_location)
        return adopt(
            self._open(stream, new_like=stream),
            location,
            sinks=sinks,
            in_place=in_place,
            label=checked_label(label),
            dry_run=dry_run,
            origin=self._origin,
        )

    def undo_adoption(self, stream: str, *, checkpoint_location: str | None = None) -> list[str]:
        """Drop an adoption that no start has taken over, with its snapshots; returns what was done.

        The directory is not touched.

        Args:
            checkpoint_location: The directory that the stream must have adopted; None: any.
        """
        from dagster_ckpt.recovery.adopt import undo_adoption

        directory = given_folder(checkpoint_location, "checkpoint_location")
        return undo_adoption(self._open(stream), directory, origin=self._origin)

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

        The exported query keeps the id of the original, for sinks that remember it. An interrupted export can be
        repeated.

        Args:
            snapshot: `latest`, or the name of a snapshot.
            to: The directory to create; it must not exist.
            outputs: Folders of the snapshot's file sinks, mapped to new folders, which receive their rows.

        Raises:
            OptionError: The directory lies among those of a stream.
            RestoreError: The directory exists, or Spark could not start from the snapshot.
            SharedSinkError: An output is unknown to the snapshot, or its new folder is in use.
        """
        from dagster_ckpt.client.export import export_snapshot

        folder = location_url("to", to)
        for new in (outputs or {}).values():
            location_url("outputs", new)
        return export_snapshot(self._open(stream), snapshot, folder, outputs=outputs, progress=progress)

    def replicate(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        to: str | CheckpointStorage,
        keep: RetentionPolicy | Mapping[str, object] | None = None,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> Replication:
        """Copy snapshots to a second bucket or folder and verify every new byte there. Repeatable.

        A copy has the folders, id and number of its original: start from its location, or rebuild the catalog from
        there. Existing objects are not copied again.

        Args:
            snapshot: `latest`, `all`, or the name of a snapshot.
            to: Folder of the copies, as of a checkpoint storage; an object brings credentials. No stream may write
                there.
            keep: Which copies of the stream to keep, also as data; default: all. The newest and the newest proven one
                stay.
            verify: Also read every byte of existing copies, and write again what differs.
            progress: Called with (done, all) objects of each snapshot.

        Raises:
            OptionError: The folder overlaps one of the stream, or has copies of another deployment.
            StorageAccessError: The copies that are there cannot be listed; nothing was changed.

        Example:
            >>> client.replicate("orders", "all", to="s3://second/checkpoints", keep=KeepRules(last=3, daily=7))
        """
        from dagster_ckpt.client.replication import replicate
        from dagster_ckpt.policies.retention import checked_retention
        from dagster_ckpt.policies.serialization import read_retention

        kept = read_retention(keep) if isinstance(keep, Mapping) else keep
        policy = checked_retention(kept) if kept is not None else None
        return replicate(self._open(stream), snapshot, to, keep=policy, verify=verify, progress=progress)

    def state(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        operator: int | str | None = None,
        state: str | None = None,
        spark: SparkSession | None = None,
    ) -> StreamState:
        """Read the state of a stream as Spark DataFrames, from a temporary copy.

        Args:
            snapshot: A snapshot, or `live` for the newest committed batch of the live directory.
            operator: Number or name; None for all.
            state: Name; None for all.
            spark: Default: the session of this process.

        Raises:
            UnsupportedSparkError: The session's Spark cannot read the state.
            NothingCommittedError: No batch is committed yet.
            OptionError: There is no such operator or state.

        Example:
            >>> with client.state("orders", "before-release-42") as state:
            ...     state.rows().where("key.user_id = 7").show()
        """
        from dagster_ckpt.client.state_browsing import StreamState

        return StreamState(self._open(stream), snapshot, operator=operator, state=state, spark=spark)

    def state_diff(
        self,
        stream: str,
        before: str,
        after: str,
        *,
        operator: int | str | None = None,
        state: str | None = None,
        spark: SparkSession | None = None,
    ) -> StreamStateDiff:
        """Compare the state of a stream at two points: rows added, removed and changed, by operator and state.

        `before` and `after` are snapshots or `live`; the other arguments are those of `state`.

        Example:
            >>> with client.state_diff("orders", "before-release-42", "live") as diff:
            ...     for state in diff.states:
            ...         print(state.name, state.counts)
        """
        from dagster_ckpt.client.state_browsing import StreamStateDiff

        return StreamStateDiff(self._open(stream), before, after, operator=operator, state=state, spark=spark)

    def debug_batch(
        self,
        stream: str,
        batch: int,
        query: Callable[[SparkSession], DataStreamWriter],
        *,
        spark: SparkSession | None = None,
        timeout_s: float = 3_600.0,
        report: Callable[[str], None] = _LOG.info,
    ) -> BatchDebug:
        """Replay one batch of a stream into memory, with its original plan and state. The stream is not changed.

        The state is copied from the live directory or the newest snapshot before the batch; batches between are
        replayed on the copy. The result receives the output, instead of the sink.

        Args:
            batch: The newest may have failed.
            query: Describes the query, as for `run_stream`; pass other code to try it.
            timeout_s: For each batch that is run.

        Raises:
            RestoreError: No earlier state is left, or the plans of the batches between are not recorded.
            InputGoneError: A source no longer has what the batch read.
            LiveDirectoryError: A batch between could not be replayed.

        Example:
            >>> with client.debug_batch("orders", batch=812, query=orders) as debug:
            ...     debug.input.show()
            ...     debug.state_changes[0].rows.show()
            ...     debug.difference.show()
        """
        from dagster_ckpt.client.debugging import BatchDebug

        return BatchDebug(self._open(stream), batch, query, spark=spark, timeout_s=timeout_s, report=report)

    def remaining_state(self, stream: str, savepoint: str) -> RemainingState:
        """Find what still contains the state from before an edit: snapshots, live directories, temporary copies.

        `savepoint` is the one with the edited state.

        Example:
            >>> for message in client.remaining_state("orders", "forgotten-4711").messages():
            ...     print(message)
        """
        from dagster_ckpt.client.derived_savepoint import remaining_state

        return remaining_state(self._open(stream), savepoint)

    def edit_state(
        self,
        stream: str,
        edits: StateEdit | Sequence[StateEdit],
        *,
        reason: str,
        snapshot: str = "latest",
        label: str | None = None,
        target_directory: str | None = None,
        spark: SparkSession | None = None,
        report: Callable[[str], None] = _LOG.info,
    ) -> EditedState:
        """Create a savepoint from a snapshot, with edited rows in its state. Nothing else is changed.

        Args:
            edits: Keys to forget and rows to write.
            reason: Why, as the savepoint records it.
            snapshot: `latest`, or an id, number (chk-7), label or location.

        Raises:
            UnsupportedSparkError: This Spark cannot write state, and no other one is installed.
            StateRewriteError: The state cannot be edited like this; nothing was written.

        Example:
            >>> made = client.edit_state("orders", StateEdit(forget="user_id = 7"), reason="request 4711")
            >>> client.restart("orders", start_from=made.savepoint.snapshot_id)
        """
        from dagster_ckpt.client.derived_savepoint import edit_state
        from dagster_ckpt.state.editing import StateEdit

        opened = self._open(stream)
        self._refuse_taken(opened.stream_id, label)
        return edit_state(
            opened,
            [edits] if isinstance(edits, StateEdit) else list(edits),
            snapshot=snapshot,
            reason=reason,
            origin=self._origin,
            label=label,
            target_directory=given_folder(target_directory),
            spark=spark,
            report=report,
        )
