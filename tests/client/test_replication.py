"""Copies of snapshots in a second folder: exact, shared, kept by a policy, and enough when everything else is gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.cli.command import FAILED
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.client.replication import Replication
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.policies.retention import Latest, MaxBytes, YoungerThan
from dagster_ckpt.recovery.checkpoint_retention import discard
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.snapshot.garbage_collection import SET_NAME
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.snapshot.opening import open_store, stored_streams
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.executioner import Executioner, Killed
from tests.support.file_damage import cut, drop, flip
from tests.support.places import path_of
from tests.support.retention_shelf import FILE_BYTES, STREAM, Shelf, storage_clock_ahead
from tests.support.rewind_history import LAST, History
from tests.support.taken_snapshot import taken

HOUR_MS = 3_600_000


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return tmp_path / "second"


def copies(second: Path) -> list[str]:
    store = open_store(FileSystemCheckpointStorage(f"file://{second}"), STREAM)
    return [location.rpartition("/")[2] for location in [*store.checkpoints(), *store.savepoints()]]


def copy(shelf: Shelf, second: Path, snapshot: str = "all", **options: Any) -> Replication:
    return Client.of_stream(shelf.stream, origin="a test").replicate(STREAM, snapshot, to=str(second), **options)


def objects(second: Path) -> list[Path]:
    return sorted((second / STREAM / "shared").iterdir())


def test_a_copy_is_its_original_byte_for_byte_and_shares_what_is_there(shelf: Shelf, second: Path) -> None:
    first = shelf.checkpoint()
    newest = shelf.checkpoint(base=first)
    savepoint = shelf.savepoint("mine")
    store = shelf.stream.store
    assert isinstance(store, ObjectSnapshotStore)
    store.put_companion(savepoint.location or "", SET_NAME, b"its set")

    done = copy(shelf, second)

    assert [each.snapshot_id for each in done.replicas] == [each.snapshot_id for each in (first, newest, savepoint)]
    assert done.is_complete
    assert len(objects(second)) == 2
    for path in (path for path in second.rglob("*") if path.is_file() and path.name != "_verified"):
        originals = shelf.root / ("snapshots" if STREAM in path.relative_to(second).parts else "savepoints")
        assert path.read_bytes() == (originals / path.relative_to(second)).read_bytes()
    assert [path.read_bytes() for path in second.rglob("_set")] == [b"its set"]
    store.put_companion(savepoint.location or "", SET_NAME, None)
    again = copy(shelf, second)
    assert [each.copied_bytes for each in again.replicas] == [0, 0, 0]
    assert list(second.rglob("_set")) == []
    third = shelf.checkpoint(base=newest)
    [of_third] = [each for each in copy(shelf, second).replicas if each.copied_bytes]
    assert of_third.snapshot_id == third.snapshot_id
    assert of_third.copied_bytes < 2 * FILE_BYTES + len((second / STREAM / "chk-4/_metadata").read_bytes())


@pytest.mark.parametrize("damage", [flip, drop])
def test_a_damaged_original_gets_no_copy_and_the_others_do(shelf: Shelf, second: Path, damage: Any) -> None:
    shelf.checkpoint()
    [broken] = (shelf.root / "snapshots" / STREAM / "shared").iterdir()
    intact = shelf.checkpoint()
    damage(broken)

    done = copy(shelf, second)

    assert not done.is_complete
    assert copies(second) == [f"chk-{intact.number}"]


@pytest.mark.parametrize("step", range(4))
def test_a_copy_that_is_interrupted_anywhere_is_completed_by_the_next(
    shelf: Shelf, second: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.checkpoint()
    shelf.checkpoint(base=first)
    with monkeypatch.context() as patch:
        Executioner(patch, step, (LocalFileIO, "write"))
        with pytest.raises(Killed):
            copy(shelf, second)
    # Whatever is listed is whole.
    store = open_store(FileSystemCheckpointStorage(f"file://{second}"), STREAM)
    assert all(store.verify(location) == [] for location in store.checkpoints())

    assert copy(shelf, second).is_complete

    assert copies(second) == ["chk-1", "chk-2"]
    assert all(store.verify(location) == [] for location in store.checkpoints())


def test_a_copy_that_was_not_read_replaces_none(shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.checkpoint()
    assert copy(shelf, second, keep=Latest(1)).is_complete
    before = copies(second)
    shelf.checkpoint()

    def throttled(_store: object, _location: str, **_options: object) -> list[str]:
        raise StorageAccessError("503 slow down")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectSnapshotStore, "verify", throttled)
        interrupted = copy(shelf, second, keep=Latest(1))
    assert not interrupted.is_complete
    assert interrupted.deleted == ()
    assert set(before) < set(copies(second))

    done = copy(shelf, second, keep=Latest(1))
    assert [each.is_verified for each in done.replicas] == [True]
    assert len(done.deleted) == 1
    assert len(copies(second)) == 1


def test_what_happens_to_an_original_later_happens_to_no_copy(shelf: Shelf, second: Path) -> None:
    base = shelf.checkpoint()
    shelf.checkpoint(base=base)
    savepoint = shelf.savepoint("mine")
    copy(shelf, second)
    before = {path: path.read_bytes() for path in second.rglob("*") if path.is_file()}
    originals = [*(shelf.root / "snapshots" / STREAM / "shared").iterdir()]
    originals += [each for each in path_of(savepoint.location or "").iterdir() if each.name != "_metadata"]

    for damage in (cut, flip, drop):
        for original in originals:
            damage(original)
        done = copy(shelf, second, verify=True)
        assert done.is_complete
        assert {path: path.read_bytes() for path in second.rglob("*") if path.is_file()} == before

    # And if both are damaged, nothing is deleted that another copy may need.
    flip(objects(second)[0])
    assert not copy(shelf, second, verify=True).is_complete
    left = {path for path in second.rglob("*") if path.is_file()}
    assert {path for path in before if path.name != "_verified"} <= left


def test_a_copy_that_was_found_damaged_stands_for_no_older_one(shelf: Shelf, second: Path) -> None:
    shelf.checkpoint()
    newest = shelf.checkpoint()
    copy(shelf, second)
    for shared in (shelf.root / "snapshots" / STREAM / "shared", second / STREAM / "shared"):
        [pack] = shared.glob(f"{newest.number}-*")
        flip(pack)
    assert not copy(shelf, second, verify=True).is_complete

    assert not copy(shelf, second, keep=Latest(1)).is_complete
    assert copies(second) == ["chk-1", "chk-2"]


def test_a_copy_that_lost_an_object_gets_it_again(shelf: Shelf, second: Path) -> None:
    shelf.checkpoint()
    copy(shelf, second)
    drop(objects(second)[0])
    assert [each.copied_bytes for each in copy(shelf, second).replicas] == [FILE_BYTES]


def test_a_copy_that_is_there_is_read_and_mended_only_on_request(shelf: Shelf, second: Path) -> None:
    first = shelf.checkpoint()
    shelf.checkpoint(base=first)
    copy(shelf, second)
    flip(objects(second)[0])

    assert [each.message() for each in copy(shelf, second).replicas] == ["is there, not read again"] * 2
    mended = copy(shelf, second, verify=True)

    assert mended.is_complete
    assert [each.is_verified for each in mended.replicas] == [True, True]
    assert mended.replicas[0].copied_bytes > 0
    assert [each.message() for each in copy(shelf, second, verify=True).replicas] == [
        "is there, every byte verified"
    ] * 2


def test_a_policy_keeps_copies_without_copying_what_it_drops(shelf: Shelf, second: Path) -> None:
    proven = shelf.checkpoint()
    shelf.stream.catalog.snapshots.verified(proven.snapshot_id, None, state_was_read=True)
    copy(shelf, second)
    for _ in range(3):
        shelf.checkpoint()

    done = copy(shelf, second, keep=Latest(2))

    # The newest proven one stays, too.
    assert copies(second) == ["chk-1", "chk-3", "chk-4"]
    assert [each.name.split()[0] for each in done.replicas] == ["chk-1", "chk-3", "chk-4"]
    shelf.checkpoint()
    assert copy(shelf, second, keep={"latest": 1}).deleted == (
        f"file://{second}/{STREAM}/chk-3",
        f"file://{second}/{STREAM}/chk-4",
    )
    assert copies(second) == ["chk-1", "chk-5"]
    assert len(objects(second)) == 2
    assert shelf.listed() == {each.snapshot_id for each in shelf.stream.catalog.snapshots.completed(STREAM)}


def test_a_copy_is_as_old_as_its_original_also_if_that_was_renewed(shelf: Shelf, second: Path) -> None:
    idle, now_ms = shelf.checkpoint(), shelf.stream.catalog.now_ms()
    shelf.completed_at(idle, now_ms - HOUR_MS)
    shelf.completed_at(shelf.checkpoint(), now_ms)

    # The headers say 1970.
    for wrote in (True, False):
        done = copy(shelf, second, keep=YoungerThan(2 * HOUR_MS))
        assert [each.copied_bytes > 0 for each in done.replicas] == [wrote] * 2
        assert done.deleted == ()
    shelf.completed_at(idle, now_ms - 3 * HOUR_MS)
    assert copy(shelf, second, keep=YoungerThan(2 * HOUR_MS)).deleted == (f"file://{second}/{STREAM}/chk-1",)


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_an_original_that_is_missing_keeps_no_other_from_being_copied(shelf: Shelf, second: Path, kind: str) -> None:
    shelf.checkpoint()
    assert copy(shelf, second, keep=Latest(1)).is_complete
    shelf.checkpoint()
    lost = shelf.checkpoint() if kind == "checkpoint" else shelf.savepoint("mine")
    shutil.rmtree(path_of(lost.location or ""))

    done = copy(shelf, second, keep=Latest(1))

    # It is no reason to keep older copies, nor takes the place of one.
    assert copies(second) == ["chk-2"]
    assert done.deleted == (f"file://{second}/{STREAM}/chk-1",)
    # A user may delete the folder of a savepoint, but not of a checkpoint.
    assert done.is_complete == (kind == "savepoint")
    assert any(f"there is no snapshot at {lost.location} any more" in each for each in done.messages())
    assert list(second.rglob("_incomplete")) == []
    named = copy(shelf, second, lost.reference)
    assert not named.is_complete
    assert lost.location in named.failed[0]


def test_snapshots_that_are_deleted_while_earlier_ones_are_copied_are_skipped(shelf: Shelf, second: Path) -> None:
    shelf.savepoint("large")
    subsumed = shelf.checkpoint()
    shelf.checkpoint()

    def meanwhile(_done: int, _all: int) -> None:
        discard(shelf.stream, [subsumed], reason="subsumed", lease=None)

    done = copy(shelf, second, progress=meanwhile)

    assert done.is_complete
    assert [each.name for each in done.replicas] == ["savepoint large at batch 1", "chk-3 at batch 3"]
    assert done.skipped == (f"chk-2 at batch 2 was not copied: there is no snapshot at {subsumed.location} any more",)


def test_a_copy_whose_original_is_missing_is_read_on_request(shelf: Shelf, second: Path) -> None:
    lost = shelf.checkpoint()
    copy(shelf, second)
    shelf.checkpoint()
    shutil.rmtree(path_of(lost.location or ""))
    assert copy(shelf, second).messages() == [
        f"chk-2 at batch 2: copied, 1.1 kB written, every byte verified: file://{second}/{STREAM}/chk-2"
    ]
    flip(objects(second)[0])
    [failed] = copy(shelf, second, verify=True).failed
    assert "/chk-1 is damaged" in failed
    assert "its original is gone" in failed


def test_what_an_interrupted_copy_left_is_deleted_once_it_is_old(
    shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.checkpoint()
    shelf.savepoint("mine")
    real = LocalFileIO.write

    def write(self: LocalFileIO, path: str, *arguments: Any, **options: Any) -> None:
        if path.endswith("_metadata") and self.url.startswith(f"file://{second}"):
            raise Killed
        real(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileIO, "write", write)
    for snapshot in ("chk-1", "mine"):
        with pytest.raises(Killed):
            copy(shelf, second, snapshot)
    monkeypatch.undo()
    shelf.checkpoint()

    assert copy(shelf, second, keep=Latest(1)).swept == ()
    with storage_clock_ahead(7 * HOUR_MS):
        done = copy(shelf, second, keep=Latest(1))

    assert sorted(Path(each).name[:2] for each in done.swept) == ["1-", "2-"]
    assert "which an interrupted copy left" in done.messages()[-1]
    left = {path.parent.name for path in second.rglob("*") if path.is_file()}
    assert left == {"chk-3", "shared"}
    assert len(objects(second)) == 1


def test_copies_of_a_savepoint_set_stay(shelf: Shelf, second: Path) -> None:
    savepoint = shelf.savepoint("of a set")
    made = SavepointSet("set-1", "all", (STREAM,), "a test", None, created_at_ms=1, savepoints={STREAM: savepoint})
    shelf.stream.store.put_companion(savepoint.location or "", SET_NAME, b"{}")
    shelf.stream.catalog.savepoint_sets.record(made, [savepoint.snapshot_id])
    copy(shelf, second)
    shelf.checkpoint()
    shelf.checkpoint()

    assert copy(shelf, second, keep=Latest(1)).deleted == ()
    [kept] = [each for each in copies(second) if each.startswith("savepoint-")]
    assert (second / kept / "_set").read_bytes() == b"{}"


def test_copies_outlive_their_originals_until_the_policy_drops_them(shelf: Shelf, second: Path) -> None:
    shelf.checkpoint()
    copy(shelf, second)
    gone = shelf.stream.catalog.snapshots.completed(STREAM)[0]
    shelf.checkpoint()
    shelf.stream.store.discard(gone.location or "")
    shelf.stream.catalog.snapshots.mark_deleting(gone.snapshot_id, lease=None)
    shelf.stream.catalog.snapshots.deleted(gone.snapshot_id, "a test", lease=None)
    copy(shelf, second, keep=MaxBytes(10**6))
    assert copies(second) == ["chk-1", "chk-2"]

    # Nothing is left that could mend them, so that only a reader tells.
    (second / STREAM / "chk-1/_verified").unlink()
    assert copy(shelf, second, verify=True).is_complete
    assert (second / STREAM / "chk-1/_verified").exists()
    for path in objects(second):
        flip(path)
    done = copy(shelf, second, verify=True)
    assert [each for each in done.failed if "its original is gone" in each and "/chk-1 is damaged" in each]
    assert not done.is_complete
    assert copies(second) == ["chk-1", "chk-2"]
    # One that the policy drops is no reason to keep others.
    assert copy(shelf, second, verify=True, keep=Latest(1)).deleted
    assert copies(second) == ["chk-2"]


def test_one_snapshot_that_cannot_be_read_keeps_no_other_from_being_verified(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        shelf.checkpoint()
    real = ObjectSnapshotStore.verify

    def throttled(store: ObjectSnapshotStore, location: str, **options: Any) -> list[str]:
        if location.endswith("chk-2"):
            raise StorageAccessError("chk-2 cannot be read: 503 SlowDown")
        return real(store, location, **options)

    monkeypatch.setattr(ObjectSnapshotStore, "verify", throttled)
    client = Client.of_stream(shelf.stream, origin="a test")
    with pytest.raises(StorageAccessError, match=r"1 of 3 snapshots could not be read.*2 of them cannot.*503 SlowDown"):
        client.verify(STREAM, "all")
    with pytest.raises(StorageAccessError, match=r"^chk-2 cannot be read"):
        client.verify(STREAM, "chk-2")
    verified = {each.number for each in shelf.stream.catalog.snapshots.completed(STREAM) if each.verified_at_ms}
    assert verified == {1, 3}


def test_a_snapshot_that_is_subsumed_meanwhile_keeps_no_other_from_being_verified(shelf: Shelf) -> None:
    for _ in range(3):
        shelf.checkpoint()
    client = Client.of_stream(shelf.stream, origin="a test")
    snapshots = shelf.stream.catalog.snapshots
    listed = {each.number: each for each in snapshots.completed(STREAM)}

    def meanwhile(_done: int, _all: int) -> None:
        discard(shelf.stream, [listed[2]], reason="subsumed", lease=None)

    assert len(client.verify(STREAM, "all", progress=meanwhile)) == 2
    assert {each.number for each in snapshots.completed(STREAM) if each.verified_at_ms} == {1, 3}


def test_a_folder_that_a_stream_uses_or_that_has_another_deployments_copies_is_refused(
    shelf: Shelf, second: Path
) -> None:
    shelf.checkpoint()
    before = shelf.data_files()
    for name in ("snapshots", f"snapshots/{STREAM}", "savepoints", "savepoints/copies", "live", "."):
        place = shelf.root / name
        with pytest.raises(OptionError, match="overlaps"):
            copy(shelf, place, keep=Latest(1))
    copy(shelf, second)
    other = Catalog(f"sqlite:///{shelf.root / 'other.db'}")
    theirs = replace(shelf, stream=replace(shelf.stream, catalog=other))
    theirs.stream.register()
    with pytest.raises(OptionError, match="of deployment"):
        copy(theirs, second, keep=Latest(1))
    other.close()
    assert shelf.data_files() == before
    assert copies(second) == ["chk-1"]


def test_another_snapshot_of_the_same_number_is_not_replaced(shelf: Shelf, second: Path) -> None:
    shelf.checkpoint()
    other = path_of(shelf.checkpoint().location or "") / "_metadata"
    copy(shelf, second, "chk-1")
    shutil.copy(other, second / STREAM / "chk-1/_metadata")
    done = copy(shelf, second, "chk-1")
    assert "is another snapshot than" in done.failed[0]
    assert (second / STREAM / "chk-1/_metadata").read_bytes() == other.read_bytes()


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_a_copy_that_cannot_be_read_is_reported_as_damaged_and_keeps_the_older_ones(
    shelf: Shelf, second: Path, kind: str
) -> None:
    shelf.checkpoint()
    damaged = shelf.checkpoint() if kind == "checkpoint" else shelf.savepoint("mine")
    copy(shelf, second)
    [metadata] = second.rglob(f"{path_of(damaged.location or '').name}/_metadata")
    flip(metadata)
    [failed] = copy(shelf, second).failed
    assert f"the copy file://{metadata.parent} is damaged" in failed
    discard(shelf.stream, shelf.stream.catalog.snapshots.completed(STREAM), reason="subsumed", lease=None)
    shelf.checkpoint()

    done = copy(shelf, second, keep=Latest(2))

    assert (done.is_complete, done.deleted) == (False, ())
    assert f"the copy file://{metadata.parent} is damaged" in done.failed[0]
    # Another stream's savepoint in the folder of all savepoints is not this one's.
    shutil.rmtree(metadata.parent)
    (second / "savepoint-other-1").mkdir()
    (second / "savepoint-other-1/_metadata").write_bytes(b"damaged")
    assert copy(shelf, second, keep=Latest(1)).is_complete


def test_while_the_copies_cannot_be_listed_none_is_deleted(
    shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.checkpoint()
    copy(shelf, second)
    shelf.checkpoint()
    real, times = ObjectSnapshotStore.manifest, [0]

    def manifest(store: ObjectSnapshotStore, location: str) -> Any:
        if str(second) in location:
            times[0] += 1
            if times[0] == fails_at:
                raise StorageAccessError("503 SlowDown")
        return real(store, location)

    monkeypatch.setattr(ObjectSnapshotStore, "manifest", manifest)
    fails_at = 1
    with pytest.raises(StorageAccessError, match="503 SlowDown"):
        copy(shelf, second, keep=Latest(1))
    # What was copied is reported.
    times, fails_at = [0], 3
    done = copy(shelf, second, keep=Latest(1))
    assert [each.is_verified for each in done.replicas] == [True]
    assert done.failed == ("no older copy was deleted: 503 SlowDown",)
    assert copies(second) == ["chk-1", "chk-2"]
    assert len(copy(shelf, second, keep=Latest(1)).deleted) == 1


def test_a_copy_that_nobody_read_stands_for_no_older_one(
    shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.checkpoint()
    copy(shelf, second)
    unread = shelf.checkpoint()
    with monkeypatch.context() as patch:
        Executioner(patch, 0, (ObjectSnapshotStore, "verify"))
        with pytest.raises(Killed):
            copy(shelf, second)
    discard(shelf.stream, [first, unread], reason="subsumed", lease=None)
    shelf.checkpoint()
    [pack] = (second / STREAM / "shared").glob("2-*")
    intact = pack.read_bytes()
    flip(pack)

    done = copy(shelf, second, keep=Latest(2))

    assert (done.is_complete, done.deleted) == (False, ())
    assert "/chk-2 is damaged" in done.failed[0]
    pack.write_bytes(intact)
    assert copy(shelf, second, keep=Latest(2)).is_complete
    assert copies(second) == ["chk-2", "chk-3"]
    assert (second / STREAM / "chk-2/_verified").exists()


def test_a_copy_that_a_verification_found_damaged_stands_for_no_older_one_later(shelf: Shelf, second: Path) -> None:
    olds = [shelf.checkpoint(), shelf.checkpoint()]
    copy(shelf, second)
    discard(shelf.stream, olds, reason="subsumed", lease=None)
    shelf.checkpoint()
    [pack] = (second / STREAM / "shared").glob("2-*")
    flip(pack)
    assert not copy(shelf, second, verify=True).is_complete

    assert not copy(shelf, second, keep=Latest(2)).is_complete
    assert copies(second) == ["chk-1", "chk-2", "chk-3"]


def test_the_command_copies_and_asks_before_it_deletes(
    shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        shelf.checkpoint()
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", str(shelf.stream.catalog.database.url.render_as_string(False)))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(commands(), ["replicate", STREAM, *arguments, "--to", str(second)])

    told = json.loads(run("all", "--json").stdout)
    assert [each["name"] for each in told["replicas"]] == ["chk-1 at batch 1", "chk-2 at batch 2", "chk-3 at batch 3"]
    assert "confirm with --yes" in run("all", "--keep", "{latest: 1}").stderr
    assert "deleted the copy" in run("all", "--keep", "{latest: 1}", "--yes").stdout
    assert copies(second) == ["chk-3"]
    (second / STREAM / "chk-3/_metadata").write_bytes(b"another life of the stream")
    assert run("latest").exit_code == FAILED


# Everything else is gone


@pytest.fixture
def history(tmp_path: Path, second: Path) -> Iterator[History]:
    """A stream at batch 9 whose newest copy is at batch 8; then its live directory and first storage are lost."""
    history = History(tmp_path)
    taken(history.shelf, SnapshotKind.CHECKPOINT)
    assert copy(history.shelf, second).is_complete
    history.commit(LAST + 1)
    shutil.rmtree(history.shelf.live)
    shutil.rmtree(tmp_path / "snapshots")
    yield history
    history.close()


def test_a_start_continues_from_a_copy_by_its_location(history: History, second: Path) -> None:
    kind, _ = history.start(str(second / STREAM / "chk-1"), accept_loss=True)
    assert (kind, history.batch, history.sink_batch) == (RecoveryKind.RESTORE, LAST, LAST)
    assert history.unlike_uninterrupted() == []


def test_with_the_catalog_lost_too_it_is_rebuilt_from_the_copies(history: History, second: Path) -> None:
    stream = history.shelf.stream
    lost, storage = stream.catalog.deployment_id, FileSystemCheckpointStorage(f"file://{second}")
    stream.catalog.close()
    history.shelf.stream = stream = replace(
        stream,
        catalog=Catalog(f"sqlite:///{history.shelf.root / 'new-catalog.db'}"),
        storage=storage,
        store=open_store(storage, STREAM),
    )

    report = rebuild(stream, origin="a test", take_over_deployment=lost)

    assert report.registered == (f"chk-1 at batch {LAST}",)
    assert planned_start(stream, StartFrom()).to_batch == LAST
    kind, _ = history.start(accept_loss=True)
    assert (kind, history.batch, history.sink_batch) == (RecoveryKind.RESTORE, LAST, LAST)
    assert history.unlike_uninterrupted() == []


def test_a_copy_that_cannot_be_read_is_a_failure_and_not_an_empty_list(
    shelf: Shelf, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.checkpoint()

    def unreachable(*_: object, **__: object) -> None:
        raise StorageAccessError("the bucket cannot be reached")

    monkeypatch.setattr(LocalFileIO, "write", unreachable)
    assert "the bucket cannot be reached" in copy(shelf, second).failed[0]


def test_a_stream_of_which_only_savepoints_are_left_is_found_on_the_storage(shelf: Shelf) -> None:
    shelf.checkpoint()
    shelf.savepoint("mine")
    assert stored_streams(shelf.storage) == {STREAM: None}
    shutil.rmtree(shelf.root / "snapshots" / STREAM)
    assert list(stored_streams(shelf.storage)) == [STREAM]
    assert stored_streams(shelf.storage)[STREAM] is not None
