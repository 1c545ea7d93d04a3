"""The process in which another Spark rewrites state: see `other_spark`. Orders and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.session import start_application
from dagster_ckpt.state.rewriting import rewrite_state
from dagster_ckpt.state.shape import StateShape


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
    provider, partitions, version = order["shape"]
    settings = {"spark.ui.enabled": "false", **order["settings"]}
    spark = start_application(os.cpu_count() or 1, settings)
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
