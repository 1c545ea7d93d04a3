"""Streams from real Delta tables: one that is made again, with fewer and with more versions; one that is read twice."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dagster_ckpt.errors import CkptError
from tests.sinks.delta_program import DELTA
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS
from tests.support.small_stream import STREAM, SmallStream


def recreated(spark: SparkSession, root: Path, versions: int) -> dict[str, Any]:
    """Make the table again with this many versions, and put the first one back after the refusal."""
    stream = SmallStream(spark, root)
    table = root / "table"

    def put(first: int) -> None:
        spark.range(first, first + 10, 1, 1).write.format("delta").mode("append").save(str(table))

    def writer(session: SparkSession) -> Any:
        return stream.write(session.readStream.format("delta").option("maxFilesPerTrigger", 1).load(str(table)))

    for first in (0, 10, 20):
        put(first)
    stream.run(writer)
    stream.savepoint()
    table.rename(root / "dropped")
    for version in range(versions):
        put(100 + 10 * version)
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    before, refused = stream.files_of("out", "live"), None
    try:
        stream.run(writer)
    except CkptError as error:
        refused = f"{type(error).__name__}: {error}"
    is_changed = stream.files_of("out", "live") != before
    shutil.rmtree(table)
    (root / "dropped").rename(table)
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    put(30)
    stream.run(writer)
    return {
        "scenario": f"{versions} versions",
        "refused": refused,
        "is_changed": is_changed,
        "is_equal": stream.rows() == Counter((number,) for number in range(40)),
    }


def beside_a_table_that_is_read_twice(spark: SparkSession, root: Path) -> dict[str, Any]:
    """Its offset is the third one, not the second."""
    stream = SmallStream(spark, root)
    numbers = {"twice": 0, "once": 1_000}

    def put() -> None:
        for table, first in numbers.items():
            spark.range(first, first + 10, 1, 1).write.format("delta").mode("append").save(str(root / table))
            numbers[table] += 10

    def writer(session: SparkSession) -> Any:
        twice, once = (session.readStream.format("delta").load(str(root / table)) for table in numbers)
        return stream.write(twice.union(twice).union(once))

    put()
    stream.run(writer)
    stream.savepoint()
    for start_from in ("latest", "latest", "sp"):
        put()
        stream.run(writer, start_from=start_from)
    with stream.client() as client, client.debug_batch(STREAM, 1, writer, spark=spark) as debug:
        read = {key: sorted(row.id for row in rows.collect()) for key, rows in debug.inputs.items()}
    expected = Counter((number,) for number in [*range(40), *range(40), *range(1_000, 1_040)])
    is_debugged = read == {"0": [*range(10, 40)], "1": [*range(1_010, 1_040)]}
    return {"scenario": "read twice", "is_equal": stream.rows() == expected, "is_debugged": is_debugged}


def main(folder: Path, jars: str) -> None:
    """Play all three."""
    settings = {**SETTINGS, **DELTA, "spark.jars": jars}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    for versions in (1, 6):
        tell(recreated(spark, folder / str(versions), versions))
    tell(beside_a_table_that_is_read_twice(spark, folder / "twice"))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
