"""What most JVMs of the tests do at their start, so that their classes are loaded, checked and kept once for all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.small_spark import lay_file, small_spark


def load() -> None:
    """Run two small queries: one with state, and one into a folder."""
    with small_spark() as spark, tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "in").mkdir()
        spark.conf.set(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        for number in range(2):
            lay_file(root / "in", number, [{"k": number, "v": 1}])
        read = spark.readStream.schema("k int, v int").option("maxFilesPerTrigger", 1).json(str(root / "in"))
        counted = read.groupBy("k").sum("v").writeStream.outputMode("update").format("noop")
        kept = read.writeStream.format("parquet").option("path", str(root / "out"))
        for writer, checkpoint in ((counted, "counted"), (kept, "kept")):
            query = writer.option("checkpointLocation", str(root / checkpoint)).trigger(availableNow=True).start()
            query.awaitTermination()
        spark.read.parquet(str(root / "out")).count()


if __name__ == "__main__":
    load()
