"""No failure of code, source, sink or environment counts as damage of a healthy directory; each real damage does.

`make chaos` tries them all, `make test-all` a few; `tests/recovery/test_damage.py` has the rule.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import CkptError
from tests.chaos.blows import LIVE_FILES
from tests.chaos.failures import Failure, failures
from tests.chaos.operators import CODES, OPERATORS, STORES, Row, expected, lay, writer
from tests.chaos.program import SETTINGS
from tests.support.file_damage import DAMAGES, checksum_of
from tests.support.small_spark import lose, small_spark, unload_stores

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3_600)]

STREAM = "healthy"
ALL = list(failures())
# Some of each kind.
FEW = [each for each in ALL if each.name.startswith(("the sink says with", "a task says", "code", "schema", "a file"))]
FEW = Random(35).sample(FEW, 6) + [each for each in ALL if each.name in ("code: swapped", "division by zero")]
PLACES = [("append", "heap"), ("distinct", "heap"), ("windows", "changelog"), ("join", "rocksdb")]
PLACES.append(("sessions", list(STORES)[-1]))


class Healthy:
    """A stream that has run for a while, with savepoints to go back to by mistake."""

    def __init__(self, spark: SparkSession, root: Path, operator: str, store: str) -> None:
        self.spark, self.root, self.operator, self.store = spark, root, operator, store
        self.files = 0
        self.places = {
            "catalog": f"sqlite:///{root}/catalog.db",
            "storage": f"file://{root}/snapshots",
            "live_root": f"{root}/live",
        }
        root.mkdir(parents=True)
        for number in range(2):
            lay(root, "other", number)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            for side in ("left", "right"):
                lay(self.root, side, number)
        self.files += files

    def run(self, described: Any, *, tries: int = 1) -> None:
        try:
            run_stream(
                STREAM,
                lambda spark: described(spark).trigger(availableNow=True),
                **self.places,
                spark=self.spark,
                state_backend=STORES[self.store],
                checkpointing=CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION", num_retained=3),
                restart_strategy=RestartStrategies.fixed_delay_restart(tries, 1),
            )
        finally:
            # Also of a run that has failed: its stores would upload files into what stands there next.
            unload_stores(self.spark)

    def with_batches_saved(self, failure: Failure | None = None) -> Any:
        """The query, into a function that writes each batch once, with a failure of it."""
        failed = failure or Failure("none")

        def source(spark: SparkSession, folder: str, format_: str) -> DataFrame:
            options = {"maxFilesPerTrigger": "1", "mode": "FAILFAST", **failed.options}
            reader = spark.readStream.format(format_).schema(failed.schema or "id long, at long").options(**options)
            rows = reader.load(str(self.root / "in" / folder)).selectExpr("id", "timestamp_seconds(at) AS at")
            if failed.columns is None:
                return rows
            # Before the query's own operators, which stay as they are. An optimizer removes what changes no value.
            is_long = F.expr(f"length(CAST(({failed.columns}) AS STRING)) > 1000000")
            return rows.withColumn("id", F.when(is_long, F.lit(0)).otherwise(F.col("id")))

        def save(rows: DataFrame, batch: int) -> None:
            if failed.save is not None:
                failed.save(rows)
            rows.write.mode("overwrite").parquet(str(self.root / f"out/batch={batch}"))

        def described(spark: SparkSession) -> DataStreamWriter:
            left = source(spark, failed.code.left, failed.source_format or "json")
            right = source(spark, failed.code.right, "json")
            return OPERATORS[self.operator](left, right).writeStream.foreachBatch(save)

        return described

    def into_files(self, spark: SparkSession) -> DataStreamWriter:
        """The query, into Parquet files."""
        return writer(spark, self.root, self.operator, CODES["right"], pattern=False)

    def savepoint(self, label: str) -> None:
        with Client(**self.places) as client:
            client.trigger_savepoint(STREAM, label=label)

    def position(self) -> tuple[str | None, list[str], list[str]]:
        """Its live directory, its snapshots, and the failures that recoveries have counted."""
        catalog = Catalog(self.places["catalog"])
        try:
            return (
                catalog.streams.get(STREAM).live_directory,
                sorted(each.snapshot_id for each in catalog.snapshots.completed(STREAM)),
                [f"{each.error} at {each.point}" for each in catalog.recoveries.of_stream(STREAM)],
            )
        finally:
            catalog.close()

    @property
    def live(self) -> Path:
        return Path(self.position()[0] or "")

    def output(self) -> dict[str, bytes]:
        files = sorted((self.root / "out").rglob("*"))
        return {str(path): path.read_bytes() for path in files if path.suffix == ".parquet"}

    def rows(self) -> Counter[Row]:
        read = self.spark.read.option("recursiveFileLookup", "true").parquet(str(self.root / "out"))
        return Counter(tuple(row) for row in read.select(*read.columns).collect())


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({**SETTINGS, "spark.sql.ansi.enabled": "true"}) as session:
        yield session


def healthy(spark: SparkSession, root: Path, operator: str, store: str) -> Healthy:
    stream = Healthy(spark, root, operator, store)
    for label in ("first", "second"):
        stream.feed(2)
        stream.run(stream.with_batches_saved())
        stream.savepoint(label)
    stream.feed(2)
    stream.run(stream.with_batches_saved())
    return stream


def test_there_are_two_hundred_failures() -> None:
    assert len({failure.name for failure in ALL}) == len(ALL) >= 200


def survive(spark: SparkSession, root: Path, place: tuple[str, str], failed: list[Failure]) -> dict[str, str]:
    """Give a stream failures, each twice. Returns what was taken for damage, or changed anything, with how it ended."""
    false_damage: dict[str, str] = {}
    stream: Healthy | None = None
    for number, failure in enumerate(failed):
        if stream is None:
            stream = healthy(spark, root / str(number), *place)
            position, has_input = stream.position(), False
        if not has_input:
            # A batch that waits to be run.
            stream.feed(1)
            has_input = True
        output = stream.output()
        ended = given(stream, failure)
        if ended is None or stream.position() != position or stream.output() != output:
            false_damage[failure.name] = f"{ended or 'it did not fail'}; {stream.position()}"
            print(f"{failure.name}: {false_damage[failure.name]}", flush=True)
            # The next ones get another stream.
            stream = None
        elif number % 4 == 3:
            go_on(stream, 0)
            has_input = False
    if stream is not None:
        # Windows are closed.
        go_on(stream, 2)
        rows, wanted = stream.rows(), expected(stream.operator, stream.files)
        if rows != wanted:
            false_damage["at the end"] = f"lost {wanted - rows}, too many {rows - wanted}"
        assert stream.position() == position
    return false_damage


def given(stream: Healthy, failure: Failure) -> str | None:
    """Run a stream with a failure. Returns how it ended; None if it did not fail."""
    with failure.around(stream.root) if failure.around is not None else nullcontext():
        try:
            stream.run(stream.with_batches_saved(failure))
        except Exception as error:  # noqa: BLE001 - anything but a false verdict is right
            return f"{type(error).__name__}: {error}"[:400]
    return None


def go_on(stream: Healthy, files: int) -> None:
    for _ in range(max(files, 1)):
        stream.feed(min(files, 1))
        # Spark 3.5 may still upload a snapshot of the state for the query before, while this one reads it.
        stream.run(stream.with_batches_saved(), tries=3)


@pytest.mark.thorough
def test_a_failure_is_not_damage(spark: SparkSession, tmp_path: Path) -> None:
    none(survive(spark, tmp_path, ("distinct", "changelog"), FEW))


@pytest.mark.chaos
@pytest.mark.parametrize("place", range(len(PLACES)), ids=[" on ".join(place) for place in PLACES])
def test_no_failure_is_damage(spark: SparkSession, tmp_path: Path, place: int) -> None:
    none(survive(spark, tmp_path, PLACES[place], ALL[place :: len(PLACES)]))


@pytest.mark.chaos
@pytest.mark.parametrize(("operator", "store"), PLACES)
def test_every_damage_is_found(spark: SparkSession, tmp_path: Path, operator: str, store: str) -> None:
    """The stream comes back by itself, row for row."""
    stream = Healthy(spark, tmp_path / "stream", operator, store)
    for label in ("first", "second"):
        stream.feed(3)
        stream.run(stream.into_files)
        stream.savepoint(label)
    stream.feed(2)
    stream.run(stream.into_files)
    stream.feed(2)
    shutil.copytree(stream.root, tmp_path / "kept")
    missed: dict[str, str] = {}
    for kind, find in LIVE_FILES.items():
        for damage, strike in DAMAGES.items():
            files = [path for path in find(stream.live) if path.is_file() and path.stat().st_size > 0]
            for path in files[-1:]:
                if damage != "flip":
                    checksum_of(path).unlink(missing_ok=True)
                strike(path)
                found = come_back(stream)
                if found is not None:
                    missed[f"{damage}: {kind} {path.relative_to(stream.root)}"] = found[:500]
                    print(f"{damage}: {kind} {path.relative_to(stream.root)}: {found}", flush=True)
                restore(stream.root, tmp_path / "kept")
    none(missed)


def none(found: dict[str, str]) -> None:
    if found:
        pytest.fail(f"{len(found)}:\n" + "\n".join(f"- {name}: {what}" for name, what in found.items()), pytrace=False)


def restore(root: Path, kept: Path) -> None:
    lose(root)
    shutil.copytree(kept, root)


def come_back(stream: Healthy) -> str | None:
    """Start a stream until it works, as a supervisor does. Returns what is wrong at the end, if anything is."""
    ends: list[str] = []
    for _ in range(5):
        try:
            stream.run(stream.into_files, tries=5)
        except CkptError as error:
            ends.append(f"{type(error).__name__}: {error}")
            continue
        out = stream.spark.read.parquet(str(stream.root / "out"))
        rows, wanted = Counter(tuple(row) for row in out.collect()), expected(stream.operator, stream.files)
        return None if rows == wanted else f"lost {wanted - rows}, too many {rows - wanted}"
    return ends[-1]
