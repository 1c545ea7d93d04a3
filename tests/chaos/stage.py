"""A stream of the chaos in its process, a supervisor that starts it again, and what lies on its disks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotRecord, SnapshotStatus
from dagster_ckpt.errors import CkptError
from dagster_ckpt.snapshot.opening import open_store
from tests.chaos.operators import SIDES, Row, lay
from tests.chaos.program import ANSWER, STREAM, storage_at

# On a machine that others use too.
PATIENCE_S = float(os.environ.get("CHAOS_PATIENCE_S", "150"))
# Starts of the program that the supervisor makes before it gives up, after it worked last.
STARTS = 8


class ChaosError(AssertionError):
    """The product did what it must not."""


class Process:
    """The process of the streams; another one takes its place once it is killed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start()

    def reports(self, lines: int) -> str:
        """The last lines that the product logged."""
        found = [line for line in self._log.read_text(errors="replace").splitlines() if "dagster_ckpt" in line]
        return "\n".join(line[:400] for line in found[-lines:])

    def _start(self) -> None:
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("ab"),
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self._process, self._answers), daemon=True).start()
        self._is_ready = False

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: queue.Queue[dict[str, Any]]) -> None:
        for line in process.stdout or ():
            if line.startswith(ANSWER):
                answers.put(json.loads(line.removeprefix(ANSWER)))
        answers.put({"end": "died", "errors": ["died"], "message": f"exit code {process.wait()}"})

    def order(self, **order: Any) -> None:
        if not self._is_ready:
            ready = self.answer(PATIENCE_S)
            if ready != {"ready": True}:
                raise RuntimeError(f"the process of the streams does not start: {ready}, see {self._log}")
            self._is_ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The answer to the order, or None if there is none yet."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=within_s)
        return None

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL it with its JVM, and start the next one meanwhile."""
        self._end()
        self._start()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._end()


class Stage:
    """A stream and all that it has.

    Args:
        process: Runs it.
        root: Folder of everything that it has.
        operator: Its query.
        store: Its state store.
        pattern: Whether its sources read patterns instead of folders.
        tell: Told each step.
    """

    def __init__(
        self, process: Process, root: Path, operator: str, store: str, *, pattern: bool, tell: Callable[[str], None]
    ) -> None:
        root.mkdir(parents=True)
        self.process, self.root, self.tell, self.pattern = process, root, tell, pattern
        self._order = {"root": str(root), "operator": operator, "store": store, "pattern": pattern}
        self.catalog = Catalog(f"sqlite:///{root}/catalog.db")
        self.store = open_store(storage_at(root), STREAM)
        self.files = 0
        self.is_running = False
        self.code = "right"
        # Ends since the stream last worked.
        self.failures: list[str] = []

    def feed(self, files: int) -> None:
        """Lay files of both sides."""
        for number in range(self.files, self.files + files):
            for side in SIDES:
                lay(self.root, side, number)
        self.files += files

    def begin(self, code: str = "right") -> None:
        """Start the program."""
        self.code, self.is_running = code, True
        self.process.order(do="run", code=code, **self._order)

    def interrupt(self) -> None:
        """End the run as a shutdown does."""
        if self.is_running:
            self.process.interrupt()
            self._await_end(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL the program."""
        self.process.kill()
        self.is_running = False

    def _await_end(self, within_s: float) -> dict[str, Any] | None:
        ended = self.process.answer(within_s)
        if ended is not None:
            self.is_running = False
        return ended

    def end_of_run(self, within_s: float) -> str | None:
        """How the run ended by itself; None while it runs."""
        ended = self._await_end(within_s)
        return (
            None if ended is None else f"{ended['end']} {' < '.join(ended.get('errors', ()))}: {ended.get('message')}"
        )

    def supervise(self, until: Callable[[], bool], what: str) -> None:
        """Wait for a condition; start the program again each time that it ends.

        Raises:
            ChaosError: It ended too often, or the condition did not come to hold.
        """
        deadline = time.monotonic() + PATIENCE_S
        if not self.is_running:
            self.begin()
        while not until():
            ended = self.end_of_run(0.1)
            if ended is not None:
                self.failures.append(ended)
                self.tell(f"  the run ended: {ended[:300]}")
                if len(self.failures) >= STARTS:
                    ends = "\n".join(f"{times} times: {end}" for end, times in Counter(self.failures).items())
                    raise ChaosError(f"after {STARTS} starts there is still no {what}:\n{ends}")
                self.begin()
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} within {PATIENCE_S:g} s; {self.position()}; {self.failures}")

    # What the stream has done

    @property
    def live(self) -> Path | None:
        record = next(iter(self.catalog.streams.all()), None)
        return None if record is None or not record.live_directory else Path(record.live_directory)

    def committed(self) -> int:
        """The newest committed batch, or -1."""
        live = self.live
        return -1 if live is None else newest(live / "commits")

    def files_read(self, batch: int | None = None) -> int:
        """Files of each side that a batch and those before it have read, as the offset log says; 0 if unknown."""
        live = self.live
        if live is None:
            return 0
        try:
            lines = (live / f"offsets/{self.committed() if batch is None else batch}").read_text().splitlines()
            return min(json.loads(line)["logOffset"] for line in lines[2:]) + 1
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def position(self) -> str:
        latest = self.catalog.executions.latest(STREAM)
        status = latest and f"{latest.status.value} ({latest.reason})"
        return f"committed {self.committed()}, {self.files_read()} of {self.files} files, {status}"

    def is_caught_up(self) -> bool:
        """Whether everything is read and committed by the execution that runs."""
        return self.is_idle() and self.files_read() == self.files

    def is_idle(self) -> bool:
        """Whether the query runs and waits for files."""
        latest = self.catalog.executions.latest(STREAM)
        is_running = self.is_running and latest is not None and latest.status is ExecutionStatus.RUNNING
        return is_running and bool((latest.progress or {}).get("idle"))

    def snapshots(self) -> list[SnapshotRecord]:
        """Completed snapshots, newest first."""
        if self.live is None:
            return []
        return self.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.COMPLETED)

    def is_whole(self, snapshot: SnapshotRecord) -> bool:
        """Whether each byte of a snapshot is what was written."""
        try:
            return not self.store.verify(snapshot.location or "")
        except (CkptError, OSError):
            return False

    def has_checkpoint_of_now(self) -> bool:
        """Whether a checkpoint of the newest committed batch is complete."""
        return any(snapshot.batch_id == self.committed() for snapshot in self.snapshots())

    # What there is

    def rows(self, path: str = "out") -> Counter[Row]:
        """What a reader sees in the output; the program must not run."""
        return self._rows(do="rows", path=str(self.root / path))

    def uninterrupted(self) -> Counter[Row]:
        """What a run that nothing ever happened to writes; the program must not run."""
        return self._rows(do="uninterrupted", **self._order)

    def _rows(self, **order: Any) -> Counter[Row]:
        self.process.order(**order)
        answer = self.process.answer(PATIENCE_S) or {}
        if "rows" not in answer:
            raise ChaosError(f"the output cannot be read: {answer.get('message')}")
        return Counter(tuple(row) for row in answer["rows"])

    def print_of(self, *folders: str) -> dict[str, str]:
        """A digest of each file of some folders, without the checksums that Hadoop keeps beside them."""
        found = {}
        for folder in folders:
            for path in sorted((self.root / folder).rglob("*")):
                if path.is_file() and not path.name.endswith(".crc"):
                    with contextlib.suppress(FileNotFoundError):
                        found[str(path.relative_to(self.root))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.interrupt()
        if self.is_running:
            self.kill()
        self.catalog.close()


def newest(log: Path) -> int:
    """The newest entry of a log of Spark, or -1."""
    if not log.is_dir():
        return -1
    return max((int(path.name) for path in log.iterdir() if path.name.isdigit()), default=-1)
