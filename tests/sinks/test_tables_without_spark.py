"""What a process without Spark, such as an operator's command line, learns of tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from dagster_ckpt.errors import SinkRollbackError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.sinks import delta_log
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.iceberg_history import IcebergPlan
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.sinks.sink import Replay, RollBack, Sink, SinkEffect, newest_batch
from dagster_ckpt.sinks.table import TablePlan
from dagster_ckpt.spark.query.output import iceberg_name


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)


def delta_table(folder: Path, batches: range) -> DeltaTable:
    """A table whose version of each of these batches is in its log, and no other."""
    log = folder / "_delta_log"
    log.mkdir(exist_ok=True)
    for batch in batches:
        actions = [{"txn": {"appId": "query", "version": batch}}, {"add": {"path": f"{batch}", "dataChange": True}}]
        (log / f"{batch:020}.json").write_text("\n".join(map(json.dumps, actions)))
    return DeltaTable(f"DeltaSink[{folder}]", str(folder))


def iceberg_table(folder: Path) -> IcebergTable:
    """A table that others have gone on with, and whose older snapshots have expired; a branch has the stream's."""
    batch = {"spark.sql.streaming.queryId": "query", "spark.sql.streaming.epochId": "2"}
    metadata = {
        "current-snapshot-id": 4,
        "snapshots": [
            {"snapshot-id": 2, "parent-snapshot-id": 1, "timestamp-ms": 200_000, "summary": batch},
            {"snapshot-id": 4, "parent-snapshot-id": 3, "timestamp-ms": 400_000, "summary": {"operation": "append"}},
        ],
        "refs": {"main": {"snapshot-id": 4, "type": "branch"}, "backup": {"snapshot-id": 2, "type": "branch"}},
        "snapshot-log": [{"snapshot-id": 4, "timestamp-ms": 400_000}],
    }
    (folder / "metadata").mkdir()
    (folder / "metadata" / "v1.metadata.json").write_text(json.dumps(metadata))
    return IcebergTable(f"IcebergTable[lake.orders at {folder}]", "lake.orders", str(folder))


def test_the_log_of_a_delta_table_is_read(tmp_path: Path) -> None:
    table = delta_table(tmp_path, range(3))

    forecast = table.forecast(Replay(to_batch=1, query_id="query", query_ids=["query"]))

    assert newest_batch(table, "query") == 2
    assert forecast.effect is SinkEffect.EXACT, forecast


def test_a_commit_that_is_deleted_while_the_log_is_read_is_not_taken_for_a_missing_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Delta does with old commits when any writer writes a checkpoint."""
    table = delta_table(tmp_path, range(3))
    listed = delta_log._versions

    def versions(files: FileIO) -> set[int]:
        found = listed(files)
        (tmp_path / "_delta_log" / f"{0:020}.json").unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(delta_log, "_versions", versions)
        forecast = table.forecast(Replay(to_batch=-1, query_id="query", query_ids=["query"]))
        delta_table(tmp_path, range(1))
        with pytest.raises(StorageAccessError, match="was deleted while the log was read"):
            table.roll_back(RollBack(-1, query_id="query", query_ids=["query"]), nullcontext)

    assert forecast.effect is SinkEffect.UNREACHABLE
    assert table.forecast(Replay(to_batch=-1, query_id="query", query_ids=["query"])).effect is SinkEffect.LOSE


def test_an_iceberg_table_is_looked_for_in_its_folder(tmp_path: Path) -> None:
    table = IcebergTable(f"IcebergTable[lake.orders at {tmp_path}]", "lake.orders", str(tmp_path))

    forecast = table.forecast(Replay(to_batch=-1, query_id="query", query_ids=["query"]))

    assert newest_batch(table, "query") is None
    assert forecast.effect is SinkEffect.EXACT, forecast


@pytest.mark.parametrize(
    ("table", "location"),
    [
        ("lake.orders", None),
        ("lake.orders", "file:/lake/orders"),
        ("lake.orders", "s3://lake/sales at home"),
        ("lake.sales at home", None),
        ("lake.sales at home", "/lake/sales"),
        ("/lake/sales at home", None),
        ("s3://lake/sales at home/orders", None),
    ],
)
def test_an_iceberg_table_is_known_again_by_its_recorded_name(table: str, location: str | None) -> None:
    found = sink_of(iceberg_name(table, location))

    assert isinstance(found, IcebergTable)
    assert (found.table, found.location) == (table, location)


def test_a_branch_that_may_keep_what_main_had_is_not_taken_for_the_streams(tmp_path: Path) -> None:
    """Main lacks the batch that the start returns to: with the branch as the stream's, nothing was to be undone."""
    table = iceberg_table(tmp_path)

    forecast = table.forecast(Replay(to_batch=2, query_id="query", query_ids=["query"]))

    assert forecast.effect is SinkEffect.LOSE
    assert "in branch backup of the Iceberg table lake.orders alone" in forecast.reason
    with pytest.raises(SinkRollbackError, match=r"AS OF VERSION 2, then .* DROP BRANCH `backup`"):
        table.check_roll_back(RollBack(2, query_id="query", query_ids=["query"]))


@pytest.mark.parametrize(
    ("branches", "advice"),
    [
        ({"audit": 3}, "CREATE OR REPLACE BRANCH `audit` AS OF VERSION 2"),
        ({}, r"CALL lake.system.set_current_snapshot\('orders', 2\)"),
    ],
    ids=["still there", "dropped"],
)
def test_main_is_not_moved_back_if_the_stream_writes_to_a_branch_that_was_published(
    tmp_path: Path, branches: dict[str, int], advice: str
) -> None:
    """`fast_forward` makes the newest snapshot of the branch that of main."""
    table = iceberg_table(tmp_path)
    path = tmp_path / "metadata" / "v1.metadata.json"
    own = {"spark.sql.streaming.queryId": "query", "operation": "append"}
    snapshots = [
        {"snapshot-id": batch + 1, "parent-snapshot-id": batch, "timestamp-ms": batch * 100_000}
        | {"summary": {**own, "spark.sql.streaming.epochId": str(batch)} if batch else {"operation": "append"}}
        for batch in range(3)
    ]
    log = [{"snapshot-id": 1, "timestamp-ms": 0}, {"snapshot-id": 3, "timestamp-ms": 250_000}]
    refs = {name: {"snapshot-id": head, "type": "branch"} for name, head in {"main": 3, **branches}.items()}
    metadata = {"current-snapshot-id": 3, "snapshots": snapshots, "refs": refs, "snapshot-log": log}
    path.write_text(json.dumps(metadata))

    assert table.forecast(Replay(to_batch=1, query_id="query", query_ids=["query"])).effect is SinkEffect.IRREVERSIBLE
    with pytest.raises(SinkRollbackError, match=advice):
        table.check_roll_back(RollBack(1, query_id="query", query_ids=["query"]))


@pytest.mark.parametrize("made", [lambda folder: delta_table(folder, range(3, 6)), iceberg_table])
def test_a_table_of_which_too_little_is_known_is_left_to_a_start_with_a_new_query_id(
    tmp_path: Path, made: Callable[[Path], Sink]
) -> None:
    table = made(tmp_path)

    with pytest.raises(SinkRollbackError, match="new_query_id"):
        table.check_roll_back(RollBack(1, query_id="query", query_ids=["query"]))
    table.check_roll_back(RollBack(1, query_id="query", query_ids=["query"], may_repeat=True))


@pytest.mark.parametrize(("branch", "fences"), [(None, 1), ("audit", 0)])
def test_main_is_not_written_for_a_stream_that_writes_to_a_branch(branch: str | None, fences: int) -> None:
    opened = Mock()
    found = IcebergPlan(branch=branch)

    IcebergTable("IcebergTable[lake.orders]", "lake.orders", None).fence(
        TablePlan(moves=False, how="Nothing is undone", basis=(opened, found))
    )

    assert opened.add_fence.call_count == fences
