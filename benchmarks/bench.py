"""What a section is given: a place to work in, and its own clock and load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.live_directories import KeptDirectory, Shape, kept_directory
from benchmarks.machine import describe_machine
from benchmarks.results import SectionResult, Table, Target

MILLION = 1_000_000
# The directory of the project's targets: 13 batches, ten more, ten more.
LARGE = Shape(keys=MILLION, partitions=200, changed=MILLION // 100, stages=(13, 23, 33))
# As many keys in few partitions, as Flink has them at a parallelism of two to four.
FEW_PARTITIONS = Shape(keys=MILLION, partitions=4, changed=MILLION // 100, stages=(12, 13))


@dataclass(frozen=True)
class Bench:
    """Where a section works.

    Attributes:
        folder: The bench's folder: what is made once is kept here.
        scratch: An empty folder. Nothing in it is deleted while anything is measured: a file system without a
            journal makes new files several times slower for minutes after it deleted many.
        repetitions: How often each measurement is repeated.
        share: Share of the full size, for sections that say so.
    """

    folder: Path
    scratch: Path
    repetitions: int
    share: float = 1

    def directory(self, shape: Shape) -> KeptDirectory:
        """A live directory made by Spark."""
        return kept_directory(shape, self.folder)

    def repetition(self, number: int) -> Path:
        """An empty folder for one repetition; what was written before is on disk."""
        os.sync()
        folder = self.scratch / str(number)
        folder.mkdir(parents=True)
        return folder


@dataclass(frozen=True)
class Findings:
    """What a section brings back.

    Attributes:
        tables: Its tables.
        targets: Its targets.
        versions: Versions of the peers it met.
    """

    tables: tuple[Table, ...]
    targets: tuple[Target, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class Section:
    """A part of the bench that can run alone.

    Attributes:
        name: Its name on the command line.
        title: Its heading.
        method: What is measured, and how.
        measure: Does it.
    """

    name: str
    title: str
    method: str
    measure: Callable[[Bench], Findings]

    def run(self, bench: Bench) -> SectionResult:
        """Measure."""
        began, load = time.monotonic(), os.getloadavg()[0]
        found = self.measure(bench)
        return SectionResult(
            name=self.name,
            title=self.title,
            method=self.method,
            measured_at=datetime.now(UTC).isoformat(timespec="minutes"),
            took_s=time.monotonic() - began,
            load=(load, os.getloadavg()[0]),
            machine=describe_machine(bench.folder),
            versions=found.versions,
            tables=found.tables,
            targets=found.targets,
        )


def first_line(*command: str) -> str:
    """First line of what a program says of its version."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def measured_by(program: str, *arguments: object) -> Any:
    """Run a module of the bench as a process of its own; returns the JSON of its last line.

    Raises:
        RuntimeError: It failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", f"benchmarks.{program}", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-8_000:]}")
    return json.loads(done.stdout.splitlines()[-1])
