"""The process in which another Spark rewrites state: see `other_spark`. Orders and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.session import start_application
from dagster_ckpt.state.described import readable
from dagster_ckpt.state.other_spark import WrittenState
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.shape import StateShape

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main() -> None:
    """The child: carries out the order on the first line of its input, and ends when its input does."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What Spark prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        answer(**_carried_out(order, lambda message: answer(progress=message)))
    except Exception as error:  # noqa: BLE001 - the parent reports it
        answer(error=str(error) or repr(error))
    # Without a farewell: other threads may still wait for the JVM.
    answers.flush()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.read()
    # Its JVM too, which must not write into what a successor deletes.
    os.killpg(0, signal.SIGKILL)


def _carried_out(order: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, object]:
    settings = {"spark.ui.enabled": "false", **order["settings"]}
    spark = start_application(os.cpu_count() or 1, settings)
    return _states(spark, order) if "read" in order else _rewritten(spark, order, report)


def _states(spark: SparkSession, order: Mapping[str, Any]) -> dict[str, object]:
    live, found = LiveDirectory(order["read"]), []
    for batch_id in order["batches"]:
        with readable(live, batch_id) as copy:
            reader = StateReader(spark, copy, batch_id)
            for number, name in enumerate(reader.states):
                frame, place = reader.frame(name), f"{order['folder']}/{batch_id}/{number}"
                frame.rows.write.parquet(place)
                kept = (name.operator_id, name.operator, name.state, name.partitions, frame.kind.value, place)
                found.append(WrittenState(batch_id, *kept))
    return {"states": [asdict(each) for each in found]}


def _rewritten(spark: SparkSession, order: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, object]:
    provider, partitions, version = order["shape"]
    made = rewrite_state(
        spark,
        LiveDirectory(order["source"]),
        LiveDirectory(order["target"]),
        shape=StateShape(provider, partitions, version),
        report=report,
    )
    stores = [[n.operator_id, n.operator, n.store, d.rows, d.digest] for n, d in made.stores.items()]
    return {"rewrite_id": made.rewrite_id, "batch_id": made.batch_id, "stores": stores}


if __name__ == "__main__":
    main()
