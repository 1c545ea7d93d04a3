"""What a snapshot costs when the state is ten times as large, and when ten times as much changed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from benchmarks.bench import MILLION, Bench, Findings, Section
from benchmarks.engine import Engine
from benchmarks.growing import copy_of, grow
from benchmarks.live_directories import KeptDirectory, Shape
from benchmarks.measuring import Series, paired_ratio, timed
from benchmarks.results import Table, megabytes, seconds

BASE = Shape(keys=MILLION // 10, partitions=20, changed=1000, stages=(3, 6))
MORE_STATE = replace(BASE, keys=MILLION)
MORE_CHANGE = replace(MORE_STATE, changed=10_000)
SHAPES = {
    "100,000 keys, 1,000 change a batch": BASE,
    "1,000,000 keys, 1,000 change a batch": MORE_STATE,
    "1,000,000 keys, 10,000 change a batch": MORE_CHANGE,
}


def _measure(bench: Bench) -> Findings:
    kept = {name: bench.directory(shape) for name, shape in SHAPES.items()}
    first, incremental = Series(), Series()
    written: dict[str, tuple[int, int]] = {}
    for repetition in range(bench.repetitions):
        root = bench.repetition(repetition)
        for number, (name, directory) in enumerate(kept.items()):
            written[name] = _repeat(root / str(number), name, directory, first, incremental)
    rows = tuple(
        (
            name,
            seconds(first.median(name)),
            megabytes(written[name][0]),
            seconds(incremental.median(name)),
            seconds(min(incremental.walls(name))),
            megabytes(written[name][1]),
        )
        for name in SHAPES
    )
    small, large, changed = SHAPES
    by_state = paired_ratio(incremental.walls(large), incremental.walls(small))
    by_change = paired_ratio(incremental.walls(changed), incremental.walls(large))
    headings = ("", "first snapshot s", "MB", "snapshot after three batches s", "min s", "MB written")
    slopes = Table(
        title="Slopes of the incremental snapshot",
        headings=("", "time", "slope"),
        rows=(
            ("state x 10, change the same", f"x {by_state:.2f}", f"{math.log10(by_state):.2f}"),
            ("change x 10, state the same", f"x {by_change:.2f}", f"{math.log10(by_change):.2f}"),
        ),
        note="Slope 0: the time is independent of it. Slope 1: the time grows in proportion.",
    )
    return Findings((Table(title="Snapshots", headings=headings, rows=rows), slopes), (), {})


def _repeat(root: Path, name: str, kept: KeptDirectory, first: Series, incremental: Series) -> tuple[int, int]:
    engine = Engine(root / "stream", f"file://{root}/snapshots")
    copy_of(kept.stages[0], engine.live)
    snapshots = []
    first.add(name, timed(lambda: snapshots.append(engine.checkpoint())))
    grow(engine.live, kept.stages[1])
    incremental.add(name, timed(lambda: snapshots.append(engine.checkpoint(snapshots[0].location))))
    return snapshots[0].incremental_bytes, snapshots[1].incremental_bytes


SLOPES = Section(
    name="slopes",
    title="What the cost grows with",
    method=(
        f"Three live directories written by Spark, with {BASE.partitions} partitions each. The second has ten "
        "times the keys of the first; in the third, a batch changes ten times as many. A snapshot is taken after "
        "three batches, the next after three more."
    ),
    measure=_measure,
)
