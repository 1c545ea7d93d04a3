from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> FileIO:
    if request.param == "local":
        return open_file_io(f"file://{tmp_path}/tree")
    return open_file_io(f"memory://{tmp_path.name}/tree")


def test_what_was_written_is_read_and_listed(folder: FileIO) -> None:
    folder.write("a/b", [b"one", b"two"])

    assert folder.read("a/b") == b"onetwo"
    assert {name: entry.is_directory for name, entry in folder.list().items()} == {"a": True}
    assert folder.list("a")["b"].version().size == 6
    assert [path for path, _ in folder.find()] == ["a/b"]


def test_a_missing_directory_lists_as_empty(folder: FileIO) -> None:
    assert folder.list() == {}
    assert folder.list("a/b") == {}
    assert not folder.exists()


def test_hidden_names_are_not_listed(folder: FileIO) -> None:
    folder.write(".a.crc", [b"x"])
    folder.write("a", [b"x"])

    assert list(folder.list()) == ["a"]


def test_a_missing_file_is_a_missing_file(folder: FileIO) -> None:
    for look in (folder.read, folder.open, folder.version):
        with pytest.raises(FileNotFoundError):
            look("a")
    folder.delete("a")
    folder.delete_all()


def test_a_replaced_file_has_another_version(folder: FileIO) -> None:
    folder.write("a", [b"one"])
    before = folder.version("a")
    folder.write("a", [b"two"])

    assert folder.version("a") != before
    assert folder.list()["a"].version() == folder.listing("").version("a") == folder.version("a")


def test_a_listing_is_asked_for_the_versions_of_its_files(folder: FileIO) -> None:
    folder.write("a/b", [b"one"])
    folder.write("a/.b.crc", [b"two"])
    listing = folder.listing("a")

    assert set(listing.names) == {"b"}
    assert listing.version("b") == folder.version("a/b")
    for name in ("c", "", ".b.crc", "../a/b", "./b", "b/"):
        with pytest.raises(FileNotFoundError):
            listing.version(name)
    with pytest.raises(FileNotFoundError):
        folder.listing("nowhere").version("b")
    assert set(folder.listing("nowhere").names) == set()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    folder = open_file_io(str(tmp_path))
    folder.write("a", [b"old"])

    def broken() -> object:
        yield b"new"
        raise RuntimeError("upload cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        folder.write("a", broken())  # type: ignore[arg-type]

    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_tree_is_moved_and_deleted(folder: FileIO) -> None:
    folder.write("a/b", [b"x"])
    moved = folder.url + "-moved"

    folder.rename(moved)

    assert open_file_io(moved).read("a/b") == b"x"
    assert not folder.exists()
    open_file_io(moved).delete_all()
    assert not open_file_io(moved).exists()


@pytest.mark.parametrize(
    "touch",
    [
        lambda folder: folder.read("a"),
        lambda folder: folder.read("a", 3),
        lambda folder: folder.list("a"),
        lambda folder: folder.version("a"),
        lambda folder: folder.write("a", [b"x"]),
    ],
)
def test_what_a_driver_throws_is_told_as_trouble_with_the_storage(
    touch: Callable[[FileIO], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentialsError(Exception):
        """As botocore's, which is no OSError."""

    def refuse(*_: object, **__: object) -> object:
        raise NoCredentialsError("Unable to locate credentials")

    for call in ("cat_file", "open", "ls", "info", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, call, refuse)
    with pytest.raises(StorageAccessError, match=r"memory://tree/a: NoCredentialsError: Unable to locate credentials"):
        touch(open_file_io("memory://tree"))


def test_a_file_system_without_a_driver_is_an_error_that_says_so() -> None:
    with pytest.raises(StorageAccessError, match="nosuchfs"):
        open_file_io("nosuchfs://bucket/a")


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("/data/live-0", "file:///data/live-0"),
        ("file:/data/live-0", "file:///data/live-0"),
        ("file:///data/live-0", "file:///data/live-0"),
        ("s3a://bucket/live-0/", "s3a://bucket/live-0"),
    ],
)
def test_spark_is_given_a_url_with_its_scheme(url: str, location: str) -> None:
    assert LiveDirectory(url).spark_location == location
