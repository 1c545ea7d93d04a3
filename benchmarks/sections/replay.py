"""An exact replay of lost batches, and the journal that it needs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.bench import Bench, Findings, Section, measured_by
from benchmarks.measuring import paired_ratio
from benchmarks.replayed import BATCHES, FIRST_TIME, PARTITIONS, REPLAYED, ROWS_OF_A_BATCH, Measured
from benchmarks.results import Table, at_most, seconds


def _measure(bench: Bench) -> Findings:
    found = Measured(**measured_by("replayed", bench.repetition(0), bench.repetitions))
    walls = found.walls
    ratios = {what: paired_ratio(per_round, walls[FIRST_TIME]) for what, per_round in walls.items()}
    batches = Table(
        title=f"{BATCHES} batches of {ROWS_OF_A_BATCH:,} new keys ({bench.repetitions} rounds)",
        headings=("", "median s", "min s", "ms per batch", "to the first time"),
        rows=tuple(
            (
                what,
                seconds(statistics.median(per_round)),
                seconds(min(per_round)),
                f"{1000 * statistics.median(per_round) / BATCHES:.0f}",
                f"{ratios[what]:.2f}",
            )
            for what, per_round in walls.items()
        ),
        note="From the start of the stream to its end. After a loss this includes the restored snapshot.",
    )
    lag, write, size = (_middle_and_most(each) for each in (found.lags_s, found.notes_s, found.bytes_of_a_batch))
    journal = Table(
        title="Journal, for each batch",
        headings=("", "median", "95 % at most"),
        rows=(
            ("lag behind Spark's offset log, ms", *(f"{1000 * each:.0f}" for each in lag)),
            ("a write, ms", *(f"{1000 * each:.1f}" for each in write)),
            ("bytes", *(f"{each:.0f}" for each in size)),
        ),
    )
    more = (statistics.median(walls[REPLAYED]) - statistics.median(walls[FIRST_TIME])) / BATCHES
    targets = (
        # A separate query replays each batch: Spark repeats only the last batch of an offset log.
        at_most("replay: seconds that a batch takes more than the first time", 1.0, more),
        at_most("journal: a write / a batch", 0.05, write[0] * BATCHES / statistics.median(walls[FIRST_TIME])),
    )
    return Findings((batches, journal), targets, {})


def _middle_and_most(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the limit that 95 of 100 do not exceed."""
    return statistics.median(values), statistics.quantiles(values, n=20)[-1]


REPLAY = Section(
    name="replay",
    title="Replaying lost batches",
    method=(
        f"A query that drops duplicates writes Parquet files, in batches of {ROWS_OF_A_BATCH:,} new keys and "
        f"{PARTITIONS} partitions. After a savepoint it runs {BATCHES} batches, and its live directory is "
        "deleted. The next start replays them without output. Then the directory is deleted again, and a start "
        "without replay rolls the sink back and runs them again."
    ),
    measure=_measure,
)
