"""Streams into real Iceberg tables: each scenario, with what the table holds afterwards, as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, to_table
from dagster_ckpt.errors import CkptError, LeaseLostError, SinkRollbackError
from dagster_ckpt.orchestration.yaml_stream import Sink, Source, Transform, Trigger, described
from dagster_ckpt.sinks.iceberg import IcebergTable, OpenIcebergTable
from dagster_ckpt.sinks.sink import RollBack
from tests.support.iceberg_rest import iceberg_rest_catalog
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

HADOOP, JDBC, REST, FOLDER = "lake", "books", "rest", "folder"


def iceberg_settings(folder: Path, rest: str) -> dict[str, str]:
    catalogs = {
        HADOOP: {"type": "hadoop", "warehouse": f"{folder}/lake"},
        JDBC: {
            "type": "jdbc",
            "uri": f"jdbc:sqlite:{folder}/books.db",
            "warehouse": f"{folder}/books",
            "jdbc.schema-version": "V1",
        },
        REST: {"type": "rest", "uri": rest},
        # Where Iceberg looks for a table that is named by its folder.
        "default_iceberg": {"type": "hadoop", "warehouse": f"{folder}/default"},
    }
    settings = {"spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"}
    for name, options in catalogs.items():
        settings[f"spark.sql.catalog.{name}"] = "org.apache.iceberg.spark.SparkCatalog"
        settings |= {f"spark.sql.catalog.{name}.{key}": value for key, value in options.items()}
    return settings


def once(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["shop"])


class IcebergShops(Shops):
    """Shops in an Iceberg table of one kind of catalog."""

    def __init__(self, spark: SparkSession, folder: Path, catalog: str) -> None:
        super().__init__(spark, folder)
        name = folder.name.replace("-", "_")
        self.catalog = catalog
        # A name that SQL needs quotes for, and Iceberg reports without them.
        name = f"`{name.replace('_', '-')}`" if catalog == REST else name
        self.table = f"{folder}/table" if catalog == FOLDER else f"{catalog}.db.{name}"
        self.sql = f"{HADOOP}.`{self.table}`" if catalog == FOLDER else self.table
        if catalog == FOLDER:
            schema = spark.createDataFrame([], "shop long").schema
            jvm: Any = spark._jvm
            converted = jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(
                jvm.org.apache.spark.sql.types.DataType.fromJson(schema.json())
            )
            conf = spark._jsparkSession.sessionState().newHadoopConf()
            jvm.org.apache.iceberg.hadoop.HadoopTables(conf).create(converted, self.table)
            return
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {catalog}.db")
        if catalog == HADOOP:
            # The others are created by the query.
            spark.sql(f"CREATE TABLE {self.table} (shop long) USING iceberg")

    def writer(self, spark: SparkSession, files_per_batch: int) -> DataStreamWriter:
        if self.catalog == REST:
            return self.in_yaml(files_per_batch)(spark)
        writer = self.shops(spark, files_per_batch).writeStream.format("iceberg").trigger(availableNow=True)
        if self.catalog in (FOLDER, HADOOP):
            return writer.option("path", self.table)
        return to_table(writer, self.table)

    def in_yaml(self, files_per_batch: int) -> Callable[[SparkSession], DataStreamWriter]:
        """The same query as the component reads it."""
        landing = Source.model_validate(
            {
                "name": "landing",
                "format": "json",
                "schema": "shop long",
                "path": f"{self.folder}/landing",
                "options": {"maxFilesPerTrigger": files_per_batch},
            }
        )
        sink = Sink(format="iceberg", table=self.table)
        once = Transform(function="tests.sinks.iceberg_program:once")
        return described("shops", [landing], once, sink, Trigger(available_now=True))

    @property
    def sink(self) -> IcebergTable:
        with Client(**self.places) as client:
            (name,) = client._catalog.executions.last_sinks(self.stream)
        sink = IcebergTable.of(name)
        assert sink is not None
        return sink

    def told(self) -> dict[str, Any]:
        self.spark.catalog.clearCache()
        found = OpenIcebergTable.find(self.spark, self.table)
        assert found is not None
        metadata = json.loads(found.metadata)
        with Client(**self.places) as client:
            snapshots = client._catalog.snapshots.of_stream(self.stream)
        return {
            "rows": sorted(row.shop for row in self.spark.read.format("iceberg").load(self.table).collect()),
            "operations": [each["summary"]["operation"] for each in metadata["snapshots"]],
            "moves": len(metadata["snapshot-log"]),
            "sink": self.sink.name,
            "guarantees": sorted({str(each.properties.get("guarantee", {}).get("sink")) for each in snapshots}),
        }


def from_nothing(shops: IcebergShops) -> None:
    shops.feed(3)
    shops.run()
    shops.run("empty", files_per_batch=2)
    shops.savepoint("second")
    shops.run("empty", files_per_batch=3)
    shops.run("second")


@contextmanager
def patched(owner: type, name: str, made: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, lambda *args: made(before, *args))
    try:
        yield
    finally:
        setattr(owner, name, before)


def killed(shops: IcebergShops, *, after: bool) -> None:
    def dies(move: Callable[..., bool], *args: Any) -> None:
        if after:
            move(*args)
        raise RuntimeError("killed")

    shops.feed(3)
    shops.run()
    with patched(OpenIcebergTable, "make_current", dies), suppress(SinkRollbackError):
        shops.run("batch-0", files_per_batch=2)
    shops.run(files_per_batch=2)


def others_wrote(shops: IcebergShops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.createDataFrame([(100,)], "shop long").writeTo(shops.sql).append()
    shops.run("batch-0")


def compacted(shops: IcebergShops) -> None:
    shops.feed(3)
    shops.run()
    shops.spark.sql(
        f"CALL {shops.catalog}.system.rewrite_data_files(table => 'db.{shops.folder.name}', "
        "options => map('rewrite-all', 'true'))"
    )
    shops.run("batch-0", files_per_batch=2)


def expired(shops: IcebergShops) -> None:
    shops.feed(3)
    shops.run()
    expire(shops)
    shops.run("batch-0")


def expire(shops: IcebergShops) -> None:
    shops.spark.sql(
        f"CALL {shops.catalog}.system.expire_snapshots(table => 'db.{shops.folder.name}', "
        "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)"
    )


def kept_by_a_branch(shops: IcebergShops) -> None:
    """Main was moved back, and others have written since: what it once had has expired, but for a backup of it."""
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.spark.sql(f"ALTER TABLE {shops.table} CREATE BRANCH backup")
    (first, *_) = shops.spark.sql(f"SELECT snapshot_id FROM {shops.table}.snapshots ORDER BY committed_at").collect()
    table = f"db.{shops.folder.name}"
    shops.spark.sql(f"CALL {shops.catalog}.system.set_current_snapshot('{table}', {first.snapshot_id})")
    for shop in (100, 101):
        shops.spark.createDataFrame([(shop,)], "shop long").writeTo(shops.sql).append()
    expire(shops)
    shops.run("three")


def left_to_a_person(shops: IcebergShops) -> None:
    shops.feed(3)
    shops.run()
    try:
        shops.run("batch-0", roll_back_tables=False)
    except CkptError as error:
        refused = str(error)
    assert "leaves to you" in refused, refused
    shops.spark.sql("CALL " + refused.partition("CALL ")[2].partition(")")[0] + ")")
    shops.run("batch-0", files_per_batch=2, roll_back_tables=False)


def paused(shops: IcebergShops, *, successor: Callable[[IcebergShops], None]) -> None:
    """A process is stopped right before its commit; its successor starts; then the process goes on."""

    def lost() -> Any:
        raise LeaseLostError("a successor has the lease")

    def stopped(move: Callable[..., bool], *args: Any) -> bool:
        if not over:
            over.append(True)
            successor(shops)
        return move(*args)

    @contextmanager
    def mine() -> Iterator[None]:
        if over:
            lost()
        yield

    over: list[bool] = []
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    with Client(**shops.places) as client:
        ids = [str(each.query_id) for each in client._catalog.snapshots.of_stream(shops.stream)]
    with patched(OpenIcebergTable, "make_current", stopped):
        try:
            shops.sink.roll_back(RollBack(0, query_id=ids[0], query_ids=ids), mine)
        except LeaseLostError:
            return
    raise AssertionError("it was not stopped")


def goes_on(shops: IcebergShops) -> None:
    shops.run("three")


def goes_back_and_on(shops: IcebergShops) -> None:
    shops.run("batch-1", files_per_batch=2)
    shops.feed(1)
    shops.run()


SCENARIOS: dict[str, tuple[str, Callable[[IcebergShops], None]]] = {
    "lost directory": (HADOOP, lost_directory),
    "replayed": (JDBC, replayed),
    "lost directory, to a table": (JDBC, lost_directory),
    "lost directory, by REST": (REST, lost_directory),
    "lost directory, by its folder": (FOLDER, lost_directory),
    "back and forth": (JDBC, back_and_forth),
    "from nothing": (JDBC, from_nothing),
    "from nothing, by REST": (REST, from_nothing),
    "in flight": (HADOOP, lambda shops: in_flight(shops, state_too=True)),
    "killed before the roll-back": (JDBC, lambda shops: killed(shops, after=False)),
    "killed after the roll-back": (JDBC, lambda shops: killed(shops, after=True)),
    "others wrote": (HADOOP, others_wrote),
    "compacted": (JDBC, compacted),
    "expired": (HADOOP, expired),
    "expired, and kept by a branch": (HADOOP, kept_by_a_branch),
    "left to a person": (JDBC, left_to_a_person),
    "paused, and the successor goes on": (JDBC, lambda shops: paused(shops, successor=goes_on)),
    "paused, and the successor goes back": (HADOOP, lambda shops: paused(shops, successor=goes_back_and_on)),
    "paused, and the successor goes on, by REST": (REST, lambda shops: paused(shops, successor=goes_on)),
    "paused, and the successor goes back, by REST": (REST, lambda shops: paused(shops, successor=goes_back_and_on)),
    "debugged": (JDBC, debugged),
}
# Only by name.
MORE_SCENARIOS: dict[str, tuple[str, Callable[[IcebergShops], None]]] = {
    "adopted": (HADOOP, lambda shops: adopted(shops, f"IcebergTable[{shops.table}]")),
}


def main(folder: Path, jars: str, only: Sequence[str] = ()) -> None:
    """Play the scenarios with these names, by default all."""
    with iceberg_rest_catalog(folder / "rest") as rest:
        settings = {**SETTINGS, **iceberg_settings(folder, rest), "spark.jars": jars}
        spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
        play_all(spark, folder, only)
        spark.stop()


def play_all(spark: SparkSession, folder: Path, only: Sequence[str]) -> None:
    for name, (catalog, play) in (SCENARIOS | MORE_SCENARIOS).items():
        if name not in (only or SCENARIOS):
            continue
        shops = IcebergShops(spark, folder / name.replace(" ", "_").replace(",", "").replace("-", "_"), catalog)
        refused = None
        try:
            play(shops)
        except Exception as error:  # noqa: BLE001 - the other scenarios are played as well
            refused = f"{type(error).__name__}: {error}"
        tell({"scenario": name, "refused": refused, **shops.told()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
