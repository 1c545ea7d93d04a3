"""Two processes of one stream: before the n-th step of the old one, a new one takes the lease and goes to work.

A step is a call to the catalog, or a change of a file. The old process does not notice by itself: its clock says that
it has all the time in the world, as after a freeze.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.catalog.records import CompletedSnapshot, Holder, LeaseRecord, SnapshotTrigger, StartCause
from dagster_ckpt.errors import (
    CatalogError,
    CkptError,
    LeaseHeldError,
    LeaseLostError,
    RequestFailedError,
    SharedSinkError,
)
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.sinks.registry import output_of
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.snapshotting import SnapshotOrder, sharing_base, take_snapshot
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import SINK, History
from tests.support.streams import storage_at, stream_at

# The stream that is forked from the other one, and where it writes.
FORK, FORK_OUTPUT = "copy", "copied output"
LONG_MS = 10**9
# How long the new process waits for a step of the old one that holds the lease.
HARDLY_S = 0.05
OLD = Holder("old", "run of the old", "one host", 1, 1, "boot")
NEW = Holder("new", "run of the new", "another host", 2, 1, "boot")
TABLES = ("streams", "executions", "leases", "snapshots", "requests", "desired_states", "events")
FILE_STEPS = [
    *((LocalFileIO, name) for name in ("create", "write", "place", "create_if_absent", "adopt")),
    *((LocalFileIO, name) for name in ("delete", "delete_all", "delete_if_empty", "rename")),
    (os, "link"),
]
CATALOG_STEPS = [(Database, "reading"), (Database, "writing")]


@dataclass
class Scene:
    """A stream on a disk, as it was before the two processes."""

    root: Path
    history: History
    catalog_url: str

    def process(self, **options: Any) -> StreamHandle:
        """The stream as another process opens it."""
        stream = stream_at(self.root, STREAM, catalog=self.catalog_url, num_retained=3)
        return replace(stream, options=replace(stream.options, **options))

    def fork(self) -> StreamHandle:
        """The stream that is forked from it, as another process opens it."""
        return stream_at(self.root, FORK, catalog=self.catalog_url, num_retained=3)

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """All that the catalog has."""
        with self.history.shelf.stream.catalog.database.reading() as connection:
            return {
                table: sorted((tuple(row) for row in connection.execute(text(f"SELECT * FROM {table}"))), key=repr)
                for table in TABLES
            }


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, and what is in it."""
    if not folder.exists():
        return {}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() for path in files}


def make_fork(stream: StreamHandle) -> None:
    """Fork the stream of a scene, with the rows that it has."""
    root = Path(stream.live_root).parent
    store = open_store(storage_at(root), FORK)
    forked = replace(stream, stream_id=FORK, name=FORK, asset_key=FORK, store=store)
    outputs = {str(root / SINK): str(root / FORK_OUTPUT)}
    fork(stream, forked, StartFrom("latest"), origin="me", outputs=outputs)


@dataclass
class Successor:
    """The new process: takes the lease, starts from the latest state, commits three batches, takes a checkpoint.

    Where the stream is a fork, it forks it first, as the old process was about to.
    """

    scene: Scene
    stream: StreamHandle
    is_fork: bool = False
    lease: LeaseRecord | None = None
    live: LiveDirectory | None = None
    last_batch: int = -1
    rows: dict[str, Any] = field(default_factory=dict)
    directory: dict[str, str] = field(default_factory=dict)
    sink: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """Where it writes."""
        return self.scene.root / FORK_OUTPUT if self.is_fork else self.scene.history.sink

    def takes_over(self) -> bool:
        """Becomes the writer, without any proof that the one before has ended; False where it has to wait for it."""
        leases, stream_id = self.stream.catalog.leases, self.stream.stream_id
        try:
            with hardly_waiting(self.stream.catalog.database):
                before = leases.current(stream_id)
                self.lease = leases.acquire(stream_id, NEW, LONG_MS, take_over=before)
        except CatalogError:
            # The old one is in a transaction that holds the lease.
            return False
        try:
            if self.is_fork:
                leases.release(self.lease)
                make_fork(self.scene.process())
                self.lease = leases.acquire(stream_id, NEW, LONG_MS)
            self._works(self.lease)
        except CkptError as error:
            raise AssertionError(f"the successor could not do its work: {error}") from error
        return True

    def _works(self, lease: LeaseRecord) -> None:
        stream, catalog = self.stream, self.stream.catalog
        keeper = LeaseKeeper(catalog, lease, ttl_ms=LONG_MS)
        catalog.executions.start(lease, "new", run_id="run of the new", cause=StartCause.RESTART_NEW_RUN, holder=NEW)
        sinks = [f"FileSink[file:{self.output}]"] if self.is_fork else catalog.executions.last_sinks(STREAM)
        plan = plan_recovery(recovery_facts(stream, StartFrom(), predecessor_ended=False))
        output = output_of(sinks) if self.is_fork else None
        self.live = prepare(stream, plan, keeper, output).live
        catalog.executions.running(lease, "new", live_directory=self.live.url, recovery=plan.as_record())
        if catalog.streams.get(stream.stream_id).pending_restore is not None:
            catalog.streams.restore_finished(lease)
        folder = Path(self.live.url)
        first = self.live.positions().commit
        if first is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
        begin = 0 if first is None else first + 1
        for batch in range(begin, begin + 3):
            self.scene.history.commit(batch, folder, self.output)
            self.last_batch = batch
        catalog.executions.heartbeat(lease, "new", {"batch_id": self.last_batch, "sinks": sinks})
        take_checkpoint(stream, lease, "new", sinks)
        self.rows = self.scene.rows()
        self.directory = tree(folder)
        self.sink = tree(self.output)

    def is_untouched(self) -> None:
        """What it wrote is as it left it, and its own next start goes on from there."""
        assert self.lease is not None
        assert self.live is not None
        assert self.scene.rows() == self.rows
        assert tree(Path(self.live.url)) == self.directory
        assert tree(self.output) == self.sink
        stream = self.scene.fork() if self.is_fork else self.scene.process()
        try:
            for snapshot in stream.catalog.snapshots.completed(stream.stream_id):
                assert stream.store.verify(snapshot.location or "") == [], snapshot
            assert stream.catalog.snapshots.restorable(stream.stream_id)[0].batch_id == self.last_batch
            plan = plan_recovery(recovery_facts(stream, StartFrom(), predecessor_ended=True))
            assert (plan.kind, plan.to_batch) == (RecoveryKind.RESUME, self.last_batch), plan.reason
        finally:
            stream.catalog.close()


@contextmanager
def hardly_waiting(database: Database) -> Iterator[None]:
    """Whoever holds the database is not waited for."""
    usual, database._call_limit_s = database._call_limit_s, HARDLY_S
    try:
        yield
    finally:
        database._call_limit_s = usual


def take_checkpoint(stream: StreamHandle, lease: LeaseRecord, execution_id: str, sinks: list[str]) -> None:
    record = stream.catalog.streams.get(stream.stream_id)
    base = sharing_base(stream)
    order = SnapshotOrder(
        SnapshotKind.CHECKPOINT,
        record.next_number,
        base=base.location if base is not None else None,
        sinks=tuple(sinks),
    )
    stream.catalog.snapshots.start(
        lease,
        snapshot_id=order.snapshot_id,
        execution_id=execution_id,
        kind=order.kind,
        number=order.number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=record.timeline,
    )
    taken = take_snapshot(stream, LiveDirectory(record.live_directory or ""), order, now_ms=1)
    facts = CompletedSnapshot(taken.stored.location, batch_id=taken.batch_id, query_id=taken.query_id)
    stream.catalog.snapshots.complete(lease, order.snapshot_id, replace(facts, properties=taken.properties))


class Steps:
    """Counts the steps of the old process, and lets the new one come before the n-th."""

    _now: ClassVar[Steps | None] = None

    @classmethod
    def now(cls) -> Steps:
        """Those of the process that is at work."""
        assert cls._now is not None
        return cls._now

    def __init__(self, patch: pytest.MonkeyPatch, at: int, come: Callable[[], bool]) -> None:
        Steps._now = self
        self.seen: list[str] = []
        self._at = at
        self._come = come
        self.has_come = False
        self.is_new_at_work = False
        for owner, name in self.counted():
            patch.setattr(owner, name, self._counted(getattr(owner, name), name))

    @staticmethod
    def counted() -> list[tuple[Any, str]]:
        """What is a step."""
        return [*FILE_STEPS, *CATALOG_STEPS]

    def _counted(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.take(name)
            return step(*arguments, **named)

        return call

    def take(self, name: str) -> None:
        """The old process is about to take a step."""
        if self.is_new_at_work:
            return
        self.seen.append(name)
        if len(self.seen) > self._at and not self.has_come:
            self.is_new_at_work = True
            try:
                self.has_come = self._come()
            finally:
                self.is_new_at_work = False


# Prepared under the lease; what it returns is watched step by step.
Old = Callable[[StreamHandle], Callable[[], None]]


# Given what to patch, the number of a step, and what comes before it.
StepsOf = Callable[[pytest.MonkeyPatch, int, Callable[[], bool]], Steps]


class Pristine:
    """A scene that can be had again and again: what the old process finds."""

    def __init__(self, root: Path, make: Callable[[Scene], None] = lambda _scene: None) -> None:
        self.root = root / "scene"
        self._kept = root / "kept"
        self.root.mkdir()
        history = History(self.root)
        self._scene = Scene(self.root, history, f"sqlite:///{self.root / 'catalog.db'}")
        make(self._scene)
        history.close()
        shutil.copytree(self.root, self._kept)

    @contextmanager
    def again(self) -> Iterator[Scene]:
        shutil.rmtree(self.root)
        shutil.copytree(self._kept, self.root)
        try:
            yield self._scene
        finally:
            self._scene.history.close()


def lost_at(
    scene: Scene, old: Old, at: int, *, is_fork: bool = False, steps_of: StepsOf = Steps, **options: Any
) -> tuple[bool, list[str]]:
    """Let the old process work, and lose its lease before a step; False where it had fewer steps."""
    stream = scene.process(**options)
    successor = Successor(scene, scene.fork() if is_fork else scene.process(), is_fork)
    # It does not wait long where the old one has to be waited for: it comes at the next step.
    successor.stream.catalog.database.limit_calls(1)
    work = old(stream)
    with pytest.MonkeyPatch.context() as patch:
        steps = steps_of(patch, at, successor.takes_over)
        try:
            work()
        except (LeaseLostError, LeaseHeldError):
            assert steps.has_come
        except CkptError as error:
            # A fork may find the batches of its successor, or their log, before it asks for the lease.
            has_found_it = steps.has_come and isinstance(error, RequestFailedError | SharedSinkError)
            if not (is_fork and has_found_it):
                raise AssertionError(f"at step {at} ({steps.seen[at:][:1]}) not for its lease: {error}") from error
    try:
        if steps.has_come:
            successor.is_untouched()
    except AssertionError as error:
        raise AssertionError(f"lost at step {at}, {steps.seen[at:][:1]} of {steps.seen}: {error}") from error
    finally:
        stream.catalog.close()
        successor.stream.catalog.close()
    return steps.has_come, steps.seen
