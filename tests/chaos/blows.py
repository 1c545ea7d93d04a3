"""What the chaos does to files of a stream and to its catalog, drawn from a seed.

The model of what is still good is simple: before the blows of a round the stream works, so its live directory and
each snapshot whose bytes verify are good. A blow after which nothing would be good is undone at once.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from dagster_ckpt.catalog.records import SnapshotRecord
from tests.chaos.program import STREAM
from tests.chaos.stage import Stage, newest
from tests.support.file_damage import DAMAGES, checksum_of

# Kinds of blows to leave out, by the names of their methods.
WITHOUT = os.environ.get("CHAOS_WITHOUT", "").split()
_JOURNAL = (
    "DELETE FROM planned_batches",
    "DELETE FROM planned_batches WHERE batch_id % 2 = 1",
    "UPDATE planned_batches SET files = substr(files, 1, length(files) / 2)",
)
STATE = (".delta", ".changelog", ".snapshot", ".zip", ".sst")


class Blows:
    """Damages a stage, and never its last good point.

    Args:
        stage: The stage, whose stream works.
        random: Decides everything.
    """

    def __init__(self, stage: Stage, random: Random) -> None:
        self._stage = stage
        self._random = random
        self.good = [snapshot for snapshot in stage.snapshots() if stage.is_whole(snapshot)]
        self.is_live_good = True
        self.is_sink_good = True

    def strike(self, blows: int) -> None:
        """Strike a few times."""
        kinds = [self.live_file, self.live_file, self.lost, self.snapshot, self.snapshot, self.sink_log, self.journal]
        kinds = [kind for kind in kinds if kind.__name__ not in WITHOUT]
        for blow in self._random.sample(kinds, blows):
            # A stream that runs deletes files itself.
            with suppress(FileNotFoundError):
                blow()

    def live_file(self) -> None:
        """Damage one file of the live directory."""
        live = self._stage.live
        assert live is not None
        kind = self._random.choice(list(LIVE_FILES))
        files = [path for path in LIVE_FILES[kind](live) if path.is_file() and path.stat().st_size > 0]
        if files:
            self._damage(self._random.choice(files), f"{kind} of the live directory", self._live_is_lost)

    def lost(self) -> None:
        """Lose the live directory, or all its state."""
        live = self._stage.live
        assert live is not None
        what = self._random.choice([live, live / "state"])
        if what.exists() and (self.good or not self.is_live_good):
            self._tell(f"{what.name} is deleted")
            _delete(what)
            self._live_is_lost()

    def snapshot(self) -> None:
        """Damage a file of a snapshot."""
        folder = self._stage.root / "snapshots" / STREAM
        files = sorted(path for path in folder.glob("*/**/*") if path.is_file() and path.stat().st_size > 0)
        if files:
            path = self._random.choice(files)
            self._damage(path, "a file of the snapshots", self._look_at_snapshots)

    def sink_log(self) -> None:
        """Damage an entry of the log of the file sink."""
        log = self._stage.root / "out/_spark_metadata"
        entries = sorted(path for path in log.glob("[0-9]*") if path.stat().st_size > 0)
        if entries and self.good:
            self._damage(self._random.choice(entries[-4:]), "an entry of the sink's log", self._sink_is_lost)

    def journal(self) -> None:
        """Damage the journal of planned batches, in the catalog."""
        change = self._random.choice(_JOURNAL)
        self._tell(f"the journal: {change}")
        with closing(sqlite3.connect(self._stage.root / "catalog.db", timeout=30)) as catalog, catalog:
            catalog.execute(change)

    def _damage(self, path: Path, what: str, note: Callable[[], None]) -> None:
        kinds = ["cut", "zero", "drop"]
        # Where no checksum says so, a flipped bit may make another valid value of it.
        if checksum_of(path).exists() or path.suffix in STATE or "snapshots" in path.parts:
            kinds.append("flip")
        kind = self._random.choice(kinds)
        checksum = checksum_of(path)
        kept = {each: each.read_bytes() for each in (path, checksum) if each.exists()}
        # An object store keeps no such files.
        if kind in ("cut", "zero") and checksum.exists() and self._random.random() < 0.5:
            checksum.unlink()
        before = self.good, self.is_live_good, self.is_sink_good
        DAMAGES[kind](path)
        note()
        is_recoverable = bool(self.good) or (self.is_live_good and self.is_sink_good)
        self._tell(f"{kind}: {what}: {path.relative_to(self._stage.root)}{'' if is_recoverable else ' (undone)'}")
        if not is_recoverable:
            for each, data in kept.items():
                each.write_bytes(data)
            self.good, self.is_live_good, self.is_sink_good = before

    def _live_is_lost(self) -> None:
        self.is_live_good = False
        # A snapshot may share an inode with it.
        self._look_at_snapshots()

    def _sink_is_lost(self) -> None:
        self.is_sink_good = False

    def _look_at_snapshots(self) -> None:
        self.good = [snapshot for snapshot in self.good if self._stage.is_whole(snapshot)]

    def destroy_everything(self) -> None:
        """Leave no good point."""
        stage = self._stage
        assert stage.live is not None
        _delete(stage.live)
        for snapshot in stage.snapshots():
            _delete(Path((snapshot.location or "").removeprefix("file://")))
        self._tell("the live directory and every snapshot are deleted")

    def _tell(self, what: str) -> None:
        self._stage.tell(f"  {what}")


def files_needed_from(stage: Stage, snapshots: Sequence[SnapshotRecord]) -> int:
    """The first file of each side that a recovery from any of these snapshots reads again."""
    return min((stage.files_read(snapshot.batch_id or 0) for snapshot in snapshots), default=0)


def _numbered(log: Path) -> list[Path]:
    return sorted(
        (path for path in log.glob("[0-9]*") if path.is_file()), key=lambda path: int(path.name.split(".")[0])
    )


def _state(live: Path, of_newest: bool) -> list[Path]:
    found = sorted(path for path in (live / "state").rglob("*") if path.suffix in STATE)
    if not of_newest:
        return found
    latest = newest(live / "commits") + 1
    return [path for path in found if path.name.startswith((f"{latest}.", f"{latest}_"))]


LIVE_FILES: dict[str, Callable[[Path], list[Path]]] = {
    "newest state": lambda live: _state(live, of_newest=True),
    "state": lambda live: _state(live, of_newest=False),
    "operator metadata": lambda live: sorted((live / "state").glob("*/_metadata/*")),
    "state schema": lambda live: sorted((live / "state").glob("*/*/_metadata/schema*")),
    "newest offsets": lambda live: _numbered(live / "offsets")[-1:],
    "offsets": lambda live: _numbered(live / "offsets")[-3:],
    "newest commit": lambda live: _numbered(live / "commits")[-1:],
    "commits": lambda live: _numbered(live / "commits")[-3:],
    "source log": lambda live: [path for log in sorted((live / "sources").glob("*")) for path in _numbered(log)[-4:]],
    "query metadata": lambda live: [live / "metadata"],
}


def _delete(folder: Path) -> None:
    """Delete a folder, also one that somebody writes to."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    shutil.rmtree(folder)
