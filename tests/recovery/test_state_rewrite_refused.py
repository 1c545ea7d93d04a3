"""What a start says before it rewrites state: which change is allowed, possible, and offered by this Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, OnStateChange, PinnedState, StatePartitions
from dagster_ckpt.errors import (
    CkptError,
    OptionError,
    StateBackendChangeError,
    StatePartitionsError,
)
from dagster_ckpt.recovery import query_plan_check
from dagster_ckpt.recovery.plan import RecoveryPlan, Resume, Rewind, StartEmpty
from dagster_ckpt.recovery.query_plan_check import check_state
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.state.stopped_state import StateShape, StoredState
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.rewind_history import History

RESUME = Resume(reason="it goes on", point="live")
STRICT = {"spark.sql.streaming.statefulOperator.useStrictDistribution": "true"}
FORMAT_2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
V2 = EmbeddedRocksDBStateBackend(True, settings=FORMAT_2)
Changed = Callable[..., StreamHandle]


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Changed]:
    """A stream with five partitions of RocksDB."""
    history = History(tmp_path)
    shape = StateShape(ROCKSDB, 5)
    stored = StoredState(shape, ("stateStoreSave",), settings=STRICT)
    monkeypatch.setattr(query_plan_check, "shape_in", lambda _live: shape)
    monkeypatch.setattr(query_plan_check, "stored_state", lambda _live: stored)
    monkeypatch.setattr(query_plan_check, "pinned_state", lambda _live: PinnedState(ROCKSDB))

    def changed(**fields: Any) -> StreamHandle:
        return replace(history.shelf.stream, **fields)

    yield changed
    history.close()


@pytest.mark.parametrize(
    ("fields", "partitions", "becomes"),
    [
        ({}, None, None),
        ({}, 12, StateShape(ROCKSDB, 12)),
        ({"state_partitions": StatePartitions(5)}, None, None),
        ({"state_partitions": StatePartitions(12)}, 12, StateShape(ROCKSDB, 12)),
        ({"state_partitions": StatePartitions(12, OnStateChange.CONVERT)}, None, StateShape(ROCKSDB, 12)),
        ({"backend": HashMapStateBackend(), "on_backend_change": OnStateChange.CONVERT}, None, StateShape(HEAP, 5)),
        ({"backend": HashMapStateBackend(), "on_backend_change": OnStateChange.CONVERT}, 3, StateShape(HEAP, 3)),
        ({"backend": V2, "on_backend_change": OnStateChange.CONVERT}, None, StateShape(ROCKSDB, 5, 2)),
        ({"backend": EmbeddedRocksDBStateBackend(True)}, None, None),
        ({"backend": EmbeddedRocksDBStateBackend(False), "on_backend_change": OnStateChange.CONVERT}, None, None),
    ],
)
def test_what_a_start_rewrites(
    stream: Changed, fields: dict[str, Any], partitions: int | None, becomes: StateShape | None
) -> None:
    checked = check_state(stream(**fields), RESUME, StartFrom(state_partitions=partitions))
    assert checked.rewrite == becomes
    assert any("the state is rewritten: 5 partitions" in message for message in checked.messages) is (
        becomes is not None
    )


@pytest.mark.parametrize(
    ("fields", "plan", "partitions", "error", "why"),
    [
        (
            {"state_partitions": StatePartitions(12)},
            RESUME,
            None,
            StatePartitionsError,
            r"in 5 partitions, but the max parallelism is 12.*allow_state_rewrite=True",
        ),
        ({"state_partitions": StatePartitions(8)}, RESUME, 12, OptionError, "state_partitions is 12, but the max"),
        ({"backend": HashMapStateBackend()}, RESUME, None, StateBackendChangeError, "on_change: CONVERT"),
        # Spark would go on in the format of the newest commit.
        ({"backend": V2}, RESUME, None, StateBackendChangeError, "in checkpoint format v1, but .* to 2.*CONVERT"),
    ],
)
def test_what_is_refused(
    stream: Changed,
    fields: dict[str, Any],
    plan: RecoveryPlan,
    partitions: int | None,
    error: type[CkptError],
    why: str,
) -> None:
    with pytest.raises(error, match=why):
        check_state(stream(**fields), plan, StartFrom(state_partitions=partitions))


def test_the_state_of_the_directory_that_the_start_goes_back_to_is_compared(
    stream: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"/origin": PinnedState(HEAP)}
    monkeypatch.setattr(query_plan_check, "pinned_state", lambda live: stored.get(live.url, PinnedState(ROCKSDB)))
    looked_at: list[str] = []
    monkeypatch.setattr(query_plan_check, "check_pinned_provider", lambda live: looked_at.append(live.url))
    plan = Rewind(reason="back", to_batch=1, point="batch-1", directory="/origin")

    with pytest.raises(StateBackendChangeError, match="on_change: CONVERT"):
        check_state(stream(backend=EmbeddedRocksDBStateBackend(True)), plan, StartFrom())
    assert looked_at == ["/origin"]


def test_an_empty_start_rewrites_nothing(stream: Changed) -> None:
    assert check_state(stream(), StartEmpty(reason="empty"), StartFrom()).rewrite is None
    with pytest.raises(OptionError, match="start_from is 'empty', which keeps none"):
        StartFrom("empty", state_partitions=12)
    with pytest.raises(OptionError, match="state_partitions is 0"):
        StartFrom("latest", state_partitions=0)
