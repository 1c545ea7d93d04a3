"""How long readers wait while a release replaces another one."""

from __future__ import annotations

import statistics

from benchmarks.bench import Bench, Findings, Section, measured_by
from benchmarks.handing_over import FILE_EVERY_S, HANDED_OVER, KEYS, RESTARTED, ROWS_OF_A_FILE, TRIGGER_S
from benchmarks.results import Table, at_most, seconds

TIMES = 10


def _measure(bench: Bench) -> Findings:
    times = max(1, round(TIMES * bench.share))
    gaps: dict[str, list[float]] = measured_by("handing_over", bench.repetition(0), times)
    table = Table(
        title=f"Seconds from the last batch of the old code to the first of the new ({times} times each)",
        headings=("", "median", "min", "max"),
        rows=tuple(
            (how, seconds(statistics.median(taken)), seconds(min(taken)), seconds(max(taken)))
            for how, taken in gaps.items()
        ),
    )
    worst, restarted = max(gaps[HANDED_OVER]), statistics.median(gaps[RESTARTED])
    targets = (
        at_most("gap of a hand-over, the longest", TRIGGER_S + 2, worst, unit="s"),
        at_most("gap of a hand-over / of a restart, medians", 0.5, statistics.median(gaps[HANDED_OVER]) / restarted),
    )
    return Findings((table,), targets, {})


HAND_OVER = Section(
    name="hand-over",
    title="Replacing the code of a running stream",
    method=(
        f"A stream that counts {KEYS:,} keys (RocksDB, a batch each {TRIGGER_S} s, a checkpoint every 5 s, local[2]) "
        f"reads a file of {ROWS_OF_A_FILE:,} rows each {FILE_EVERY_S} s. Releases replace each other, each a process "
        "of its own: every second one takes over while its predecessor runs, after two batches were compared; the "
        "others are launched after a stop with a savepoint. The moments are those of Spark's commits. "
        "`--share 0.3` replaces three times in each way instead of ten times."
    ),
    measure=_measure,
)
