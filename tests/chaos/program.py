"""The process of the streams of the chaos: it keeps its JVM from one run to the next, until it is killed.

It reads orders from its standard input, one JSON object a line, and answers each with one line. SIGINT ends a run
as the shutdown of a machine does.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_ckpt import CheckpointConfig, RestartStrategies, run_stream
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from tests.chaos.operators import CODES, STORES, writer
from tests.support.small_spark import small_spark, unload_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = "chaotic"
ANSWER = "@answer "
SETTINGS = {
    # State of every kind of file, and logs that are compacted, within a few batches.
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "2",
    "spark.sql.streaming.stateStore.maintenanceInterval": "300ms",
    "spark.sql.streaming.fileSink.log.compactInterval": "4",
    "spark.sql.streaming.fileSource.log.compactInterval": "4",
    "spark.sql.streaming.minBatchesToRetain": "20",
}


def storage_at(root: Path) -> FileSystemCheckpointStorage:
    """Its snapshots: metadata, and objects that they share."""
    return FileSystemCheckpointStorage(f"file://{root}/snapshots", 64)


def run(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """Run the stream until it ends."""
    root = Path(order["root"])
    try:
        execution = run_stream(
            STREAM,
            lambda session: writer(
                session, root, order["operator"], CODES[order["code"]], pattern=order["pattern"]
            ).trigger(processingTime="100 milliseconds"),
            catalog=f"sqlite:///{root}/catalog.db",
            storage=storage_at(root),
            live_root=str(root / "live"),
            # A running query does not notice a file that only a restart needs: its checkpoints do, and end the run.
            checkpointing=CheckpointConfig(interval=1_000, num_retained=3, tolerable_failures=2),
            restart_strategy=RestartStrategies.fixed_delay_restart(3, 200),
            state_backend=STORES[order["store"]],
            spark=spark,
            code_version=order["code"],
        )
    except KeyboardInterrupt:
        return {"end": "interrupted"}
    except Exception as error:  # noqa: BLE001 - answered
        causes: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(type(cause).__name__)
            cause = cause.__cause__
        return {"end": "failed", "errors": causes, "message": str(error)}
    finally:
        # A process that ended writes nothing more: neither do the stores of its queries.
        unload_stores(spark)
    return {"end": execution.end.value}


def rows(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """What a reader sees in the output."""
    return {"rows": [list(row) for row in spark.read.parquet(order["path"]).collect()]}


def uninterrupted(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """Run the same query without the product, into another output, and return its rows."""
    root = Path(order["root"])
    for name, value in STORES[order["store"]].spark_settings().items():
        spark.conf.set(name, value)
    query = (
        writer(spark, root, order["operator"], CODES["right"], pattern=order["pattern"], output="uninterrupted")
        .option("checkpointLocation", str(root / "uninterrupted-live"))
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return rows(spark, {"path": str(root / "uninterrupted")})


ORDERS = {"run": run, "rows": rows, "uninterrupted": uninterrupted}


def main() -> None:
    """Carry out orders until the input ends."""
    with small_spark(SETTINGS) as spark:
        answer({"ready": True})
        while True:
            with suppress(KeyboardInterrupt):
                line = sys.stdin.readline()
                if not line:
                    return
                order = json.loads(line)
                try:
                    answer(ORDERS[order["do"]](spark, order))
                except Exception as error:  # noqa: BLE001 - answered
                    answer({"end": "failed", "errors": [type(error).__name__], "message": str(error)})


_writing = threading.Lock()


def answer(what: dict[str, Any]) -> None:
    with _writing:
        print(ANSWER + json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
