"""One leg of an upgrade: streams that read what is there, end, and are saved, on the Spark of this interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import run_stream
from dagster_ckpt.client import Client
from tests.golden.live_directories import QUERIES, SCHEMA, SETTINGS

# Those that Spark's file sink takes, which tells rows that are lost or repeated.
STREAMS = ["windows-rocksdb", "sessions-heap", "firsts-changelog", "pairs-heap", "pairs-changelog"]


def described(spark: SparkSession, name: str, folder: Path) -> DataStreamWriter:
    query = QUERIES[name]
    for setting, value in (SETTINGS | query.settings).items():
        spark.conf.set(setting, value)
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder / "landing"))
    writer = query.build(rows.withWatermark("t", "20 seconds")).writeStream.format("json")
    return writer.option("path", str(folder / "output" / name)).trigger(availableNow=True)


def main(folder: Path, leg: int, start_from: str) -> None:
    catalog, storage = f"sqlite:///{folder}/catalog.db", f"file://{folder}/checkpoints"
    spark = SparkSession.builder.master("local[2]").config(map=json.loads(os.environ["SETTINGS"])).getOrCreate()
    for name in STREAMS:
        session = spark.newSession()
        run_stream(
            name,
            lambda session, name=name: described(session, name, folder),
            catalog=catalog,
            storage=storage,
            live_root=str(folder / "live"),
            state_backend=QUERIES[name].backend,
            spark=session,
            start_from=start_from,
        )
    with Client(catalog=catalog, storage=storage, live_root=str(folder / "live")) as client:
        for name in STREAMS:
            client.trigger_savepoint(name, label=f"leg-{leg}")
    spark.stop()


if __name__ == "__main__":
    main(Path(os.environ["FOLDER"]), int(os.environ["LEG"]), os.environ["START_FROM"])
