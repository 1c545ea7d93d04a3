"""The story of one seed: rounds of work, blows, releases with wrong code, and the comparison at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.chaos.blows import Blows, files_needed_from
from tests.chaos.operators import CODES, OPERATORS, SIDES, STORES, expected, lay
from tests.chaos.stage import PATIENCE_S, ChaosError, Process, Stage

WRONG_CODES = tuple(version for version in CODES if version != "right")
ROUNDS = 3
IDLE_S = 3.0


class Story:
    """What happens to one stream.

    Args:
        seed: Decides everything.
        process: Runs the stream.
        root: Folder of everything that the stream has.
        tell: Told each step.
    """

    def __init__(self, seed: int, process: Process, root: Path, tell: Callable[[str], None]) -> None:
        self._random = Random(seed)
        self.operator = list(OPERATORS)[seed % len(OPERATORS)]
        self.store = list(STORES)[seed // len(OPERATORS) % len(STORES)]
        # Ten of thirty, with each operator and each store.
        self.has_changes = seed % 3 == 2
        self._tell = tell
        pattern = self._random.random() < 0.5
        tell(f"seed {seed}: {self.operator} on {self.store}, {'patterns' if pattern else 'folders'}")
        self._stage = Stage(process, root, self.operator, self.store, pattern=pattern, tell=tell)
        self._expired = 0

    def play(self) -> None:
        """Play it to the end.

        Raises:
            ChaosError: The product did what it must not.
        """
        stage = self._stage
        try:
            stage.feed(3)
            self._work("the first files")
            rounds: list[Callable[[], None]] = [self._down, self._killed, self._running, self._down]
            self._random.shuffle(rounds)
            rounds = rounds[:ROUNDS] if self._killed in rounds[:ROUNDS] else [*rounds[: ROUNDS - 1], self._killed]
            changes = [self._wrong_code, self._moved, self._expired_inputs, self._gone_inputs]
            self._random.shuffle(changes)
            for number, blow in enumerate(rounds):
                blow()
                self._work(f"round {number + 1}")
                if self.has_changes and number < len(changes):
                    changes[number]()
                    self._work(f"change {number + 1}")
            self._compare()
        except ChaosError:
            self._tell(f"what the product logged last:\n{stage.process.reports(40)}")
            raise
        finally:
            stage.close()

    def refuse(self) -> None:
        """Leave no good point: the stream refuses to start, and touches nothing."""
        stage = self._stage
        try:
            stage.feed(3)
            self._work("the first files")
            stage.interrupt()
            before = stage.rows()
            Blows(stage, self._random).destroy_everything()
            for _ in range(2):
                ended = self._start_that_fails("right", "no good point")
                if not any(word in ended for word in ("start_from", "snapshot")):
                    raise ChaosError(f"the refusal does not say what to do: {ended}")
            if stage.rows() != before:
                raise ChaosError("a start without a good point changed the output")
        finally:
            stage.close()

    def _work(self, what: str) -> None:
        """Feed, and wait until the stream has caught up and taken a checkpoint of it."""
        stage = self._stage
        stage.failures.clear()
        stage.feed(1)
        self._tell(f"work: {what}; {stage.files} files")
        stage.supervise(lambda: stage.is_caught_up() and stage.has_checkpoint_of_now(), f"work after {what}")
        self._tell(f"  {stage.position()}")

    def _down(self) -> None:
        """Blows to a stream that is down."""
        self._tell("down")
        self._stage.interrupt()
        Blows(self._stage, self._random).strike(self._random.randint(1, 3))

    def _killed(self) -> None:
        """SIGKILL within a batch or between two, and blows."""
        stage, committed = self._stage, self._stage.committed()
        self._tell("killed")
        if self._random.random() < 0.7:
            stage.feed(3)
            wanted = committed + self._random.randint(0, 2)
            stage.supervise(lambda: stage.committed() >= wanted, "batches")
        stage.kill()
        Blows(stage, self._random).strike(self._random.randint(0, 2))

    def _running(self) -> None:
        """Blows to a stream that runs."""
        self._tell("running")
        blows = Blows(self._stage, self._random)
        if self._random.random() < 0.5:
            self._stage.feed(2)
        blows.strike(self._random.randint(1, 3))
        self._work("blows while it ran")
        # A query does not read again what it has loaded: only its next start shows what is still good.
        self._stage.interrupt()

    # Changes of code and of inputs

    def _wrong_code(self) -> None:
        """A release or two with wrong code, and then the right one."""
        stage = self._stage
        other = stage.root / "in/other"
        if not other.exists():
            for number in range(2):
                lay(stage.root, "other", number)
        stage.interrupt()
        for code in self._random.sample(WRONG_CODES, self._random.randint(1, 2)):
            for _ in range(self._random.randint(1, 3)):
                with self._nothing_changes():
                    self._start_that_fails(code, f"the code {code!r}")

    def _moved(self) -> None:
        """Inputs are moved away, and back."""
        stage = self._stage
        stage.interrupt()
        folder = stage.root / "in" / self._random.choice(SIDES)
        away = folder.with_name("away")
        self._tell(f"{folder.name} is moved away")
        folder.rename(away)
        if stage.pattern:
            # Nothing matches the pattern: that is a folder without new files.
            folder.mkdir()
        for _ in range(self._random.randint(1, 2)):
            # A query that waits for files takes checkpoints.
            with self._nothing_changes(live=False, snapshots=False):
                self._tell(f"  {(self._end_or_idle() or 'it waits for files')[:300]}")
        if folder.exists():
            folder.rmdir()
        away.rename(folder)

    def _expired_inputs(self) -> None:
        """Files that no good point needs any more are deleted for good."""
        stage = self._stage
        needed = files_needed_from(stage, stage.snapshots())
        for number in range(self._expired, needed):
            for side in SIDES:
                (stage.root / f"in/{side}/{number:04}.json").unlink()
        self._expired = max(self._expired, needed)
        self._tell(f"files before {needed} are deleted")

    def _gone_inputs(self) -> None:
        """The live directory is lost, and files that a recovery reads again are away for a while."""
        stage = self._stage
        stage.feed(2)
        stage.supervise(lambda: stage.files_read() >= stage.files, "batches")
        stage.interrupt()
        blows = Blows(stage, self._random)
        if not blows.good:
            return
        # Those that even the newest good point needs.
        needed = max(stage.files_read(snapshot.batch_id or 0) for snapshot in blows.good)
        read = stage.files_read()
        if needed >= read:
            return
        blows.lost()
        away = stage.root / "away"
        moved = [stage.root / f"in/{side}/{number:04}.json" for side in SIDES for number in range(needed, read)]
        self._tell(f"files {needed} to {read - 1} are away")
        for path in moved:
            (away / path.parent.name).mkdir(parents=True, exist_ok=True)
            path.rename(away / path.parent.name / path.name)
        with self._nothing_changes(live=False):
            self._start_that_fails("right", "inputs that are gone")
        for path in moved:
            (away / path.parent.name / path.name).rename(path)

    def _start_that_fails(self, code: str, why: str) -> str:
        stage = self._stage
        ended = self._end_or_idle(code)
        if ended is None:
            raise ChaosError(f"a start with {why} is not refused: {stage.position()}")
        if not ended.startswith("failed"):
            raise ChaosError(f"a start with {why} ends with {ended}")
        self._tell(f"  {why}: {ended[:300]}")
        return ended

    def _end_or_idle(self, code: str = "right") -> str | None:
        """How a start ended; None if its query waits for new files until it is stopped."""
        stage, idle_s = self._stage, 0.0
        deadline = time.monotonic() + PATIENCE_S
        stage.begin(code)
        # A query may look idle for a moment before it fails.
        while time.monotonic() < deadline and idle_s < IDLE_S:
            ended = stage.end_of_run(0.1)
            if ended is not None:
                return ended
            idle_s = idle_s + 0.1 if stage.is_idle() else 0.0
        stage.interrupt()
        return None

    @contextmanager
    def _nothing_changes(self, *, live: bool = True, snapshots: bool = True) -> Iterator[None]:
        """Check that a start which is refused leaves the stream as it was."""
        stage = self._stage
        folders = ["out", *(["live"] if live else [])]
        before, directory, good = stage.print_of(*folders), stage.live, {each.snapshot_id for each in stage.snapshots()}
        yield
        after = stage.print_of(*folders)
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        if changed or (live and stage.live != directory):
            raise ChaosError(f"a refused start changed {changed[:8]}, and left {directory} for {stage.live}")
        gone = good - {each.snapshot_id for each in stage.snapshots()}
        if gone and snapshots:
            raise ChaosError(f"a refused start deleted {gone}")

    def _compare(self) -> None:
        stage = self._stage
        # Released rows of windows and sessions: the last files arrive while the query runs.
        for _ in range(2):
            self._work("the last files")
        stage.interrupt()
        wanted, rows = expected(self.operator, stage.files), stage.rows()
        if rows != wanted:
            lost, extra = wanted - rows, rows - wanted
            raise ChaosError(f"{lost.total()} rows lost, {extra.total()} too many: {lost}, {extra}"[:2_000])
        self._tell(f"equal: {rows.total()} rows")
