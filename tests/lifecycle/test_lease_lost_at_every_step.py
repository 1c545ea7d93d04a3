"""A process that loses its lease at any step of anything leaves its successor's rows, directories and sinks alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from lost_lease import LONG_MS, OLD, Old, Pristine, Scene, Steps, Successor, job_at, lost_at, take_checkpoint
from retention_shelf import JOB
from rewind_history import History
from sqlalchemy import create_engine, make_url, text
from test_roll_back import failed_upgrade
from test_run_job_refusals import PlayedQuery

from dagster_ckpt.catalog import RequestKind, StartCause
from dagster_ckpt.coordinator import (
    Alignment,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CleaningChanged,
    Event,
    TriggerKind,
)
from dagster_ckpt.errors import CatalogError, CkptError, LeaseLostError, SinkRollbackError
from dagster_ckpt.lifecycle import prepare
from dagster_ckpt.lifecycle.attempt_runner import AttemptRunner
from dagster_ckpt.lifecycle.batch_log import BatchLog
from dagster_ckpt.lifecycle.execution import RunRequest, _Run
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.lifecycle.operations import Operator, preview_start, trigger_savepoint
from dagster_ckpt.lifecycle.owed_changes import OwedChanges
from dagster_ckpt.lifecycle.prepare import PreparedStart
from dagster_ckpt.lifecycle.retention import apply_terminal_retention
from dagster_ckpt.lifecycle.roll_back import roll_back
from dagster_ckpt.lifecycle.start_from import StartFrom
from dagster_ckpt.lifecycle.supervision import EndKind
from dagster_ckpt.lifecycle.writer_lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.options import ExternalizedCheckpointCleanup, TerminalState
from dagster_ckpt.spark import LiveDirectory, QueryFacts
from dagster_ckpt.spark.local_folder import LocalFolder
from tests.as_writer import holding


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    # Hundreds of scenes: what is under test is not how fast a disk flushes.
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="lost-lease-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def new_database(server: str) -> Iterator[str]:
    url = make_url(server)
    name = f"lost_{uuid.uuid4().hex}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    yield url.set(database=name).render_as_string(hide_password=False)


def with_savepoint(scene: Scene) -> None:
    """A savepoint at batch 8, three batches since, and what a start left behind long ago."""
    trigger_savepoint(scene.history.shelf.job, Operator("me"), label="sp")
    for batch in (9, 10, 11):
        scene.history.commit(batch)
    scene.history.sinks(f"FileSink[file:{scene.history.sink}]")
    shutil.copytree(scene.history.shelf.live, scene.history.shelf.live.with_name("live-0"))


def with_checkpoint(scene: Scene) -> None:
    with_savepoint(scene)
    job = scene.history.shelf.job
    with holding(job.catalog, JOB) as lease:
        take_checkpoint(job, lease, "first", job.catalog.executions.last_sinks(JOB))
    scene.history.commit(12)


def with_unfinished_restore(scene: Scene) -> None:
    with_savepoint(scene)

    def die(*_: Any, **_named: Any) -> None:
        raise SinkRollbackError("the process died here")

    with pytest.MonkeyPatch.context() as patch, suppress(SinkRollbackError):
        patch.setattr(prepare, "roll_back", die)
        scene.history.start("sp")


def start(start_from: str, *, predecessor_ended: bool = True, **how: Any) -> Old:
    """A whole run of a query that ends at once: lease, plan, restore, roll-back, start, end."""

    def ready(job: StreamingJob) -> Callable[[], None]:
        request = job.catalog.requests.submit(JOB, RequestKind.START, origin="me")
        lease = job.catalog.leases.acquire(JOB, OLD, LONG_MS)
        keeper = LeaseKeeper(job.catalog, lease, ttl_ms=LONG_MS)

        def start_query(live: LiveDirectory) -> Any:
            assert not Steps.now().has_come, "a query is started beside the successor's"
            if not live.exists():
                Path(live.url).mkdir(parents=True)
                (Path(live.url) / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
            return PlayedQuery(ends=True)

        asked = RunRequest(
            "run of the old",
            start_query,
            start_from=StartFrom.parse(start_from, accept_loss=True, **how),
            start_request_id=request.request_id,
        )

        def run() -> None:
            outcome = _Run(
                job, asked, AcquiredLease(replace(lease, predecessor_unproven=not predecessor_ended)), keeper
            ).until_the_end("old")
            if outcome.end.kind is EndKind.LEASE_LOST:
                raise LeaseLostError(outcome.end.reason)

        return run

    return ready


def checkpoint(job: StreamingJob) -> Callable[[], None]:
    """A checkpoint in its threads, which subsumes the one before; then older live directories go."""
    lease = job.catalog.leases.acquire(JOB, OLD, LONG_MS)
    keeper = LeaseKeeper(job.catalog, lease, ttl_ms=LONG_MS)
    job.catalog.executions.begin(lease, "old", run_id="run of the old", cause=StartCause.MANUAL, holder=OLD)
    record = job.catalog.jobs.get(JOB)
    runner = AttemptRunner(
        job,
        "old",
        PreparedStart(LiveDirectory(record.live_directory or "")),
        BatchLog(),
        keeper,
        owed=OwedChanges(),
        facts=QueryFacts,
        predecessor_ended=True,
        wall_clock=lambda: 1,
    )

    def until(kind: type[Event]) -> None:
        while True:
            for event in runner.news():
                if isinstance(event, kind):
                    return
                assert not isinstance(event, AttemptFailed), event
            time.sleep(0.001)

    def run() -> None:
        try:
            number = record.next_number
            runner.begin(Attempt(number, TriggerKind.CHECKPOINT, None, Alignment.NEWEST_COMMIT, None, 1 << 60))
            runner.order_cuts(lambda _number: None)
            until(AttemptCompleted)
            if runner.make_room():
                until(CleaningChanged)
        finally:
            runner.close("the test is over")

    return run


def retention(job: StreamingJob) -> Callable[[], None]:
    """A cancellation that deletes everything; it takes the lease itself."""
    return lambda: print(apply_terminal_retention(job, "first", TerminalState.CANCELED))


def upgrade_rolled_back(job: StreamingJob) -> Callable[[], None]:
    return lambda: print(roll_back(job, run_id="run of the old"))


@dataclass(frozen=True)
class Case:
    old: Old
    before: Callable[[Scene], None] = with_savepoint
    options: Mapping[str, Any] = field(default_factory=dict)
    beside_disk: bool = True
    every: int = 1


CASES = {
    "RESUME": Case(start("latest"), beside_disk=False),
    "ADOPT": Case(start("latest", predecessor_ended=False)),
    "RESTORE": Case(start("sp")),
    "RESTORE as a query of its own": Case(start("sp", new_query_id=True), beside_disk=False, every=3),
    "REWIND": Case(start("batch-3")),
    "START_EMPTY": Case(start("empty", give_up_state=True), beside_disk=False),
    "FINISH_RESTORE": Case(start("latest"), with_unfinished_restore),
    "checkpoint, subsume, clean up": Case(checkpoint, with_checkpoint, {"num_retained": 1}, beside_disk=False),
    "retention": Case(
        retention,
        with_checkpoint,
        {"cleanup": ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION},
        beside_disk=False,
    ),
    "an upgrade rolled back": Case(
        upgrade_rolled_back, lambda scene: failed_upgrade(scene.history), beside_disk=False, every=3
    ),
}
PLACES = [(what, True) for what in CASES] + [(what, False) for what, case in CASES.items() if case.beside_disk]


@pytest.mark.parametrize(
    ("what", "moves_at_once"), PLACES, ids=lambda each: {True: "disk", False: "S3"}.get(each, each)
)
def test_the_successor_is_untouched(
    root: Path, monkeypatch: pytest.MonkeyPatch, what: str, moves_at_once: bool
) -> None:
    monkeypatch.setattr(LocalFolder, "moves_at_once", moves_at_once)
    case = CASES[what]
    pristine = Pristine(root, case.before)
    step, lost = 0, True
    while lost:
        with pristine.again() as scene:
            lost, _ = lost_at(scene, case.old, step, **case.options)
        # Where nothing can be renamed only some of the steps differ.
        step += case.every if moves_at_once else 3
    assert step > 10


@pytest.mark.parametrize("what", ["RESTORE", "checkpoint, subsume, clean up"])
def test_the_same_in_postgresql_for_a_sample_of_steps(root: Path, postgres: str, what: str) -> None:
    case = CASES[what]
    step, lost = 1, True
    while lost:
        folder = root / str(step)
        folder.mkdir()
        with new_database(postgres) as url:
            scene = Scene(folder, History(folder, catalog_url=url), url)
            case.before(scene)
            lost, _ = lost_at(scene, case.old, step, **case.options)
            scene.history.close()
        step += 9


FROZEN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from lost_lease import JOB, job_at
from dagster_ckpt.catalog.jobs import JobStore
from dagster_ckpt.errors import LeaseLostError
from dagster_ckpt.lifecycle.liveness import this_holder
from dagster_ckpt.lifecycle.operations import preview_start
from dagster_ckpt.lifecycle.prepare import prepare
from dagster_ckpt.lifecycle.start_from import StartFrom
from dagster_ckpt.lifecycle.writer_lease import LeaseKeeper, acquire

switch = JobStore.switch_live_directory
def frozen(*arguments, **named):
    os.kill(os.getpid(), signal.SIGSTOP)
    return switch(*arguments, **named)
JobStore.switch_live_directory = frozen
job, ttl_ms = job_at(Path(sys.argv[2]), sys.argv[3]), int(sys.argv[4])
acquired = acquire(job.catalog, JOB, this_holder("old", "run of the old", None), ttl_ms=ttl_ms)
plan = preview_start(job, StartFrom.parse("sp"))
with LeaseKeeper(job.catalog, acquired.record, ttl_ms=ttl_ms) as lease:
    try:
        prepare(job, plan, lease)
    except LeaseLostError:
        sys.exit(42)
"""


def run_out(job: StreamingJob) -> None:
    """Wait until the lease of a process that cannot renew it has run out."""
    deadline = time.monotonic() + 60
    while (lease := job.catalog.leases.current(JOB)) is None or not lease.expired:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_was_frozen_before_its_switch_changes_nothing_when_it_wakes_up(root: Path) -> None:
    scene = Scene(root, History(root), f"sqlite:///{root / 'catalog.db'}")
    with_savepoint(scene)
    old = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(Path(__file__).parent), str(root), scene.catalog_url, "4000"]
    )
    try:
        while Path(f"/proc/{old.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert old.poll() is None
            time.sleep(0.02)
        successor = Successor(scene, scene.process())
        run_out(successor.job)
        assert successor.takes_over()
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(60) == 42
        successor.is_untouched()
        successor.job.catalog.close()
    finally:
        old.kill()
        old.wait()
        scene.history.close()


class Proxy:
    """Between a process and PostgreSQL: lets everything pass until it stalls, and what was stalled when it heals."""

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.passes = threading.Event()
        self.passes.set()
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
                server.connect(self._target)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                self.passes.wait()
                other.sendall(data)
        other.close()

    def close(self) -> None:
        self._listening.close()


def test_a_start_whose_connection_stalls_at_its_switch_changes_nothing_when_it_heals(root: Path, postgres: str) -> None:
    with new_database(postgres) as url:
        parsed = make_url(url)
        folder = parsed.query.get("host") or parsed.host
        target = (
            f"{folder}/.s.PGSQL.{parsed.port or 5432}"
            if str(folder).startswith("/")
            else (str(folder), parsed.port or 5432)
        )
        proxy = Proxy(target)
        through = parsed.set(host="127.0.0.1", port=proxy.port, query={}).render_as_string(hide_password=False)
        scene = Scene(root, History(root, catalog_url=url), url)
        with_savepoint(scene)
        job, ttl_ms = job_at(root, through), 5_000
        lease = job.catalog.leases.acquire(JOB, OLD, ttl_ms)
        plan = preview_start(job, StartFrom.parse("sp"))
        raised: list[BaseException] = []
        stalled = threading.Event()
        switch = job.catalog.jobs.switch_live_directory

        def stalling(*arguments: Any, **named: Any) -> Any:
            proxy.passes.clear()
            stalled.set()
            return switch(*arguments, **named)

        job.catalog.jobs.switch_live_directory = stalling  # type: ignore[method-assign]

        def start_of_old() -> None:
            try:
                with LeaseKeeper(job.catalog, lease, ttl_ms=ttl_ms) as keeper:
                    prepare.prepare(job, plan, keeper)
            except CkptError as error:
                raised.append(error)

        old = threading.Thread(target=start_of_old)
        old.start()
        assert stalled.wait(60)
        successor = Successor(scene, scene.process())
        run_out(successor.job)
        assert successor.takes_over()
        proxy.passes.set()
        old.join(60)
        assert not old.is_alive()
        assert [type(error) for error in raised] in ([LeaseLostError], [CatalogError])
        successor.is_untouched()
        proxy.close()
        for catalog in (job.catalog, successor.job.catalog, scene.history.shelf.job.catalog):
            catalog.close()
