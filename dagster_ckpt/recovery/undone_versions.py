"""Starts of a stream that reads the table of another one, after that one went back.

A roll-back of a Delta table leaves the undone versions in its log. A streaming source would read them, and then fail at
the commit that removes their rows. One that has not read them continues behind that commit, with the first file that it
lacks. An Iceberg source follows the ancestors of the current snapshot, so it never sees what was undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.errors import RestoreError, RowsAtRiskError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta_commit import last_of_part, last_of_read
from dagster_ckpt.sinks.delta_log import DeltaLog, UndoneAhead
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, with_offsets
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, source_options
from dagster_ckpt.spark.query.table_sources import DeltaOffset, delta_offset, delta_sources
from dagster_ckpt.stream.edges import EdgeKind, edges_to
from dagster_ckpt.values.untrusted import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_FROM_ITS_START = -1
_READ_CHANGES = frozenset({"readchangefeed", "readchangedata"})


def refuse_unrestored_upstream(catalog: Catalog, stream_id: str, sources: Sequence[SourceIdentity] | None) -> None:
    """RestoreError if a start would read rows of a table that the start of its writer is about to undo."""
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
    session, newest = session_of(writer), max(positions.commit, positions.offset or 0)
    messages: list[str] = []
    obstacles: list[str] = []
    edits: dict[int, bytes] = {}
    behind: dict[str, int] = {}
    # Spark asks a source again for what lies between the last two batches.
    for batch in (newest, newest - 1):
        path = f"{OFFSETS}/{batch}"
        data = live.folder.read(path) if live.folder.size(path) is not None else None
        if data is None:
            continue
        changed: dict[str, Mapping[str, Any]] = {}
        offsets = parse_offset_entry(data, f"{live.url}/{path}").sources
        for folder, (name, text) in zip(folders, offsets.items(), strict=False):
            ahead = _undone_ahead(folder, text)
            if batch == newest:
                behind[name] = ahead.roll_back if ahead is not None else _version(text)
            if folder is None or text is None or ahead is None or behind.get(name, -1) < ahead.roll_back:
                continue
            table = f"Delta table {folder} was rolled back in version {ahead.roll_back}"
            after, why = _behind(session, folder, text, ahead)
            if newest > positions.commit:
                why = f"batch {newest} is planned; start with start_from=batch-{positions.commit}"
            if after is None or why:
                obstacles.append(f"{table}, and source {name} cannot continue behind it: {why}")
                continue
            changed[name] = after
            messages += [f"source {name} continues behind what was undone: {table}"] if batch == newest else []
        edits |= {batch: with_offsets(data, f"{live.url}/{path}", changed)} if changed else {}
    if obstacles and not accept_loss:
        raise RowsAtRiskError(
            f"Stream {stream_id!r} is not started: it would read rows that were undone. {'; '.join(obstacles)}. To "
            "read them, start with accept_loss; the source then fails at the roll-back, unless it has the option "
            "skipChangeCommits."
        )
    for batch, entry in edits.items() if not obstacles else ():
        with still_mine():
            # Hadoop's checksum of the old content.
            live.folder.delete(f"{OFFSETS}/.{batch}.crc")
            live.folder.write(f"{OFFSETS}/{batch}", [entry])
    return obstacles or messages


def _appending_tables(writer: DataStreamWriter) -> list[str | None]:
    """Folders of Delta sources that read new rows, in the order of the offset log; None for others.

    A source that reads changes also reads those of the roll-back.
    """
    reads_changes = [not _READ_CHANGES.isdisjoint(source_options(leaf)) for leaf in streaming_leaves(writer)]
    folders = delta_sources(writer)
    return [None if changes else folder for folder, changes in zip(folders, reads_changes, strict=True)]


def _version(text: str | None) -> int:
    offset = delta_offset(text)
    return offset.version if offset is not None else -1


def _undone_ahead(folder: str | None, text: str | None) -> UndoneAhead | None:
    offset = delta_offset(text)
    if folder is None or offset is None:
        return None
    try:
        return DeltaLog(open_file_io(folder)).undone_ahead(offset)
    except FileNotFoundError:
        return None


def _behind(session: SparkSession, folder: str, text: str, ahead: UndoneAhead) -> tuple[Mapping[str, Any] | None, str]:
    was = delta_offset(text)
    if was is None or ahead.obstacle:
        return None, ahead.obstacle
    if not (ahead.unread or was.is_initial):
        position = DeltaOffset(was.table_id, ahead.roll_back + 1, _FROM_ITS_START, is_initial=False)
    else:
        index = (
            last_of_part(session, folder, ahead.roll_back, was.version, was.index)
            if was.is_initial
            else last_of_read(session, folder, ahead.roll_back, ahead.unread)
        )
        if index is None:
            return None, "the files that it has not read are not the newest ones of the table (OPTIMIZE?)"
        position = DeltaOffset(was.table_id, ahead.roll_back, index, is_initial=True)
    at = {"reservoirVersion": position.version, "index": position.index, "isStartingVersion": position.is_initial}
    return {**from_json(text), **at}, ""
