"""What the catalog sensor puts on an asset: a snapshot as a materialization, a failed attempt as an observation."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pendulum

from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord, SnapshotTally

SEQUENCE_KEY = "dagster_ckpt/sequence"
SNAPSHOT_ID_KEY = "dagster_ckpt/snapshot_id"
BATCH_ID_KEY = "dagster_ckpt/batch_id"
STREAM_ID_KEY = "dagster_ckpt/stream_id"
TIMELINE_KEY = "dagster_ckpt/timeline"


def identity(event: EventRecord) -> str:
    """What tells an event from all others, also from those of a catalog that was made anew and counts from one."""
    return event.snapshot_id or f"event {event.sequence}"


def materialization(
    key: dg.AssetKey, event: EventRecord, snapshot: SnapshotRecord | None, tally: SnapshotTally | None
) -> dg.AssetMaterialization:
    """A snapshot on its asset.

    Args:
        key: The asset.
        event: The event that tells of it.
        snapshot: What the catalog knows of it; None where its row cannot be read: the event says what it says.
        tally: The checkpoints since the report before, this one among them; None where that is not known.
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
    """An attempt that failed, on its asset: nothing was materialized."""
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
    """The figures of a snapshot, as Dagster metadata; numbers are plotted on the asset's page."""
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
        # The page plots whole and decimal numbers only, no timestamps.
        figures["dagster_ckpt/watermark_ms"] = watermark_ms
    return {name: value for name, value in figures.items() if value is not None}


def _epoch_ms(watermark: str | None) -> int | None:
    try:
        if watermark is None:
            return None
        return round(pendulum.from_format(watermark, "YYYY-MM-DDTHH:mm:ss.SSS[Z]", tz="UTC").timestamp() * 1000)
    except ValueError:
        # A damaged row is shown as it is; it must not keep the others from being reported.
        return None
