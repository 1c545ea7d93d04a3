"""The catalog is lost: snapshots and live directories are registered again, and the next start resumes exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.client import Client
from dagster_ckpt.client import rebuild as rebuilding
from dagster_ckpt.client.examination import SnapshotVerification, record_verification
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import ContinueFrom, rebuild
from dagster_ckpt.errors import (
    CatalogError,
    LeaseHeldError,
    LiveDirectoryError,
    StateAtRiskError,
    StorageAccessError,
    StreamNotFoundError,
)
from dagster_ckpt.recovery.checkpoint_retention import discard, subsume
from dagster_ckpt.recovery.facts import recovery_facts, unknown_state
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.snapshot.garbage_collection import NOTES_NAME
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import query_metadata
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream import ownership
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import fence_predecessor
from dagster_ckpt.stream.snapshots import write_notes
from dagster_ckpt.stream.snapshotting import sharing_base
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer, holding, keeping, set_stream
from tests.support.executioner import Killed
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken
from tests.support.verbs import trigger_savepoint

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def lose_the_catalog(history: History) -> str:
    """Another catalog, which knows the stream as a first start makes it known; returns whose the lost one was."""
    stream = history.shelf.stream
    lost = stream.catalog.deployment_id
    stream.catalog.close()
    history.shelf.stream = replace(stream, catalog=Catalog(f"sqlite:///{history.shelf.root / 'new-catalog.db'}"))
    history.shelf.stream.register()
    return lost


def checkpoint(history: History) -> SnapshotRecord:
    return taken(history.shelf, SnapshotKind.CHECKPOINT)


def test_a_lost_catalog_is_rebuilt_and_the_next_plain_start_goes_on_exactly(history: History) -> None:
    """Seen by a user, 3: the next plain start began empty."""
    mine = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    history.commit(LAST + 1)
    newest = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="newest")
    lost = lose_the_catalog(history)
    stream = history.shelf.stream
    with pytest.raises(LiveDirectoryError, match="rebuild_catalog_job"):
        planned_start(stream, StartFrom())

    report = rebuild(stream, origin="a test", take_over_deployment=lost)

    assert len(report.registered) == 2
    assert report.skipped == ()
    plan = planned_start(stream, StartFrom())
    assert (plan.kind, plan.to_batch) == (RecoveryKind.RESUME, LAST + 1)
    listed = stream.catalog.snapshots.completed(STREAM)
    assert [(snapshot.snapshot_id, snapshot.label, snapshot.batch_id) for snapshot in listed] == [
        (newest.snapshot_id, "newest", LAST + 1),
        (mine.snapshot_id, "mine", LAST),
    ]
    assert stream.catalog.streams.get(STREAM).next_number == (newest.number or 0) + 1
    # The sinks are known again, so a start by the label rolls them back.
    kind, _ = history.start("mine", accept_loss=True)
    assert (kind, history.batch, history.sink_batch) == (RecoveryKind.RESTORE, LAST, LAST)


def test_the_refusal_without_a_catalog_lists_all_that_is_there(history: History) -> None:
    kept = checkpoint(history)
    savepoint = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    live = history.live.url
    lose_the_catalog(history)

    with pytest.raises(LiveDirectoryError) as refusal:
        planned_start(history.shelf.stream, StartFrom())

    said = str(refusal.value)
    assert f"{live}, up to batch {LAST}" in said
    assert str(kept.location) in said
    assert f"savepoint {savepoint.location}" in said
    assert f"the sink log of file:{history.sink}, up to batch {LAST}" in said


def test_where_only_savepoints_are_left_nothing_begins_empty_either(history: History) -> None:
    savepoint = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    shutil.rmtree(history.shelf.live)
    lose_the_catalog(history)

    with pytest.raises(LiveDirectoryError, match=str(savepoint.location)):
        planned_start(history.shelf.stream, StartFrom())
    with pytest.raises(StateAtRiskError, match="sink log"):
        planned_start(history.shelf.stream, StartFrom("empty"))


def test_the_folder_that_the_query_names_is_listed_where_no_snapshot_tells_it(history: History, tmp_path: Path) -> None:
    lose_the_catalog(history)
    output = NamedOutput("parquet", str(history.sink))

    found = unknown_state(history.shelf.stream, output)

    assert found.sinks == [f"the sink log of {history.sink}, up to batch {LAST}"]


def test_a_new_catalog_takes_over_the_deployment_whose_snapshots_it_registers(history: History) -> None:
    trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    deployment_id = history.shelf.stream.catalog.deployment_id
    lose_the_catalog(history)
    elsewhere = Catalog(f"sqlite:///{history.shelf.root / 'new-catalog.db'}")
    assert elsewhere.deployment_id != deployment_id

    rebuild(history.shelf.stream, origin="a test", take_over_deployment=deployment_id)

    assert history.shelf.stream.catalog.deployment_id == deployment_id
    assert elsewhere.deployment_id == deployment_id, "also for a process that had it open"
    elsewhere.close()


def test_a_catalog_in_use_does_not_register_the_snapshots_of_another_deployment(history: History) -> None:
    checkpoint(history)
    lost = lose_the_catalog(history)
    catalog = history.shelf.stream.catalog
    other = replace(history.shelf.stream, stream_id="other", name="other", asset_key="other")
    other.register()
    as_writer(catalog, "other").streams.switch_live_directory(other.live_directory(1, 1).url)
    before = catalog.deployment_id

    with pytest.raises(CatalogError, match=r"in which other was started.*new, empty catalog.*take_over_deployment"):
        rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    assert (catalog.deployment_id, catalog.snapshots.of_stream(STREAM)) == (before, [])


def test_snapshots_of_two_deployments_are_not_mixed(history: History) -> None:
    mine = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    first = history.shelf.stream.catalog.deployment_id
    with history.shelf.stream.catalog.database.writing() as connection:
        connection.exec_driver_sql("UPDATE deployment SET deployment_id = 'another'")
    history.commit(LAST + 1)
    theirs = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="theirs")
    lose_the_catalog(history)
    catalog = history.shelf.stream.catalog

    with pytest.raises(LiveDirectoryError, match=rf"({first}, another|another, {first}).*take_over_deployment"):
        rebuild(history.shelf.stream, origin="a test")
    report = rebuild(history.shelf.stream, origin="a test", take_over_deployment=first)

    assert [snapshot.snapshot_id for snapshot in catalog.snapshots.completed(STREAM)] == [mine.snapshot_id]
    assert [each.split(": ")[0] for each in report.skipped] == [theirs.location]


def test_savepoints_of_another_deployment_in_a_shared_folder_are_no_stream_of_this_one(history: History) -> None:
    theirs = trigger_savepoint(history.shelf.stream, origin=ORIGIN)
    lost = history.shelf.stream.catalog.deployment_id
    new, live_root = f"sqlite:///{history.shelf.root / 'new.db'}", str(history.shelf.root / "new-live")

    with Client(new, storage=history.shelf.storage, live_root=live_root) as client:
        ignored = client.rebuild_all()
        assert (ignored.streams, ignored.refused, client.catalog.streams.all()) == ((), {}, [])
        client.rebuild_all(take_over_deployment=lost)
        assert [each.snapshot_id for each in client.list_snapshots(STREAM)] == [theirs.snapshot_id]


def test_after_a_rebuild_older_directories_have_lower_tokens_and_are_cleared(history: History) -> None:
    trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="mine")
    live = history.shelf.live
    high = live.with_name("live-1-37")
    live.rename(high)
    shutil.copytree(high, high.with_name("live-0-36"))
    lost = lose_the_catalog(history)
    stream = history.shelf.stream

    rebuild(stream, origin="a test", take_over_deployment=lost)
    kind, prepared = history.start("mine", accept_loss=True)

    assert kind is RecoveryKind.RESTORE
    (_, old, new) = stream.live_directories()
    assert (old.live.url, new.live.url) == (str(high), prepared.live.url)
    assert new.token > 37
    with keeping(stream.catalog, STREAM) as lease:
        delete_older_live_directories(stream, prepared.live, lease)
    # The one that the lost catalog's query may still run in keeps its fence.
    assert old.live.fenced_at() is not None
    assert [each.live.url for each in stream.live_directories()] == [str(high), prepared.live.url]


def test_with_the_live_directories_lost_too_tokens_are_above_those_that_a_sink_may_remember(history: History) -> None:
    """The markers in Kafka name the token of the live directory; the stream could never write there again."""
    stream = history.shelf.stream
    for _ in range(20):
        with holding(stream.catalog, STREAM) as lease:
            issued = lease.token
    trigger_savepoint(stream, origin=ORIGIN, label="kept")
    lost = lose_the_catalog(history)
    shutil.rmtree(history.shelf.live.parent)
    stream = history.shelf.stream

    rebuild(stream, origin=ORIGIN, take_over_deployment=lost)

    with holding(stream.catalog, STREAM) as lease:
        assert lease.token > issued


def test_what_an_empty_start_without_the_catalog_leaves_is_cleared_as_well(history: History) -> None:
    history.shelf.live.rename(history.shelf.live.with_name("live-1-37"))
    lose_the_catalog(history)
    stream = history.shelf.stream
    asked: list[str] = []

    def start_query(live: LiveDirectory) -> Never:
        asked.append(live.url)
        raise OSError(f"Spark is asked to start in {live.url}")

    start_from = StartFrom("empty", discard_state=True)
    with pytest.raises(OSError, match="Spark is asked"):
        execute_stream(stream, RunRequest("run", start_query, start_from=start_from))

    assert asked == [stream.live_directory(2, 38).url]


def test_what_is_registered_again_makes_room_and_is_counted_on(history: History) -> None:
    snapshots = []
    for batch in range(LAST + 1, LAST + 5):
        snapshots.append(checkpoint(history))
        history.commit(batch)
    lost = lose_the_catalog(history)
    stream = history.shelf.stream
    rebuild(stream, origin="a test", take_over_deployment=lost)

    dropped = subsume(stream)
    discard(stream, dropped, reason="subsumed", lease=None)

    assert [snapshot.snapshot_id for snapshot in dropped] == [snapshots[0].snapshot_id]
    assert len(stream.store.checkpoints()) == 3
    assert stream.catalog.streams.allocate_number(STREAM) == 5


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_without_a_whole_live_directory_the_newest_snapshot_is_restored(history: History, damage: str) -> None:
    trigger_savepoint(history.shelf.stream, origin=ORIGIN)
    history.commit(LAST + 1)
    newest = trigger_savepoint(history.shelf.stream, origin=ORIGIN)
    history.commit(LAST + 2)
    history.shelf.break_live_directory(damage)
    lost = lose_the_catalog(history)

    report = rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    assert report.live_directory is None
    plan = planned_start(history.shelf.stream, StartFrom())
    assert plan.kind is RecoveryKind.RESTORE
    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == newest.snapshot_id


def test_after_a_rewind_the_newest_directory_counts_and_snapshots_left_behind_do_not(history: History) -> None:
    kept = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")
    history.commit(LAST + 1)
    left = trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="left")
    history.start("kept", accept_loss=True)
    stands_in = history.live.url
    lost = lose_the_catalog(history)
    stream = history.shelf.stream

    report = rebuild(stream, origin="a test", take_over_deployment=lost)

    assert report.live_directory == stands_in
    restorable = {snapshot.snapshot_id for snapshot in stream.catalog.snapshots.restorable(STREAM)}
    assert kept.snapshot_id in restorable
    assert left.snapshot_id not in restorable
    assert planned_start(stream, StartFrom()).to_batch == LAST


@pytest.mark.parametrize("start_from", ["kept", f"batch-{LAST - 1}"])
@pytest.mark.parametrize(
    ("owner", "step", "is_used"),
    [
        (StreamRecords, "switch_live_directory", False),
        # The sinks are not rolled back yet, so they fit the directory before.
        (LiveDirectory, "note_in_use", False),
        (StreamRecords, "restore_finished", True),
    ],
)
def test_a_directory_that_a_killed_start_built_and_the_stream_does_not_use_is_passed_over(
    history: History, monkeypatch: pytest.MonkeyPatch, start_from: str, owner: type, step: str, is_used: bool
) -> None:
    """Found by reading: the catalog is lost right after the kill, and the unused directory is the newest one."""
    trigger_savepoint(history.shelf.stream, origin="a test", label="kept")
    history.commit(LAST + 1)
    before = history.live.url

    def killed(*_: object, **_how: object) -> Never:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed)
        with pytest.raises(Killed):
            history.start(start_from, accept_loss=True, no_safety_savepoint=True)
    built = [each.live.url for each in history.shelf.stream.live_directories()]
    assert len(built) == 2

    lost = lose_the_catalog(history)
    report = rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    assert report.live_directory == (built[-1] if is_used else before)
    assert any(built[-1] in line for line in report.skipped) == (not is_used)


def test_a_snapshot_that_cannot_be_read_is_reported_and_skipped(history: History) -> None:
    good = checkpoint(history)
    history.commit(LAST + 1)
    bad = checkpoint(history)
    path = Path((bad.location or "").removeprefix("file://")) / "_metadata"
    path.write_bytes(path.read_bytes()[:-9])
    lost = lose_the_catalog(history)

    report = rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    assert [snapshot.snapshot_id for snapshot in history.shelf.stream.catalog.snapshots.completed(STREAM)] == [
        good.snapshot_id
    ]
    assert len(report.skipped) == 1
    assert "chk-2" in report.skipped[0]
    assert any("skipped" in line for line in report.messages())


@pytest.mark.parametrize("call", ["manifest", "verify"])
def test_while_a_snapshot_cannot_be_reached_nothing_is_registered(
    history: History, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(history)
    history.commit(LAST + 1)
    newest = checkpoint(history)
    shutil.rmtree(history.shelf.live)
    lost = lose_the_catalog(history)
    stream = history.shelf.stream
    own, real = stream.catalog.deployment_id, getattr(ObjectSnapshotStore, call)

    def throttled(store: ObjectSnapshotStore, location: str, **options: Any) -> Any:
        if location == newest.location:
            raise StorageAccessError("503 SlowDown")
        return real(store, location, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectSnapshotStore, call, throttled)
        with pytest.raises(StorageAccessError, match=r"chk-2 could not be read, so nothing.*503 SlowDown.*again"):
            rebuild(stream, origin=ORIGIN, take_over_deployment=lost)
    assert (stream.catalog.snapshots.of_stream(STREAM), stream.catalog.deployment_id) == ([], own)

    assert len(rebuild(stream, origin=ORIGIN, take_over_deployment=lost).registered) == 2
    assert planned_start(stream, StartFrom()).to_batch == LAST + 1


def test_of_a_savepoint_and_a_users_copy_of_it_one_is_registered(history: History) -> None:
    savepoint = trigger_savepoint(history.shelf.stream, origin=ORIGIN)
    place = Path((savepoint.location or "").removeprefix("file://"))
    shutil.copytree(place, place.with_name("savepoint-before-migration"))
    lost = lose_the_catalog(history)

    report = rebuild(history.shelf.stream, origin=ORIGIN, take_over_deployment=lost)

    assert len(report.registered) == 1
    [skipped] = report.skipped
    assert f": it is a copy of file://{place.parent}/savepoint-" in skipped
    [listed] = history.shelf.stream.catalog.snapshots.completed(STREAM)
    assert listed.snapshot_id == savepoint.snapshot_id


def test_snapshots_of_another_stream_in_the_same_folder_are_none_of_its_business(history: History) -> None:
    trigger_savepoint(history.shelf.stream, origin=ORIGIN)
    lost = lose_the_catalog(history)
    other = replace(history.shelf.stream, stream_id="other", live_root=str(history.shelf.root / "other-live"))

    with pytest.raises(StreamNotFoundError, match="Nothing of stream 'other' was found: no snapshot in file://"):
        rebuild(other, origin="a test", take_over_deployment=lost)

    # Nothing was changed: a first start would otherwise begin from nothing in a stream that seems known.
    assert [each.stream_id for each in other.catalog.streams.all()] == [STREAM]
    assert other.catalog.deployment_id != lost


def test_a_rebuild_of_what_is_known_adds_only_what_is_missing(history: History) -> None:
    known = checkpoint(history)
    history.commit(LAST + 1)
    lost = checkpoint(history)
    stream = history.shelf.stream
    with stream.catalog.database.writing() as connection:
        connection.exec_driver_sql(f"DELETE FROM snapshots WHERE snapshot_id = '{lost.snapshot_id}'")
    before = stream.catalog.streams.get(STREAM)

    report = rebuild(stream, origin="a test")

    assert len(report.registered) == 1
    assert {snapshot.snapshot_id for snapshot in stream.catalog.snapshots.completed(STREAM)} == {
        known.snapshot_id,
        lost.snapshot_id,
    }
    after = stream.catalog.streams.get(STREAM)
    assert (after.live_directory, after.timeline) == (before.live_directory, before.timeline)
    assert rebuild(stream, origin="a test").registered == ()


def test_a_stream_that_runs_is_not_rebuilt(history: History) -> None:
    lost = lose_the_catalog(history)
    with holding(history.shelf.stream.catalog, STREAM), pytest.raises(LeaseHeldError):
        rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)
    assert history.shelf.stream.catalog.streams.get(STREAM).live_generation == 0


def test_nothing_but_the_catalog_is_changed(history: History) -> None:
    checkpoint(history)
    lost = lose_the_catalog(history)
    before = {path for path in history.shelf.root.rglob("*") if "catalog" not in path.name}

    rebuild(history.shelf.stream, origin="a test", take_over_deployment=lost)

    assert {path for path in history.shelf.root.rglob("*") if "catalog" not in path.name} == before
    assert LiveDirectory(history.live.url).positions().commit == LAST


def test_what_only_the_lost_catalog_knew_of_a_snapshot_is_beside_it(history: History) -> None:
    client = Client.of_stream(history.shelf.stream, origin="the operator")
    tagged, broken = checkpoint(history), checkpoint(history)
    loaded = checkpoint(history)
    client.tag(STREAM, tagged.reference, label="audit-2026")
    client.tag(STREAM, loaded.reference, label="released")
    client.release(STREAM, loaded.reference)
    catalog = history.shelf.stream.catalog
    as_writer(catalog, STREAM).snapshots.proven(loaded.snapshot_id)
    write_notes(history.shelf.stream, loaded.snapshot_id)
    damage = SnapshotVerification(broken.location or "", None, True, ("a block is damaged",), state_was_read=True)
    record_verification(history.shelf.stream, damage)
    before = {each.snapshot_id: each for each in catalog.snapshots.completed(STREAM)}
    lost = lose_the_catalog(history)

    rebuild(history.shelf.stream, origin=ORIGIN, take_over_deployment=lost)

    catalog = history.shelf.stream.catalog
    after = {each.snapshot_id: each for each in catalog.snapshots.completed(STREAM)}
    assert catalog.holds.tagged(STREAM) == {tagged.snapshot_id}
    assert after[tagged.snapshot_id].label == "audit-2026"
    assert after[loaded.snapshot_id].label is None
    assert after[loaded.snapshot_id].is_proven
    assert after[broken.snapshot_id].verified_problem == "a block is damaged"
    assert {name: each.is_proven for name, each in after.items()} == {
        name: each.is_proven for name, each in before.items()
    }
    assert sharing_base(history.shelf.stream) is None
    # Nor is the damage cleared now by less than what found it.
    assert catalog.snapshots.verified(broken.snapshot_id, None) == "a block is damaged"


def test_notes_that_cannot_be_read_keep_no_snapshot_from_being_registered(history: History) -> None:
    store = history.shelf.stream.store
    assert isinstance(store, ObjectSnapshotStore)
    taken_here = checkpoint(history)
    store.put_companion(taken_here.location or "", NOTES_NAME, b"[1")
    lost = lose_the_catalog(history)

    report = rebuild(history.shelf.stream, origin=ORIGIN, take_over_deployment=lost)

    assert len(report.registered) == 1


def test_a_query_that_the_lost_catalog_knew_of_is_fenced_before_the_next_start(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog may only be another one by mistake, and the query run all the while."""
    monkeypatch.setattr(ownership, "SHORTEST_WAIT_S", 0.0)
    runs_in = history.live
    lost = lose_the_catalog(history)
    stream = history.shelf.stream
    rebuild(stream, origin="a test", take_over_deployment=lost)

    acquired = acquire(stream.catalog, STREAM, this_holder("mine", "my run", None))
    assert not acquired.predecessor_ended
    with LeaseKeeper(stream.catalog, acquired.record) as lease:
        fence_predecessor(stream, acquired, still_mine=lease.check)
        plan = plan_recovery(recovery_facts(stream, StartFrom(), predecessor_ended=acquired.predecessor_ended))
        live = prepare(stream, plan, lease).live

    assert plan.kind is RecoveryKind.CLONE
    assert runs_in.fenced_at() == LAST + 1
    assert (live.url != runs_in.url, history.batch) == (True, LAST)


class TestAnOldCopyOfTheLiveDirectory:
    """The disk was restored from a backup: the directory is behind a checkpoint that was taken of it."""

    @pytest.fixture
    def restored(self, history: History, tmp_path: Path) -> History:
        live = history.shelf.live
        shutil.copytree(live, tmp_path / "backup")
        for batch in (LAST + 1, LAST + 2):
            history.commit(batch)
        checkpoint(history)
        shutil.rmtree(live)
        shutil.copytree(tmp_path / "backup", live)
        return history

    def test_a_rebuild_lets_the_person_choose(self, restored: History) -> None:
        lost = lose_the_catalog(restored)
        stream = restored.shelf.stream

        with pytest.raises(
            LiveDirectoryError, match=rf"batch {LAST}, but chk-\d+ at batch {LAST + 2} .*old copy.*newest"
        ):
            rebuild(stream, origin=ORIGIN, take_over_deployment=lost)

        assert stream.catalog.snapshots.completed(STREAM) == []
        report = rebuild(stream, origin=ORIGIN, take_over_deployment=lost, continue_from=ContinueFrom.NEWEST)
        assert any("old copy" in each for each in report.skipped)
        kind, prepared = restored.start()
        assert (kind, prepared.live.positions().commit) == (RecoveryKind.RESTORE, LAST + 2)
        assert restored.sink_batch == LAST + 2

    def test_it_may_continue_in_the_copy(self, restored: History) -> None:
        lost = lose_the_catalog(restored)
        stream = restored.shelf.stream

        rebuild(stream, origin=ORIGIN, take_over_deployment=lost, continue_from=ContinueFrom.LIVE)

        assert stream.catalog.streams.get(STREAM).live_directory is not None
        assert stream.catalog.snapshots.restorable(STREAM) == []

    def test_a_catalog_of_the_same_backup_chooses_as_well(self, restored: History) -> None:
        stream = restored.shelf.stream
        with stream.catalog.database.writing() as connection:
            connection.execute(snapshots.delete())

        with pytest.raises(LiveDirectoryError, match="old copy"):
            rebuild(stream, origin=ORIGIN)

        rebuild(stream, origin=ORIGIN, continue_from=ContinueFrom.NEWEST)
        kind, prepared = restored.start()
        assert (kind, prepared.live.positions().commit) == (RecoveryKind.RESTORE, LAST + 2)


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_state_that_was_migrated_since_the_newest_snapshot_keeps_its_plan(history: History, has_snapshot: bool) -> None:
    former, migrated = ({"operators": [], "output_mode": mode, "version": 1} for mode in ("append", "update"))
    set_stream(history.shelf.stream.catalog, STREAM, plan=json.dumps(former))
    trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="former")
    history.live.folder.write("metadata", [query_metadata(history.query_id, "a rewrite", plan=migrated)])
    layout = [["a rewrite"]] if has_snapshot else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuilding, "LAYOUT", "layout of the test")
        patch.setattr(rebuilding, "_record", with_property(rebuilding._record, "layout of the test", layout))
        lost = lose_the_catalog(history)
        rebuild(history.shelf.stream, origin=ORIGIN, take_over_deployment=lost)
    assert history.shelf.stream.catalog.streams.get(STREAM).plan == (former if has_snapshot else migrated)


def with_property(make: Callable[..., SnapshotRecord], name: str, value: object) -> Callable[..., SnapshotRecord]:
    def made(*arguments: Any) -> SnapshotRecord:
        snapshot = make(*arguments)
        return replace(snapshot, properties={**snapshot.properties, name: value})

    return made
