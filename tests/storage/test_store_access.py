"""A storage that cannot be used says so early, in words, and says what to do."""

import errno
import io
import os
import pickle
import stat
import time
from pathlib import Path

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from dagster_ckpt.config.checkpoint_storage import (
    CustomCheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import OptionError, SnapshotTooLargeError, StorageAccessError
from dagster_ckpt.io.fsspec import FsspecFileIO
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.io.location import normalised
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.values.redaction import without_secrets

FILES = {"1.zip": b"z" * 300}


class ForbiddenFileSystem(MemoryFileSystem):
    """A file system on which this process has no rights."""

    protocol = "forbidden"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise PermissionError(f"Access Denied: {path}")

    def rm_file(self, path):
        raise PermissionError(f"Access Denied: {path}")


class AwayFileSystem(MemoryFileSystem):
    """A store whose servers do not answer."""

    protocol = "away"

    def info(self, path, **kwargs):
        raise TimeoutError(f"No answer: {path}")


def test_a_store_that_does_not_answer_is_not_taken_for_one_without_the_data():
    """fsspec's `exists` answers no to every error, so the rows of a sink looked lost."""
    fsspec.register_implementation("away", AwayFileSystem, clobber=True)
    with pytest.raises(StorageAccessError, match=r"away://c/d.*No answer"):
        FsspecFileIO("away://c/d", {}).exists()


@pytest.fixture
def forbidden():
    fsspec.register_implementation("forbidden", ForbiddenFileSystem, clobber=True)
    return FileSystemCheckpointStorage("forbidden://c/d")


def test_no_right_to_write_is_found_before_the_first_checkpoint(forbidden) -> None:
    with pytest.raises(StorageAccessError, match=r"Cannot write forbidden://c/d/stream.*Access Denied.*is allowed"):
        open_store(forbidden, "stream").check_access()


def test_a_path_below_a_file_is_found(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/file/c"), "stream")
    with pytest.raises(StorageAccessError, match=r"Cannot write file://.*/file/c/stream/probe.*Check that the path"):
        store.check_access()


def test_a_savepoint_path_is_checked_too(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = FileSystemCheckpointStorage(f"file://{tmp_path}/c", savepoint_path=f"file://{tmp_path}/file/s")
    with pytest.raises(StorageAccessError, match=r"Cannot write file://.*/file/s/probe"):
        open_store(storage, "stream").check_access()


def test_a_listing_cached_by_another_thread_does_not_hide_a_new_object(s3_options, monkeypatch) -> None:
    """A listing that began before a write can end after it; fsspec would then cache it for all threads."""
    s3fs.S3FileSystem(**s3_options).mkdir("listings")
    space = FsspecFileIO("s3://listings/c", s3_options)
    space.write("shared/1", [b"a"])
    # The other thread's listing ends between this thread's invalidation and its own listing.
    monkeypatch.setattr(space._fs, "invalidate_cache", lambda _path=None: None)
    assert list(space.list("shared")) == ["1"]
    space.write("shared/2", [b"b"])
    assert space.sizes(["shared/1", "shared/2"]) == {"shared/1": 1, "shared/2": 1}


def test_the_object_with_which_s3a_marks_a_directory_is_no_file(s3_options) -> None:
    bucket = s3fs.S3FileSystem(**s3_options)
    bucket.mkdir("marked")
    # s3fs itself creates no such object: a name that ends with a slash.
    bucket.call_s3("put_object", Bucket="marked", Key="live/sources/0/", Body=b"")
    bucket.pipe("marked/live/sources/0/0", b"v1")
    live = FsspecFileIO("s3://marked/live", s3_options)

    assert [path for path, _ in live.find("sources/0")] == ["sources/0/0"]
    assert [path for path, _ in live.find()] == ["sources/0/0"]
    assert list(live.list("sources/0")) == ["0"]


def test_a_misspelt_bucket_is_found_and_not_made(s3_options) -> None:
    store = open_store(FileSystemCheckpointStorage("s3://no-such-bucket/c", storage_options=s3_options), "stream")
    with pytest.raises(StorageAccessError, match="s3://no-such-bucket/c"):
        store.check_access()
    with pytest.raises(StorageAccessError, match="s3://no-such-bucket/c"):
        store.check_access()


def test_a_server_that_does_not_answer_is_found() -> None:
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:1",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }
    store = open_store(FileSystemCheckpointStorage("s3://b/c", storage_options=options), "j")
    with pytest.raises(StorageAccessError, match=r"s3://b/c/j/probe.*credentials and endpoint") as told:
        store.check_access()
    assert "secret" not in str(told.value)


def test_an_unknown_protocol_names_those_that_work() -> None:
    with pytest.raises(StorageAccessError, match=r"carrier-pigeon.*Use file://, s3://"):
        open_store(FileSystemCheckpointStorage("carrier-pigeon://c/d"), "stream")


def test_a_missing_driver_says_what_to_install(monkeypatch) -> None:
    def missing(*_arguments, **_options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StorageAccessError, match=r"driver that is not installed.*pip install 'dagster-ckpt\[s3\]'"):
        open_store(FileSystemCheckpointStorage("s3://b/c"), "stream")


@pytest.mark.parametrize(
    ("url", "options", "config", "user"),
    [
        ("webhdfs://names:9870/c", {}, {}, "streams"),
        ("webhdfs://names:9870/c", {"user": "other"}, {}, "other"),
        ("webhdfs://other:password@names:9870/c", {}, {}, "other"),
        ("webhdfs://names:9870/c", {"token": "t"}, {}, None),
        ("webhdfs://names:9870/c", {}, {"token": "t"}, None),
    ],
)
def test_hdfs_sees_the_user_that_it_sees_of_spark(url, options, config, user, monkeypatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "streams")
    monkeypatch.setitem(fsspec.config.conf, "webhdfs", config)
    files = FsspecFileIO(without_secrets(url), options, url_to_open=url)
    assert files._fs.user == user


def test_a_user_without_a_name_is_left_to_hdfs(monkeypatch) -> None:
    """As under a number that a container chose."""
    for name in ("HADOOP_USER_NAME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert FsspecFileIO("webhdfs://names:9870/c", {})._fs.user is None


@pytest.mark.parametrize("scheme", ["ftp", "sftp", "ssh"])
def test_a_driver_with_one_connection_is_refused_and_what_else_there_is_said(scheme: str) -> None:
    with pytest.raises(StorageAccessError, match=rf"{scheme}://h/c/stream cannot be used.*Mount the folder"):
        open_store(FileSystemCheckpointStorage(f"{scheme}://h/c"), "stream")


def test_hdfs_without_its_library_names_what_to_set_and_what_needs_none(monkeypatch) -> None:
    def missing(*_arguments, **_options):
        raise OSError("Unable to load libjvm\ndlopen(/usr/lib/jvm/libjvm.so) failed\n" * 40)

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StorageAccessError, match=r"Unable to load libjvm\. Set JAVA_HOME.*webhdfs://") as raised:
        open_store(FileSystemCheckpointStorage("hdfs://names:8020/c"), "stream")
    assert "\n" not in str(raised.value)


def test_a_full_disk_names_the_place_and_leaves_nothing(tmp_path, stream_of, monkeypatch) -> None:
    storage = FileSystemCheckpointStorage(f"file://{tmp_path}/c", 0)
    stream = stream_of(open_store(storage, "stream"))

    class FullDisk(io.BytesIO):
        def writelines(self, pieces):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dagster_ckpt.io.file_io.Guarded.__init__", _guarding(FullDisk()))
    with pytest.raises(StorageAccessError, match=r"Cannot write file://.*shared/.*No space left"):
        stream.checkpoint(1, FILES)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _guarding(stream):
    def init(self, _stream, where):
        self._stream, self._where = stream, where

    return init


def test_a_stream_that_takes_bytes_in_parts_gets_them_all(tmp_path) -> None:
    space = LocalFileIO(tmp_path, buffer_bytes=0)
    with space.create("shared/a.pack") as stream:
        assert stream.write(b"abc" * 1000) == 3000
    assert space.read("shared/a.pack") == b"abc" * 1000


@pytest.mark.parametrize("buffer", [-1, 0, 1, 4096, 1 << 20])
def test_every_write_buffer_size_stores_the_same(tmp_path, stream_of, buffer) -> None:
    stream = stream_of(open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/c", 0, buffer), "stream"))
    assert stream.restored(stream.checkpoint(1, FILES)) == FILES


def test_a_file_is_inline_below_the_threshold_and_in_an_object_from_it_on(tmp_path, stream_of) -> None:
    stream = stream_of(open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/c", 300), "stream"))
    location = stream.checkpoint(1, {"below": b"b" * 299, "at": b"a" * 300})
    where = {entry.path: entry.object for entry in stream.store.manifest(location).files}
    assert where["below"] is None
    assert str(where["at"]).startswith("../shared/")


def test_a_checkpoint_takes_the_names_that_are_documented(tmp_path, stream_of) -> None:
    stream = stream_of(open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/c"), "flights.delays"))
    location = stream.checkpoint(3, {"big": b"b" * 50_000})
    assert location == f"file://{tmp_path}/c/flights.delays/chk-3"
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert [name.rpartition("/")[0] for name in names] == ["c/flights.delays/chk-3", "c/flights.delays/shared"]
    assert stat.S_ISREG((tmp_path / "c/flights.delays/chk-3/_metadata").stat().st_mode)


def test_a_savepoint_can_be_moved(tmp_path, stream_of) -> None:
    stream = stream_of(open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/c", 10), "stream"))
    savepoint = stream.savepoint(1, FILES).removeprefix("file://")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "kept"
    (tmp_path / savepoint).rename(moved)
    assert stream.restored(str(moved)) == FILES
    assert stream.store.verify(f"file://{moved}/_metadata") == []


def test_memory_declines_what_is_too_large_and_takes_what_fits(stream_of) -> None:
    stream = stream_of(open_store(JobManagerCheckpointStorage(max_state_size=300), "stream"))
    stream.checkpoint(1, FILES)
    with pytest.raises(SnapshotTooLargeError, match=r"has 301 bytes.*at most 300.*Raise max_state_size"):
        stream.checkpoint(2, {"1.zip": b"z" * 301})
    assert [location.rpartition("/")[2] for location in stream.store.checkpoints()] == ["chk-1"]


def test_memory_without_a_savepoint_path_says_where_to_set_one(stream_of) -> None:
    stream = stream_of(open_store(JobManagerCheckpointStorage(), "stream"))
    with pytest.raises(StorageAccessError, match="Set savepoint_path"):
        stream.savepoint(1, FILES)


def test_memory_with_a_path_keeps_each_checkpoint_in_one_object(tmp_path, stream_of) -> None:
    stream = stream_of(open_store(JobManagerCheckpointStorage(f"file://{tmp_path}/c"), "stream"))
    stream.checkpoint(1, {"big": b"b" * 2_000_000})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["_metadata"]


def test_a_checkpoint_needs_a_number(stream_of, tmp_path) -> None:
    stream = stream_of(open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/c"), "stream"))
    with pytest.raises(OptionError, match="has no number"):
        stream.stored(None, FILES)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/c/chk-1/", "file:///data/c/chk-1"),
        ("file:/data//c/chk-1", "file:///data/c/chk-1"),
        ("s3://b/c/chk-1/", "s3://b/c/chk-1"),
    ],
)
def test_one_place_has_one_spelling(given, url) -> None:
    assert normalised(given) == url


@pytest.mark.parametrize("given", ["", "chk-1", "../chk-1", "file:chk-1"])
def test_a_location_that_is_no_url_is_refused(given) -> None:
    with pytest.raises(StorageAccessError, match=r"location is .* must be"):
        normalised(given)


class OwnStore:
    """What a user's factory may return."""

    def __init__(self, *, stream_id: str, folder: str) -> None:
        self.inner = open_store(FileSystemCheckpointStorage(folder), stream_id)

    def __getattr__(self, name: str):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_a_store_of_ones_own_is_named_by_its_import_path(tmp_path, stream_of) -> None:
    storage = CustomCheckpointStorage(f"{__name__}:OwnStore", {"folder": f"file://{tmp_path}/own"})
    stream = stream_of(open_store(pickle.loads(pickle.dumps(storage)), "stream"))
    assert stream.restored(stream.checkpoint(1, FILES)) == FILES


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("no_such_package:Store", "cannot be imported.*no_such_package"),
        (f"{__name__}:NoSuchName", "cannot be imported.*NoSuchName"),
        (f"{__name__}:OwnStore", "cannot be used.*folder"),
        ("builtins:dict", "neither a FileIO nor a SnapshotStore"),
    ],
)
def test_a_factory_that_makes_no_store_is_refused(factory, said) -> None:
    with pytest.raises(OptionError, match=said):
        open_store(CustomCheckpointStorage(factory), "stream")


def test_a_link_to_an_old_object_is_as_young_as_the_link(tmp_path: Path) -> None:
    # Or a sweep would take it for garbage of long ago, before the snapshot that needs it is published.
    old, new = (LocalFileIO(tmp_path / name, buffer_bytes=4096) for name in ("old", "new"))
    old.write("a.pack", [b"data"])
    os.utime(tmp_path / "old" / "a.pack", (1, 1))
    began_ms = time.time_ns() // 1_000_000
    assert new.adopt("shared/a.pack", old, "a.pack")
    # The kernel's clock of files ticks in steps.
    assert (new.list("shared")["a.pack"].status().changed_at_ms or 0) >= began_ms - 100
    old.delete("a.pack")
    assert new.read("shared/a.pack") == b"data"
