"""A plain query of Spark whose checkpoint directory is in a bucket, phase by phase.

`python counted_program.py FOLDER BUCKET QUERY SETTINGS`: prints the name of each phase when it is over and waits for a line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import functions as F

from tests.support.small_spark import lay_file, small_spark

WARM, BATCHES, IDLE_S = 4, 10, 6


def main(folder: Path, bucket: str, name: str, settings: dict[str, str]) -> None:
    """Run the query."""
    landing = folder / "landing"
    landing.mkdir()
    laid = 0

    def feed(files: int) -> None:
        nonlocal laid
        for number in range(laid, laid + files):
            lay_file(landing, number, [{"at": "2024-01-01T00:00:00Z", "shop": shop} for shop in range(50)])
        laid += files

    def over(phase: str) -> None:
        print(f"over {phase}", flush=True)
        sys.stdin.readline()

    with small_spark(settings) as spark:
        rows = spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1).json(str(landing))
        if name == "stateful":
            counts = rows.withColumn("one", F.lit(1)).groupBy("shop").agg(F.sum("one").alias("n"))
            writer = counts.writeStream.format("noop").outputMode("update")
        else:
            writer = rows.writeStream.format("parquet").option("path", f"s3a://{bucket}/output")
        feed(WARM)
        query = writer.option("checkpointLocation", f"s3a://{bucket}/{name}").start()
        query.processAllAvailable()
        over("warm")
        feed(BATCHES)
        query.processAllAvailable()
        over("batches")
        time.sleep(IDLE_S)
        over("idle")
        query.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
