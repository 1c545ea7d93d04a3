"""Determines whether each source still has what a start would read again.

Spark commits a batch without reporting missing files. So each file that the log of a source, the journal or the
snapshot names for these batches is looked up first, and its modification time compared.

Spark knows files that it has read by path, and forgets those that are `maxFileAge` older than the newest one: a
forgotten file that is put back or written again is read as a new one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.pending_restore import ToBatch, ToSnapshot
from dagster_ckpt.errors import CkptError, LiveDirectoryError, StorageAccessError
from dagster_ckpt.recovery.live_directories import snapshot_location
from dagster_ckpt.recovery.plan import (
    Clone,
    FinishRestore,
    RecoveryFacts,
    RecoveryPlan,
    Restore,
    RestoreAndReplay,
    Resume,
    Rewind,
    StartEmpty,
)
from dagster_ckpt.recovery.source_change import folder_of, recorded_sources, uri_path
from dagster_ckpt.recovery.source_check import read_offsets
from dagster_ckpt.sinks.file_sink_log import bare
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.file_source import (
    SourceFile,
    existing_files,
    files_after,
    files_in_entries,
    log_offset,
)
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.sources import (
    COMPACTED,
    DELTA,
    FILE,
    GENERATED,
    ICEBERG,
    KAFKA,
    PATH,
    SourceIdentity,
    keyed,
    kind_of_offset,
)
from dagster_ckpt.stream.edges import EdgeKind, edges_to, newest_batch, undone_files
from dagster_ckpt.stream.handle import StreamHandle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHOWN = 5
_FOLDERS_LOOKED_IN = 100


class InputStatus(StrEnum):
    """Whether a source still has what is read again.

    ASKED_BY_START: The start asks Kafka, Delta or Iceberg, and is refused if it is gone.
    REPEATED: The source also has files that were read before, and would be read once more.
    """

    AVAILABLE = "AVAILABLE"
    ASKED_BY_START = "ASKED_BY_START"
    UNKNOWN = "UNKNOWN"
    REPEATED = "REPEATED"
    GONE = "GONE"


@dataclass(frozen=True)
class SourceInput:
    source: str
    kind: str
    status: InputStatus
    reason: str = ""


def source_inputs(
    stream: StreamHandle, facts: RecoveryFacts, plan: RecoveryPlan, session: SparkSession | None = None
) -> tuple[SourceInput, ...]:
    to_batch = facts.live_batch if isinstance(plan, FinishRestore) else plan.to_batch
    base = plan.snapshot.batch_id if plan.snapshot is not None else to_batch
    if base is None and isinstance(plan, Resume | Clone) and facts.live is not None and facts.live.in_flight == 0:
        base = -1
    if isinstance(plan, StartEmpty) or base is None:
        return ()
    recorded = recorded_sources(stream, plan)
    sources = keyed(recorded) if recorded is not None else {}
    again = _Again.of(stream, facts, plan, base, sources)
    if not again.reads_something:
        return ()
    expired: list[SourceInput] = []
    if not isinstance(plan, RestoreAndReplay):
        again, expired = _as_sinks_list(stream, again, sources)
    gone = {each.source for each in expired}
    return (*expired, *(each for each in _inputs(again, sources, session) if each.source not in gone))


def reasons(inputs: Iterable[SourceInput], status: InputStatus) -> str:
    return " ".join(each.reason for each in inputs if each.status is status)


@dataclass(frozen=True)
class _Again:
    """The batches that are read again.

    Attributes:
        goes_back: Whether committed batches are undone or replayed.
        is_named: Whether the files of all these batches are known.
        kept: Files of kept batches.
    """

    offsets: Mapping[str, str | None]
    goes_back: bool
    is_named: bool
    files: _Files
    kept: _Files
    live_scheme: str

    def without(self, source: str, names: Collection[str]) -> _Again:
        left = [each for each in self.files.get(source, ()) if bare(each.path) not in names]
        return replace(self, files={**self.files, source: left})

    @property
    def reads_something(self) -> bool:
        return self.goes_back or any(self.files.values())

    @classmethod
    def of(
        cls,
        stream: StreamHandle,
        facts: RecoveryFacts,
        plan: RecoveryPlan,
        base: int,
        sources: Mapping[str, SourceIdentity],
    ) -> _Again:
        urls = dict.fromkeys((plan.directory, facts.stream.live_directory))
        pending, origin_of_live = facts.stream.pending_restore, facts.stream.origin
        # What the restore undoes is read again, and only its former directory names the files.
        finishes = isinstance(plan, FinishRestore) and isinstance(pending, ToSnapshot | ToBatch)
        if finishes and origin_of_live is not None and origin_of_live.map_sources is None:
            urls[origin_of_live.directory] = None
        directories = [LiveDirectory(url) for url in urls if url is not None]
        offsets: Mapping[str, str | None] = {}
        if plan.snapshot is not None:
            offsets = read_offsets(stream, plan, base)
        elif (data := _live_offsets(directories, max(base, 0))) is not None:
            offsets = parse_offset_entry(data, f"{OFFSETS}/{max(base, 0)}").sources
            # Before the first batch, nothing was read.
            offsets = offsets if base >= 0 else dict.fromkeys(offsets)
        offsets = _by_log(offsets, sources)
        positions = {key: log_offset(text) for key, text in offsets.items()}
        # The log of another timeline has other files under the same numbers.
        is_other = plan.snapshot is not None and plan.snapshot.timeline != facts.stream.timeline
        first = {key: -1 if each is None or is_other else each for key, each in positions.items()}
        goes_back = finishes or isinstance(plan, Restore | Rewind | RestoreAndReplay)
        until = plan.to_batch if isinstance(plan, RestoreAndReplay) else None if finishes else facts.live_batch
        planned = stream.catalog.journal.after(stream.stream_id, base) if goes_back else []
        # What kept batches have read matters only to a start that goes back.
        after = dict.fromkeys(offsets, -1) if goes_back else first
        in_live = [_files_in(directory, after) for directory in directories]
        stored = _snapshot_logs(stream, plan)
        logs = [*(each for each in in_live if each is not None), stored, *(_logs_in(batch.files) for batch in planned)]
        origin = stored if plan.snapshot is not None else next((each for each in in_live if each is not None), {})
        kept = {
            key: [each for each in origin.get(key, ()) if position is not None and each.position <= position]
            for key, position in positions.items()
        }
        files: dict[str, list[SourceFile]] = {}
        for key in offsets:
            before = {each.path for each in kept[key]} if is_other else ()
            found = dict.fromkeys(
                each
                for log in logs
                for each in log.get(key, ())
                if each.position > first[key] and each.path not in before
            )
            files[key] = list({each.path: each for each in found}.values())
        is_good = facts.live is not None and facts.live.status is LiveStatus.GOOD and None not in in_live
        rewinds = goes_back and (until is None or until > base)
        return cls(
            offsets=offsets,
            goes_back=rewinds,
            is_named=is_good or until is None or base + len(planned) >= until,
            files=files,
            kept=kept,
            live_scheme=directories[0].url.partition(":")[0] if directories else "",
        )


def _by_log(offsets: Mapping[str, str | None], sources: Mapping[str, SourceIdentity]) -> Mapping[str, str | None]:
    """Return offsets by the names of the sources' logs: a source that is read twice has one log and two offsets."""
    named = {key: each.offset_names[-1] for key, each in sources.items() if each.offset_names}
    return {key: offsets[name] for key, name in named.items() if name in offsets} if named else offsets


def _inputs(
    again: _Again, recorded: Mapping[str, SourceIdentity], session: SparkSession | None
) -> Iterator[SourceInput]:
    for key, offset in again.offsets.items():
        identity = recorded.get(key)
        kind = identity.kind if identity is not None else kind_of_offset(offset)
        if kind == FILE or (kind is None and again.files[key]):
            yield _files(again, key, identity, session)
        elif not again.goes_back:
            # The plan of the batch in flight is fixed: what its source lacks shows when it runs.
            continue
        elif identity is not None and COMPACTED in identity.identity:
            why = (
                f"Source {key}: topic {identity.identity[COMPACTED]} is compacted: records that newer ones with their "
                "key have replaced since are not read again."
            )
            yield SourceInput(key, KAFKA, InputStatus.UNKNOWN, why)
        elif kind in (KAFKA, DELTA, ICEBERG):
            yield SourceInput(key, str(kind), InputStatus.ASKED_BY_START)
        elif kind in GENERATED:
            yield SourceInput(key, str(kind), InputStatus.AVAILABLE)
        else:
            why = (
                f"Source {key} ({kind or 'of an unknown kind'}) does not tell whether it still has what is read again."
            )
            yield SourceInput(key, kind or "unknown", InputStatus.UNKNOWN, why)


def _as_sinks_list(
    stream: StreamHandle, again: _Again, sources: Mapping[str, SourceIdentity]
) -> tuple[_Again, list[SourceInput]]:
    """Leave out files that a stream upstream has undone, and return inputs that logs of sinks no longer list.

    From the folder of a sink, Spark reads what its log lists; a replay reads what was planned.
    """
    expired = []
    edges = [each for each in edges_to(stream.catalog, stream.stream_id, sources) if each.kind is EdgeKind.FILES]
    for edge in edges if again.goes_back else ():
        files, folder = again.files.get(edge.source, ()), sources[edge.source].identity[PATH]
        times = {bare(each.path): each.modified_at_ms for each in files}
        try:
            upstream = stream.catalog.streams.get(edge.upstream)
            _, listed = newest_batch(times, folder)
        except (CkptError, OSError):
            continue
        undone = undone_files(times, listed, upstream, stream.catalog)
        gone = sorted(each.path for each in files if bare(each.path) not in {*listed, *undone})
        if gone:
            reason = (
                f"Source {edge.source}: the log of the sink in {folder} no longer lists {len(gone)} of {len(files)} "
                f"files that are read again: {_listed(gone)}."
            )
            expired.append(SourceInput(edge.source, FILE, InputStatus.GONE, reason))
        again = again.without(edge.source, undone)
    return again, expired


def _files(again: _Again, key: str, identity: SourceIdentity | None, session: SparkSession | None) -> SourceInput:
    named = again.files[key]
    existing = existing_files([each.path for each in named], session, reachable_scheme=again.live_scheme)
    missing = sorted(each.path for each in named if each.path not in existing) if existing is not None else []
    if missing:
        reason = f"Source {key}: {len(missing)} of {len(named)} files that are read again no longer exist: "
        return SourceInput(key, FILE, InputStatus.GONE, f"{reason}{_listed(missing)}.")
    cleans = identity.options.get("cleansource") if identity is not None else None
    if again.goes_back and not again.is_named and cleans is not None:
        reason = f"Source {key}: cleanSource={cleans} removes files that were read, and these would be read again."
        return SourceInput(key, FILE, InputStatus.GONE, reason)
    repeated = _read_once_more(again, key, identity, existing or {}, session) if again.goes_back else []
    if repeated:
        reason = (
            f"Source {key}: {len(repeated)} files that were read before were put back or written again, and Spark, "
            f"which no longer remembers them (maxFileAge), would read them once more: {_listed(repeated)}."
        )
        return SourceInput(key, FILE, InputStatus.REPEATED, reason)
    if existing is None or (again.goes_back and not again.is_named):
        why = "are named by neither the live directory nor the journal"
        if existing is None:
            why = f"could not be looked for by this process, such as {uri_path(min(each.path for each in named))}"
        return SourceInput(key, FILE, InputStatus.UNKNOWN, f"Source {key}: files that are read again {why}.")
    altered = changed(named, existing)
    if altered:
        reason = (
            f"Source {key}: {len(altered)} of {len(named)} files that are read again have another modification time "
            f"than when they were read, and may have other rows: {_listed(altered)}."
        )
        return SourceInput(key, FILE, InputStatus.UNKNOWN, reason)
    return SourceInput(key, FILE, InputStatus.AVAILABLE)


def _read_once_more(
    again: _Again,
    key: str,
    identity: SourceIdentity | None,
    existing: Mapping[str, int | None],
    session: SparkSession | None,
) -> list[str]:
    kept = again.kept[key]
    max_age = age_ms(identity.options.get("maxfileage", DEFAULT_MAX_AGE) if identity is not None else DEFAULT_MAX_AGE)
    times = [each.modified_at_ms for each in kept if each.modified_at_ms is not None]
    again_ms = [each for each in existing.values() if each is not None]
    if max_age is None or not (times or again_ms):
        return []
    # Spark's first listing knows only the kept files, later ones also those that are read again.
    newest = sorted({max(each) for each in (times, times + again_ms) if each})
    candidates = forgotten(kept, newest[-1], max_age)
    by_folder: dict[str, list[SourceFile]] = defaultdict(list)
    for each in reversed(candidates):
        by_folder[folder_of(each.path)].append(each)
    looked_at = [each for folder in list(by_folder)[:_FOLDERS_LOOKED_IN] for each in by_folder[folder]]
    there = existing_files([each.path for each in looked_at], session, reachable_scheme=again.live_scheme)
    return sorted(
        {
            path
            for each in newest
            for path in read_once_more(forgotten(looked_at, each, max_age), there or {}, each, max_age)
        }
    )


def _listed(uris: Sequence[str]) -> str:
    more = f" and {len(uris) - _SHOWN} more" if len(uris) > _SHOWN else ""
    return ", ".join(uri_path(each) for each in uris[:_SHOWN]) + more


def _live_offsets(directories: Sequence[LiveDirectory], batch_id: int) -> bytes | None:
    for directory in directories:
        with suppress(FileNotFoundError):
            return directory.folder.read(f"{OFFSETS}/{batch_id}")
    return None


_Files = Mapping[str, Sequence[SourceFile]]


def _snapshot_logs(stream: StreamHandle, plan: RecoveryPlan) -> _Files:
    if plan.snapshot is None:
        return {}
    location = snapshot_location(plan.snapshot)
    return _logs_in(read_files(stream.store, location, lambda path: path.startswith(f"{SOURCES}/")))


def _files_in(directory: LiveDirectory, first: Mapping[str, int]) -> _Files | None:
    try:
        return {source: files_after(directory.folder, source, position) for source, position in first.items()}
    except (FileNotFoundError, LiveDirectoryError, StorageAccessError):
        return None


def _logs_in(files: Mapping[str, bytes]) -> _Files:
    logs: dict[str, dict[str, bytes]] = defaultdict(dict)
    for path, data in files.items():
        place, _, source = path.rpartition("/")[0].rpartition("/")
        if place == SOURCES:
            logs[source][path] = data
    with suppress(LiveDirectoryError):
        return {source: files_in_entries(entries) for source, entries in logs.items()}
    return {}


DEFAULT_MAX_AGE = "7d"
_UNITS = {"us": 0.001, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# Some file systems keep whole seconds.
_SAME_MS = 1_000


def age_ms(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(found.group(2) or "ms") if found is not None else None
    return int(int(found.group(1)) * unit) if found is not None and unit is not None else None


def changed(files: Iterable[SourceFile], existing: Mapping[str, int | None]) -> list[str]:
    return sorted({each.path for each in files if _has_changed(each, existing.get(each.path))})


def forgotten(kept: Sequence[SourceFile], newest_ms: int, max_age_ms: int) -> list[SourceFile]:
    return [each for each in kept if each.modified_at_ms is not None and each.modified_at_ms < newest_ms - max_age_ms]


def read_once_more(
    forgotten_files: Iterable[SourceFile], existing: Mapping[str, int | None], newest_ms: int, max_age_ms: int
) -> list[str]:
    since = newest_ms - max_age_ms
    return sorted(
        {
            each.path
            for each in forgotten_files
            if (now := existing.get(each.path)) is not None and now >= since and _has_changed(each, now)
        }
    )


def _has_changed(file: SourceFile, now: int | None) -> bool:
    return None not in (file.modified_at_ms, now) and abs((file.modified_at_ms or 0) - (now or 0)) >= _SAME_MS
