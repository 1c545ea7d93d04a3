"""`CheckpointStorageContract`: what every checkpoint storage guarantees."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage, DeploymentStorage
from dagster_ckpt.errors import SnapshotAbortedError, SnapshotNotFoundError, SnapshotTooLargeError, StorageAccessError
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.reuse import Source, SourceFile
from dagster_ckpt.testing.trial_snapshots import FILES, TRIAL_STREAM, DyingWrite, Moment, TrialStream
from dagster_ckpt.values.modes import SnapshotKind


class CheckpointStorageContract:
    """The required behaviour of a checkpoint storage, as pytest tests.

    Derive a class `Test…` from it and define a fixture `storage` that returns the storage, empty at the beginning of
    each test.

    Attributes:
        outlives_the_process: Whether other processes can see what was written.
        size_limit: Maximum size of a snapshot in bytes; None: no limit.
    """

    outlives_the_process: ClassVar[bool] = True
    size_limit: ClassVar[int | None] = None

    @pytest.fixture
    def storage(self) -> CheckpointStorage:
        """Return an empty storage: override this."""
        pytest.fail(f"{type(self).__name__} has no fixture `storage`: give it one that returns the storage to test.")

    @pytest.fixture
    def stream(self, storage: CheckpointStorage) -> TrialStream:
        return self.opened(storage)

    def opened(self, storage: CheckpointStorage) -> TrialStream:
        """Return the storage as another process or thread opens it."""
        return TrialStream(open_store(storage, TRIAL_STREAM))

    # Configuration

    def test_it_is_configuration_that_pickles(self, storage: CheckpointStorage) -> None:
        copied = pickle.loads(pickle.dumps(storage))
        assert copied == storage
        assert hash(copied) == hash(storage)

    def test_its_options_are_described(self, storage: CheckpointStorage) -> None:
        assert all(option.option and option.effect for option in storage.describe())

    def test_a_deployment_that_says_nothing_changes_nothing(self, storage: CheckpointStorage) -> None:
        configured = storage.configure(DeploymentStorage())
        assert type(configured) is type(storage)
        assert configured.configure(DeploymentStorage()) == configured
        assert [option.value for option in configured.describe()] == [option.value for option in storage.describe()]
        assert pickle.loads(pickle.dumps(configured)) == configured

    def test_what_the_deployment_says_does_not_keep_it_from_working(self, storage: CheckpointStorage) -> None:
        said = DeploymentStorage(file_state_size_threshold=10, write_buffer_size=8192)
        stream = self.opened(storage.configure(said))
        assert stream.restored(stream.checkpoint(1, FILES)) == FILES

    def test_it_can_be_checked_beforehand_and_that_leaves_no_trace(self, stream: TrialStream) -> None:
        stream.store.check_access()
        assert stream.store.checkpoints() == []
        assert stream.store.sweep(older_than_ms=0) == []

    # Write, read, list, delete

    def test_a_new_stream_has_no_checkpoints(self, stream: TrialStream) -> None:
        assert stream.store.checkpoints() == []
        assert stream.store.sweep(older_than_ms=0) == []

    def test_a_checkpoint_gives_back_what_was_put_in(self, stream: TrialStream) -> None:
        location = stream.checkpoint(7, FILES)
        assert stream.restored(location) == FILES
        assert stream.restored(f"{location}/_metadata") == FILES
        assert stream.store.verify(location) == []
        manifest = stream.store.manifest(location)
        assert (manifest.header.number, manifest.header.kind) == (7, SnapshotKind.CHECKPOINT)

    def test_only_what_is_wanted_is_handed_out(self, stream: TrialStream) -> None:
        location = stream.checkpoint(1, FILES)
        found: list[bytes] = []
        stream.store.extract(location, lambda _, chunks: found.append(b"".join(chunks)), only="1.zip".__eq__)
        assert found == [FILES["1.zip"]]

    def test_checkpoints_are_listed_in_the_order_of_their_numbers(self, stream: TrialStream) -> None:
        locations = [stream.checkpoint(number, FILES) for number in (10, 9, 100)]
        assert stream.store.checkpoints() == [locations[1], locations[0], locations[2]]

    def test_a_number_is_used_once(self, stream: TrialStream) -> None:
        location = stream.checkpoint(1, FILES)
        with pytest.raises(StorageAccessError):
            stream.checkpoint(1, {"other": b"o" * 30_000})
        assert stream.restored(location) == FILES

    def test_a_shared_file_dies_with_its_last_referrer(self, stream: TrialStream) -> None:
        first = stream.checkpoint(1, FILES)
        second = stream.checkpoint(2, {**FILES, "1.zip": b"y" * 25_000}, base=first)
        third = stream.checkpoint(3, {"id-1.sst": FILES["id-1.sst"]}, base=second)
        stream.store.discard(first)
        stream.store.discard(second)
        assert stream.store.checkpoints() == [third]
        assert stream.restored(third) == {"id-1.sst": FILES["id-1.sst"]}
        stream.store.discard(third)
        assert stream.store.checkpoints() == []
        assert stream.store.sweep(older_than_ms=0) == []

    def test_a_snapshot_that_is_gone_is_not_found_and_can_be_discarded_again(self, stream: TrialStream) -> None:
        location = stream.checkpoint(1, FILES)
        stream.store.discard(location)
        stream.store.discard(location)
        with pytest.raises(SnapshotNotFoundError, match="chk-1"):
            stream.store.manifest(location)
        with pytest.raises(SnapshotNotFoundError, match="chk-1"):
            stream.restored(location)
        assert len(stream.store.verify(location)) == 1

    def test_a_snapshot_under_way_protects_its_base(self, stream: TrialStream) -> None:
        base = stream.checkpoint(1, FILES)
        with pytest.raises(StorageAccessError):
            stream.store.discard(base, protected=[f"{base}/_metadata"])
        assert stream.restored(base) == FILES

    def test_a_base_that_is_gone_costs_a_full_snapshot_and_nothing_else(self, stream: TrialStream) -> None:
        base = stream.checkpoint(1, FILES)
        stream.store.discard(base)
        assert stream.restored(stream.checkpoint(2, FILES, base=base)) == FILES

    def test_what_is_stored_outlives_the_process_that_stored_it(self, storage: CheckpointStorage) -> None:
        location = self.opened(storage).checkpoint(1, FILES)
        other = self.opened(pickle.loads(pickle.dumps(storage)))
        assert other.store.checkpoints() == ([location] if self.outlives_the_process else [])
        if self.outlives_the_process:
            assert other.restored(location) == FILES

    # Savepoints

    def test_a_savepoint_stands_alone(self, stream: TrialStream) -> None:
        checkpoint = stream.checkpoint(1, FILES)
        savepoint = stream.savepoint(2, FILES, base=checkpoint)
        assert not [name for name in stream.store.manifest(savepoint).objects if "/" in name]
        stream.store.discard(checkpoint)
        stream.store.sweep(older_than_ms=0)
        assert stream.restored(savepoint) == FILES
        assert stream.store.checkpoints() == []

    def test_a_checkpoint_outlives_the_savepoint_it_shares_with(self, stream: TrialStream) -> None:
        savepoint = stream.savepoint(1, FILES)
        checkpoint = stream.checkpoint(2, FILES, base=savepoint)
        stream.store.discard(savepoint)
        assert stream.restored(checkpoint) == FILES

    def test_what_a_checkpoint_takes_over_from_a_savepoint_goes_with_no_other(self, stream: TrialStream) -> None:
        savepoint = stream.savepoint(1, FILES)
        first = stream.checkpoint(2, FILES, base=savepoint)

        def stage(files: list[Source]) -> Sequence[Source]:
            stream.store.discard(first, protected=[savepoint])
            return files

        second = stream.stored(3, FILES, base=savepoint, stage=stage).location
        assert stream.restored(second) == FILES

    # Several at once

    def test_several_threads_may_write_and_read_at_once(self, stream: TrialStream) -> None:
        with ThreadPoolExecutor(4) as pool:
            locations = list(
                pool.map(lambda number: stream.checkpoint(number, {**FILES, "n": bytes(number)}), range(1, 9))
            )
            contents = list(pool.map(stream.restored, locations))
        assert contents == [{**FILES, "n": bytes(number)} for number in range(1, 9)]

    def test_giving_up_takes_nothing_from_another_that_began_with_the_same_savepoint(self, stream: TrialStream) -> None:
        savepoint = stream.savepoint(1, FILES)
        made: list[str] = []

        def stage(_: list[Source]) -> Sequence[Source]:
            made.append(stream.checkpoint(3, FILES, base=savepoint))
            raise SnapshotAbortedError

        with pytest.raises(SnapshotAbortedError):
            stream.stored(2, FILES, base=savepoint, stage=stage)
        assert stream.restored(made[0]) == FILES

    # Whole or not at all

    def test_a_snapshot_is_seen_whole_or_not_at_all(self, stream: TrialStream) -> None:
        is_over = threading.Event()
        seen: dict[str, list[str]] = {}

        def look() -> None:
            while not is_over.is_set():
                for location in stream.store.checkpoints():
                    if location not in seen:
                        seen[location] = stream.store.verify(location)

        looker = threading.Thread(target=look)
        looker.start()
        try:
            written = [stream.checkpoint(number, {**FILES, "n": bytes(number)}) for number in range(1, 9)]
        finally:
            is_over.set()
            looker.join()
        assert set(seen) <= set(written)
        assert not [troubles for troubles in seen.values() if troubles]

    def test_it_is_not_listed_before_it_is_whole(self, stream: TrialStream) -> None:
        seen: list[list[str]] = []

        def should_abort() -> bool:
            seen.append(stream.store.checkpoints())
            return False

        location = stream.stored(1, FILES, should_abort=should_abort).location
        assert seen
        assert all(listed == [] for listed in seen)
        assert stream.store.checkpoints() == [location]

    def test_giving_up_leaves_nothing(self, stream: TrialStream) -> None:
        with pytest.raises(SnapshotAbortedError):
            stream.stored(1, FILES, should_abort=lambda: True)
        assert stream.store.checkpoints() == []
        assert stream.store.sweep(older_than_ms=0) == []

    def test_a_source_that_fails_leaves_nothing(self, stream: TrialStream) -> None:
        def fail() -> None:
            raise PermissionError("source")

        with pytest.raises(PermissionError, match="source"):
            stream.stored_of(1, [SourceFile("x", 30_000, None, fail)])  # type: ignore[arg-type]
        assert stream.store.checkpoints() == []
        assert stream.store.sweep(older_than_ms=0) == []

    @pytest.mark.parametrize("moment", Moment)
    def test_a_process_that_dies_while_it_writes_harms_nothing(
        self, storage: CheckpointStorage, stream: TrialStream, moment: Moment
    ) -> None:
        new = {**FILES, "1.zip": b"y" * 25_000}
        first = stream.checkpoint(1, FILES)

        died = DyingWrite(storage, 2, new, moment).run_in_process()

        after = self.opened(storage) if self.outlives_the_process else stream
        assert after.restored(first) == FILES
        if died or not self.outlives_the_process:
            assert after.store.checkpoints() == [first]
            second = after.checkpoint(2, new, base=first)
        else:
            second = after.store.checkpoints()[1]
        after.store.sweep(older_than_ms=0)
        assert after.store.verify(first) == []
        assert after.restored(second) == new
        after.store.discard(first)
        after.store.discard(second)
        assert after.store.sweep(older_than_ms=0) == []

    # Size

    def test_a_snapshot_above_the_limit_is_declined_and_one_at_the_limit_taken(self, stream: TrialStream) -> None:
        limit = self.size_limit
        at_the_limit = {"state": bytes(2**20 if limit is None else limit)}
        assert stream.restored(stream.checkpoint(1, at_the_limit)) == at_the_limit
        if limit is not None:
            with pytest.raises(SnapshotTooLargeError, match=str(limit)):
                stream.checkpoint(2, {"state": bytes(limit + 1)})
            assert len(stream.store.checkpoints()) == 1
