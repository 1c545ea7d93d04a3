"""Streams whose table is dropped and made again, or that another stream writes to: what each start says, as JSON lines.

Each scenario ends with what the refusal advises.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession

from dagster_ckpt import Client
from dagster_ckpt.errors import CkptError
from dagster_ckpt.stream.start_from import StartFrom
from tests.sinks.delta_program import DELTA, DeltaShops
from tests.sinks.iceberg_program import HADOOP, JDBC, IcebergShops, iceberg_settings
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS


class ReplacedTable(Protocol):
    """A stream into a table that a scenario can drop and make again."""

    stream: str
    folder: Path
    fed: int
    places: dict[str, Any]

    def feed(self, files: int) -> None: ...
    def run(self, start_from: str = ..., *, files_per_batch: int = ...) -> None: ...
    def savepoint(self, label: str) -> None: ...
    def drop(self) -> None: ...
    def make(self) -> None: ...
    def keep(self) -> None: ...
    def put_back(self) -> None: ...
    def rows(self) -> list[int]: ...


class Delta(DeltaShops):
    """A Delta table, which is dropped by deleting its folder."""

    def forget(self) -> None:
        jvm: Any = self.spark._jvm
        jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()

    def drop(self) -> None:
        shutil.rmtree(self.table)
        self.forget()

    def make(self) -> None:
        self.spark.createDataFrame([], "shop long").write.format("delta").save(self.table)

    def keep(self) -> None:
        shutil.copytree(self.table, f"{self.table}.kept")

    def put_back(self) -> None:
        shutil.rmtree(self.table, ignore_errors=True)
        shutil.copytree(f"{self.table}.kept", self.table)
        self.forget()

    def rows(self) -> list[int]:
        self.forget()
        return sorted(row.shop for row in self.spark.read.format("delta").load(self.table).collect())


class Iceberg(IcebergShops):
    """An Iceberg table."""

    @property
    def _folder(self) -> str:
        return f"{self.folder.parent}/lake/db/{self.table.rpartition('.')[2]}"

    def drop(self) -> None:
        self.spark.sql(f"DROP TABLE {self.sql} PURGE")

    def make(self) -> None:
        self.spark.sql(f"CREATE TABLE {self.sql} (shop long) USING iceberg")

    def keep(self) -> None:
        shutil.copytree(self._folder, f"{self.folder}/kept")

    def put_back(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(f"{self.folder}/kept", self._folder)
        self.rows()

    def rows(self) -> list[int]:
        self.spark.catalog.clearCache()
        self.spark.sql(f"REFRESH TABLE {self.sql}")
        return sorted(row.shop for row in self.spark.table(self.sql).collect())


def refused(shops: ReplacedTable, start_from: str = "latest") -> str:
    """The message of a start that is refused."""
    try:
        shops.run(start_from)
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def accept_loss(shops: ReplacedTable) -> None:
    with Client(**shops.places) as client:
        client.request_start(shops.stream, start_from=StartFrom(accept_loss=True))
    shops.run()


def as_today(shops: ReplacedTable) -> None:
    """Let the catalog know no identity, as one of the versions before has it."""
    with sqlite3.connect(f"{shops.folder}/catalog.db") as catalog:
        for execution, text in catalog.execute("SELECT execution_id, progress FROM executions").fetchall():
            progress = json.loads(text or "{}")
            progress.pop("sink_ids", None)
            catalog.execute(
                "UPDATE executions SET progress = ? WHERE execution_id = ?", (json.dumps(progress), execution)
            )


def recreated(shops: ReplacedTable, *, made: bool = True, kept: bool = False) -> list[str]:
    """Dropped, and perhaps made again."""
    shops.feed(3)
    shops.run()
    if kept:
        shops.keep()
    shops.drop()
    if made:
        shops.make()
    shops.feed(1)
    told = [refused(shops)]
    told.append(refused(shops))
    return told


def and_put_back(shops: ReplacedTable) -> list[str]:
    told = recreated(shops, kept=True)
    shops.put_back()
    shops.run()
    return told


def and_written_again(shops: ReplacedTable) -> list[str]:
    told = recreated(shops)
    shops.run("empty")
    shops.feed(1)
    shops.run()
    return told


def gone_and_written_again(shops: ReplacedTable) -> list[str]:
    told = recreated(shops, made=False)
    shops.run("empty")
    shops.feed(1)
    shops.run()
    return told


def and_accepted(shops: ReplacedTable) -> list[str]:
    shops.feed(3)
    shops.run()
    shops.savepoint("before")
    shops.drop()
    shops.make()
    told = [refused(shops)]
    accept_loss(shops)
    # Without a new batch, and with one.
    shops.run()
    shops.feed(1)
    shops.run()
    # The savepoint is of the table that is gone.
    told.append(refused(shops, "before"))
    return told


def older_copy(shops: ReplacedTable) -> list[str]:
    shops.feed(2)
    shops.run()
    shops.savepoint("two")
    shops.keep()
    shops.feed(2)
    shops.run()
    shops.put_back()
    told = [refused(shops)]
    shops.run("two")
    return told


def of_today(shops: ReplacedTable) -> list[str]:
    shops.feed(3)
    shops.run()
    as_today(shops)
    shops.drop()
    shops.make()
    told = [refused(shops)]
    shops.run("empty")
    return told


def renamed(shops: ReplacedTable) -> list[str]:
    shops.feed(3)
    shops.run()
    shops.stream = "shops_renamed"
    told = [refused(shops)]
    # What the message advises.
    shops.stream = "shops"
    shops.feed(1)
    shops.run()
    return told


def beside_another(shops: ReplacedTable) -> list[str]:
    shops.feed(2)
    shops.run()
    shops.stream = "shops_beside"
    told = [refused(shops)]
    accept_loss(shops)
    shops.feed(1)
    shops.run()
    return told


def replaced_in_sql(shops: Iceberg) -> list[str]:
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"CREATE OR REPLACE TABLE {shops.sql} (shop long) USING iceberg")
    told = [refused(shops)]
    shops.run("empty")
    return told


def expired(shops: Iceberg) -> list[str]:
    """A table in which others write, and whose older snapshots expire, goes on."""
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"INSERT INTO {shops.sql} VALUES (100)")
    catalog, _, table = shops.sql.partition(".")
    shops.spark.sql(
        f"CALL {catalog}.system.expire_snapshots(table => '{table}', older_than => TIMESTAMP '2999-01-01 00:00:00', "
        "retain_last => 1)"
    )
    shops.feed(1)
    return [refused(shops)]


def emptied(shops: Delta) -> list[str]:
    """Rows that others delete, or compact, are not missing batches."""
    shops.feed(3)
    shops.run()
    shops.spark.sql(f"DELETE FROM delta.`{shops.table}` WHERE shop < 2")
    shops.spark.sql(f"OPTIMIZE delta.`{shops.table}`")
    shops.feed(1)
    return [refused(shops)]


def restored_by_others(shops: Delta) -> list[str]:
    shops.feed(3)
    shops.run()
    shops.savepoint("three")
    shops.feed(1)
    shops.run()
    shops.spark.sql(f"RESTORE TABLE delta.`{shops.table}` TO VERSION AS OF 2")
    told = [refused(shops)]
    shops.run("three")
    return told


def refused_while_it_runs(shops: Delta) -> list[str]:
    """A restart that its sink refuses leaves the running query alone."""
    shops.feed(2)
    shops.run()
    shops.savepoint("before")
    shops.drop()
    shops.make()
    with Client(**shops.places) as client:
        client.request_start(shops.stream, start_from=StartFrom(accept_loss=True))
    described = shops.writer
    # It waits for more files.
    shops.writer = lambda *how: described(*how).trigger(processingTime="0 seconds")  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as process, Client(**shops.places) as client:
        runs = process.submit(shops.run)
        shops.feed(1)
        await_batch(client, shops.stream, 2)
        running = client.describe_stream(shops.stream).executions[0]
        try:
            client.restart(shops.stream, start_from="before")
            told = "not refused"
        except CkptError as error:
            told = f"{type(error).__name__}: {error}"
        shops.feed(1)
        await_batch(client, shops.stream, 3)
        assert client.describe_stream(shops.stream).executions[0].execution_id == running.execution_id
        client.stop(shops.stream, savepoint=False)
        runs.result(60)
    return [told]


def await_batch(client: Client, stream: str, batch_id: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        executions = client.describe_stream(stream).executions
        if ((executions[0].progress or {}).get("batch_id") or -1) >= batch_id:
            return
        time.sleep(0.2)
    raise TimeoutError(f"no batch {batch_id}")


BOTH: dict[str, Callable[[Any], list[str]]] = {
    "put back": and_put_back,
    "written again": and_written_again,
    "gone": gone_and_written_again,
    "accepted": and_accepted,
    "older copy": older_copy,
    "of today": of_today,
    "renamed": renamed,
    "beside another": beside_another,
}
SCENARIOS: dict[str, dict[str, Callable[[Any], list[str]]]] = {
    "delta": {
        **BOTH,
        "emptied": emptied,
        "restored by others": restored_by_others,
        "running": refused_while_it_runs,
    },
    "iceberg": {**BOTH, "replaced in SQL": replaced_in_sql, "expired": expired},
}


def main(folder: Path, jars: str, kind: str, only: Sequence[str]) -> None:
    """Play the scenarios of a table format, by default all."""
    of_kind = DELTA if kind == "delta" else iceberg_settings(folder, "http://127.0.0.1:1")
    spark = (
        SparkSession.builder.master("local[2]").config(map={**SETTINGS, **of_kind, "spark.jars": jars}).getOrCreate()
    )
    for name, play in SCENARIOS[kind].items():
        if only and name not in only:
            continue
        place = folder / name.replace(" ", "_")
        # Its query makes the table. It cannot be put back as a copy of its folder.
        catalog = JDBC if name in ("written again", "gone", "accepted", "of today") else HADOOP
        shops: Any = Delta(spark, place) if kind == "delta" else Iceberg(spark, place, catalog)
        try:
            told, failed = play(shops), None
        except Exception as error:  # noqa: BLE001 - the other scenarios are played as well
            told, failed = [], f"{type(error).__name__}: {error}"
        tell({"scenario": name, "told": told, "failed": failed, "rows": shops.rows() if failed is None else []})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
