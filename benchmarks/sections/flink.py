"""Snapshots beside Flink's savepoints and checkpoints, on as much state."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench import FEW_PARTITIONS, Bench, Findings, Section
from benchmarks.engine import Engine
from benchmarks.growing import copy_of, grow
from benchmarks.live_directories import KeptDirectory
from benchmarks.measuring import Series, timed
from benchmarks.packages import PeerMissingError, environment
from benchmarks.results import Table, Target, at_least, megabytes, seconds
from dagster_ckpt.spark.checkpoint_dir.restore import DonorCheck

# Runs with Flink's Python, which has none of our packages.
FLINK_STREAM = Path(__file__).parents[1] / "flink_stream.py"
FLINK = "apache-flink==1.20.5"
# After a compaction Flink writes most of its state again; the other checkpoints write what changed.
COMPACTED_SHARE = 0.1
# One that follows another at once has less than the 1 % to write.
LEAST_SHARE = 0.005
WHAT = ("savepoint", "snapshot with 1 % changed", "restore, live directory there", "restore, live directory lost")
SAVEPOINT, INCREMENTAL, BESIDE, LOST = WHAT


def _measure(bench: Bench) -> Findings:
    kept = bench.directory(FEW_PARTITIONS)
    ours, sizes = Series(), dict[str, int]()
    half = (bench.repetitions + 1) // 2
    for repetition in range(half):
        _repeat(bench.repetition(repetition), kept, ours, sizes)
    theirs: dict[str, list[float]] = {}
    reason = ""
    try:
        theirs = _flink(bench)
    except PeerMissingError as error:
        reason = str(error)
    for repetition in range(half, bench.repetitions):
        _repeat(bench.repetition(repetition), kept, ours, sizes)
    versions = {"Flink": FLINK.rpartition("=")[2]}
    return Findings((_table(ours, sizes, theirs),), _targets(ours, theirs, reason), versions)


def _repeat(root: Path, kept: KeptDirectory, ours: Series, sizes: dict[str, int]) -> None:
    engine = Engine(root / "stream", f"file://{root}/snapshots")
    copy_of(kept.stages[0], engine.live)
    before = engine.checkpoint()
    grow(engine.live, kept.stages[1])

    def measure(name: str, work: Callable[[], Any]) -> None:
        ours.add(name, timed(work))

    measure(INCREMENTAL, lambda: sizes.update({INCREMENTAL: engine.checkpoint(before.location).incremental_bytes}))
    saved = []
    measure(SAVEPOINT, lambda: saved.append(engine.savepoint()))
    sizes[SAVEPOINT] = saved[0].full_bytes
    measure(BESIDE, lambda: engine.restore(saved[0].location, "live-2", DonorCheck.DIGEST))
    (root / "lost").mkdir()
    for directory in list(engine.live.parent.iterdir()):
        directory.rename(root / "lost" / directory.name)
    measure(LOST, lambda: engine.restore(saved[0].location, "live-3"))


def _flink(bench: Bench) -> dict[str, list[float]]:
    """Let Flink measure itself.

    Raises:
        PeerMissingError: It could not be installed.
        RuntimeError: Its stream failed.
    """
    python = environment(bench.folder, FLINK) / "python"
    folder = bench.scratch / "flink"
    folder.mkdir()
    shape = FEW_PARTITIONS
    numbers = (shape.keys, shape.changed, shape.partitions, bench.repetitions)
    done = subprocess.run(
        [str(python), str(FLINK_STREAM), str(folder), *map(str, numbers)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"Flink's stream failed: {done.stderr.strip().splitlines()[-1:]}")
    measured: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _flink_seconds(theirs: dict[str, list[float]]) -> dict[str, list[float]]:
    full = statistics.median(theirs["savepoint_bytes"])
    checkpoints = list(zip(theirs["checkpoint_ms"], theirs["checkpoint_bytes"], strict=True))
    small = [ms for ms, size in checkpoints if LEAST_SHARE * full <= size < COMPACTED_SHARE * full]
    restores = [ms / 1000 for ms in theirs["restore_ms"]]
    return {
        SAVEPOINT: [ms / 1000 for ms in theirs["savepoint_ms"]],
        INCREMENTAL: [ms / 1000 for ms in small or theirs["checkpoint_ms"]],
        BESIDE: restores,
        LOST: restores,
    }


def _table(ours: Series, sizes: dict[str, int], theirs: dict[str, list[float]]) -> Table:
    flink = _flink_seconds(theirs) if theirs else {}
    flink_sizes = {
        SAVEPOINT: statistics.median(theirs["savepoint_bytes"]) if theirs else 0,
        INCREMENTAL: statistics.median(theirs["checkpoint_bytes"]) if theirs else 0,
    }
    rows = []
    for name in WHAT:
        peer = flink.get(name, [])
        rows.append(
            (
                name,
                seconds(ours.median(name)),
                seconds(min(ours.walls(name))),
                megabytes(sizes[name]) if name in sizes else "",
                seconds(statistics.median(peer)) if peer else "",
                seconds(min(peer)) if peer else "",
                megabytes(flink_sizes[name]) if peer and name in flink_sizes else "",
                f"{statistics.median(peer) / ours.median(name):.2f}" if peer else "",
            )
        )
    return Table(
        title="Savepoint, incremental checkpoint, restore",
        headings=("", "median s", "min s", "MB", "Flink median s", "Flink min s", "Flink MB", "x ours"),
        rows=tuple(rows),
        note=(
            "Flink: native RocksDB savepoint, incremental checkpoint, restore of the native savepoint (initialization "
            "of the slowest task). Checkpoints that a compaction enlarged are not counted; they took "
            f"{_compacted(theirs)}."
        ),
    )


def _compacted(theirs: dict[str, list[float]]) -> str:
    if not theirs:
        return "was not measured"
    full = statistics.median(theirs["savepoint_bytes"])
    checkpoints = zip(theirs["checkpoint_ms"], theirs["checkpoint_bytes"], strict=True)
    large = [f"{ms:.0f} ms for {megabytes(size)} MB" for ms, size in checkpoints if size >= COMPACTED_SHARE * full]
    return ", ".join(large) or "nothing, there was none"


def _targets(ours: Series, theirs: dict[str, list[float]], reason: str) -> tuple[Target, ...]:
    flink = {name: statistics.median(values) for name, values in _flink_seconds(theirs).items()} if theirs else {}

    def target(what: str, name: str) -> Target:
        measured = flink[name] / ours.median(name) if name in flink else None
        return at_least(what, 1, measured, reason=reason)

    return (
        target("savepoint: Flink's native savepoint / ours", SAVEPOINT),
        target("incremental, 1 % changed: Flink's checkpoint / ours", INCREMENTAL),
        target("restore: Flink's native restore / ours, live directory there", BESIDE),
        target("restore: Flink's native restore / ours, live directory lost", LOST),
    )


FLINK_SECTION = Section(
    name="flink",
    title="Compared with Flink",
    method=(
        "One million keys, each with a count and a payload of 100 characters, in four partitions. Flink is a "
        "PyFlink MiniCluster with RocksDB and incremental checkpoints, timed by its REST interface; a random "
        "updater changes about 1 % of the keys between two checkpoints. It runs between two halves of our "
        "repetitions. Ours are calls on the live directory of a Spark query with as many keys and partitions."
    ),
    measure=_measure,
)
