"""Killed, or failing, at every single step: nothing that was whole is harmed, and what is left is swept.

A kill is an exception that nothing may handle on the way out: every call after it fails as well, as in a dead process.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.file_io import Entry, FileStatus, no_op
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.garbage_collection import (
    Garbage,
    Sweep,
    delete_snapshot,
    savepoint_directories,
    storage_time_ms,
)
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore, StoreLayout

OLD = {"id-1.sst": b"s" * 500, "id-2.sst": b"t" * 500, "1.zip": b"z" * 300, "offsets/1": b"v1"}
NEW = {"id-1.sst": b"s" * 500, "2.zip": b"y" * 300, "3.zip": b"x" * 400, "offsets/2": b"v1"}
MANY_STEPS = range(1, 20)
FOR_EVER_MS = 2**52


class Killed(BaseException):
    """The process is gone."""


class Steps:
    """Counts what changes the storage; ends the process, or fails once, at one of these steps."""

    def __init__(self) -> None:
        self.taken = 0
        self.stop_at: int | None = None
        self.error: BaseException | None = None
        self.applied = False

    def arm(self, step: int, error: BaseException, *, applied: bool) -> None:
        self.taken, self.stop_at, self.error, self.applied = 0, step, error, applied

    def disarm(self) -> None:
        self.stop_at = None

    @property
    def dead(self) -> bool:
        return self.stop_at is not None and self.taken >= self.stop_at and isinstance(self.error, Killed)

    def take(self, act: Callable[[], None]) -> None:
        if self.dead and self.error is not None:
            raise self.error
        self.taken += 1
        if self.taken != self.stop_at or self.error is None:
            act()
            return
        if self.applied:
            act()
        raise self.error


class FragileSpace(MemoryFileIO):
    """Objects that a dead process can neither write nor delete; a half-written object stays."""

    def __init__(self, url: str, steps: Steps) -> None:
        super().__init__(url)
        self._steps = steps

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        self._steps.take(lambda: MemoryFileIO.write(self, name, [b""]))
        with MemoryFileIO.create(self, name) as stream:
            yield stream

    def write(
        self,
        path: str,
        chunks: Iterable[bytes],
        *,
        replace: bool = True,
        before_visible: Callable[[], None] = no_op,
    ) -> None:
        self._steps.take(lambda: MemoryFileIO.write(self, path, chunks, replace=replace, before_visible=before_visible))

    def delete(self, name: str) -> None:
        self._steps.take(lambda: MemoryFileIO.delete(self, name))


class World:
    """A storage that survives the processes that use it."""

    def __init__(self, stream_of) -> None:
        self.steps = Steps()
        self.spaces = {root: FragileSpace(root, self.steps) for root in ("mem://c/stream", "mem://s")}
        self._stream_of = stream_of

    def process(self):
        layout = StoreLayout("flights.delays", "mem://c/stream", "mem://s", inline_threshold=10)
        return self._stream_of(ObjectSnapshotStore(layout, self.spaces.__getitem__))

    def objects(self) -> set[str]:
        return {f"{root}/{name}" for root, space in self.spaces.items() for name in space._objects}

    def until(self, act: Callable[[], object], error: BaseException, step: int, *, applied: bool) -> bool:
        """Whether the step was reached."""
        self.steps.arm(step, error, applied=applied)
        try:
            act()
        except (Killed, StorageAccessError):
            return True
        finally:
            self.steps.disarm()
        return False


@pytest.fixture
def world(stream_of) -> World:
    return World(stream_of)


@pytest.fixture(params=[False, True], ids=["before", "after"])
def applied(request) -> bool:
    return bool(request.param)


def test_the_steps_of_each_operation_are_all_walked_through(world) -> None:
    stream = world.process()
    for act in (
        lambda: stream.checkpoint(1, OLD),
        lambda: stream.savepoint(2, OLD),
        lambda: stream.store.discard(stream.store.checkpoints()[0]),
    ):
        world.steps.taken = 0
        act()
        assert 1 < world.steps.taken < MANY_STEPS.stop - 1


@pytest.mark.parametrize("step", MANY_STEPS)
def test_a_kill_while_a_checkpoint_is_written(world, step, applied) -> None:
    first = world.process().checkpoint(1, OLD)
    before = world.objects()
    dying = world.process()
    world.until(lambda: dying.checkpoint(2, NEW, base=first), Killed(), step, applied=applied)

    after = world.process()
    found = after.store.checkpoints()
    assert after.restored(first) == OLD
    if len(found) == 2:
        assert after.restored(found[1]) == NEW
        whole = world.objects()
        assert after.store.sweep(older_than_ms=0) == []
        assert world.objects() == whole
    else:
        orphans = world.objects() - before
        wanted = after.store.sweep(older_than_ms=0, dry_run=True)
        assert {garbage.location for garbage in wanted} == orphans
        assert world.objects() == before | orphans
        assert after.store.sweep(older_than_ms=0) == wanted
        assert world.objects() == before


@pytest.mark.parametrize("step", MANY_STEPS)
def test_a_kill_while_a_savepoint_is_written(world, step, applied) -> None:
    first = world.process().checkpoint(1, OLD)
    before = world.objects()
    dying = world.process()
    world.until(lambda: dying.savepoint(2, NEW), Killed(), step, applied=applied)

    after = world.process()
    left = world.objects() - before
    after.store.sweep(older_than_ms=0)
    savepoints = [name.removesuffix("/_metadata") for name in left if name.endswith("/_metadata")]
    for savepoint in savepoints:
        assert after.restored(savepoint) == NEW
    if not savepoints:
        assert world.objects() == before
    assert not [name for name in world.objects() if name.endswith("_incomplete")]
    assert after.restored(first) == OLD


@pytest.mark.parametrize("step", MANY_STEPS)
def test_an_error_while_a_checkpoint_is_written_removes_it_unless_it_became_visible(world, step, applied) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    before = world.objects()
    failed = world.until(
        lambda: stream.checkpoint(2, NEW, base=first), StorageAccessError("disk full"), step, applied=applied
    )
    if failed and len(stream.store.checkpoints()) == 1:
        assert world.objects() == before
    else:
        assert stream.restored(stream.store.checkpoints()[1]) == NEW
    assert stream.restored(first) == OLD


@pytest.mark.parametrize("error", [Killed(), StorageAccessError("unreachable")], ids=["kill", "error"])
@pytest.mark.parametrize("step", MANY_STEPS)
def test_a_deletion_that_was_cut_off_is_finished_by_the_next_try(world, step, applied, error) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    second = stream.checkpoint(2, NEW, base=first)
    world.until(lambda: stream.store.discard(first), error, step, applied=applied)

    after = world.process()
    assert after.restored(second) == NEW
    after.store.discard(first)
    assert after.store.checkpoints() == [second]
    assert after.restored(second) == NEW
    used = {f"mem://c/stream/shared/{name.rpartition('/')[2]}" for name in after.store.manifest(second).objects}
    assert world.objects() == used | {"mem://c/stream/chk-2/_metadata"}


@pytest.mark.parametrize("step", MANY_STEPS)
def test_a_deletion_that_was_cut_off_is_finished_by_the_sweep_too(world, step, applied) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    second = stream.checkpoint(2, NEW, base=first)
    everything = world.objects()
    cut_off = world.until(lambda: stream.store.discard(first), Killed(), step, applied=applied)

    after = world.process()
    after.store.sweep(older_than_ms=0)
    assert after.restored(second) == NEW
    if cut_off and first in after.store.checkpoints():
        assert after.restored(first) == OLD
        assert world.objects() >= everything
    else:
        assert not [name for name in world.objects() if "/chk-1/" in name]


def test_what_is_young_or_in_use_is_not_swept(world) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    dying = world.process()
    world.until(lambda: dying.checkpoint(2, NEW, base=first), Killed(), 2, applied=False)
    everything = world.objects()
    assert stream.store.sweep(older_than_ms=FOR_EVER_MS) == []
    assert world.objects() == everything


def test_an_object_that_only_a_protected_snapshot_refers_to_stays(world) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    second = stream.checkpoint(2, NEW, base=first)
    space = world.spaces["mem://c/stream"]
    # As the deletion of the base is under way in another process: it is listed no more.
    space.write("chk-1/_deleting", [space.read("chk-1/_metadata")])
    space.delete("chk-1/_metadata")
    stream.store.discard(second, protected=[first])
    assert stream.store.checkpoints() == []
    old_objects = {name for name in world.objects() if "/shared/1-" in name}
    assert len(old_objects) == 1


def test_a_protected_snapshot_that_is_not_there_keeps_every_shared_byte(world, caplog) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    stream.store.discard(first, protected=["mem://c/stream/chk-99"])
    assert [name for name in world.objects() if "/shared/" in name]
    assert caplog.messages == ["Shared objects in mem://c/stream are kept: the protected snapshot chk-99 is missing."]


def test_what_any_other_snapshot_refers_to_stays_not_only_what_the_last_does(world) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    second = stream.checkpoint(2, NEW, base=first)
    third = stream.checkpoint(3, {"id-9.sst": b"u" * 500})
    stream.store.discard(first)
    stream.store.sweep(older_than_ms=0)
    assert stream.restored(second) == NEW
    assert stream.restored(third) == {"id-9.sst": b"u" * 500}


class GoneMeanwhile(FragileSpace):
    """Lists a checkpoint, chk-2, that another process has deleted by the time it is read."""

    def size(self, name: str) -> int | None:
        return 1 if name == "chk-2/_metadata" else super().size(name)


def test_a_snapshot_that_is_deleted_meanwhile_does_not_hide_those_after_it(world) -> None:
    space = world.spaces["mem://c/stream"] = GoneMeanwhile("mem://c/stream", world.steps)
    space.write("chk-2/notes.txt", [b"left by a person"])
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    third = stream.checkpoint(3, NEW, base=first)
    stream.store.discard(first)
    stream.store.sweep(older_than_ms=0)
    assert stream.restored(third) == NEW


def test_another_streams_checkpoint_is_deleted_with_regard_to_its_own_siblings(world, stream_of) -> None:
    other = world.process()
    first = other.checkpoint(1, OLD)
    second = other.checkpoint(2, OLD, base=first)
    world.spaces["mem://c/mine"] = FragileSpace("mem://c/mine", world.steps)
    layout = StoreLayout("mine", "mem://c/mine", None, inline_threshold=10)
    mine = stream_of(ObjectSnapshotStore(layout, world.spaces.__getitem__))
    mine.store.discard(first)
    assert other.store.checkpoints() == [second]
    assert other.restored(second) == OLD


def test_what_a_person_put_companion_a_snapshot_stays(world) -> None:
    stream = world.process()
    first = stream.checkpoint(1, OLD)
    world.spaces["mem://c/stream"].write("chk-1/notes.txt", [b"before the upgrade"])
    stream.store.discard(first)
    assert world.objects() == {"mem://c/stream/chk-1/notes.txt"}


def test_a_savepoint_that_somebody_is_copying_is_not_swept(world) -> None:
    stream = world.process()
    savepoint = stream.savepoint(1, OLD)
    space = world.spaces["mem://s"]
    directory = savepoint.rpartition("/")[2]
    for name in space.list(directory):
        if name != "_metadata":
            space.write(f"savepoint-flight-copy/{name}", [space.read(f"{directory}/{name}")])
    copied = world.objects()
    assert stream.store.sweep(older_than_ms=0) == []
    assert world.objects() == copied


def test_another_streams_unfinished_savepoint_is_not_swept(world) -> None:
    world.spaces["mem://s"].write("savepoint-x-1/_incomplete", [b"another stream"])
    before = world.objects()
    assert world.process().store.sweep(older_than_ms=0) == []
    assert world.objects() == before


@pytest.fixture
def old_space() -> MemoryFileIO:
    """What crashes left: two checkpoints without metadata and half a deletion, beside what is not ours."""
    space = MemoryFileIO("mem://c/stream")
    names = {
        "chk-1/b.pack": 0,
        "chk-1/.c.tmp": 1,
        "chk-1/b.tmp": 1,
        "chk-1/notes.txt": 1,
        "chk-2/c.pack": 6_000,
        "chk-3/_deleting": 2_000,
        "chk-3/a.pack": 3_000,
        "chk-3/notes.txt": 3_000,
        "chk-4/d.pack": 5_000,
        "shared/old.pack": 5_999,
        "shared/young.pack": 6_000,
        "shared/folder/old.pack": 1,
    }
    space._objects = {name: (changed_ms, 0, b"") for name, changed_ms in names.items()}
    return space


def ages(swept: Iterable[Garbage]) -> list[int]:
    return [garbage.age_ms for garbage in swept]


def test_what_is_swept_is_told_with_its_place_its_reason_and_its_age(old_space: MemoryFileIO) -> None:
    would = Sweep(old_space, now_ms=10_000, older_than_ms=4_000, dry_run=True).stream()
    before = set(old_space._objects)

    # The age of exactly four seconds is not older than that.
    expected = [
        Garbage("mem://c/stream/chk-1/.c.tmp", "chk-1 was never finished: it has no _metadata", 9_999),
        Garbage("mem://c/stream/chk-1/b.pack", "chk-1 was never finished: it has no _metadata", 10_000),
        Garbage("mem://c/stream/chk-1/b.tmp", "chk-1 was never finished: it has no _metadata", 9_999),
        Garbage("mem://c/stream/chk-3/_deleting", "the deletion of chk-3 was interrupted", 8_000),
        Garbage("mem://c/stream/chk-3/a.pack", "the deletion of chk-3 was interrupted", 7_000),
        Garbage("mem://c/stream/chk-4/d.pack", "chk-4 was never finished: it has no _metadata", 5_000),
        Garbage("mem://c/stream/shared/old.pack", "no snapshot refers to it", 4_001),
    ]
    assert (would, ages(would)) == (expected, ages(expected))
    assert set(old_space._objects) == before

    assert Sweep(old_space, now_ms=10_000, older_than_ms=4_000).stream() == would
    swept = {garbage.location.removeprefix("mem://c/stream/") for garbage in would}
    assert set(old_space._objects) == before - swept
    assert Sweep(old_space, now_ms=10_000, older_than_ms=4_000).stream() == []


def test_of_many_folders_only_the_old_unfinished_savepoints_of_the_stream_are_swept() -> None:
    space = MemoryFileIO("mem://s")
    objects = {
        "savepoint-loose-object": (1, 0, b""),
        "archive/_incomplete": (1, 0, b"flights.delays"),
        "archive/a.pack": (1, 0, b""),
        "savepoint-a-whole/_metadata": (1, 0, b""),
        "savepoint-b-young/_incomplete": (1, 0, b"flights.delays"),
        "savepoint-b-young/a.pack": (6_000, 0, b""),
        "savepoint-c-other/_incomplete": (1, 0, b"another stream"),
        "savepoint-c-other/a.pack": (1, 0, b""),
        "savepoint-d-marked/_incomplete": (1, 0, b"flights.delays"),
        "savepoint-d-marked/_metadata": (1, 0, b""),
        "savepoint-d-marked/a.pack": (1, 0, b""),
        "savepoint-e-crashed/_incomplete": (1, 0, b"flights.delays"),
        "savepoint-e-crashed/a.pack": (2_000, 0, b""),
        "savepoint-e-crashed/b.tmp": (3_000, 0, b""),
        "savepoint-e-crashed/notes.txt": (1, 0, b""),
        "savepoint-f-crashed/_incomplete": (1, 0, b"flights.delays"),
        "savepoint-f-crashed/a.pack": (1, 0, b""),
    }
    space._objects = dict(objects)

    would = Sweep(space, now_ms=10_000, older_than_ms=4_000, dry_run=True).savepoints("flights.delays")

    reason = "was never finished: it has no _metadata"
    expected = [
        Garbage("mem://s/savepoint-e-crashed/a.pack", f"savepoint-e-crashed {reason}", 8_000),
        Garbage("mem://s/savepoint-e-crashed/b.tmp", f"savepoint-e-crashed {reason}", 7_000),
        Garbage("mem://s/savepoint-f-crashed/a.pack", f"savepoint-f-crashed {reason}", 9_999),
    ]
    assert (would, ages(would)) == (expected, ages(expected))
    assert space._objects == objects

    assert Sweep(space, now_ms=10_000, older_than_ms=4_000).savepoints("flights.delays") == would
    assert objects.keys() - space._objects.keys() == {
        "savepoint-d-marked/_incomplete",
        "savepoint-e-crashed/_incomplete",
        "savepoint-e-crashed/a.pack",
        "savepoint-e-crashed/b.tmp",
        "savepoint-f-crashed/_incomplete",
        "savepoint-f-crashed/a.pack",
    }


class Troubled(MemoryFileIO):
    """Some folders cannot be listed or flushed, and one object is deleted between its listing and a look at it."""

    locked = ("chk-1", "savepoint-a")

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        if path in self.locked:
            raise StorageAccessError(f"{path} is locked")
        entries = super().list(path, hidden=hidden)
        if "gone.pack" in entries:
            entries["gone.pack"] = Entry("gone.pack", False, gone)
        return entries

    def flush(self, path: str) -> None:
        raise FileNotFoundError(path)


def gone() -> FileStatus:
    raise FileNotFoundError


def test_what_an_attempt_under_way_has_written_is_not_swept_however_old_it_is() -> None:
    space = MemoryFileIO("mem://s")
    objects = {
        f"{folder}/{number}-0f-1.pack": (1, 0, b"")
        for number in (7, 8)
        for folder in (f"chk-{number}", "shared", f"savepoint-{number}")
    }
    space._objects = objects | {f"savepoint-{number}/_incomplete": (1, 0, b"orders") for number in (7, 8)}
    sweep = Sweep(space, now_ms=10_000, older_than_ms=4_000, under_way=frozenset({7}), dry_run=True)

    swept = [*sweep.stream(), *sweep.savepoints("orders")]

    assert [garbage.location for garbage in swept] == [
        "mem://s/chk-8/8-0f-1.pack",
        "mem://s/shared/8-0f-1.pack",
        "mem://s/savepoint-8/8-0f-1.pack",
    ]


def test_a_snapshot_that_cannot_be_read_keeps_every_shared_object(caplog: pytest.LogCaptureFixture) -> None:
    space = MemoryFileIO("mem://s")
    space._objects = {"shared/a.pack": (1, 0, b""), "chk-2/_metadata": (1, 0, b"broken")}

    assert Sweep(space, now_ms=10_000, older_than_ms=4_000).stream() == []

    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("Shared objects in mem://s are kept, because they may be needed: ")
    assert "chk-2/_metadata" in told


def test_what_a_check_of_the_storage_left_is_swept_once_it_is_old() -> None:
    space = MemoryFileIO("mem://s")
    old, young = (f"probe-{letter * 32}.tmp" for letter in "ab")
    space._objects = {old: (1, 0, b""), young: (9_000, 0, b""), "probe-of-mine.tmp": (1, 0, b"")}

    swept = Sweep(space, now_ms=10_000, older_than_ms=4_000).stream()

    left = "an interrupted check of the storage's clock or permissions left it"
    assert swept == [Garbage(f"mem://s/{old}", left, 9_999)]
    assert set(space._objects) == {young, "probe-of-mine.tmp"}


def test_a_folder_of_a_stream_that_cannot_be_reached_is_logged_and_the_others_are_swept(caplog) -> None:
    space = Troubled("mem://s")
    space._objects = {"chk-1/a.pack": (1, 0, b""), "chk-2/a.pack": (1, 0, b"")}

    swept = Sweep(space, now_ms=10_000, older_than_ms=4_000).stream()

    assert [garbage.location for garbage in swept] == ["mem://s/chk-2/a.pack"]
    assert [record.getMessage() for record in caplog.records] == [
        "mem://s/chk-1 is left for the next pass: chk-1 is locked"
    ]


def test_a_savepoint_that_cannot_be_reached_is_logged_and_the_others_are_swept(caplog) -> None:
    space = Troubled("mem://s")
    space._objects = {
        "savepoint-a/_incomplete": (1, 0, b"orders"),
        "savepoint-b/_incomplete": (1, 0, b"orders"),
        "savepoint-b/b.pack": (1, 0, b""),
        "savepoint-b/gone.pack": (1, 0, b""),
    }

    swept = Sweep(space, now_ms=10_000, older_than_ms=4_000).savepoints("orders")

    assert [garbage.location for garbage in swept] == ["mem://s/savepoint-b/b.pack"]
    assert [record.getMessage() for record in caplog.records] == [
        "mem://s/savepoint-a is left for the next pass: savepoint-a is locked"
    ]


def test_a_deletion_takes_unfinished_objects_along_and_goes_on_where_its_folder_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    space = Troubled("mem://s")
    space._objects = {"chk-2/_deleting": (1, 0, b"broken"), "chk-2/.a.tmp": (1, 0, b""), "chk-2/a.pack": (1, 0, b"")}

    delete_snapshot(space, "chk-2", [])

    assert space._objects == {}
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("The shared objects of mem://s/chk-2 are kept until the next sweep: ")
    assert "chk-2/_deleting" in told


def test_a_folder_of_a_disk_goes_with_what_is_swept_from_it(tmp_path: Path) -> None:
    stream, savepoints = tmp_path / "orders", tmp_path / "savepoints"
    for path in (
        stream / "chk-1" / "a.pack",
        stream / f"probe-{'a' * 32}.tmp",
        savepoints / "savepoint-a" / "a.pack",
        savepoints / "savepoint-a" / "_incomplete",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("orders")

    of_stream = Sweep(LocalFileIO(stream), now_ms=FOR_EVER_MS, older_than_ms=0).stream()
    of_savepoints = Sweep(LocalFileIO(savepoints), now_ms=FOR_EVER_MS, older_than_ms=0).savepoints("orders")

    assert (len(of_stream), len(of_savepoints)) == (2, 1)
    # The folder of the stream itself stays.
    assert list(stream.iterdir()) == list(savepoints.iterdir()) == []


def test_the_savepoints_of_a_folder_are_those_with_metadata_by_name() -> None:
    space = MemoryFileIO("mem://s")
    names = ("savepoint-b/_metadata", "savepoint-a/_metadata", "savepoint-c/a.pack", "archive/_metadata", "savepoint-d")
    space._objects = dict.fromkeys(names, (1, 0, b""))

    assert savepoint_directories(space) == ["savepoint-a", "savepoint-b"]


@pytest.mark.parametrize(("clock_ms", "after_ms"), [(41, 42), (None, None)])
def test_the_time_of_a_storage_is_after_every_object_unless_it_dates_none(
    clock_ms: int | None, after_ms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = MemoryFileIO("mem://s")
    monkeypatch.setattr(space, "clock_ms", lambda probe: clock_ms)

    assert storage_time_ms(space) == after_ms
