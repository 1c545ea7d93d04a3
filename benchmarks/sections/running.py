"""What snapshots cost a query that runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple

from benchmarks.bench import Bench, Findings, Section, measured_by
from benchmarks.measuring import paired_ratio
from benchmarks.results import Table, at_least
from benchmarks.running_query import BATCHES_OF_A_WINDOW, KEYS, PARTITIONS, ROUND, Window

ROUNDS_OF_A_REPETITION = 3


def _measure(bench: Bench) -> Findings:
    folder = bench.repetition(0)
    rounds = ROUNDS_OF_A_REPETITION * bench.repetitions
    windows = [Window(**window) for window in measured_by("running_query", folder, rounds)]
    of_rounds = [windows[first : first + len(ROUND)] for first in range(0, len(windows), len(ROUND))]
    with_snapshots = [_together(window for window in windows if window.snapshots) for windows in of_rounds]
    without = [_together(window for window in windows if not window.snapshots) for windows in of_rounds]
    per_cpu = [[each.rows / each.cpu_s for each in group] for group in (with_snapshots, without)]
    per_wall = [[each.rows / each.wall_s for each in group] for group in (with_snapshots, without)]
    cpu_ratio, wall_ratio = paired_ratio(*per_cpu), paired_ratio(*per_wall)
    rows = (
        (
            "a snapshot every second",
            f"{statistics.median(per_wall[0]):.0f}",
            f"{statistics.median(per_cpu[0]):.0f}",
            str(sum(window.snapshots for window in with_snapshots)),
            f"{_python_share(with_snapshots):.2f}",
        ),
        (
            "none",
            f"{statistics.median(per_wall[1]):.0f}",
            f"{statistics.median(per_cpu[1]):.0f}",
            "0",
            f"{_python_share(without):.2f}",
        ),
        ("ratio within a round, median", f"{wall_ratio:.3f}", f"{cpu_ratio:.3f}", "", ""),
    )
    table = Table(
        title=f"Throughput of a running query ({rounds} rounds)",
        headings=("snapshots", "rows per second", "rows per CPU second", "snapshots taken", "% of CPU in Python"),
        rows=rows,
        note=(
            "The driver's Python process only waits for the query and takes the snapshots, so the difference in the "
            "last column is the cost of snapshots. Ratios of single rounds: "
            f"{', '.join(f'{over / under:.2f}' for over, under in zip(*per_cpu, strict=True))}."
        ),
    )
    targets = (
        at_least("running query, snapshot every second: rows per second, with / without", 0.98, wall_ratio),
        at_least("running query, snapshot every second: rows per CPU second, with / without", 0.98, cpu_ratio),
    )
    return Findings((table,), targets, {})


def _together(windows: Iterable[Window]) -> Window:
    """Windows as one."""
    return Window(*(sum(values) for values in zip(*map(astuple, windows), strict=True)))


def _python_share(windows: Sequence[Window]) -> float:
    """Share of the CPU time that the driver's Python process had, in percent."""
    return 100 * sum(window.python_s for window in windows) / sum(window.cpu_s for window in windows)


RUNNING = Section(
    name="running",
    title="A query that runs",
    method=(
        f"A query that reads rows as fast as it can: count and max of a hash over {KEYS} keys, {PARTITIONS} "
        "partitions, RocksDB with changelogs. Most keys change in every batch. In one run of the query, windows of "
        f"{BATCHES_OF_A_WINDOW} batches with a snapshot every second (three are retained) alternate with windows "
        "without, so that Spark uploads its own state snapshots equally often in both. CPU seconds are those of the "
        "JVM and of the driver's Python process."
    ),
    measure=_measure,
)
