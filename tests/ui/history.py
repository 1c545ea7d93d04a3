"""A long history, written into a catalog directly: only its length matters."""

from __future__ import annotations

import json

from sqlalchemy import insert

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.tables import snapshots

BEGIN_MS = 1_700_000_000_000


def lengthen(
    catalog: Catalog, stream_id: str, count: int, *, label: str | None = None, behind: int | None = None
) -> None:
    """Add deleted checkpoints to a stream, one every second; each hundredth attempt failed.

    Args:
        catalog: The catalog.
        stream_id: The stream.
        count: Number of attempts.
        label: A label for all of them.
        behind: Records that wait in the source of each.
    """
    rows = []
    for number in range(count):
        failed = number % 100 == 99
        at_ms = BEGIN_MS + 1000 * number
        rows.append(
            {
                "snapshot_id": f"old-{number:07}",
                "stream_id": stream_id,
                "kind": "CHECKPOINT",
                "number": number - count,
                "status": "FAILED" if failed else "DELETED",
                "trigger": "PERIODIC",
                "timeline": 0,
                "batch_id": number,
                "duration_ms": None if failed else 100 + number % 50,
                "full_bytes": None if failed else 1_000_000 + number,
                "incremental_bytes": None if failed else 1_000,
                "label": label,
                "properties": json.dumps({"records_behind": {"orders-0": behind}} if behind is not None else {}),
                "records_behind": behind,
                "watermark": f"2023-11-14T22:13:{number % 60:02}.000Z" if behind is not None else None,
                "failure_reason": "the disk is full" if failed else None,
                "created_at_ms": at_ms,
                "completed_at_ms": None if failed else at_ms + 100,
                "claimed": False,
            }
        )
    with catalog.database.writing() as connection:
        connection.execute(insert(snapshots), rows)
