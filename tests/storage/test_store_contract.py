"""The contract of checkpoint storages, held by each of ours; and what ours promise beyond it."""

import re

import pytest

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage, JobManagerCheckpointStorage
from dagster_ckpt.errors import SnapshotCorruptError, StorageAccessError
from dagster_ckpt.testing.checkpoint_storage_contract import CheckpointStorageContract
from dagster_ckpt.testing.trial_snapshots import FILES
from tests.support.far_stores import FAR, FAR_OBJECTS

KINDS = ["file", "folders", "memory", "s3", "jobmanager", "jobmanager with path", *FAR]


class TestFileSystemCheckpointStorage(CheckpointStorageContract):
    @pytest.fixture(params=["file", "folders", "memory", "s3", *FAR])
    def storage(self, request, make_place) -> CheckpointStorage:
        return make_place(request.param).storage


class TestJobManagerCheckpointStorage(CheckpointStorageContract):
    outlives_the_process = False
    size_limit = JobManagerCheckpointStorage.DEFAULT_MAX_STATE_SIZE

    @pytest.fixture
    def storage(self, make_place) -> CheckpointStorage:
        return make_place("jobmanager").storage


class TestJobManagerCheckpointStorageWithAPath(CheckpointStorageContract):
    size_limit = JobManagerCheckpointStorage.DEFAULT_MAX_STATE_SIZE

    @pytest.fixture
    def storage(self, make_place) -> CheckpointStorage:
        return make_place("jobmanager with path").storage


@pytest.fixture(params=KINDS)
def place(request, make_place):
    return make_place(request.param)


@pytest.fixture
def stream(place, stream_of):
    return stream_of(place.open())


def test_a_snapshot_under_way_protects_its_base(stream) -> None:
    base = stream.checkpoint(1, FILES)
    with pytest.raises(StorageAccessError, match="shares its objects"):
        stream.store.discard(base, protected=[f"{base}/_metadata"])
    assert stream.restored(base) == FILES


def test_a_number_is_used_once(stream) -> None:
    location = stream.checkpoint(1, FILES)
    with pytest.raises(StorageAccessError, match="never overwritten"):
        stream.checkpoint(1, {"other": b"o" * 100})
    assert stream.restored(location) == FILES


def test_a_savepoint_is_named_as_flink_names_it(stream) -> None:
    assert stream.savepoint(2, FILES).rpartition("/")[2].startswith("savepoint-flight-")


@pytest.mark.parametrize("place", ["file", "memory", "s3", *FAR_OBJECTS], indirect=True)
def test_what_a_savepoint_has_in_common_with_a_checkpoint_is_not_written_again(stream) -> None:
    files = {"id-1.sst": b"s" * 200_000}
    checkpoint = stream.checkpoint(1, files)
    savepoint = stream.stored_savepoint(2, files, base=checkpoint)
    assert savepoint.incremental_bytes < 10_000
    # Each stands alone, whichever of them goes first.
    stream.store.discard(checkpoint)
    stream.store.sweep(older_than_ms=0)
    assert stream.restored(savepoint.location) == files
    next_checkpoint = stream.stored(3, files, savepoint.location)
    assert next_checkpoint.incremental_bytes < 10_000
    stream.store.discard(savepoint.location)
    assert stream.restored(next_checkpoint.location) == files
    assert stream.store.verify(next_checkpoint.location) == []


def test_a_savepoint_goes_where_it_is_told_and_can_be_discarded(stream, tmp_path) -> None:
    savepoint = stream.savepoint(1, FILES, target=str(tmp_path / "mine"))
    assert savepoint.startswith(f"file://{tmp_path}/mine/savepoint-")
    assert stream.restored(savepoint) == FILES
    stream.store.discard(savepoint)
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folders", "memory", "s3", *FAR])
def test_an_increment_costs_what_changed(make_place, stream_of, kind) -> None:
    stream = stream_of(make_place(kind).open())
    big = {"id-big.sst": b"b" * 1_000_000}
    first = stream.stored(1, big)
    second = stream.stored(2, {**big, "new": b"n" * 1000}, first.location)
    assert (first.full_bytes, first.file_count) == (1_000_000, 1)
    assert (second.full_bytes, second.file_count) == (1_001_000, 2)
    assert 1000 < second.incremental_bytes < 3000


@pytest.mark.parametrize("kind", ["file", "memory", "s3", *FAR_OBJECTS])
def test_a_broken_checkpoint_is_listed_said_and_makes_nobody_lose_a_byte(make_place, stream_of, kind, caplog) -> None:
    place = make_place(kind)
    stream = stream_of(place.open())
    first = stream.checkpoint(1, FILES)
    broken = stream.checkpoint(2, FILES, base=first)
    third = stream.checkpoint(3, FILES, base=first)
    _truncate(place, broken)
    fresh = stream_of(place.open())
    assert fresh.store.checkpoints() == [first, broken, third]
    with pytest.raises(SnapshotCorruptError, match=r"chk-2/_metadata.*truncated"):
        fresh.store.manifest(broken)
    fresh.store.discard(first)
    fresh.store.discard(third)
    folder, _, directory = broken.rpartition("/")
    why = rf"Shared objects in {folder} are kept, because they may be needed: .*{directory}/_metadata.*truncated.*"
    told = [record.getMessage() for record in caplog.records if record.name.endswith("garbage_collection")]
    assert len(told) == 2
    assert all(re.fullmatch(why, message) for message in told), told
    assert fresh.store.sweep(older_than_ms=0) == []
    fresh.store.discard(broken)
    assert fresh.store.checkpoints() == []
    assert [garbage.reason for garbage in fresh.store.sweep(older_than_ms=0)] == ["no snapshot refers to it"]


def _truncate(place, location: str) -> None:
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{location}/_metadata", **place.storage.storage_options)
    fs.pipe_file(path, fs.cat_file(path)[:-1])
