"""Changes of a query's sources (`map_sources`): where each continues or begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.plan import FinishRestore, MappedSources, RecoveryFacts, RecoveryPlan, Restore, Rewind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.source_change import ReadSource, read_sources, source_differences, state_batch
from dagster_ckpt.recovery.source_check import read_offsets, resolved_offsets, state_files
from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile, existing_files
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS
from dagster_ckpt.spark.checkpoint_dir.logs import parse_commit_entry, parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.restore import BEGINNING, Position, after_files, in_order
from dagster_ckpt.spark.query.description import session_of, streaming_leaves
from dagster_ckpt.spark.query.kafka_source import end_offsets, kafka_source
from dagster_ckpt.spark.query.sources import (
    DELTA,
    FILE,
    ICEBERG,
    KAFKA,
    SourceIdentity,
    keyed,
    leaves_of,
    source_identities,
    source_options,
)
from dagster_ckpt.spark.query.table_sources import STARTING_TIMESTAMP, STARTING_VERSION, STREAM_FROM
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import Beginning, SourceMapping, StartPoint
from dagster_ckpt.values.durations import utc_time

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_LONGEST = 200


def plan_of_start(
    stream: StreamHandle, facts: RecoveryFacts, describe: Callable[[], DataStreamWriter] | None
) -> RecoveryPlan:
    """Return the recovery plan, with the positions that only the sources know.

    A mapping that was carried out changes nothing, so a killed start can be repeated; to repeat it, a user names a
    point.
    """
    plan, mapping = plan_recovery(facts), facts.start_from.source_mapping
    if mapping is None:
        return resolved_offsets(stream, plan, describe)
    writer = describe() if describe is not None else None
    now = source_identities(writer) if writer is not None else None
    if now is not None:
        without_mapping = plan_recovery(replace(facts, start_from=replace(facts.start_from, map_sources="")))
        if _is_carried_out(stream, facts, without_mapping, keyed(now)):
            why = (
                "map_sources changes nothing: the state was read by the query's sources already. If one of them is to "
                "read from elsewhere, name the batch to go back to"
            )
            plan = replace(without_mapping, reason=f"{without_mapping.reason}; {why}")
            return resolved_offsets(stream, plan, describe)
    if isinstance(plan, FinishRestore):
        raise OptionError(
            f"map_sources cannot be used yet: stream {stream.stream_id!r} has an unfinished restore, rewind or fork. "
            "Start it first with the code that it was made for, or name a snapshot with start_from."
        )
    if not isinstance(plan, Restore | Rewind) or plan.sources is None:
        return resolved_offsets(stream, plan, describe)
    if writer is not None and any(leaf.is_again for leaf in leaves_of(writer)):
        raise OptionError(
            "map_sources cannot be used for a query that reads a source twice through one DataFrame, as a join or "
            "union with itself: Spark wants an offset for each. Call spark.readStream once for each use."
        )
    named = keyed(now) if now is not None else None
    _check(stream, plan, mapping, named)
    found = MappedSources(mapping, _positions(stream, writer, mapping, named), now)
    return resolved_offsets(stream, replace(plan, sources=found), describe)


def _is_carried_out(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, now: Mapping[str, SourceIdentity]
) -> bool:
    batch_id = state_batch(stream, plan)
    if batch_id is None:
        return False
    was = read_sources(stream, plan, batch_id, len(now))
    if was.keys() != now.keys() or any(each.is_refused for each in source_differences(was, now)):
        return False
    return facts.start_from.point is StartPoint.LATEST and any(each.identity is not None for each in was.values())


def _check(
    stream: StreamHandle,
    plan: Restore | Rewind,
    mapping: SourceMapping,
    now: Mapping[str, SourceIdentity] | None,
) -> None:
    if now is not None and set(mapping.sources) != now.keys():
        wanted = ", ".join(f"{source} ({identity})" for source, identity in now.items())
        raise OptionError(
            f"map_sources is {str(mapping)!r}, but has to name each source of the query, and no other: {wanted}."
        )
    batch_id = plan.to_batch
    known = read_offsets(stream, plan, batch_id) if batch_id is not None else {}
    unknown = sorted(former for former in mapping.continued.values() if known and former not in known)
    if unknown:
        raise OptionError(
            f"map_sources continues the former source {unknown[0]}, but the state has the sources {', '.join(known)}."
        )


def _positions(
    stream: StreamHandle,
    writer: DataStreamWriter | None,
    mapping: SourceMapping,
    now: Mapping[str, SourceIdentity] | None,
) -> dict[str, Position]:
    if writer is None or now is None:
        asked = [source for source, beginning in mapping.new.items() if beginning is not Beginning.AS_CODE]
        if asked:
            raise OptionError(
                f"map_sources lets source {asked[0]} of stream {stream.stream_id!r} begin at its "
                f"{mapping.new[asked[0]].value} record, which cannot be looked up: the query is not known before its "
                "start. Map it to new, and say where it begins with an option of the source."
            )
        return {}
    return {
        source: _first_position(writer, list(now).index(source), now[source], beginning)
        for source, beginning in mapping.new.items()
    }


def source_changes(stream: StreamHandle, plan: RecoveryPlan) -> tuple[str, ...]:
    if not isinstance(plan, Restore | Rewind) or plan.sources is None or plan.to_batch is None:
        return ()
    sources = plan.sources
    now = keyed(sources.identities) if sources.identities is not None else {}
    was = read_sources(stream, plan, plan.to_batch, len(sources.mapping.sources))
    return tuple(_changes(sources, was, now, read_offsets(stream, plan, plan.to_batch), _watermark(stream, plan)))


def _changes(
    sources: MappedSources,
    was: Mapping[str, ReadSource],
    now: Mapping[str, SourceIdentity],
    offsets: Mapping[str, str | None],
    watermark_ms: int,
) -> Iterator[str]:
    mapping = sources.mapping
    for source in in_order(mapping.sources):
        name = f"source {source}" + (f" ({now[source]})" if source in now else "")
        former = mapping.continued.get(source)
        if former is not None:
            read = f" ({was[former]})" if former in was and source not in now else ""
            yield f"{name} continues the former source {former}{read} at {_at(offsets.get(former))}"
        else:
            yield f"{name} is new and reads from {_beginning(sources, source)}"
    for former, offset in offsets.items():
        if former not in mapping.continued.values():
            read = f" ({was[former]})" if former in was else ""
            yield f"the former source {former}{read} is dropped; it was read up to {_at(offset)}"
    if mapping.new and watermark_ms > 0:
        yield (
            f"the watermark stays at {utc_time(watermark_ms)}: stateful operators drop older rows of a new source as "
            "late ones"
        )


def _beginning(sources: MappedSources, source: str) -> str:
    position, beginning = sources.position(source), sources.mapping.new[source]
    if beginning is Beginning.AS_CODE:
        return "where its options say"
    files = sum(max(0, len(data.splitlines()) - 1) for data in position.log.values())
    if files:
        return f"the files that come after the {files} that are there now"
    where = f", {_at(position.offset)}" if position.offset is not None else ""
    return f"its {beginning.value} record{where}"


def _at(offset: str | None) -> str:
    if offset is None:
        return "its beginning"
    return offset if len(offset) <= _LONGEST else f"{offset[:_LONGEST]}…"


def _watermark(stream: StreamHandle, plan: Restore | Rewind) -> int:
    paths = [f"{OFFSETS}/{plan.to_batch}", f"{COMMITS}/{plan.to_batch}"]
    files = state_files(stream, plan, paths)
    planned = [parse_offset_entry(data, path).watermark_ms for path, data in files.items() if path == paths[0]]
    commits = [parse_commit_entry(data, path).next_watermark_ms for path, data in files.items() if path == paths[1]]
    return max([*planned, *commits], default=0)


# Options that let a table begin elsewhere than at its oldest record.
_CHOOSE = {
    DELTA: (STARTING_VERSION, STARTING_TIMESTAMP),
    ICEBERG: (STREAM_FROM,),
    "rate-micro-batch": ("startoffset",),
}


def _first_position(writer: DataStreamWriter, index: int, identity: SourceIdentity, beginning: Beginning) -> Position:
    """Return where a source begins, by its index in the offset log; OptionError if it cannot begin there."""
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
