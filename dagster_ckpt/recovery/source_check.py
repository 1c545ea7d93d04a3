"""What a query would read next: whether Kafka, Delta and Iceberg still have it, and chosen Kafka positions.

A roll-back of a Delta table leaves undone versions in its log. A streaming source would read them, and fail at the
commit that removes their rows. One that has not read them is moved behind that commit, to the first file that it lacks.
An Iceberg source follows the ancestors of the current snapshot, so it never sees what was undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import SinkRollBack
from dagster_ckpt.errors import InputGoneError, OptionError, RestoreError, RowsAtRiskError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.recovery.plan import RecoveryPlan, Restore, Rewind
from dagster_ckpt.sinks.delta_log import DeltaLog, UndoneAhead
from dagster_ckpt.sinks.delta_roll_back import last_of_part, last_of_read
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, with_offsets
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.kafka_source import KafkaSource, TopicOffsets, kafka_source, kept_offsets, offsets_at
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, source_options, sources_in_entry
from dagster_ckpt.spark.query.table_sources import (
    DeltaOffset,
    delta_folder,
    delta_offset,
    expired_from,
    gone_from,
    iceberg_offset,
    iceberg_table,
)
from dagster_ckpt.stream.edges import EdgeKind, edges_to
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import SourceOffsets
from dagster_ckpt.values.safe_parsing import from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def refuse_gone_records(
    stream: StreamHandle, plan: RecoveryPlan, describe: Callable[[], DataStreamWriter], *, accept_loss: bool
) -> list[str]:
    if plan.to_batch is None or plan.to_batch < 0:
        return []
    to_batch = plan.to_batch
    chosen = plan.source_offsets if isinstance(plan, Restore | Rewind) else None
    gone = gone_records(describe(), lambda: _offsets_to_read(stream, plan, to_batch), chosen)
    if gone and not accept_loss:
        raise InputGoneError(
            f"Stream {stream.stream_id!r} is not started ({plan.reason}), nothing was changed: the source does "
            f"not have the records that its next batch would read. {' '.join(gone)} Start from a snapshot whose "
            "offsets the source still has, or choose others of a Kafka source with source_offsets. To continue "
            "without these records, start with accept_loss, and set the source option failOnDataLoss to false.",
            " ".join(gone),
        )
    return gone


def gone_records(
    writer: DataStreamWriter,
    read_to: Callable[[], Mapping[str, str | None]],
    chosen: SourceOffsets | None = None,
) -> list[str]:
    """Return what sources no longer have; `read_to` gives their offsets by name in the offset log."""
    if not any(_forgets(leaf) for leaf in streaming_leaves(writer)):
        return []
    gone: list[str] = []
    for leaf, name, text in sources_in_entry(writer, read_to()):
        source, folder, table = kafka_source(leaf.node), delta_folder(leaf.node), iceberg_table(leaf.node)
        if source is not None and (position := topic_offsets(text)):
            after = moved({name: position}, chosen) if chosen is not None else {}
            gone += _gone(writer, source, after.get(name, position))
        elif folder is not None and (offset := delta_offset(text)) is not None:
            gone += gone_from(writer, folder, offset)
        elif table is not None and (at := iceberg_offset(text)) is not None:
            gone += expired_from(writer, table, at, source_options(leaf.node))
    return list(dict.fromkeys(gone))


def _forgets(leaf: Any) -> bool:
    return any(of(leaf) is not None for of in (kafka_source, delta_folder, iceberg_table))


def resolved_offsets(
    stream: StreamHandle, plan: RecoveryPlan, describe: Callable[[], DataStreamWriter] | None
) -> RecoveryPlan:
    if not isinstance(plan, Restore | Rewind) or plan.source_offsets is None or plan.to_batch is None:
        return plan
    chosen = plan.source_offsets
    offsets = _offsets_to_read(stream, plan, plan.to_batch)
    check_known(chosen, _positions(offsets))
    if not chosen.times:
        return plan
    found: dict[str, dict[str, int]] = {topic: dict(known) for topic, known in chosen.partitions.items()}
    if describe is not None:
        writer = describe()
        for source, position in _sources_of_topics(writer, offsets, chosen.times):
            for topic in chosen.times.keys() & position.keys():
                partitions = [(topic, int(each)) for each in position[topic]]
                at = offsets_at(writer, source, partitions, chosen.times[topic])
                found.setdefault(topic, {}).update({str(partition): offset for (_, partition), offset in at.items()})
    missing = sorted(chosen.times.keys() - found.keys())
    if missing:
        raise OptionError(
            f"The time in source_offsets cannot be looked up for topic {', '.join(missing)}: the query is not known "
            "before its start. Give offsets instead."
        )
    return replace(plan, source_offsets=SourceOffsets(found))


def _sources_of_topics(
    writer: DataStreamWriter, offsets: Mapping[str, str | None], topics: Collection[str]
) -> list[tuple[KafkaSource, TopicOffsets]]:
    """Return the Kafka sources with their positions; OptionError if one of the topics has two places."""
    found = [
        (source, position)
        for leaf, _, text in sources_in_entry(writer, offsets)
        if (source := kafka_source(leaf.node)) is not None and (position := topic_offsets(text)) is not None
    ]
    for topic in topics:
        servers = sorted({_in_one_order(source.servers) for source, position in found if topic in position})
        if len(servers) > 1:
            raise OptionError(
                f"The time in source_offsets cannot be looked up for topic {topic}: the query reads topics of this "
                f"name from {' and from '.join(servers)}. Give offsets instead: they apply to each source that reads "
                "the partition."
            )
    return found


def _in_one_order(servers: str) -> str:
    return ",".join(sorted(each.strip() for each in servers.split(",")))


def _gone(writer: DataStreamWriter, source: KafkaSource, position: TopicOffsets) -> Iterator[str]:
    partitions = [(topic, int(partition)) for topic, known in position.items() for partition in known]
    for (topic, partition), kept in kept_offsets(writer, source, partitions).items():
        reads_from = position[topic][str(partition)]
        if kept is None:
            yield f"Topic {topic} no longer has partition {partition}."
        elif kept.start > reads_from:
            yield (
                f"Topic {topic}, partition {partition}: the query continues at {reads_from}, the topic begins at "
                f"{kept.start}; {kept.start - reads_from} records were deleted."
            )
        elif kept.stop < reads_from:
            # Spark would plan a batch that ends before it begins, and fail.
            yield (
                f"Topic {topic}, partition {partition}: the query continues at {reads_from}, the topic ends at "
                f"{kept.stop}: it was deleted and created again, or lost records."
            )


def state_files(stream: StreamHandle, plan: RecoveryPlan, paths: Sequence[str]) -> dict[str, bytes]:
    if plan.snapshot is not None:
        return read_files(stream.store, snapshot_location(plan.snapshot), lambda path: path in paths)
    url = plan.directory or stream.catalog.streams.get(stream.stream_id).live_directory
    found: dict[str, bytes] = {}
    for path in paths if url is not None else ():
        with suppress(FileNotFoundError):
            found[path] = LiveDirectory(url or "").folder.read(path)
    return found


def read_offsets(stream: StreamHandle, plan: RecoveryPlan, batch_id: int) -> dict[str, str | None]:
    name = f"{OFFSETS}/{batch_id}"
    data = state_files(stream, plan, [name]).get(name)
    return dict(parse_offset_entry(data, name).sources) if data is not None else {}


def _offsets_to_read(stream: StreamHandle, plan: RecoveryPlan, batch_id: int) -> dict[str, str | None]:
    offsets = read_offsets(stream, plan, batch_id)
    sources = plan.sources if isinstance(plan, Restore | Rewind) else None
    return offsets if sources is None else sources.offsets(offsets)


def topic_offsets(text: str | None) -> TopicOffsets | None:
    try:
        return {
            str(topic): {str(partition): int(offset) for partition, offset in partitions.items()}
            for topic, partitions in from_json(text or "").items()
        }
    except (AttributeError, TypeError, ValueError):
        return None


def _positions(offsets: Mapping[str, str | None]) -> dict[str, TopicOffsets]:
    return {name: found for name, text in offsets.items() if (found := topic_offsets(text)) is not None}


def check_known(chosen: SourceOffsets, positions: Mapping[str, TopicOffsets]) -> None:
    known = {(topic, each) for position in positions.values() for topic, read in position.items() for each in read}
    topics = sorted({topic for topic, _ in known})
    for topic in (*chosen.partitions, *chosen.times):
        if topic not in topics:
            raise OptionError(
                f"source_offsets names topic {topic!r}, but the query reads {', '.join(topics) or 'no topic'}."
            )
    for topic, partitions in chosen.partitions.items():
        for partition in partitions:
            if (topic, partition) not in known:
                mine = ", ".join(sorted(each for of, each in known if of == topic))
                raise OptionError(
                    f"source_offsets names partition {partition} of topic {topic!r}, but the query reads {mine}."
                )


def move_sources(live: LiveDirectory, chosen: SourceOffsets) -> None:
    batch_id = live.positions().commit
    if batch_id is None:
        raise RestoreError(f"{live.url} has no committed batch, so its sources have no position to change.")
    path = f"{OFFSETS}/{batch_id}"
    data = live.folder.read(path)
    entry = parse_offset_entry(data, f"{live.url}/{path}")
    positions = _positions(entry.sources)
    check_known(chosen, positions)
    # The batch in flight was planned from the old position.
    live.folder.delete(f"{OFFSETS}/{batch_id + 1}")
    live.folder.flush(OFFSETS)
    live.folder.write(path, [with_offsets(data, f"{live.url}/{path}", moved(positions, chosen))])


def moved(positions: Mapping[str, TopicOffsets], chosen: SourceOffsets) -> dict[str, dict[str, dict[str, int]]]:
    changed = {}
    for name, position in positions.items():
        after = {
            topic: {partition: chosen.partitions.get(topic, {}).get(partition, at) for partition, at in known.items()}
            for topic, known in position.items()
        }
        if after != position:
            changed[name] = after
    return changed


_FROM_ITS_START = -1
_READ_CHANGES = frozenset({"readchangefeed", "readchangedata"})


def refuse_unrestored_upstream(catalog: Catalog, stream_id: str, sources: Sequence[SourceIdentity] | None) -> None:
    """Refuse a start that would read rows of a table that the next start of its writer undoes."""
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
    """Let Delta sources skip undone rows that they have not read; return a message for each. Repeatable.

    Raises:
        RowsAtRiskError: A source would read undone rows and cannot skip them.
    """
    positions = live.positions()
    if positions.commit is None or not any(map(_appending_table, streaming_leaves(writer))):
        return []
    session, newest = session_of(writer), max(positions.commit, positions.offset or 0)
    messages: list[str] = []
    obstacles: list[str] = []
    edits: dict[int, bytes] = {}
    behind: dict[str, int] = {}
    # Spark asks a source again for the batch between the last two offsets.
    for batch in (newest, newest - 1):
        path = f"{OFFSETS}/{batch}"
        data = live.folder.read(path) if live.folder.size(path) is not None else None
        if data is None:
            continue
        changed: dict[str, Mapping[str, Any]] = {}
        offsets = parse_offset_entry(data, f"{live.url}/{path}").sources
        for leaf, name, text in sources_in_entry(writer, offsets):
            folder = _appending_table(leaf.node)
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
            # Hadoop's checksum is of the old content.
            live.folder.delete(f"{OFFSETS}/.{batch}.crc")
            live.folder.write(f"{OFFSETS}/{batch}", [entry])
    return obstacles or messages


def _appending_table(leaf: Any) -> str | None:
    """Return the folder of a Delta source, unless it reads changes, also those of a roll-back."""
    return None if not _READ_CHANGES.isdisjoint(source_options(leaf)) else delta_folder(leaf)


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
