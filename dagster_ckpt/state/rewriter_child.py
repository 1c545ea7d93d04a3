"""The child process of `rewriter.py`.

Orders and answers are lines of JSON: an order, progress, and the answer or an error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.session import active_in_thread, start_application
from dagster_ckpt.state.editing import StateEdit, edit_rows
from dagster_ckpt.state.reading import StateReader, storable
from dagster_ckpt.state.rewriter import OrderedEdit
from dagster_ckpt.state.rewriting import given_rows, rewrite_state
from dagster_ckpt.state.stopped_state import StateShape, readable_at
from dagster_ckpt.state.unsafe_rows import Graft

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main() -> None:
    orders: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    # What Spark prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    while True:
        order = orders.get()
        try:
            answer(**_carried_out(order, lambda message: answer(progress=message)))
        except Exception as error:  # noqa: BLE001 - the parent reports it
            answer(error=str(error) or repr(error), kind=type(error).__name__)


def _listen(orders: SimpleQueue[Mapping[str, Any]]) -> None:
    try:
        for line in sys.stdin:
            orders.put(json.loads(line))
    finally:
        # The JVM ends too: it must not write into what a successor deletes.
        os.killpg(0, signal.SIGKILL)


def _carried_out(order: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, object]:
    settings: Mapping[str, str] = order["settings"]
    of_session = {name: value for name, value in settings.items() if name.startswith("spark.sql.")}
    of_files = {name: value for name, value in settings.items() if name not in of_session}
    spark = start_application(os.cpu_count() or 1, {"spark.ui.enabled": "false", **of_files}).newSession()
    for name, value in of_session.items():
        spark.conf.set(name, value)
    with active_in_thread(spark):
        if "read" in order:
            return _read(spark, order)
        return _edited(spark, order, report) if "edits" in order else _rewritten(spark, order, report)


def _read(spark: SparkSession, order: Mapping[str, Any]) -> dict[str, object]:
    live, found = LiveDirectory(order["read"]), []
    for batch_id in order["batches"]:
        with readable_at(live, batch_id) as copy:
            reader = StateReader(spark, copy, batch_id)
            for number, name in enumerate(reader.states):
                frame, place = reader.frame(name), f"{order['folder']}/{batch_id}/{number}"
                storable(frame.rows).write.parquet(place)
                found.append([batch_id, *name.as_record(), frame.kind.value, place, frame.rows.schema.jsonValue()])
    return {"states": found}


def _edited(spark: SparkSession, order: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, object]:
    edits = [
        StateEdit(each.operator, each.forget, given_rows(spark, each.rows) if each.rows is not None else None)
        for each in map(OrderedEdit.of_record, order["edits"])
    ]
    done = edit_rows(spark, LiveDirectory(order["source"]), LiveDirectory(order["target"]), edits, report=report)
    return done.as_record()


def _rewritten(spark: SparkSession, order: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, object]:
    provider, partitions, version = order["shape"]
    made = rewrite_state(
        spark,
        LiveDirectory(order["source"]),
        LiveDirectory(order["target"]),
        shape=StateShape(provider, partitions, version),
        graft=Graft.of_record(order["graft"]) if order.get("graft") else None,
        report=report,
    )
    stores = [[n.operator_id, n.operator, n.store, d.rows, d.digest] for n, d in made.stores.items()]
    return {"rewrite_id": made.rewrite_id, "batch_id": made.batch_id, "stores": stores}


if __name__ == "__main__":
    main()
