"""A sink of a user's own: the example of docs/sinks.md with real Spark, and what becomes of registered kinds."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt import Client, register_sink, run_stream
from dagster_ckpt.errors import OptionTypeError, SharedSinkError, SinkRollbackError, StorageAccessError
from dagster_ckpt.flink.program import StreamExecution
from dagster_ckpt.sinks import registry
from dagster_ckpt.sinks.batch_in_flight import can_replay_a_batch
from dagster_ckpt.sinks.registry import described_sink, forecast, sink_of
from dagster_ckpt.sinks.sink import OnRepeat, Replay, RollBack, Sink, SinkEffect, newest_batch, roll_back
from dagster_ckpt.sinks.table import TablePlan, TableSink
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import lay_file, lose, small_spark

PAGE = Path(__file__).parents[2] / "docs/sinks.md"


@pytest.fixture(autouse=True)
def _only_registered_here() -> Iterator[None]:
    before = list(registry._registered)
    yield
    registry._registered[:] = before


@pytest.fixture
def example(tmp_path: Path) -> ModuleType:
    """The module of the page."""
    ((name, code),) = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / f"{name}.py").write_text(code)
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Sales:
    """A stream into an SQLite database, as the page describes it: each input file is one sale."""

    def __init__(self, spark: SparkSession, root: Path, example: ModuleType) -> None:
        self.spark, self.root, self.example = spark, root, example
        self.place = f"sqlite:{root}/sales.db"
        self.fed = 0
        (root / "landing").mkdir()

    def feed(self, files: int) -> None:
        for number in range(self.fed, self.fed + files):
            lay_file(self.root / "landing", number, [{"shop": number, "amount": 1}])
        self.fed += files

    def run(self, start_from: str = "latest", *, files_per_batch: int = 1, stream_id: str = "sales") -> StreamExecution:
        def sales(session: SparkSession) -> Any:
            rows = session.readStream.schema("shop long, amount long").option("maxFilesPerTrigger", files_per_batch)
            counts = rows.json(f"{self.root}/landing").groupBy("shop").agg({"amount": "sum"})
            named = counts.withColumnRenamed("sum(amount)", "amount").writeStream.outputMode("update")
            saved = named.foreachBatch(self.example.save_to(self.place)).option("path", self.place)
            return saved.trigger(availableNow=True)

        return run_stream(
            stream_id,
            sales,
            catalog=f"sqlite:///{self.root}/catalog.db",
            storage=f"file://{self.root}/snapshots",
            live_root=f"{self.root}/live",
            spark=self.spark,
            start_from=StartFrom(start_from, discard_state=start_from == "empty"),
        )

    def savepoint(self) -> None:
        """Take a savepoint of the stopped stream."""
        folder = self.root
        with Client(
            catalog=f"sqlite:///{folder}/catalog.db", storage=f"file://{folder}/snapshots", live_root=f"{folder}/live"
        ) as client:
            client.trigger_savepoint("sales")

    def rows(self) -> list[tuple[int, int]]:
        with sqlite3.connect(self.root / "sales.db") as connection:
            return connection.execute("SELECT shop, amount FROM rows ORDER BY shop").fetchall()

    def batches(self) -> int:
        with sqlite3.connect(self.root / "sales.db") as connection:
            return int(connection.execute("SELECT count(DISTINCT batch) FROM rows").fetchone()[0])


@pytest.fixture
def sales(spark: SparkSession, tmp_path: Path, example: ModuleType) -> Sales:
    return Sales(spark, tmp_path, example)


@pytest.mark.thorough(but="lost directory")
@pytest.mark.spark
@pytest.mark.parametrize("how", ["rewound", "lost directory", "from nothing"])
def test_the_example_shows_each_row_once_wherever_the_stream_goes_back_to(sales: Sales, how: str) -> None:
    sales.feed(3)
    sales.run()
    sales.savepoint()
    sales.feed(3)
    sales.run()
    assert sales.rows() == [(shop, 1) for shop in range(6)]

    # Cut otherwise than the first time: a batch number now stands for other rows.
    if how == "rewound":
        sales.run("batch-1", files_per_batch=3)
    elif how == "lost directory":
        for live in (sales.root / "live/sales").glob("live-*"):
            lose(live)
        sales.run(files_per_batch=3)
    else:
        sales.run("empty", files_per_batch=4)

    assert sales.rows() == [(shop, 1) for shop in range(6)]
    # A lost directory costs the state only: its batches are replayed without the sink.
    assert (sales.batches() == 6) is (how == "lost directory")


@pytest.mark.spark
def test_a_second_stream_is_refused_the_same_database(sales: Sales) -> None:
    sales.feed(2)
    sales.run()

    with pytest.raises(SharedSinkError, match=r"sales\.db\]: Not started: another stream of this catalog writes there"):
        sales.run(stream_id="other")

    assert sales.rows() == [(0, 1), (1, 1)]


def test_the_example_is_known_by_its_place(example: ModuleType, tmp_path: Path) -> None:
    place = f"sqlite:{tmp_path}/sales.db"
    name = f"ForeachBatchSink[{place}]"
    with example.connect(place) as connection:
        connection.executemany("INSERT INTO rows VALUES (?, 0, 1)", [(batch,) for batch in range(5)])

    sink = described_sink(NamedOutput("foreachbatch", place))

    assert sink is not None
    assert (type(sink), sink.name, sink.place) == (example.SqliteRows, name, place)
    assert can_replay_a_batch([name])
    assert not can_replay_a_batch(["ForeachBatchSink", "ForeachBatchSink[/elsewhere]"])
    told = forecast(name, Replay(2, "a query"))
    assert (told.effect, told.reason) == (
        SinkEffect.EXACT,
        "The rows of later batches are deleted: it then holds no batch of this stream after 2.",
    )
    by_hand = forecast(name, Replay(2, "a query", roll_back_tables=False))
    assert by_hand.effect is SinkEffect.IRREVERSIBLE
    assert by_hand.advice == "Run: DELETE FROM rows WHERE batch > 2. Then start again."
    sink.roll_back(RollBack(2), nullcontext)
    assert sink.last_batch(None) == 2
    assert forecast(name, Replay(2, "a query")).reason == "The table holds no batch of this stream after 2."


class Broken(Sink):
    rolls_back = True

    @classmethod
    def of(cls, name: str) -> Broken | None:
        return cls(name, "db") if name == "ForeachBatchSink[db]" else None

    def last_batch(self, query_id: str | None) -> int | None:
        raise ConnectionError("the database is down")

    def roll_back(self, to: RollBack, still_mine: Any) -> None:
        raise ConnectionError("the database is down")


class BrokenTable(TableSink):
    @classmethod
    def of(cls, name: str) -> BrokenTable | None:
        return cls(name, "db") if name == "ForeachBatchSink[db]" else None

    def last_batch(self, query_id: str | None) -> int | None:
        raise ConnectionError("the database is down")

    def plan(self, to: RollBack) -> TablePlan | None:
        raise ConnectionError("the database is down")


@pytest.mark.parametrize("kind", [Broken, BrokenTable])
def test_an_exception_of_a_users_sink_refuses_the_start_and_says_which_sink_it_was(kind: type[Sink]) -> None:
    register_sink(kind)
    sink = sink_of("ForeachBatchSink[db]")

    told = forecast(sink.name, Replay(2, "a query"))

    assert told.effect is SinkEffect.UNREACHABLE
    assert "the database is down" in told.reason
    with pytest.raises(StorageAccessError, match=r"ForeachBatchSink\[db\].*the database is down"):
        newest_batch(sink, None)
    with pytest.raises(SinkRollbackError, match=r"ForeachBatchSink\[db\].*batch 2.*the database is down"):
        roll_back(sink, RollBack(2), nullcontext)


def test_the_kind_registered_last_is_asked_first_and_a_reloaded_one_replaces_itself() -> None:
    class Files(Sink):
        on_repeat = OnRepeat.REPEATS

        @classmethod
        def of(cls, name: str) -> Files | None:
            return cls(name) if name.startswith("FileSink[") else None

    before = len(registry._registered)
    register_sink(Broken)
    assert register_sink(Files) is Files
    register_sink(Files)

    assert type(sink_of("FileSink[/out]")) is Files
    assert len(registry._registered) == before + 2


@pytest.mark.parametrize("kind", ["SqliteRows", Sink("a sink"), DataFrame])
def test_only_kinds_of_sinks_are_registered(kind: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"subclass of dagster_ckpt\.sinks\.sink\.Sink"):
        register_sink(kind)
