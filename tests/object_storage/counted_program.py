"""Two plain queries of Spark whose checkpoint directories are in a bucket: one with state, one with a file sink.

`python counted_program.py FOLDER BUCKET SETTINGS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import functions as F

from tests.support.small_spark import lay_file, small_spark

BATCHES = 9


def main(folder: Path, bucket: str, settings: dict[str, str]) -> None:
    """Run both, one batch a file."""
    landing = folder / "landing"
    landing.mkdir()
    for number in range(BATCHES):
        lay_file(landing, number, [{"at": "2024-01-01T00:00:00Z", "shop": shop} for shop in range(50)])
    with small_spark(settings) as spark:
        rows = spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1).json(str(landing))
        counts = rows.withColumn("one", F.lit(1)).groupBy("shop").agg(F.sum("one").alias("n"))
        writers = {
            "stateful": counts.writeStream.format("noop").outputMode("update"),
            "stateless": rows.writeStream.format("parquet").option("path", f"s3a://{bucket}/output"),
        }
        for name, writer in writers.items():
            query = writer.option("checkpointLocation", f"s3a://{bucket}/{name}").start()
            query.processAllAvailable()
            query.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
