"""Where a new source of a described query begins, in the form of Spark's offset log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile, existing_files
from dagster_ckpt.spark.checkpoint_dir.source_positions import BEGINNING, Position, after_files
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.kafka_source import end_offsets, kafka_source
from dagster_ckpt.spark.query.sources import DELTA, FILE, ICEBERG, KAFKA, SourceIdentity, source_options
from dagster_ckpt.values.source_mapping import Beginning

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Options that let a table begin elsewhere than at its oldest record.
_CHOOSE = {
    DELTA: ("startingversion", "startingtimestamp"),
    ICEBERG: ("stream-from-timestamp",),
    "rate-micro-batch": ("startoffset",),
}


def first_position(writer: DataStreamWriter, index: int, identity: SourceIdentity, beginning: Beginning) -> Position:
    """`index` is that of the source in the offset log; OptionError if it cannot begin there."""
    if beginning is Beginning.AS_CODE:
        return BEGINNING
    if identity.kind == KAFKA:
        return _kafka(writer, index, earliest=beginning is Beginning.EARLIEST)
    options = source_options(streaming_leaves(writer)[index])
    if beginning is Beginning.EARLIEST:
        chosen = [name for name in _CHOOSE.get(identity.kind, ()) if name in options]
        if chosen:
            raise OptionError(
                f"map_sources lets source {index} ({identity}) begin at its earliest record, but its option "
                f"{chosen[0]} is set. Remove the option, or map the source to new."
            )
        return BEGINNING
    if identity.kind != FILE:
        names = " or ".join(_CHOOSE.get(identity.kind, ())) or "one of its options"
        raise OptionError(
            f"map_sources lets source {index} ({identity}) begin at its latest record, which is possible for Kafka and "
            f"for files only. Map it to new, and say where it begins with {names} in the code."
        )
    return after_files(_files_now(writer, index))


def _kafka(writer: DataStreamWriter, index: int, *, earliest: bool) -> Position:
    source = kafka_source(streaming_leaves(writer)[index])
    assert source is not None
    found = end_offsets(writer, source, earliest=earliest)
    return Position(json.dumps(found, separators=(",", ":"))) if found else BEGINNING


def _files_now(writer: DataStreamWriter, index: int) -> list[SourceFile]:
    session, leaf = session_of(writer), streaming_leaves(writer)[index]
    source = leaf.dataSource()
    options = {name: text for name, text in source_options(leaf).items() if name != "path"}
    reader = session.read.format(str(source.className())).options(**options).schema(str(leaf.schema().toDDL()))
    uris = sorted(reader.load(source_options(leaf)["path"]).inputFiles())
    times = existing_files(uris, session) or {}
    return [SourceFile(uri, 0, times.get(uri)) for uri in uris]
