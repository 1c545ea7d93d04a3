"""Examines recovery points: damage is found by reading them, never inferred from an error message.

Doctor, previews, preflights and starts agree because all examine live directories here. A failed start skips no intact
point, as the cause is elsewhere.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.pending_restore import ToSnapshot
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StreamRecord
from dagster_ckpt.errors import (
    CkptError,
    CutOvertakenError,
    LiveDirectoryError,
    NothingCommittedError,
    RecoveryExhaustedError,
    RestoreError,
    RowsAtRiskError,
    SharedSinkError,
    SinkRollbackError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StateAtRiskError,
    StorageAccessError,
    UnknownLayoutError,
)
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory
from dagster_ckpt.recovery.plan import FinishRestore, RecoveryPlan
from dagster_ckpt.recovery.recovery_points import snapshot_of_origin
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, sink_entry
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState, LiveStatus, live_metadata
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, LiveDirectory, Positions
from dagster_ckpt.spark.checkpoint_dir.operators import NOTHING_KNOWN, KnownQuery
from dagster_ckpt.spark.checkpoint_dir.state_files import rewrite_of
from dagster_ckpt.spark.doctor.contents import KnownSnapshot, examine_contents
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.spark.doctor.finding import Code, Finding, Severity, Subject, error
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import TAKEN_FROM, describe_snapshot, holding, readable_manifest

_SHOWN = 3


@dataclass(frozen=True)
class Damage:
    """`error` is a finding's code or an exception's class."""

    error: str
    detail: str


def diagnose_live_directory(
    stream: StreamHandle, live: LiveDirectory, *, sinks: Sequence[str] = (), deep: bool, looks_back: bool = False
) -> Diagnosis:
    """Diagnose a live directory, or a copy, with all that the catalog knows of its content.

    `deep` also reads every state file that a resume needs, at the cost of loading the state.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    is_own = record.live_directory is not None and same_folder(record.live_directory, live.url)
    snapshot, query_id = _reference(stream, record, live, is_own=is_own)
    # Before the directory is read, where a query may still run.
    newest = _newest_taken_from(stream, record, live) if is_own else None
    diagnosis = diagnose(
        live,
        sinks=sinks_of(sinks),
        expected_query_id=query_id,
        deep=deep,
        snapshot=snapshot,
        looks_back=looks_back,
        # Another directory may date from before a change of the plan.
        known=known_query(stream, record) if is_own else NOTHING_KNOWN,
    )
    if newest is None or diagnosis.batch_id is None or (newest.batch_id or 0) <= diagnosis.batch_id:
        return diagnosis
    return replace(diagnosis, findings=(_older_copy(live, diagnosis.batch_id, newest), *diagnosis.findings))


def _newest_taken_from(stream: StreamHandle, record: StreamRecord, live: LiveDirectory) -> SnapshotRecord | None:
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        directory = snapshot.properties.get(TAKEN_FROM)
        if snapshot.timeline == record.timeline and isinstance(directory, str) and same_folder(directory, live.url):
            return snapshot
    return None


def _older_copy(live: LiveDirectory, batch_id: int, newest: SnapshotRecord) -> Finding:
    # A stream that goes back always continues in a new directory.
    return error(
        Code.OLDER_COPY,
        live.url,
        f"{live.url} is at batch {batch_id}, but {describe_snapshot(newest)} was taken from it: an older copy of it "
        "was put in its place, such as from a backup. Sinks would get the batches after it again.",
    )


def known_query(stream: StreamHandle, record: StreamRecord) -> KnownQuery:
    newest = next(iter(stream.catalog.snapshots.restorable(stream.stream_id)), None)
    return KnownQuery.of(record.plan, newest.properties if newest is not None else None)


def _reference(
    stream: StreamHandle, record: StreamRecord, live: LiveDirectory, *, is_own: bool
) -> tuple[KnownSnapshot | None, str | None]:
    """Return the newest snapshot whose files must be in the directory, and the query id expected there."""
    metadata, commit = live_metadata(live), live.positions().commit
    rewrite_id, query_id = (metadata.rewrite_id, metadata.id) if metadata is not None else (None, None)
    expected: str | None = None
    for snapshot in stream.catalog.snapshots.restorable(stream.stream_id):
        # On another timeline, batches had other results. A foreign directory may be a copy of anything.
        taken_here = not is_own or _was_taken_in(record, snapshot)
        is_origin = record.origin is not None and snapshot.snapshot_id == record.origin.snapshot_id
        if not (taken_here or is_origin):
            continue
        expected = expected or (snapshot.query_id if taken_here else None)
        if (snapshot.batch_id or 0) > (commit if commit is not None else -1):
            continue
        manifest = readable_manifest(stream, snapshot.location or "")
        # Before a rewrite of the state, files had the same names but other content.
        if manifest is None or rewrite_of(manifest.header.properties) != rewrite_id:
            continue
        entries = list(manifest.files)
        if not taken_here or query_id != manifest.header.query_id:
            # A restore may give the query another id, and move its sources.
            rewritten = {METADATA, OFFSETS, COMMITS}
            if not taken_here and record.origin is not None and record.origin.map_sources is not None:
                rewritten.add(SOURCES)
            entries = [each for each in entries if each.path.partition("/")[0] not in rewritten]
        return KnownSnapshot(snapshot.location or "", manifest.header.batch_id, entries), expected
    return None, expected


def _was_taken_in(record: StreamRecord, snapshot: SnapshotRecord) -> bool:
    """Whether a snapshot was taken in the live directory, or in one that it copies exactly."""
    origin = record.origin
    is_adopted = origin is not None and origin.kind is OriginKind.ADOPTED and snapshot.snapshot_id == origin.snapshot_id
    return is_adopted or snapshot.timeline == record.timeline


class Examiner:
    """Examines points, and remembers an intact live directory, which the start does not read again."""

    def __init__(self, stream: StreamHandle) -> None:
        self._stream = stream
        self._good: tuple[str, Positions] | None = None

    def state_of(self, live: LiveDirectory, state: LiveState, *, deep: bool) -> LiveState:
        known, self._good = self._good, None
        is_known = known == (live.url, live.positions())
        damage = self.damage_of_live(live, deep=deep and not is_known)
        return state if damage is None else replace(state, status=LiveStatus.BROKEN, reason=damage.detail)

    def damage_of_live(self, live: LiveDirectory, *, deep: bool = True) -> Damage | None:
        positions = live.positions()
        damage = _damage(diagnose_live_directory(self._stream, live, deep=deep).findings, live)
        self._good = (live.url, positions) if deep and damage is None else None
        return damage

    def damage_of_point(self, plan: RecoveryPlan) -> Damage | None:
        stream = self._stream
        if plan.snapshot is not None:
            return self.damage_of_snapshot(plan.snapshot)
        record = stream.catalog.streams.get(stream.stream_id)
        pending = record.pending_restore
        if isinstance(plan, FinishRestore) and isinstance(pending, ToSnapshot):
            # Its sinks are rolled back by the logs in the snapshot.
            problems = snapshot_problems(stream.store, pending.location)
            if problems:
                return Damage("SnapshotCorruptError", "; ".join(problems[:_SHOWN]))
        current = record.live_directory
        directory = plan.directory or current
        if directory is None:
            return None
        if plan.to_batch is None or directory == current:
            return self.damage_of_live(LiveDirectory(directory))
        return _damage_of_batch(LiveDirectory(directory), plan.to_batch)

    def damage_of_origin(self, record: StreamRecord) -> Damage | None:
        origin = record.origin
        snapshot = snapshot_of_origin(record, origin) if origin is not None else None
        if snapshot is not None:
            return self.damage_of_snapshot(snapshot)
        if origin is None or origin.directory is None or origin.batch_id is None:
            return None
        return _damage_of_batch(LiveDirectory(origin.directory), origin.batch_id)

    def damage_of_snapshot(self, snapshot: SnapshotRecord) -> Damage | None:
        if snapshot.location is None:
            return Damage("SnapshotNotFoundError", "the catalog does not record its location")
        try:
            with holding(self._stream.catalog, [snapshot], "examination after a failure"):
                problems = content_problems(self._stream, snapshot.location)
        except StorageAccessError:
            raise
        except CkptError as trouble:
            problems = [str(trouble)]
        return Damage("SnapshotCorruptError", "; ".join(problems[:_SHOWN])) if problems else None


def describe_point(plan: RecoveryPlan, live: LiveDirectory | None) -> str:
    if plan.snapshot is not None:
        return describe_snapshot(plan.snapshot)
    return f"the live directory {live.url}" if live is not None else f"batch {plan.to_batch} of {plan.directory}"


def _damage(findings: Sequence[Finding], live: LiveDirectory) -> Damage | None:
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    unknown = next((each for each in errors if each.code is Code.UNKNOWN_VERSION), None)
    if unknown is not None:
        raise UnknownLayoutError(unknown.explanation)
    if not errors:
        return None
    explained = "; ".join(_describe_finding(each, live) for each in errors[:_SHOWN])
    more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    return Damage(errors[0].code.value, f"{explained}{more}")


def _describe_finding(finding: Finding, live: LiveDirectory) -> str:
    explanation = finding.explanation.rstrip(".")
    if finding.path in explanation:
        return explanation
    return f"{live.url}/{finding.path} ({finding.code}): {explanation}"


def _damage_of_batch(live: LiveDirectory, batch_id: int) -> Damage | None:
    try:
        needed = cut(live, carry_in_flight=True, at_batch=batch_id).needed
    except UnknownLayoutError:
        raise
    except LiveDirectoryError as trouble:
        return Damage(Code.NOT_WHOLE.value, str(trouble))
    return _damage(list(examine_contents(needed)), live)


def refuse_broken_sinks(stream: StreamHandle, live: LiveDirectory, output: NamedOutput | None) -> None:
    described = described_sink(output)
    sinks = [described] if described is not None else []
    if output is None:
        sinks = sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))

    def look() -> dict[tuple[Code, str], Finding]:
        found = [finding for sink in sinks for finding in sink.examine(Subject.of(live, sinks=sinks))]
        # `survey_sinks` refuses a log that is ahead.
        return {
            (each.code, each.path): each
            for each in found
            if each.severity is Severity.ERROR and each.code is not Code.SINK_LOG_AHEAD
        }

    # Look twice: a query that still runs elsewhere may have compacted the log meanwhile.
    errors = look()
    errors = {key: each for key, each in look().items() if key in errors} if errors else {}
    if errors:
        explained = " ".join(
            f"{each.path}: {each.explanation} {each.advice}" for each in list(errors.values())[:_SHOWN]
        )
        raise SharedSinkError(f"Stream {stream.stream_id!r} is not started, nothing was changed. {explained}")


_OF_A_POINT = (SnapshotCorruptError, SnapshotNotFoundError, LiveDirectoryError, RestoreError)
_OF_SOMETHING_ELSE = (
    *(CutOvertakenError, NothingCommittedError, RecoveryExhaustedError, UnknownLayoutError),
    *(RowsAtRiskError, SinkRollbackError, StateAtRiskError),
)
# The process or its JVM was ended: no sign of damage.
_ENDED = re.compile(r"(InterruptedException|ClosedByInterrupt|Py4JNetworkError|SparkContext was shut down)")


def is_suspicious(error: Exception) -> bool:
    """Whether a start may have failed because of its recovery point."""
    if isinstance(error, CkptError):
        return isinstance(error, _OF_A_POINT) and not isinstance(error, _OF_SOMETHING_ELSE)
    return is_suspicious_end(str(error))


def is_suspicious_end(reason: str) -> bool:
    return _ENDED.search(reason) is None


# These say which files belong together; of others, name and length suffice.
_READ_FOLDERS = (METADATA, OFFSETS, COMMITS, SOURCES)
_READ_SUFFIXES = (".zip", ".crc")
# A restore rewrites these paths.
_NOT_OF_A_SNAPSHOT = {Code.SCHEMA_PATH_ELSEWHERE}


def snapshot_problems(store: SnapshotStore, location: str, *, deep: bool = True) -> list[str]:
    """Return why a snapshot cannot be restored: short data objects, or missing files of a resume.

    `deep` also compares the digests of data objects.
    """
    try:
        return store.verify(location, deep=deep) or layout_problems(store, location)
    except (SnapshotNotFoundError, SnapshotCorruptError) as trouble:
        return [str(trouble)]


def content_problems(stream: StreamHandle, location: str) -> list[str]:
    """Return `snapshot_problems`, or what a diagnosis of a temporary restore finds."""
    problems = snapshot_problems(stream.store, location)
    if problems:
        return problems
    with scratch_directory(stream) as copy:
        try:
            restore_into(stream, location, copy, is_scratch=True)
        except StorageAccessError:
            raise
        except CkptError as trouble:
            return [str(trouble)]
        found = diagnose(copy, looks_back=False).findings
    return [f"{location}: {item.path}: {item.explanation}" for item in found if item.severity is Severity.ERROR]


def layout_problems(store: SnapshotStore, location: str) -> list[str]:
    """Return what a restore would lack, found in a copy whose state files are empty."""
    manifest = store.manifest(location)
    with tempfile.TemporaryDirectory(prefix="dagster-ckpt-verify") as scratch:
        root = Path(scratch)
        for entry in manifest.files:
            if entry.path.split("/")[0] == SINKS_FOLDER:
                try:
                    sink_entry(entry.path)
                except RestoreError as trouble:
                    return [f"{location}: {trouble}"]
            elif not _must_be_read(entry.path):
                _make_hollow(root / entry.path, entry.size)
        store.extract(location, _writer(root), only=_must_be_read)
        diagnosis = diagnose(
            LiveDirectory(str(root)),
            expected_query_id=manifest.header.query_id,
            deep=False,
            known=KnownQuery.of(manifest.header.properties.get("plan"), manifest.header.properties),
        )
    found = [
        f"{location}: {item.path}: {item.explanation.replace(f'file://{root}/', '')}"
        for item in diagnosis.findings
        if item.severity is Severity.ERROR and item.code not in _NOT_OF_A_SNAPSHOT
    ]
    if not found and diagnosis.batch_id != manifest.header.batch_id:
        found.append(
            f"The header of {location} names batch {manifest.header.batch_id}, but its files belong to batch "
            f"{diagnosis.batch_id}. Use another snapshot."
        )
    return found


def _must_be_read(path: str) -> bool:
    parts = path.split("/")
    is_note = "_metadata" in parts or "_stateSchema" in parts
    # A changelog with a unique id in its name lists the files before it.
    is_lineage = path.endswith(".changelog") and "_" in parts[-1]
    return parts[0] in _READ_FOLDERS or is_note or is_lineage or path.endswith(_READ_SUFFIXES)


def _make_hollow(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.truncate(size)


def _writer(root: Path) -> Any:
    def write(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        path = root / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.writelines(chunks)

    return write
