"""What the catalog sensor reports on an asset: a snapshot as a materialization, a failed attempt as an observation."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pendulum

from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord
from dagster_ckpt.catalog.snapshot_queries import SnapshotTally

SEQUENCE_KEY = "dagster_ckpt/sequence"
SNAPSHOT_ID_KEY = "dagster_ckpt/snapshot_id"
BATCH_ID_KEY = "dagster_ckpt/batch_id"
STREAM_ID_KEY = "dagster_ckpt/stream_id"
TIMELINE_KEY = "dagster_ckpt/timeline"


def identity(event: EventRecord) -> str:
    """Identifies an event even among those of a re-created catalog, which counts from one again."""
    return event.snapshot_id or f"event {event.sequence}"


def materialization(
    key: dg.AssetKey, event: EventRecord, snapshot: SnapshotRecord | None, tally: SnapshotTally | None
) -> dg.AssetMaterialization:
    """A snapshot as a materialization of its asset.

    Args:
        key: The asset.
        event: The event that reports the snapshot.
        snapshot: Its record in the catalog. None if the row cannot be read; the event's payload is used
            instead.
        tally: The checkpoints since the previous report, including this one; None if unknown.
    """
    metadata = snapshot_metadata(snapshot) if snapshot is not None else dict(event.payload)
    batch_id = metadata.get(BATCH_ID_KEY, "unknown")
    since = (
        {}
        if tally is None
        else {
            "dagster_ckpt/checkpoints_since_report": tally.count,
            "dagster_ckpt/rows_since_report": tally.rows,
            "dagster_ckpt/bytes_since_report": tally.incremental_bytes,
        }
    )
    return dg.AssetMaterialization(
        key,
        description=f"{metadata.get('dagster_ckpt/kind', event.type.value)} at batch {batch_id}",
        metadata={SEQUENCE_KEY: event.sequence, SNAPSHOT_ID_KEY: identity(event), **metadata, **since},
        tags={"dagster/data_version": str(batch_id)},
    )


def failure_observation(key: dg.AssetKey, event: EventRecord) -> dg.AssetObservation:
    """A failed attempt as an observation of its asset: nothing was materialized."""
    kind = "savepoint" if event.type is EventType.SAVEPOINT_FAILED else "checkpoint"
    return dg.AssetObservation(
        key,
        description=f"a {kind} failed",
        metadata={
            SEQUENCE_KEY: event.sequence,
            SNAPSHOT_ID_KEY: identity(event),
            "dagster_ckpt/failure": str(event.payload.get("reason", "unknown")),
        },
    )


def snapshot_metadata(snapshot: SnapshotRecord) -> dict[str, Any]:
    """The figures of a snapshot as Dagster metadata; the asset's page plots numbers."""
    figures: dict[str, Any] = {
        BATCH_ID_KEY: snapshot.batch_id,
        STREAM_ID_KEY: snapshot.stream_id,
        TIMELINE_KEY: snapshot.timeline,
        "dagster_ckpt/rows": snapshot.rows,
        "dagster_ckpt/state_rows": snapshot.state_rows,
        "dagster_ckpt/duration_ms": snapshot.duration_ms,
        "dagster_ckpt/full_bytes": snapshot.full_bytes,
        "dagster_ckpt/incremental_bytes": snapshot.incremental_bytes,
        "dagster_ckpt/number": snapshot.number,
        "dagster_ckpt/kind": snapshot.kind,
        "dagster_ckpt/trigger": snapshot.trigger.value,
        "dagster_ckpt/location": dg.MetadataValue.path(snapshot.location or ""),
        SNAPSHOT_ID_KEY: snapshot.snapshot_id,
        "dagster_ckpt/watermark": snapshot.watermark,
    }
    watermark_ms = _epoch_ms(snapshot.watermark)
    if watermark_ms is not None:
        figures["dagster_ckpt/watermark_time"] = dg.MetadataValue.timestamp(watermark_ms / 1000)
        # The page plots only integers and floats, not timestamps.
        figures["dagster_ckpt/watermark_ms"] = watermark_ms
    return {name: value for name, value in figures.items() if value is not None}


def _epoch_ms(watermark: str | None) -> int | None:
    try:
        if watermark is None:
            return None
        return round(pendulum.from_format(watermark, "YYYY-MM-DDTHH:mm:ss.SSS[Z]", tz="UTC").timestamp() * 1000)
    except ValueError:
        # A damaged value is reported unchanged; it must not block other reports.
        return None
