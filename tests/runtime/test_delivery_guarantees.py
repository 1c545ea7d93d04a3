"""EXACTLY_ONCE and AT_LEAST_ONCE, counted: a process is killed, JVM and all, and resumes from its snapshots.

After the kill more files come, and batches are cut otherwise: what a restore leaves open turns out differently then.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from delivery_program import (
    EXACT_CALLS,
    EXACT_FILES,
    FIRST_FILES,
    LEAST_CALLS,
    ROWS,
    SHOPS,
    STREAMS,
    KillPoint,
    Shops,
    run,
)
from pyspark.sql import SparkSession

from dagster_ckpt.recovery.plan import RecoveryKind
from tests.support.small_spark import small_spark

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
# The live directories are destroyed, but for this one, where Spark goes on in them.
KEPT = KillPoint.SNAPSHOTTED
FILES = FIRST_FILES + 4
EVERY_SALE = Counter({str(shop): FILES * ROWS // SHOPS for shop in range(SHOPS)})


@dataclass(frozen=True)
class Trial:
    """A program that was killed at a point, and then went on to the end of its input.

    Attributes:
        point: Where it was killed.
        recovered: By stream, what the start after the kill began with.
        before: By stream, how many times `foreachBatch` had been called when it was killed.
        came_out: By stream, what `foreachBatch` was given, before and after.
        windows: What the file sink shows.
    """

    point: KillPoint
    recovered: dict[str, RecoveryKind]
    before: dict[str, int]
    came_out: dict[str, list[dict[str, Any]]]
    windows: Counter[tuple[int, int, int]]

    def state(self, stream: str) -> Counter[str]:
        """The newest count of each shop."""
        newest: Counter[str] = Counter()
        for line in self.came_out[stream]:
            newest = Counter({**newest, **line["counts"]})
        return newest

    def delivered(self, stream: str) -> Counter[str]:
        """How many sales of each shop came out, counting those again that came out again."""
        added: Counter[str] = Counter()
        states: dict[int, dict[str, int]] = {}
        for line in self.came_out[stream]:
            before = states.get(max((batch for batch in states if batch < line["batch"]), default=-1), {})
            added.update({shop: count - before.get(shop, 0) for shop, count in line["counts"].items()})
            states[line["batch"]] = before | line["counts"]
        return added

    def repeated(self, stream: str) -> list[tuple[dict[str, int], dict[str, int]]]:
        """What batches brought whose rows came out before the kill, and again after it."""
        lines, before = self.came_out[stream], self.before[stream]
        first = {line["batch"]: line["counts"] for line in lines[:before]}
        return [(first[line["batch"]], line["counts"]) for line in lines[before:] if line["batch"] in first]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    # The partitions that the state of the killed programs has.
    with small_spark({"spark.sql.shuffle.partitions": "1"}) as session:
        yield session


def kill_at(shops: Shops, point: KillPoint) -> None:
    """Run the program until it says that it is there, and kill it and its JVM with SIGKILL."""
    program = Path(__file__).with_name("delivery_program.py")
    log = shops.folder / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, str(program), str(shops.folder), point.value],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not shops.ready.exists():
            assert process.poll() is None, f"it ended by itself:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"it did not get there:\n{log.read_text()}"
            time.sleep(0.05)
    finally:
        # Nothing is left where it failed by itself.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module", params=KillPoint)
def trial(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trial:
    point: KillPoint = request.param
    shops = Shops(tmp_path_factory.mktemp(point.value))
    shops.feed(0, FIRST_FILES)
    kill_at(shops, point)
    before = {name: len(shops.came_out(name)) for name in STREAMS}
    if point is not KEPT:
        shutil.rmtree(shops.folder / "live")
    shops.gate.unlink(missing_ok=True)
    laid = FIRST_FILES if point is KillPoint.SNAPSHOTTED else FIRST_FILES + 1
    shops.feed(laid, FILES - laid)
    catalog = shops.catalog()
    run(shops, catalog, spark, lambda name: shops.writer(spark, name, files_a_batch=2).trigger(availableNow=True))
    windows = spark.read.parquet(str(shops.folder / EXACT_FILES)).collect()
    return Trial(
        point,
        {name: RecoveryKind((catalog.executions.latest(name).recovery or {})["kind"]) for name in STREAMS},
        before,
        {name: shops.came_out(name) for name in STREAMS},
        Counter((row["hour"], row["shop"], row["count"]) for row in windows),
    )


@pytest.mark.thorough(but="unregistered")
def test_it_went_on_from_a_snapshot_where_the_live_directory_was_gone(trial: Trial) -> None:
    # Batches after the snapshot are replayed, if there are any.
    expected = {RecoveryKind.RESUME} if trial.point is KEPT else {RecoveryKind.RESTORE, RecoveryKind.REPLAY}
    assert set(trial.recovered) == set(STREAMS)
    assert set(trial.recovered.values()) <= expected


@pytest.mark.thorough(but="unregistered*")
def test_exactly_once_counts_every_sale_once_in_the_output_of_the_file_sink(trial: Trial) -> None:
    # The watermark never closes the last hour.
    assert trial.windows == Counter((hour, shop, ROWS // SHOPS) for hour in range(FILES - 1) for shop in range(SHOPS))


@pytest.mark.thorough(but="unregistered*")
@pytest.mark.parametrize("stream", [EXACT_CALLS, LEAST_CALLS])
def test_either_mode_counts_every_sale_once_in_the_state(trial: Trial, stream: str) -> None:
    assert trial.state(stream) == EVERY_SALE


@pytest.mark.thorough(but="unregistered*")
@pytest.mark.parametrize("stream", [EXACT_CALLS, LEAST_CALLS])
def test_either_mode_brings_every_sale_to_the_sink(trial: Trial, stream: str) -> None:
    assert trial.delivered(stream) >= EVERY_SALE


@pytest.mark.thorough(but="unregistered*")
def test_exactly_once_unaligned_repeats_a_batch_as_it_was_so_that_a_sink_can_pass_over_it(trial: Trial) -> None:
    repeated = trial.repeated(EXACT_CALLS)
    # The snapshot that the catalog did not list yet is whole: the start registers it, and repeats nothing.
    assert bool(repeated) is (trial.point is KillPoint.WRITTEN)
    assert all(first == again for first, again in repeated)


@pytest.mark.thorough(but="unregistered*")
def test_at_least_once_brings_sales_twice_where_a_batch_had_come_out_and_was_in_no_snapshot(trial: Trial) -> None:
    repeated = trial.repeated(LEAST_CALLS)
    is_repeated = trial.point is KillPoint.WRITTEN
    assert bool(repeated) is is_repeated
    assert (trial.delivered(LEAST_CALLS) > EVERY_SALE) is is_repeated
    # The batch was planned again, so no sink could know it by its number.
    assert all(first != again for first, again in repeated)
