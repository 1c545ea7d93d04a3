"""The folder a described query will write files to, before it is started, and the log it begins there.

A query that resumes after batch N in a folder without a log leaves a hole below N+1, which Spark refuses at the next
compaction and at the next read (`CompactibleFileStreamLog.getAllValidBatches`). So a fork's folder is given a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dagster_ckpt.spark.described_query import described_field
from dagster_ckpt.spark.file_sink import LOG, SinkEntry, roll_back
from dagster_ckpt.spark.file_source import COMPACT, entry_id
from dagster_ckpt.spark.folder import local_path
from dagster_ckpt.spark.opening import open_folder

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Spark's built-in file formats; others with a path (Delta, Iceberg) keep their own record of batches.
_FILE_FORMATS = {"parquet", "json", "csv", "orc", "text", "avro", "xml"}
# spark.sql.streaming.fileSink.log.compactInterval
_COMPACT_INTERVAL = 10
_NOTHING = b"v1"


def output_folder(writer: DataStreamWriter) -> str | None:
    """Folder that a described query will write files to with a file sink.

    Returns:
        None for a sink of another kind, and for Spark Connect, whose writer is described elsewhere.
    """
    described: Any = getattr(writer, "_jwrite", None)
    if described is None:
        return None
    if str(described_field(described, "source")).lower() not in _FILE_FORMATS:
        return None
    path = described_field(described, "extraOptions").get("path")
    return str(path.get()) if path.isDefined() else None


def same_folder(one: str, other: str) -> bool:
    """Whether two spellings of a URL name one folder: Spark writes `file:/a` where a person writes `/a`."""
    return _plain(one) == _plain(other)


def logged_batch(path: str) -> int | None:
    """The newest batch in the log of a file sink's folder, or None where it has none.

    Raises:
        StorageAccessError: The folder cannot be reached.
    """
    return max((number for name in open_folder(path).list(LOG) if (number := entry_id(name)) is not None), default=None)


def empty_log(batch_id: int, like: Sequence[str] = ()) -> list[SinkEntry]:
    """Entries of a log that names no file and ends at a batch.

    Args:
        batch_id: The batch.
        like: Names of the entries of another log that ends there; they tell its compact interval.
    """
    if like:
        return [SinkEntry(name, _NOTHING) for name in like]
    base = (batch_id + 1) // _COMPACT_INTERVAL * _COMPACT_INTERVAL - 1
    names = [f"{base}{COMPACT}"] if base >= 0 else []
    return [SinkEntry(name, _NOTHING) for name in [*names, *map(str, range(base + 1, batch_id + 1))]]


def begin_log(path: str, batch_id: int, entries: Sequence[SinkEntry]) -> None:
    """Give a folder a log that ends at a batch; may be cut off anywhere and done again.

    Args:
        path: The folder; made if it is not there.
        batch_id: The batch the query resumes after.
        entries: The log.

    Raises:
        SinkRollbackError: The folder cannot be written.
    """
    # Only where there is none yet, and alike whoever writes it: nothing of a successor is destroyed.
    roll_back(path, batch_id, entries, still_mine=nullcontext)


def _plain(url: str) -> str:
    path = local_path(url)
    return str(path.resolve()) if path is not None else url.replace("s3a://", "s3://").rstrip("/")
