"""The examination of a snapshot: its bytes, the files that a resume needs, and on suspicion what is in them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dagster_ckpt.errors import CkptError, RestoreError, SnapshotCorruptError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.recovery.prepare import restore_into
from dagster_ckpt.recovery.scratch import scratch_directory
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, sink_entry
from dagster_ckpt.spark.checkpoint_dir.known_query import KnownQuery
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.doctor.finding import Code, Severity
from dagster_ckpt.stream.handle import StreamHandle

# Content that determines which files belong together. For all other files name and length suffice.
_READ_FOLDERS = ("metadata", "offsets", "commits", "sources")
_READ_SUFFIXES = (".zip", ".crc")
# A restore rewrites these paths.
_NOT_OF_A_SNAPSHOT = {Code.SCHEMA_PATH_ELSEWHERE}


def snapshot_problems(store: SnapshotStore, location: str, *, deep: bool = True) -> list[str]:
    """What is wrong with a snapshot; empty if it can be restored.

    Its data objects exist and are long enough; with `deep`, every byte matches its digest; then, all files that a
    resume after its batch needs are among its files, in known formats.

    Raises:
        StorageAccessError: The storage cannot be reached, which says nothing about the snapshot.
    """
    try:
        return store.verify(location, deep=deep) or layout_problems(store, location)
    except (SnapshotNotFoundError, SnapshotCorruptError) as trouble:
        return [str(trouble)]


def content_problems(stream: StreamHandle, location: str) -> list[str]:
    """Like `snapshot_problems`, and what the checksums in its files say: they may have been damaged when it was taken.

    It is restored to a temporary directory, whose files are read.

    Raises:
        StorageAccessError: The storage cannot be reached, which says nothing about the snapshot.
    """
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
    """What a restore of a snapshot would lack, without restoring its state.

    Examines a hollow copy like a live directory: logs and metadata files are real, while all other
    files have only names and lengths.

    Raises:
        SnapshotNotFoundError: There is no snapshot.
        SnapshotCorruptError: A file that must be read is missing or was altered.
    """
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
    # The header of a changelog with a unique id in its name lists the files before it.
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
