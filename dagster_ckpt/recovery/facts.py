"""Reads from catalog, storage and live directory what a recovery plan depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from blake3 import blake3

from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    ExecutionStatus,
    OriginKind,
    SnapshotRecord,
    SnapshotStatus,
    StreamRecord,
)
from dagster_ckpt.errors import SnapshotCorruptError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.recovery.examination import Examiner, known_query
from dagster_ckpt.recovery.plan import NOTHING_UNKNOWN, RecoveryFacts, UnknownState
from dagster_ckpt.recovery.recovery_points import NOT_LOADABLE, snapshot_point
from dagster_ckpt.sinks.registry import captured_sinks, described_sink
from dagster_ckpt.sinks.sink import Sink, distinct, newest_batch
from dagster_ckpt.snapshot.manifest import Manifest
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import damaged_sink_logs
from dagster_ckpt.stream.liveness import boot_id
from dagster_ckpt.stream.snapshots import readable_manifest, unregistered_snapshot
from dagster_ckpt.stream.start_from import StartFrom, StartPoint


def recovery_facts(
    stream: StreamHandle,
    start_from: StartFrom,
    *,
    predecessor_ended: bool,
    is_automatic: bool = False,
    remembers: bool = True,
    output: NamedOutput | None = None,
    examiner: Examiner | None = None,
) -> RecoveryFacts:
    """Gather what a start is planned from.

    Args:
        remembers: Whether earlier recovery failures count, which a start by a user ignores.
        examiner: Reads the state that the query will load if there are such failures, or the last execution in the live
            directory did not end in order.
    """
    catalog = stream.catalog
    record = catalog.streams.get(stream.stream_id)
    live = LiveDirectory(record.live_directory) if record.live_directory else None
    known = known_query(stream, record)
    state = inspect_live_directory(live, known) if live is not None else None
    executions = catalog.executions.of_stream(stream.stream_id)
    failures = _failures_that_count(stream, executions) if remembers else []
    if live is not None and state is not None and state.status is LiveStatus.GOOD:
        deep = examiner is not None and (bool(failures) or not _last_ended_in_order(executions, live))
        state = (examiner or Examiner(stream)).state_of(live, state, deep=deep)
    damaged_logs = damaged_sink_logs(stream, record, output, live)
    if damaged_logs and state is not None and state.status is LiveStatus.GOOD:
        damage = "; ".join(f"the log of {each.folder} is damaged: {each.found}" for each in damaged_logs)
        state = replace(state, status=LiveStatus.BROKEN, reason=f"{state.reason.rstrip('.')}, but {damage}")
    listed = catalog.snapshots.completed(stream.stream_id)
    unregistered = unregistered_snapshot(stream, start_from, listed)
    is_lost = state is None or state.status is not LiveStatus.GOOD
    failures = with_equal_content(stream.store, failures, listed) if failures else []
    # State there may belong to another catalog.
    is_unheard_of = record.live_generation == 0 and not listed
    return RecoveryFacts(
        stream=record,
        live=state,
        snapshots=catalog.snapshots.restorable(stream.stream_id),
        all_snapshots=listed if unregistered is None else [unregistered, *listed],
        last_batch=catalog.executions.last_batch(stream.stream_id, record.live_directory),
        has_run=any(each.live_directory == record.live_directory for each in executions),
        predecessor_ended=predecessor_ended,
        prefer_checkpoint=stream.options.prefer_checkpoint_for_recovery,
        depth=stream.options.recovery_depth,
        start_from=start_from,
        retained=retained_batches(live) if live is not None and start_from.point is StartPoint.BATCH else (),
        ended_in_order=_ended_in_order(executions, record.live_directory),
        failures=failures,
        origin_batch_is_retained=bool(is_lost or failures) and _origin_batch_is_retained(record),
        origin_snapshot_is_gone=_origin_snapshot_is_gone(stream, record),
        is_automatic=is_automatic,
        unknown=unknown_state(stream, output) if is_unheard_of else NOTHING_UNKNOWN,
        last_sign_ms=next(
            (each.heartbeat_at_ms for each in executions if each.live_directory == record.live_directory), None
        ),
        damaged_logs=damaged_logs,
    )


_IN_ORDER = (ExecutionStatus.FINISHED, ExecutionStatus.SUSPENDED, ExecutionStatus.CANCELED)


def _failures_that_count(stream: StreamHandle, executions: Sequence[ExecutionRecord]) -> list[PointFailure]:
    versions = {each.execution_id: each.code_version for each in executions}
    return [
        failure
        for failure in stream.catalog.recoveries.of_stream(stream.stream_id)
        if failure.error != NOT_LOADABLE or versions.get(failure.execution_id) == stream.code_version
    ]


def _ended_in_order(executions: Sequence[ExecutionRecord], live_directory: str | None) -> bool:
    in_it = [each for each in executions if each.live_directory == live_directory]
    # Damage behind a failure may still exist if a later execution was canceled.
    return bool(in_it) and all(each.status in _IN_ORDER and each.boot_id == boot_id() for each in in_it)


def _last_ended_in_order(executions: Sequence[ExecutionRecord], live: LiveDirectory) -> bool:
    """Whether the last execution, which examined what others left, ended in order.

    A reboot may lose data only of a local disk.
    """
    last = next((each for each in executions if each.live_directory == live.url), None)
    same_boot = last is not None and (live.local_path is None or last.boot_id == boot_id())
    return last is not None and last.status in _IN_ORDER and same_boot


def _origin_batch_is_retained(record: StreamRecord) -> bool:
    origin = record.origin
    if origin is None or origin.kind is not OriginKind.DIRECTORY or origin.directory is None:
        return False
    before = LiveDirectory(origin.directory)
    return before.exists() and origin.batch_id in retained_batches(before)


def _origin_snapshot_is_gone(stream: StreamHandle, record: StreamRecord) -> bool:
    origin = record.origin
    if origin is not None and origin.kind is OriginKind.DIRECTORY:
        origin = origin.earlier
    if origin is None or origin.snapshot_id is None:
        return False
    known = stream.catalog.snapshots.by_id([origin.snapshot_id]).get(origin.snapshot_id)
    return known is not None and known.status in (SnapshotStatus.DELETING, SnapshotStatus.DELETED)


_NOT_IN_USE = "; it was built by a restore, rewind, fork or import that did not finish, and no query was started in it"


def unknown_state(stream: StreamHandle, output: NamedOutput | None = None) -> UnknownState:
    directories = [
        f"{built.live.url}, up to batch {commit}{_NOT_IN_USE if built.live.is_not_in_use() else ''}"
        for built in stream.live_directories()
        if (commit := built.live.positions().commit) is not None
    ]
    snapshots: list[str] = []
    described = described_sink(output)
    sinks = [described] if described is not None else []
    for location in stream.store.checkpoints():
        manifest = readable_manifest(stream, location)
        snapshots.append(location if manifest is not None else f"{location}, which cannot be read")
        sinks += _sinks(manifest)
    for location in stream.store.savepoints():
        manifest = readable_manifest(stream, location)
        # The folder may contain savepoints of other streams.
        if manifest is not None and manifest.header.stream_id == stream.stream_id:
            snapshots.append(f"savepoint {location}")
            sinks += _sinks(manifest)
    logs = [log for sink in distinct(sinks) if not sink.knows_queries and (log := _log(sink)) is not None]
    return UnknownState(directories, snapshots, logs)


def _sinks(manifest: Manifest | None) -> list[Sink]:
    return (captured_sinks(manifest.header.properties) or []) if manifest is not None else []


def _log(sink: Sink) -> str | None:
    try:
        last = newest_batch(sink, None)
    except StorageAccessError:
        return f"the sink log of {sink.place}, which cannot be reached"
    return None if last is None else f"the sink log of {sink.place}, up to batch {last}"


_Key = tuple[int | None, str]


def state_digest(store: SnapshotStore, location: str) -> str | None:
    digest, is_empty = blake3(), True
    for entry in sorted(store.manifest(location).files, key=attrgetter("path")):
        if entry.path.partition("/")[0] == STATE:
            digest.update(f"{entry.path}\0{entry.digest}\n".encode())
            is_empty = False
    return None if is_empty else digest.hexdigest()


def with_equal_content(
    store: SnapshotStore, failures: Sequence[PointFailure], snapshots: Sequence[SnapshotRecord]
) -> list[PointFailure]:
    """Repeat each failure for other snapshots of the same batch and state, which have the same damage."""
    points = {snapshot_point(each.snapshot_id): each for each in snapshots}
    batches = {points[failure.point].batch_id for failure in failures if failure.point in points}
    alike = {name: each for name, each in points.items() if each.batch_id in batches}
    if len(alike) <= len(batches):
        return [*failures]
    keys = {name: key for name, each in alike.items() if (key := _key(store, each)) is not None}
    counted = []
    for failure in failures:
        key = keys.get(failure.point)
        counted.append(failure)
        others = (name for name, other in keys.items() if other == key and name != failure.point)
        counted += [replace(failure, point=name) for name in others if key is not None]
    return counted


def _key(store: SnapshotStore, snapshot: SnapshotRecord) -> _Key | None:
    try:
        digest = state_digest(store, snapshot.location or "")
    except (SnapshotNotFoundError, SnapshotCorruptError):
        return None
    return None if digest is None else (snapshot.batch_id, digest)
