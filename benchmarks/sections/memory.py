"""Memory of the driver process."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench import Bench, Findings, Section, measured_by
from benchmarks.driver_memory import BATCHES, PARTITIONS, Step
from benchmarks.results import Table, Target, at_most, seconds

MIB = 2**20
SST_BYTES = (10_000, 500_000)


def _measure(bench: Bench) -> Findings:
    steps = {}
    for number, sst_bytes in enumerate(SST_BYTES):
        folder = bench.repetition(number)
        steps[sst_bytes] = [Step(**step) for step in measured_by("driver_memory", folder, sst_bytes)]
    tables = tuple(_table(f"{PARTITIONS * size / 1e6:.0f} MB of SSTs", found) for size, found in steps.items())
    return Findings(tables, _targets([step for found in steps.values() for step in found]), {})


def _table(title: str, steps: Sequence[Step]) -> Table:
    return Table(
        title=title,
        headings=("", "files in the snapshot", "peak growth MiB", "kept MiB", "s", "ms per 10,000 files"),
        rows=tuple(
            (
                step.what,
                str(step.files),
                f"{step.grown_bytes / MIB:.1f}",
                f"{step.kept_bytes / MIB:.1f}",
                seconds(step.wall_s),
                f"{_per_ten_thousand_files(step):.0f}",
            )
            for step in steps
        ),
    )


def _targets(steps: Sequence[Step]) -> tuple[Target, ...]:
    worst = max(step.grown_bytes for step in steps) / MIB
    unchanged = min(_per_ten_thousand_files(step) for step in steps if "nothing changed" in step.what)
    return (
        at_most("memory of the driver grows, 100,000-file snapshot", 64, worst, unit="MiB"),
        at_most("nothing changed, per 10,000 files of a 100,000-file snapshot", 50, unchanged, unit="ms"),
    )


def _per_ten_thousand_files(step: Step) -> float:
    return step.wall_s * 1000 * 10_000 / step.files


MEMORY = Section(
    name="memory",
    title="Memory of the driver",
    method=(
        f"A directory in the layout of a stopped query, not written by Spark: {PARTITIONS} partitions, each with a "
        f"snapshot and {BATCHES - 1} changelogs, with small and with large SSTs. A separate process takes the "
        "snapshots. Growth is the peak of its resident memory minus the value before the step."
    ),
    measure=_measure,
)
