"""Adopting: a stream continues the query of a checkpoint directory of plain Spark, with its id and sinks.

It only reads: the query may run until the next start fences it. See "An adopted directory" in docs/internals.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.catalog.pending_restore import Adopting, ToTakeOver
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, SnapshotStatus, StateOrigin, StreamRecord
from dagster_ckpt.errors import (
    CkptError,
    LiveDirectoryError,
    OptionError,
    RequestFailedError,
    SharedSinkError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
)
from dagster_ckpt.io.location import folders_overlap, open_file_io, same_folder
from dagster_ckpt.recovery.checkpoint_retention import discard, settle_dead_attempts
from dagster_ckpt.recovery.facts import unknown_state
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.registry import NamedTable, sink_of
from dagster_ckpt.sinks.sink import Sink, newest_batch
from dagster_ckpt.spark.checkpoint_dir.inspect import (
    CheckpointDescription,
    LiveState,
    LiveStatus,
    describe_checkpoint,
    inspect_live_directory,
    state_edits,
)
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import plan_without_data
from dagster_ckpt.spark.checkpoint_dir.planned_batches import Fence, fence, lift_fence, open_fence
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.spark.doctor.finding import Code
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.ownership import (
    ADOPTED_FROM,
    CLAIM,
    OWNER,
    adopted_directory,
    check_places,
    claim,
    claim_of,
    fence_predecessor,
)
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.snapshotting import DirectoryToAdopt, savepoint_of_stopped_stream
from dagster_ckpt.stream.start_from import is_location
from dagster_ckpt.values.durations import wall_clock_ms

_DELTA_LOG = "_delta_log"


@dataclass(frozen=True)
class Adoption:
    """An adoption; without a `snapshot`, a dry run of one."""

    stream_id: str
    found: CheckpointDescription
    diagnosis: Diagnosis
    sinks: tuple[str, ...]
    in_place: bool
    snapshot: SnapshotRecord | None

    def messages(self) -> list[str]:
        problems = [f"{each.severity}: {each.explanation}" for each in self.diagnosis.findings]
        sinks = ", ".join(self.sinks) or (
            "none named: the snapshot has no log of a file sink, so going back to it needs a new output folder"
        )
        if self.snapshot is None:
            done = ["dry run: nothing was registered"]
        else:
            where = "there" if self.in_place else "in a copy of it, among the live directories"
            done = [
                f"took {describe_snapshot(self.snapshot)}: {self.snapshot.location}",
                f"the next start of {self.stream_id} fences the query of {self.found.url} and continues {where}",
            ]
        return [*self.found.messages(), f"sinks: {sinks}", *problems, *done]


def adopt(
    stream: StreamHandle,
    checkpoint_location: str,
    *,
    sinks: Sequence[str] = (),
    in_place: bool = False,
    label: str | None = None,
    dry_run: bool = False,
    origin: str,
) -> Adoption:
    """Adopt a checkpoint directory of plain Spark; the stream's next start, from `latest`, continues its query.

    Until then, it may be repeated, also with other options. An interrupted adoption blocks every start until it is
    repeated or dropped (`undo_adoption`). If `sinks` names its file sink, the first snapshot can be restored exactly.
    The other arguments are those of `Client.adopt`.
    """
    live = LiveDirectory(checkpoint_location)
    _refuse_managed(stream, live)
    named = [_sink(sink) for sink in sinks]
    state = inspect_live_directory(live)
    if state.status is LiveStatus.EMPTY and METADATA not in (found_there := live.folder.list()) and found_there:
        raise LiveDirectoryError(
            f"Nothing is adopted, nothing was changed: {live.url} is not a checkpoint directory of Spark: it has "
            f"{min(found_there)}, but no file {METADATA}. Name the checkpointLocation of the query."
        )
    if state.status in (LiveStatus.MISSING, LiveStatus.BROKEN):
        raise LiveDirectoryError(f"Nothing is adopted, nothing was changed: {_how_to_mend(live, state)}")
    found = describe_checkpoint(live)
    for sink in named:
        _refuse_anothers_log(live, sink)
    diagnosis = diagnose(live, sinks=named)
    if not diagnosis.can_resume:
        listed = " ".join(
            f"{each.explanation} {each.advice}" if each.code is Code.SINK_LOG_ELSEWHERE else each.explanation
            for each in diagnosis.findings[:4]
        )
        raise LiveDirectoryError(
            f"{live.url} is not adopted, nothing was changed: Spark could not continue there. {listed}"
        )
    names = tuple(sink.name for sink in named)
    snapshot = None if dry_run else _register(stream, live, names, in_place=in_place, label=label, origin=origin)
    return Adoption(stream.stream_id, found, diagnosis, names, in_place, snapshot)


def _how_to_mend(live: LiveDirectory, state: LiveState) -> str:
    if state.status is LiveStatus.BROKEN and METADATA not in live.folder.list():
        return (
            f"{live.url}/{METADATA} is missing: it has the id of the query, and Spark refuses to start without it. "
            'Write the file again with one line, {"id":"<id>"}. The id is in each progress of the query, in the log of '
            "its driver and, as appId, in the log of a Delta table that it writes to. If its sinks do not remember "
            "queries by id, as a file sink does not, any new UUID is right."
        )
    if state.status is LiveStatus.BROKEN:
        return (
            f"{state.reason} No snapshot of this directory exists yet: put back from a backup what is missing, or "
            "start the query from the beginning, with an empty checkpoint directory and an empty output."
        )
    return state.reason


def _register(
    stream: StreamHandle, live: LiveDirectory, sinks: tuple[str, ...], *, in_place: bool, label: str | None, origin: str
) -> SnapshotRecord:
    above = stream.token_in_use(stream.register())
    acquired = acquire_for(stream.catalog, stream.stream_id, "adopt", origin, above=above)
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        _refuse_own_state(stream, stream.catalog.streams.get(stream.stream_id), live)
        check_places(stream, None, predecessor_ended=acquired.predecessor_ended)
        fence_predecessor(stream, acquired, still_mine=lease.check)
        _drop_unfinished(stream, lease)
        _begin(stream, lease, stream.catalog.streams.get(stream.stream_id), live.url)
        try:
            snapshot = savepoint_of_stopped_stream(
                stream, label=label, lease=lease.record, adopting=DirectoryToAdopt(live.url, sinks)
            )
            _switch(stream, lease, live, sinks, snapshot, in_place=in_place)
        except BaseException:
            # If this fails too, the adoption blocks every start.
            with suppress(CkptError):
                _drop_unfinished(stream, lease)
            raise
    return snapshot


def undo_adoption(stream: StreamHandle, given: str | None = None, *, origin: str) -> list[str]:
    """Drop an adoption that no start has taken over, with its snapshots; return messages. Repeatable."""
    catalog = stream.catalog
    adopted = _adopting(catalog.streams.get(stream.stream_id))
    if given is not None and not same_folder(given, adopted):
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} adopts {adopted}, not {given}. Nothing was changed. Name that directory."
        )
    with LeaseKeeper(catalog, acquire_for(catalog, stream.stream_id, "adopt", origin).record) as lease:
        record = catalog.streams.get(stream.stream_id)
        directory = _adopting(record)
        if not isinstance(record.pending_restore, Adopting):
            _begin(stream, lease, record, directory)
        settle_dead_attempts(stream, lease.record)
        taken = [each for each in catalog.snapshots.of_stream(stream.stream_id) if ADOPTED_FROM in each.properties]
        deleted = _delete(stream, lease, taken)
        catalog.streams.forget_adoption(lease.record)
    return [*deleted, f"{stream.stream_id} no longer adopts {directory}, whose query was not touched"]


def _begin(stream: StreamHandle, lease: LeaseKeeper, record: StreamRecord, directory: str) -> None:
    begun = Adopting(directory=directory, first_number=record.next_number, before=record.pending_restore)
    stream.catalog.streams.note_pending(lease.record, begun)


def _adopted_by(record: StreamRecord) -> str | None:
    pending = record.pending_restore
    return pending.directory if isinstance(pending, Adopting | ToTakeOver) else None


def _adopting(record: StreamRecord) -> str:
    directory = _adopted_by(record)
    if directory is None:
        raise RequestFailedError(
            f"Stream {record.stream_id!r} has no adoption to drop: none was begun, or a start has taken the directory "
            "over. Nothing was changed."
        )
    return directory


def _drop_unfinished(stream: StreamHandle, lease: LeaseKeeper) -> None:
    catalog = stream.catalog
    pending = catalog.streams.get(stream.stream_id).pending_restore
    if not isinstance(pending, Adopting):
        return
    settle_dead_attempts(stream, lease.record)
    taken = [
        each
        for each in catalog.snapshots.of_stream(stream.stream_id)
        if ADOPTED_FROM in each.properties and (each.number or 0) >= pending.first_number
    ]
    _delete(stream, lease, taken)
    catalog.streams.note_pending(lease.record, pending.before)


def _delete(stream: StreamHandle, lease: LeaseKeeper, taken: Sequence[SnapshotRecord]) -> list[str]:
    left = [each for each in taken if each.status in (SnapshotStatus.COMPLETED, SnapshotStatus.DELETING)]
    report = discard(stream, left, reason="its adoption was dropped", lease=lease)
    remaining = [*report.kept, *report.held, *report.failed]
    if remaining:
        raise RequestFailedError(
            f"The adoption of stream {stream.stream_id!r} cannot be dropped yet, because a snapshot of it could not be "
            f"deleted: {'; '.join(remaining)}. Repeat the command when that is settled."
        )
    return [f"deleted {name}" for name in report.deleted]


def _switch(
    stream: StreamHandle,
    lease: LeaseKeeper,
    live: LiveDirectory,
    sinks: tuple[str, ...],
    snapshot: SnapshotRecord,
    *,
    in_place: bool,
) -> None:
    stream.catalog.streams.switch_live_directory(
        lease.record,
        live.url,
        origin=StateOrigin(
            OriginKind.ADOPTED,
            batch_id=snapshot.batch_id,
            snapshot_id=snapshot.snapshot_id,
            location=snapshot.location,
            snapshot_kind=snapshot.kind,
            snapshot_number=snapshot.number,
            query_id=snapshot.query_id,
            directory=live.url,
            sinks=sinks,
        ),
        restored_snapshot_id=snapshot.snapshot_id,
        pending_restore=ToTakeOver(directory=live.url, in_place=in_place),
        plan={},
        state_edits=state_edits(live),
    )


def _refuse_own_state(stream: StreamHandle, record: StreamRecord, live: LiveDirectory) -> None:
    adopting = _adopted_by(record)
    if adopting is not None:
        if not same_folder(_query_folder(adopting), _query_folder(live.url)):
            raise RequestFailedError(
                f"{live.url} is not adopted, nothing was changed: stream {stream.stream_id!r} has adopted {adopting}, "
                f"and one stream continues one query. Choose another stream id, or first drop that adoption: "
                f"dagster-ckpt adopt {stream.stream_id} {adopting} --undo."
            )
        return
    unknown = unknown_state(stream)
    found = [record.live_directory] if record.live_directory is not None else []
    listed = stream.catalog.snapshots.completed(stream.stream_id)
    found += [describe_snapshot(each) for each in listed if not _is_of(each.properties, live)]
    found += [*unknown.directories, *(each for each in unknown.snapshots if not _is_stored_of(stream, each, live))]
    if found:
        raise RequestFailedError(
            f"Nothing is adopted, nothing was changed: stream {stream.stream_id!r} already has state "
            f"({', '.join(found[:4])}), and one stream continues one query. Choose another stream id."
        )


def _is_of(properties: Mapping[str, object], live: LiveDirectory) -> bool:
    directory = properties.get(ADOPTED_FROM)
    return isinstance(directory, str) and same_folder(directory, live.url)


def _is_stored_of(stream: StreamHandle, listed: str, live: LiveDirectory) -> bool:
    try:
        properties = stream.store.manifest(listed.removeprefix("savepoint ")).header.properties
    except (SnapshotNotFoundError, SnapshotCorruptError):
        return False
    return _is_of(properties, live)


def _refuse_managed(stream: StreamHandle, live: LiveDirectory) -> None:
    claimed = claim_of(live)
    if claimed is not None:
        raise LiveDirectoryError(
            f"{live.url} is not adopted, nothing was changed: its file {CLAIM} shows that it was adopted "
            f"before: {claimed}. Its query continues there. If that stream no longer exists, delete the file."
        )
    fenced = live.fenced_at()
    if fenced is not None:
        raise LiveDirectoryError(
            f"{live.url} is not adopted, nothing was changed: it was fenced before batch {fenced}, because its query "
            "continues elsewhere."
        )
    owner = _owner(_parent(live.url))
    folders = [stream.live_root, stream.live_folder]
    others = [each for each in stream.catalog.streams.all() if each.stream_id != stream.stream_id]
    users = [each for each in others if any(same_folder(place, live.url) for place in _directories(each))]
    why = None
    if owner is not None:
        why = f"it is a live directory of deployment {owner}"
    elif users:
        why = f"it is the directory of stream {users[0].stream_id!r}"
    elif any(folders_overlap(live.url, folder) for folder in folders):
        why = f"it lies among the live directories of this code location, {stream.live_root}"
    if why is not None:
        raise LiveDirectoryError(
            f"{live.url} is not adopted, nothing was changed: {why}. Fork that stream (fork_stream_job), import one of "
            "its snapshots (import_stream_job), or register it again if its catalog was lost (rebuild_catalog_job)."
        )


def _parent(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[0]


def _query_folder(directory: str) -> str:
    """Return what names the query: Declarative Pipelines continue a flow in its highest numbered directory."""
    *above, name = directory.rstrip("/").split("/")
    return _parent(directory) if name.isdecimal() and "_checkpoints" in above else directory


def _directories(record: StreamRecord) -> list[str]:
    pending = record.pending_restore
    adopting = pending.directory if isinstance(pending, Adopting) else None
    return [each for each in (record.live_directory, adopting) if each is not None]


def _owner(folder: str) -> str | None:
    try:
        return open_file_io(folder).read(OWNER, 256).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _sink(place: str) -> Sink:
    if not is_location(place) and not place.startswith("file:"):
        named = sink_of(place)
        if isinstance(named, NamedTable):
            raise OptionError(
                f"{place} names a table of a catalog without its kind, so nothing is known of the batches in it. Name "
                f"an Iceberg table IcebergTable[{place}], a Delta table by its path, and leave out another table."
            )
        if type(named) is Sink:
            raise OptionError(
                f"{place!r} is neither an absolute path or URL nor a name that Spark gives a sink, such as "
                "FileSink[/data/orders]. Leave out a sink of another kind."
            )
        return named
    if open_file_io(place).list(_DELTA_LOG):
        return sink_of(f"DeltaSink[{place}]")
    return FileSink.at(place)


def _refuse_anothers_log(live: LiveDirectory, sink: Sink) -> None:
    """Refuse a file sink whose log, which names no query, does not match this query's positions."""
    if not isinstance(sink, FileSink):
        return
    committed = live.positions().commit
    last = newest_batch(sink, None)
    # Read after the log: a query plans a batch before it writes to the sink.
    planned = live.positions().offset
    if last is None:
        raise SharedSinkError(
            f"{live.url} is not adopted, nothing was changed: no file sink has written to {sink.place}, which has no "
            "log _spark_metadata. Name the folder that the query writes to; a table by Spark's name for it."
        )
    if not (committed or 0) <= last <= (planned or 0):
        raise SharedSinkError(
            f"{live.url} is not adopted, nothing was changed: its query has committed batch {committed} and planned "
            f"batch {planned}, but the log of {sink.place} ends at batch {last}. Another query writes there. Name the "
            "folder of this one."
        )


WAIT_S = 30.0


def take_over(
    stream: StreamHandle, lease: LeaseKeeper, *, resumes: bool, still_mine: Callable[[], None], wait_s: float = WAIT_S
) -> bool:
    """Take over a stream's adopted directory, if no start has done so; may be repeated.

    Return True if the start must plan again. `resumes`: it continues in a directory that was adopted in place.
    """
    adopted = adopted_directory(stream.catalog.streams.get(stream.stream_id))
    if adopted is None or not adopted.is_pending:
        return False
    live = LiveDirectory(adopted.directory)
    if not live.exists():
        # Its query fails at its next write to a log.
        return False
    still_mine()
    with lease.step():
        claim(stream, live)
    by = f"stream {stream.stream_id} of deployment {stream.catalog.deployment_id}, lease {lease.record.token}"
    done = fence(live.folder, by=by, wait_s=wait_s, still_mine=still_mine, step=lease.step)
    late = "" if done.in_flight is None else f"; batch {done.in_flight} was not committed and may still be written"
    log_transition(
        stream.stream_id,
        f"Fenced the query that wrote {live.url}: it cannot plan batch {done.batch_id}{late}",
        level=logging.WARNING,
    )
    if adopted.in_place and resumes:
        _continue_in_place(stream, lease, live, done)
    return True


def _continue_in_place(stream: StreamHandle, lease: LeaseKeeper, live: LiveDirectory, done: Fence) -> None:
    if done.in_flight is not None or done.batch_id == 0:
        with lease.step():
            lift_fence(live.folder, done.batch_id)
        raise LiveDirectoryError(
            f"Stream {stream.stream_id!r} cannot continue in {live.url}: its batch {done.batch_id - 1} was planned and "
            "not committed while the start waited, and its query may still commit it. The fence was removed. "
            "Start again when that batch is committed. If its query was killed, adopt the directory "
            "without in_place: the batch is then run again in a copy."
        )
    entry = plan_without_data(live.folder, done.batch_id - 1, now_ms=wall_clock_ms())
    # The catalog first: if this start dies in between, the next one finds the fence and continues in a clone.
    stream.catalog.streams.restore_finished(lease.record)
    with lease.step():
        open_fence(live.folder, done.batch_id, entry)
