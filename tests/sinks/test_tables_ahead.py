"""A table has batches of the query that the live directory has lost: no start lets the table drop their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.errors import RowsAtRiskError, SinkRollbackError
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.sinks.table import TablePlan
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History


class StartedError(BaseException):
    """The query would start now, in `live`."""

    def __init__(self, live: LiveDirectory) -> None:
        self.live = live


class Table:
    """A stream and its table, written by hand; `moved` has the versions or snapshots that a start made current."""

    def __init__(self, root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.history, self.folder, self.kind = History(root), root / "table", kind
        self.old_id = self.history.query_id
        self.moved: list[int | None] = []
        (self.delta if kind == "delta" else self.iceberg)(LAST)
        name = f"DeltaSink[{self.folder}]" if kind == "delta" else f"IcebergTable[{self.folder}]"
        noted = {"batch_id": LAST, "query_id": self.old_id, "sinks": [name], "sink_ids": {name: {"id": "a"}}}
        as_writer(self.history.shelf.stream.catalog, STREAM).executions.heartbeat("first", noted)
        # Both need a session.
        sink = DeltaTable if kind == "delta" else IcebergTable
        monkeypatch.setattr(sink, "commit", self._commit)
        monkeypatch.setattr(sink, "fence", lambda *_: None)
        monkeypatch.setattr(IcebergTable, "plan", IcebergTable.foresee)

    def _commit(self, plan: TablePlan) -> None:
        self.moved.append(plan.basis.version if self.kind == "delta" else plan.basis[1].snapshot_id)

    def delta(self, last: int) -> None:
        for batch in range(last + 1):
            actions = [{"txn": {"appId": self.old_id, "version": batch}}, {"add": {"path": str(batch)}}]
            actions += [] if batch else [{"metaData": {"id": "a"}}]
            path = self.folder / f"_delta_log/{batch:020}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(json.dumps, actions)))

    def iceberg(self, current: int, *, compacted_ms: int | None = None) -> None:
        snapshots = [
            {
                "snapshot-id": 100 + batch,
                "parent-snapshot-id": 99 + batch if batch else None,
                "timestamp-ms": batch,
                "summary": {"spark.sql.streaming.queryId": self.old_id, "spark.sql.streaming.epochId": str(batch)},
            }
            for batch in range(LAST + 1)
        ]
        if compacted_ms is not None:
            # All snapshots before that have expired.
            summary = {"operation": "replace"}
            compacted = {"snapshot-id": 100 + current, "parent-snapshot-id": 99 + current, "timestamp-ms": compacted_ms}
            snapshots = [{**compacted, "summary": summary}]
        metadata = {"table-uuid": "a", "current-snapshot-id": 100 + current, "snapshots": snapshots}
        path = self.folder / "metadata/v1.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(metadata))

    def at(self, batch: int) -> int:
        """Its version or snapshot of a batch."""
        return batch if self.kind == "delta" else 100 + batch

    def lose(self, *batches: int, logs: tuple[str, ...] = ("offsets", "commits")) -> None:
        for batch in batches:
            for log in logs:
                (self.history.shelf.live / log / str(batch)).unlink()

    def start(self, text: str = "latest", **how: bool) -> LiveDirectory:
        def started(live: LiveDirectory) -> None:
            raise StartedError(live)

        request = RunRequest(run_id="run", start_query=started, start_from=StartFrom(text, **how))  # type: ignore[arg-type]
        with pytest.raises(StartedError) as error:
            execute_stream(self.history.shelf.stream, request)
        return error.value.live

    def forecast(self) -> list[SinkEffect]:
        return [each.effect for each in verbs.start_preview(self.history.shelf.stream, StartFrom()).sinks]


@pytest.fixture(params=["delta", "iceberg"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    table = Table(tmp_path, request.param, monkeypatch)
    yield table
    table.history.close()


def test_the_newest_batch_is_undone_and_run_again_under_a_new_query_id(table: Table) -> None:
    table.lose(LAST)

    assert table.forecast() == [SinkEffect.EXACT]
    live = table.start()

    assert (live.positions().commit, table.moved) == (LAST - 1, [table.at(LAST - 1)])
    assert live_query_id(live) != table.old_id


@pytest.mark.parametrize("is_planned", [False, True])
def test_more_batches_are_not_undone_unasked(table: Table, *, is_planned: bool) -> None:
    table.lose(LAST - 2, logs=("commits",) if is_planned else ("offsets", "commits"))
    table.lose(LAST - 1, LAST)

    assert table.forecast() == [SinkEffect.IRREVERSIBLE]
    with pytest.raises(SinkRollbackError, match=rf"Start with start_from=batch-{LAST - 3}, which takes the sink back"):
        table.start()
    assert table.moved == []

    live = table.start(f"batch-{LAST - 3}")
    assert (live.positions().commit, table.moved) == (LAST - 3, [table.at(LAST - 3)])
    assert live_query_id(live) != table.old_id


@pytest.mark.parametrize("lost", [(), ("commits",)], ids=["stopped", "killed in a batch"])
def test_a_table_at_the_batch_of_its_query_is_left_alone(table: Table, lost: tuple[str, ...]) -> None:
    table.lose(LAST, logs=lost)

    assert table.forecast() == []
    live = table.start()

    assert (live_query_id(live), table.moved) == (table.old_id, [])


def test_an_iceberg_table_that_a_person_took_back_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, "iceberg", monkeypatch)
    table.lose(LAST - 1, LAST)
    table.iceberg(current=LAST - 2)
    noted = {"batch_id": LAST - 2}
    as_writer(table.history.shelf.stream.catalog, STREAM).executions.heartbeat("first", noted)

    assert table.forecast() == []
    assert live_query_id(table.start()) == table.old_id
    table.history.close()


@pytest.mark.parametrize(("after_ms", "is_sure"), [(1, False), (-120_000, True)], ids=["since", "before"])
def test_a_batch_whose_snapshot_may_have_expired_is_not_written_twice_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after_ms: int, is_sure: bool
) -> None:
    """Killed in its batch; then the table was compacted, and its other snapshots have expired."""
    table = Table(tmp_path, "iceberg", monkeypatch)
    table.lose(LAST, logs=("commits",))
    planned_ms = 1_000 * LAST
    table.iceberg(LAST + 1, compacted_ms=planned_ms + after_ms)

    if not is_sure:
        assert table.forecast() == [SinkEffect.LOSE]
        with pytest.raises(RowsAtRiskError, match=f"Delete the rows of batch {LAST} if the table has them"):
            table.start()
    assert live_query_id(table.start(accept_loss=not is_sure)) == table.old_id
    table.history.close()
