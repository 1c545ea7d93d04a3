"""One input for a reader, kept as a file: so what was found once is tried with every run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True)
class Case:
    """An input.

    Attributes:
        where: Which file, or which cell, it takes the place of.
        data: Its bytes.
    """

    where: str
    data: bytes

    def keep(self, target: str) -> Path:
        """Write it into the corpus of a target."""
        path = CORPUS / target / hashlib.sha256(self.where.encode() + self.data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.where.encode() + b"\n" + self.data)
        return path


class Target(NamedTuple):
    """A reader under test.

    Attributes:
        draw: Makes an input.
        check: Reads it; raises whatever a reader must not.
    """

    draw: Callable[[random.Random], Case]
    check: Callable[[Case, Path], None]


def kept(target: str) -> list[Path]:
    """The corpus of a target."""
    return sorted((CORPUS / target).glob("*"))


def read(path: Path) -> Case:
    """An input of the corpus."""
    where, _, data = path.read_bytes().partition(b"\n")
    return Case(where.decode(), data)
