"""Hands a stream into a real Delta table over while files come in, and tells the boundary."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from pyspark.sql import SparkSession

from tests.sinks.delta_program import DELTA
from tests.support.handed_over import HandOver, each_row_once, hand_over_while_files_come
from tests.support.shop_tables import tell
from tests.support.small_spark import SETTINGS


def main(folder: Path, jars: str) -> None:
    """Play the hand-over."""
    spark = SparkSession.builder.master("local[2]").config(map={**SETTINGS, **DELTA, "spark.jars": jars}).getOrCreate()
    table = str(folder / "table")
    of = HandOver(spark, folder, lambda rows, _: rows.writeStream.format("delta").option("path", table))
    hand_over_while_files_come(of)
    rows = Counter((row.a, row.code) for row in spark.read.format("delta").load(table).collect())
    with of.small.client() as client:
        row = client.catalog.desired_states.find("small")
    compared = row.preflight.reason if row is not None and row.preflight is not None else ""
    tell({"scenario": "handed over", "boundary": each_row_once(of, rows), "compared": compared})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
