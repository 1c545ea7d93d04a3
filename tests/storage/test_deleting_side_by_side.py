"""What another process, or another clock, may do while this one deletes, sweeps or publishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.file_io import Entry, FileStatus, FileVersion
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot import object_store
from dagster_ckpt.snapshot.garbage_collection import Sweep, delete_snapshot, storage_time_ms
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.testing.trial_snapshots import FILES, TRIAL_STREAM, TrialStream

LARGE = {"id-1.sst": b"s" * 30_000}


@pytest.fixture
def storage(tmp_path: Path) -> FileSystemCheckpointStorage:
    return FileSystemCheckpointStorage(f"file://{tmp_path}/c", 10, savepoint_path=f"file://{tmp_path}/s")


@pytest.fixture
def stream(storage: FileSystemCheckpointStorage) -> TrialStream:
    return TrialStream(open_store(storage, TRIAL_STREAM))


class Beside(LocalFileIO):
    """Lets another process go first: at each call that is counted, before it is done."""

    def __init__(self, root: Path, meanwhile: Callable[[], None], call: int) -> None:
        super().__init__(root, buffer_bytes=4096)
        self.meanwhile: Callable[[], None] | None = meanwhile
        self.left = call

    def _counted(self) -> None:
        self.left -= 1
        if self.left == 0 and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def read(self, path: str, at_most: int = -1) -> bytes:
        self._counted()
        return super().read(path, at_most)

    def size(self, path: str) -> int | None:
        self._counted()
        return super().size(path)

    def delete(self, path: str) -> None:
        self._counted()
        super().delete(path)

    def flush(self, path: str) -> None:
        self._counted()
        super().flush(path)

    def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        self._counted()
        return super().list(path, hidden=hidden)


@pytest.mark.parametrize("call", range(1, 18))
def test_two_processes_may_delete_the_same_snapshot_at_once(
    storage: FileSystemCheckpointStorage, stream: TrialStream, tmp_path: Path, call: int
) -> None:
    first = stream.checkpoint(1, LARGE)
    second = stream.checkpoint(2, {**LARGE, "id-2.sst": b"t" * 30_000}, base=first)
    other = open_store(storage, TRIAL_STREAM)
    space = Beside(tmp_path / "c" / TRIAL_STREAM, lambda: other.discard(first), call)

    delete_snapshot(space, "chk-1", [])

    assert stream.store.checkpoints() == [second]
    assert stream.store.verify(second) == []
    assert not (tmp_path / "c" / TRIAL_STREAM / "chk-1").exists()


def goes_on(storage: FileSystemCheckpointStorage, stream: TrialStream) -> str:
    """Publish a checkpoint on top of the newest one, which is then subsumed."""
    base = stream.store.checkpoints()[-1]
    number = int(base.rpartition("-")[2]) + 1
    newest = stream.checkpoint(number, {**LARGE, f"id-{number}.sst": b"u" * 30_000}, base=base)
    open_store(storage, TRIAL_STREAM).discard(base)
    return newest


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("sweeps", [False, True])
def test_what_a_newer_snapshot_shares_with_one_that_vanishes_meanwhile_stays(
    storage: FileSystemCheckpointStorage, stream: TrialStream, tmp_path: Path, call: int, *, sweeps: bool
) -> None:
    first = stream.checkpoint(1, LARGE)
    stream.checkpoint(2, {**LARGE, "id-2.sst": b"t" * 30_000}, base=first)
    space = Beside(tmp_path / "c" / TRIAL_STREAM, lambda: [goes_on(storage, stream)], call)

    if sweeps:
        stream.store.discard(first)
        Sweep(space, now_ms=2**52, older_than_ms=0, under_way=frozenset({3})).stream()
    else:
        delete_snapshot(space, "chk-1", [])

    assert space.meanwhile is None or call > 6
    if space.meanwhile is None:
        assert [Path(each).name for each in stream.store.checkpoints()] == ["chk-3"]
    assert [problem for each in stream.store.checkpoints() for problem in stream.store.verify(each)] == []


def test_while_snapshots_vanish_in_each_listing_no_shared_object_is_deleted(
    storage: FileSystemCheckpointStorage, stream: TrialStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Restless(LocalFileIO):
        def read(self, path: str, at_most: int = -1) -> bytes:
            if path.endswith("/_metadata") and not path.startswith("chk-1/"):
                goes_on(storage, stream)
            return super().read(path, at_most)

    first = stream.checkpoint(1, LARGE)
    stream.checkpoint(2, {**LARGE, "id-2.sst": b"t" * 30_000}, base=first)
    delete_snapshot(Restless(tmp_path / "c" / TRIAL_STREAM, buffer_bytes=4096), "chk-1", [])

    [left] = stream.store.checkpoints()
    assert stream.store.verify(left) == []
    assert [each for each in caplog.messages if each.endswith("until the next sweep: its snapshots keep changing.")]
    assert stream.store.sweep(older_than_ms=0) == []


def test_a_file_that_vanishes_while_a_folder_is_listed_hides_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = LocalFileIO(tmp_path, buffer_bytes=4096)
    for name in ("chk-1/a.pack", f"probe-{'0' * 32}.tmp", "chk-2/b.pack"):
        space.write(name, [b""])

    class Vanishing:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.path, self.is_dir, self._entry = entry.name, entry.path, entry.is_dir, entry

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            if self.name != "b.pack":
                Path(self.path).unlink(missing_ok=True)
            return self._entry.stat(follow_symlinks=follow_symlinks)

    class Listing:
        def __init__(self, path: Path) -> None:
            self._entries = real(path)

        def __enter__(self) -> Listing:
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __iter__(self) -> object:
            return (Vanishing(entry) for entry in self._entries)

    real = os.scandir
    monkeypatch.setattr("dagster_ckpt.io.local.os.scandir", Listing)

    swept = Sweep(space, now_ms=2**52, older_than_ms=0).stream()

    assert [garbage.location.rpartition("/")[2] for garbage in swept] == ["b.pack"]


def test_a_snapshot_that_cannot_be_looked_at_does_not_end_a_sweep(
    stream: TrialStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "c" / TRIAL_STREAM
    for number in (1, 2):
        (root / f"chk-{number}").mkdir(parents=True)
        (root / f"chk-{number}" / "x.pack").write_bytes(b"left by a crash")
    listed = LocalFileIO.list

    def refuse(self: LocalFileIO, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
        if path == "chk-1":
            raise StorageAccessError("no right to look there")
        return listed(self, path, hidden=hidden)

    monkeypatch.setattr(LocalFileIO, "list", refuse)

    swept = stream.store.sweep(older_than_ms=0)

    assert [garbage.location.rpartition("/")[0] for garbage in swept] == [f"file://{root}/chk-2"]
    assert "chk-1 is left for the next pass: no right to look there" in caplog.text


def test_the_storages_own_clock_says_what_is_old(stream: TrialStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding f15: a machine whose clock is seven hours ahead swept what was written a moment ago."""
    monkeypatch.setattr("time.time", lambda: 2**40)
    monkeypatch.setattr("time.time_ns", lambda: 2**60)
    stream.checkpoint(1, LARGE)
    space = LocalFileIO(Path(stream.store.checkpoints()[0].removeprefix("file://")).parents[0], buffer_bytes=4096)
    with space.create("shared/2-of-an-attempt.pack") as writing:
        writing.write(b"just written")

    assert stream.store.sweep(older_than_ms=60_000) == []
    assert [garbage.reason for garbage in stream.store.sweep(older_than_ms=0)] == ["no snapshot refers to it"]


def test_a_storage_that_dates_nothing_is_not_swept() -> None:
    class Undated(MemoryFileIO):
        def list(self, path: str = "", *, hidden: bool = False) -> dict[str, Entry]:
            undated = FileStatus(FileVersion(0, None), None, None)
            return {name: Entry(name, False, lambda: undated) for name in super().list(path, hidden=hidden)}

    assert storage_time_ms(Undated("mem://c")) is None


def test_what_a_living_attempt_has_written_stays_however_old_it_is(stream: TrialStream, tmp_path: Path) -> None:
    root = tmp_path / "c" / TRIAL_STREAM
    names = ["shared/7-aa.pack", "shared/8-bb.pack", "chk-7/y.tmp", "chk-8/y.tmp"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")

    stream.store.sweep(older_than_ms=0, under_way=[7])

    assert [name for name in names if (root / name).exists()] == ["shared/7-aa.pack", "chk-7/y.tmp"]


@pytest.mark.parametrize("whose", ["of its own", "of the base"])
def test_a_snapshot_whose_objects_went_away_while_it_was_written_is_not_published(
    stream: TrialStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    first = stream.checkpoint(1, LARGE)
    shared = tmp_path / "c" / TRIAL_STREAM / "shared"
    of_base = set(shared.iterdir())
    write = LocalFileIO.write

    def swept_meanwhile(
        self: LocalFileIO, path: str, chunks: Iterable[bytes], *, replace: bool, before_visible: Callable[[], None]
    ) -> None:
        def once_they_are_whole() -> None:
            for found in set(shared.iterdir()) - of_base if whose == "of its own" else of_base:
                found.unlink()
            before_visible()

        write(self, path, chunks, replace=replace, before_visible=once_they_are_whole)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileIO, "write", swept_meanwhile)
        with pytest.raises(StorageAccessError, match=r"data objects that it needs were deleted.*is missing"):
            stream.checkpoint(2, {**LARGE, "id-2.sst": b"t" * 30_000}, base=first)

    assert stream.store.checkpoints() == [first]
    # The next one shares nothing that is not there.
    third = stream.checkpoint(3, {**LARGE, **FILES}, base=first)
    assert stream.store.verify(third) == []


def test_the_probe_of_a_sweep_is_gone_afterwards(stream: TrialStream, tmp_path: Path) -> None:
    stream.checkpoint(1, LARGE)
    before = sorted(tmp_path.rglob("*"))
    assert object_store.storage_time_ms(LocalFileIO(tmp_path, buffer_bytes=4096)) is not None
    stream.store.sweep(older_than_ms=0, dry_run=True)
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.is_file()] == []
