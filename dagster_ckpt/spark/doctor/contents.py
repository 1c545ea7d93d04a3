"""Compare the content of files with their own checksums, Spark's and Hadoop's, and with a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import google_crc32c
from blake3 import blake3

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import CancelCheck, FileIO, in_threads
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.checksums import FRAMED, checksum_file, content_trouble, fits_hadoop, is_lz4
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id, entry_ids
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, STATE, NeededFile
from dagster_ckpt.spark.checkpoint_dir.operators import is_metadata_v2
from dagster_ckpt.spark.checkpoint_dir.state_files import CHANGES
from dagster_ckpt.spark.doctor.finding import Code, Finding, Severity, Subject, error, note, warning
from dagster_ckpt.values.safe_parsing import from_json, number_in, reading

_READERS = 8


def examine_contents(files: Sequence[NeededFile]) -> Iterator[Finding]:

    def examined(file: NeededFile, _check: CancelCheck) -> list[Finding]:
        try:
            return list(examine_content(file.folder, file.source))
        except FileNotFoundError:
            # Purged since: the next examination sees a newer batch.
            return []

    for findings in in_threads(_READERS, files, examined):
        yield from findings


def examine_content(folder: FileIO, path: str) -> Iterator[Finding]:
    data = folder.read(path)
    fits = fits_hadoop(folder, path, data)
    # Hadoop's checksum makes decompressing unnecessary.
    trouble = _own_trouble(path, data, checksums=fits is not True)
    if trouble is not None:
        yield trouble
    elif fits is False:
        yield _stale(path) if _proves_itself(path, data) else _differs(path)
    if path.startswith(f"{STATE}/") and path.endswith((".zip", *FRAMED)):
        yield from _spark_checksum(folder, path, data, known=fits is True)


def _own_trouble(path: str, data: bytes, *, checksums: bool) -> Finding | None:
    trouble = content_trouble(path, data, checksums=checksums)
    if trouble is None:
        return None
    if path.endswith(FRAMED):
        return error(Code.STATE_FILE_DAMAGED, path, f"{trouble}: Spark fails to load the state.")
    return error(Code.SNAPSHOT_UNREADABLE if path.endswith(".zip") else Code.STATE_FILE_DAMAGED, path, f"{trouble}.")


def _proves_itself(path: str, data: bytes) -> bool:
    return path.endswith(".zip") or (path.endswith(FRAMED) and is_lz4(data))


def _stale(path: str) -> Finding:
    what = f"Its own checksums are right, but its content does not match Hadoop's checksum {checksum_file(path)}"
    if path.endswith(".zip"):
        return error(
            Code.HADOOP_CHECKSUM_STALE,
            path,
            f"{what}: another file was put in its place. Spark verifies the checksum of this kind of file, and fails "
            "with ChecksumException.",
        )
    return note(
        Code.HADOOP_CHECKSUM_STALE,
        path,
        f"{what}: another file was put in its place. Spark does not verify the checksum of this kind of file.",
    )


def _differs(path: str) -> Finding:
    return error(
        Code.CHECKSUM_DIFFERS,
        path,
        f"Its content does not match Hadoop's checksum {checksum_file(path)}: it was altered after it was written. "
        "Spark may not notice, and continue with wrong values.",
    )


def _spark_checksum(folder: FileIO, path: str, data: bytes, *, known: bool) -> Iterator[Finding]:
    """Compare with the checksum of `ChecksumCheckpointFileManager`, if any; of `known` content only the size."""
    try:
        text = folder.read(f"{path}.crc")
    except FileNotFoundError:
        return
    try:
        with reading(LiveDirectoryError):
            noted = from_json(text)
            # Java writes the value signed.
            algorithm, value, size = noted["algorithm"], int(noted["value"]), noted["mainFileSize"]
    except LiveDirectoryError as reason:
        yield error(
            Code.CHECKSUM_DIFFERS, f"{path}.crc", f"Spark's checksum cannot be read ({reason}): Spark fails on it."
        )
        return
    if size != len(data):
        yield error(
            Code.CHECKSUM_DIFFERS,
            path,
            f"Spark's checksum is of {size} bytes, but it has {len(data)}: it was altered.",
        )
    elif not known and algorithm == "CRC32C" and value & 0xFFFFFFFF != google_crc32c.value(data):
        yield error(
            Code.CHECKSUM_DIFFERS, path, "Its content does not have the CRC32C that Spark recorded: it was altered."
        )


OPERATOR_NOTES = ("/_metadata/", "/_stateSchema/")
_SUM = ".crc"


def examine_log_contents(subject: Subject) -> Iterator[Finding]:
    for hidden in sorted(path for path in subject.hidden_files() if path.endswith(_SUM)):
        directory, slash, name = hidden.rpartition("/")
        summed = name[1 : -len(_SUM)]
        path = f"{directory}{slash}{summed}"
        # Its name begins with a dot while Spark is writing it.
        if summed.startswith(".") or not _is_log(path):
            continue
        is_read = _is_read_by_a_start(subject, path)
        if not (is_read or subject.looks_back):
            continue
        try:
            findings = list(examine_content(subject.folder, path))
        except FileNotFoundError:
            # Purged, or never finished.
            continue
        for finding in findings:
            yield finding if is_read else replace(finding, severity=Severity.WARNING)


def _is_log(path: str) -> bool:
    folder = path.partition("/")[0]
    return folder in (METADATA, OFFSETS, COMMITS, SOURCES) or (
        folder == STATE and any(note in path for note in OPERATOR_NOTES) and "/SSTs/" not in path
    )


def _is_read_by_a_start(subject: Subject, path: str) -> bool:
    folder, _, name = path.partition("/")
    if folder == SOURCES and name.count("/") == 1:
        return _is_after_a_compacted_entry(subject, path)
    number = number_in(name)
    if folder not in (OFFSETS, COMMITS) or number is None:
        return True
    return subject.concerns(folder, number)


# A start asks for the files of the last two batches again.
_READ_APART = 2


def _is_after_a_compacted_entry(subject: Subject, path: str) -> bool:
    """Whether no later entry of a source's log, which a start reads instead, contains this one."""
    directory, _, name = path.rpartition("/")
    numbers = entry_ids(subject.listed(directory))
    number, last = entry_id(name), max(numbers.values(), default=0)
    compacted = max((numbers[entry] for entry in numbers if entry.endswith(COMPACT)), default=-1)
    return number is None or number >= min(compacted, last - _READ_APART)


_SCHEMA = "/_metadata/schema"


@dataclass(frozen=True)
class KnownSnapshot:
    location: str
    batch_id: int
    entries: Iterable[FileEntry]


def examine_against_snapshot(
    subject: Subject, snapshot: KnownSnapshot, needed: Sequence[NeededFile]
) -> Iterator[Finding]:
    tokens = {file.source: file.token for file in needed}
    # A start widens schemas of Spark 3.5.
    has_fixed_schemas = all(operator.metadata_version > 0 for operator in subject.operators or ())
    for entry in snapshot.entries:
        is_schema = has_fixed_schemas and entry.path.endswith(_SCHEMA)
        is_log = is_schema or entry.path.partition("/")[0] in (METADATA, OFFSETS, COMMITS, SOURCES)
        is_read = not is_log or _is_read_by_a_start(subject, entry.path)
        if not (is_read or subject.looks_back):
            continue
        if not is_log and _is_log(entry.path):
            yield from _note_against_snapshot(subject, snapshot, entry)
        if not is_log and entry.path not in tokens:
            continue
        token = tokens.get(entry.path)
        is_same_file = token is not None and token == entry.token
        if not (is_same_file or is_schema or _is_never_changed(entry, snapshot.batch_id)):
            continue
        try:
            data = subject.folder.read(entry.path)
        except FileNotFoundError:
            continue
        # Other lengths are reported elsewhere.
        if (is_log or len(data) == entry.size) and blake3(data).hexdigest() != entry.digest:
            found = error(
                Code.CONTENT_DIFFERS,
                entry.path,
                f"Its content differs from that in {snapshot.location}, and Spark never changes such a "
                "file: it was altered.",
            )
            yield found if is_read else replace(found, severity=Severity.WARNING)


def _note_against_snapshot(subject: Subject, snapshot: KnownSnapshot, entry: FileEntry) -> Iterator[Finding]:
    """Compare metadata of the state, which Spark rewrites if a column is renamed."""
    if is_metadata_v2(entry.path):
        # A restore rewrites its paths.
        return
    try:
        data = subject.folder.read(entry.path)
    except FileNotFoundError:
        return
    if blake3(data).hexdigest() != entry.digest:
        yield warning(
            Code.CONTENT_DIFFERS,
            entry.path,
            f"Its content differs from that in {snapshot.location}. Unless a column was renamed since, it "
            "was altered: Spark compares the query with it, and refuses to start if the types differ.",
        )


def _is_never_changed(entry: FileEntry, batch_id: int) -> bool:
    folder, _, rest = entry.path.partition("/")
    if folder == METADATA or entry.identity is not None:
        return True
    name = rest.rpartition("/")[2]
    if folder in (OFFSETS, COMMITS, SOURCES):
        # The format of a source's own folders is unknown.
        number = number_in(rest) if folder != SOURCES else entry_id(name) if rest.count("/") == 1 else None
        return number is not None and (number <= batch_id or folder == SOURCES)
    version = number_in(name.partition(".")[0].partition("_")[0])
    return name.endswith(CHANGES) and version is not None and version <= batch_id + 1
