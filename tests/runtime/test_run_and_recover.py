"""Real queries: whatever is lost, restored or rewound, the output is that of an uninterrupted run."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, ExecutionStatus, RequestKind, RequestStatus, SnapshotRecord
from dagster_ckpt.client import requests
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend
from dagster_ckpt.errors import (
    LeaseHeldError,
    LiveDirectoryError,
    RequestFailedError,
    SinkRollbackError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StateBackendChangeError,
    StorageAccessError,
    StreamNotFoundError,
)
from dagster_ckpt.recovery import prepare
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.metrics import COMPLETED, LAST_SIZE
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, RecoveryClaimMode, TerminalState
from tests.support import verbs
from tests.support.query_bench import Bench, Person, make_stream, when
from tests.support.small_spark import lose, small_spark

pytestmark = pytest.mark.spark
ORIGIN = "a test"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        apply_state_backend(session, EmbeddedRocksDBStateBackend(True))
        yield session


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    return Bench(spark, tmp_path, make_stream(tmp_path))


def test_checkpoints_are_taken_from_the_running_query_and_retained_in_order(bench: Bench) -> None:
    bench.feed(6)
    bench.run(
        bench.feeding(
            lambda: len(bench.snapshots()) >= 2 and (bench.snapshots()[0].number or 0) >= 4 and bench.committed() >= 5
        )
    )
    kept = bench.snapshots("CHECKPOINT")
    assert len(kept) <= bench.stream.options.num_retained + 1
    assert [snapshot.number for snapshot in kept] == sorted((snapshot.number for snapshot in kept), reverse=True)
    assert all(bench.stream.store.verify(snapshot.location or "") == [] for snapshot in kept)
    # What is written counts the metadata too, which for a state this small is more than half of it.
    assert kept[0].full_bytes > 0
    assert (kept[0].incremental_bytes or 0) > 0
    assert str(kept[0].properties["plan_fingerprint"]).startswith("plan-2:")
    assert kept[0].properties["columns"]
    assert kept[0].properties["parent_snapshot_id"] not in (None, kept[0].snapshot_id)
    figures = {(each.metric, each.kind): each.value for each in bench.stream.catalog.metrics.read()}
    assert figures[COMPLETED, "checkpoint"] >= len(kept)
    assert figures[LAST_SIZE, "checkpoint"] == max(kept, key=lambda each: each.number or 0).full_bytes
    latest = bench.stream.catalog.executions.latest(bench.stream.stream_id)
    assert latest is not None
    assert (latest.progress or {})["state_memory"] > 0
    bench.run_to_the_end()
    bench.assert_exact()


@pytest.mark.thorough
def test_a_real_run_logs_each_transition_exactly_once_and_nothing_while_it_is_idle(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    logged = (
        *(EventType.EXECUTION_STARTED, EventType.EXECUTION_RUNNING, EventType.EXECUTION_ENDED, EventType.RESTORED),
        *(EventType.CHECKPOINT_COMPLETED, EventType.SAVEPOINT_COMPLETED, EventType.SNAPSHOT_DELETED),
    )
    caplog.set_level("INFO", "dagster_ckpt")
    bench.feed(4)

    def has_batches_after_a_snapshot() -> bool:
        taken = bench.snapshots()
        return len(taken) >= 2 and bench.committed() > min(snapshot.batch_id or 0 for snapshot in taken)

    bench.run(bench.feeding(has_batches_after_a_snapshot))
    first = min(bench.snapshots(), key=lambda snapshot: snapshot.number or 0)
    options = replace(bench.stream.options, interval=None)
    bench.stream = replace(bench.stream, options=options)
    quiet: list[tuple[float, int]] = []

    def idle_for_a_while() -> bool:
        if bench.committed() < 3 or not bench.idle():
            quiet.clear()
            return False
        quiet.append((time.monotonic(), len(caplog.records)))
        return quiet[-1][0] - quiet[0][0] > 2.5

    bench.run(idle_for_a_while, start_from=StartFrom(first.snapshot_id))

    assert {lines for _, lines in quiet} == {quiet[0][1]}
    records = [each for each in caplog.records if each.name.startswith("dagster_ckpt")]
    events = [each for each in bench.stream.catalog.events.after(0) if each.type in logged]
    lines = Counter(each.event for each in records if getattr(each, "event", None) is not None)  # type: ignore[attr-defined]
    assert {each.value: lines[each.value] for each in logged} == {
        each.value: sum(1 for event in events if event.type is each) for each in logged
    }
    assert lines[EventType.RESTORED.value] == 2
    messages = [each.getMessage() for each in records]
    # Both runs of this test have the same id.
    repeated = [each for each in messages if messages.count(each) > 1 and not each.startswith("Starting stream")]
    assert repeated == []
    triggered = Counter(each.split()[2] for each in messages if each.startswith("Triggering "))
    completed = Counter(each.split()[2] for each in messages if each.startswith(("Completed ", "Failed ")))
    assert triggered == completed
    assert set(triggered.values()) == {1}
    for word in ("Acquired the lease", "Released the lease", "Starting stream", "took the savepoint"):
        assert any(word in each for each in messages), word


@pytest.mark.core(thorough=True)
def test_it_resumes_in_the_same_live_directory_after_a_stop(bench: Bench) -> None:
    bench.feed(4)
    bench.run(lambda: bench.committed() >= 1)
    before = bench.stream.catalog.streams.get("orders").live_directory
    bench.feed(3)
    bench.run_to_the_end()
    assert bench.stream.catalog.streams.get("orders").live_directory == before
    bench.assert_exact()


@pytest.mark.thorough(but="state is missing")
@pytest.mark.core(thorough=True)
@pytest.mark.parametrize("damage", ["deleted", "a commit is missing", "state is missing"])
def test_a_lost_or_broken_live_directory_is_restored_from_the_newest_snapshot(bench: Bench, damage: str) -> None:
    bench.feed(5)
    bench.run(lambda: any((snapshot.batch_id or 0) >= 2 for snapshot in bench.snapshots()))
    live = Path(bench.stream.catalog.streams.get("orders").live_directory or "")
    if damage == "deleted":
        lose(live)
    elif damage == "a commit is missing":
        shutil.rmtree(live / "commits")
    else:
        shutil.rmtree(live / "state" / "0" / "1")
    bench.feed(3)
    bench.run_to_the_end()
    assert any("restore chk-" in report for report in bench.reports)
    assert any("rolled back the sink" in report for report in bench.reports)
    bench.assert_exact()


@pytest.mark.core
def test_a_rewind_to_a_savepoint_taken_while_it_ran_repeats_and_loses_nothing(bench: Bench) -> None:
    bench.feed(3)
    person = Person(
        when(
            lambda: bench.committed() >= 1,
            lambda: verbs.trigger_savepoint(bench.stream, origin=ORIGIN, label="before"),
        )
    )
    bench.run(lambda: person.done)
    assert person.error is None
    savepoint: SnapshotRecord = person.result
    assert savepoint.kind == "SAVEPOINT"
    bench.feed(5)
    # The bad deployment goes on for a while, and cuts its batches elsewhere than the good one will.
    bench.run(lambda: bench.committed() >= (savepoint.batch_id or 0) + 3)
    bench.run_to_the_end(start_from=StartFrom("before"))
    assert any("batches are processed again" in report for report in bench.reports)
    bench.assert_exact()
    assert bench.stream.store.verify(savepoint.location or "") == []


@pytest.mark.thorough
@pytest.mark.parametrize("mode", RecoveryClaimMode)
def test_the_checkpoint_after_a_restore_needs_nothing_of_the_savepoint_that_it_began_with(
    spark: SparkSession, tmp_path: Path, mode: RecoveryClaimMode
) -> None:
    bench = Bench(spark, tmp_path, make_stream(tmp_path, num_retained=1))
    bench.feed(3)
    bench.run_to_the_end()
    savepoint = verbs.trigger_savepoint(bench.stream, origin=ORIGIN, label="mine")
    place = Path((savepoint.location or "").removeprefix("file://"))
    bench.feed(2)

    def has_checkpoint() -> bool:
        return any((snapshot.number or 0) > (savepoint.number or 0) for snapshot in bench.snapshots("CHECKPOINT"))

    # Otherwise the start links what is unchanged, reads nothing of the savepoint, and so does not prove it.
    shutil.rmtree(tmp_path / "live")
    bench.run(has_checkpoint, start_from=StartFrom("mine", claim_mode=mode))
    # Also a claimed one stays while no query has loaded a newer one.
    assert place.exists()
    if mode is RecoveryClaimMode.CLAIM:
        verbs.trigger_savepoint(bench.stream, origin=ORIGIN, label="newer")
        bench.feed(2)
        shutil.rmtree(tmp_path / "live")
        bench.run(lambda: not place.exists())
    else:
        assert bench.stream.store.verify(savepoint.location or "") == []
        shutil.rmtree(place)
    shutil.rmtree(tmp_path / "live")
    bench.feed(2)
    bench.run_to_the_end()
    assert any("restore chk-" in report for report in bench.reports)
    bench.assert_exact()


@pytest.mark.thorough
def test_a_crash_between_the_switch_and_the_sinks_roll_back_is_finished_by_the_next_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.feed(5)
    bench.run(lambda: len(bench.snapshots()) > 0 and bench.committed() >= 3)
    chosen = bench.snapshots()[-1]

    def die(*_: Any, **_named: Any) -> None:
        raise SinkRollbackError("the process died here")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "roll_back", die)
        with pytest.raises(SinkRollbackError):
            bench.run(lambda: False, start_from=StartFrom(chosen.snapshot_id))
    assert bench.stream.catalog.streams.get("orders").pending_restore is not None
    bench.feed(2)
    bench.run_to_the_end()
    assert bench.stream.catalog.streams.get("orders").pending_restore is None
    bench.assert_exact()


@pytest.mark.core(thorough=True)
def test_a_stop_with_savepoint_ends_the_stream_exactly_there(bench: Bench) -> None:
    bench.feed(4)
    person = Person(
        when(
            lambda: bench.committed() >= 1,
            lambda: verbs.stop_with_savepoint(bench.stream, origin=ORIGIN, label="end"),
        )
    )
    outcome = bench.run(lambda: False)
    while not person.done:
        time.sleep(0.05)
    assert person.error is None
    assert outcome.end.kind is EndKind.FINISHED
    assert outcome.savepoint is not None
    assert outcome.savepoint.batch_id == bench.committed()
    apply_terminal_retention(bench.stream, outcome.execution_id, TerminalState.FINISHED)
    assert [snapshot.kind for snapshot in bench.snapshots()] == ["SAVEPOINT"]
    shutil.rmtree(bench.root / "live")
    bench.feed(2)
    bench.run_to_the_end(start_from=StartFrom("end"))
    bench.assert_exact()


def test_a_stop_whose_savepoint_fails_lets_the_query_go_on(bench: Bench) -> None:
    bench.feed(3)
    (bench.root / "file").write_text("not a folder")
    person = Person(
        when(
            lambda: bench.committed() >= 1,
            lambda: verbs.stop_with_savepoint(
                bench.stream, origin=ORIGIN, target_directory=f"file://{bench.root}/file/savepoints"
            ),
        )
    )

    def went_on() -> bool:
        if person.done and bench.files == 3:
            # A query that was started again moves its watermark on only with new input.
            bench.feed(1)
        return bench.files == 4 and bench.is_at_the_end()

    bench.run(went_on)
    assert isinstance(person.error, RequestFailedError)
    assert any("the query continues" in report for report in bench.reports)
    bench.assert_exact()


@pytest.mark.thorough
def test_a_savepoint_of_a_stopped_stream_is_taken_from_its_quiet_directory(bench: Bench) -> None:
    bench.feed(3)
    bench.run_to_the_end()
    snapshot = verbs.trigger_savepoint(bench.stream, origin=ORIGIN, label="quiet")
    assert snapshot.batch_id == bench.committed()
    with pytest.raises(RequestFailedError, match="is not running"):
        verbs.trigger_checkpoint(bench.stream, origin=ORIGIN)


@pytest.mark.thorough
def test_a_cancel_under_delete_on_cancellation_leaves_nothing_but_savepoints(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = make_stream(tmp_path, cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)
    bench = Bench(spark, tmp_path, stream)
    bench.feed(2)
    outcome = bench.run(lambda: bool(bench.snapshots()))
    verbs.trigger_savepoint(stream, origin=ORIGIN, label="mine")
    apply_terminal_retention(stream, outcome.execution_id, TerminalState.CANCELED)
    assert [snapshot.label for snapshot in bench.snapshots()] == ["mine"]
    assert stream.store.checkpoints() == []
    assert stream.catalog.streams.get("orders").live_directory is None


def test_a_second_run_of_a_live_stream_is_refused(bench: Bench) -> None:
    bench.feed(1)
    other = replace(bench.stream, catalog=Catalog(f"sqlite:///{bench.root / 'catalog.db'}"))
    refused: list[Exception] = []

    def try_a_second() -> bool:
        if not refused and bench.committed() >= 0:
            try:
                execute_stream(other, RunRequest(run_id="second", start_query=bench.start_query))
            except LeaseHeldError as error:
                refused.append(error)
        return bool(refused)

    bench.run(try_a_second)
    assert "is being written by run run " in str(refused[0])


@pytest.mark.thorough
def test_a_start_from_a_snapshot_that_does_not_exist_changes_nothing(bench: Bench) -> None:
    bench.feed(2)
    bench.run(lambda: bool(bench.snapshots()))
    before = bench.stream.catalog.streams.get("orders")
    with pytest.raises(SnapshotNotFoundError, match=r"no snapshot named 'chk-999'.*chk-"):
        bench.run(lambda: False, start_from=StartFrom("chk-999"))
    after = bench.stream.catalog.streams.get("orders")
    assert (after.live_directory, after.timeline) == (before.live_directory, before.timeline)
    bench.run_to_the_end()
    bench.assert_exact()


@pytest.mark.thorough
@pytest.mark.parametrize("harm", ["missing", "truncated", "altered"])
def test_a_damaged_snapshot_is_refused_and_nothing_is_lost(bench: Bench, harm: str) -> None:
    bench.feed(2)
    bench.run(lambda: bool(bench.snapshots()))
    chosen = bench.snapshots()[0]
    metadata = Path((chosen.location or "").removeprefix("file://")) / "_metadata"
    data = metadata.read_bytes()
    if harm == "missing":
        metadata.unlink()
    else:
        metadata.write_bytes(data[:-7] if harm == "truncated" else data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    before = bench.stream.catalog.streams.get("orders").live_directory
    kind = SnapshotNotFoundError if harm == "missing" else SnapshotCorruptError
    with pytest.raises(kind, match="_metadata"):
        bench.run(lambda: False, start_from=StartFrom(chosen.snapshot_id))
    assert bench.stream.catalog.streams.get("orders").live_directory == before
    bench.run_to_the_end()
    bench.assert_exact()


@pytest.mark.thorough
def test_a_lost_directory_without_a_snapshot_is_not_silently_begun_anew(spark: SparkSession, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path, make_stream(tmp_path, interval=3_600_000))
    bench.feed(2)
    bench.run_to_the_end()
    shutil.rmtree(tmp_path / "live")
    with pytest.raises(LiveDirectoryError, match="start_from=empty"):
        bench.run(lambda: False)
    # Said on purpose, it begins again, and the sink with it.
    bench.run_to_the_end(start_from=StartFrom("empty", discard_state=True))
    bench.assert_exact()


def test_a_storage_without_rights_is_refused_before_the_query_starts(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file where the folder should be")
    bench = Bench(spark, tmp_path, make_stream(tmp_path))
    bench.feed(1)
    with pytest.raises(StorageAccessError, match="snapshots"):
        bench.run(lambda: False)
    assert not (tmp_path / "output").exists()


def test_a_stream_that_was_never_started_has_nothing_to_save(bench: Bench) -> None:
    with pytest.raises(StreamNotFoundError, match="never started"):
        verbs.trigger_savepoint(bench.stream, origin=ORIGIN)
    bench.stream.register()
    request = bench.stream.catalog.requests.submit("orders", RequestKind.SAVEPOINT, origin="a test")
    with pytest.raises(RequestFailedError, match="was withdrawn"):
        requests.await_answer(bench.stream, request, timeout_s=120, abort_reason=lambda: "nobody runs")
    assert bench.stream.catalog.requests.get(request.request_id).status is RequestStatus.WITHDRAWN


@pytest.mark.thorough
@pytest.mark.parametrize("start_from", ["latest", "latest-checkpoint"])
def test_another_state_backend_is_refused_before_anything_is_changed(bench: Bench, start_from: str) -> None:
    bench.feed(3)
    bench.run(lambda: bool(bench.snapshots("CHECKPOINT")) and bench.committed() >= 1)
    before = bench.stream.catalog.streams.get("orders")
    rocksdb = bench.stream
    bench.stream = replace(rocksdb, backend=HashMapStateBackend())
    with pytest.raises(StateBackendChangeError, match=r"written with .*RocksDB.* but the state backend is HashMap"):
        bench.run_to_the_end(start_from=StartFrom(start_from))
    after = bench.stream.catalog.streams.get("orders")
    assert (after.live_directory, after.pending_restore) == (before.live_directory, before.pending_restore)
    (refused, *_) = bench.stream.catalog.executions.of_stream("orders")
    assert (refused.status, refused.settled) == (ExecutionStatus.FAILED, True)

    pinned = {"spark.sql.streaming.stateStore.encodingFormat": "avro"}
    bench.stream = replace(rocksdb, backend=EmbeddedRocksDBStateBackend(True, settings=pinned))
    bench.run_to_the_end()
    assert any("encodingFormat stays unsaferow, not avro" in report for report in bench.reports)
    bench.assert_exact()


@pytest.mark.thorough
def test_a_start_from_a_good_savepoint_reads_no_bit_that_flipped_in_the_live_directory(bench: Bench) -> None:
    """Spark does not look whether its offsets are those that it wrote: it would count rows twice without a word."""
    bench.feed(6)
    bench.run(lambda: bench.committed() >= 5 and bench.is_at_the_end())
    savepoint = verbs.trigger_savepoint(bench.stream, origin=ORIGIN, label="good")
    offsets = Path(bench.stream.catalog.streams.get("orders").live_directory or "") / f"offsets/{savepoint.batch_id}"
    found, data = offsets.stat(), offsets.read_bytes()
    planned = data.rindex(b'"logOffset":') + len(b'"logOffset":')
    with offsets.open("r+b") as stream:
        stream.seek(planned)
        stream.write(bytes([data[planned] ^ 1]))
    os.utime(offsets, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert offsets.read_bytes() != data
    bench.feed(2)

    bench.run_to_the_end(start_from=StartFrom("good"))

    restored = Path(bench.stream.catalog.streams.get("orders").live_directory or "") / f"offsets/{savepoint.batch_id}"
    assert restored.read_bytes() == data
    bench.assert_exact()
