"""The lives of real queries, kept batch by batch, to be played again in milliseconds.

A recording holds hard links to every file that Spark wrote, so that inodes and times, by which snapshots tell files
apart, are those of the real directory. It has a main timeline and branches of it: real resumes after an early batch,
with larger batches, so that the same names hold other content there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3
from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import Workload

from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.query import start_query


@dataclass(frozen=True)
class KeptFile:
    """A file as Spark wrote it."""

    path: Path
    inode: int
    digest: str

    @staticmethod
    def of(path: Path) -> KeptFile:
        return KeptFile(path, path.stat().st_ino, blake3(path.read_bytes()).hexdigest())


Tree = Mapping[str, KeptFile]


@dataclass(frozen=True, eq=False)
class Timeline:
    """What one query wrote, from its start or from a resume on.

    Attributes:
        kept: Where its moments are kept.
        moments: Batch to the live directory while the next batch runs, or at the end. The first one of a branch is the
            batch it resumed after.
        parent: The timeline it branched from, None for the main one.
        files_per_batch: Input files a batch.
        output: Batch to the rows it gave, those of its parent included.
    """

    kept: Path
    moments: Mapping[int, Tree]
    parent: Timeline | None
    files_per_batch: int
    output: Mapping[int, str]

    @property
    def first(self) -> int:
        return min(self.moments)

    @property
    def last(self) -> int:
        return max(self.moments)


@dataclass(frozen=True)
class Position:
    """A query right after a batch of a timeline, whether or not the next one runs."""

    timeline: Timeline
    batch: int

    @property
    def tree(self) -> Tree:
        return self.timeline.moments[self.batch]

    @cache  # noqa: B019 - lives as long as the recording
    def logs(self, *, carry_in_flight: bool) -> Mapping[str, str]:
        """Digests of what is not state in a full cut."""
        live = LiveDirectory(str(self.timeline.kept / str(self.batch)))
        taken = cut(live, carry_in_flight=carry_in_flight)
        assert taken.batch_id == self.batch
        return {file.path: self.tree[file.path].digest for file in taken.needed if not file.stable}

    @cache  # noqa: B019 - the same
    def written(self) -> Mapping[str, str]:
        """Digests of every file that Spark has written up to here, purged ones too."""
        parent = self.timeline.parent
        past = dict(Position(parent, self.timeline.first).written()) if parent is not None else {}
        for batch, tree in sorted(self.timeline.moments.items()):
            if batch <= self.batch:
                past.update({path: file.digest for path, file in tree.items()})
        return past

    def play_to(self, batch: int, live: Path, *, copied: bool) -> Position:
        """Let a live directory that is here go on as the recorded one did.

        Args:
            batch: A later batch of the timeline.
            live: The directory.
            copied: New files get inodes of their own, as when Spark runs the same batches once more.
        """
        now = self.timeline.moments[batch]
        for path, file in now.items():
            target = live / path
            before = self.tree.get(path)
            if before is not None and before.inode == file.inode and target.exists():
                continue
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            if copied:
                shutil.copyfile(file.path, target)
            else:
                os.link(file.path, target)
        for path in self.tree.keys() - now.keys():
            (live / path).unlink(missing_ok=True)
        return Position(self.timeline, batch)


@dataclass(frozen=True)
class Recording:
    """A query's main timeline, and branches by the batch that each resumed after."""

    work: Workload
    main: Timeline
    branches: Mapping[int, Timeline]

    def continuations(self, position: Position) -> list[Position]:
        """How a query that is brought back to a position may go on from there."""
        branch = self.branches.get(position.batch)
        is_root = branch is not None and position.timeline is branch.parent
        return [position, *([Position(branch, position.batch)] if branch is not None and is_root else [])]


def record(spark: SparkSession, work: Workload, kept: Path, *, branches: tuple[int, ...]) -> Recording:
    """Run a query to its end, and again from some of its batches on, and keep what it wrote."""
    main = _run(spark, work, LiveDirectory(f"{work.folder}/live-main"), kept / "main", parent=None)
    made = {}
    for batch in branches:
        live = LiveDirectory(f"{work.folder}/live-after-{batch}")
        clone(LiveDirectory(str(main.kept / str(batch))), live)
        made[batch] = _run(spark, work, live, kept / f"after-{batch}", parent=Position(main, batch))
    return Recording(work, main, made)


def bring_output_back(work: Workload, position: Position) -> None:
    """Make the output of a query what it was at a position."""
    shutil.rmtree(work.output, ignore_errors=True)
    work.output.mkdir()
    for batch, rows in position.timeline.output.items():
        if batch <= position.batch:
            (work.output / str(batch)).write_text(rows)


def _run(spark: SparkSession, work: Workload, live: LiveDirectory, kept: Path, *, parent: Position | None) -> Timeline:
    moments: dict[int, Tree] = {}
    if parent is not None:
        bring_output_back(work, parent)
        moments[parent.batch] = _keep(live, kept / str(parent.batch))
    files_per_batch = 1 if parent is None else 2

    def keep(before: int) -> None:
        if before >= 0 and before not in moments:
            moments[before] = _keep(live, kept / str(before))

    writer = work.writer(work.session(spark), files_per_batch=files_per_batch)
    writer = writer.trigger(availableNow=True).foreachBatch(_keeping(work.output, keep))
    query = start_query(writer, "recorded", live)
    while not query.wait(0.5):
        pass
    assert query.exception() is None, query.exception()
    keep(max(int(path.name) for path in work.output.iterdir()))
    output = {int(path.name): path.read_text() for path in work.output.iterdir()}
    return Timeline(kept, moments, parent.timeline if parent is not None else None, files_per_batch, output)


def _keeping(output: Path, keep: Callable[[int], None]) -> Callable[[DataFrame, int], None]:
    """Keep what the batch before left, while Spark waits with this one."""

    def write(batch: DataFrame, batch_id: int) -> None:
        keep(batch_id - 1)
        output.mkdir(exist_ok=True)
        (output / str(batch_id)).write_text("\n".join(sorted(map(str, batch.collect()))))

    return write


def _keep(live: LiveDirectory, target: Path) -> Tree:
    """Link the directory, again where Spark's maintenance was faster."""
    while True:
        shutil.rmtree(target, ignore_errors=True)
        assert live.local_path is not None
        shutil.copytree(live.local_path, target, copy_function=_link_if_there, ignore=_hidden)
        try:
            cut(LiveDirectory(str(target)), carry_in_flight=True, attempts=1)
        except IncompleteCutError:
            continue
        return {str(path.relative_to(target)): KeptFile.of(path) for path in target.rglob("*") if path.is_file()}


def _link_if_there(source: str, target: str) -> None:
    with suppress(FileNotFoundError):
        os.link(source, target)


def _hidden(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(".")]
