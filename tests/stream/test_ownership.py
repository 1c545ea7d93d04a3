"""What lies in the places of a stream may be another deployment's: shared folders, and a catalog that was copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, StreamRecord
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.client.reconciliation import roll_back
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.recovery.checkpoint_retention import discard
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.live_directories import delete_live_directories
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.runtime.execution_end import settle_execution
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.ownership import OWNER, check_places, claim_live_folder
from dagster_ckpt.stream.snapshots import DEPLOYMENT
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TerminalState
from tests.support.as_writer import holding
from tests.support.executioner import Killed
from tests.support.retention_shelf import HOLDER, STREAM
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken
from tests.support.verbs import trigger_savepoint

ORIGIN = "a test"
DELETE = ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


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
    """The same code in a second environment whose catalog was copied, with folders of its own.

    It was accepted as the catalog by mistake, or is where a copy is not recognized.
    """
    root = history.shelf.root
    history.shelf.stream.catalog.close()
    shutil.copy(root / "catalog.db", root / "copy.db")
    Catalog.accept(f"sqlite:///{root / 'copy.db'}")
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

    with pytest.raises(LiveDirectoryError, match=f"use the same folder by mistake.*{stream.catalog.deployment_id}"):
        check_places(other, StartFrom(start_from, discard_state=start_from == "empty"), predecessor_ended=True)

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
    assert any(str(theirs.location) in each and "it belongs to" in each for each in report.skipped)


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
        check_places(copy, StartFrom(start_from), predecessor_ended=predecessor_ended)
    else:
        with pytest.raises(LiveDirectoryError, match="a copy from another environment"):
            check_places(copy, StartFrom(start_from), predecessor_ended=predecessor_ended)
    assert history.batch == LAST


def test_a_copied_catalog_deletes_no_checkpoint_of_the_one_it_was_copied_from(history: History) -> None:
    """Its first checkpoint subsumed production's: all of them were gone from production's storage."""
    snapshot = taken(history.shelf, SnapshotKind.CHECKPOINT)
    copy = copy_of_the_catalog(history)

    report = discard(copy, [snapshot], reason="subsumed", lease=None)

    assert "outside of the stream's storage" in report.deleted[0]
    assert copy.catalog.snapshots.get(snapshot.snapshot_id).status is SnapshotStatus.DELETED
    assert history.shelf.stream.store.verify(str(snapshot.location)) == []


@pytest.mark.parametrize("predecessor_ended", [True, False])
def test_a_cancel_in_a_copied_catalog_leaves_the_live_directory_of_the_original(
    history: History, predecessor_ended: bool
) -> None:
    """With DELETE_ON_CANCELLATION it fenced the query of the original, and deleted its live directory."""
    before = sorted(path for path in Path(history.live.url).rglob("*"))
    copy = copy_of_the_catalog(history, options=replace(history.shelf.stream.options, cleanup=DELETE))
    if not predecessor_ended:
        copy.catalog.leases.acquire(STREAM, replace(HOLDER, host="another"), 0)
    execution = copy.catalog.executions.latest(STREAM)
    assert execution is not None

    report = settle_execution(copy, execution.execution_id, TerminalState.CANCELED)

    assert report.live_directory_deleted is None
    assert any("belongs to another environment if this catalog is a copy" in each for each in report.kept)
    assert sorted(path for path in Path(history.live.url).rglob("*")) == before
    assert copy.catalog.streams.get(STREAM).live_directory is None


def test_the_folder_of_live_directories_is_given_back_once_they_are_gone(history: History) -> None:
    stream = history.shelf.stream
    claim_live_folder(stream)
    with holding(stream.catalog, STREAM) as lease, LeaseKeeper(stream.catalog, lease) as keeper:
        delete_live_directories(stream, AcquiredLease(lease), keeper)

    assert not Path(stream.live_folder).exists()
    claim_live_folder(staging(history))


def fork_into(other: StreamHandle, history: History) -> None:
    fork(history.shelf.stream, other, StartFrom(), origin=ORIGIN)


def roll_back_there(other: StreamHandle, history: History) -> None:
    snapshot = rebuilt_snapshot(other, history)
    row = other.catalog.desired_states.ensure(STREAM, origin=ORIGIN)
    upgrade = UpgradeRecord(
        UpgradePhase.RESTORING, "1", "2", UpgradeMode.LAST_STATE, 1, "a test", snapshot_id=snapshot.snapshot_id
    )
    assert other.catalog.desired_states.advance(row, upgrade=upgrade, alert=None, request_id=None)
    roll_back(other, run_id="run")


def restore_there(other: StreamHandle, history: History) -> None:
    snapshot = rebuilt_snapshot(other, history)
    plan = plan_recovery(recovery_facts(other, StartFrom(snapshot.snapshot_id), predecessor_ended=True))
    with holding(other.catalog, STREAM) as lease, LeaseKeeper(other.catalog, lease) as keeper:
        prepare(other, plan, keeper)


def rebuilt_snapshot(other: StreamHandle, history: History) -> SnapshotRecord:
    """A snapshot of the other environment's own."""
    snapshot = taken(replace(history.shelf, stream=history.shelf.stream), SnapshotKind.SAVEPOINT)
    record = replace(
        snapshot, execution_id=None, properties={**snapshot.properties, DEPLOYMENT: other.catalog.deployment_id}
    )
    with holding(other.catalog, STREAM) as lease:
        other.catalog.rebuilding.add_snapshots(lease, [record], next_number=9)
    return record


@pytest.mark.parametrize("verb", [fork_into, roll_back_there, restore_there])
def test_no_verb_builds_a_directory_in_the_live_folder_of_another_deployment(
    history: History, verb: Callable[[StreamHandle, History], None]
) -> None:
    """Only starts and imports asked whose folder it is: a fork or a rollback built its directory among the other's."""
    claim_live_folder(history.shelf.stream)
    other = staging(history)
    if verb is fork_into:
        other = replace(other, stream_id="scratch", name="scratch")
        other.register()
        theirs = Path(other.live_folder)
        theirs.mkdir(parents=True)
        (theirs / OWNER).write_text(history.shelf.stream.catalog.deployment_id)
    before = sorted(Path(other.live_folder).rglob("*"))

    with pytest.raises(LiveDirectoryError, match="use the same folder by mistake"):
        verb(other, history)

    assert sorted(Path(other.live_folder).rglob("*")) == before


class TestACatalogRestoredFromABackup:
    """It went on in the live directory of the backup, behind what the query had committed since."""

    @pytest.fixture
    def behind(self, history: History) -> History:
        root, stream = history.shelf.root, history.shelf.stream
        trigger_savepoint(stream, origin=ORIGIN, label="kept")
        stream.catalog.close()
        shutil.copy(root / "catalog.db", root / "backup.db")
        history.shelf.stream = replace(stream, catalog=Catalog(f"sqlite:///{root / 'catalog.db'}"))
        history.start("kept", accept_loss=True, no_safety_savepoint=True)
        history.commit(LAST + 1, Path(history.live.url))
        self.newest = history.live.url
        history.shelf.stream.catalog.close()
        shutil.copy(root / "backup.db", root / "catalog.db")
        history.shelf.stream = replace(stream, catalog=Catalog(f"sqlite:///{root / 'catalog.db'}"))
        return history

    @pytest.mark.parametrize("start_from", ["latest", "latest-checkpoint", "kept", "batch-3"])
    def test_is_refused_with_the_list_of_what_is_there(self, behind: History, start_from: str) -> None:
        with pytest.raises(LiveDirectoryError, match=f"older than the live directories(.|\n)*{self.newest}, up to"):
            check_places(behind.shelf.stream, StartFrom(start_from), predecessor_ended=True)
        with pytest.raises(LiveDirectoryError, match="older than the live directories"):
            check_places(behind.shelf.stream, None, predecessor_ended=True)

    def test_may_be_given_up_by_name(self, behind: History) -> None:
        start_from = StartFrom("empty", discard_state=True)
        check_places(behind.shelf.stream, start_from, predecessor_ended=True)

    def test_is_rebuilt_and_goes_on_in_the_newest_directory(self, behind: History) -> None:
        stream = behind.shelf.stream

        report = rebuild(stream, origin=ORIGIN)

        record = stream.catalog.streams.get(STREAM)
        assert report.live_directory == record.live_directory == self.newest
        check_places(stream, StartFrom(), predecessor_ended=True)
        # Tokens go on above those on disk, so that no directory is built under a name that exists.
        lease = stream.catalog.leases.acquire(STREAM, HOLDER, 60_000)
        assert lease.token > max(each.token for each in stream.live_directories())

    def test_a_directory_that_a_killed_start_left_is_not_ahead(
        self, history: History, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")

        def killed(*_: object, **_how: object) -> None:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(StreamRecords, "switch_live_directory", killed)
            with pytest.raises(Killed):
                history.start("kept", accept_loss=True, no_safety_savepoint=True)

        assert len(history.shelf.stream.live_directories()) == 2
        check_places(history.shelf.stream, StartFrom(), predecessor_ended=True)

        # The next start takes a higher number, which the catalog does not count.
        history.start("kept", accept_loss=True, no_safety_savepoint=True)
        history.commit(LAST + 1, Path(history.live.url))

        assert history.live.url.rpartition("/")[2].startswith("live-3-")
        check_places(history.shelf.stream, StartFrom(), predecessor_ended=True)

    def test_a_directory_that_a_successor_built_meanwhile_is_not_ahead(
        self, history: History, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that was paused after it read the catalog is refused by its lease, not with a wrong reason."""
        stream = history.shelf.stream
        trigger_savepoint(stream, origin=ORIGIN, label="kept")
        before_the_pause = [stream.catalog.streams.get(STREAM)]
        history.start("kept", accept_loss=True, no_safety_savepoint=True)
        history.commit(LAST + 1, Path(history.live.url))
        get = StreamRecords.get

        def paused_once(self: StreamRecords, stream_id: str) -> StreamRecord:
            return before_the_pause.pop() if before_the_pause else get(self, stream_id)

        monkeypatch.setattr(StreamRecords, "get", paused_once)
        check_places(stream, StartFrom(), predecessor_ended=True)
