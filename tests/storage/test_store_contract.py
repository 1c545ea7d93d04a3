"""One contract for every storage: where the images live makes no difference to what is promised."""

import pytest

from dagster_ckpt.errors import ImageAbortedError, ImageCorruptError, ImageNotFoundError, StorageAccessError
from dagster_ckpt.image import ImageKind, SourceFile

KINDS = ["file", "folders", "memory", "s3", "jobmanager", "jobmanager with path"]
FILES = {"metadata": b"{}", "offsets/3": b"v1\n{}", "id-1.sst": b"s" * 500, "1.zip": b"z" * 300, "empty": b""}
LATER_MS = 2**52


@pytest.fixture(params=KINDS)
def place(request, make_place):
    return make_place(request.param)


@pytest.fixture
def job(place, job_of):
    return job_of(place.open())


def test_a_new_job_has_no_checkpoints(job) -> None:
    assert job.store.checkpoints() == []
    assert job.store.sweep(older_than_ms=0, now_ms=LATER_MS) == []


def test_the_storage_can_be_checked_beforehand_and_keeps_no_trace(job) -> None:
    job.store.check_access()
    assert job.store.checkpoints() == []
    assert job.store.sweep(older_than_ms=0, now_ms=LATER_MS) == []


def test_a_checkpoint_gives_back_what_was_put_in(job) -> None:
    location = job.checkpoint(7, FILES)
    assert location.endswith("/chk-7")
    assert job.restored(location) == FILES
    assert job.restored(f"{location}/_metadata") == FILES
    assert job.store.verify(location) == []
    manifest = job.store.manifest(location)
    assert (manifest.header.number, manifest.header.kind) == (7, ImageKind.CHECKPOINT)


def test_only_what_is_wanted_is_handed_out(job) -> None:
    location = job.checkpoint(1, FILES)
    found = []
    job.store.extract(location, lambda entry, chunks: found.append(b"".join(chunks)), only="1.zip".__eq__)
    assert found == [FILES["1.zip"]]


def test_checkpoints_are_listed_in_the_order_of_their_numbers(job) -> None:
    locations = [job.checkpoint(number, FILES) for number in (10, 9, 100)]
    assert job.store.checkpoints() == [locations[1], locations[0], locations[2]]


def test_a_shared_file_dies_with_its_last_referrer(job) -> None:
    first = job.checkpoint(1, FILES)
    second = job.checkpoint(2, {**FILES, "1.zip": b"y" * 300}, base=first)
    third = job.checkpoint(3, {"id-1.sst": FILES["id-1.sst"]}, base=second)
    job.store.discard(first)
    job.store.discard(second)
    assert job.store.checkpoints() == [third]
    assert job.restored(third) == {"id-1.sst": FILES["id-1.sst"]}
    job.store.discard(third)
    assert job.store.checkpoints() == []
    assert job.store.sweep(older_than_ms=0, now_ms=LATER_MS) == []


def test_an_image_that_is_gone_is_not_found_and_can_be_discarded_again(job) -> None:
    location = job.checkpoint(1, FILES)
    job.store.discard(location)
    job.store.discard(location)
    with pytest.raises(ImageNotFoundError, match="chk-1"):
        job.store.manifest(location)
    with pytest.raises(ImageNotFoundError, match="chk-1"):
        job.restored(location)
    assert len(job.store.verify(location)) == 1


def test_an_image_under_way_protects_its_base(job) -> None:
    base = job.checkpoint(1, FILES)
    with pytest.raises(StorageAccessError, match="builds on it"):
        job.store.discard(base, protected=[f"{base}/_metadata"])
    assert job.restored(base) == FILES


def test_a_base_that_is_gone_costs_a_full_image_and_nothing_else(job) -> None:
    base = job.checkpoint(1, FILES)
    job.store.discard(base)
    assert job.restored(job.checkpoint(2, FILES, base=base)) == FILES


def test_a_number_is_used_once(job) -> None:
    location = job.checkpoint(1, FILES)
    with pytest.raises(StorageAccessError, match="never overwritten"):
        job.checkpoint(1, {"other": b"o" * 100})
    assert job.restored(location) == FILES


def test_giving_up_leaves_nothing(job) -> None:
    with pytest.raises(ImageAbortedError):
        job.stored(1, FILES, should_abort=lambda: True)
    assert job.store.checkpoints() == []
    assert job.store.sweep(older_than_ms=0, now_ms=LATER_MS) == []


def test_a_savepoint_stands_alone(job) -> None:
    checkpoint = job.checkpoint(1, FILES)
    savepoint = job.savepoint(2, FILES)
    assert savepoint.rpartition("/")[2].startswith("savepoint-flight-")
    assert not [name for name in job.store.manifest(savepoint).objects if "/" in name]
    job.store.discard(checkpoint)
    job.store.sweep(older_than_ms=0, now_ms=LATER_MS)
    assert job.restored(savepoint) == FILES
    assert job.store.checkpoints() == []


@pytest.mark.parametrize("place", ["file", "memory", "s3"], indirect=True)
def test_what_a_savepoint_has_in_common_with_a_checkpoint_is_not_written_again(job) -> None:
    files = {"id-1.sst": b"s" * 200_000}
    checkpoint = job.checkpoint(1, files)
    savepoint = job.stored_savepoint(2, files, base=checkpoint)
    assert savepoint.incremental_bytes < 10_000
    # Each stands alone, whichever of them goes first.
    job.store.discard(checkpoint)
    job.store.sweep(older_than_ms=0, now_ms=LATER_MS)
    assert job.restored(savepoint.location) == files
    next_checkpoint = job.stored(3, files, savepoint.location)
    assert next_checkpoint.incremental_bytes < 10_000
    job.store.discard(savepoint.location)
    assert job.restored(next_checkpoint.location) == files
    assert job.store.verify(next_checkpoint.location) == []


def test_a_savepoint_goes_where_it_is_told_and_can_be_discarded(job, tmp_path) -> None:
    savepoint = job.savepoint(1, FILES, target=str(tmp_path / "mine"))
    assert savepoint.startswith(f"file://{tmp_path}/mine/savepoint-")
    assert job.restored(savepoint) == FILES
    job.store.discard(savepoint)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_checkpoint_outlives_the_savepoint_it_shares_with(job) -> None:
    savepoint = job.savepoint(1, FILES)
    checkpoint = job.checkpoint(2, FILES, base=savepoint)
    job.store.discard(savepoint)
    assert job.restored(checkpoint) == FILES


def test_what_a_checkpoint_takes_over_from_a_savepoint_goes_with_no_other(job) -> None:
    """Two checkpoints that both begin with the same savepoint, as after going back to it twice."""
    savepoint = job.savepoint(1, FILES)
    first = job.checkpoint(2, FILES, base=savepoint)

    def hold(files: list[SourceFile]) -> list[SourceFile]:
        job.store.discard(first, protected=[savepoint])
        return files

    second = job.stored(3, FILES, base=savepoint, hold=hold).location
    assert job.restored(second) == FILES


def test_giving_up_takes_nothing_from_another_that_began_with_the_same_savepoint(job) -> None:
    savepoint = job.savepoint(1, FILES)
    made = []

    def hold(files: list[SourceFile]) -> list[SourceFile]:
        made.append(job.checkpoint(3, FILES, base=savepoint))
        raise ImageAbortedError

    with pytest.raises(ImageAbortedError):
        job.stored(2, FILES, base=savepoint, hold=hold)
    assert job.restored(made[0]) == FILES


def test_two_threads_may_write_at_once(job) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        locations = list(pool.map(lambda number: job.checkpoint(number, {**FILES, "n": bytes(number)}), range(1, 9)))
        contents = list(pool.map(job.restored, locations))
    assert contents == [{**FILES, "n": bytes(number)} for number in range(1, 9)]


def test_a_source_that_fails_leaves_nothing(job) -> None:
    def fail() -> None:
        raise PermissionError("source")

    with pytest.raises(PermissionError, match="source"):
        job.stored_of(1, [SourceFile("x", 100, None, fail)])
    assert job.store.checkpoints() == []


@pytest.mark.parametrize("kind", ["file", "folders", "memory", "s3", "jobmanager with path"])
def test_what_is_stored_outlives_the_process_that_stored_it(make_place, job_of, kind) -> None:
    place = make_place(kind)
    location = job_of(place.open()).checkpoint(1, FILES)
    other = job_of(place.open())
    assert other.store.checkpoints() == [location]
    assert other.restored(location) == FILES


@pytest.mark.parametrize("kind", ["file", "folders", "memory", "s3"])
def test_an_increment_costs_what_changed(make_place, job_of, kind) -> None:
    job = job_of(make_place(kind).open())
    big = {"id-big.sst": b"b" * 1_000_000}
    first = job.stored(1, big)
    second = job.stored(2, {**big, "new": b"n" * 1000}, first.location)
    assert (first.full_bytes, first.file_count) == (1_000_000, 1)
    assert (second.full_bytes, second.file_count) == (1_001_000, 2)
    assert 1000 < second.incremental_bytes < 3000


@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_a_broken_checkpoint_is_listed_said_and_makes_nobody_lose_a_byte(make_place, job_of, kind, caplog) -> None:
    place = make_place(kind)
    job = job_of(place.open())
    first = job.checkpoint(1, FILES)
    broken = job.checkpoint(2, FILES, base=first)
    third = job.checkpoint(3, FILES, base=first)
    _truncate(place, broken)
    fresh = job_of(place.open())
    assert fresh.store.checkpoints() == [first, broken, third]
    with pytest.raises(ImageCorruptError, match=r"chk-2/_metadata.*truncated"):
        fresh.store.manifest(broken)
    fresh.store.discard(first)
    fresh.store.discard(third)
    assert "chk-2/_metadata" in caplog.text
    assert fresh.store.sweep(older_than_ms=0, now_ms=LATER_MS) == []
    fresh.store.discard(broken)
    assert fresh.store.checkpoints() == []
    assert [garbage.reason for garbage in fresh.store.sweep(older_than_ms=0, now_ms=LATER_MS)] == [
        "no image refers to it"
    ]


def _truncate(place, location: str) -> None:
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{location}/_metadata", **place.storage.storage_options)
    fs.pipe_file(path, fs.cat_file(path)[:-1])
