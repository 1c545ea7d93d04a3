"""Read what an Iceberg table remembers of a query, from its newest metadata file.

A streaming write stores query id and epoch in its snapshot's summary, and skips an epoch that is
not greater than that of the nearest such ancestor of the current snapshot
(`SparkWrite.BaseStreamingWrite`). A table that is rolled back therefore forgets the epochs that
were undone.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, Field

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import inflated, number_in, reading
from dagster_ckpt.io.file_io import FileIO

METADATA_FOLDER = "metadata"
_QUERY = "spark.sql.streaming.queryId"
_EPOCH = "spark.sql.streaming.epochId"
# The zlib `wbits` value for a gzip header.
_GZIP = 31
# HadoopTableOperations writes v7.metadata.json, catalogs write 00007-<uuid>.metadata.json; both may
# be compressed.
_NAME = re.compile(r"v?(\d+)(-[^.]+)?(\.gz)?\.metadata\.json(\.gz)?")


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
    matches = [match for match in map(_NAME.fullmatch, table.list(METADATA_FOLDER)) if match]
    if not matches:
        raise FileNotFoundError(f"{table.url}/{METADATA_FOLDER}")
    name = max(matches, key=lambda match: int(match[1]))[0]
    data = table.read(f"{METADATA_FOLDER}/{name}")
    with reading(
        lambda why: LiveDirectoryError(f"{table.url}/{METADATA_FOLDER}/{name} is not Iceberg metadata: {why}.")
    ):
        return _Metadata.model_validate_json(inflated(data, _GZIP) if ".gz" in name else data)
