"""One writer: what proves that the one before has ended, and what happens where nothing does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, Holder, LeaseRecord
from dagster_ckpt.errors import CatalogError, LeaseHeldError, LeaseLostError
from dagster_ckpt.stream import lease as lease_module
from dagster_ckpt.stream import lease as writer_lease
from dagster_ckpt.stream import liveness
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import (
    JVM_GRACE_S,
    UNSEEN_JVM,
    Liveness,
    ProcessIdentity,
    boot_id,
    holder_liveness,
    this_holder,
)
from tests.support.manual_clock import ManualClock

STREAM = "flights"
TTL_MS = 60_000
# Of a lease that a keeper renews: long enough for a busy machine, and renewed each second.
KEPT_MS = 3_000


class Child:
    """A really spawned process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        self.identity = ProcessIdentity.of(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_without_reaping(self) -> None:
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def spawn() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def one() -> Child:
        children.append(Child())
        return children[-1]

    yield one
    for child in children:
        child.close()


class Passing:
    """Time that passes only while a process sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.then: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.then()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def catalog(tmp_path: Path, clock: ManualClock) -> Iterator[Catalog]:
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=clock)
    catalog.streams.ensure(STREAM, name=STREAM, asset_key=STREAM, options={})
    yield catalog
    catalog.close()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    passing = Passing()
    monkeypatch.setattr(lease_module, "time", passing)
    return passing


def holder_of(child: Child, jvm: Child | None = None, *, run_id: str = "run-before") -> Holder:
    return replace(
        this_holder("execution-before", run_id, None),
        pid=child.identity.pid,
        process_start_ticks=child.identity.start_ticks,
        jvm_pid=jvm.identity.pid if jvm else None,
        jvm_start_ticks=jvm.identity.start_ticks if jvm else None,
    )


ME = this_holder("execution-me", "run-me", None)


def lease_of(holder: Holder) -> LeaseRecord:
    return LeaseRecord(
        stream_id=STREAM, token=1, acquired_at_ms=0, renewed_at_ms=0, expires_at_ms=1, expired=False, **asdict(holder)
    )


def ended(lease: LeaseRecord, *, jvm_grace_s: float = 0.0) -> bool:
    return holder_liveness(lease, jvm_grace_s=jvm_grace_s) is Liveness.ENDED


def test_a_killed_process_has_provably_ended(spawn: Callable[[], Child]) -> None:
    child = spawn()
    child.kill()

    assert ended(lease_of(holder_of(child)))


def test_a_killed_process_that_nobody_has_reaped_has_ended_too(spawn: Callable[[], Child]) -> None:
    child = spawn()
    child.kill_without_reaping()

    assert ended(lease_of(holder_of(child)))


def test_a_live_process_has_not_ended(spawn: Callable[[], Child]) -> None:
    assert not ended(lease_of(holder_of(spawn())))


def test_a_later_process_of_the_same_number_is_not_taken_for_the_holder(spawn: Callable[[], Child]) -> None:
    later = holder_of(spawn())

    assert ended(lease_of(replace(later, process_start_ticks=(later.process_start_ticks or 0) - 1)))


def test_the_query_of_a_server_outlives_the_process_that_started_it(spawn: Callable[[], Child]) -> None:
    """With Spark Connect the death of the client was a proof, and a second query ran in the directory of the first."""
    assert this_holder("execution", "run", UNSEEN_JVM).jvm_pid == UNSEEN_JVM
    child = spawn()
    child.kill()

    assert holder_liveness(lease_of(replace(holder_of(child), jvm_pid=UNSEEN_JVM))) is Liveness.UNKNOWN


@pytest.mark.parametrize("elsewhere", [{"host": "another-host"}, {"boot_id": "another boot"}])
def test_of_another_machine_or_boot_nothing_can_be_proven(
    spawn: Callable[[], Child], elsewhere: dict[str, str]
) -> None:
    child = spawn()
    child.kill()

    assert not ended(lease_of(replace(holder_of(child), **elsewhere)))


def test_of_another_container_of_this_machine_nothing_can_be_proven(
    spawn: Callable[[], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn()
    lease = lease_of(holder_of(child))
    child.kill()

    # Where this process sees others than the holder saw, by the same numbers and the same name of the host.
    monkeypatch.setattr(Path, "readlink", lambda _path: Path("pid:[1]"))

    assert not ended(lease)


@pytest.mark.parametrize("hidden", ["its entry", "what the entry says"])
def test_of_a_process_that_proc_does_not_show_to_this_user_nothing_can_be_proven(
    spawn: Callable[[], Child], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden: str
) -> None:
    """As `hidepid=2` and `hidepid=1` do with the processes of other users."""
    living, dead = spawn(), spawn()
    dead.kill()
    monkeypatch.setattr(liveness, "_PROC", tmp_path)
    if hidden == "what the entry says":
        read = Path.read_bytes

        def refuse(path: Path) -> bytes:
            if path == tmp_path / f"{living.identity.pid}/stat":
                raise PermissionError(1, "Operation not permitted")
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", refuse)

    assert living.identity.liveness() is Liveness.UNKNOWN
    assert dead.identity.liveness() is Liveness.ENDED
    assert ProcessIdentity.of(living.identity.pid).start_ticks is None


@pytest.mark.parametrize("step_s", [1, -1, 3600, -3600])
def test_a_step_of_the_clock_ends_nobody_and_brings_nobody_back(spawn: Callable[[], Child], step_s: int) -> None:
    living, dead = spawn(), spawn()
    dead.kill()

    # A child's own view of the clock is moved: what the kernel says of the boot moves with it.
    with subprocess.Popen(
        [sys.executable, "-c", _AFTER_A_STEP, str(step_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as looking:
        seen = looking.communicate("\n".join(repr(astuple(child.identity)) for child in (living, dead)))[0]

    assert seen.split() == ["ALIVE", "ENDED"]


_AFTER_A_STEP = """
import ast, sys
import psutil, psutil._pslinux as linux
from dagster_ckpt.stream.liveness import ProcessIdentity
before, me = linux.boot_time(), psutil.Process().create_time()
linux.boot_time = lambda: before + int(sys.argv[1])
assert psutil.Process().create_time() != me
for line in sys.stdin:
    print(ProcessIdentity(*ast.literal_eval(line)).liveness().value)
"""


def test_a_start_that_was_not_recorded_proves_nothing(spawn: Callable[[], Child]) -> None:
    child = spawn()
    child.kill()

    assert not ended(lease_of(replace(holder_of(child), process_start_ticks=None)))
    assert not ended(lease_of(replace(holder_of(child), boot_id="")))


def test_a_jvm_that_outlives_its_python_process_may_still_write(spawn: Callable[[], Child]) -> None:
    python, jvm = spawn(), spawn()
    python.kill()

    assert not ended(lease_of(holder_of(python, jvm)), jvm_grace_s=0)
    jvm.kill()
    assert ended(lease_of(holder_of(python, jvm)), jvm_grace_s=0)


def test_a_jvm_is_given_time_to_follow_its_python_process(spawn: Callable[[], Child]) -> None:
    python, jvm = spawn(), spawn()
    python.kill()
    proof: list[bool] = []
    looking = threading.Thread(
        target=lambda: proof.append(ended(lease_of(holder_of(python, jvm)), jvm_grace_s=JVM_GRACE_S))
    )
    looking.start()
    jvm.kill()
    looking.join(timeout=120)

    assert proof == [True]


def test_this_holder_is_this_process() -> None:
    assert (ME.pid, ME.boot_id) == (os.getpid(), boot_id())
    assert ProcessIdentity(ME.pid, ME.process_start_ticks, ME.host, ME.boot_id).liveness() is Liveness.ALIVE
    assert not ended(lease_of(ME))


def test_a_lease_nobody_holds_is_taken_and_nobody_was_before(catalog: Catalog) -> None:
    acquired = acquire(catalog, STREAM, ME, ttl_ms=TTL_MS)

    assert acquired.predecessor_ended
    assert (acquired.record.execution_id, acquired.record.token) == ("execution-me", 1)


def test_the_lease_of_a_dead_process_is_taken_over_at_once(catalog: Catalog, spawn: Callable[[], Child]) -> None:
    child = spawn()
    before = acquire(catalog, STREAM, holder_of(child), ttl_ms=TTL_MS).record
    child.kill()

    acquired = acquire(catalog, STREAM, ME, ttl_ms=TTL_MS)

    assert acquired.predecessor_ended
    assert acquired.record.token > before.token
    taken = [event for event in catalog.events.after(0) if event.type is EventType.LEASE_TAKEN_OVER]
    assert [event.payload["from_run"] for event in taken] == ["run-before"]
    with pytest.raises(LeaseLostError, match="run-me"):
        catalog.leases.renew(before, TTL_MS)


def test_the_lease_of_a_live_process_is_refused_and_its_holder_named(
    catalog: Catalog, spawn: Callable[[], Child]
) -> None:
    child = spawn()
    before = acquire(catalog, STREAM, holder_of(child), ttl_ms=TTL_MS).record

    with pytest.raises(LeaseHeldError) as refusal:
        acquire(catalog, STREAM, ME, ttl_ms=TTL_MS)

    text = str(refusal.value)
    for part in ("'flights'", "run run-before", f"process {child.identity.pid}", before.host, "60 s", "one writer"):
        assert part in text
    assert catalog.leases.current(STREAM) == before


def test_a_lease_that_ran_out_is_taken_but_proves_nothing(
    catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
) -> None:
    acquire(catalog, STREAM, holder_of(spawn()), ttl_ms=TTL_MS)
    clock.now_ms += TTL_MS

    acquired = acquire(catalog, STREAM, ME, ttl_ms=TTL_MS)

    assert acquired.record.execution_id == "execution-me"
    assert not acquired.predecessor_ended


def test_the_lease_of_a_run_that_is_recorded_as_over_is_waited_for(
    catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child]
) -> None:
    acquire(catalog, STREAM, replace(holder_of(spawn()), host="another-host"), ttl_ms=TTL_MS)
    asked: list[str] = []

    def holder_is_over(lease: LeaseRecord) -> bool:
        asked.append(lease.run_id)
        clock.now_ms += TTL_MS // 2
        return True

    acquired = acquire(catalog, STREAM, ME, ttl_ms=TTL_MS, holder_is_over=holder_is_over)

    assert asked == ["run-before", "run-before"]
    assert not acquired.predecessor_ended


def test_waiting_for_a_lease_can_be_interrupted(catalog: Catalog, spawn: Callable[[], Child]) -> None:
    acquire(catalog, STREAM, holder_of(spawn()), ttl_ms=TTL_MS)

    with pytest.raises(LeaseHeldError):
        acquire(catalog, STREAM, ME, ttl_ms=TTL_MS, holder_is_over=lambda _lease: True, interrupted=lambda: True)


def wait_for_loss(keeper: LeaseKeeper) -> LeaseLostError:
    deadline = time.monotonic() + 120
    while keeper.lost is None:
        assert time.monotonic() < deadline, "the keeper did not notice"
        time.sleep(0.01)
    return keeper.lost


def test_a_keeper_renews_and_gives_the_lease_back(catalog: Catalog, clock: ManualClock) -> None:
    lease = acquire(catalog, STREAM, ME, ttl_ms=KEPT_MS).record
    with LeaseKeeper(catalog, lease, ttl_ms=KEPT_MS) as keeper:
        clock.now_ms += 50
        deadline = time.monotonic() + 120
        while catalog.leases.current(STREAM) == lease:
            assert time.monotonic() < deadline, "the lease was not renewed"
            time.sleep(0.01)
        renewed = catalog.leases.current(STREAM)
        assert renewed is not None
        assert renewed.expires_at_ms == clock.now_ms + KEPT_MS
        keeper.check()
        assert keeper.lost is None

    assert catalog.leases.current(STREAM) is None


def test_a_keeper_notices_that_another_execution_took_the_lease(
    catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child]
) -> None:
    lease = acquire(catalog, STREAM, ME, ttl_ms=KEPT_MS).record
    with LeaseKeeper(catalog, lease, ttl_ms=KEPT_MS) as keeper:
        successor = catalog.leases.acquire(STREAM, holder_of(spawn()), TTL_MS, take_over=lease)
        lost = wait_for_loss(keeper)
        assert "run-before" in str(lost)
        with pytest.raises(LeaseLostError, match="one writer"):
            keeper.check()

    assert catalog.leases.current(STREAM) == successor


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock by which a keeper counts; waiting takes the time it takes."""
    now_s = [1_000.0]
    counted = SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep)
    monkeypatch.setattr(writer_lease, "time", counted)

    def move_to(age_s: float) -> None:
        now_s[0] = 1_000 + age_s

    return move_to


def test_a_keeper_without_a_catalog_gives_up_before_the_lease_runs_out(
    catalog: Catalog, watch: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Semaphore(0)

    def away(*_: object) -> LeaseRecord:
        asked.release()
        raise CatalogError("the database is away")

    monkeypatch.setattr(catalog.leases, "renew", away)
    lease = acquire(catalog, STREAM, ME, ttl_ms=KEPT_MS).record
    with LeaseKeeper(catalog, lease, ttl_ms=KEPT_MS) as keeper:
        # By the second time the keeper has heard the answer of the first.
        assert asked.acquire(timeout=120)
        assert asked.acquire(timeout=120)
        watch(0.79 * KEPT_MS / 1000)
        assert keeper.lost is None
        watch(0.81 * KEPT_MS / 1000)
        lost = keeper.lost
        with pytest.raises(LeaseLostError):
            keeper.check()

    assert "the database is away" in str(lost)
    assert "Make the catalog available" in str(lost)


def test_a_keeper_whose_catalog_hangs_gives_up_before_the_lease_runs_out(
    catalog: Catalog, watch: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, back = threading.Event(), threading.Event()

    def hang(*_: object) -> LeaseRecord:
        asked.set()
        back.wait(120)
        raise CatalogError("the connection was cut")

    monkeypatch.setattr(catalog.leases, "renew", hang)
    lease = acquire(catalog, STREAM, ME, ttl_ms=KEPT_MS).record
    with LeaseKeeper(catalog, lease, ttl_ms=KEPT_MS) as keeper:
        assert asked.wait(120)
        watch(0.79 * KEPT_MS / 1000)
        assert keeper.lost is None
        watch(0.81 * KEPT_MS / 1000)
        lost = keeper.lost
        back.set()

    assert "did not answer" in str(lost)


def test_a_keeper_that_was_paused_does_not_blame_the_catalog(
    catalog: Catalog, watch: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, a suspended machine: the thread that renews did not run either."""
    monkeypatch.setattr(LeaseKeeper, "_renew", lambda _keeper: None)
    lease = acquire(catalog, STREAM, ME, ttl_ms=KEPT_MS).record
    with LeaseKeeper(catalog, lease, ttl_ms=KEPT_MS) as keeper:
        watch(0.81 * KEPT_MS / 1000)
        lost = keeper.lost

    assert "this process or its machine was paused" in str(lost)
    assert "catalog" not in str(lost)


class TestAnExpiredLeaseOfALivingProcess:
    """The catalog's clock jumps ahead: a start took the lease over from a holder that renewed it all the time."""

    def test_is_not_taken_over_where_it_is_renewed(
        self, catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
    ) -> None:
        theirs = catalog.leases.acquire(STREAM, holder_of(spawn()), 30_000)
        clock.now_ms += 86_400_000
        passing.then = lambda: catalog.leases.renew(theirs, 30_000)

        with pytest.raises(LeaseHeldError, match="run run-before"):
            acquire(catalog, STREAM, ME, ttl_ms=30_000)

        catalog.leases.check(theirs)

    def test_is_taken_over_once_it_is_not_renewed_for_as_long_as_it_lasts(
        self, catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
    ) -> None:
        catalog.leases.acquire(STREAM, holder_of(spawn()), 30_000)
        clock.now_ms += 86_400_000

        acquired = acquire(catalog, STREAM, ME, ttl_ms=30_000)

        assert passing.now_s == 30
        assert not acquired.predecessor_ended

    def test_the_wait_before_it_expired_counts(
        self, catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
    ) -> None:
        catalog.leases.acquire(STREAM, holder_of(spawn()), 30_000)

        def later() -> None:
            clock.now_ms += 500

        passing.then = later
        acquire(catalog, STREAM, ME, ttl_ms=30_000, holder_is_over=lambda _lease: True)

        assert passing.now_s == 30

    def test_is_taken_over_at_once_where_nothing_is_known_of_the_process(
        self, catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
    ) -> None:
        catalog.leases.acquire(STREAM, replace(holder_of(spawn()), host="another-host"), 30_000)
        clock.now_ms += 30_000

        acquired = acquire(catalog, STREAM, ME, ttl_ms=30_000)

        assert passing.now_s == 0
        assert not acquired.predecessor_ended

    def test_the_wait_can_be_interrupted(
        self, catalog: Catalog, clock: ManualClock, spawn: Callable[[], Child], passing: Passing
    ) -> None:
        catalog.leases.acquire(STREAM, holder_of(spawn()), 30_000)
        clock.now_ms += 30_000

        with pytest.raises(LeaseHeldError, match=r"was interrupted: process .* is alive and may renew it"):
            acquire(catalog, STREAM, ME, ttl_ms=30_000, interrupted=lambda: passing.now_s > 2)
