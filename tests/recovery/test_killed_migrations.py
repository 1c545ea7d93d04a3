"""A start that migrates or builds state, killed or failed at any step: nothing is lost, and a plain start goes on.

The steps are those of a start, from its lease to its query; only Spark's parts are played.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import Holder, SnapshotStatus
from dagster_ckpt.catalog.snapshots import SnapshotRecords
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.errors import CkptError, PlanChangedError, StateRewriteError
from dagster_ckpt.recovery import live_directories, state_migration
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.query_plan_check import old_plan
from dagster_ckpt.recovery.rewind_preview import LABEL
from dagster_ckpt.runtime import start
from dagster_ckpt.runtime.execution import StreamRun
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.plan import WATERMARK, PlanDescription, PlanOperator, read_plan
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import LONG_MS, keeping, set_stream
from tests.support.executioner import CHANGES, Executioner, Killed
from tests.support.lease_losers import copied_state
from tests.support.lost_lease import tree
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either
from tests.support.verbs import trigger_savepoint

# Two watermarks: the files of the query, written by hand, have no state.
OLD, NEW = (
    PlanDescription((PlanOperator(WATERMARK, (("t", "timestamp"),), settings=(("delay", delay),)),), "append")
    for delay in ("10 minutes", "1 hour")
)
HOLDER = Holder("next", "run-next", "host", 1, 1, "boot")
STEPS = (
    *CHANGES,
    (StreamRecords, "note_plan"),
    (StreamRecords, "allocate_number"),
    (SnapshotRecords, "start"),
    (SnapshotRecords, "complete"),
)
MIGRATE, BUILD, FROM_SAVEPOINT, REWIND = (
    StartFrom(migrate_state=True),
    StartFrom(bootstrap_state=True),
    StartFrom("sp", migrate_state=True, accept_loss=True),
    StartFrom("batch-3", migrate_state=True, accept_loss=True),
)


def fresh(_describe: object, _live: LiveDirectory, target: LiveDirectory, **_: object) -> None:
    """The operators of the new code, as its query would leave them."""
    for name in ("metadata", "offsets/0", "commits/0", "state/0/0/1.delta"):
        target.folder.place(name, [b"of the new code"])


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named_output", "source_identities"):
        monkeypatch.setattr(start, name, lambda _writer: None)
    monkeypatch.setattr(start, "plan_of_writer", lambda writer: writer)
    monkeypatch.setattr(start, "is_described_query", lambda _writer: False)
    monkeypatch.setattr(start, "session_of", lambda _writer: "a session")
    monkeypatch.setattr(start, "rewriter_for", lambda _session: None)
    monkeypatch.setattr(start, "refuse_gone_records", lambda *_, **__: ())
    monkeypatch.setattr(start, "lost_batches", lambda *_: None)
    monkeypatch.setattr(state_migration, "refuse_gone_input", lambda *_: None)
    monkeypatch.setattr(state_migration, "make_fresh_state", fresh)
    monkeypatch.setattr(state_migration, "StoppedState", Operators)
    monkeypatch.setattr(state_migration, "taken_rows", lambda *_: {})
    monkeypatch.setattr(live_directories, "rewrite_state", copied_state)


class Operators:
    @staticmethod
    def read(live: LiveDirectory) -> Any:
        assert live.positions().commit is not None
        return replace(OLD, operators=())


class Release:
    """A stopped stream of the former code, with a savepoint `sp`, and a batch since."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.history = History(root)
        self.stream = self.history.shelf.stream
        set_stream(self.stream.catalog, STREAM, plan=json.dumps(OLD.as_record()))
        trigger_savepoint(self.stream, origin="me", label="sp")
        self.history.commit(LAST + 1)
        self.history.sinks(self.history.file_sink)
        self.former = self.history.live
        self.former_files = Path(self.former.url)
        self.content = tree(self.former_files)

    def start(self, code: PlanDescription, asked: StartFrom | None = None, *, ended: bool = True) -> None:
        """A whole start, with a query that ends at once."""
        catalog = self.stream.catalog
        lease = catalog.leases.acquire(STREAM, HOLDER, LONG_MS)
        acquired = AcquiredLease(replace(lease, predecessor_unproven=not ended))
        request = RunRequest(
            "run-next",
            lambda _live: PlayedQuery(ends=True),  # type: ignore[arg-type, return-value]
            describe=lambda: code,  # type: ignore[arg-type, return-value]
            start_from=asked or StartFrom(),
        )
        keeper = LeaseKeeper(catalog, lease, ttl_ms=LONG_MS)
        try:
            StreamRun(self.stream, request, acquired, keeper).until_the_end(str(uuid.uuid4()))
        finally:
            catalog.leases.release(lease)

    @property
    def is_former(self) -> bool:
        return self.history.live == self.former

    def plan(self) -> PlanDescription | None:
        """That of the state from which a plain start continues."""
        facts = recovery_facts(self.stream, StartFrom(), predecessor_ended=True, remembers=False)
        return old_plan(facts.stream, plan_recovery(facts))

    def is_kept(self, savepoint: str) -> bool:
        """Whether the former state is in a complete savepoint."""
        found = self.stream.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.COMPLETED)
        return any(read_plan(each.plan) == OLD and (each.label or "").startswith(savepoint) for each in found)

    def check(self, savepoint: str, *, ended: bool) -> None:
        """What holds after a killed or failed start, whatever it was about to do."""
        if self.is_former:
            assert self.plan() == OLD
            now = tree(self.former_files)
            # A fence is an entry of the offset log, and the only thing that a start may add.
            added = now.keys() - self.content.keys()
            assert not added if ended else all("fenced" in each or each.startswith("offsets/") for each in added)
            assert {name: now[name] for name in self.content} == self.content
        else:
            assert self.plan() == NEW
            assert self.is_kept(savepoint)
        fitting, other = (OLD, NEW) if self.is_former else (NEW, OLD)
        with pytest.raises(PlanChangedError, match="nothing was changed"):
            self.start(other)
        self.start(fitting)
        assert self.plan() == fitting


CASES = [
    pytest.param(MIGRATE, True, LAST + 1, id="migrate"),
    pytest.param(MIGRATE, False, LAST + 1, id="migrate, predecessor unproven"),
    pytest.param(BUILD, True, LAST + 1, id="build"),
    pytest.param(FROM_SAVEPOINT, True, LAST, id="migrate a savepoint"),
    pytest.param(REWIND, True, 3, id="migrate an earlier batch"),
]


@pytest.mark.thorough(but=("killed-migrate",))
@pytest.mark.parametrize(("asked", "ended", "batch"), CASES)
@pytest.mark.parametrize("signal", [None, StateRewriteError("it failed")], ids=["killed", "failed"])
def test_stopped_at_any_step_a_plain_start_goes_on(
    tmp_path: Path, asked: StartFrom, ended: bool, batch: int, signal: Any
) -> None:
    step, stopped, places = 0, True, set()
    # A rewind whose savepoint fails keeps the newest one.
    savepoint = LABEL if signal is None or asked is not REWIND else "sp"
    while stopped:
        release = Release(tmp_path / str(step))
        with pytest.MonkeyPatch.context() as patch:
            executioner = Executioner(patch, step, *STEPS, signal=signal)
            try:
                release.start(NEW, asked, ended=ended)
                # A failed deletion stops no start.
                stopped = executioner.left < 0
            except (Killed, CkptError):
                stopped = True
        step += either(quick=13, thorough=5)
        places.add(release.is_former)
        release.check(savepoint, ended=ended)
        if release.is_former:
            release.start(NEW, asked)
        # Repeated, it does nothing more than the start that it asks for.
        release.start(NEW, asked)
        assert release.plan() == NEW
        assert release.is_kept(savepoint)
        assert (release.history.batch, release.history.sink_batch) == (batch, batch), step
        shutil.rmtree(tmp_path / str(step), ignore_errors=True)
    assert places == {True, False}
    assert step >= 20


@pytest.mark.parametrize("code", [OLD, NEW], ids=["former code", "new code"])
def test_the_former_state_is_not_taken_for_that_of_a_lost_migrated_directory(
    tmp_path: Path, code: PlanDescription
) -> None:
    release = Release(tmp_path)
    release.start(NEW, StartFrom(migrate_state=True, no_safety_savepoint=True))
    shutil.rmtree(Path(release.history.live.url))
    assert release.plan() == OLD
    with pytest.raises(PlanChangedError, match="nothing was changed"):
        release.start(NEW)
    release.start(code, MIGRATE)
    assert release.plan() == code
    assert (release.history.batch, release.history.sink_batch) == (LAST + 1, LAST + 1)
    release.start(code)


def test_a_savepoint_outside_the_catalog_keeps_its_plan(tmp_path: Path) -> None:
    release = Release(tmp_path)
    savepoint = next(each for each in release.stream.catalog.snapshots.completed(STREAM) if each.label == "sp")
    release.start(NEW, FROM_SAVEPOINT)
    with release.stream.catalog.database.writing() as connection:
        connection.execute(snapshots.delete())
    origin = release.stream.catalog.streams.get(STREAM).origin
    assert origin is not None
    assert origin.snapshot_id == savepoint.snapshot_id
    shutil.rmtree(Path(release.history.live.url))
    assert release.plan() == OLD
    with pytest.raises(PlanChangedError, match="nothing was changed"):
        release.start(NEW)


def test_what_a_killed_migration_leaves_is_deleted(tmp_path: Path) -> None:
    release = Release(tmp_path)
    left = [release.stream.live_directory(2, 1).sibling(f".{name}") for name in ("made", "made.described", "source")]
    for each in left:
        each.folder.place("state/0/0/1.delta", [b"rows"])
    release.start(NEW, MIGRATE)
    with keeping(release.stream.catalog, STREAM) as lease:
        delete_older_live_directories(release.stream, release.history.live, lease)
    assert not [each.url for each in left if each.exists()]
    assert release.history.live.exists()
