"""Starts of a stream that reads the table of another one, after that one went back.

A roll-back of a Delta table leaves the undone versions in its log. A streaming source would read them, and then fail at
the commit that removes their rows. A source that has not read them continues behind that commit: it reads the rolled
back version as a table, from the first file that it lacks.

An Iceberg source follows the ancestors of the current snapshot, so it never sees what was undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.errors import RestoreError, RowsAtRiskError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta_commit import last_read_file
from dagster_ckpt.sinks.delta_log import DeltaLog, UndoneAhead
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, with_offsets
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, source_options
from dagster_ckpt.spark.query.table_sources import delta_offset, delta_sources
from dagster_ckpt.stream.edges import EdgeKind, edges_to
from dagster_ckpt.values.untrusted import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Of a source that reads a version from its first file on.
_FROM_ITS_START = -1
_READ_CHANGES = frozenset({"readchangefeed", "readchangedata"})


def refuse_unrestored_upstream(catalog: Catalog, stream_id: str, sources: Sequence[SourceIdentity] | None) -> None:
    """Refuse a start that would read rows of a table that the start of its writer is about to undo.

    Raises:
        RestoreError: There is such a table.
    """
    edges = edges_to(catalog, stream_id, keyed(sources)) if sources else []
    for edge in edges:
        if edge.kind is not EdgeKind.TABLE:
            continue
        if isinstance(catalog.streams.get(edge.upstream).pending_restore, SinkRollBack):
            raise RestoreError(
                f"Stream {stream_id!r} is not started, nothing was changed: it reads {edge.sink} of stream "
                f"{edge.upstream!r}, which went back and rolls this table back when it starts. Start {edge.upstream} "
                "first, or start with accept_loss to read rows that it will undo."
            )


def continue_behind_roll_backs(
    stream_id: str, live: LiveDirectory, writer: DataStreamWriter, still_mine: StillMine, *, accept_loss: bool
) -> list[str]:
    """Let Delta sources skip what was undone before they read it; returns a message for each. Repeatable.

    Raises:
        RowsAtRiskError: A source would read undone rows and cannot skip them.
    """
    folders, positions = _appending_tables(writer), live.positions()
    if positions.commit is None or not any(folders):
        return []
    planned = positions.offset if positions.offset is not None and positions.offset > positions.commit else None
    path = f"{OFFSETS}/{positions.commit if planned is None else planned}"
    data = live.folder.read(path)
    changed: dict[str, Mapping[str, Any]] = {}
    messages, obstacles = [], []
    offsets = parse_offset_entry(data, f"{live.url}/{path}").sources
    for folder, (name, text) in zip(folders, offsets.items(), strict=False):
        ahead = _undone_ahead(folder, text)
        if folder is None or text is None or ahead is None:
            continue
        table = f"Delta table {folder} was rolled back in version {ahead.roll_back}"
        if planned is not None:
            obstacles.append(f"{table}, and batch {planned} is planned: start with start_from=batch-{positions.commit}")
            continue
        index, why = _last_read(session_of(writer), folder, ahead)
        if why:
            obstacles.append(f"{table}, and the position of source {name} cannot be moved behind it: {why}")
            continue
        changed[name] = _behind(text, ahead.roll_back, index)
        messages.append(f"source {name} continues behind what was undone: {table}")
    if obstacles and not accept_loss:
        raise RowsAtRiskError(
            f"Stream {stream_id!r} is not started: it would read rows that were undone. {'; '.join(obstacles)}. To "
            "read them, start with accept_loss; the source then fails at the roll-back, unless it has the option "
            "skipChangeCommits."
        )
    if changed:
        with still_mine():
            # Hadoop's checksum of the old content.
            live.folder.delete(f"{OFFSETS}/.{positions.commit}.crc")
            live.folder.write(path, [with_offsets(data, f"{live.url}/{path}", changed)])
    return [*messages, *obstacles]


def _appending_tables(writer: DataStreamWriter) -> list[str | None]:
    """Folders of Delta sources that read new rows, in the order of the offset log; None for others.

    A source that reads changes also reads those of the roll-back.
    """
    reads_changes = [not _READ_CHANGES.isdisjoint(source_options(leaf)) for leaf in streaming_leaves(writer)]
    folders = delta_sources(writer)
    return [None if changes else folder for folder, changes in zip(folders, reads_changes, strict=True)]


def _undone_ahead(folder: str | None, text: str | None) -> UndoneAhead | None:
    offset = delta_offset(text)
    if folder is None or offset is None:
        return None
    try:
        return DeltaLog(open_file_io(folder)).undone_ahead(offset)
    except FileNotFoundError:
        return None


def _last_read(session: SparkSession, folder: str, ahead: UndoneAhead) -> tuple[int | None, str]:
    """The last file of the version that was read, None if all were; and why that is unknown."""
    if ahead.obstacle or not ahead.unread:
        return None, ahead.obstacle
    found = last_read_file(session, folder, ahead.roll_back, ahead.unread)
    return found, "" if found is not None else "the files that it has not read are not the newest ones of the table"


def _behind(text: str, roll_back: int, index: int | None) -> Mapping[str, Any]:
    """The offset, in the words of `DeltaSourceOffset`."""
    if index is None:
        at = {"reservoirVersion": roll_back + 1, "index": _FROM_ITS_START, "isStartingVersion": False}
    else:
        at = {"reservoirVersion": roll_back, "index": index, "isStartingVersion": True}
    return {**from_json(text), **at}
