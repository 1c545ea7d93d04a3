"""Donors: existing live directories whose files a restore can hard-link, and the checks of those files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from blake3 import blake3

from dagster_ckpt.io.parallel import CancelCheck, in_threads
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

# RocksDB writes these files once, with a checksum of each block that it verifies on every read.
_LARGE_STATE = ".sst"
_READ_BYTES = 4 * 1024 * 1024
# Each thread takes the next few files when it has finished the previous ones.
_FILES_OF_A_PART = 64


class DonorCheck(Enum):
    """What to compare between a linked file and the file in the snapshot.

    Attributes:
        DIGEST: The content.
        IDENTITY: Device, inode, time and length for large state files; the content for all other
            files.
    """

    DIGEST = "DIGEST"
    IDENTITY = "IDENTITY"


@dataclass(frozen=True)
class Donor:
    """A live directory that was inspected and found good.

    Attributes:
        live: The directory.
        check: How its files are checked.
    """

    live: LiveDirectory
    check: DonorCheck = DonorCheck.DIGEST


def altered(
    root: Path, entries: Sequence[FileEntry], check: DonorCheck, *, watch: Callable[[], None] = lambda: None
) -> list[FileEntry]:
    """Return the files whose content differs from that in a snapshot.

    Args:
        root: Their directory.
        entries: The files as described in the snapshot; their identity has already been compared.
        check: How to check them.
        watch: Called before each file is read; an exception aborts the check.
    """
    unsure = [entry for entry in entries if check is DonorCheck.DIGEST or not entry.path.endswith(_LARGE_STATE)]
    parts = [unsure[first : first + _FILES_OF_A_PART] for first in range(0, len(unsure), _FILES_OF_A_PART)]

    def compare(part: list[FileEntry], check_canceled: CancelCheck) -> list[FileEntry]:
        found = []
        for entry in part:
            check_canceled()
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
        # An unreadable file is read from the snapshot instead.
        return False
    return digest.hexdigest() == entry.digest
