"""How many requests a snapshot makes of an object store, counted by a proxy in front of moto."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import s3fs

from benchmarks.engine import Engine
from benchmarks.slow_link import Meter, slow_link
from benchmarks.synthetic import write_batches
from dagster_ckpt.client.cost import (
    OF_A_CHECKPOINT,
    OF_A_DELETION,
    OF_A_DELETION_EACH_OTHER,
    OF_A_LISTING,
    OF_A_LOOK,
    OF_A_NEW_FILE,
    Requests,
)
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import CutOvertakenError
from dagster_ckpt.io.fsspec import IDLE_CONNECTION_S, FsspecFileIO
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.testing.trial_snapshots import TRIAL_STREAM, TrialStream

FIRST = {"id-1.sst": b"s" * 30_000, "offsets/1": b"v1"}
SECOND = {**FIRST, "id-2.sst": b"t" * 30_000, "offsets/2": b"v1"}
THIRD = {**SECOND, "id-3.sst": b"u" * 30_000}


@dataclass(frozen=True)
class Far:
    meter: Meter
    storage: FileSystemCheckpointStorage
    near: s3fs.S3FileSystem

    @property
    def stream(self) -> TrialStream:
        return TrialStream(open_store(self.storage, TRIAL_STREAM))

    def counted(self) -> dict[str, int]:
        return dict(self.meter.taken().kinds)


@pytest.fixture
def far(s3_options: dict[str, Any]) -> Iterator[Far]:
    bucket = uuid.uuid4().hex
    near = s3fs.S3FileSystem(**s3_options, use_listings_cache=False)
    near.mkdir(bucket)
    with slow_link(s3_options["endpoint_url"].rpartition(":")[2]) as (port, meter):
        options = {**s3_options, "endpoint_url": f"http://127.0.0.1:{port}"}
        yield Far(meter, FileSystemCheckpointStorage(f"s3://{bucket}/c", storage_options=options), near)


def test_a_checkpoint_on_top_of_the_process_own_makes_three_requests_one_after_the_other(far: Far) -> None:
    stream = far.stream
    base = stream.checkpoint(1, FIRST)
    assert far.counted() == {"PUT": 2, "LIST": 1}
    base = stream.checkpoint(2, SECOND, base)
    taken = far.meter.taken()
    assert [each.kind for each in taken.requests] == ["PUT", "LIST", "PUT"]
    assert taken.round_trips == 3
    # Another process reads the base and lists its objects first.
    base = far.stream.checkpoint(3, THIRD, base)
    assert far.counted() == {"GET": 1, "PUT": 2, "LIST": 2}
    assert far.stream.restored(base) == THIRD


def test_the_connection_of_a_checkpoint_is_there_for_the_next(far: Far) -> None:
    files = FsspecFileIO(far.storage.checkpoint_location.url, far.storage.storage_options)
    files.write("a", [b"a"])
    assert files._fs.s3.meta.config.connector_args["keepalive_timeout"] == IDLE_CONNECTION_S
    # What a user sets goes before.
    own = {"config_kwargs": {"connector_args": {"keepalive_timeout": 3}, "max_pool_connections": 4}}
    files = FsspecFileIO(far.storage.checkpoint_location.url, {**far.storage.storage_options, **own})
    files.write("a", [b"a"])
    config = files._fs.s3.meta.config
    assert (config.connector_args["keepalive_timeout"], config.max_pool_connections) == (3, 4)


def test_a_restore_makes_one_request_for_the_metadata_and_one_for_each_object(far: Far) -> None:
    stream = far.stream
    location = stream.checkpoint(2, SECOND, stream.checkpoint(1, FIRST))
    far.meter.taken()
    assert far.stream.restored(location) == SECOND
    assert far.counted() == {"GET": 3}


def test_a_checkpoint_and_the_deletion_of_the_one_before_make_the_requests_of_the_bill(far: Far) -> None:
    stream = far.stream
    first = stream.checkpoint(1, FIRST)
    second = stream.checkpoint(2, SECOND, first)
    far.meter.taken()
    third = stream.checkpoint(3, THIRD, second)
    assert far.counted() == counts(OF_A_CHECKPOINT)
    stream.store.discard(second)
    # Beside the one that is deleted, two others are there.
    found = Requests(**{kind.lower(): count for kind, count in far.counted().items()})
    assert replace(found, delete=0) == replace(OF_A_DELETION + OF_A_DELETION_EACH_OTHER * 2, delete=0)
    assert stream.restored(first) == FIRST
    assert stream.restored(third) == THIRD


def test_reading_a_live_directory_in_a_bucket_makes_the_requests_of_the_bill(
    far: Far, tmp_path: Path, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("key", "secret"):
        monkeypatch.setenv({"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY"}[name], s3_options[name])
    monkeypatch.setenv("AWS_ENDPOINT_URL", far.storage.storage_options["endpoint_url"])
    live = f"{far.storage.checkpoint_location.url.removeprefix('s3://')}/live"
    engine = Engine(tmp_path, f"{far.storage.checkpoint_location.url}", far.storage.storage_options)
    engine.running = LiveDirectory(f"s3a://{live}")
    partitions, base, there = 2, None, set[Path]()
    for batch in range(3, 6):
        write_batches(
            engine.live,
            partitions=partitions,
            first=0 if batch == 3 else batch,
            last=batch,
            changelog_bytes=2_000,
            sst_bytes=40_000,
        )
        for path in {path for path in engine.live.rglob("*") if path.is_file()} - there:
            there.add(path)
            far.near.put_file(str(path), f"{live}/{path.relative_to(engine.live)}")
        far.meter.taken()
        base = engine.checkpoint(base).location
    found = far.meter.taken().kinds
    estimate = OF_A_LISTING + OF_A_NEW_FILE * partitions + OF_A_CHECKPOINT
    # Few new bytes are in the metadata alone.
    assert (found["PUT"], found["LIST"], found["HEAD"]) == (estimate.put - 1, estimate.list, estimate.head)
    # A file source's log is read whole: up to ten entries.
    assert abs(found["GET"] - estimate.get) <= 5
    engine.running.positions()
    assert far.counted() == counts(OF_A_LOOK)


def counts(requests: Requests) -> dict[str, float]:
    return {kind.upper(): count for kind, count in vars(requests).items() if count}


def test_an_object_that_another_program_deleted_is_missed_before_the_snapshot_is_visible(far: Far) -> None:
    stream = far.stream
    base = stream.checkpoint(1, FIRST)
    for path in far.near.find(f"{base.removeprefix('s3://').rpartition('/')[0]}/shared"):
        far.near.rm_file(path)
    with pytest.raises(CutOvertakenError, match=r"was not completed.*is missing"):
        stream.checkpoint(2, SECOND, base)
    assert stream.store.checkpoints() == [base]
    # The cut is taken again, and this time nothing is shared.
    again = stream.checkpoint(2, SECOND, base)
    assert far.stream.restored(again) == SECOND
