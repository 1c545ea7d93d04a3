"""The rows that a sink has of one batch, for a comparison with its replay."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta_log import DeltaLog
from dagster_ckpt.sinks.file_sink_log import LOG, files_of_batch, log_entries
from dagster_ckpt.sinks.iceberg_history import IcebergHistory
from dagster_ckpt.sinks.sink import AskedBatch, BatchRows
from dagster_ckpt.spark.checkpoint_dir.file_source import existing_files
from dagster_ckpt.spark.query.description import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NOT_OF_FILES = ("path", "checkpointlocation")
_AS_TEXT = ("csv", "json", "text", "xml")


def rows_in_files(folder: str, asked: AskedBatch) -> BatchRows:
    files = files_of_batch(folder, asked.batch_id)
    if files is None:
        return BatchRows(None, _without_entry(folder, asked.batch_id))
    missing = sorted(set(files) - set(existing_files(files, asked.session) or ()))
    if missing:
        return BatchRows(None, f"{len(missing)} of the batch's {len(files)} files are gone, such as {missing[0]}")
    options = {name: value for name, value in asked.options.items() if name not in _NOT_OF_FILES}

    def read(places: list[str], **more: str) -> DataFrame:
        reader = asked.session.read.format(asked.output_format).options(**options, **more).schema(asked.like.schema)
        return reader.load(places).select(*map(quoted, asked.like.columns))

    replayed = None
    if asked.output_format in _AS_TEXT:
        # Text has no nulls, and times of milliseconds.
        asked.like.write.format(asked.output_format).options(**options).save(asked.scratch)
        replayed = read([asked.scratch])
    rows = read([unquote(file) for file in files], basePath=folder) if files else asked.like.limit(0)
    return BatchRows(rows, f"{len(files)} files in {folder}", replayed)


def _without_entry(folder: str, batch_id: int) -> str:
    newest = max(log_entries(open_file_io(folder)), default=None)
    if newest is None or newest < batch_id:
        return f"{folder} does not have the batch: its log ends at {'nothing' if newest is None else newest}"
    return f"{folder}/{LOG} no longer lists the files of the batch apart: its entry was merged into a later one"


def version_of_batch(table: FileIO, asked: AskedBatch) -> int | None:
    try:
        return DeltaLog(table).version_of(asked.query_id, asked.batch_id) if asked.query_id is not None else None
    except FileNotFoundError:
        return None


def rows_in_delta(folder: str, table: FileIO, asked: AskedBatch) -> BatchRows:
    version = version_of_batch(table, asked)
    if version is None:
        return BatchRows(None, f"no readable commit of the Delta table {folder} is of the batch")
    from pyspark.sql import functions as F

    rows = asked.session.read.format("delta").option("versionAsOf", version).load(folder)
    added = rows.where(F.col("_metadata.file_name").isin(DeltaLog(table).files_added(version)))
    return BatchRows(_like(added, asked.like), f"version {version} of the Delta table {folder}")


def rows_in_iceberg(table: str, history: IcebergHistory, asked: AskedBatch) -> BatchRows:
    found = history.snapshot_of(asked.query_id, asked.batch_id) if asked.query_id is not None else None
    if found is None:
        return BatchRows(None, f"no snapshot of the Iceberg table {table} is of the batch, or it has expired")
    says = f"snapshot {found.id} of the Iceberg table {table}"
    reader = asked.session.read.format("iceberg")
    if found.summary.get("operation") == "append" and found.parent is not None:
        reader = reader.option("start-snapshot-id", found.parent).option("end-snapshot-id", found.id)
    else:
        # The first, or one that replaced all rows.
        reader = reader.option("versionAsOf", found.id)
    return BatchRows(_like(reader.load(table), asked.like), says)


def _like(rows: DataFrame, like: DataFrame) -> DataFrame:
    """Other columns of the table say nothing about the batch."""
    return rows.select(*(quoted(name) for name in like.columns if name in rows.columns))
