"""A long history, written into a catalog directly: only its length matters."""

from __future__ import annotations

import json

from sqlalchemy import insert

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType
from dagster_ckpt.catalog.tables import executions, snapshots

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


# What a failed execution of `live_through` says, as Spark would: a headline, then details.
LONG_ERROR = (
    "STREAM_FAILED: the query ended with an error while it wrote its batch. Caused by: java.io.IOException: No space "
    "left on device\n\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)" + "\n\tat spark.Frame" * 12
)


def live_through(catalog: Catalog, stream_id: str, *, failures: int = 3, begin_ms: int = BEGIN_MS) -> None:
    """Give a stream a life: an execution that failed and its restarts, with hours off between the first two.

    Each execution lives for ten minutes and takes a checkpoint every minute; the last one is suspended.
    """
    runs, taken, ends = [], [], []
    for number in range(failures + 1):
        started_ms = begin_ms + number * 660_000 + (7_200_000 if number else 0)
        is_last = number == failures
        ended_ms = started_ms + 600_000
        runs.append(
            {
                "execution_id": f"run-{number}",
                "stream_id": stream_id,
                "ordinal": number - failures - 1,
                "run_id": f"run-{number}",
                "cause": "RESTART_NEW_RUN" if number else "MANUAL",
                "status": "SUSPENDED" if is_last else "FAILED",
                "settled": True,
                "host": "host",
                "pid": 1,
                "started_at_ms": started_ms,
                "ended_at_ms": ended_ms,
                "reason": "requested" if is_last else LONG_ERROR,
                "recovery": json.dumps({"kind": "RESUME" if number else "START_EMPTY"}),
                "progress": "{}",
                "heartbeat_at_ms": ended_ms,
            }
        )
        if not is_last:
            ends.append({"status": "FAILED", "reason": LONG_ERROR})
        taken += [
            {
                "snapshot_id": f"of-run-{number}-{minute}",
                "stream_id": stream_id,
                "execution_id": f"run-{number}",
                "kind": "CHECKPOINT",
                "number": 1000 + number * 10 + minute,
                "status": "DELETED",
                "trigger": "PERIODIC",
                "timeline": 0,
                "batch_id": number * 100 + minute,
                "duration_ms": 9_000 if number == minute == 1 else 100 + 7 * minute,
                "full_bytes": 1_000_000 + number * 40_000 + minute * 3_000,
                "incremental_bytes": 3_000,
                "properties": "{}",
                "created_at_ms": started_ms + minute * 60_000,
                "completed_at_ms": started_ms + minute * 60_000 + 100,
                "claimed": False,
            }
            for minute in range(1, 10)
        ]
    with catalog.database.writing() as connection:
        connection.execute(insert(executions), runs)
        connection.execute(insert(snapshots), taken)
        for payload in ends:
            catalog.database.record_event(connection, stream_id, EventType.EXECUTION_ENDED, payload=payload)
