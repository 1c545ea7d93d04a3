"""How many requests a snapshot makes of an object store, counted by a proxy in front of moto."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import s3fs

from benchmarks.slow_link import Meter, slow_link
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import CutOvertakenError
from dagster_ckpt.snapshot.opening import open_store
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


def test_a_restore_makes_one_request_for_the_metadata_and_one_for_each_object(far: Far) -> None:
    stream = far.stream
    location = stream.checkpoint(2, SECOND, stream.checkpoint(1, FIRST))
    far.meter.taken()
    assert far.stream.restored(location) == SECOND
    assert far.counted() == {"GET": 3}


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
