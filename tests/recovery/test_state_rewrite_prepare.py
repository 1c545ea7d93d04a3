"""A start that rewrites state, killed before any of its changes. The rewrite only copies, so no Spark is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.recovery import live_directories
from dagster_ckpt.recovery.live_directories import StateRewrite
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.lease import AcquiredLease
from dagster_ckpt.stream.ownership import fence_predecessor
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import keeping
from tests.support.executioner import Executioner, Killed
from tests.support.lease_losers import copied_state
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either

SHAPE = StateShape(ROCKSDB, 12)


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_directories, "rewrite_state", copied_state)


def start(history: History, text: str = "latest", *, rewrites: bool = True) -> tuple[RecoveryKind, PreparedStart]:
    stream, spark = history.shelf.stream, Any
    plan = planned_start(stream, StartFrom(text))
    with keeping(stream.catalog, STREAM) as lease:
        fence_predecessor(stream, AcquiredLease(lease.record))
        rewrite = StateRewrite(spark, SHAPE) if rewrites else None  # type: ignore[arg-type]
        return plan.kind, prepare(stream, plan, lease, rewrite=rewrite)


def directories(history: History) -> set[str]:
    return {path.name for path in history.shelf.live.parent.iterdir() if path.is_dir()}


@pytest.mark.parametrize(
    ("text", "kind", "batch"), [("latest", RecoveryKind.RESUME, LAST), ("batch-3", RecoveryKind.REWIND, 3)]
)
def test_the_query_continues_in_a_new_directory_and_the_old_one_stays(
    tmp_path: Path, text: str, kind: RecoveryKind, batch: int
) -> None:
    history = History(tmp_path)
    before = {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()}

    found, prepared = start(history, text)

    assert found is kind
    assert prepared.rewritten is not None
    assert prepared.live == history.live
    assert (history.batch, history.sink_batch) == (batch, batch)
    assert not history.live.is_not_in_use()
    assert {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()} == before
    assert len(directories(history)) == 2
    assert not any("." in name for name in directories(history))
    history.close()


def test_a_rewrite_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path)
    record = history.shelf.stream.catalog.streams.get(STREAM)

    def fails(*_: object, **__: object) -> None:
        raise StateRewriteError("other rows")

    monkeypatch.setattr(live_directories, "rewrite_state", fails)
    for text in ("latest", "batch-3"):
        with pytest.raises(StateRewriteError):
            start(history, text)
        now = history.shelf.stream.catalog.streams.get(STREAM)
        assert (now.live_directory, now.timeline, now.pending_restore) == (
            record.live_directory,
            record.timeline,
            record.pending_restore,
        )
        assert directories(history) == {"live-1-0"}
        assert (history.batch, history.sink_batch) == (LAST, LAST)
    history.close()


@pytest.mark.parametrize(("text", "batch"), [("latest", LAST), ("batch-3", 3)])
def test_killed_at_any_step_the_next_start_goes_on_from_the_old_place_or_from_the_rewritten_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, batch: int
) -> None:
    step, killed, in_new = 0, True, set()
    while killed:
        (tmp_path / str(step)).mkdir()
        history = History(tmp_path / str(step))
        old = history.live
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                start(history, text)
                killed = False
            except Killed:
                step += either(quick=3, thorough=1)
        _, prepared = start(history, rewrites=False)
        assert prepared.live == history.live
        is_new = history.live != old
        in_new.add(is_new)
        wanted = batch if is_new else LAST
        assert (history.batch, history.sink_batch) == (wanted, wanted), f"killed at step {step}"
        start(history, text)
        assert (history.batch, history.sink_batch) == (batch, batch)
        history.close()
    assert in_new == {False, True}
    assert step >= 12
