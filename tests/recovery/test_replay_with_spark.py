"""A lost live directory: the state is rebuilt by replaying batches as they were planned, and no sink is rolled back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import RestoreError
from dagster_ckpt.runtime import start as starting
from tests.support.log_lines import collecting
from tests.support.small_spark import lay_file, lose, small_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Orders:
    """Counts the orders of each shop; every batch writes the counts that changed."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.fed = spark, folder, 0
        self.batches: list[tuple[int, list[tuple[int, int]]]] = []
        (folder / "landing").mkdir()
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, files: int) -> None:
        for number in range(self.fed, self.fed + files):
            lay_file(self.folder / "landing", number, [{"shop": number % 3}, {"shop": 7}])
        self.fed += files

    def keep(self, frame: DataFrame, batch_id: int) -> None:
        self.batches.append((batch_id, sorted((row["shop"], row["count"]) for row in frame.collect())))

    def run(
        self, sink: str = "function", files_per_batch: int = 1, code_version: str | None = None, **options: Any
    ) -> list[str]:
        def query(spark: SparkSession) -> DataStreamWriter:
            rows = spark.readStream.schema("shop long").option("maxFilesPerTrigger", files_per_batch)
            orders = rows.json(f"{self.folder}/landing")
            if sink == "function":
                counts = orders.groupBy("shop").count().writeStream.outputMode("update").foreachBatch(self.keep)
            else:
                seen = orders.withColumn("file", F.input_file_name()).dropDuplicates(["shop"])
                counts = seen.writeStream.format("json").option("path", f"{self.folder}/out")
            return counts.trigger(availableNow=True)

        messages: list[str] = []
        with collecting(messages):
            config = CheckpointConfig(**options)
            given = {**self.places, "spark": self.spark, "checkpointing": config, "code_version": code_version}
            run_stream("orders", query, **given)
        return messages

    def savepoint(self) -> None:
        with Client(**self.places) as client:
            client.trigger_savepoint("orders", label=f"after-{self.fed}")

    def lose_the_directory(self) -> None:
        for live in (self.folder / "live/orders").glob("live-*"):
            lose(live)

    @property
    def log(self) -> dict[str, list[str]]:
        """The sink's log: the part files of each batch."""
        return {
            path.name: sorted(Path(json.loads(line)["path"]).name for line in path.read_text().splitlines()[1:])
            for path in (self.folder / "out/_spark_metadata").iterdir()
            if not path.name.startswith(".")
        }


@pytest.fixture
def orders(spark: SparkSession, tmp_path: Path) -> Orders:
    return Orders(spark, tmp_path)


def test_a_sink_that_cannot_be_rolled_back_gets_each_batch_once(orders: Orders) -> None:
    orders.feed(2)
    orders.run()
    orders.savepoint()
    # Beyond the ninth entry of the file source's log, which Spark compacts.
    orders.feed(11)
    orders.run()
    before = list(orders.batches)
    orders.lose_the_directory()
    orders.feed(1)

    # With this setting, Spark would divide the lost input into other batches.
    messages = orders.run(files_per_batch=5)

    assert [batch for batch, _ in before] == list(range(13))
    assert orders.batches[:13] == before
    # One more file, on the state of all those before it.
    assert orders.batches[13:] == [(13, [(1, 5), (7, 14)])]
    assert any("replayed 11 batches after batch 1, up to 12" in each for each in messages)
    assert not any("receives the rewound batches again" in each for each in messages)


@pytest.mark.thorough
def test_the_files_of_a_sink_stay_as_they_are(orders: Orders) -> None:
    orders.feed(2)
    orders.run("json")
    orders.savepoint()
    orders.feed(3)
    orders.run("json")
    before = orders.log
    orders.lose_the_directory()
    orders.feed(1)

    orders.run("json", files_per_batch=5)

    assert len(before) == 5
    assert {name: orders.log[name] for name in before} == before
    rows = [json.loads(line)["shop"] for part in (orders.folder / "out").glob("*.json") for line in part.open()]
    assert sorted(rows) == [0, 1, 2, 7]


@pytest.mark.thorough
def test_a_batch_that_its_sink_had_already_is_replayed_as_well(orders: Orders) -> None:
    """Killed between the commit of the sink and Spark's: the next start skips the batch, and reads nothing."""
    orders.feed(2)
    orders.run("json")
    orders.savepoint()
    orders.feed(3)
    orders.run("json")
    for commit in (orders.folder / "live" / "orders").glob("live-*/commits/*4*"):
        commit.unlink()
    orders.run("json")
    before = orders.log
    orders.lose_the_directory()
    orders.feed(1)

    messages = orders.run("json", files_per_batch=5)

    assert any("replayed 3 batches after batch 1, up to 4" in each for each in messages), messages
    assert {name: orders.log[name] for name in before} == before


@pytest.mark.parametrize(("sink", "goes_back"), [("json", True), ("function", False)])
def test_another_code_version_replays_only_where_a_sink_cannot_go_back(
    orders: Orders, sink: str, goes_back: bool
) -> None:
    """Its state would be of the new code, and the rows of the former one."""
    orders.feed(2)
    orders.run(sink, code_version="1")
    orders.savepoint()
    orders.feed(3)
    orders.run(sink, code_version="1")
    orders.lose_the_directory()

    messages = orders.run(sink, code_version="2")

    told = "the sinks go back instead of a replay" if goes_back else "lost batches are replayed, and their state may"
    [line] = [each for each in messages if told in each]
    assert "their rows are of code version 1, and this is 2" in line
    assert any("replayed 3 batches" in each for each in messages) is not goes_back


def test_the_preview_says_so_and_a_second_loss_is_replayed_too(orders: Orders) -> None:
    orders.feed(1)
    orders.run()
    orders.savepoint()
    orders.feed(2)
    orders.run()
    orders.lose_the_directory()

    with Client(**orders.places) as client:
        preview = client.preview_rewind("orders")
    assert "replay batches 1 to 2 as planned before, without output" in preview.plan.reason
    assert preview.batches == 0

    orders.run(files_per_batch=5)
    orders.lose_the_directory()
    orders.feed(1)
    orders.run(files_per_batch=5)

    assert [batch for batch, _ in orders.batches] == [0, 1, 2, 3]
    assert orders.batches[-1] == (3, [(0, 2), (7, 4)])


@pytest.mark.thorough(but="a replay that fails")
@pytest.mark.parametrize("why", ["the option", "the limit", "a replay that fails", "a plan of another batch"])
def test_otherwise_the_sink_is_rolled_back(orders: Orders, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.feed(1)
    orders.run("json")
    orders.savepoint()
    orders.feed(2)
    orders.run("json")
    orders.lose_the_directory()
    options = {"the option": {"max_replayed_batches": 0}, "the limit": {"max_replayed_batches": 1}}.get(why, {})
    if why == "a replay that fails":

        def fails(*_: Any, **__: Any) -> None:
            raise RestoreError("The batch could not be replayed: no disk.")

        monkeypatch.setattr(starting, "replay", fails)
    if why == "a plan of another batch":
        catalog = Catalog(orders.places["catalog"])
        with catalog.database.writing() as connection:
            connection.exec_driver_sql("UPDATE planned_batches SET follows = 'another' WHERE batch_id = 2")

    messages = orders.run("json", files_per_batch=5, **options)

    assert any("rolled back the sink" in each for each in messages)
    assert sorted(orders.log) == ["0", "1"]
    rows = [json.loads(line)["shop"] for name in orders.log["1"] for line in (orders.folder / "out" / name).open()]
    assert sorted(rows) == [1, 2]
