"""The output folder of a described query before it starts, and the log that a fork's folder gets.

A query that resumes after batch N in a folder without a log leaves a hole below N+1, which Spark
rejects at the next compaction and at the next read (`CompactibleFileStreamLog.getAllValidBatches`).
A fork's folder therefore gets a log.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_ckpt.config.storage_path import local_path
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import LOG, SinkEntry, StillMine, roll_back
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.query.description import described_field
from dagster_ckpt.spark.query.sinks import file_sink_path

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Spark's built-in file formats; others with a path (Delta, Iceberg) keep their own record of
# batches.
_FILE_FORMATS = {"parquet", "json", "csv", "orc", "text", "avro", "xml"}
# spark.sql.streaming.fileSink.log.compactInterval
_COMPACT_INTERVAL = 10
_NOTHING = b"v1"
# Drivers of the same storage.
_DRIVERS = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}


@dataclass(frozen=True)
class NamedOutput:
    """The output location of a described query.

    Attributes:
        format: Format of its sink, such as `parquet` or `kafka`.
        place: Its folder, topic or table, or None.
    """

    format: str
    place: str | None

    @property
    def folder(self) -> str | None:
        """The folder of a file sink; None for another kind of sink."""
        return self.place if self.format in _FILE_FORMATS else None

    @staticmethod
    def of_sinks(sinks: Sequence[str]) -> NamedOutput:
        """The output location of a query that reported these sinks: its file sink, if there is one."""
        folder = next((path for path in map(file_sink_path, sinks) if path is not None), None)
        return NamedOutput("parquet" if folder is not None else "", folder)

    def is_same(self, other: NamedOutput) -> bool:
        """Whether both write to the same location."""
        if self.place is None or other.place is None or self.format != other.format:
            return False
        return same_folder(self.place, other.place)


def named_output(writer: DataStreamWriter) -> NamedOutput | None:
    """The output location of a described query.

    Returns:
        None for Spark Connect, whose writer cannot be inspected.
    """
    described: Any = getattr(writer, "_jwrite", None)
    if described is None:
        return None
    options = described_field(described, "extraOptions")
    places = (options.get(name) for name in ("path", "topic", "table"))
    return NamedOutput(
        str(described_field(described, "source")).lower(),
        next((str(place.get()) for place in places if place.isDefined()), None),
    )


def same_folder(one: str, other: str) -> bool:
    """Whether two spellings of a URL refer to the same folder: Spark writes `file:/a` where a user writes `/a`."""
    return _plain(one) == _plain(other)


def folders_overlap(one: str, other: str) -> bool:
    """Whether two folders are the same, or one contains the other."""
    return _lies_in(one, other) or _lies_in(other, one)


def logged_batch(path: str) -> int | None:
    """The newest batch in the log of a file sink's folder, or None if it has none.

    Raises:
        StorageAccessError: The folder cannot be reached.
    """
    return max(
        (number for name in open_file_io(path).list(LOG) if (number := entry_id(name)) is not None), default=None
    )


def empty_log(batch_id: int, like: Sequence[str] = ()) -> list[SinkEntry]:
    """Entries of a log that lists no file and ends at a batch.

    Args:
        batch_id: The batch.
        like: Names of the entries of another log that ends there, from which the compact interval
            is derived.
    """
    if like:
        return [SinkEntry(name, _NOTHING) for name in like]
    base = (batch_id + 1) // _COMPACT_INTERVAL * _COMPACT_INTERVAL - 1
    names = [f"{base}{COMPACT}"] if base >= 0 else []
    return [SinkEntry(name, _NOTHING) for name in [*names, *map(str, range(base + 1, batch_id + 1))]]


def begin_log(path: str, batch_id: int, entries: Sequence[SinkEntry], *, still_mine: StillMine = nullcontext) -> None:
    """Create a log in a folder that ends at a batch; can be interrupted at any point and repeated.

    Args:
        path: The folder; created if it does not exist.
        batch_id: The batch after which the query resumes.
        entries: The log.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.

    Raises:
        SinkRollbackError: The folder cannot be written.
    """
    # Only if there is no log yet, and every writer creates the same one: nothing of a successor is
    # destroyed.
    roll_back(path, batch_id, entries, still_mine=still_mine)


def _lies_in(inner: str, outer: str) -> bool:
    path = local_path(inner)
    if path is None:
        return f"{_plain(inner).rstrip('/')}/".startswith(f"{_plain(outer).rstrip('/')}/")
    path = path.resolve()
    return _plain(outer) in {_known_by_its_inode(each) for each in (path, *path.parents)}


def _plain(url: str) -> str:
    path = local_path(url)
    if path is not None:
        return _known_by_its_inode(path)
    scheme, _, rest = url.partition("://")
    authority, _, below = rest.partition("/")
    # Normalised like Hadoop's `Path`.
    return f"{_DRIVERS.get(scheme.lower(), scheme.lower())}://{authority}{posixpath.normpath('/' + below.lstrip('/'))}"


def _known_by_its_inode(path: Path) -> str:
    """A local folder, independent of the path used: symbolic links, disks mounted twice, case-insensitive names."""
    path = path.resolve()
    for there in (path, *path.parents):
        try:
            stat = there.stat()
        except (FileNotFoundError, NotADirectoryError):
            # It does not exist yet: resolve relative to its nearest existing parent.
            continue
        except OSError:
            break
        return f"{stat.st_dev}:{stat.st_ino}/{path.relative_to(there)}"
    return str(path)
