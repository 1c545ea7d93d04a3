"""Snapshots on a local disk, beside `cp` and `rsync`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from benchmarks.bench import LARGE, Bench, Findings, Section, first_line
from benchmarks.engine import Engine
from benchmarks.growing import committed_at_ns, copy_of, grow
from benchmarks.live_directories import KeptDirectory
from benchmarks.measuring import Sample, Series, paired_ratio, run, timed, tree_size
from benchmarks.packages import require_debian_packages
from benchmarks.results import Table, Target, at_least, at_most, megabytes, seconds, timing_table
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.restore import DonorCheck

OURS = "snapshot"
CLEAN = "restore after a stop in order, live directory there"
CHECKED = "restore, live directory there, every file compared"
LOST = "restore, live directory lost"
RSYNC, LINK_DEST = "rsync -a", "rsync -a --link-dest"
UNCHECKED = "snapshot that compares no checksums"
LIMIT = "reading the new bytes, one durable write"
# What a restore promises: the copy is on the disk before a query starts in it.
DURABLE_LINKS = "cp -al, sync -f"
FILES_OF_A_FIGURE = 10_000
# Pairs in each repetition: one takes some 30 ms, of which the disk has a share that changes from one to the next.
RESTORES = 5


@dataclass
class _Figures:
    full: Series = field(default_factory=Series)
    incremental: Series = field(default_factory=Series)
    every_batch: Series = field(default_factory=Series)
    unchanged: Series = field(default_factory=Series)
    restore: Series = field(default_factory=Series)
    new_files: list[int] = field(default_factory=list)
    # Files and bytes that the last repetition wrote.
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    live_files: int = 0


def _measure(bench: Bench) -> Findings:
    require_debian_packages("rsync")
    kept = bench.directory(LARGE)
    figures = _Figures()
    for repetition in range(bench.repetitions):
        _repeat(bench.repetition(repetition), kept, figures, repetition)
    return Findings(_tables(figures), _targets(figures), {"rsync": first_line("rsync", "--version")})


def _repeat(root: Path, kept: KeptDirectory, figures: _Figures, repetition: int) -> None:
    engine = Engine(root / "stream", f"file://{root}/snapshots")
    live = copy_of(kept.stages[0], engine.live)
    # Hard links change the times of their sources, so the peers have a copy of their own.
    theirs = copy_of(kept.stages[0], root / "theirs")
    snapshots, backup, base, linked = root / "snapshots", root / "backup", root / "base", root / "linked"
    locations: list[str] = []

    def snapshot() -> Sample:
        return timed(lambda: locations.append(engine.checkpoint(locations[-1] if locations else None).location))

    unchecked = _Unchecked(root, kept)
    figures.full.interleave(
        {
            OURS: snapshot,
            UNCHECKED: unchecked.snapshot,
            "cp -a": lambda: run("cp", "-a", str(theirs), str(root / "copy")),
            RSYNC: lambda: run("rsync", "-a", f"{theirs}/", str(backup)),
        },
        repetition,
    )
    run("rsync", "-a", f"{theirs}/", str(base))
    grow(live, kept.stages[1])
    grow(theirs, kept.stages[1])
    before = {name: tree_size(path) for name, path in ((OURS, snapshots), (RSYNC, backup), (LINK_DEST, base))}
    figures.incremental.interleave(
        {
            OURS: snapshot,
            LINK_DEST: lambda: run("rsync", "-a", f"--link-dest={base}", f"{theirs}/", str(linked)),
            RSYNC: lambda: run("rsync", "-a", f"{theirs}/", str(backup)),
        },
        repetition,
    )
    for name, path in ((OURS, snapshots), (RSYNC, backup), (LINK_DEST, linked)):
        after = tree_size(path, without=before[name])
        new = after.files if name == LINK_DEST else after.files - before[name].files
        figures.cells[name] = (str(new), megabytes(after.bytes))
        if name == OURS:
            figures.new_files.append(new)
    figures.live_files = tree_size(live).files
    figures.unchanged.add(OURS, snapshot())
    grow(unchecked.live, kept.stages[1])
    unchecked.snapshot()
    first, last = LARGE.stages[1], LARGE.stages[2]
    for batch in range(first, last - 1):
        next_batch = partial(grow, towards=kept.stages[2], until_ns=committed_at_ns(kept.stages[2], batch))
        written = root / f"one-write-{batch}"
        # Each has files of its own, made right before: a snapshot is the first to read what Spark has just written.
        competitors: dict[str, Callable[[], Sample]] = {
            OURS: partial(_snapshot_of, partial(next_batch, live), snapshot),
            UNCHECKED: partial(_snapshot_of, partial(next_batch, unchecked.live), unchecked.snapshot),
            LIMIT: partial(_limit_of, partial(next_batch, theirs), written),
        }
        figures.every_batch.interleave(competitors, batch)
    grow(live, kept.stages[2])
    snapshot()
    _restore(root, engine, locations[-1], figures, repetition)


def _restore(root: Path, engine: Engine, location: str, figures: _Figures, repetition: int) -> None:
    # The peers copy exactly the files that a restore makes.
    same_files = copy_of(engine.restore(location, "live-same", DonorCheck.IDENTITY), root / "same-files")
    for turn in range(RESTORES):
        figures.restore.interleave(
            {
                CLEAN: partial(timed, partial(engine.restore, location, f"live-clean-{turn}", DonorCheck.IDENTITY)),
                CHECKED: partial(timed, partial(engine.restore, location, f"live-checked-{turn}", DonorCheck.DIGEST)),
                "cp -al": partial(run, "cp", "-al", str(same_files), str(root / f"hard-linked-{turn}")),
                DURABLE_LINKS: partial(_durable_links, same_files, root / f"durable-{turn}"),
                "cp -a": partial(run, "cp", "-a", str(same_files), str(root / f"copied-{turn}")),
            },
            repetition + turn,
        )
    (root / "lost").mkdir()
    for turn in range(RESTORES):
        for directory in list(engine.live.parent.iterdir()):
            directory.rename(root / "lost" / directory.name)
        figures.restore.add(LOST, timed(partial(engine.restore, location, f"live-lost-{turn}")))


class _Unchecked:
    """Snapshots that are not compared with the checksums that Spark's and RocksDB's files carry."""

    def __init__(self, root: Path, kept: KeptDirectory) -> None:
        self._engine = Engine(root / "unchecked", f"file://{root}/unchecked-snapshots")
        self.live = copy_of(kept.stages[0], self._engine.live)
        self._locations: list[str] = []

    def snapshot(self) -> Sample:
        before = self._locations[-1] if self._locations else None
        with patch.object(NeededFile, "check", new=lambda _file: None):
            return timed(lambda: self._locations.append(self._engine.checkpoint(before).location))


def _durable_links(source: Path, target: Path) -> Sample:
    return run("sh", "-c", 'cp -al "$0" "$1" && sync -f "$1"', str(source), str(target))


def _snapshot_of(next_batch: Callable[[], object], snapshot: Callable[[], Sample]) -> Sample:
    next_batch()
    return snapshot()


def _limit_of(next_batch: Callable[[], list[Path]], written: Path) -> Sample:
    wanted = [path for path in next_batch() if not path.name.startswith(".")]
    return timed(partial(_read_and_write, wanted, written))


def _read_and_write(paths: Sequence[Path], target: Path) -> None:
    """The physical limit: every new file that a restore needs is read once, and all of it written once and for good.

    As a snapshot is on the disk when it is reported, with its name, so is this.
    """
    with target.open("wb") as stream:
        for path in paths:
            stream.write(path.read_bytes())
        stream.flush()
        os.fsync(stream.fileno())
    folder = os.open(target.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _per_ten_thousand_files(figures: _Figures) -> float:
    return figures.unchanged.median(OURS) * 1000 * FILES_OF_A_FIGURE / figures.live_files


def _tables(figures: _Figures) -> tuple[Table, ...]:
    batches = figures.every_batch
    return (
        timing_table("First full snapshot", figures.full, ours=OURS),
        timing_table(
            "Snapshot after ten more batches",
            figures.incremental,
            ours=OURS,
            headings=("new files", "MB written"),
            cells={name: tuple(cells) for name, cells in figures.cells.items()},
        ),
        timing_table(
            "Snapshot at every batch",
            batches,
            ours=OURS,
            note=(
                "Like a snapshot, the limit is flushed to the disk and leaves out checksum files. Each reads "
                f"different files, which were written immediately before. `{UNCHECKED}` is what it would cost to "
                "trust the new bytes."
            ),
        ),
        Table(
            title="Finding that nothing changed",
            headings=("", "median s", "min s", "files", "ms per 10,000 files"),
            rows=(
                (
                    OURS,
                    seconds(figures.unchanged.median(OURS)),
                    seconds(min(figures.unchanged.walls(OURS))),
                    str(figures.live_files),
                    f"{_per_ten_thousand_files(figures):.0f}",
                ),
            ),
            note="A whole snapshot: listing, comparing and publishing.",
        ),
        timing_table(
            "Restore on the same file system",
            figures.restore,
            ours=CLEAN,
            note=(
                "A restore is flushed to the disk before a query starts in it, and so is the copy of "
                f"`{DURABLE_LINKS}`; the other peers leave that to the kernel. After an orderly stop, "
                "RocksDB's SST files are recognized by inode, time and length; otherwise each file is compared "
                "with its digest."
            ),
        ),
    )


def _targets(figures: _Figures) -> tuple[Target, ...]:
    incremental, restore, batches = figures.incremental, figures.restore, figures.every_batch
    every_batch = paired_ratio(batches.walls(OURS), batches.walls(LIMIT))
    return (
        at_least("first full snapshot: `cp -a` / ours", 1, figures.full.ratio("cp -a", OURS)),
        at_least("incremental: `rsync -a --link-dest` / ours", 4, incremental.ratio(LINK_DEST, OURS)),
        at_least("incremental: `rsync -a` / ours", 2, incremental.ratio(RSYNC, OURS)),
        at_most("incremental: new files", 20, statistics.median(figures.new_files)),
        at_most("snapshot at every batch: ours / the new bytes read and written once, durably", 1.5, every_batch),
        at_least(f"restore after a stop in order: `{DURABLE_LINKS}` / ours", 1, restore.ratio(DURABLE_LINKS, CLEAN)),
        at_most("nothing changed, per 10,000 files", 50, _per_ten_thousand_files(figures), unit="ms"),
    )


LOCAL = Section(
    name="local",
    title="Snapshots on a local disk",
    method=(
        "A live directory with one million keys in 200 partitions, RocksDB with changelogs, after 13, 23 and 33 "
        "batches, each of which changes 1 % of the keys. Snapshots are taken of one copy that grows; the peers work "
        "on another. A peer is a whole process, a snapshot a call in a running one. The page cache is warm. A "
        "snapshot is flushed to the disk; the peers leave that to the kernel unless their name says otherwise."
    ),
    measure=_measure,
)
