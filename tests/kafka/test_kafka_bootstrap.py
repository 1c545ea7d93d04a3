"""State that is built from the records of a Kafka topic, and the counts of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka_broker import Kafka

from dagster_ckpt import run_stream
from dagster_ckpt.errors import PlanChangedError
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.rewriter import Rewriter
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.small_spark import small_spark

REWRITES = installed_release().has(Feature.STATE_REWRITER) or Rewriter.find() is not None
pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.state,
    pytest.mark.skipif(not REWRITES, reason="no Spark that rewrites state: see make test-state"),
]
TOPIC = "bootstrapped"
ROOT = Path(__file__).parents[2]


def produce(servers: str, first: int, end: int) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for number in range(first, end):
        producer.produce(TOPIC, json.dumps({"k": number % 3}), key=str(number))
    producer.flush()


def test_state_is_built_from_all_records_up_to_the_newest_batch(kafka: Kafka, tmp_path: Path) -> None:
    jars = ",".join(map(str, kafka.jars))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
        "PYSPARK_SUBMIT_ARGS": f"--jars {jars} --conf spark.ui.enabled=false pyspark-shell",
    }
    command = [sys.executable, __file__, str(tmp_path), kafka.servers]
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-5000:]
    found = json.loads((tmp_path / "counts.json").read_text())
    assert found == {str(key): count for key, count in Counter(number % 3 for number in range(50)).items()}


def _in_a_process(root: Path, servers: str) -> None:
    counts: dict[int, int] = {}

    def keep(batch: Any, _batch_id: int) -> None:
        counts.update({row.k: row.n for row in batch.collect() if "n" in row})

    with small_spark() as spark:

        def run(query: str, **options: Any) -> None:
            def writer(_: object) -> Any:
                records = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
                read = records.option("subscribe", TOPIC).option("startingOffsets", "earliest").load()
                rows = read.selectExpr("from_json(CAST(value AS string), 'k int').k AS k")
                frame = rows.groupBy("k").agg({"*": "count"}).toDF("k", "n") if query == "counts" else rows
                mode = "update" if query == "counts" else "append"
                return frame.writeStream.outputMode(mode).foreachBatch(keep).trigger(availableNow=True)

            run_stream(
                "orders",
                writer,
                catalog=f"sqlite:///{root}/catalog.db",
                storage=f"file://{root}/snapshots",
                live_root=f"{root}/live",
                spark=spark,
                **options,
            )

        produce(servers, 0, 30)
        run("rows")
        produce(servers, 30, 50)
        with pytest.raises(PlanChangedError):
            run("counts")
        run("counts", start_from=StartFrom(bootstrap_state=True))
    (root / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    _in_a_process(Path(sys.argv[1]), sys.argv[2])
