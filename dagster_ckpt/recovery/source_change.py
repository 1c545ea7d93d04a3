"""Refuses a start whose query reads other sources than those that its offsets belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from dagster_ckpt.catalog.records import SOURCE_IDENTITIES
from dagster_ckpt.errors import LiveDirectoryError, SnapshotNotFoundError, SourceChangedError
from dagster_ckpt.recovery.plan import RecoveryKind, RecoveryPlan
from dagster_ckpt.recovery.prepare import snapshot_location
from dagster_ckpt.recovery.source_comparison import ReadSource, source_differences, topics_in
from dagster_ckpt.recovery.source_positions import topic_offsets
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines, parse_offset_entry
from dagster_ckpt.spark.query.delta_source import delta_offset
from dagster_ckpt.spark.query.sources import (
    KAFKA,
    SourceIdentity,
    identities_of_record,
    keyed,
    kind_of_offset,
)
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot

# The newest files that a source has read decide whether it still reads them.
_FILES_LOOKED_AT = 3


def refuse_changed_sources(stream: StreamHandle, plan: RecoveryPlan, now: Sequence[SourceIdentity] | None) -> list[str]:
    """Refuse a start whose sources differ from those of the state that it continues from.

    What is not known refuses nothing: sources of a state written by an earlier version of the package are
    known from the offsets only.

    Args:
        stream: The stream.
        plan: What the start does; nothing has been changed yet.
        now: The sources of the query to start; None if it cannot be inspected.

    Returns:
        Differences with which the query goes on, for the run's log.

    Raises:
        SourceChangedError: The sources differ.
        StorageAccessError: The snapshot or the live directory cannot be reached.
    """
    if now is None or plan.kind is RecoveryKind.START_EMPTY or plan.to_batch is None or plan.to_batch < 0:
        return []
    was = read_sources(stream, plan, plan.to_batch, len(now))
    differences = source_differences(was, keyed(now)) if was else ()
    refused = [str(each) for each in differences if each.is_refused]
    if not refused:
        return [f"the sources of the query changed: {each}" for each in differences]
    came_from = describe_snapshot(plan.snapshot) if plan.snapshot is not None else "its live directory"
    listed = "\n".join(f"- {each}" for each in refused)
    raise SourceChangedError(
        f"Stream {stream.stream_id!r} is not started, nothing was changed: it would continue from {came_from}, and "
        f"the sources of the query are not those that its offsets belong to.\n{listed}\n"
        "Put the sources back: the paths, topics, tables and their order as they were. If files were moved, move them "
        "back, or put a symbolic link at the old path. Or begin anew with these sources: a new stream, or "
        "start_from=empty with discard_state."
    )


def recorded_sources(stream: StreamHandle, plan: RecoveryPlan) -> tuple[SourceIdentity, ...] | None:
    """The recorded sources of the state that a plan starts from; None if none were recorded.

    Raises:
        SnapshotCorruptError: The snapshot cannot be read.
        StorageAccessError: The snapshot cannot be reached.
    """
    if plan.snapshot is not None:
        properties: Mapping[str, object] = plan.snapshot.properties
        if SOURCE_IDENTITIES not in properties:
            properties = stream.store.manifest(snapshot_location(plan.snapshot)).header.properties
        return identities_of_record(properties.get(SOURCE_IDENTITIES))
    live = plan.directory or stream.catalog.streams.get(stream.stream_id).live_directory
    return identities_of_record(stream.catalog.executions.last_sources(stream.stream_id, live))


def read_sources(stream: StreamHandle, plan: RecoveryPlan, batch_id: int, expected: int) -> dict[str, ReadSource]:
    """What is known of the sources that were read up to a batch, by name or position; empty if nothing is.

    Args:
        stream: The stream.
        plan: What the start does.
        batch_id: The batch that it continues after.
        expected: The number of sources of the query to start.
    """
    recorded = recorded_sources(stream, plan)
    read = _reader(stream, plan)
    data = read([f"{OFFSETS}/{batch_id}"]).get(f"{OFFSETS}/{batch_id}")
    offsets = dict(parse_offset_entry(data, f"{OFFSETS}/{batch_id}").sources) if data is not None else {}
    if recorded is None:
        if len(set(offsets.values())) <= expected < len(offsets):
            # A relation that is read twice has two offsets.
            return {}
        return {key: _read_source(None, key, text, read) for key, text in offsets.items()}
    known = keyed(recorded)
    if offsets.keys() != known.keys():
        # They do not say which source they belong to.
        offsets = {}
    return {key: _read_source(identity, key, offsets.get(key), read) for key, identity in known.items()}


_Read = Callable[[Sequence[str]], Mapping[str, bytes]]


def _reader(stream: StreamHandle, plan: RecoveryPlan) -> _Read:
    """Reads files of the state that a plan starts from; those that do not exist are left out."""
    snapshot = plan.snapshot
    if snapshot is not None:

        def read_snapshot(paths: Sequence[str]) -> Mapping[str, bytes]:
            return read_files(stream.store, snapshot_location(snapshot), lambda path: path in paths)

        return read_snapshot
    url = plan.directory or stream.catalog.streams.get(stream.stream_id).live_directory

    def read_live(paths: Sequence[str]) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths if url is not None else ():
            with suppress(FileNotFoundError):
                found[path] = LiveDirectory(url or "").folder.read(path)
        return found

    return read_live


def _read_source(identity: SourceIdentity | None, key: str, offset: str | None, read: _Read) -> ReadSource:
    kind, delta = kind_of_offset(offset), delta_offset(offset)
    position = log_offset(offset)
    has_read = offset is not None and position != -1
    return ReadSource(
        identity=identity,
        kind=kind,
        # Without offsets nobody knows.
        has_read=has_read or (identity is not None and offset is None),
        files=_newest_files(f"{SOURCES}/{key}/{position}", read) if position is not None and has_read else (),
        topics=topics_in(topic_offsets(offset)) if kind == KAFKA else (),
        table_id=delta.table_id if delta is not None else None,
    )


def _newest_files(path: str, read: _Read) -> tuple[str, ...]:
    entries = read([path, f"{path}{COMPACT}"])
    with suppress(SnapshotNotFoundError, LiveDirectoryError):
        for name, data in entries.items():
            version, *lines = data.split(b"\n")
            newest = [line for line in lines if line.strip()][-_FILES_LOOKED_AT:]
            return tuple(str(line.get("path")) for line in parse_log_lines(b"\n".join([version, *newest]), name))
    return ()
