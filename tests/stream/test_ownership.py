"""What lies in the places of a stream may be another deployment's: shared folders, and a catalog that was copied."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.operations.rebuild import rebuild
from dagster_ckpt.operations.snapshots import trigger_savepoint
from dagster_ckpt.recovery.retention import delete_live_directories, discard
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.ownership import OWNER, check_places, claim_live_folder
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import holding
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def own_store(folder: Path) -> SnapshotStore:
    return open_store(FileSystemCheckpointStorage(f"file://{folder}", savepoint_path=f"file://{folder}/saved"), STREAM)


def staging(history: History, **own: object) -> StreamHandle:
    """The same code in a second environment with a catalog of its own, and folders that are shared unless given."""
    stream = replace(history.shelf.stream, catalog=Catalog(f"sqlite:///{history.shelf.root / 'staging.db'}"), **own)
    stream.register()
    return stream


def copy_of_the_catalog(history: History, **own: object) -> StreamHandle:
    """The same code in a second environment whose catalog was copied, with folders of its own."""
    root = history.shelf.root
    history.shelf.stream.catalog.close()
    shutil.copy(root / "catalog.db", root / "copy.db")
    return replace(
        history.shelf.stream,
        catalog=Catalog(f"sqlite:///{root / 'copy.db'}"),
        store=own_store(root / "staging-snapshots"),
        live_root=str(root / "staging-live"),
        **own,
    )


@pytest.mark.parametrize("start_from", ["latest", "batch-3", "empty", "chk-1"])
def test_a_second_environment_does_not_start_in_the_live_folder_of_the_first(history: History, start_from: str) -> None:
    """An empty start there deleted the live directory of the other one at its first checkpoint."""
    stream = history.shelf.stream
    claim_live_folder(stream)
    check_places(stream, StartFrom(), predecessor_ended=True)
    other = staging(history)

    with pytest.raises(LiveDirectoryError, match=f"share a folder by mistake.*{stream.catalog.deployment_id}"):
        check_places(other, StartFrom.parse(start_from, discard_state=start_from == "empty"), predecessor_ended=True)

    assert (Path(stream.live_folder) / OWNER).read_text() == stream.catalog.deployment_id


def test_a_rebuild_registers_nothing_of_another_deployment(history: History) -> None:
    """It handed the first environment's checkpoints to the second one, which subsumed and deleted them."""
    snapshot = taken(history.shelf, SnapshotKind.CHECKPOINT)
    other = staging(history, live_root=str(history.shelf.root / "staging-live"))

    with pytest.raises(LiveDirectoryError, match="rebuild_catalog_job with take_over_deployment"):
        rebuild(other, origin="a test")

    assert other.catalog.snapshots.completed(STREAM) == []
    lost = history.shelf.stream.catalog.deployment_id
    rebuild(other, origin="a test", take_over_deployment=lost)
    assert [each.snapshot_id for each in other.catalog.snapshots.completed(STREAM)] == [snapshot.snapshot_id]


def test_a_rebuild_goes_on_in_no_live_directory_of_another_deployment(history: History) -> None:
    """With the live folder shared and no snapshot in sight it went on in the directory of a query that runs."""
    claim_live_folder(history.shelf.stream)
    root = history.shelf.root
    other = staging(history, store=own_store(root / "own"))

    with pytest.raises(LiveDirectoryError, match=history.shelf.stream.catalog.deployment_id):
        rebuild(other, origin="a test")

    assert other.catalog.streams.get(STREAM).live_generation == 0


def test_a_second_environment_registers_its_own_snapshots_in_a_shared_storage(history: History) -> None:
    taken(history.shelf, SnapshotKind.CHECKPOINT)
    theirs = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="theirs")
    stream = history.shelf.stream
    with stream.catalog.database.writing() as connection:
        connection.exec_driver_sql("DELETE FROM snapshots")
        connection.exec_driver_sql("UPDATE deployment SET deployment_id = 'another'")
    again = replace(stream, catalog=Catalog(f"sqlite:///{history.shelf.root / 'catalog.db'}"))

    report = rebuild(again, origin="a test")

    assert report.registered == ()
    assert any(str(theirs.location) in each and "it is of" in each for each in report.skipped)


@pytest.mark.parametrize(
    ("start_from", "predecessor_ended", "passes"),
    [
        ("latest", True, False),
        ("batch-3", True, False),
        ("chk-1", True, True),
        ("latest-checkpoint", True, True),
        ("chk-1", False, False),
        ("latest-checkpoint", False, False),
    ],
)
def test_a_live_directory_outside_of_the_streams_folder_is_not_started_in(
    history: History, start_from: str, predecessor_ended: bool, passes: bool
) -> None:
    """A catalog that was copied for staging names production's directory: staging's query ran there."""
    copy = copy_of_the_catalog(history)

    if passes:
        check_places(copy, StartFrom.parse(start_from), predecessor_ended=predecessor_ended)
    else:
        with pytest.raises(LiveDirectoryError, match="copy of another environment's"):
            check_places(copy, StartFrom.parse(start_from), predecessor_ended=predecessor_ended)
    assert history.batch == LAST


def test_a_copied_catalog_deletes_no_checkpoint_of_the_one_it_was_copied_from(history: History) -> None:
    """Its first checkpoint subsumed production's: all of them were gone from production's storage."""
    snapshot = taken(history.shelf, SnapshotKind.CHECKPOINT)
    copy = copy_of_the_catalog(history)

    report = discard(copy, [snapshot], reason="subsumed", lease=None)

    assert "outside of the stream's storage" in report.deleted[0]
    assert copy.catalog.snapshots.get(snapshot.snapshot_id).status is SnapshotStatus.DELETED
    assert history.shelf.stream.store.verify(str(snapshot.location)) == []


def test_the_folder_of_live_directories_is_given_back_once_they_are_gone(history: History) -> None:
    stream = history.shelf.stream
    claim_live_folder(stream)
    with holding(stream.catalog, STREAM) as lease, LeaseKeeper(stream.catalog, lease) as keeper:
        delete_live_directories(stream, AcquiredLease(lease), keeper)

    assert not Path(stream.live_folder).exists()
    claim_live_folder(staging(history))
