"""Take one snapshot, of a running or a stopped query."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    CompletedSnapshot,
    LeaseRecord,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
)
from dagster_ckpt.errors import CatalogError, CkptError, LeaseLostError, NothingCommittedError
from dagster_ckpt.sinks.batch_in_flight import guarantees
from dagster_ckpt.sinks.registry import names_of_others, sinks_of
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Source
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.snapshot.writer import Progress
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode, KnownQuery
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut, until_not_overtaken
from dagster_ckpt.spark.checkpoint_dir.state_files import CHAIN
from dagster_ckpt.spark.jobs import executors_above
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.edges import last_identities, reads_at_cut
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import SINK_IDS, query_ids_of, sinks_written, topic_ends, with_newest_batch
from dagster_ckpt.stream.ownership import ADOPTED_FROM, adopted_directory
from dagster_ckpt.stream.snapshots import COLUMNS, DEPLOYMENT, TAKEN_FROM, holding
from dagster_ckpt.stream.start_from import checked_label
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind


@dataclass(frozen=True)
class SnapshotOrder:
    """A snapshot to take.

    Attributes:
        base: Location of a snapshot whose bytes may be shared.
        renews: The checkpoint at `base`, which is renewed if the position has not changed.
    """

    kind: SnapshotKind
    number: int
    snapshot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    carry_in_flight: bool = False
    base: str | None = None
    target_directory: str | None = None
    sinks: tuple[str, ...] = ()
    label: str | None = None
    properties: Mapping[str, object] = field(default_factory=dict)
    renews: SnapshotRecord | None = None

    def __post_init__(self) -> None:
        checked_label(self.label)

    def carrying_in_flight(self) -> SnapshotOrder:
        return replace(self, carry_in_flight=True)


@dataclass(frozen=True)
class TakenSnapshot:
    """A stored snapshot, after whose `batch_id` a restore resumes.

    `renews`: the id of an existing checkpoint, if nothing was written.
    """

    order: SnapshotOrder
    batch_id: int
    query_id: str
    stored: StoredSnapshot
    properties: Mapping[str, object]
    renews: str | None = None


def sharing_base(stream: StreamHandle) -> SnapshotRecord | None:
    """The snapshot that probably has most in common with a stream's next one.

    The newest checkpoint of its timeline, else the snapshot that the timeline began with, else the newest checkpoint.
    None if a verification has since found damage in any snapshot: it may share the damaged object.
    """
    snapshots = stream.catalog.snapshots
    restorable = snapshots.restorable(stream.stream_id)
    checkpoints = [snapshot for snapshot in restorable if snapshot.kind == SnapshotKind.CHECKPOINT]
    base = next(iter([*checkpoints, *restorable]), None) or snapshots.newest_checkpoint(stream.stream_id)
    damage_found_ms = snapshots.damage_found_ms(stream.stream_id)
    is_suspect = base is not None and damage_found_ms is not None and base.created_at_ms <= damage_found_ms
    return None if is_suspect else base


# Properties that differ between two snapshots of one position.
_OF_ONE_SNAPSHOT = ("parent_snapshot_id", "trigger", "schedule", "pyspark_of_reader", CHAIN)


def renewable(stream: StreamHandle, base: SnapshotRecord | None) -> SnapshotRecord | None:
    """The checkpoint that an attempt may renew instead of writing the same position again: a recovery can use it."""
    if base is None or base.kind != SnapshotKind.CHECKPOINT or base.verified_problem is not None:
        return None
    is_restorable = any(
        each.snapshot_id == base.snapshot_id for each in stream.catalog.snapshots.restorable(stream.stream_id)
    )
    has_failed = any(
        base.snapshot_id in failure.point for failure in stream.catalog.recoveries.of_stream(stream.stream_id)
    )
    return base if is_restorable and not has_failed else None


def _is_unchanged(stream: StreamHandle, base: BaseSnapshot, header: SnapshotHeader) -> bool:
    before = base.manifest.header
    if (before.kind, before.batch_id, before.query_id) != (header.kind, header.batch_id, header.query_id):
        return False
    ignored = set(_OF_ONE_SNAPSHOT)
    if stream.catalog.streams.get(stream.stream_id).restored_snapshot_id == before.snapshot_id:
        # The timeline began with it.
        ignored.add("timeline")
    if _comparable(before.properties, ignored) != _comparable(header.properties, ignored):
        return False
    return not base.manifest.unusable_objects(base.file_io, base.directory)


def _comparable(properties: Mapping[str, object], ignored: set[str]) -> str:
    return json.dumps({name: value for name, value in properties.items() if name not in ignored}, sort_keys=True)


def take_snapshot(
    stream: StreamHandle,
    live: LiveDirectory,
    order: SnapshotOrder,
    *,
    now_ms: int,
    on_cut: Callable[[int], None] = lambda _batch: None,
    should_abort: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _done, _total: None,
) -> TakenSnapshot:
    """Cut a live directory, of a running or a stopped query, at its newest commit and store the cut.

    Spark may purge files during a slow upload, so they are pinned first; then `on_cut` gets the batch id. If Spark is
    faster, a new cut is taken. If `should_abort` returns True, what was written is deleted.
    """
    return until_not_overtaken(
        lambda: _take(stream, live, order, now_ms=now_ms, on_cut=on_cut, should_abort=should_abort, progress=progress)
    )


def _take(
    stream: StreamHandle,
    live: LiveDirectory,
    order: SnapshotOrder,
    *,
    now_ms: int,
    on_cut: Callable[[int], None],
    should_abort: Callable[[], bool],
    progress: Progress,
) -> TakenSnapshot:
    is_checkpoint = order.kind is SnapshotKind.CHECKPOINT
    base = stream.store.base(order.base) if is_checkpoint else None
    # A snapshot without the state of a stateful query would look like that of a stateless one.
    known = KnownQuery.of(order.properties.get("plan"), base.manifest.header.properties if base is not None else None)
    with staged_cut(
        live, carry_in_flight=order.carry_in_flight, sinks=sinks_of(order.sinks), base=base, known=known
    ) as staged:
        taken = staged.cut

        runner = executors_above(stream.executor_copy_bytes) if stream.executor_copy_bytes is not None else None

        def stage(files: list[Source]) -> list[Source]:
            size = sum(file.size for file in files)
            # Executors cannot reach files pinned on this machine; they read what Spark has not purged in the meantime.
            held = files if runner is not None and runner.takes(size) else staged.stage(files)
            on_cut(taken.batch_id)
            return held

        named = {"label": order.label} if order.label is not None else {}
        properties = {
            **taken.properties,
            **guarantees(ExecutionMode(taken.properties["mode"]), order.sinks).properties(),
        }
        properties |= {"other_sinks": names_of_others(order.sinks), DEPLOYMENT: stream.catalog.deployment_id}
        properties |= {TAKEN_FROM: live.url, **order.properties, **named}
        identities = order.properties.get(SOURCE_IDENTITIES)
        properties |= reads_at_cut(stream.catalog, stream.stream_id, identities, staged.needed)
        if not is_checkpoint:
            own = query_ids_of(stream)
            properties |= topic_ends(sinks_of(order.sinks), own, taken.query_id, taken.batch_id)
        header = SnapshotHeader(
            snapshot_id=order.snapshot_id,
            stream_id=stream.stream_id,
            kind=order.kind,
            number=order.number,
            created_at_ms=now_ms,
            batch_id=taken.batch_id,
            query_id=taken.query_id,
            properties=properties,
        )
        renews = order.renews
        if renews is not None and base is not None and _is_unchanged(stream, base, header):
            on_cut(taken.batch_id)
            manifest = base.manifest
            existing = StoredSnapshot(order.base or "", manifest.full_bytes, 0, manifest.file_count)
            return TakenSnapshot(order, taken.batch_id, taken.query_id, existing, properties, renews.snapshot_id)
        if is_checkpoint:
            stored = stream.store.write_checkpoint(
                header,
                staged.hand_over(),
                base=base,
                extends=taken.extends,
                stage=stage,
                should_abort=should_abort,
                runner=runner,
            )
        else:
            stored = stream.store.write_savepoint(
                header,
                staged.hand_over(),
                target_directory=order.target_directory,
                base=order.base,
                stage=stage,
                should_abort=should_abort,
                runner=runner,
                progress=progress,
            )
    return TakenSnapshot(order, taken.batch_id, taken.query_id, stored, properties)


@dataclass(frozen=True)
class BatchFigures:
    """Figures of the query up to one batch; `watermark` is event time as ISO-8601."""

    rows: int | None = None
    state_rows: int | None = None
    watermark: str | None = None
    lags: Mapping[str, int] = field(default_factory=dict)

    def properties(self) -> dict[str, object]:
        return {"records_behind": dict(self.lags)} if self.lags else {}


def provenance(stream: StreamHandle, sinks: Sequence[str], facts: QueryFacts | None = None) -> dict[str, object]:
    """Properties for a snapshot that is about to be taken; unknown values are left out.

    Without `facts` the query is not running: `code_version` is left out, because other code may have written the live
    directory, and `plan` is that of the query started last.
    """
    before = next(iter(stream.catalog.snapshots.restorable(stream.stream_id)), None)
    record = stream.catalog.streams.get(stream.stream_id)
    latest = stream.catalog.executions.latest(stream.stream_id)
    known: dict[str, object | None] = {
        SINK_IDS: with_newest_batch((latest.progress if latest is not None else None) or {}) or None,
        "parent_snapshot_id": before.snapshot_id if before is not None else None,
        "timeline": record.timeline,
        SOURCE_IDENTITIES: last_identities(stream.catalog, record),
    }
    if facts is not None:
        known["code_version"] = stream.code_version
        known["plan_fingerprint"] = facts.plan_fingerprint
        known["plan"] = facts.plan.as_record() if facts.plan is not None else None
        known["spark_version"] = facts.spark_version
        known[COLUMNS] = facts.columns
        if facts.mode is not None:
            known |= guarantees(facts.mode, sinks).properties()
    else:
        known["plan"] = record.plan or None
    return {name: value for name, value in known.items() if value is not None}


def trigger_properties(trigger: SnapshotTrigger, schedule: str | None) -> dict[str, object]:
    return {"trigger": trigger.value, **({"schedule": schedule} if schedule is not None else {})}


@dataclass(frozen=True)
class NotRecorded:
    """A snapshot that the catalog lacks; only if that `is_certain` may its bytes be deleted."""

    why: str
    is_certain: bool


def record_snapshot(
    catalog: Catalog,
    taken: TakenSnapshot,
    figures: BatchFigures,
    *,
    duration_ms: int,
    lease: LeaseRecord | None,
    after_batch: bool = False,
    alignment_ms: int | None = None,
) -> SnapshotRecord | NotRecorded:
    """Record a taken snapshot; without a lease, of a stream that is not running.

    If the connection breaks, the attempt is recorded as failed, which the catalog accepts only of an incomplete one,
    and read again. If the outcome stays unknown, or after a LeaseLostError, the bytes must stay, as in Flink after a
    `PossibleInconsistentStateException`. `after_batch`: this execution has committed one.
    """
    snapshots, snapshot_id, stored = catalog.snapshots, taken.order.snapshot_id, taken.stored
    facts = CompletedSnapshot(
        location=stored.location,
        batch_id=taken.batch_id,
        query_id=taken.query_id,
        full_bytes=stored.full_bytes,
        incremental_bytes=stored.incremental_bytes,
        file_count=stored.file_count,
        rows=figures.rows,
        state_rows=figures.state_rows,
        watermark=figures.watermark,
        duration_ms=duration_ms,
        properties={**taken.properties, **figures.properties()},
    )
    try:
        return snapshots.complete(lease, snapshot_id, facts, after_batch=after_batch, alignment_ms=alignment_ms)
    except LeaseLostError:
        raise
    except CkptError as error:
        why = str(error)
    reason = f"The catalog could not record it: {why}"
    try:
        snapshots.fail(lease, snapshot_id, reason)
        snapshot = snapshots.get(snapshot_id)
    except LeaseLostError:
        raise
    except CkptError:
        return NotRecorded(
            f"{why} Its files stay at {stored.location}, because the catalog may list them.", is_certain=False
        )
    return snapshot if snapshot.status is SnapshotStatus.COMPLETED else NotRecorded(why, is_certain=True)


@dataclass(frozen=True)
class DirectoryToAdopt:
    url: str
    sinks: Sequence[str] = ()


def savepoint_of_stopped_stream(
    stream: StreamHandle,
    *,
    label: str | None = None,
    target_directory: str | None = None,
    schedule: str | None = None,
    trigger: SnapshotTrigger = SnapshotTrigger.MANUAL,
    lease: LeaseRecord | None = None,
    adopting: DirectoryToAdopt | None = None,
    progress: Progress = lambda _done, _total: None,
) -> SnapshotRecord:
    """Take a savepoint of a stream whose query is not running.

    Operators need no lease: reading at a commit is safe alongside any writer, and the number comes from the catalog. A
    run about to start its query passes its own. `adopting` is cut instead of the live directory.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    directory = record.live_directory if adopting is None else adopting.url
    if directory is None:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has no live directory: it never ran, or its state was deleted when it was "
            "canceled. Start it first."
        )
    snapshot_id = str(uuid.uuid4())
    why = trigger if schedule is None else SnapshotTrigger.PERIODIC
    number = stream.catalog.streams.allocate_number(stream.stream_id, lease=lease)
    began_ms = wall_clock_ms()
    sinks = tuple(sinks_written(stream) if adopting is None else adopting.sinks)
    base = sharing_base(stream)
    adopted = adopted_directory(record)
    is_anothers = adopting is not None or (adopted is not None and adopted.is_pending)
    of_adoption = {ADOPTED_FROM: directory} if is_anothers else {}
    order = SnapshotOrder(
        SnapshotKind.SAVEPOINT,
        number,
        snapshot_id,
        base=base.location if base is not None else None,
        target_directory=target_directory,
        sinks=sinks,
        label=label,
        properties=provenance(stream, sinks) | trigger_properties(why, schedule) | of_adoption,
    )
    snapshots = stream.catalog.snapshots
    begun = snapshots.start(
        lease,
        snapshot_id=snapshot_id,
        stream_id=stream.stream_id,
        execution_id=lease.execution_id if lease is not None else None,
        number=number,
        trigger=why,
        timeline=record.timeline,
        label=label,
        schedule=schedule,
        target_directory=target_directory,
    )
    try:
        # The hold on the attempt itself shows that its process is alive.
        with holding(stream.catalog, [begun, base], f"savepoint {snapshot_id}"):
            taken = take_snapshot(stream, LiveDirectory(directory), order, now_ms=began_ms, progress=progress)
    except BaseException as error:
        # An interrupted attempt is no longer in progress either.
        snapshots.fail(lease, snapshot_id, str(error) or type(error).__name__)
        raise
    duration_ms = wall_clock_ms() - began_ms
    try:
        recorded = record_snapshot(stream.catalog, taken, BatchFigures(), duration_ms=duration_ms, lease=lease)
    except BaseException as error:
        if not isinstance(error, CkptError) and lease is None:
            # A signal. With a lease, its next holder settles the attempt.
            snapshots.fail(None, snapshot_id, str(error) or type(error).__name__)
            if snapshots.get(snapshot_id).status is not SnapshotStatus.COMPLETED:
                stream.store.discard(taken.stored.location)
        raise
    if isinstance(recorded, NotRecorded):
        if recorded.is_certain:
            stream.store.discard(taken.stored.location)
        raise CatalogError(recorded.why)
    return recorded
