"""Whoever reads a snapshot holds it: verification, forks and restarts beside a stream that deletes old checkpoints."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import RequestRecord, RequestStatus, SnapshotRecord
from dagster_ckpt.client.examination import verify_snapshot
from dagster_ckpt.errors import CkptError, LiveDirectoryError, RequestFailedError, SnapshotNotFoundError
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, discard, housekeeping, subsume
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind, TerminalState
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.running_process import RunningProcess, subsume_checkpoints
from tests.support.taken_snapshot import taken
from tests.support.verbs import restart

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path)
    made.shelf.stream = replace(made.shelf.stream, options=replace(made.shelf.stream.options, num_retained=1))
    return made


def checkpoint(history: History) -> SnapshotRecord:
    """A real checkpoint of the live directory."""
    return taken(history.shelf, SnapshotKind.CHECKPOINT)


def while_it_reads(
    monkeypatch: pytest.MonkeyPatch, method: str, meanwhile: Callable[[], None], of: SnapshotRecord | None = None
) -> list[str]:
    """Let something happen once while the store reads a snapshot, or this one."""
    real = getattr(ObjectSnapshotStore, method)
    done: list[str] = []

    def slow(self: ObjectSnapshotStore, location: str, *args: Any, **how: Any) -> Any:
        if not done and (of is None or location == of.location):
            done.append(location)
            meanwhile()
        return real(self, location, *args, **how)

    monkeypatch.setattr(ObjectSnapshotStore, method, slow)
    return done


@pytest.mark.parametrize("reader", ["verify", "fork", "preview", "prepare"])
def test_what_is_being_read_is_deleted_only_afterwards(
    history: History, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Known defect 3: of 67 verifications 31 and of 67 forks 46 failed beside a running stream."""
    stream = history.shelf.stream
    old = checkpoint(history)
    history.commit(LAST + 1)
    checkpoint(history)
    seen: list[str] = []

    def subsumed_meanwhile() -> None:
        subsume_checkpoints(history)
        seen.extend(hold.holder for hold in stream.catalog.holds.on(old.snapshot_id))

    while_it_reads(monkeypatch, "verify" if reader == "verify" else "extract", subsumed_meanwhile, old)
    start_from = StartFrom(old.snapshot_id)
    if reader == "verify":
        assert verify_snapshot(stream, old.location or "").problems == ()
    elif reader == "fork":
        assert fork(stream, replace(stream, stream_id="copy"), start_from, origin="a test").batch_id == LAST
    elif reader == "preview":
        assert verbs.start_preview(stream, start_from).batches == 1
    else:
        with holding(stream.catalog, [old], "prepare"):
            history.start(old.snapshot_id)

    assert len(seen) == 1
    assert stream.store.verify(old.location or "") == []
    if reader == "fork":
        # Until the fork is started, it names what it began with.
        as_writer(stream.catalog, "copy").streams.restore_finished()
    if reader == "prepare":
        # The new timeline began with it: without another checkpoint there, a recovery would take it.
        subsume_checkpoints(history)
        assert old.location in stream.store.checkpoints()
        checkpoint(history)
    subsume_checkpoints(history)
    assert old.location not in stream.store.checkpoints()
    assert stream.catalog.holds.on(old.snapshot_id) == []


def test_a_stale_name_is_told_as_what_it_is_and_never_as_damage(history: History) -> None:
    stream = history.shelf.stream
    old = checkpoint(history)
    history.commit(LAST + 1)
    new = checkpoint(history)
    subsume_checkpoints(history)

    for read in (
        lambda: verify_snapshot(stream, old.location or ""),
        lambda: verbs.start_preview(stream, StartFrom(old.snapshot_id)),
        lambda: fork(stream, replace(stream, stream_id="copy"), StartFrom(f"chk-{old.number}"), origin="a test"),
    ):
        with pytest.raises(SnapshotNotFoundError, match=f"chk-{new.number}"):
            read()


def test_readers_beside_a_stream_that_makes_room_all_the_time(tmp_path: Path) -> None:
    """`f_race.py` without a JVM: each reader has what it has listed, or is told that it is gone."""
    shelf = Shelf.at(tmp_path, num_retained=1)
    shelf.checkpoint()
    over = threading.Event()
    wrong: list[str] = []
    read = [0]

    def reads() -> None:
        while not over.is_set():
            snapshot = shelf.stream.catalog.snapshots.completed(STREAM)[0]
            try:
                with holding(shelf.stream.catalog, [snapshot], "a reader"):
                    problems = shelf.stream.store.verify(snapshot.location or "")
                    wrong.extend(problems)
                    read[0] += 1
            except SnapshotNotFoundError as told:
                if "it was listed" not in str(told):
                    wrong.append(str(told))
            except CkptError as error:
                wrong.append(repr(error))

    readers = [threading.Thread(target=reads) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(15):
        shelf.checkpoint()
        discard(shelf.stream, subsume(shelf.stream), reason="subsumed", lease=None)
    over.set()
    for reader in readers:
        reader.join()
    discard(shelf.stream, subsume(shelf.stream), reason="subsumed", lease=None)

    assert wrong == []
    assert read[0] > 5
    assert len(shelf.listed()) == 1


def test_a_reader_that_was_killed_keeps_its_snapshot_no_longer_than_its_hold_lasts(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    snapshot = shelf.checkpoint()
    shelf.stream.catalog.holds.use([snapshot], holder="killed", ttl_ms=0)
    shelf.checkpoint()

    report = discard(shelf.stream, subsume(shelf.stream), reason="subsumed", lease=None)

    assert report.held == ()
    assert shelf.deletions() == [snapshot.snapshot_id]


def test_the_hold_of_a_slow_reader_is_renewed(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    snapshot = shelf.checkpoint()
    renewed = threading.Event()
    real = shelf.stream.catalog.holds.renew

    def renew(ids: list[str], ttl_ms: int) -> bool:
        found = real(ids, ttl_ms)
        renewed.set()
        return found

    shelf.stream.catalog.holds.renew = renew  # type: ignore[method-assign, assignment]
    with holding(shelf.stream.catalog, [snapshot], "slow", ttl_ms=3_000):
        assert renewed.wait(30)
        assert len(shelf.stream.catalog.holds.on(snapshot.snapshot_id)) == 1
    assert shelf.stream.catalog.holds.on(snapshot.snapshot_id) == []


def test_at_the_end_of_a_stream_what_is_read_is_left_for_a_later_pass(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    snapshot, other = shelf.checkpoint(), shelf.checkpoint()
    with holding(shelf.stream.catalog, [snapshot], "verification"):
        report = apply_terminal_retention(shelf.stream, "first", TerminalState.CANCELED)
        assert (len(report.deleted), len(report.held)) == (1, 1)
        assert any("kept for now: chk-1" in line for line in report.messages())
        assert not shelf.stream.catalog.executions.get("first").settled
    assert shelf.deletions() == [other.snapshot_id]

    apply_terminal_retention(shelf.stream, "first", TerminalState.CANCELED)

    assert shelf.stream.catalog.executions.get("first").settled
    assert shelf.stream.store.checkpoints() == []


def test_a_tagged_checkpoint_stays_at_the_end_and_takes_nobodys_place(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path, num_retained=1)
    kept = shelf.checkpoint()
    shelf.stream.catalog.holds.tag(kept.snapshot_id, label="keep", holder="a person")
    shelf.checkpoint()
    assert subsume(shelf.stream) == []

    report = apply_terminal_retention(shelf.stream, "first", TerminalState.CANCELED)

    assert "tag by a person" in report.kept[0]
    assert shelf.listed() == {kept.snapshot_id}
    assert shelf.is_whole(kept)
    assert shelf.stream.catalog.executions.get("first").settled
    assert housekeeping(shelf.stream).deleted == ()


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_ckpt.client.requests.POLL_S", 0.02)


@pytest.mark.usefixtures("quick_polls")
@pytest.mark.parametrize("name", ["id", "number", "latest-checkpoint"])
def test_a_restart_finds_its_checkpoint_however_many_the_stream_has_taken_meanwhile(
    history: History, name: str
) -> None:
    """Known defect 3, `f_restart.py`: in 3 of 5 tries the stream was left suspended."""
    stream = history.shelf.stream
    target = checkpoint(history)

    def takes_two_more() -> None:
        for batch in (LAST + 1, LAST + 2):
            history.commit(batch)
            checkpoint(history)
            subsume_checkpoints(history)

    word = {"id": target.snapshot_id, "number": f"chk-{target.number}"}.get(name, name)
    with RunningProcess(history, before_the_stop=takes_two_more) as process:
        ahead = restart(stream, StartFrom(word, accept_loss=True), origin=ORIGIN, timeout_s=30)

    assert ahead.plan.snapshot is not None
    assert ahead.plan.snapshot.snapshot_id == target.snapshot_id
    assert stream.store.verify(target.location or "") == []
    assert [request.arguments["start_from"] for request in process.starts] == [word]
    # Answered, it is nobody's any more.
    subsume_checkpoints(history)
    assert target.location not in stream.store.checkpoints()


@pytest.mark.usefixtures("quick_polls")
def test_a_restart_that_is_refused_once_the_stream_is_suspended_starts_it_again(history: History) -> None:
    stream = history.shelf.stream
    told: list[str] = []

    def purge() -> None:
        # As Spark does: the batch to go back to is not retained any more.
        for folder in ("offsets", "commits"):
            (history.shelf.live / folder / "5").unlink()

    refused = pytest.raises(LiveDirectoryError, match="cannot go back to batch 5")
    running = RunningProcess(history, before_the_stop=purge)
    with running as process, refused:
        restart(stream, StartFrom("batch-5"), origin=ORIGIN, timeout_s=30, report=told.append)

    assert [request.arguments["start_from"] for request in process.starts] == ["latest"]
    assert re.search("was refused .* started again where it stopped", told[-1])


@pytest.mark.usefixtures("quick_polls")
def test_a_restart_whose_start_is_refused_by_the_new_code_starts_the_query_again_where_it_stopped(
    history: History,
) -> None:
    """A refused start is settled: nothing else would start the stream again."""
    stream = history.shelf.stream
    target = checkpoint(history)
    told: list[str] = []

    class RefusingProcess(RunningProcess):
        def _start(self, request: RequestRecord) -> None:
            if request.arguments.get("start_from") == f"chk-{target.number}":
                refuse = as_writer(self.catalog).requests.resolve
                refuse(request.request_id, RequestStatus.FAILED, error="PlanChangedError: other keys")
            else:
                super()._start(request)

    refused = pytest.raises(RequestFailedError, match="PlanChangedError: other keys")
    start_from = StartFrom(f"chk-{target.number}")
    with RefusingProcess(history, before_the_stop=lambda: None) as process, refused:
        restart(stream, start_from, origin=ORIGIN, timeout_s=30, report=told.append)

    assert [request.arguments["start_from"] for request in process.starts] == ["latest"]
    assert re.search("was refused .* started again where it stopped", told[-1])
