"""What a process without Spark, such as an operator's command line, learns of tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.sink import Replay, SinkEffect, newest_batch


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)


def test_the_log_of_a_delta_table_is_read(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    for batch in range(3):
        actions = [{"txn": {"appId": "query", "version": batch}}, {"add": {"path": f"{batch}", "dataChange": True}}]
        (log / f"{batch:020}.json").write_text("\n".join(map(json.dumps, actions)))
    table = DeltaTable(f"DeltaSink[{tmp_path}]", str(tmp_path))

    forecast = table.forecast(Replay(to_batch=1, query_id="query", query_ids=["query"]))

    assert newest_batch(table, "query") == 2
    assert forecast.effect is SinkEffect.EXACT, forecast


def test_an_iceberg_table_is_looked_for_in_its_folder(tmp_path: Path) -> None:
    table = IcebergTable(f"IcebergTable[lake.orders at {tmp_path}]", "lake.orders", str(tmp_path))

    forecast = table.forecast(Replay(to_batch=-1, query_id="query", query_ids=["query"]))

    assert newest_batch(table, "query") is None
    assert forecast.effect is SinkEffect.EXACT, forecast
