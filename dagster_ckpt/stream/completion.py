"""Numbers of snapshots, what a header records about its origin, and how the catalog records a stored snapshot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    CompletedSnapshot,
    LeaseRecord,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
)
from dagster_ckpt.errors import CkptError, LeaseLostError
from dagster_ckpt.sinks.guarantees import guarantees
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.batch_progress import BatchFigures
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import SINK_IDS, with_newest_batch
from dagster_ckpt.stream.snapshotting import TakenSnapshot


def provenance(stream: StreamHandle, sinks: Sequence[str], facts: QueryFacts | None = None) -> dict[str, object]:
    """Properties for a snapshot that is about to be taken.

    Args:
        stream: The stream.
        sinks: Its sinks, as named in the query's progress.
        facts: What is known about the running query; None for a query that is not running. The code
            version is then omitted: the code loaded now may not be the code that wrote the live
            directory.

    Returns:
        `sink_ids` (see `stream/known_sinks.py`), `source_identities`, `parent_snapshot_id` (the previous snapshot on
        this timeline, or the one that the timeline began with), `timeline`, and for a running query `code_version`,
        `plan_fingerprint`,
        `spark_version`, `mode` and `guarantee`. `plan` is that of the running query, else that of the
        query that was started last. Unknown values are omitted.
    """
    before = next(iter(stream.catalog.snapshots.restorable(stream.stream_id)), None)
    record = stream.catalog.streams.get(stream.stream_id)
    latest = stream.catalog.executions.latest(stream.stream_id)
    known: dict[str, object | None] = {
        SINK_IDS: with_newest_batch((latest.progress if latest is not None else None) or {}) or None,
        "parent_snapshot_id": before.snapshot_id if before is not None else None,
        "timeline": record.timeline,
        SOURCE_IDENTITIES: stream.catalog.executions.last_sources(stream.stream_id, record.live_directory),
    }
    if facts is not None:
        known["code_version"] = stream.code_version
        known["plan_fingerprint"] = facts.plan_fingerprint
        known["plan"] = facts.plan.as_record() if facts.plan is not None else None
        known["spark_version"] = facts.spark_version
        if facts.mode is not None:
            known |= guarantees(facts.mode, sinks).properties()
    else:
        known["plan"] = record.plan or None
    return {name: value for name, value in known.items() if value is not None}


def trigger_properties(trigger: SnapshotTrigger, schedule: str | None) -> dict[str, object]:
    """Properties that record why a snapshot is taken, for a catalog that is rebuilt."""
    return {"trigger": trigger.value, **({"schedule": schedule} if schedule is not None else {})}


@dataclass(frozen=True)
class NotRecorded:
    """A snapshot that, as far as can be determined, the catalog did not record.

    Attributes:
        why: What went wrong, for a message.
        is_certain: Whether the catalog itself confirms it. Only then may the bytes be deleted.
    """

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
) -> SnapshotRecord | NotRecorded:
    """Record that a snapshot is complete in storage.

    If a connection breaks during a commit, the outcome is unknown. This function then sends the
    catalog a change that only an incomplete snapshot accepts, and reads the snapshot again. If the
    catalog does not answer, the outcome stays unknown and the bytes must stay, as in Flink after a
    `PossibleInconsistentStateException`.

    Args:
        catalog: The catalog, in which the snapshot is in progress.
        taken: The stored snapshot.
        figures: Figures of the batches since the previous snapshot.
        duration_ms: How long the attempt took.
        lease: The lease of the run that took it; None for a savepoint of a stream that is not running.
        after_batch: Whether the execution that took it has committed a batch.

    Raises:
        LeaseLostError: The lease is no longer held. The snapshot is not recorded, and this process must
            not delete its bytes.
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
        return snapshots.complete(lease, snapshot_id, facts, after_batch=after_batch)
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


_CHECKPOINT = re.compile(r"chk-(\d+)")


def advance_checkpoint_id(stream: StreamHandle, restored: SnapshotRecord | None, lease: LeaseRecord) -> int:
    """Raise a stream's counter above its stored checkpoints and the snapshot that it is restored from.

    A catalog that was lost or restored from a backup counts from below the stored numbers. A number
    is never written twice, so every checkpoint would fail until the counter had caught up. Flink
    likewise continues from the number of the restored checkpoint.

    Args:
        stream: The stream, registered in the catalog.
        restored: The snapshot that an execution starts from, if any.
        lease: The lease of the stream.

    Returns:
        The next number.

    Raises:
        LeaseLostError: The lease is no longer held.
    """
    names = (location.rstrip("/").rpartition("/")[2] for location in stream.store.checkpoints())
    used = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    if restored is not None and restored.number is not None:
        used.append(restored.number)
    counted = stream.catalog.streams.get(stream.stream_id).next_number
    beyond = max(used, default=0) + 1
    if beyond > counted:
        stream.catalog.streams.count_from(lease, beyond)
    return max(beyond, counted)
