"""What exactly-once costs a query that writes to Kafka."""

from __future__ import annotations

import statistics

from benchmarks.bench import Bench, Findings, Section, measured_by
from benchmarks.kafka_sinks import (
    BATCHES,
    BYTES_OF_A_VALUE,
    PARTITIONS,
    ROWS_OF_A_BATCH,
    SINKS,
    WARM_UP_BATCHES,
    Window,
)
from benchmarks.measuring import paired_ratio
from benchmarks.results import Table, at_least


def _measure(bench: Bench) -> Findings:
    folder = bench.repetition(0)
    windows = [Window(**window) for window in measured_by("kafka_sinks", folder, bench.repetitions)]
    speeds = {
        sink.name: [window.rows / window.trigger_s for window in windows if window.sink == sink.name] for sink in SINKS
    }
    spark, *_ = speeds
    ratios = {name: paired_ratio(per_round, speeds[spark]) for name, per_round in speeds.items()}
    table = Table(
        title=f"{ROWS_OF_A_BATCH:,} rows a batch into one topic ({bench.repetitions} rounds)",
        headings=("sink", "rows per second", "ms per batch", "to Spark's sink"),
        rows=tuple(
            (
                name,
                f"{statistics.median(per_round):,.0f}",
                f"{1000 * ROWS_OF_A_BATCH / statistics.median(per_round):.0f}",
                f"{ratios[name]:.2f}",
            )
            for name, per_round in speeds.items()
        ),
    )
    one_writer = SINKS[1].name
    target = at_least("Kafka: rows per second, exactly once / Spark's sink at least once", 0.7, ratios[one_writer])
    return Findings((table,), (target,), {})


KAFKA = Section(
    name="kafka",
    title="Exactly once into Kafka",
    method=(
        f"A query writes {ROWS_OF_A_BATCH:,} rows a batch of {BYTES_OF_A_VALUE} bytes in {PARTITIONS} partitions "
        "into a topic of a broker on the same machine. The sinks take turns in one session; a window is "
        f"{BATCHES} batches after {WARM_UP_BATCHES} to warm up. Spark's own sink waits for all replicas."
    ),
    measure=_measure,
)
