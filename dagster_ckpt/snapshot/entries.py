"""File entries of a snapshot and their lines in the manifest (docs/snapshot-format.md, section 3).

Entries are kept as lines: a snapshot may have a hundred thousand, most of them shared with the
previous snapshot.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dagster_ckpt.foreign import LARGEST_LONG, from_json

_REFERENCE = re.compile(r"(\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*")
_DIGEST = re.compile("[0-9a-f]{64}")
_TEXT = rb'(?:null|"[^"\\\0-\x1f]*")'
# The form of nearly every line. Any other line is parsed slowly and validated separately.
_PLAIN_LINES = re.compile(
    rb'(?:\["[0-9a-f]{64}","[^"\\\0-\x1f]{1,255}",[0-9]{1,18},'
    + _TEXT
    + rb","
    + _TEXT
    + rb',(?:null|"(?:\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*"),[0-9]{1,18}\]\n)*'
)
# Substrings that valid paths in a newline-separated list cannot contain.
_ODD_PATHS = ("\n/", "/\n", "//", "/.", "\n.")
# File system limits on the length of a path and of each name in it.
_PATH_BYTES = 4096
_NAME_BYTES = 255
# A line begins with the digest, which has a fixed length: `["<64>",`.
AFTER_DIGEST = 68


class FileEntry(NamedTuple):
    """One file of a snapshot.

    Attributes:
        digest: BLAKE3 of its content, hexadecimal.
        path: Its name.
        size: Its length in bytes.
        identity: See `Source.identity`.
        token: See `Source.token`.
        object: The data object that contains it, relative to the snapshot's directory; None means
            the metadata itself.
        offset: Its offset in that object.
    """

    digest: str
    path: str
    size: int
    identity: str | None
    token: str | None
    object: str | None
    offset: int

    def line(self) -> bytes:
        """The entry as a line of the manifest."""
        digest, path, size, identity, token, reference, offset = self
        if not _is_plain(f"{path}{identity}{token}{reference}"):
            return json.dumps(self, separators=(",", ":")).encode()
        # Called two hundred times per snapshot of a larger query, hence no function calls.
        identity = "null" if identity is None else f'"{identity}"'
        token = "null" if token is None else f'"{token}"'
        reference = "null" if reference is None else f'"{reference}"'
        return f'["{digest}","{path}",{size},{identity},{token},{reference},{offset}]'.encode()


def parse_line(line: bytes) -> FileEntry:
    """Parse one line of a manifest.

    Raises:
        ValueError: It is not valid in this format (sections 3.2 to 3.4).
    """
    values = from_json(line)
    if not isinstance(values, list) or len(values) != len(FileEntry._fields):
        raise ValueError(f"{line[:120]!r} is not an entry of a file")
    entry = FileEntry(*values)
    check_entry(entry)
    return entry


def plain_entries(lines: Sequence[bytes]) -> list[FileEntry] | None:
    """Parse and validate lines in the usual form; None if one has another form or is invalid."""
    if _PLAIN_LINES.fullmatch(b"\n".join([*lines, b""])) is None:
        return None
    entries = read_entries(lines)
    paths = "\n".join(["", *(entry.path for entry in entries), ""])
    return None if any(odd in paths for odd in _ODD_PATHS) else entries


def read_entries(lines: Sequence[bytes]) -> list[FileEntry]:
    """Parse lines that were validated before."""
    return list(map(FileEntry._make, json.loads(f"[{b','.join(lines).decode()}]")))


def check_entry(entry: FileEntry) -> None:
    """Reject an invalid entry before it does harm.

    Raises:
        ValueError: A restore would write outside its directory, or read from another location.
    """
    path, reference = entry.path, entry.object
    if not isinstance(path, str) or posixpath.normpath(path) != path or path.startswith(("/", "../")):
        raise ValueError(f"{path!r} is not a plain relative path")
    if path in (".", "..") or "\0" in path:
        raise ValueError(f"{path!r} is not a plain relative path")
    encoded = path.encode()
    if len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > _NAME_BYTES:
        raise ValueError(f"{path[:120]!r}... is longer than a file system takes")
    if not all(type(number) is int and number >= 0 for number in (entry.size, entry.offset)):
        raise ValueError(f"{path} has size {entry.size!r} and offset {entry.offset!r}")
    if entry.offset + entry.size > LARGEST_LONG:
        raise ValueError(f"{path} ends at {entry.offset + entry.size}, which no file does")
    if not all(text is None or isinstance(text, str) for text in (entry.identity, entry.token)):
        raise ValueError(f"{path} has the identity {entry.identity!r} and the token {entry.token!r}")
    if not isinstance(entry.digest, str) or not _DIGEST.fullmatch(entry.digest):
        raise ValueError(f"{path} has the digest {entry.digest!r}")
    if reference is not None and not is_reference(reference):
        raise ValueError(f"{path} lies in {reference!r}, which is no data object of a snapshot")


class Paths:
    """The paths of a snapshot. Each occurs once, and none is a folder of another."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, paths: Iterable[str]) -> None:
        """Add the paths of more files.

        Raises:
            ValueError: Two files of the snapshot have the same path, or a path is the folder of
                another.
        """
        added = list(paths)
        expected = len(self._files) + len(added)
        self._files.update(added)
        if len(self._files) < expected:
            raise ValueError("two files of the snapshot have the same path")
        folders = self._new_folders(added)
        self._folders |= folders
        if not self._files.isdisjoint(folders) or not self._folders.isdisjoint(added):
            raise ValueError("a file of the snapshot lies in another file")

    def _new_folders(self, paths: Collection[str]) -> set[str]:
        found: set[str] = set()
        folders = {path.rpartition("/")[0] for path in paths}
        while folders:
            found |= folders
            folders = {folder.rpartition("/")[0] for folder in folders if folder} - found - self._folders
        found.discard("")
        return found


def is_reference(reference: object) -> bool:
    """Whether a name is in the snapshot's directory or in the folder shared by a stream's checkpoints (section 3.3)."""
    return isinstance(reference, str) and _REFERENCE.fullmatch(reference) is not None


def place_of(line: bytes) -> tuple[str | None, int]:
    """Data object and offset of a line, without parsing the whole line."""
    _, reference, offset = line.rsplit(b",", 2)
    return None if reference == b"null" else reference[1:-1].decode(), int(offset[:-1])


def is_line_of(line: bytes, path: str, size: int, identity: str | None, token: str | None) -> bool:
    """Whether a line is that of a file with this path, size, identity and token, without parsing the whole line."""
    start = f"{quoted(path)},{size},{quoted_or_null(identity)},{quoted_or_null(token)},"
    return line.startswith(start.encode(), AFTER_DIGEST)


def quoted(text: str) -> str:
    """A text as encoded in a line."""
    return f'"{text}"' if _is_plain(text) else json.dumps(text)


def quoted_or_null(text: str | None) -> str:
    """The same, or `null`."""
    return "null" if text is None else quoted(text)


def _is_plain(text: str) -> bool:
    """Whether JSON encodes a text unchanged. Spark's names are such texts; others take a slower path."""
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
