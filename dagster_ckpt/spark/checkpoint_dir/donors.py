"""Live directories whose files may become part of a restored one, and how they are made sure of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from blake3 import blake3

from dagster_ckpt.io.parallel import GoOn, in_threads
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

# Written once by RocksDB, with a checksum of each block that is compared whenever it is read.
_LARGE_STATE = ".sst"
_READ_BYTES = 4 * 1024 * 1024
# Each takes the next few files when it is done with the last ones.
_FILES_OF_A_PART = 64


class DonorCheck(Enum):
    """What a linked file must have in common with the one that the snapshot was taken of.

    Attributes:
        DIGEST: Its content.
        IDENTITY: Of a large state file device, inode, time and length are enough; of any other file its content.
    """

    DIGEST = "DIGEST"
    IDENTITY = "IDENTITY"


@dataclass(frozen=True)
class Donor:
    """A live directory that was inspected and found good.

    Attributes:
        live: The directory.
        check: How its files are made sure of.
    """

    live: LiveDirectory
    check: DonorCheck = DonorCheck.DIGEST


def altered(
    root: Path, entries: Sequence[FileEntry], check: DonorCheck, *, watch: Callable[[], None] = lambda: None
) -> list[FileEntry]:
    """Those of some files that have not the content that a snapshot has of them.

    Args:
        root: The directory that they are in.
        entries: The files, as the snapshot describes them; their identity was compared before.
        check: How they are made sure of.
        watch: Called before each file is read; what it raises ends it.
    """
    unsure = [entry for entry in entries if check is DonorCheck.DIGEST or not entry.path.endswith(_LARGE_STATE)]
    parts = [unsure[first : first + _FILES_OF_A_PART] for first in range(0, len(unsure), _FILES_OF_A_PART)]

    def compare(part: list[FileEntry], go_on: GoOn) -> list[FileEntry]:
        found = []
        for entry in part:
            go_on()
            watch()
            if not _has_content(f"{root}/{entry.path}", entry):
                found.append(entry)
        return found

    return [entry for found in in_threads(os.cpu_count() or 1, parts, compare) for entry in found]


def _has_content(path: str, entry: FileEntry) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            data = os.read(descriptor, min(entry.size + 1, _READ_BYTES))
            digest = blake3(data)
            while data:
                data = os.read(descriptor, _READ_BYTES)
                digest.update(data)
        finally:
            os.close(descriptor)
    except OSError:
        # What cannot be read is read from the snapshot.
        return False
    return digest.hexdigest() == entry.digest
