"""The number of a stream's next snapshot: above every number in use, even if the catalog has lost some."""

from __future__ import annotations

import re

from dagster_ckpt.catalog.records import LeaseRecord, SnapshotRecord
from dagster_ckpt.stream.handle import StreamHandle

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
