"""A process that loses its lease at any step of anything leaves its successor's rows, directories and sinks alone."""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import CatalogError, CkptError, LeaseLostError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.recovery import prepare
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.lease_losers import CASES, with_savepoint
from tests.support.lost_lease import OLD, Pristine, Scene, Successor, lost_at
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import History
from tests.support.streams import stream_at
from tests.support.thorough import either


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


PLACES = [(what, True) for what in CASES] + [(what, False) for what, case in CASES.items() if case.beside_disk]


@pytest.mark.parametrize(("what", "can_rename"), PLACES, ids=lambda each: {True: "disk", False: "S3"}.get(each, each))
def test_the_successor_is_untouched(root: Path, monkeypatch: pytest.MonkeyPatch, what: str, can_rename: bool) -> None:
    monkeypatch.setattr(LocalFileIO, "can_rename", can_rename)
    case = CASES[what]
    pristine = Pristine(root, case.before)
    step, lost = 0, True
    while lost:
        with pristine.again() as scene:
            lost, _ = lost_at(scene, case.old, step, **case.options)
        # Where nothing can be renamed only some of the steps differ.
        step += either(quick=37, thorough=1) * (case.every if can_rename else 3)
    assert step > 10


@pytest.mark.thorough(but="checkpoint, *")
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
        step += either(quick=54, thorough=9)


FROZEN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.retention_shelf import STREAM
from tests.support.streams import stream_at
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.errors import LeaseLostError
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.stream.lease import LeaseKeeper, acquire

switch = StreamRecords.switch_live_directory
def frozen(*arguments, **named):
    os.kill(os.getpid(), signal.SIGSTOP)
    return switch(*arguments, **named)
StreamRecords.switch_live_directory = frozen
stream, ttl_ms = stream_at(Path(sys.argv[2]), STREAM, catalog=sys.argv[3], num_retained=3), int(sys.argv[4])
acquired = acquire(stream.catalog, STREAM, this_holder("old", "run of the old", None), ttl_ms=ttl_ms)
plan = planned_start(stream, StartFrom("sp"))
with LeaseKeeper(stream.catalog, acquired.record, ttl_ms=ttl_ms) as lease:
    try:
        prepare(stream, plan, lease)
    except LeaseLostError:
        sys.exit(42)
"""


def run_out(stream: StreamHandle) -> None:
    """Wait until the lease of a process that cannot renew it has run out."""
    deadline = time.monotonic() + 60
    while (lease := stream.catalog.leases.current(STREAM)) is None or not lease.expired:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_was_frozen_before_its_switch_changes_nothing_when_it_wakes_up(root: Path) -> None:
    scene = Scene(root, History(root), f"sqlite:///{root / 'catalog.db'}")
    with_savepoint(scene)
    old = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(Path(__file__).parents[2]), str(root), scene.catalog_url, "4000"]
    )
    try:
        while Path(f"/proc/{old.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert old.poll() is None
            time.sleep(0.02)
        successor = Successor(scene, scene.process())
        run_out(successor.stream)
        assert successor.takes_over()
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(60) == 42
        successor.is_untouched()
        successor.stream.catalog.close()
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


@pytest.mark.thorough
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
        stream, ttl_ms = stream_at(root, STREAM, catalog=through, num_retained=3), 5_000
        lease = stream.catalog.leases.acquire(STREAM, OLD, ttl_ms)
        plan = planned_start(stream, StartFrom("sp"))
        raised: list[BaseException] = []
        stalled = threading.Event()
        switch = stream.catalog.streams.switch_live_directory

        def stalling(*arguments: Any, **named: Any) -> Any:
            proxy.passes.clear()
            stalled.set()
            return switch(*arguments, **named)

        stream.catalog.streams.switch_live_directory = stalling  # type: ignore[method-assign]

        def start_of_old() -> None:
            try:
                with LeaseKeeper(stream.catalog, lease, ttl_ms=ttl_ms) as keeper:
                    prepare.prepare(stream, plan, keeper)
            except CkptError as error:
                raised.append(error)

        old = threading.Thread(target=start_of_old)
        old.start()
        assert stalled.wait(60)
        successor = Successor(scene, scene.process())
        run_out(successor.stream)
        assert successor.takes_over()
        proxy.passes.set()
        old.join(60)
        assert not old.is_alive()
        assert [type(error) for error in raised] in ([LeaseLostError], [CatalogError])
        successor.is_untouched()
        proxy.close()
        for catalog in (stream.catalog, successor.stream.catalog, scene.history.shelf.stream.catalog):
            catalog.close()
