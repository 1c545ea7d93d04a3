"""Taking times: of a call in this process for the engine, of a whole process for a peer."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# None takes a tenth of it. One that waits for ever (`s3fs` did once, for the server's answer) ends its section only.
PEER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sample:
    """What one repetition cost.

    Attributes:
        wall_s: Seconds of wall time.
        cpu_s: Seconds of user and system time, of this process or of the peer's process tree.
    """

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Sample:
    """Time a call in this process, with the CPU time of all its threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def run(
    *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = PEER_TIMEOUT_S
) -> Sample:
    """Time a peer, from its start to its end.

    Raises:
        RuntimeError: It failed, or was killed after `timeout_s`; the message holds the end of what it said.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    ) as process:
        watch = threading.Timer(timeout_s, _kill_all, [process.pid])
        watch.daemon = True
        watch.start()
        try:
            said = process.stdout.read() if process.stdout is not None else b""
            # Unlike subprocess, wait4 says what this one process and its children used.
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            # In a group of its own it hears no Ctrl-C.
            _kill_all(process.pid)
            raise
        finally:
            watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
    if process.returncode != 0:
        ended = f"ended with status {process.returncode}"
        why = f"was killed after {timeout_s:.0f} s" if wall_s >= timeout_s else ended
        raise RuntimeError(f"{' '.join(command)} {why}: {said.decode()[-2000:]}")
    return Sample(wall_s, usage.ru_utime + usage.ru_stime)


def _kill_all(group: int) -> None:
    """Kill a peer with all that it has started, as each of a pipe holds its end of ours."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@dataclass
class Series:
    """Samples of several competitors, taken in turn.

    Attributes:
        samples: Name of a competitor to what each repetition cost it.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, name: str, sample: Sample) -> None:
        """Take one sample."""
        self.samples.setdefault(name, []).append(sample)

    def interleave(self, competitors: Mapping[str, Callable[[], Sample]], repetition: int) -> None:
        """Let each compete once; every other repetition goes through them the other way round."""
        names = list(competitors)
        for name in names if repetition % 2 == 0 else reversed(names):
            self.add(name, competitors[name]())

    def walls(self, name: str) -> list[float]:
        """Wall seconds of one competitor."""
        return [sample.wall_s for sample in self.samples[name]]

    def median(self, name: str) -> float:
        """Median of its wall seconds."""
        return statistics.median(self.walls(name))

    def ratio(self, peer: str, ours: str) -> float:
        """How many times longer the peer takes: median over the pairs of one repetition each."""
        return paired_ratio(self.walls(peer), self.walls(ours))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios within pairs."""
    return statistics.median(over / under for over, under in zip(numerators, denominators, strict=True))


@dataclass(frozen=True)
class TreeSize:
    """What lies below a directory.

    Attributes:
        files: Regular files.
        bytes: Their sizes; a file with several names in the tree counts once.
        inodes: Device and inode of each.
    """

    files: int
    bytes: int
    inodes: frozenset[tuple[int, int]]


def tree_size(root: Path, *, without: TreeSize | None = None) -> TreeSize:
    """Count files and bytes below a directory.

    Args:
        root: The directory; one that is not there is empty.
        without: Files counted before: another tree, or this one earlier. A hard link to one of them is a new file of
            no bytes in another tree.
    """
    files, size = 0, 0
    inodes: set[tuple[int, int]] = set()
    known = without.inodes if without is not None else frozenset()
    for folder, _, names in os.walk(root):
        for name in names:
            stat = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a hundred thousand of them
            files += 1
            inode = (stat.st_dev, stat.st_ino)
            if inode not in known and inode not in inodes:
                size += stat.st_size
            inodes.add(inode)
    return TreeSize(files, size, frozenset(inodes))
