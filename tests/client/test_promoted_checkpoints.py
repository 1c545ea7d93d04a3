"""A promoted checkpoint is a savepoint of an old state: no start, retention, health check or copy takes it for new."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client import Client
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.policies.retention import Latest
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, retained_by_policy
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TerminalState
from tests.support import verbs
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken

LATER = LAST + 3


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


@pytest.fixture
def newest(history: History) -> SnapshotRecord:
    """The newest of two checkpoints, after the older one was promoted."""
    old = taken(history.shelf, SnapshotKind.CHECKPOINT)
    for batch in range(LAST + 1, LATER + 1):
        history.commit(batch)
    new = taken(history.shelf, SnapshotKind.CHECKPOINT)
    promoted = verbs.promote_checkpoint(history.shelf.stream, f"chk-{old.number}", label="good-forever")
    assert (promoted.batch_id, promoted.number) == (LAST, (new.number or 0) + 1)
    return new


def test_a_start_restores_the_newest_state(history: History, newest: SnapshotRecord) -> None:
    shutil.rmtree(history.shelf.live)

    assert planned_start(history.shelf.stream, StartFrom()).snapshot == newest
    kind, _ = history.start()
    assert (kind, history.batch, history.sink_batch) == (RecoveryKind.RESTORE, LATER, LATER)
    assert history.unlike_uninterrupted() == []


def test_it_is_kept_at_the_end_if_the_live_directory_is_lost(history: History, newest: SnapshotRecord) -> None:
    shutil.rmtree(history.shelf.live)
    stream = history.shelf.cleaning_up(ExternalizedCheckpointCleanup.NO_EXTERNALIZED_CHECKPOINTS).stream

    apply_terminal_retention(stream, "first", TerminalState.FAILED)

    assert newest.snapshot_id in {each.snapshot_id for each in stream.catalog.snapshots.completed(STREAM)}
    shutil.rmtree(history.shelf.root / "live", ignore_errors=True)
    assert planned_start(stream, StartFrom()).to_batch == LATER


def test_policies_health_and_copies_take_the_newest_state_for_the_newest(
    history: History, newest: SnapshotRecord, tmp_path: Path
) -> None:
    stream = history.shelf.stream
    client = Client.of_stream(stream, origin="a test")

    done = client.replicate(STREAM, "all", to=str(tmp_path / "second"), keep=Latest(1))

    assert [each.snapshot_id for each in done.replicas] == [newest.snapshot_id]
    assert stream.catalog.history.newest_of([STREAM])[STREAM].snapshot_id == newest.snapshot_id
    assert retained_by_policy(stream)[-1].snapshot_id == newest.snapshot_id


def test_a_rebuilt_catalog_restores_the_newest_state(history: History, newest: SnapshotRecord) -> None:
    shutil.rmtree(history.shelf.live)
    stream = history.shelf.stream
    lost = stream.catalog.deployment_id
    stream.catalog.close()
    history.shelf.stream = replace(stream, catalog=Catalog(f"sqlite:///{history.shelf.root / 'new-catalog.db'}"))

    rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    plan = planned_start(history.shelf.stream, StartFrom())
    assert (plan.snapshot.snapshot_id if plan.snapshot is not None else None) == newest.snapshot_id
