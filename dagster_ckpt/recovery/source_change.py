"""Refuses a start whose query reads other sources than those that its offsets belong to.

Despite a changed path or subscription, a source continues if it still reads the files or topics in its log and offset:
Spark then takes none of them for new.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import SOURCE_IDENTITIES
from dagster_ckpt.errors import LiveDirectoryError, SnapshotNotFoundError, SourceChangedError
from dagster_ckpt.io.location import as_expression
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.recovery.plan import Clone, FinishRestore, RecoveryPlan, Restore, Resume, Rewind, StartEmpty
from dagster_ckpt.recovery.source_check import read_offsets, state_files, topic_offsets
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.checkpoint_dir.restore import in_order
from dagster_ckpt.spark.query.kafka_source import may_match
from dagster_ckpt.spark.query.sources import (
    CLUSTER,
    DELTA,
    FILE,
    ICEBERG,
    KAFKA,
    PATH,
    PATTERN,
    TABLE,
    TABLE_ID,
    TOPIC_ID,
    TOPICS,
    SourceIdentity,
    identities_of_record,
    keyed,
    kind_of_offset,
)
from dagster_ckpt.spark.query.table_sources import delta_offset
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import Beginning, SourceMapping

_FILES_LOOKED_AT = 3


@dataclass(frozen=True)
class SourceJudgement:
    """The sources of a query, compared with those of the state; `crossed` is why some cannot continue others."""

    read: Mapping[str, ReadSource]
    now: Mapping[str, SourceIdentity]
    mapping: SourceMapping | None = None
    differences: tuple[SourceDifference, ...] = ()
    crossed: tuple[str, ...] = ()

    @property
    def refused(self) -> list[str]:
        return [*(str(each) for each in self.differences if each.is_refused), *self.crossed]

    @property
    def proposed(self) -> SourceMapping:
        return proposed_mapping(self.read, self.now)


def judge_sources(
    stream: StreamHandle, plan: RecoveryPlan, now: Sequence[SourceIdentity] | None
) -> SourceJudgement | None:
    batch_id = state_batch(stream, plan)
    if now is None or batch_id is None:
        return None
    return judged(read_sources(stream, plan, batch_id, len(now)), keyed(now), mapping_of(plan))


def judged(
    read: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity], mapping: SourceMapping | None = None
) -> SourceJudgement:
    was, of_query = compared(read, now, mapping)
    differences = source_differences(was, of_query) if was else ()
    return SourceJudgement(read, now, mapping, differences, tuple(crossing(was, of_query, mapping)))


def refuse_changed_sources(stream: StreamHandle, plan: RecoveryPlan, now: Sequence[SourceIdentity] | None) -> list[str]:
    """Refuse a start whose sources do not fit; return accepted differences as messages.

    What is unknown is not refused: state of earlier versions of this package has only offsets.
    """
    found = judge_sources(stream, plan, now)
    if found is None:
        return []
    if not found.refused:
        return [f"the sources of the query changed: {each}" for each in found.differences]
    listed = "\n".join(f"- {each}" for each in found.refused)
    advice = _REMAP if found.mapping is not None else _MAP.format(str(found.proposed))
    raise SourceChangedError(
        f"Stream {stream.stream_id!r} is not started, nothing was changed: it would continue from {plan.came_from}, "
        f"and the sources of the query are not those that its offsets belong to.\n{listed}\n{advice}"
    )


_MAP = (
    "If the change is intended, start with map_sources={!r}: a source continues the former one that it names; a new "
    "one reads from where its options say (new), from its earliest record (new:earliest), or only what comes from now "
    "on (new:latest). A preview shows the positions. Otherwise put the sources back: the paths, topics, tables and "
    "their order as they were. If files were moved, move them back, or put a symbolic link at the old path. Or start "
    "from the beginning with these sources: a new stream, or start_from=empty with discard_state."
)
_REMAP = "Correct map_sources: a source that reads something else is new, not the continuation of a former one."


def state_batch(stream: StreamHandle, plan: RecoveryPlan) -> int | None:
    """Return the batch whose offsets the query continues from; for a first batch in flight, that batch."""
    if isinstance(plan, FinishRestore | Resume | Clone) and plan.to_batch is None:
        record = stream.catalog.streams.get(stream.stream_id)
        if isinstance(record.pending_restore, Forked) and not (record.origin and record.origin.source_identities):
            # An import may read another input with the same offsets.
            return None
        live = plan.directory or record.live_directory
        positions = LiveDirectory(live).positions() if live is not None else None
        return (positions.offset if positions.commit is None else positions.commit) if positions is not None else None
    if isinstance(plan, StartEmpty) or plan.to_batch is None or plan.to_batch < 0:
        return None
    return plan.to_batch


def mapping_of(plan: RecoveryPlan) -> SourceMapping | None:
    sources = plan.sources if isinstance(plan, Restore | Rewind) else None
    return sources.mapping if sources is not None else None


def compared(
    was: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity], mapping: SourceMapping | None
) -> tuple[Mapping[str, ReadSource], Mapping[str, SourceIdentity]]:
    if mapping is None:
        return was, now
    kept = {source: was[former] for source, former in mapping.continued.items() if former in was}
    return kept, {source: identity for source, identity in now.items() if source in kept}


def crossing(
    was: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity], mapping: SourceMapping | None
) -> list[str]:
    """Return sources that may have changed sides of a join, if unrecorded: Spark keeps each side's rows apart."""
    if mapping is None or not any(each.side for each in now.values()):
        return []
    unknown = [source for source, each in was.items() if each.identity is None or each.identity.side is None]
    formers = [mapping.continued[source] for source in in_order(was)]
    if not unknown or formers == in_order(formers):
        return []
    return [
        f"source {source}: it may be on another side of a stream-stream join than the former source "
        f"{mapping.continued[source]}, whose rows are in the state of that side"
        for source in unknown
    ]


def proposed_mapping(was: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity]) -> SourceMapping:
    continued: dict[str, str] = {}
    for is_certain in (True, False):
        for source, identity in now.items():
            if source in continued:
                continue
            fitting = [former for former in was if former not in continued.values() and _fits(was[former], identity)]
            if is_certain:
                fitting = [former for former in fitting if str(was[former]) == str(identity)]
            if fitting:
                continued[source] = source if source in fitting else fitting[0]
    return SourceMapping(continued, {source: Beginning.AS_CODE for source in now if source not in continued})


def _fits(was: ReadSource, now: SourceIdentity) -> bool:
    is_known = was.identity is not None or bool(was.files or was.topics or was.table_id)
    return is_known and not any(is_refused for _, is_refused in _differences_of(was, now))


def recorded_sources(stream: StreamHandle, plan: RecoveryPlan) -> tuple[SourceIdentity, ...] | None:
    if plan.snapshot is not None:
        properties: Mapping[str, object] = plan.snapshot.properties
        if SOURCE_IDENTITIES not in properties:
            properties = stream.store.manifest(snapshot_location(plan.snapshot)).header.properties
        return identities_of_record(properties.get(SOURCE_IDENTITIES))
    record = stream.catalog.streams.get(stream.stream_id)
    live = plan.directory or record.live_directory
    found = stream.catalog.executions.last_sources(stream.stream_id, live)
    if found is None and live == record.live_directory and record.origin is not None:
        found = record.origin.source_identities
    return identities_of_record(found)


def read_sources(stream: StreamHandle, plan: RecoveryPlan, batch_id: int, expected: int) -> dict[str, ReadSource]:
    recorded = recorded_sources(stream, plan)
    read = partial(state_files, stream, plan)
    offsets = read_offsets(stream, plan, batch_id)
    if recorded is None:
        if len(set(offsets.values())) <= expected < len(offsets):
            # A relation read twice has two offsets.
            return {}
        return {key: _read_source(None, key, text, read) for key, text in offsets.items()}
    known = keyed(recorded)
    if offsets.keys() != known.keys():
        # It is not certain which source each offset is of.
        offsets = {}
    return {key: _read_source(identity, key, offsets.get(key), read) for key, identity in known.items()}


_Read = Callable[[Sequence[str]], Mapping[str, bytes]]


def _read_source(identity: SourceIdentity | None, key: str, offset: str | None, read: _Read) -> ReadSource:
    kind, delta = kind_of_offset(offset), delta_offset(offset)
    position = log_offset(offset)
    has_read = offset is not None and position != -1
    return ReadSource(
        identity=identity,
        kind=kind,
        has_read=has_read or (identity is not None and offset is None),
        files=_newest_files(f"{SOURCES}/{key}/{position}", read) if position is not None and has_read else (),
        topics=tuple(sorted(topic_offsets(offset) or ())) if kind == KAFKA else (),
        table_id=delta.table_id if delta is not None else None,
    )


def _newest_files(path: str, read: _Read) -> tuple[str, ...]:
    entries = read([path, f"{path}{COMPACT}"])
    with suppress(SnapshotNotFoundError, LiveDirectoryError):
        for name, data in entries.items():
            version, *lines = data.split(b"\n")
            newest = [line for line in lines if line.strip()][-_FILES_LOOKED_AT:]
            return tuple(str(line.get("path")) for line in parse_log_lines(b"\n".join([version, *newest]), name))
    return ()


_NOTHING = "nothing"


@dataclass(frozen=True)
class ReadSource:
    """A former source: its recorded identity, if any, and what its offset and log show."""

    identity: SourceIdentity | None = None
    kind: str | None = None
    has_read: bool = True
    files: Sequence[str] = ()
    topics: Sequence[str] = ()
    table_id: str | None = None

    def __str__(self) -> str:
        if self.identity is not None:
            return str(self.identity)
        where = sorted({folder_of(path) for path in self.files}) or sorted(self.topics)
        return " ".join([self.kind or "unknown", *([", ".join(where[:3])] if where else [])])


@dataclass(frozen=True)
class SourceDifference:
    """A difference; without a `why`, the source was only added or removed."""

    source: str
    was: str
    now: str
    why: str
    is_refused: bool = True

    def __str__(self) -> str:
        return f"source {self.source}: was {self.was}, is {self.now}{f' ({self.why})' if self.why else ''}"


def source_differences(
    was: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity]
) -> tuple[SourceDifference, ...]:
    found: list[SourceDifference] = []
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key), now.get(key)
        if before is None or after is None:
            # Spark can add a named source.
            is_new_name = before is None and after is not None and after.name is not None
            described = _NOTHING if before is None else str(before), _NOTHING if after is None else str(after)
            found.append(SourceDifference(key, *described, "", is_refused=not is_new_name))
            continue
        found += [
            SourceDifference(key, str(before), str(after), why, is_refused)
            for why, is_refused in _differences_of(before, after)
        ]
    return tuple(found)


def _differences_of(was: ReadSource, now: SourceIdentity) -> Iterator[tuple[str, bool]]:
    before = was.identity
    kind = before.kind if before is not None else was.kind
    if kind is not None and kind != now.kind:
        yield "another kind of source", True
        return
    if before is not None and None not in (before.side, now.side) and before.side != now.side:
        yield f"it is on side {now.side} of a stream-stream join, and its rows in the state are on {before.side}", True
        return
    refused = {FILE: _files, KAFKA: _kafka, DELTA: _table, ICEBERG: _table}.get(now.kind, _other)(was, now)
    if refused is not None:
        yield refused, True
    elif before is not None:
        changed = [
            f"{name} {_shown(before, name)} -> {_shown(now, name)}"
            for name in sorted({*before.options, *now.options, PATH, "format", TABLE, TOPICS, PATTERN})
            if _shown(before, name) != _shown(now, name)
        ]
        if changed:
            yield ", ".join(changed), False


def _shown(identity: SourceIdentity, name: str) -> str:
    return identity.options.get(name) or identity.identity.get(name) or "default"


def _files(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity.get(PATH) if was.identity is not None else None
    path = now.identity.get(PATH)
    if path is None or before == path or not was.has_read:
        return None
    if not was.files:
        return None if before is None else "another path"
    is_deep = now.options.get("recursivefilelookup", "").lower() == "true"
    elsewhere = [each for each in was.files if not _reads(path, each, is_deep=is_deep)]
    if not elsewhere:
        return None
    return f"it does not read {elsewhere[0]}, which was read: the rest would be missing, or read again"


def _kafka(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    known = [each for each in (before.get(TOPICS) or "").split(",") if each]
    read = sorted(set(was.topics or known))
    named, pattern = (now.identity.get(TOPICS) or "").split(","), now.identity.get(PATTERN)
    left = [each for each in read if each not in named and not (pattern and may_match(pattern, each))]
    if left:
        return f"it no longer reads topic {', '.join(left)}"
    ids = {name for name in before if name.startswith(TOPIC_ID) and name in now.identity}
    made_again = sorted(name.removeprefix(TOPIC_ID) for name in ids if before[name] != now.identity[name])
    if made_again:
        return f"topic {', '.join(made_again)} was deleted and created again, or is that of another cluster"
    clusters = before.get(CLUSTER), now.identity.get(CLUSTER)
    if not ids and None not in clusters and clusters[0] != clusters[1]:
        return f"another cluster: its id was {clusters[0]}, and is {clusters[1]}"
    return None


def _table(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    ids = was.table_id or before.get(TABLE_ID), now.identity.get(TABLE_ID)
    if None not in ids:
        return None if ids[0] == ids[1] else f"another table: its id was {ids[0]}, and is {ids[1]}"
    names = [(before.get(name), now.identity.get(name)) for name in (PATH, TABLE)]
    return "another table" if any(None not in pair and pair[0] != pair[1] for pair in names) else None


def _other(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    return "another table" if before.get(TABLE) != now.identity.get(TABLE) and before else None


# Spark lists a folder and its partitions (`PartitioningAwareFileIndex.allFiles`).
_BELOW = "(/[^/=]+=[^/]*)*(/[^/]+)?"


def _reads(path: str, file: str, *, is_deep: bool) -> bool:
    """Whether a source of a path, with scheme and perhaps a pattern, reads a file, given as a URI."""
    pattern = re.compile(as_expression(plain_path(path)) + ("(/.*)?" if is_deep else _BELOW))
    return pattern.fullmatch(uri_path(file)) is not None


def uri_path(uri: str) -> str:
    """Return a URI as Hadoop writes a path: `file:/data/a b`, not `file:///data/a%20b`."""
    return plain_path(unquote(uri))


def plain_path(path: str) -> str:
    """Return a path in one spelling: `file:/` if local, and no trailing slash."""
    return re.sub(r"^file:/+", "file:/", path).rstrip("/")


def folder_of(uri: str) -> str:
    return uri_path(uri).rpartition("/")[0]
