"""Verify the content of files: with their own checksums, Spark's and Hadoop's, and with a snapshot of them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.hadoop_checksums import checksum_file, fits_hadoop
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, STATE, NeededFile
from dagster_ckpt.spark.checkpoint_dir.operators import is_metadata_v2
from dagster_ckpt.spark.checkpoint_dir.state.lineage import LARGEST_BLOCK, block_checksum, decompress_block
from dagster_ckpt.spark.doctor.finding import Code, Finding, Severity, error, note, warning
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.untrusted import from_json, number_in, reading

_POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    """CRC32C of some bytes (RFC 3720, appendix B.4)."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


MAGIC = b"LZ4Block"
# Magic, token, compressed length, plain length, checksum; the last block is empty.
_HEADER = struct.Struct("<8sBiiI")
_RAW = 0x10


def lz4_trouble(data: bytes, *, checksums: bool = True) -> str | None:
    """What is wrong with the blocks of a state file; None if they are complete, or it uses another codec.

    Args:
        data: The whole file.
        checksums: Also decompress each block, and compare it with its checksum.
    """
    if not data:
        return "It is empty"
    if not data.startswith(MAGIC):
        if _is_nearly_magic(data):
            return "It is damaged at its beginning"
        # A codec other than Spark's default, whose framing is not supported here.
        return None
    at = 0
    while True:
        if len(data) - at < _HEADER.size:
            return "It is truncated: its last block is missing"
        magic, token, packed, plain, checksum = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if magic != MAGIC or not (0 <= packed <= LARGEST_BLOCK and 0 <= plain <= LARGEST_BLOCK):
            return "It is damaged: no block begins where one should"
        if plain == 0:
            return None
        block = data[at : at + packed]
        at += packed
        if len(block) < packed:
            return "It is truncated in the middle of a block"
        if checksums and not _is_sound(block, plain, checksum, is_raw=token & 0xF0 == _RAW):
            return "It is damaged: a block does not have the checksum it was written with"


def _is_nearly_magic(data: bytes) -> bool:
    """Whether a file begins as no codec's output does: with zeros, or with most of the magic bytes of this one."""
    begin = data[: len(MAGIC)]
    alike = sum(one == other for one, other in zip(begin, MAGIC, strict=False))
    return not any(begin) or alike > len(MAGIC) // 2


def is_lz4(data: bytes) -> bool:
    """Whether a file is such a stream, which has its own checksums."""
    return data.startswith(MAGIC)


def _is_sound(block: bytes, length: int, checksum: int, *, is_raw: bool) -> bool:
    try:
        with reading(LiveDirectoryError):
            plain = block if is_raw else decompress_block(block, length)
    except LiveDirectoryError:
        return False
    return len(plain) == length and block_checksum(plain) == checksum


# The last bytes of RocksDB's block-based tables (`kBlockBasedTableMagicNumber`), little-endian.
_SST_MAGIC = (0x88E241B785F4CFF7).to_bytes(8, "little")
_FRAMED = (".delta", ".snapshot", ".changelog")


def examine_contents(files: Sequence[NeededFile]) -> Iterator[Finding]:
    """Read files that a resume needs, and compare them with all available checksums."""
    for file in files:
        try:
            yield from examine_content(file.folder, file.source)
        except FileNotFoundError:
            # Purged since it was listed: the next examination sees a newer batch.
            continue


def examine_content(folder: FileIO, path: str) -> Iterator[Finding]:
    """Read one file.

    Raises:
        FileNotFoundError: It does not exist.
    """
    data = folder.read(path)
    fits = fits_hadoop(folder, path, data)
    # A file that matches Hadoop's checksum need not be decompressed to verify it.
    trouble = _own_trouble(path, data, checksums=fits is not True)
    if trouble is not None:
        yield trouble
    elif fits is False:
        yield _stale(path) if _proves_itself(path, data) else _differs(path)
    if path.startswith("state/") and path.endswith((".zip", *_FRAMED)):
        yield from _spark_checksum(folder, path, data)


def _own_trouble(path: str, data: bytes, *, checksums: bool) -> Finding | None:
    """Problems found by a file's own framing and checksums."""
    if path.startswith("state/") and path.endswith(_FRAMED):
        trouble = lz4_trouble(data, checksums=checksums)
        return error(Code.STATE_FILE_DAMAGED, path, f"{trouble}: Spark fails to load the state.") if trouble else None
    if path.endswith(".zip"):
        try:
            with reading(LiveDirectoryError), zipfile.ZipFile(io.BytesIO(data)) as archive:
                bad = archive.testzip()
        except LiveDirectoryError as reason:
            return error(Code.SNAPSHOT_UNREADABLE, path, f"The snapshot's zip cannot be read: {reason}.")
        return error(Code.SNAPSHOT_UNREADABLE, path, f"In the snapshot's zip {bad} is altered.") if bad else None
    if path.endswith(".sst") and not data.endswith(_SST_MAGIC):
        return error(
            Code.STATE_FILE_DAMAGED,
            path,
            "It has the right size but not the end of a RocksDB table: its last blocks never reached the disk.",
        )
    return None


def _proves_itself(path: str, data: bytes) -> bool:
    """Whether an intact file has its own checksums over all of its content."""
    return path.endswith(".zip") or (path.endswith(_FRAMED) and is_lz4(data))


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


def _spark_checksum(folder: FileIO, path: str, data: bytes) -> Iterator[Finding]:
    """Compare with the checksum file of `ChecksumCheckpointFileManager`, if there is one."""
    try:
        text = folder.read(f"{path}.crc")
    except FileNotFoundError:
        return
    try:
        with reading(LiveDirectoryError):
            noted = from_json(text)
            # A signed number where Java's int is.
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
    elif algorithm == "CRC32C" and value & 0xFFFFFFFF != crc32c(data):
        yield error(
            Code.CHECKSUM_DIFFERS, path, "Its content does not have the CRC32C that Spark recorded: it was altered."
        )


_NOTES = ("/_metadata/", "/_stateSchema/")
_SUM = ".crc"


def examine_log_contents(subject: Subject) -> Iterator[Finding]:
    """Compare each log entry and metadata file with its checksum file, if there is one."""
    for hidden in sorted(path for path in subject.hidden_files() if path.endswith(_SUM)):
        directory, slash, name = hidden.rpartition("/")
        summed = name[1 : -len(_SUM)]
        path = f"{directory}{slash}{summed}"
        # A hidden file with a checksum is one that Spark is writing.
        if summed.startswith(".") or not _is_log(path):
            continue
        try:
            findings = list(examine_content(subject.folder, path))
        except FileNotFoundError:
            # Purged, or never finished.
            continue
        for finding in findings:
            yield finding if _is_read_by_a_start(subject, path) else replace(finding, severity=Severity.WARNING)


def _is_log(path: str) -> bool:
    folder = path.partition("/")[0]
    return folder in (METADATA, OFFSETS, COMMITS, SOURCES) or (
        folder == STATE and any(note in path for note in _NOTES) and "/SSTs/" not in path
    )


def _is_read_by_a_start(subject: Subject, path: str) -> bool:
    """Only the end of a batch log is read by a start; everything else is assumed to be read."""
    folder, _, name = path.partition("/")
    number = number_in(name)
    if folder not in (OFFSETS, COMMITS) or number is None:
        return True
    return number >= (subject.commit or 0) - (1 if folder == OFFSETS else 0)


_CHANGES = (".delta", ".changelog")


@dataclass(frozen=True)
class KnownSnapshot:
    """A snapshot of the examined directory.

    Attributes:
        location: Its location.
        batch_id: The batch after which it was taken.
        entries: Its files.
    """

    location: str
    batch_id: int
    entries: Iterable[FileEntry]


def examine_against_snapshot(
    subject: Subject, snapshot: KnownSnapshot, needed: Sequence[NeededFile]
) -> Iterator[Finding]:
    """Compare logs, and the state files that a resume needs, with the digests in a snapshot."""
    tokens = {file.source: file.token for file in needed}
    for entry in snapshot.entries:
        is_log = entry.path.partition("/")[0] in (METADATA, OFFSETS, COMMITS, SOURCES)
        if not is_log and _is_log(entry.path):
            yield from _note_against_snapshot(subject, snapshot, entry)
        if not is_log and entry.path not in tokens:
            continue
        token = tokens.get(entry.path)
        is_same_file = token is not None and token == entry.token
        if not (is_same_file or _is_never_changed(entry, snapshot.batch_id)):
            continue
        try:
            data = subject.folder.read(entry.path)
        except FileNotFoundError:
            # Purged; other examinations report files that are needed and missing.
            continue
        if len(data) == entry.size and blake3(data).hexdigest() != entry.digest:
            yield error(
                Code.CONTENT_DIFFERS,
                entry.path,
                f"It has the name and the length, but not the content that it has in {snapshot.location}, and Spark "
                "never changes such a file: it was altered since.",
            )


def _note_against_snapshot(subject: Subject, snapshot: KnownSnapshot, entry: FileEntry) -> Iterator[Finding]:
    """Compare a schema or other metadata of the state, which Spark rewrites if a column gets another name."""
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
            f"It has not the content that it has in {snapshot.location}. Unless a column got another name since, it "
            "was altered: Spark compares the query with it, and refuses to start if the types differ.",
        )


def _is_never_changed(entry: FileEntry, batch_id: int) -> bool:
    """Whether Spark writes a file of this name once with one content. It may upload a state snapshot again."""
    folder, _, rest = entry.path.partition("/")
    if folder == METADATA or entry.identity is not None:
        return True
    name = rest.rpartition("/")[2]
    if folder in (OFFSETS, COMMITS, SOURCES):
        number = number_in(rest if folder != SOURCES else name)
        return number is not None and (number <= batch_id or folder == SOURCES)
    version = number_in(name.partition(".")[0].partition("_")[0])
    return name.endswith(_CHANGES) and version is not None and version <= batch_id + 1
