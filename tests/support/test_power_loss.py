"""The model of a disk that loses its power says what a real one does."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_ckpt.io.local import _ONE_BY_ONE, flush, flush_tree
from tests.support.power_loss import Disk, Survivors, Trouble, every_call

AT_THE_END = 1_000


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    (disk.root / "old").write_bytes(b"old")
    disk.freeze()
    return disk


def write(path: Path, data: bytes, *, flushed: bool) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        if flushed:
            os.fsync(stream.fileno())


def left(disk: Disk) -> dict[str, bytes]:
    return {
        path.relative_to(disk.root).as_posix(): path.read_bytes() for path in disk.root.rglob("*") if path.is_file()
    }


def after(
    disk: Disk, survivors: Survivors | None, work: Callable[[], object], call: int = AT_THE_END
) -> dict[str, bytes]:
    disk.thaw()
    disk.run(work, Trouble(call, survivors))
    return left(disk)


def test_a_file_needs_its_own_flush_and_one_of_its_folder(disk: Disk) -> None:
    new = disk.root / "new"
    kept = {"old": b"old"}

    assert after(disk, Survivors.FLUSHED, lambda: write(new, b"x", flushed=True)) == kept
    assert after(disk, Survivors.FLUSHED, lambda: (write(new, b"x", flushed=False), flush(disk.root))) == kept | {
        "new": b""
    }
    assert after(disk, Survivors.FLUSHED, lambda: (write(new, b"x", flushed=True), flush(disk.root))) == kept | {
        "new": b"x"
    }
    assert after(disk, Survivors.NAMES, lambda: write(new, b"x", flushed=False))["new"] in (b"", b"\0")
    assert after(disk, Survivors.NAMES, lambda: write(new, b"x", flushed=True)) == kept | {"new": b"x"}
    assert after(disk, None, lambda: write(new, b"x", flushed=False)) == kept | {"new": b"x"}


def test_a_deletion_and_a_renaming_are_undone_unless_their_folder_is_flushed(disk: Disk) -> None:
    old = disk.root / "old"
    inode = old.stat().st_ino

    assert after(disk, Survivors.FLUSHED, old.unlink) == {"old": b"old"}
    assert after(disk, Survivors.FLUSHED, lambda: (old.unlink(), flush(disk.root))) == {}
    assert after(disk, Survivors.FLUSHED, lambda: old.rename(disk.root / "moved")) == {"old": b"old"}
    assert after(disk, Survivors.NAMES, lambda: old.rename(disk.root / "moved")) == {"moved": b"old"}
    assert (disk.root / "moved").stat().st_ino == inode


def test_the_process_ends_before_the_call_of_the_number(disk: Disk) -> None:
    def work() -> None:
        (disk.root / "folder").mkdir()
        write(disk.root / "folder/a", b"a", flushed=True)
        flush(disk.root / "folder")

    reached = [(trouble.call, ran.reached, left(disk)) for trouble, ran in every_call(disk, work, None)]

    assert [(call, was_reached) for call, was_reached, _ in reached] == [
        *((call, True) for call in (1, 2, 3, 4)),
        (5, False),
    ]
    assert [sorted(files) for _, _, files in reached] == [["old"], ["old"], *([["folder/a", "old"]] * 3)]


def test_a_call_fails_and_the_process_lives_on(disk: Disk) -> None:
    disk.thaw()
    ran = disk.run((disk.root / "new").mkdir, Trouble(1, error=errno.ENOSPC))

    assert (ran.reached, type(ran.error), left(disk)) == (True, OSError, {"old": b"old"})


@pytest.mark.parametrize("files", [3, _ONE_BY_ONE + 1], ids=["few files", "many files"])
@pytest.mark.parametrize("survivors", Survivors)
def test_a_flushed_tree_is_there_whole(disk: Disk, survivors: Survivors, files: int) -> None:
    def work() -> None:
        tree = disk.root / "tree"
        for number in range(files):
            folder = tree / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / str(number), b"content", flushed=False)
        flush_tree(tree)
        flush(disk.root)

    found = after(disk, survivors, work)
    assert len(found) == files + 1
    assert set(found.values()) == {b"old", b"content"}
