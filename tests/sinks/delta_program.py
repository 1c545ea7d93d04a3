"""Streams into a real Delta table: each step of a scenario, with what the table holds afterwards, as JSON lines."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client
from dagster_ckpt.errors import CkptError, LeaseLostError, SinkRollbackError
from dagster_ckpt.sinks import delta_roll_back
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.sink import RollBack
from tests.support.shop_tables import (
    Shops,
    adopted,
    back_and_forth,
    debugged,
    in_flight,
    lost_directory,
    replayed,
    tell,
)
from tests.support.small_spark import SETTINGS

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
    # VACUUM lists the files in this number of tasks.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}


class DeltaShops(Shops):
    """Shops in a Delta table."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.table = f"{folder}/table"

    def writer(self, spark: SparkSession, files_per_batch: int) -> DataStreamWriter:
        shops = self.shops(spark, files_per_batch)
        return shops.writeStream.format("delta").option("path", self.table).trigger(availableNow=True)

    def actions(self, kind: str) -> list[dict[str, Any]]:
        """The actions of a kind in the table's log, oldest first."""
        lines = [line for commit in sorted(Path(self.table, "_delta_log").glob("*.json")) for line in commit.open("rb")]
        return [action[kind] for line in lines if kind in (action := json.loads(line))]

    def told(self) -> dict[str, Any]:
        rows = self.spark.read.format("delta").load(self.table).collect()
        history = self.spark.sql(f"DESCRIBE HISTORY delta.`{self.table}`").collect()
        return {
            "rows": sorted(row.shop for row in rows),
            "operations": [row.operation for row in sorted(history, key=lambda row: row.version)],
        }


def from_nothing(shops: DeltaShops) -> None:
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.run("empty", files_per_batch=2)
    # Forth again, over what the start has emptied.
    shops.run("three")


def killed_after_the_restore(shops: DeltaShops) -> None:
    shops.feed(3)
    shops.run()
    rolls_back = DeltaTable.roll_back

    def dies(*args: Any) -> None:
        rolls_back(*args)
        raise RuntimeError("killed")

    DeltaTable.roll_back = dies  # type: ignore[method-assign,assignment]
    try:
        shops.run("batch-0", files_per_batch=2)
    except SinkRollbackError:
        pass
    finally:
        DeltaTable.roll_back = rolls_back  # type: ignore[method-assign]
    # As in another process: it has not opened the table yet, and its thread has no active session.
    jvm: Any = shops.spark._jvm
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(shops.run, files_per_batch=2).result()


def others_wrote(shops: DeltaShops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.createDataFrame([(100,)], "shop long").write.format("delta").mode("append").save(shops.table)
    shops.run("batch-0")


def optimized(shops: DeltaShops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"OPTIMIZE delta.`{shops.table}`")
    shops.run("batch-0", files_per_batch=2)


def vacuumed(shops: DeltaShops) -> list[str]:
    """OPTIMIZE replaced the files of batch 0, and VACUUM deleted them."""
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"OPTIMIZE delta.`{shops.table}`")
    shops.spark.sql("SET spark.databricks.delta.retentionDurationCheck.enabled = false")
    shops.spark.sql(f"VACUUM delta.`{shops.table}` RETAIN 0 HOURS")
    with Client(**shops.places) as client:
        (forecast,) = client.preview_rewind(shops.stream, start_from="batch-0").sinks
    try:
        shops.run("batch-0", files_per_batch=2)
    except SinkRollbackError as error:
        # As it advises.
        shops.run("batch-0", files_per_batch=2, new_query_id=True)
        return [forecast.effect, str(error)]
    return []


class FormerHolder:
    """A start that was paused in its roll-back to batch 0, for so long that a successor has taken its lease."""

    def __init__(self, shops: DeltaShops, step: str, successor: Callable[[], None]) -> None:
        self.shops, self.step, self.successor, self.lost = shops, step, successor, False

    def pauses(self, step: str) -> None:
        if step == self.step and not self.lost:
            self.lost = True
            self.successor()

    @contextmanager
    def still_mine(self) -> Iterator[None]:
        self.pauses("it has looked at the table")
        if self.lost:
            raise LeaseLostError("a successor has it")
        yield
        self.pauses("it has asked for its lease")

    def roll_back(self) -> str:
        commits = delta_roll_back._Table.commit

        def commit(*what: Any) -> None:
            self.pauses("it has begun its transaction")
            commits(*what)

        delta_roll_back._Table.commit = commit  # type: ignore[method-assign]
        ids = [str(action["appId"]) for action in self.shops.actions("txn")]
        query_ids = [each for each in ids if each != delta_roll_back.ROLL_BACK_ID]
        try:
            DeltaTable("", self.shops.table).roll_back(
                RollBack(0, query_id=query_ids[0], query_ids=query_ids), self.still_mine
            )
        except CkptError as error:
            return type(error).__name__
        finally:
            delta_roll_back._Table.commit = commits  # type: ignore[method-assign]
        return "rolled back"


def paused_in_its_roll_back(shops: DeltaShops) -> list[str]:
    def goes_on() -> None:
        shops.feed(1)
        shops.run()

    def comes_to_the_same_point() -> None:
        shops.run("here")

    shops.feed(2)
    shops.run()
    shops.savepoint("here")
    steps = ["it has looked at the table", "it has asked for its lease", "it has begun its transaction"]
    holders = [FormerHolder(shops, step, comes_to_the_same_point) for step in steps[1:]]
    holders += [FormerHolder(shops, step, goes_on) for step in steps]
    return [f"{holder.step}: {holder.roll_back()}" for holder in holders]


def in_a_checkpoint(shops: DeltaShops) -> list[str]:
    """The commits of the stream are only in a checkpoint of the log, and other writers have gone on."""
    shops.feed(2)
    shops.run()
    (query_id,) = {str(action["appId"]) for action in shops.actions("txn")}
    shops.spark.sql(f"ALTER TABLE delta.`{shops.table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    shops.spark.sql(f"OPTIMIZE delta.`{shops.table}`")
    for version in range(2):
        Path(shops.table, "_delta_log", f"{version:020}.json").unlink()
    jvm: Any = shops.spark._jvm
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    table = DeltaTable("", shops.table)
    return [str(table.last_batch(each)) for each in (query_id, "another")]


SCENARIOS: dict[str, Callable[[DeltaShops], list[str] | None]] = {
    "lost directory": lost_directory,
    "replayed": replayed,
    "back and forth": back_and_forth,
    "from nothing": from_nothing,
    "killed after the restore": killed_after_the_restore,
    "in flight, its state is there": lambda shops: in_flight(shops, state_too=False),
    "in flight, its state is missing": lambda shops: in_flight(shops, state_too=True),
    "others wrote": others_wrote,
    "optimized": optimized,
    "optimized and vacuumed": vacuumed,
    "paused in its roll-back": paused_in_its_roll_back,
    "in a checkpoint": in_a_checkpoint,
    "debugged": debugged,
}
# Only by name.
MORE_SCENARIOS: dict[str, Callable[[DeltaShops], list[str] | None]] = {
    "adopted": lambda shops: adopted(shops, shops.table),
}


def compare_with_sql(spark: SparkSession, folder: Path) -> Iterator[dict[str, Any]]:
    """Each version of a table with all that a restore has to care for, restored by SQL and by this package."""
    table = folder / "original"
    of_table = f"delta.`{table}`"
    # The parser of Spark 3.5 does not know it.
    identity = "" if spark.version.startswith("3.") else ", id bigint GENERATED ALWAYS AS IDENTITY"
    spark.sql(
        f"CREATE TABLE {of_table} (shop long, place string{identity}) USING delta "
        "PARTITIONED BY (place) TBLPROPERTIES ("
        "'delta.enableDeletionVectors' = 'true', 'delta.enableRowTracking' = 'true')"
    )
    spark.sql(f"INSERT INTO {of_table} (shop, place) VALUES (1, 'a b'), (2, 'a b'), (3, 'ü%/'), (4, NULL)")
    spark.sql(f"DELETE FROM {of_table} WHERE shop = 1")
    spark.sql(f"INSERT INTO {of_table} (shop, place) VALUES (5, 'a b'), (6, NULL)")
    spark.sql(f"ALTER TABLE {of_table} ADD COLUMN (note string)")
    spark.sql(f"INSERT INTO {of_table} (shop, place, note) VALUES (7, 'a b', 'x')")
    spark.sql(f"DELETE FROM {of_table} WHERE shop = 2")
    spark.sql(f"OPTIMIZE {of_table}")
    newest = max(int(path.stem) for path in (table / "_delta_log").glob("*.json"))
    for version in range(newest):
        by_sql, by_package = folder / f"sql-{version}", folder / f"package-{version}"
        for copy in (by_sql, by_package):
            shutil.copytree(table, copy)
        spark.sql(f"RESTORE TABLE delta.`{by_sql}` TO VERSION AS OF {version}")
        delta_roll_back.restore_version(spark, str(by_package), version, decided_on=newest)
        commits = [commit_of(copy, newest + 1) for copy in (by_sql, by_package)]
        yield {"scenario": f"version {version}", "by_sql": commits[0], "by_package": commits[1]}
    added = (json.loads(text)["add"]["path"] for text in commit_of(table, 1)["actions"] if '"add"' in text)
    (table / unquote(next(path for path in added if "a%20b" in path))).unlink()
    try:
        delta_roll_back.restore_version(spark, str(table), 1, decided_on=newest)
    except SinkRollbackError as error:
        newer = (table / "_delta_log" / f"{newest + 1:020}.json").exists()
        yield {"scenario": "vacuumed", "refused": str(error), "is_changed": newer}


def commit_of(table: Path, version: int) -> dict[str, Any]:
    """What a commit does, without its time and how it was measured."""
    lines = (table / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    actions = [json.loads(line) for line in lines]
    (info,) = (action["commitInfo"] for action in actions if "commitInfo" in action)
    others = [action for action in actions if "commitInfo" not in action]
    for action in others:
        action.get("remove", {}).pop("deletionTimestamp", None)
        # SQL omits an empty map.
        for file in action.values():
            if file.get("tags") == {}:
                del file["tags"]
    return {
        "operation": [info["operation"], info["operationParameters"]],
        "actions": sorted(json.dumps(action, sort_keys=True) for action in others),
    }


def main(folder: Path, jars: str, only: Sequence[str] = ()) -> None:
    """Play the scenarios with these names, by default all."""
    spark = SparkSession.builder.master("local[2]").config(map={**SETTINGS, **DELTA, "spark.jars": jars}).getOrCreate()
    for name, play in (SCENARIOS | MORE_SCENARIOS).items():
        if name not in (only or SCENARIOS):
            continue
        shops = DeltaShops(spark, folder / name.replace(" ", "-").replace(",", ""))
        refused, ended = None, None
        try:
            ended = play(shops)
        except CkptError as error:
            refused = f"{type(error).__name__}: {error}"
        tell({"scenario": name, "refused": refused, "ended": ended, **shops.told()})
    if not only or "compared" in only:
        for found in compare_with_sql(spark, folder / "compared"):
            tell(found)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
