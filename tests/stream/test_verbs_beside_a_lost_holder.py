"""A verb that changes where a stream stands, while a holder of its lease may still live somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, housekeeping
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream import ownership
from dagster_ckpt.stream.lease import acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import fence_predecessor
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

ELSEWHERE = replace(this_holder("theirs", "their run", None), host="another-machine")


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    """A stream whose holder is on a machine that nobody reaches, and has not renewed its lease."""
    monkeypatch.setattr(ownership, "SHORTEST_WAIT_S", 0.0)
    history = History(tmp_path)
    clock = ManualClock()
    stream = history.shelf.stream
    monkeypatch.setattr(stream.catalog.database, "_clock", clock)
    acquire(stream.catalog, STREAM, ELSEWHERE)
    clock.now_ms += 60_000
    yield history
    history.close()


def test_a_fork_into_its_stream_fences_its_query_in_the_directory_that_it_runs_in(history: History) -> None:
    stream = history.shelf.stream
    runs_in = history.live
    original = replace(stream, stream_id="original", name="original", asset_key="original")
    fork(stream, original, StartFrom(), origin="a test")
    as_writer(stream.catalog, "original").streams.restore_finished()

    fork(original, stream, StartFrom(), origin="a test", replace_state=True)

    assert history.live != runs_in
    assert runs_in.fenced_at() == LAST + 1


def test_a_clean_up_after_a_cancel_leaves_its_query_fenced(history: History) -> None:
    stream = history.shelf.cleaning_up(ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION).stream
    runs_in = history.live

    apply_terminal_retention(stream, "first", TerminalState.CANCELED)
    housekeeping(stream)

    assert stream.catalog.streams.get(STREAM).live_directory is None
    assert runs_in.fenced_at() == LAST + 1
    assert not acquire(stream.catalog, STREAM, this_holder("mine", "my run", None)).predecessor_ended


def test_what_is_fenced_goes_with_the_clean_up_after_a_later_end(history: History) -> None:
    stream = history.shelf.cleaning_up(ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION).stream
    acquired = acquire(stream.catalog, STREAM, this_holder("mine", "my run", None))
    fence_predecessor(stream, acquired)
    stream.catalog.leases.release(acquired.record)

    apply_terminal_retention(stream, "first", TerminalState.CANCELED)

    assert not LiveDirectory(str(history.shelf.live)).exists()
