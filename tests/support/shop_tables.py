"""Streams into real tables: the query, its losses, the scenarios of every table format, and how a test plays them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, run_stream
from dagster_ckpt.spark.query.output import table_of
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import lay_file, lose
from tests.support.thorough import either

ROOT = Path(__file__).parents[2]
_MARK = "TOLD "
# For all scenarios of a program, on a busy machine. The first test of a module waits for them.
PLAY_S = 1500.0


class Shops:
    """Each file names a new shop and the one before: the table gets each shop once, if the state is whole."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.stream = spark, folder, "shops"
        (folder / "landing").mkdir(parents=True, exist_ok=True)
        # Those of another process too.
        self.fed = len(list((folder / "landing").glob("[0-9]*.json")))
        self.places: dict[str, Any] = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def writer(self, spark: SparkSession, files_per_batch: int) -> DataStreamWriter:
        """The query, with its table."""
        raise NotImplementedError

    def shops(self, spark: SparkSession, files_per_batch: int) -> DataFrame:
        rows = spark.readStream.schema("shop long").option("maxFilesPerTrigger", files_per_batch)
        return rows.json(f"{self.folder}/landing").dropDuplicates(["shop"])

    def feed(self, files: int) -> None:
        for number in range(self.fed, self.fed + files):
            lay_file(self.folder / "landing", number, [{"shop": number}, {"shop": max(0, number - 1)}])
        self.fed += files

    def run(
        self,
        start_from: str = "latest",
        *,
        files_per_batch: int = 1,
        roll_back_tables: bool = True,
        max_replayed_batches: int = 100,
        new_query_id: bool = False,
    ) -> None:
        run_stream(
            self.stream,
            lambda spark: self.writer(spark, files_per_batch),
            **self.places,
            spark=self.spark,
            start_from=StartFrom(start_from, discard_state=start_from == "empty", new_query_id=new_query_id),
            checkpointing=CheckpointConfig(
                roll_back_tables=roll_back_tables, max_replayed_batches=max_replayed_batches
            ),
        )

    def run_plainly(self, checkpoint: str) -> None:
        """Without this package."""
        writer = self.writer(self.spark, 1).option("checkpointLocation", f"{self.folder}/{checkpoint}")
        table = table_of(writer)
        query = writer.start() if table is None else writer.toTable(table)
        query.awaitTermination()

    def savepoint(self, label: str) -> None:
        with Client(**self.places) as client:
            client.trigger_savepoint(self.stream, label=label)

    def lose_the_directory(self) -> None:
        for live in (self.folder / "live" / self.stream).glob("live-*"):
            lose(live)

    def lose_the_last_commit(self, *, state_too: bool) -> None:
        """As if the query had been killed after the table had the batch, and before its commit."""
        (live,) = (self.folder / "live" / self.stream).glob("live-*")
        newest = max(int(path.name) for path in (live / "commits").iterdir() if path.name.isdecimal())
        for path in (live / "commits" / str(newest), live / "commits" / f".{newest}.crc"):
            path.unlink(missing_ok=True)
        if state_too:
            for path in [*(live / "state").rglob(f"{newest + 1}.delta"), *(live / "state").rglob(f"{newest + 1}.zip")]:
                path.unlink()


def lost_directory(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.feed(3)
    shops.run()
    shops.lose_the_directory()
    # Cut otherwise than the first time: a batch number now stands for other rows.
    shops.run(files_per_batch=3, max_replayed_batches=0)


def replayed(shops: Shops) -> None:
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.feed(3)
    shops.run()
    # The table keeps the batches that it has under the first query id, although they are undone.
    shops.run("three", files_per_batch=2)
    shops.lose_the_directory()
    shops.run()
    # On the state of the batches that were replayed.
    shops.feed(1)
    shops.run()


def back_and_forth(shops: Shops) -> None:
    shops.feed(4)
    shops.run()
    shops.savepoint("four")
    shops.run("batch-1", files_per_batch=2)
    shops.run("four")
    shops.feed(1)
    shops.run()


def adopted(shops: Shops, sink: str) -> None:
    """A plain Spark query is adopted, loses its directory, is rewound, exported, and continued by plain Spark."""
    shops.feed(3)
    shops.run_plainly("plain")
    with Client(**shops.places) as client:
        client.adopt(shops.stream, checkpoint_location=f"{shops.folder}/plain", sinks=[sink], label="adopted")
    shops.feed(1)
    shops.run_plainly("plain")
    shops.feed(1)
    shops.run()
    # The journal has no batch that plain Spark has run: the table goes back to the first snapshot.
    shops.lose_the_directory()
    shops.run(files_per_batch=2)
    shops.run("adopted", files_per_batch=2)
    shops.savepoint("last")
    with Client(**shops.places) as client:
        (exported,) = client.export(shops.stream, "last", to=f"{shops.folder}/exported").sinks
        (early,) = client.export(shops.stream, "adopted", to=f"{shops.folder}/early").sinks
    assert exported.is_ready, exported
    assert not early.is_ready, early
    shops.feed(1)
    shops.run_plainly("exported")


def in_flight(shops: Shops, *, state_too: bool) -> None:
    shops.feed(3)
    shops.run()
    shops.lose_the_last_commit(state_too=state_too)
    shops.feed(1)
    shops.run(files_per_batch=2)


def debugged(shops: Shops) -> None:
    """The table has of each batch what its replay gives, also of those before the newest savepoint."""
    shops.feed(3)
    shops.run()
    with Client(**shops.places) as client:
        for batch in range(3):
            with client.debug_batch(
                shops.stream, batch, lambda spark: shops.writer(spark, 1), spark=shops.spark
            ) as debug:
                assert debug.sink.rows is not None, debug.sink.says
                assert [row.shop for row in debug.sink.rows.collect()] == [batch], debug.sink.says
                assert debug.difference.count() == 0
        other = shops.shops(shops.spark, 1).where("shop <> 2").writeStream.format("noop")
        with client.debug_batch(shops.stream, 2, lambda _spark: other, spark=shops.spark) as debug:
            assert debug.output.count() == 0


def tell(found: Mapping[str, Any]) -> None:
    """Print what a scenario has left, for `play`."""
    print(_MARK + json.dumps(found), flush=True)


def play(program: str, folder: Path, jars: Path, *only: str, timeout_s: float = PLAY_S) -> dict[str, dict[str, Any]]:
    """Run scenarios of a program, by default all, in a process with the jars of a folder: what each told, by name."""
    listed = ",".join(sorted(str(path) for path in jars.glob("*.jar")))
    done = subprocess.run(
        [sys.executable, "-m", program, str(folder), listed, *only],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = (json.loads(line.removeprefix(_MARK)) for line in done.stdout.splitlines() if line.startswith(_MARK))
    return {line["scenario"]: line for line in told}


class Plays:
    """What each scenario of a program told, by name; `make test` plays those that are quick, beside each other.

    Args:
        program: Its module.
        folder: For streams and jars, which are there already.
        quick: Names of scenarios.
    """

    def __init__(self, program: str, folder: Path, quick: Sequence[str]) -> None:
        self._program, self._folder, self._quick = program, folder, tuple(quick)
        self._told: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}

    def __getitem__(self, scenario: str) -> dict[str, Any]:
        return self._played(self._quick if scenario in self._quick else ())[scenario]

    def __call__(self) -> dict[str, dict[str, Any]]:
        """All that was told."""
        return self._played(())

    def _played(self, only: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        only = either(quick=only, thorough=())
        if only not in self._told:
            folder = self._folder / f"streams-{len(self._told)}"
            self._told[only] = play(self._program, folder, self._folder / "jars", *only)
        return self._told[only]
