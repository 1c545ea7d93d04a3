"""Input files that no longer exist, and a start that would read them again: refused, and the output stays as it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.recovery.source_inputs import InputStatus
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.log_lines import collecting
from tests.support.small_spark import lay_file, lose, small_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


_OUT = {"numbers": "out", "copy": "copy"}


class Numbers:
    """Writes each number once; two files follow a savepoint, two later ones."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.landing, self.away = folder / "landing", folder / "away"
        for each in (self.landing, self.away):
            each.mkdir()
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, *numbers: int) -> None:
        for number in numbers:
            lay_file(self.landing, number, [{"n": number}, {"n": 100 + number}])

    def run(
        self,
        clean: str = "off",
        start_from: str = "latest",
        *,
        name: str = "numbers",
        deduplicates: bool = True,
        ends: bool = True,
        **options: Any,
    ) -> list[str]:
        def query(spark: SparkSession) -> DataStreamWriter:
            rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).option("cleanSource", clean)
            numbers = rows.json(str(self.landing))
            numbers = numbers.dropDuplicates(["n"]) if deduplicates else numbers
            writer = numbers.writeStream.format("json").option("path", f"{self.folder}/{_OUT[name]}")
            return writer.trigger(availableNow=True) if ends else writer

        messages: list[str] = []
        with collecting(messages):
            run_stream(
                name,
                query,
                **self.places,
                spark=self.spark,
                start_from=start_from,
                checkpointing=CheckpointConfig(**options),
            )
        return messages

    def prepare(self, **options: Any) -> None:
        self.feed(0, 1)
        self.run(**options)
        with Client(**self.places) as client:
            client.trigger_savepoint("numbers", label="sp")
        self.feed(2, 3)
        self.run(**options)
        self.before = self.rows

    def take_away(self, *numbers: int) -> None:
        for path in self._files(self.landing, *numbers):
            path.rename(self.away / path.name)

    def put_back(self) -> None:
        for path in self.away.iterdir():
            path.rename(self.landing / path.name)

    def _files(self, folder: Path, *numbers: int) -> list[Path]:
        return [path for path in folder.iterdir() if json.loads(path.read_text().splitlines()[0])["n"] in numbers]

    def lose_the_directory(self) -> None:
        for live in (self.folder / "live/numbers").glob("live-*"):
            lose(live)

    @property
    def rows(self) -> list[int]:
        return self.rows_in("numbers")

    def rows_in(self, name: str) -> list[int]:
        return sorted(
            row["n"] for row in self.spark.read.schema("n long").json(f"{self.folder}/{_OUT[name]}").collect()
        )


EVERYTHING = sorted(each for number in range(4) for each in (number, 100 + number))


@pytest.fixture
def numbers(spark: SparkSession, tmp_path: Path) -> Numbers:
    return Numbers(spark, tmp_path)


def test_a_rewind_is_refused_until_the_files_are_back(numbers: Numbers) -> None:
    numbers.prepare()
    numbers.take_away(0, 2)

    with Client(**numbers.places) as client:
        preview = client.preview_rewind("numbers", start_from="sp")
    with pytest.raises(RowsAtRiskError, match="1 of 2 files that are read again no longer exist: file:") as refused:
        numbers.run(start_from="sp")

    assert [each.effect for each in preview.sinks] == [SinkEffect.LOSE]
    assert [each.status for each in preview.inputs] == [InputStatus.GONE]
    assert "Put these files back" in str(refused.value)
    assert numbers.rows == numbers.before == EVERYTHING
    numbers.put_back()
    with Client(**numbers.places) as client:
        assert [each.effect for each in client.preview_rewind("numbers", start_from="sp").sinks] == [SinkEffect.EXACT]
    numbers.run(start_from="sp")
    assert numbers.rows == EVERYTHING


@pytest.mark.thorough
def test_a_loss_that_is_accepted_goes_back_without_them(numbers: Numbers) -> None:
    numbers.prepare()
    numbers.take_away(2)
    with Client(**numbers.places) as client:
        with pytest.raises(RowsAtRiskError, match="no longer exist"):
            client.request_start("numbers", start_from="sp")
        client.request_start("numbers", start_from=StartFrom("sp", accept_loss=True))

    numbers.run()

    assert numbers.rows == [each for each in EVERYTHING if each not in (2, 102)]


@pytest.mark.thorough
def test_a_lost_directory_is_not_rebuilt_without_its_input(numbers: Numbers) -> None:
    numbers.prepare()
    numbers.take_away(3)
    numbers.lose_the_directory()

    with Client(**numbers.places) as client:
        assert client.preview_rewind("numbers").inputs[0].status is InputStatus.GONE
    with pytest.raises(RowsAtRiskError, match="1 of 2 files that are read again no longer exist"):
        numbers.run()

    assert numbers.rows == EVERYTHING
    numbers.put_back()
    numbers.feed(4)
    messages = numbers.run()
    assert any("replayed 2 batches" in each for each in messages)
    assert numbers.rows == sorted([*EVERYTHING, 4, 104])


def test_a_source_that_removes_its_files_is_not_read_again(numbers: Numbers) -> None:
    numbers.prepare(clean="delete", max_replayed_batches=0)
    numbers.lose_the_directory()

    with pytest.raises(RowsAtRiskError, match="1 of 2 files that are read again no longer exist: file:"):
        numbers.run(clean="delete", max_replayed_batches=0)

    assert numbers.rows == EVERYTHING


@pytest.mark.thorough
def test_input_that_a_person_removed_is_missed_though_nothing_is_replayed(numbers: Numbers) -> None:
    numbers.prepare(max_replayed_batches=0)
    numbers.take_away(2)
    numbers.lose_the_directory()

    with pytest.raises(RowsAtRiskError, match="1 of 2 files that are read again no longer exist: file:"):
        numbers.run(max_replayed_batches=0)

    assert numbers.rows == EVERYTHING
    numbers.put_back()
    numbers.run(max_replayed_batches=0)
    assert numbers.rows == EVERYTHING


@pytest.mark.thorough
def test_a_recovery_goes_to_a_newer_point_that_needs_no_input_that_is_gone(numbers: Numbers) -> None:
    options: dict[str, Any] = {"prefer_checkpoint_for_recovery": True, "cleanup": "RETAIN_ON_CANCELLATION"}
    numbers.feed(0, 1)
    with Client(**numbers.places) as client, ThreadPoolExecutor() as pool:
        run = pool.submit(numbers.run, ends=False, **options)
        while not (run.done() or any((numbers.folder / "live").glob("numbers/live-*/commits/1"))):
            time.sleep(0.05)
        client.trigger_checkpoint("numbers")
        client.stop("numbers", savepoint=False)
        run.result()
        numbers.feed(2)
        numbers.run(**options)
        client.trigger_savepoint("numbers", label="newer")
    numbers.feed(3)
    numbers.run(**options)
    numbers.take_away(2)
    numbers.lose_the_directory()

    with Client(**numbers.places, checkpointing={"numbers": CheckpointConfig(**options)}) as client:
        ahead = client.preview_rewind("numbers")
    messages = numbers.run(**options)

    assert "its input is gone. Source 0: 1 of 2 files" in ahead.plan.reason
    assert (ahead.plan.snapshot and ahead.plan.snapshot.label) == "newer"
    assert any("its input is gone" in each for each in messages)
    assert numbers.rows == EVERYTHING
    numbers.feed(4)
    numbers.run(**options)
    assert numbers.rows == sorted([*EVERYTHING, 4, 104])


@pytest.mark.thorough
def test_a_fork_waits_for_the_files_that_it_would_lack(numbers: Numbers) -> None:
    numbers.prepare()
    numbers.take_away(2)

    with Client(**numbers.places) as client:
        with pytest.raises(RowsAtRiskError, match="1 of 2 files that are read again no longer exist"):
            client.fork("numbers", into="copy", start_from="sp")
        numbers.put_back()
        client.fork("numbers", into="copy", start_from="sp")
    numbers.run(name="copy")

    assert numbers.rows_in("copy") == [2, 3, 102, 103]
    assert numbers.rows == EVERYTHING


@pytest.mark.thorough
def test_a_file_of_a_kept_batch_that_is_put_back_with_another_time_is_not_read_twice(numbers: Numbers) -> None:
    numbers.prepare()
    for path in numbers._files(numbers.landing, 0, 2):
        os.utime(path)

    with pytest.raises(RowsAtRiskError, match="1 files that were read before were put back") as refused:
        numbers.run(start_from="sp")

    assert "Remove these files from the folder" in str(refused.value)
    assert numbers.rows == EVERYTHING
    numbers.take_away(0)
    messages = numbers.run(start_from="sp")
    assert any("1 of 2 files that are read again have another modification time" in each for each in messages)
    assert numbers.rows == EVERYTHING


@pytest.mark.thorough
def test_spark_reads_such_a_file_twice(numbers: Numbers) -> None:
    numbers.prepare(deduplicates=False)
    for path in numbers._files(numbers.landing, 0, 2):
        os.utime(path)
    with Client(**numbers.places) as client:
        client.request_start("numbers", start_from=StartFrom("sp", accept_loss=True))

    numbers.run(deduplicates=False)

    assert numbers.rows == sorted([*EVERYTHING, 0, 100])


def test_a_replay_that_reads_other_rows_stops_and_says_so(numbers: Numbers) -> None:
    numbers.prepare()
    numbers.lose_the_directory()
    (changed,) = numbers._files(numbers.landing, 3)
    changed.write_text(json.dumps({"n": 3}) + "\n")

    messages = numbers.run()

    assert any("it read 2 rows when it ran first, and 1 now" in each for each in messages)
    assert any("rolled back the sink" in each for each in messages)
    assert numbers.rows == [each for each in EVERYTHING if each != 103]


@pytest.mark.thorough
def test_a_batch_in_flight_needs_its_files(numbers: Numbers) -> None:
    numbers.prepare()
    (live,) = (numbers.folder / "live/numbers").glob("live-*")
    for log in (live / "commits", numbers.folder / "out/_spark_metadata"):
        for name in ("3", ".3.crc"):
            (log / name).unlink()
    numbers.take_away(3)

    with pytest.raises(RowsAtRiskError, match="1 of 1 files that are read again no longer exist"):
        numbers.run()

    numbers.put_back()
    numbers.run()
    assert numbers.rows == EVERYTHING
