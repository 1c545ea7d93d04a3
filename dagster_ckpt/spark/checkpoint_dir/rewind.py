"""Rewind to an earlier batch, using only what Spark itself still retains.

Spark retains `spark.sql.streaming.minBatchesToRetain` (100) batches of its logs and state. The
rewound directory is built next to the live one, from hard links if both are local, and the live one
is not changed: after an interruption, Spark finds either the old directory or the complete rewound
one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from dagster_ckpt.errors import LiveDirectoryError, SinkRollbackError
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import (
    LOG,
    CapturedSink,
    SinkEntry,
    StillMine,
    capture,
    roll_back,
)
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import parse_query_id


def retained_batches(live: LiveDirectory) -> list[int]:
    """Committed batches to which the logs of a live directory can be rewound, ascending.

    Only a cut shows whether the state of a batch is complete too.

    Raises:
        StorageAccessError: The directory cannot be reached.
    """
    offsets = set(batch_ids(live.folder, OFFSETS))
    # To start after batch N, Spark needs the offsets of N and of the batch before it.
    return [
        batch for batch in batch_ids(live.folder, COMMITS) if batch in offsets and (batch == 0 or batch - 1 in offsets)
    ]


def live_query_id(live: LiveDirectory) -> str | None:
    """Id of the query of a live directory; None if it cannot be read.

    Raises:
        StorageAccessError: The directory cannot be reached.
    """
    try:
        return parse_query_id(live.folder.read(METADATA), f"{live.url}/{METADATA}")
    except (FileNotFoundError, LiveDirectoryError):
        return None


def give_query_id(live: LiveDirectory, query_id: str) -> None:
    """Change the query id of a live directory that is not in use yet.

    Raises:
        StorageAccessError: It cannot be written.
    """
    # A new file replaces the old one, which may be a hard link shared with the original directory.
    live.folder.write(METADATA, [json.dumps({"id": query_id}, separators=(",", ":")).encode()])


def own_past(sinks: Sequence[str], batch_id: int) -> list[CapturedSink]:
    """Read the logs of file sinks up to a batch from the sinks themselves.

    Args:
        sinks: The query's sinks, as its progress names them.
        batch_id: The batch to go back to.

    Raises:
        SinkRollbackError: A log no longer reaches back that far.
        IncompleteCutError: An entry of a log is missing.
        StorageAccessError: A log cannot be read.
    """
    captured = capture(sinks, batch_id)
    for sink in captured:
        first = sink.files[0].source.rsplit("/", 1)[-1] if sink.files else "0"
        if first != "0" and not first.endswith(COMPACT):
            raise SinkRollbackError(
                f"{sink.path}/{LOG} begins with entry {first}, and what came before is only in later compact "
                f"entries: the sink cannot be brought back to batch {batch_id}. Go back to a snapshot, which carries "
                "this log."
            )
    return captured


def roll_back_to_own_past(sinks: Sequence[str], batch_id: int, *, still_mine: StillMine) -> list[str]:
    """Roll file sinks back to a batch by their own logs; can be interrupted at any point and repeated.

    Args:
        sinks: The query's sinks, as its progress names them.
        batch_id: The batch to go back to.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.

    Returns:
        The folders that were rolled back.

    Raises:
        SinkRollbackError: A sink cannot be rolled back.
        IncompleteCutError: An entry of a log is missing.
        StorageAccessError: A log cannot be read.
    """
    captured = own_past(sinks, batch_id)
    for sink in captured:
        entries = [SinkEntry(file.source.rsplit("/", 1)[-1], file.folder.read(file.source)) for file in sink.files]
        roll_back(sink.path, batch_id, entries, still_mine=still_mine)
    return [sink.path for sink in captured]
