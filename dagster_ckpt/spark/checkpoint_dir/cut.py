"""Consistent cuts: exactly the files that a resume after the newest committed batch needs, and their description.

Spark writes a batch in a fixed order: source log, offsets, state, sink, commit. If a commit is visible, everything that
it needs is on storage and still needed by the query. Files are read in the reverse order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Required, TypedDict, Unpack

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, NothingCommittedError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.reuse import BaseSnapshot, Source
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink, SinkToCapture, capture
from dagster_ckpt.spark.checkpoint_dir.file_source import refuse_unassignable_offsets, source_files
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    METADATA,
    OFFSETS,
    SOURCES,
    LiveDirectory,
    NeededFile,
    Positions,
    batch_ids,
    read_needed,
    read_versioned,
)
from dagster_ckpt.spark.checkpoint_dir.logs import (
    CommitEntry,
    OffsetEntry,
    parse_commit_entry,
    parse_metadata,
    parse_offset_entry,
)
from dagster_ckpt.spark.checkpoint_dir.operators import (
    NOTHING_KNOWN,
    KnownQuery,
    Operator,
    mode_in_logs,
    read_operators,
)
from dagster_ckpt.spark.checkpoint_dir.state_files import (
    CHAIN,
    LAYOUT,
    CommittedState,
    grown_since,
    layout_of,
    state_files,
)
from dagster_ckpt.values.safe_parsing import from_json

ATTEMPTS = 5
STATE_EDITS = "state_edits"


@dataclass(frozen=True)
class Cut:
    """The content of a snapshot.

    Attributes:
        in_flight: The batch whose planned offsets are included, so that exactly it is replayed.
        extends: `needed` has only the state files that the base snapshot lacks.
        carries_state: `needed` also has the whole state after the batch in flight.
    """

    batch_id: int
    query_id: str
    in_flight: int | None
    needed: tuple[NeededFile, ...]
    properties: Mapping[str, Any]
    extends: bool = False
    carries_state: bool = False

    @property
    def files(self) -> Sequence[Source]:
        return self.needed


class CutOptions(TypedDict, total=False):
    """What a cut includes.

    Attributes:
        at_batch: A retained batch after which to resume; by default the newest committed one.
        carry_state: The state after the batch in flight, if complete: a sink that has the batch skips it, so nothing
            would write its state again.
        known: Without these facts, missing state may go unnoticed.
    """

    carry_in_flight: Required[bool]
    sinks: Sequence[SinkToCapture]
    base: BaseSnapshot | None
    at_batch: int | None
    carry_state: bool
    known: KnownQuery


def cut(live: LiveDirectory, *, attempts: int = ATTEMPTS, **options: Unpack[CutOptions]) -> Cut:
    """Take a cut while the query runs; try again if Spark purges files meanwhile."""
    at_batch = options.get("at_batch")
    while True:
        attempts -= 1
        positions = live.positions()
        at = positions if at_batch is None else _positions_at(live, at_batch)
        try:
            return _cut_at(live, at, options)
        except FileNotFoundError as error:
            if attempts <= 0:
                raise _vanished(live, error) from error
        except LiveDirectoryError:
            if attempts <= 0 or live.positions() == positions:
                raise


def _positions_at(live: LiveDirectory, batch_id: int) -> Positions:
    planned = batch_id + 1 in batch_ids(live.folder, OFFSETS)
    return Positions(batch_id, batch_id + 1 if planned else batch_id)


def _cut_at(live: LiveDirectory, positions: Positions, options: CutOptions) -> Cut:
    folder = live.folder
    batch_id = positions.commit
    if batch_id is None:
        raise NothingCommittedError(
            f"{live.url} has no committed batch yet. Wait for the query's first batch, then try again."
        )
    commit_file = _log_file(live, f"{COMMITS}/{batch_id}", "the batch to resume after")
    offset_file = _log_file(live, f"{OFFSETS}/{batch_id}", f"the offsets of batch {batch_id}")
    commit = parse_commit_entry(commit_file.data or b"", f"{live.url}/{commit_file.source}")
    committed = _offsets(live, offset_file)
    operators = read_operators(folder, batch_id)
    options.get("known", NOTHING_KNOWN).check_operators(
        folder, [each.number for each in operators], commit.state_ids or ()
    )
    before_file = _offsets_before(live, batch_id, stateful=bool(operators))
    before = _offsets(live, before_file) if before_file else None
    in_flight_file = _in_flight_file(live, positions, committed) if options["carry_in_flight"] else None
    in_flight = _offsets(live, in_flight_file) if in_flight_file else None
    metadata_file = _log_file(live, METADATA, "the id of the query")
    metadata = parse_metadata(metadata_file.data or b"", f"{live.url}/{METADATA}")
    needed = [metadata_file, commit_file, offset_file, *(file for file in (before_file, in_flight_file) if file)]
    sources = folder.listing(SOURCES).names
    refuse_unassignable_offsets(folder, committed, sources)
    for source in sorted({*sources, *_file_sources(committed, in_flight)}):
        needed += source_files(folder, source, committed, before, in_flight)
    for operator in operators:
        needed += operator.files
    state = CommittedState(folder, metadata.id, operators, committed, commit, metadata.rewrite_id)
    state_needed, chain, extends = _state(state, options.get("base"))
    needed += state_needed
    after = (
        state_after(folder, metadata.id, operators, in_flight, commit)
        if in_flight and options.get("carry_state")
        else None
    )
    held = {file.path for file in needed}
    needed += [file for file in after or () if file.path not in held]
    captured = capture(options.get("sinks", ()), batch_id)
    for sink in captured:
        needed += sink.files
    # Callers that go back to a batch roll the sinks back as well.
    if options.get("at_batch") is None:
        _check_sinks_are_its_own(live, batch_id, captured)
    _check_still_there(live, batch_id, metadata_file)
    properties = _properties(committed, before, in_flight, commit, operators=operators, captured=captured)
    properties |= {CHAIN: chain, LAYOUT: layout_of(state)}
    properties |= {STATE_EDITS: list(metadata.edits)} if metadata.edits else {}
    return Cut(
        batch_id,
        metadata.id,
        in_flight.batch_id if in_flight else None,
        tuple(needed),
        properties,
        extends=extends,
        carries_state=after is not None,
    )


def state_after(
    folder: FileIO, query_id: str, operators: list[Operator], planned: OffsetEntry, before: CommitEntry | None
) -> list[NeededFile] | None:
    """List the state files that a resume after a planned, uncommitted batch needs; None if incomplete.

    Also None in checkpoint format v2, where only the missing commit tells which files are valid.
    """
    if before is not None and before.state_ids is not None:
        return None
    done = CommitEntry(planned.batch_id, 0, None)
    try:
        return state_files(CommittedState(folder, query_id, operators, planned, done)).files
    except IncompleteCutError:
        return None


def _state(committed: CommittedState, base: BaseSnapshot | None) -> tuple[list[NeededFile], int, bool]:
    if base is not None and base.can_be_extended:
        grown = grown_since(base, committed)
        if grown is not None:
            header = base.manifest.header
            return grown, int(header.properties[CHAIN]) + committed.commit.batch_id - header.batch_id, True
    state = state_files(committed)
    return state.files, state.chain, False


def _log_file(live: LiveDirectory, path: str, what: str) -> NeededFile:
    try:
        return read_versioned(live.folder, path)
    except FileNotFoundError as error:
        raise IncompleteCutError(
            f"{live.url}/{path} is missing: it is {what}. The live directory is damaged: restore a snapshot."
        ) from error


def _offsets(live: LiveDirectory, file: NeededFile) -> OffsetEntry:
    return parse_offset_entry(file.data or b"", f"{live.url}/{file.source}")


def _offsets_before(live: LiveDirectory, batch_id: int, *, stateful: bool) -> NeededFile | None:
    if batch_id == 0:
        return None
    try:
        return read_needed(live.folder, f"{OFFSETS}/{batch_id - 1}")
    except FileNotFoundError as error:
        # Asynchronous progress tracking leaves gaps; Spark then uses an earlier entry.
        earlier = [number for number in batch_ids(live.folder, OFFSETS) if number < batch_id]
        if earlier and not stateful and batch_id - 1 not in batch_ids(live.folder, COMMITS):
            return read_needed(live.folder, f"{OFFSETS}/{earlier[-1]}")
        raise IncompleteCutError(
            f"{live.url}/{OFFSETS}/{batch_id - 1} is missing: Spark needs the offsets of the batch before batch "
            f"{batch_id} to resume. The live directory is damaged: restore a snapshot."
        ) from error


def _in_flight_file(live: LiveDirectory, positions: Positions, committed: OffsetEntry) -> NeededFile | None:
    if positions.offset is None or positions.offset != committed.batch_id + 1 or committed.continuous:
        return None
    file = read_needed(live.folder, f"{OFFSETS}/{positions.offset}")
    # Spark does not replay a batch of an offline repartition.
    return file if _offsets(live, file).partitions == committed.partitions else None


def _file_sources(*entries: OffsetEntry | None) -> set[str]:
    return {
        name
        for entry in entries
        if entry is not None
        for name, offset in entry.sources.items()
        if offset is not None and '"logOffset"' in offset
    }


def _check_sinks_are_its_own(live: LiveDirectory, batch_id: int, captured: Sequence[CapturedSink]) -> None:
    ahead = [(sink.newest, sink.place) for sink in captured if sink.newest is not None and sink.newest > batch_id]
    if not ahead:
        return
    planned = live.positions().offset
    for newest, place in ahead:
        if planned is None or newest > planned:
            raise IncompleteCutError(
                f"The file sink {place} has batch {newest}, but the query of {live.url} has planned batches up to "
                f"{planned}: another query writes there, and batches of this one may have been skipped. Stop the "
                "other one, and start this one from a snapshot with start_from=...: that rolls the sink back."
            )


def _check_still_there(live: LiveDirectory, batch_id: int, metadata: NeededFile) -> None:
    """Refuse if the commit vanished: other files may be gone too."""
    commits = batch_ids(live.folder, COMMITS)
    if batch_id not in commits:
        raise IncompleteCutError(
            f"{live.url}/{COMMITS}/{batch_id} vanished while it was read (newest commit now: "
            f"{max(commits, default=None)}): the query was rolled back, or commits faster than this storage can be "
            "read. Try again."
        )
    if live.folder.read(METADATA) != metadata.data:
        raise IncompleteCutError(f"{live.url} was taken over by another query while it was being read. Try again.")


def _vanished(live: LiveDirectory, error: FileNotFoundError) -> IncompleteCutError:
    return IncompleteCutError(
        f"{error} vanished from {live.url} while it was read. If the query runs, try again; if it does not, "
        "the live directory is damaged: restore a snapshot."
    )


_STATE_FORMATS = {
    "stateStoreSave": "aggregation",
    "sessionWindowStateStoreSaveExec": "sessionWindow",
    "symmetricHashJoin": "join",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "flatMapGroupsWithState",
}


def _properties(
    committed: OffsetEntry,
    before: OffsetEntry | None,
    in_flight: OffsetEntry | None,
    commit: CommitEntry,
    *,
    operators: Sequence[Operator],
    captured: Sequence[CapturedSink],
) -> dict[str, Any]:
    return {
        "watermark_ms": max(committed.watermark_ms, commit.next_watermark_ms),
        "in_flight_batch": in_flight.batch_id if in_flight else None,
        "conf": dict(committed.conf),
        "source_offsets": {name: _offset(text) for name, text in committed.sources.items()},
        "state_store_provider": committed.provider_class if operators else None,
        "state_partitions": committed.partitions if operators else None,
        "state_operators": [_operator(operator, committed, commit) for operator in operators],
        "sinks": [sink.properties() for sink in captured],
        "named_sinks": {name: dict(sink) for name, sink in commit.sinks.items()},
        "formats": {
            "offset_log": committed.format_version,
            "commit_log": commit.format_version,
            "state_checkpoint": None if not operators else 1 if commit.state_ids is None else 2,
        },
        "pyspark_of_reader": _pyspark_version(),
        "mode": mode_in_logs(committed, before).value,
    }


def _operator(operator: Operator, committed: OffsetEntry, commit: CommitEntry) -> dict[str, Any]:
    ids = (commit.state_ids or {}).get(operator.number)
    kind = _STATE_FORMATS.get(operator.name)
    version = committed.conf.get(f"spark.sql.streaming.{kind}.stateFormatVersion") if kind else None
    return {
        "number": operator.number,
        "name": operator.name,
        "stores": list(operator.stores),
        "partitions": 1 if operator.single_partition else len(ids) if ids else committed.partitions,
        "state_format": int(version) if version else None,
        "metadata_format": operator.metadata_version,
        "schema_format": operator.schema_version,
    }


def _offset(text: str | None) -> Any:
    try:
        return None if text is None else from_json(text)
    except ValueError:
        return text


@cache
def _pyspark_version() -> str | None:
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None
