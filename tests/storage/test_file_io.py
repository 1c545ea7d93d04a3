"""One contract for every `FileIO`: what is written, read, listed and deleted, wherever that is."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dagster_ckpt.errors import SnapshotCorruptError, StorageAccessError
from dagster_ckpt.io.custom import CustomFileIO, FolderFileIO, StoredObject
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.fsspec import SINGLE_PUT_BYTES, FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.io.memory import MemoryFileIO
from tests.support.far_stores import FAR, SERVERS

NAME = "chk-1/_metadata"
TIME_MS = 1_700_000_000_000


class Shelf(CustomFileIO):
    """A storage of a user's own, as a user writes one: without calling the base class."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: BinaryIO) -> None:
        self.kept[name] = data.read()

    def get(self, name: str) -> bytes:
        if name not in self.kept:
            raise FileNotFoundError(name)
        return self.kept[name]

    def remove(self, name: str) -> None:
        self.kept.pop(name, None)

    def objects(self, prefix: str) -> Iterable[StoredObject]:
        return [StoredObject(name, len(data), TIME_MS) for name, data in self.kept.items() if name.startswith(prefix)]


KINDS: dict[str, Callable[[Path], FileIO]] = {
    "disk": LocalFileIO,
    "disk, links not followed": lambda root: LocalFileIO(root, follow_links=False),
    "fsspec with directories": lambda root: FsspecFileIO(f"local://{root}", {}),
    "fsspec": lambda root: FsspecFileIO(f"memory:/{root}-{uuid.uuid4().hex}", {}),
    "memory": lambda root: MemoryFileIO(f"memory://{root.name}"),
    "custom": lambda root: Shelf(f"shelf://{root.name}"),
    "a folder of one": lambda root: FolderFileIO(MemoryFileIO(f"memory://{root.name}"), "stream"),
}


@pytest.fixture(params=[*KINDS, "s3", *FAR])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> FileIO:
    if request.param in SERVERS:
        far = request.getfixturevalue("far_stores").new_bucket(request.param)
        return FsspecFileIO(f"{far.url}/tree", far.options)
    if request.param != "s3":
        return KINDS[request.param](tmp_path / "tree")
    options, bucket = request.getfixturevalue("s3_options"), uuid.uuid4().hex
    fsspec.filesystem("s3", **options).mkdir(bucket)
    return FsspecFileIO(f"s3://{bucket}/tree", options)


# Reading what was written


def test_what_was_written_is_read_and_listed(files: FileIO) -> None:
    files.write("a/b", [b"one", b"two"])

    assert files.read("a/b") == b"onetwo"
    assert (files.read("a/b", 3), files.read("a/b", 99), files.size("a/b")) == (b"one", b"onetwo", 6)
    assert {name: entry.is_directory for name, entry in files.list().items()} == {"a": True}
    assert files.list("a")["b"].version() == files.version("a/b")
    assert [path for path, _ in files.find()] == ["a/b"]
    assert files.exists()


def test_a_missing_file_is_a_missing_file(files: FileIO) -> None:
    for look in (files.read, files.open, files.version, files.status, files.read_version):
        with pytest.raises(FileNotFoundError):
            look("a")
    assert (files.size("a"), files.sizes(["a", "b/c"])) == (None, {})
    assert (files.list(), files.list("a/b"), list(files.find())) == ({}, {}, [])
    assert not files.exists()
    files.delete("a")
    files.delete_all()


def test_hidden_names_are_listed_on_request(files: FileIO) -> None:
    for path in (".a.crc", "a", "d/.b.crc", "d/b"):
        files.write(path, [b"x"])

    assert sorted(files.list()) == ["a", "d"]
    assert sorted(files.list(hidden=True)) == [".a.crc", "a", "d"]
    assert [path for path, _ in files.find()] == ["a", "d/b"]
    assert sorted(path for path, _ in files.find(hidden=True)) == [".a.crc", "a", "d/.b.crc", "d/b"]
    assert sorted(path for path, _ in files.find("d", hidden=True)) == ["d/.b.crc", "d/b"]
    assert set(files.listing("d").names) == {"b"}


def test_a_stream_is_read_at_any_position(files: FileIO) -> None:
    data = bytes(range(256)) * 40
    files.write("a", [data])
    with files.open("a") as stream:
        assert stream.read(10) == data[:10]
        assert stream.seek(5000) == 5000
        assert stream.read(7) == data[5000:5007]
    with files.open("a", range(300, 900)) as stream:
        stream.seek(310)
        assert stream.read(20) == data[310:330]
        stream.seek(300)
        assert stream.read(600) == data[300:900]


def test_sizes_are_those_of_the_files_that_exist(files: FileIO) -> None:
    for path, data in {"a/1": b"1", "a/2": b"22", "3": b"333", "a/.4": b"4444"}.items():
        files.write(path, [data])
    assert files.sizes(["a/1", "a/2", "3", "a/.4", "a/5", "b/1"]) == {"a/1": 1, "a/2": 2, "3": 3, "a/.4": 4}


def test_files_are_looked_at_together(files: FileIO) -> None:
    paths = [f"d/{number}" for number in range(20)]
    for path in paths:
        files.write(path, [path.encode()])
    looks = files.look_at(paths, 10)
    assert [version for version, _ in looks] == [files.version(path) for path in paths]
    assert all(data in (None, path.encode()) for path, (_, data) in zip(paths, looks, strict=True))
    with pytest.raises(FileNotFoundError):
        files.look_at([*paths, "d/none"], 10)


def test_a_replaced_file_has_another_version_or_none_that_tells(files: FileIO) -> None:
    files.write("a", [b"one"])
    content, before = files.read_version("a")
    assert (content, before) == (b"one", files.version("a"))
    files.write("a", [b"two"])

    after = files.version("a")
    # An entity tag is that of the content.
    assert after != before or after.token is None
    assert files.list()["a"].version() == files.listing("").version("a") == after
    assert files.read("a") == b"two"


def test_a_listing_is_asked_for_the_versions_of_its_files(files: FileIO) -> None:
    files.write("a/b", [b"one"])
    files.write("a/.b.crc", [b"two"])
    listing = files.listing("a")

    assert listing.version("b") == files.version("a/b")
    for name in ("c", "", ".b.crc", "../a/b", "./b", "b/"):
        with pytest.raises(FileNotFoundError):
            listing.version(name)
    with pytest.raises(FileNotFoundError):
        files.listing("nowhere").version("b")
    assert set(files.listing("nowhere").names) == set()


# Writing


def test_a_file_is_seen_after_what_it_waits_for(files: FileIO) -> None:
    seen: list[int | None] = []
    files.write(NAME, [b"whole"], before_visible=lambda: seen.append(files.size(NAME)))
    assert seen == [None]
    assert files.read(NAME) == b"whole"
    assert set(files.list("chk-1", hidden=True)) == {"_metadata"}


def test_where_that_fails_nothing_is_there(files: FileIO) -> None:
    def fail() -> None:
        raise StorageAccessError("the data is not on the disk")

    with pytest.raises(StorageAccessError, match="the data is not on the disk"):
        files.write(NAME, [b"whole"], before_visible=fail)
    assert files.size(NAME) is None
    assert files.list("chk-1", hidden=True) == {}


@pytest.mark.parametrize("error", [SnapshotCorruptError("altered"), RuntimeError("cut off")])
def test_a_write_whose_bytes_fail_leaves_the_old_content(files: FileIO, error: Exception) -> None:
    files.write("a", [b"old"])

    def broken() -> Iterator[bytes]:
        yield b"new"
        raise error

    with pytest.raises(type(error), match=str(error)):
        files.write("a", broken())
    assert files.read("a") == b"old"
    assert set(files.list(hidden=True)) == {"a"}


def test_a_new_file_is_streamed(files: FileIO) -> None:
    pieces = [bytes([number]) * 1000 for number in range(20)]
    with files.create("shared/a.pack") as stream:
        assert stream.write(pieces[0]) == 1000
        stream.writelines(pieces[1:])
    assert files.read("shared/a.pack") == b"".join(pieces)


def test_a_large_file_is_written_and_streamed(files: FileIO) -> None:
    chunks = [bytes([number]) * (SINGLE_PUT_BYTES // 8) for number in range(10)]
    files.write("written", chunks)
    with files.create("streamed") as stream:
        stream.writelines(chunks)
    assert files.sizes(["written", "streamed"]) == dict.fromkeys(("written", "streamed"), sum(map(len, chunks)))
    with files.open("streamed", range(SINGLE_PUT_BYTES, SINGLE_PUT_BYTES + 2)) as stream:
        stream.seek(SINGLE_PUT_BYTES)
        assert stream.read(2) == bytes([8, 8])


def test_a_file_is_placed_in_a_tree_that_nobody_reads_yet(files: FileIO) -> None:
    files.make()
    files.place("a/b/c", [b"one", b"two"])
    files.flush_all()
    files.flush("a/b")
    assert files.read("a/b/c") == b"onetwo"


def test_of_several_writers_of_one_name_the_first_one_wins(files: FileIO) -> None:
    files.create_if_absent("log/1", b"first")
    files.create_if_absent("log/1", b"second")
    assert files.read("log/1") == b"first"
    assert set(files.list("log", hidden=True)) == {"1"}


def test_concurrent_writers_of_one_name_leave_one_of_them_whole(files: FileIO) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: files.create_if_absent("log/1", bytes([number]) * 1000), range(8)))
    data = files.read("log/1")
    assert data == data[:1] * 1000


@pytest.mark.parametrize("files", ["disk", "s3", *FAR], indirect=True)
def test_exactly_one_of_concurrent_writers_of_a_new_file_succeeds(files: FileIO) -> None:
    def succeeds(number: int) -> bool:
        try:
            files.write("log/1", [bytes([number]) * 1000], replace=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        succeeded = list(pool.map(succeeds, range(8)))
    assert [number for number in range(8) if succeeded[number]] == [files.read("log/1")[0]]
    assert list(files.list("log", hidden=True)) == ["1"]


@pytest.mark.parametrize("files", ["disk", "s3", *FAR], indirect=True)
def test_a_reader_sees_the_old_or_the_new_content_of_a_file_that_is_replaced(files: FileIO) -> None:
    files.write("log/1", [b"0" * 1000])
    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(lambda: [files.write("log/1", [b"%d" % (at % 10) * 1000]) for at in range(40)])
        while not replacing.done():
            data = files.read("log/1")
            assert data == data[:1] * 1000
    replacing.result()
    assert files.read("log/1") == b"9" * 1000
    assert list(files.list("log", hidden=True)) == ["1"]


def test_a_file_that_may_not_be_replaced_is_kept(files: FileIO) -> None:
    files.write(NAME, [b"first"], replace=False)
    with pytest.raises(FileExistsError, match="chk-1/_metadata"):
        files.write(NAME, [b"second"], replace=False)
    assert files.read(NAME) == b"first"
    assert set(files.list("chk-1", hidden=True)) == {"_metadata"}


def test_without_hard_links_a_file_that_may_not_be_replaced_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files = LocalFileIO(tmp_path)
    files.write("a", [b"first"], replace=False)
    with pytest.raises(FileExistsError):
        files.write("a", [b"second"], replace=False)
    assert files.read("a") == b"first"
    assert set(files.list(hidden=True)) == {"a"}


def test_a_link_that_nfs_repeats_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def sent_twice(*arguments: Any, **options: Any) -> None:
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", sent_twice)
    files = LocalFileIO(tmp_path)
    files.write("a", [b"first"], replace=False)
    assert files.read("a") == b"first"
    assert set(files.list(hidden=True)) == {"a"}


def test_a_put_that_the_driver_repeats_finds_its_own_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_file = MemoryFileSystem.pipe_file

    def sent_twice(self: MemoryFileSystem, *arguments: Any, **options: Any) -> None:
        pipe_file(self, *arguments, **options)
        pipe_file(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", sent_twice)
    files = FsspecFileIO(f"memory:/{tmp_path}-{uuid.uuid4().hex}", {})
    files.write("a", [b"first"], replace=False)
    assert files.read("a") == b"first"


def test_a_file_of_the_same_storage_is_adopted_or_left_to_be_copied(files: FileIO) -> None:
    files.write("old/a", [b"data"])
    is_adopted = files.adopt("new/a", files, "old/a")
    assert is_adopted is (files.size("new/a") is not None)
    if is_adopted:
        files.flush("new")
        files.delete("old/a")
        assert files.read("new/a") == b"data"
    assert not files.adopt("new/b", files, "none")
    assert not files.adopt("new/b", MemoryFileIO("memory://other"), "none")
    assert files.size("new/b") is None


# Deleting and moving


def test_a_tree_is_deleted(files: FileIO) -> None:
    for path in ("a/b", "a/.c", "d"):
        files.write(path, [b"x"])
    files.delete("d")
    assert set(files.list()) == {"a"}
    files.delete_if_empty("a")
    assert files.read("a/b") == b"x"
    files.delete_all()
    assert not files.exists()
    assert list(files.find(hidden=True)) == []


@pytest.mark.parametrize("name", ["env[1]", "env?", "env*"])
@pytest.mark.parametrize("protocol", ["memory", "s3"])
def test_the_name_of_a_tree_is_no_pattern(request: pytest.FixtureRequest, protocol: str, name: str) -> None:
    options, bucket = dict[str, Any](), uuid.uuid4().hex
    if protocol == "s3":
        options = request.getfixturevalue("s3_options")
        fsspec.filesystem("s3", **options).mkdir(bucket)
    named, other = (FsspecFileIO(f"{protocol}://{bucket}/{each}", options) for each in (name, "env1"))
    for each in (named, other):
        each.write("a/b", [b"x"])
    named.delete_all()
    assert not named.exists()
    assert other.read("a/b") == b"x"


def test_an_empty_directory_is_deleted(files: FileIO) -> None:
    files.write("a/b", [b"x"])
    files.write("c", [b"x"])
    files.delete("a/b")
    files.delete_if_empty("a")
    assert [path for path, _ in files.find(hidden=True)] == ["c"]
    if isinstance(files, LocalFileIO):
        assert set(files.list()) == {"c"}


def test_a_tree_is_renamed_at_once_or_not_at_all(files: FileIO) -> None:
    files.write("a/b", [b"x"])
    moved = f"{files.url}-moved"
    if not files.can_rename:
        return
    files.rename(moved)
    assert open_file_io(moved).read("a/b") == b"x"
    assert not files.exists()
    files.write("a/b", [b"y"])
    files.rename(f"{moved}/below/and/below")
    assert open_file_io(f"{moved}/below/and/below").read("a/b") == b"y"
    files.write("a/b", [b"z"])
    with pytest.raises(StorageAccessError):
        files.rename(moved)
    assert (files.read("a/b"), open_file_io(moved).read("a/b")) == (b"z", b"x")


def test_where_a_rename_replaces_nothing_a_file_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = LocalFileSystem.mv

    def as_webhdfs_does(self: LocalFileSystem, source: str, target: str, **_: object) -> None:
        if not self.exists(target):
            move(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "mv", as_webhdfs_does)
    files = FsspecFileIO(f"local://{tmp_path}/tree", {})
    for content in (b"old", b"new"):
        files.write("a", [content])
        assert files.read("a") == content
    assert set(files.list(hidden=True)) == {"a"}


def test_no_directory_of_a_driver_goes_with_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyArrow's rmdir, which fsspec calls for HDFS, does that.
    monkeypatch.setattr(LocalFileSystem, "rmdir", lambda _self, path: shutil.rmtree(path))
    files = FsspecFileIO(f"local://{tmp_path}/tree", {})
    files.write("a/b", [b"x"])
    files.delete_if_empty("a")
    files.delete_if_empty()
    assert files.read("a/b") == b"x"


# Clocks, and other processes


def test_files_are_dated_by_the_clock_of_the_storage(files: FileIO, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(files, MemoryFileIO | FolderFileIO):
        monkeypatch.setattr("time.time", lambda: 0.0)
        monkeypatch.setattr("time.time_ns", lambda: 0)
    files.write("a", [b"x"])
    now_ms = files.clock_ms(".probe")
    assert now_ms is not None
    assert 0 <= now_ms - (files.list()["a"].status().changed_at_ms or 0) < 60_000
    assert files.list(hidden=True).keys() == {"a"}


def test_what_executors_open_is_pickled_without_what_was_parsed(files: FileIO) -> None:
    files.write("a", [b"x"])
    files.seen["a"] = ("token", object())
    if isinstance(files, MemoryFileIO | FolderFileIO):
        return
    copied = pickle.loads(pickle.dumps(files))
    assert (copied.url, copied.seen) == (files.url, {})
    assert copied.read("a") == b"x"


# Errors


class RefusingFileSystem(MemoryFileSystem):
    """A file system whose driver finds no credentials."""

    protocol = "refusing"

    def _refuse(self, *_: object, **__: object) -> object:
        class NoCredentialsError(Exception):
            """As botocore's, which is no OSError."""

        raise NoCredentialsError("Unable to locate credentials, secret_key=hunter2")

    cat_file = open = ls = info = pipe_file = find = exists = rm_file = _refuse


class RefusingShelf(Shelf):
    """A storage of a user's own that is away."""

    def _refuse(self, *_: object) -> object:
        raise TimeoutError("the service is away, secret_key=hunter2")

    put = get = remove = objects = _refuse  # type: ignore[assignment]


TOUCHES: dict[str, Callable[[FileIO], object]] = {
    "read": lambda files: files.read("a"),
    "read a part": lambda files: files.read("a", 3),
    "open": lambda files: files.open("a"),
    "list": lambda files: files.list("a"),
    "find": lambda files: list(files.find("a")),
    "version": lambda files: files.version("a"),
    "size": lambda files: files.size("a"),
    "write": lambda files: files.write("a", [b"x"]),
    "place": lambda files: files.place("a", [b"x"]),
    "create if absent": lambda files: files.create_if_absent("a", b"x"),
    "delete": lambda files: files.delete("a"),
}


def _refusing(kind: str) -> FileIO:
    if kind == "custom":
        return RefusingShelf("shelf://away/b")
    fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)
    return FsspecFileIO("refusing://away/b", {})


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("kind", ["fsspec", "custom"])
def test_what_a_driver_throws_is_told_with_its_place_and_without_secrets(kind: str, touch: str) -> None:
    with pytest.raises(StorageAccessError, match=r"://away/b/a: (NoCredentials|Timeout)Error: .*Check that") as told:
        TOUCHES[touch](_refusing(kind))
    assert "hunter2" not in str(told.value)


def test_a_disk_that_refuses_is_told_with_its_place(tmp_path: Path) -> None:
    files = LocalFileIO(tmp_path / "file" / "tree")
    (tmp_path / "file").write_bytes(b"a file where a directory should be")
    for touch in ("size", "write", "place", "create if absent", "delete"):
        with pytest.raises(StorageAccessError, match=r"file/tree.*: NotADirectoryError: .*Check that"):
            TOUCHES[touch](files)
    for touch in ("read", "open", "version"):
        with pytest.raises(FileNotFoundError):
            TOUCHES[touch](files)
    assert files.list() == {}


def test_a_file_system_without_a_driver_is_an_error_that_says_so() -> None:
    with pytest.raises(StorageAccessError, match="nosuchfs"):
        open_file_io("nosuchfs://bucket/a")


def test_what_is_behind_a_link_is_read_by_name_and_listed_on_request(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"mine")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    for follows in (True, False):
        files = LocalFileIO(tmp_path / "tree", follow_links=follows)
        assert files.read("link/a") == b"mine"
        assert [path for path, _ in files.find(hidden=True)] == (["link/a"] if follows else [])


@pytest.mark.parametrize("url", ["nosuchfs:/a", "nosuchfs:///a"])
def test_a_url_without_an_authority_is_no_folder_of_this_machine(url: str) -> None:
    """Hadoop writes `hdfs:/a` and `dbfs:/a`."""
    with pytest.raises(StorageAccessError, match="nosuchfs"):
        open_file_io(url)
    assert same_folder(url, "nosuchfs:///a/")
    assert not same_folder(url, "/a")
