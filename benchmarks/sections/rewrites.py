"""Rewriting state: another number of partitions, another backend."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench import MILLION, Bench, Findings, Section, measured_by
from benchmarks.results import Table, Target, at_most, seconds
from benchmarks.rewritten_state import CHANGES, PARTITIONS, Step
from dagster_ckpt.spark.versions import Feature, installed_release

MIB = 2**20
KEYS = (MILLION, 10 * MILLION)
# What no rewrite can be faster than: one reading, and one full snapshot.
LOWER_LIMIT = ("read once with Spark's reader of state", "full snapshot")


def _measure(bench: Bench) -> Findings:
    installed_release().require(Feature.STATE_REWRITER, "This section (run it with SPARK=4.3)")
    found = {}
    for number, keys in enumerate(KEYS):
        found[keys] = [Step(**step) for step in measured_by("rewritten_state", bench.repetition(number), keys)]
    return Findings(tuple(_table(keys, steps) for keys, steps in found.items()), _targets(found[MILLION]), {})


def _table(keys: int, steps: Sequence[Step]) -> Table:
    limit = _lower_limit(steps)
    return Table(
        title=f"{keys:,} keys in {PARTITIONS} partitions",
        headings=("", "s", "times the lower limit", "JVM MiB", "Python driver MiB"),
        rows=tuple(
            (
                step.what,
                seconds(step.wall_s),
                f"{step.wall_s / limit:.1f}",
                f"{step.jvm_bytes / MIB:.0f}",
                f"{step.python_bytes / MIB:.0f}",
            )
            for step in steps
        ),
    )


def _lower_limit(steps: Sequence[Step]) -> float:
    return sum(step.wall_s for step in steps if step.what in LOWER_LIMIT)


def _targets(steps: Sequence[Step]) -> tuple[Target, ...]:
    worst = max(step.wall_s for step in steps if step.what in CHANGES) / _lower_limit(steps)
    driver = max(step.python_bytes for step in steps if step.what in CHANGES) / MIB
    return (
        at_most("slowest rewrite of a million keys, times the lower limit", 8, worst),
        at_most("memory of the Python driver while it rewrites a million keys", 512, driver, unit="MiB"),
    )


REWRITES = Section(
    name="rewrites",
    title="Rewriting state",
    method=(
        "One batch of an aggregation by two columns makes the state, in RocksDB with changelogs. A rewrite reads "
        "that directory, writes a new one, and compares every row. The lower limit is one reading with Spark's "
        "reader of state plus one full snapshot. Memory is the peak of the resident memory; the JVM is driver and "
        "executors in one. Run it on Spark 4.2 or later: `make bench SPARK=4.3 ONLY=rewrites`."
    ),
    measure=_measure,
)
