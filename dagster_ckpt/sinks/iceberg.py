"""Iceberg tables: what one remembers of a query, read from its newest metadata, and what that means for a replay.

A streaming write stores query id and epoch in its snapshot's summary, and skips an epoch that is
not greater than that of the nearest such ancestor of the current snapshot
(`SparkWrite.BaseStreamingWrite`). A table that is rolled back therefore forgets the epochs that
were undone.
"""

from __future__ import annotations

import re
from typing import Self

from pydantic import BaseModel, Field

from dagster_ckpt.errors import CkptError, LiveDirectoryError
from dagster_ckpt.foreign import inflated, number_in, reading
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.sink import OnRepeat, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.sinks.tables import cannot_look, forecast_named, forecast_remembered

_WRITE = re.compile(r"IcebergWrite\(table=(?P<path>[^,)]+).*\)")
# A folder, as a path or a URL.
_LOCATION = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?/\S.*")
METADATA_FOLDER = "metadata"
_QUERY = "spark.sql.streaming.queryId"
_EPOCH = "spark.sql.streaming.epochId"
# The zlib `wbits` value for a gzip header.
_GZIP = 31
# HadoopTableOperations writes v7.metadata.json, catalogs write 00007-<uuid>.metadata.json; both may
# be compressed.
_METADATA_NAME = re.compile(r"v?(\d+)(-[^.]+)?(\.gz)?\.metadata\.json(\.gz)?")


class IcebergMemory(BaseModel):
    """What a table remembers of one query.

    Attributes:
        last_batch: Newest batch among the ancestors of the current snapshot, or None.
        snapshot_id: The table snapshot to roll back to, so that the table forgets the batches after
            the requested one; None if there are none, or no snapshot precedes them.
    """

    last_batch: int | None
    snapshot_id: int | None


class _Snapshot(BaseModel):
    id: int = Field(alias="snapshot-id")
    parent: int | None = Field(default=None, alias="parent-snapshot-id")
    summary: dict[str, str] = {}


class _Metadata(BaseModel):
    current: int | None = Field(default=None, alias="current-snapshot-id")
    snapshots: list[_Snapshot] = []


def read_iceberg_memory(table: FileIO, query_id: str, batch_id: int) -> IcebergMemory:
    """Read what a table remembers of a query.

    Args:
        table: The table's folder.
        query_id: Id of the query.
        batch_id: The batch to go back to.

    Raises:
        FileNotFoundError: The folder contains no Iceberg metadata.
        LiveDirectoryError: The newest metadata cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    metadata = _newest(table)
    snapshots = {snapshot.id: snapshot for snapshot in metadata.snapshots}
    snapshot = snapshots.get(metadata.current) if metadata.current is not None else None
    last: int | None = None
    target: int | None = None
    while snapshot is not None:
        epoch = number_in(snapshot.summary.get(_EPOCH, ""))
        if snapshot.summary.get(_QUERY) == query_id and epoch is not None:
            last = epoch if last is None else last
            if epoch <= batch_id:
                break
            target = snapshot.parent
        # Visit each snapshot once: a damaged one may be its own ancestor.
        del snapshots[snapshot.id]
        snapshot = snapshots.get(snapshot.parent) if snapshot.parent is not None else None
    return IcebergMemory(last_batch=last, snapshot_id=target)


def _newest(table: FileIO) -> _Metadata:
    matches = [match for match in map(_METADATA_NAME.fullmatch, table.list(METADATA_FOLDER)) if match]
    if not matches:
        raise FileNotFoundError(f"{table.url}/{METADATA_FOLDER}")
    name = max(matches, key=lambda match: int(match[1]))[0]
    data = table.read(f"{METADATA_FOLDER}/{name}")
    with reading(
        lambda why: LiveDirectoryError(f"{table.url}/{METADATA_FOLDER}/{name} is not Iceberg metadata: {why}.")
    ):
        return _Metadata.model_validate_json(inflated(data, _GZIP) if ".gz" in name else data)


class IcebergTable(Sink):
    """An Iceberg table known by its folder."""

    on_repeat = OnRepeat.RUNS
    is_proven = False
    knows_queries = True

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _WRITE.fullmatch(name)
        if match is not None:
            return cls(name, match["path"])
        return cls(name, name) if _LOCATION.fullmatch(name) else None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        place = self.place or self.name
        if not _LOCATION.fullmatch(place):
            return forecast_named(self, replay)
        try:
            memory = read_iceberg_memory(open_file_io(place), replay.query_id or "", replay.to_batch)
        except FileNotFoundError:
            return forecast_named(self, replay)
        except CkptError as error:
            return cannot_look(self, "Iceberg", error)
        back = f"Roll it back to snapshot {memory.snapshot_id} first."
        advice = back if memory.snapshot_id is not None else ""
        if memory.last_batch is not None and memory.last_batch > replay.to_batch and not replay.keeps_query_id:
            return SinkForecast(
                self.name,
                SinkEffect.DUPLICATE,
                "The table does not know the new query id: it takes the batches again.",
                advice,
            )
        return forecast_remembered(self, memory.last_batch, replay, advice=advice)
