"""What a successor does before it starts, where a holder before may still live."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.pending_restore import ToBatch
from dagster_ckpt.catalog.records import Holder
from dagster_ckpt.errors import IncompleteCutError, LeaseLostError, LiveDirectoryError, SharedSinkError
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream import ownership
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity, this_holder
from dagster_ckpt.stream.ownership import LONGEST_WAIT_S, SHORTEST_WAIT_S, fence_predecessor
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.manual_clock import ManualClock
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

TTL_MS = 60_000
ME = this_holder("mine", "my run", None)
ELSEWHERE = replace(ME, execution_id="theirs", run_id="their run", host="another-machine")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def history(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(ownership, "SHORTEST_WAIT_S", 0.0)
    history = History(tmp_path)
    monkeypatch.setattr(history.shelf.stream.catalog.database, "_clock", clock)
    yield history
    history.close()


@pytest.fixture
def stream(history: History) -> StreamHandle:
    return history.shelf.stream


def plan_next(history: History) -> None:
    """The batch after the last is in flight."""
    history.commit(LAST + 1)
    (history.shelf.live / f"commits/{LAST + 1}").unlink()
    for entry in (history.sink / "_spark_metadata").glob(f"{LAST + 1}*"):
        entry.unlink()


def expire(stream: StreamHandle, clock: ManualClock, holder: Holder) -> AcquiredLease:
    """A holder acquires the lease, and does not renew it."""
    acquired = acquire(stream.catalog, STREAM, holder, ttl_ms=TTL_MS)
    clock.now_ms += TTL_MS
    return acquired


def start(stream: StreamHandle, acquired: AcquiredLease) -> tuple[RecoveryKind, PreparedStart]:
    """As a run does, without its query."""
    lease = LeaseKeeper(stream.catalog, acquired.record, ttl_ms=TTL_MS)
    fence_predecessor(stream, acquired, still_mine=lease.check)
    plan = plan_recovery(recovery_facts(stream, StartFrom(), predecessor_ended=acquired.predecessor_ended))
    return plan.kind, prepare(stream, plan, lease)


def test_where_every_holder_before_has_ended_nothing_is_fenced(history: History, stream: StreamHandle) -> None:
    kind, prepared = start(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

    assert kind is RecoveryKind.RESUME
    assert prepared.live.fenced_at() is None


def test_a_successor_goes_on_from_the_fenced_directory_in_a_fresh_one(
    history: History, stream: StreamHandle, clock: ManualClock
) -> None:
    plan_next(history)
    expire(stream, clock, ELSEWHERE)

    kind, prepared = start(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

    assert kind is RecoveryKind.CLONE
    assert LiveDirectory(str(history.shelf.live)).fenced_at() == LAST + 2
    state = inspect_live_directory(prepared.live)
    assert (state.batch_id, state.in_flight, state.fenced_at) == (LAST, LAST + 1, None)


def test_its_fence_stands_until_the_generation_after(
    history: History, stream: StreamHandle, clock: ManualClock
) -> None:
    expire(stream, clock, ELSEWHERE)
    mine = acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS)
    _, prepared = start(stream, mine)
    fenced = LiveDirectory(str(history.shelf.live))

    delete_older_live_directories(stream, prepared.live, LeaseKeeper(stream.catalog, mine.record, ttl_ms=TTL_MS))
    assert fenced.fenced_at() is not None

    clock.now_ms += TTL_MS
    mine = acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS)
    _, prepared = start(stream, mine)
    delete_older_live_directories(stream, prepared.live, LeaseKeeper(stream.catalog, mine.record, ttl_ms=TTL_MS))
    assert not fenced.exists()


@pytest.mark.parametrize("fences", [False, True], ids=["before it had fenced", "after it had fenced"])
def test_a_successor_that_dies_leaves_it_to_the_next_one(
    history: History, stream: StreamHandle, clock: ManualClock, spawn: Callable[[], Child], fences: bool
) -> None:
    expire(stream, clock, ELSEWHERE)
    child = spawn()
    second = acquire(stream.catalog, STREAM, child.holder, ttl_ms=TTL_MS)
    if fences:
        fence_predecessor(stream, second)
    child.kill()

    # The second is proven to have ended; the first is not.
    third = acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS)
    kind, prepared = start(stream, third)

    assert third.predecessor_ended is fences
    assert kind is RecoveryKind.CLONE
    assert LiveDirectory(str(history.shelf.live)).fenced_at() == LAST + 1
    assert prepared.live.fenced_at() is None


def test_so_does_one_that_is_refused_and_gives_the_lease_back(
    history: History, stream: StreamHandle, clock: ManualClock
) -> None:
    expire(stream, clock, ELSEWHERE)
    second = acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS)
    stream.catalog.leases.release(second.record)

    assert not acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS).predecessor_ended


def test_a_restore_that_was_cut_off_is_finished_out_of_the_fence(
    history: History, stream: StreamHandle, clock: ManualClock
) -> None:
    for log in ("commits", "offsets", "sources/0"):
        # As in the directory that a rewind has made.
        (history.shelf.live / log / str(LAST)).unlink()
    acquired = expire(stream, clock, ELSEWHERE)
    pending = ToBatch(batch_id=LAST - 1, sinks=(f"FileSink[file:{history.sink}]",))
    clock.now_ms -= TTL_MS
    stream.catalog.streams.switch_live_directory(acquired.record, str(history.shelf.live), pending_restore=pending)
    clock.now_ms += TTL_MS

    kind, prepared = start(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

    assert kind is RecoveryKind.FINISH_RESTORE
    assert prepared.live.fenced_at() is None
    assert history.sink_batch == LAST - 1
    assert stream.catalog.streams.get(STREAM).pending_restore is None
    assert LiveDirectory(str(history.shelf.live)).fenced_at() is not None


def test_who_has_lost_the_lease_fences_nothing(history: History, stream: StreamHandle, clock: ManualClock) -> None:
    expire(stream, clock, ELSEWHERE)
    mine = expire(stream, clock, ME)
    expire(stream, clock, replace(ELSEWHERE, execution_id="a third"))

    with pytest.raises(LeaseLostError):
        fence_predecessor(stream, mine, still_mine=lambda: stream.catalog.leases.check(mine.record))

    assert LiveDirectory(str(history.shelf.live)).fenced_at() is None


def test_no_query_is_started_in_a_fenced_directory(history: History, stream: StreamHandle, clock: ManualClock) -> None:
    expire(stream, clock, ELSEWHERE)
    fence_predecessor(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

    with pytest.raises(LiveDirectoryError, match="no query starts in it"):
        ownership.refuse_a_fenced_directory(LiveDirectory(str(history.shelf.live)))


@pytest.mark.parametrize(
    ("batch_ms", "wait_s"), [(None, SHORTEST_WAIT_S), (1_000, SHORTEST_WAIT_S), (9_000, 18.0), (10**6, LONGEST_WAIT_S)]
)
def test_a_batch_in_flight_is_waited_for_as_batches_last(
    stream: StreamHandle, monkeypatch: pytest.MonkeyPatch, batch_ms: int | None, wait_s: float
) -> None:
    monkeypatch.setattr(ownership, "SHORTEST_WAIT_S", SHORTEST_WAIT_S)
    latest = stream.catalog.executions.latest(STREAM)
    assert latest is not None
    seen = replace(latest, progress={"batch_ms": batch_ms})
    monkeypatch.setattr(stream.catalog.executions, "latest", lambda _stream_id: seen)

    assert ownership._wait_s(stream) == wait_s


class Child:
    """A process that could be a JVM."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.identity = ProcessIdentity.of(self.process.pid)

    @property
    def holder(self) -> Holder:
        return replace(ME, execution_id="theirs", pid=self.identity.pid, process_start_ticks=self.identity.start_ticks)

    def as_jvm(self) -> Holder:
        """A holder that lives, in this process, for which the child works."""
        return replace(ME, execution_id="theirs", jvm_pid=self.identity.pid, jvm_start_ticks=self.identity.start_ticks)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def spawn() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def one() -> Child:
        children.append(Child())
        return children[-1]

    yield one
    for child in children:
        child.kill()
        assert child.process.stdin is not None
        child.process.stdin.close()


class TestTheJvmOfAHungHolder:
    def test_it_is_killed_where_its_lease_has_run_out(
        self,
        history: History,
        stream: StreamHandle,
        clock: ManualClock,
        spawn: Callable[[], Child],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        jvm = spawn()
        expire(stream, clock, jvm.as_jvm())

        with caplog.at_level("WARNING"):
            fence_predecessor(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

        assert jvm.identity.liveness() is Liveness.ENDED
        assert any(message.startswith(f"Killed JVM {jvm.identity.pid} ") for message in caplog.messages)

    def test_a_later_process_of_its_number_is_not(
        self, history: History, stream: StreamHandle, clock: ManualClock, spawn: Callable[[], Child]
    ) -> None:
        later = spawn()
        earlier = replace(later.as_jvm(), jvm_start_ticks=(later.identity.start_ticks or 0) - 1)
        expire(stream, clock, earlier)

        fence_predecessor(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

        assert later.identity.liveness() is Liveness.ALIVE

    def test_one_that_works_for_another_stream_that_runs_is_not(
        self, history: History, stream: StreamHandle, clock: ManualClock, spawn: Callable[[], Child]
    ) -> None:
        jvm = spawn()
        expire(stream, clock, jvm.as_jvm())
        stream.catalog.streams.ensure("payments", name="payments", asset_key="payments", options={})
        acquire(stream.catalog, "payments", jvm.as_jvm(), ttl_ms=TTL_MS)

        fence_predecessor(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

        assert jvm.identity.liveness() is Liveness.ALIVE
        assert LiveDirectory(str(history.shelf.live)).fenced_at() == LAST + 1

    def test_our_own_is_not(
        self, history: History, stream: StreamHandle, clock: ManualClock, spawn: Callable[[], Child]
    ) -> None:
        jvm = spawn()
        expire(stream, clock, jvm.as_jvm())
        mine = acquire(stream.catalog, STREAM, jvm.as_jvm(), ttl_ms=TTL_MS)

        fence_predecessor(stream, mine, own_jvm_pid=jvm.identity.pid)

        assert jvm.identity.liveness() is Liveness.ALIVE

    def test_one_whose_holder_gave_the_lease_back_is_not(
        self, history: History, stream: StreamHandle, clock: ManualClock, spawn: Callable[[], Child]
    ) -> None:
        jvm = spawn()
        before = expire(stream, clock, jvm.as_jvm())
        seen = stream.catalog.leases.current(STREAM)
        stream.catalog.leases.release(before.record)
        taken = stream.catalog.leases.acquire(STREAM, ME, TTL_MS)
        fence_predecessor(stream, AcquiredLease(taken, predecessor=seen))

        assert jvm.identity.liveness() is Liveness.ALIVE


def test_the_fence_says_who_put_it_up(history: History, stream: StreamHandle, clock: ManualClock) -> None:
    expire(stream, clock, ELSEWHERE)
    mine = acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS)

    fence_predecessor(stream, mine)

    entry = (history.shelf.live / f"offsets/{LAST + 1}").read_text()
    assert json.loads(entry.splitlines()[1]) == {"by": f"mine, lease {mine.record.token}"}


class TestASinkWithBatchesThatTheQueryNeverPlanned:
    """What is left of a fenced query: the batch that it was at, added to a log that was rolled back meanwhile."""

    @pytest.fixture
    def sinks(self, history: History) -> list[str]:
        for batch in range(LAST + 1, LAST + 4):
            (history.sink / f"_spark_metadata/{batch}").write_text("v1")
        return [f"FileSink[file:{history.sink}]"]

    def test_no_snapshot_is_taken(self, history: History, sinks: list[str]) -> None:
        with pytest.raises(IncompleteCutError, match="another query writes there"):
            cut(LiveDirectory(str(history.shelf.live)), carry_in_flight=True, sinks=sinks_of(sinks))

    def test_no_query_is_started(self, history: History, stream: StreamHandle, sinks: list[str]) -> None:
        with pytest.raises(SharedSinkError, match="its log is not at the position of the stream"):
            start(stream, acquire(stream.catalog, STREAM, ME, ttl_ms=TTL_MS))

    def test_a_batch_that_is_planned_is_its_own(self, history: History) -> None:
        history.commit(LAST + 1)
        (history.shelf.live / f"commits/{LAST + 1}").unlink()

        sinks = [f"FileSink[file:{history.sink}]"]
        assert cut(LiveDirectory(str(history.shelf.live)), carry_in_flight=True, sinks=sinks_of(sinks)).batch_id == LAST
