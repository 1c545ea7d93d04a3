"""What an Iceberg source of a described query would read next, from the table's own metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.output import is_iceberg
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.untrusted import from_json

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Offset of a source of an empty table.
_BEFORE_THE_FIRST = -1


@dataclass(frozen=True)
class IcebergOffset:
    """The snapshot that is read, in part or as a whole (`StreamingOffset`)."""

    snapshot_id: int


def iceberg_offset(text: str | None) -> IcebergOffset | None:
    try:
        found = from_json(text or "")
        return IcebergOffset(int(found["snapshot_id"])) if "position" in found else None
    except (KeyError, TypeError, ValueError):
        return None


def iceberg_table(leaf: Any) -> Any | None:
    """An `org.apache.iceberg.Table`; None for another source."""
    if str(leaf.getClass().getSimpleName()) != "StreamingRelationV2":
        return None
    table = leaf.table()
    return table.table() if is_iceberg(table) else None


def iceberg_sources(writer: DataStreamWriter) -> list[Any | None]:
    """In the order of the offset log; None for other sources."""
    return [iceberg_table(leaf) for leaf in streaming_leaves(writer)]


def expired_from(writer: DataStreamWriter, table: Any, offset: IcebergOffset) -> list[str]:
    if offset.snapshot_id == _BEFORE_THE_FIRST:
        return []
    jvm: Any = session_of(writer)._jvm
    try:
        table.refresh()
        name, current = str(table.name()), table.currentSnapshot()
        util = jvm.org.apache.iceberg.util.SnapshotUtil
        if current is not None and bool(util.isAncestorOf(table, current.snapshotId(), offset.snapshot_id)):
            return []
        known = {int(each.snapshotId()) for each in table.snapshots()}
    except Exception as error:  # py4j raises what the catalog raises
        raise StorageAccessError(
            f"The snapshots of an Iceberg table cannot be read: {without_secrets(str(error))[:300]}"
        ) from error
    why = (
        "is no longer part of its history: the table was rolled back or replaced"
        if offset.snapshot_id in known
        else "no longer exists (expire_snapshots), or the table was created again"
    )
    return [f"The Iceberg table {name}: the query continues at snapshot {offset.snapshot_id}, which {why}."]
