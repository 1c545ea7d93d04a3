"""What happens to single files: flipped, cut, zeroed, dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.golden_stream import as_zeros, with_a_flipped_bit


def checksum_of(path: Path) -> Path:
    """The checksum that Hadoop keeps beside a file on a local disk."""
    return path.with_name(f".{path.name}.crc")


def flip(path: Path) -> None:
    """Bit rot; checksums stay and say so."""
    path.write_bytes(with_a_flipped_bit(path.read_bytes()))


def cut(path: Path) -> None:
    """A write that ended in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    """A loss of power: the length is on the disk, the blocks are not."""
    path.write_bytes(as_zeros(path.read_bytes()))


def drop(path: Path) -> None:
    """A file that somebody deleted, with its checksum."""
    checksum_of(path).unlink(missing_ok=True)
    path.unlink()


DAMAGES: Mapping[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "zero": zero, "drop": drop}
