"""Objects on a local disk: bytes that another thread writes, and errors where somebody sees them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.storage import local_space, write_behind
from dagster_ckpt.storage.local_space import LocalSpace
from dagster_ckpt.storage.write_behind import WriteBehind

PIECE = 300 * 1024
# Not worth a thread.
SMALL = 1000
# More than may wait for the disk.
MANY = 20


class FullDisk(io.BytesIO):
    """A file of a disk with room for some pieces.

    Args:
        room: How many.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= 1
        return len(data)

    def fileno(self) -> int:
        return -1


@pytest.mark.parametrize("pieces", [0, 1, 2, MANY])
@pytest.mark.parametrize("buffering", [0, 1024 * 1024])
def test_pieces_are_written_in_order(tmp_path: Path, pieces: int, buffering: int) -> None:
    sent = [bytes(SMALL), *(bytes([number]) * PIECE for number in range(pieces)), bytes(SMALL)]
    with (tmp_path / "object").open("wb", buffering=buffering) as stream, WriteBehind(stream) as behind:
        for piece in sent:
            assert behind.write(piece) == len(piece)
    assert (tmp_path / "object").read_bytes() == b"".join(sent)


def test_several_files_are_written_at_once(tmp_path: Path) -> None:
    sent = [bytes([number]) * PIECE for number in range(MANY)]
    with ExitStack() as open_files:
        writers = []
        for name in "abc":
            stream = open_files.enter_context((tmp_path / name).open("wb"))
            writers.append(open_files.enter_context(WriteBehind(stream)))
        for piece in sent:
            for writer in writers:
                writer.write(piece)
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"".join(sent)] * 3


def test_without_a_thread_to_be_had_the_caller_writes_and_the_next_one_may_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    sent = [bytes([number]) * PIECE for number in range(MANY)]
    with monkeypatch.context() as refused, (tmp_path / "object").open("wb") as stream, WriteBehind(stream) as behind:
        refused.setattr(write_behind, "begin", none_left)
        for piece in sent:
            behind.write(piece)
    assert (tmp_path / "object").read_bytes() == b"".join(sent)
    assert not write_behind._BESIDE.locked()


def write_on_full_disk(pieces: int, *, room: int, then: type[Exception] | None = None) -> None:
    with FullDisk(room) as stream, WriteBehind(stream) as behind:
        for _ in range(pieces):
            behind.write(bytes(PIECE))
        if then is not None:
            raise then


@pytest.mark.parametrize("pieces", [1, 2, MANY])
def test_a_full_disk_is_told_before_the_object_counts_as_written(pieces: int) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_on_full_disk(pieces, room=pieces - 1)


def test_the_callers_own_error_is_the_one_that_is_told() -> None:
    with pytest.raises(KeyError):
        write_on_full_disk(2, room=1, then=KeyError)


def test_an_object_on_a_full_disk_is_a_storage_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    space = LocalSpace(tmp_path, buffer_bytes=-1)
    refused = pytest.raises(StorageAccessError, match=r"big\.pack: OSError: .*No space left")
    with refused, space.create("big.pack") as stream:
        stream.write(bytes(PIECE))


def test_a_folder_that_is_cleared_away_in_between_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = LocalSpace(tmp_path, buffer_bytes=-1)
    with space.create("shared/last.pack") as stream:
        stream.write(b"last")
    make = local_space._make_folder

    def make_and_lose(_folder: Path) -> list[Path]:
        monkeypatch.setattr(local_space, "_make_folder", make)
        space.delete("shared/last.pack")
        return []

    monkeypatch.setattr(local_space, "_make_folder", make_and_lose)
    with space.create("shared/next.pack") as stream:
        stream.write(b"next")
    assert space.read("shared/next.pack") == b"next"
