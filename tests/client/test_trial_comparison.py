"""What a preflight says of the state that new code computed. Spark's part is played here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_ckpt.client import preflight
from dagster_ckpt.client.preflight import MOST_ROWS, compare_trial
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.diff import Change
from dagster_ckpt.state.reading import StateName
from tests.support.golden_stream import GoldenStream

NAME = StateName(0, "stateStoreSave", "default", 2)
SAME = dict.fromkeys(Change, 0)


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path).make()
    yield golden
    assert not [path for path in (tmp_path / "live" / SCRATCH_FOLDER).rglob("*") if path.is_file()]
    golden.close()


@pytest.fixture
def compare(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Compares the live directory with itself, where Spark finds these numbers of changed rows."""

    def compare(counts: Any, note: str | None = None) -> list[str]:
        found = SimpleNamespace(name=NAME, counts=counts, note=note, is_empty=not any(counts.values()))
        monkeypatch.setattr(
            preflight, "readers_of", lambda _spark, live, _batches: nullcontext({4: SimpleNamespace(states=live)})
        )
        monkeypatch.setattr(preflight, "paired", lambda before, after: (before, after))
        monkeypatch.setattr(preflight, "differences", lambda *_: [found])
        live = LiveDirectory(golden.live_url)
        return compare_trial(golden.stream, lambda: None, live, live, 4)  # type: ignore[arg-type, return-value]

    return compare


def test_the_same_state_is_said_in_one_message(compare: Callable[..., list[str]]) -> None:
    assert compare(SAME) == ["after batch 4 the new code has the same state as the running code"]


def test_each_state_that_differs_is_named_with_its_rows(compare: Callable[..., list[str]]) -> None:
    assert compare(SAME | {Change.ADDED: 2, Change.CHANGED: 3}, "the two have different types of values") == [
        "after batch 4 the new code has different state than the running code: default of operator 0 (stateStoreSave): "
        "2 rows added, 3 rows changed (the two have different types of values)"
    ]


def test_a_large_state_is_not_compared(
    compare: Callable[..., list[str]], golden: GoldenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = SimpleNamespace(state_rows=MOST_ROWS + 1)
    monkeypatch.setattr(golden.stream.catalog.snapshots, "newest_checkpoint", lambda _stream: newest)
    [message] = compare(SAME)
    assert "1,000,001 rows is not compared" in message


def test_what_cannot_be_read_fails_no_preflight(
    compare: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise LiveDirectoryError("the batch is purged")

    monkeypatch.setattr(preflight, "clone", broken)
    assert compare(SAME) == [
        "the state after batch 4 was not compared with that of the running code: the batch is purged"
    ]
