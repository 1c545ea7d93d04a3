"""New files on a local disk: bytes in any number of pieces, and errors where somebody sees them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io import local as local_space
from dagster_ckpt.io.local import LocalFileIO, PieceWriter

PIECE = 300 * 1024
SMALL = 1000
# After so many, the kernel is told to begin.
BEGUN = -(-local_space._BEGIN_BYTES // PIECE)
MANY = 2 * BEGUN + 3


@contextmanager
def writing(path: Path, buffer_bytes: int = 0) -> Iterator[PieceWriter]:
    with path.open("wb", buffering=0) as stream, PieceWriter(stream, buffer_bytes) as writer:
        yield writer


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the disk room for so many more calls."""

    def leave(calls: int) -> None:
        left, write = iter(range(calls)), os.writev

        def full(descriptor: int, pieces: Sequence[bytes]) -> int:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, pieces)

        monkeypatch.setattr(os, "writev", full)

    return leave


@pytest.mark.parametrize("pieces", [0, 1, BEGUN, BEGUN + 1, MANY])
@pytest.mark.parametrize("buffer_bytes", [-1, 0, 1024 * 1024])
def test_pieces_are_written_in_order(tmp_path: Path, pieces: int, buffer_bytes: int) -> None:
    sent = [bytes(SMALL), *(bytes([number % 256]) * PIECE for number in range(pieces)), bytes(SMALL)]
    with writing(tmp_path / "object", buffer_bytes) as writer:
        for piece in sent:
            assert writer.write(piece) == len(piece)
    assert (tmp_path / "object").read_bytes() == b"".join(sent)


@pytest.mark.parametrize("size", [1, SMALL])
@pytest.mark.parametrize("buffer_bytes", [0, 1024 * 1024])
def test_any_number_of_pieces_is_written_by_few_calls(
    tmp_path: Path, room: Callable[[int], None], size: int, buffer_bytes: int
) -> None:
    sent = [number.to_bytes(2) * size for number in range(2500)]
    room(3)
    with writing(tmp_path / "object", buffer_bytes) as writer:
        writer.writelines(sent)
    assert (tmp_path / "object").read_bytes() == b"".join(sent)


def test_what_a_disk_takes_in_parts_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [bytes([number % 256]) * PIECE for number in range(MANY)]
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: os.write(descriptor, pieces[0][:SMALL]))
    with writing(tmp_path / "object") as writer:
        writer.writelines(sent[:2])
        writer.writelines(sent[2:])
    assert (tmp_path / "object").read_bytes() == b"".join(sent)


def test_a_buffer_waits_for_as_many_bytes(tmp_path: Path) -> None:
    with writing(tmp_path / "object", 2 * SMALL) as writer:
        writer.write(bytes(SMALL))
        assert (tmp_path / "object").stat().st_size == 0
        writer.write(bytes(SMALL))
        assert (tmp_path / "object").stat().st_size == 2 * SMALL


def test_several_files_are_written_at_once(tmp_path: Path) -> None:
    sent = [bytes([number % 256]) * PIECE for number in range(MANY)]
    with ExitStack() as open_files:
        writers = []
        for name in "abc":
            writers.append(open_files.enter_context(writing(tmp_path / name)))
        for piece in sent:
            for writer in writers:
                writer.write(piece)
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"".join(sent)] * 3


def test_of_much_the_kernel_is_told_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(local_space, "_SYNC_FILE_RANGE", lambda _file, offset, size, _how: told.append((offset, size)))
    with writing(tmp_path / "object") as writer:
        for _ in range(MANY):
            writer.write(bytes(PIECE))
    assert told == [(0, BEGUN * PIECE), (BEGUN * PIECE, BEGUN * PIECE)]


def write_pieces(path: Path, pieces: int) -> None:
    with writing(path) as writer:
        for _ in range(pieces):
            writer.write(bytes(PIECE))


@pytest.mark.parametrize("pieces", [1, BEGUN, BEGUN + 1, MANY])
def test_a_full_disk_is_told_before_the_object_counts_as_written(
    tmp_path: Path, room: Callable[[int], None], pieces: int
) -> None:
    room(pieces - 1)
    with pytest.raises(OSError, match="No space left"):
        write_pieces(tmp_path / "object", pieces)


def test_the_callers_own_error_is_the_one_that_is_reported(tmp_path: Path, room: Callable[[int], None]) -> None:
    def fail() -> None:
        with writing(tmp_path / "object", 2 * PIECE) as writer:
            writer.write(bytes(PIECE))
            raise KeyError

    room(0)
    with pytest.raises(KeyError):
        fail()


def test_an_object_on_a_full_disk_is_a_storage_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    space = LocalFileIO(tmp_path, buffer_bytes=-1)
    refused = pytest.raises(StorageAccessError, match=r"big\.pack: OSError: .*No space left")
    with refused, space.create("big.pack") as stream:
        stream.write(bytes(PIECE))


def test_an_object_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    (tmp_path / "chk-1").write_bytes(b"a file where a folder should be")
    space = LocalFileIO(tmp_path, buffer_bytes=-1)
    with pytest.raises(StorageAccessError, match=r"Cannot look at file://.*NotADirectoryError.*chk-1/_metadata"):
        space.size("chk-1/_metadata")


def test_a_folder_that_is_cleared_away_in_between_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = LocalFileIO(tmp_path, buffer_bytes=-1)
    with space.create("shared/last.pack") as stream:
        stream.write(b"last")
    make = local_space.make_folder

    def make_and_lose(_folder: Path) -> list[Path]:
        monkeypatch.setattr(local_space, "make_folder", make)
        space.delete("shared/last.pack")
        space.delete_if_empty("shared")
        return []

    monkeypatch.setattr(local_space, "make_folder", make_and_lose)
    with space.create("shared/next.pack") as stream:
        stream.write(b"next")
    assert space.read("shared/next.pack") == b"next"
