"""Any life of a query's snapshots: in whatever order, a snapshot that is retained is whole, and nothing else stays.

Real queries are run once and kept batch by batch (`recorded_lives`). Random lives are played on what they wrote:
batches, checkpoints, savepoints, restores, ways back, retention, sweeps, and kills in the middle of any of them. At the
end Spark itself resumes from some of the directories that were restored meanwhile.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3
from fragile_store import INLINE_THRESHOLDS, SAVEPOINT_ROOT, Storage
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyspark.sql import SparkSession
from recorded_lives import Position, Recording, bring_output_back, record
from spark_scenarios import HEAP, ROCKSDB_CHANGELOG, ROCKSDB_V2, Workload, run_to_the_end
from spark_stateful_queries import counts_for_ever

from dagster_ckpt.errors import SnapshotAbortedError
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.garbage_collection import DELETING_NAME
from dagster_ckpt.snapshot.manifest import SnapshotHeader, object_name
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.snapshot.reuse import Source
from dagster_ckpt.snapshot.writer import METADATA_NAME
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, Filler, materialize
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.needs import by_name
from tests.support.thorough import either

pytestmark = pytest.mark.spark

BACKENDS = {"heap": HEAP, "changelog": ROCKSDB_CHANGELOG, "v2-changelog": ROCKSDB_V2}
STEPS = st.integers(1, 12)
INDEX = st.integers(0, 99)
ANY_BASE = st.none() | INDEX
OTHERS = ("discard", "sweep", "checkpoint", "abandon")
RESUMED = 3
# By chance, few examples restore fewer.
ROUNDS = 4


@dataclass(frozen=True)
class Restored:
    """A restored directory, and where its query is."""

    path: Path
    position: Position


@pytest.fixture(scope="module", params=by_name(BACKENDS))
def recording(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    folder = tmp_path_factory.mktemp(request.param)
    work = Workload(counts_for_ever, BACKENDS[request.param], folder, mode="update")
    return record(spark, work, folder / "kept", branches=(1, 3))


@pytest.mark.thorough(but="changelog")
def test_whatever_happens_a_retained_snapshot_is_whole_and_nothing_else_stays(
    spark: SparkSession, recording: Recording, tmp_path: Path
) -> None:
    restored: dict[object, Restored] = {}
    for _ in range(ROUNDS):
        run_state_machine_as_test(
            lambda: SnapshotLife(recording, tmp_path, restored),
            settings=settings(
                max_examples=either(quick=25, thorough=60),
                stateful_step_count=25,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if len(restored) >= RESUMED:
            break
    assert len(restored) >= RESUMED
    for which in list(restored.values())[:RESUMED]:
        timeline = which.position.timeline
        bring_output_back(recording.work, which.position)
        run_to_the_end(spark, recording.work, LiveDirectory(str(which.path)), files_per_batch=timeline.files_per_batch)
        rows = [row for _, rows in sorted(timeline.output.items()) for row in rows.splitlines()]
        assert recording.work.rows(spark) == rows


class SnapshotLife(RuleBasedStateMachine):
    """One stream: its live directory, its snapshots, and what may happen to them."""

    def __init__(self, recording: Recording, kept: Path, restored: dict[object, Restored]) -> None:
        super().__init__()
        self.recording = recording
        self.kept, self.restored = kept, restored
        self.folder = Path(tempfile.mkdtemp(dir=kept))
        self.generation = self.number = 0
        self.snapshots: dict[str, tuple[Position, bool]] = {}
        self.base: str | None = None
        self.is_rerun = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # What happens ------------------------------------------------------------------------------------------------

    @initialize(inline_threshold=st.sampled_from(INLINE_THRESHOLDS), batch=st.sampled_from([0, 1, 3]))
    def begin(self, inline_threshold: int | None, batch: int) -> None:
        self.storage = Storage(inline_threshold)
        self.store = self.storage.process()
        self.position = Position(self.recording.main, 0)
        shutil.copytree(self.recording.main.kept / "0", self.live_path, copy_function=_link)
        self.live = LiveDirectory(str(self.live_path))
        if batch:
            self.position = self.position.play_to(batch, self.live_path, copied=False)
        # Most of what can go wrong begins with one of each, where the recording branches.
        self.base = self.checkpoint(self.store, carry_in_flight=False)
        self.savepoint(self.store, carry_in_flight=True, base=None)

    @precondition(lambda self: self.position.batch < self.position.timeline.last)
    @rule(batches=st.integers(1, 3))
    def run(self, batches: int) -> None:
        self.play(batches)

    def play(self, batches: int) -> None:
        batch = min(self.position.batch + batches, self.position.timeline.last)
        self.position = self.position.play_to(batch, self.live_path, copied=self.is_rerun)

    @rule(carry_in_flight=st.booleans(), batches=st.integers(0, 2), of=ANY_BASE)
    def take_checkpoint(self, carry_in_flight: bool, batches: int, of: int | None) -> None:
        """A base that has nothing to do with what is cut now costs bytes, and nothing else."""
        self.play(batches)
        base = self.base if of is None or not self.snapshots else self.snapshot(of)
        self.base = self.checkpoint(self.store, carry_in_flight=carry_in_flight, base=base)

    @rule(carry_in_flight=st.booleans(), shares=st.booleans())
    def take_savepoint(self, carry_in_flight: bool, shares: bool) -> None:
        self.savepoint(self.store, carry_in_flight=carry_in_flight, base=self.base if shares else None)

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX, linked=st.booleans())
    def restore(self, index: int, linked: bool) -> None:
        location = self.snapshot(index)
        target = self.folder / "restored"
        self.restore_into(location, target, linked=linked)
        position, in_flight = self.snapshots[location]
        key = (position.batch, position.timeline.first, linked)
        # The batch after the first moment of a branch was planned before it: only with that plan it is the same.
        goes_on_alike = in_flight or position.timeline.parent is None or position.batch > position.timeline.first
        if key not in self.restored and position.batch < position.timeline.last and goes_on_alike:
            path = self.kept / f"restored-{len(self.restored)}"
            target.rename(path)
            self.restored[key] = Restored(path, position)
        shutil.rmtree(target, ignore_errors=True)

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX, linked=st.booleans(), way=INDEX, batches=st.integers(0, 2))
    def go_back(self, index: int, linked: bool, way: int, batches: int) -> None:
        location = self.snapshot(index)
        old = self.live_path
        self.generation += 1
        self.restore_into(location, self.live_path, linked=linked, donor=old)
        shutil.rmtree(old)
        self.live = LiveDirectory(str(self.live_path))
        ways = self.recording.continuations(self.snapshots[location][0])
        self.position = ways[way % len(ways)]
        self.is_rerun = True
        self.base = location
        self.play(batches)

    @rule(num_retained=st.integers(1, 3))
    def subsume(self, num_retained: int) -> None:
        for location in self.checkpoints()[:-num_retained]:
            self.discard(self.store, location)

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX)
    def discard_one(self, index: int) -> None:
        self.discard(self.store, self.snapshot(index))

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX, of=INDEX, meanwhile=st.lists(st.sampled_from(OTHERS), max_size=3))
    def take_checkpoint_while_others_work(self, index: int, of: int, meanwhile: list[str]) -> None:
        """The base is protected, and what the attempt has written is not swept."""
        base = self.snapshot(of)
        other = self.storage.process()

        def work() -> None:
            number = self.number
            for what in meanwhile:
                if what == "sweep":
                    other.sweep(older_than_ms=0, under_way=[number])
                elif what == "checkpoint":
                    self.checkpoint(other, carry_in_flight=False, base=base)
                elif what == "abandon":
                    with pytest.raises(SnapshotAbortedError):
                        self.checkpoint(other, carry_in_flight=False, base=base, aborts=True)
                elif (location := self.snapshot(index)) != base:
                    self.discard(other, location, protected=[base])

        self.base = self.checkpoint(self.store, carry_in_flight=False, base=base, meanwhile=work)

    @rule()
    def sweep(self) -> None:
        self.store.sweep(older_than_ms=0)
        assert self.storage.objects() == self.needed_objects()

    @rule(step=STEPS, applied=st.booleans(), carry_in_flight=st.booleans(), is_savepoint=st.booleans())
    def die_writing(self, step: int, applied: bool, carry_in_flight: bool, is_savepoint: bool) -> None:
        with self.storage.killed_at(step, applied=applied):
            take = self.savepoint if is_savepoint else self.checkpoint
            take(self.store, carry_in_flight=carry_in_flight, base=self.base)
        self.store = self.storage.process()
        for location in self.published() - self.snapshots.keys():
            # Its process died before it could say so.
            self.snapshots[location] = (self.position, self.in_flight(carry_in_flight))

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX, step=STEPS, applied=st.booleans())
    def die_discarding(self, index: int, step: int, applied: bool) -> None:
        location = self.snapshot(index)
        with self.storage.killed_at(step, applied=applied):
            self.store.discard(location)
        self.store = self.storage.process()
        if location in self.published():
            return
        del self.snapshots[location]
        if location.startswith(SAVEPOINT_ROOT):
            # Sweeping leaves savepoints alone, as they belong to a person; who deletes one asks again.
            self.store.discard(location)

    @rule(step=STEPS, applied=st.booleans())
    def die_sweeping(self, step: int, applied: bool) -> None:
        with self.storage.killed_at(step, applied=applied):
            self.store.sweep(older_than_ms=0)
        self.store = self.storage.process()

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def every_retained_snapshot_is_whole(self) -> None:
        assert self.published() == self.snapshots.keys()
        for location, (position, in_flight) in self.snapshots.items():
            assert self.store.verify(location) == []
            files = {entry.path: entry.digest for entry in self.store.manifest(location).files}
            logs = position.logs(carry_in_flight=in_flight)
            assert logs.items() <= files.items()
            assert {path for path in files if not path.startswith("state/")} == {
                path for path in logs if not path.startswith("state/")
            }
            assert files.items() <= position.written().items()

    # How ---------------------------------------------------------------------------------------------------------

    @property
    def live_path(self) -> Path:
        return self.folder / f"live-{self.generation}"

    def snapshot(self, index: int) -> str:
        return list(self.snapshots)[index % len(self.snapshots)]

    def checkpoints(self) -> list[str]:
        return [location for location in self.store.checkpoints() if location in self.snapshots]

    def published(self) -> set[str]:
        suffix = f"/{METADATA_NAME}"
        return {url.removesuffix(suffix) for url in self.storage.objects() if url.endswith(suffix)}

    def in_flight(self, carry_in_flight: bool) -> bool:
        return carry_in_flight and cut(self.live, carry_in_flight=True).in_flight is not None

    def checkpoint(
        self,
        store: ObjectSnapshotStore,
        *,
        carry_in_flight: bool,
        base: str | None = None,
        meanwhile=lambda: None,
        aborts: bool = False,
    ) -> str:
        earlier = store.base(base)
        with staged_cut(self.live, carry_in_flight=carry_in_flight, base=earlier) as staged:

            def stage(files: Sequence[Source]) -> list[Source]:
                meanwhile()
                return staged.stage(files)

            self.number += 1
            header = self.header(SnapshotKind.CHECKPOINT, staged.cut)
            extends = staged.cut.extends
            location = store.write_checkpoint(
                header, staged.files, base=earlier, extends=extends, stage=stage, should_abort=lambda: aborts
            ).location
        self.snapshots[location] = (self.position, staged.cut.in_flight is not None)
        return location

    def savepoint(self, store: ObjectSnapshotStore, *, carry_in_flight: bool, base: str | None) -> str:
        with staged_cut(self.live, carry_in_flight=carry_in_flight) as staged:
            self.number += 1
            header = self.header(SnapshotKind.SAVEPOINT, staged.cut)
            location = store.write_savepoint(header, staged.files, base=base, stage=staged.stage).location
        self.snapshots[location] = (self.position, staged.cut.in_flight is not None)
        return location

    def header(self, kind: SnapshotKind, taken) -> SnapshotHeader:
        return SnapshotHeader(
            snapshot_id=str(self.number),
            stream_id="stream",
            kind=kind,
            number=self.number,
            created_at_ms=0,
            batch_id=taken.batch_id,
            query_id=taken.query_id,
            properties=dict(taken.properties),
        )

    def discard(self, store: ObjectSnapshotStore, location: str, protected: Iterable[str] = ()) -> None:
        store.discard(location, protected=protected)
        self.snapshots.pop(location, None)

    def restore_into(self, location: str, target: Path, *, linked: bool, donor: Path | None = None) -> None:
        """As a stream does it; then look at every byte."""
        linked_from = Donor(LiveDirectory(str(donor or self.live_path))) if linked else None

        def fill(filler: Filler) -> None:
            def missing(entries: Iterable[FileEntry]) -> Iterable[FileEntry]:
                return filler.link_unchanged(entries, linked_from)

            self.store.extract(location, lambda entry, chunks: filler(entry.path, chunks), missing=missing)

        live = LiveDirectory(str(target))
        materialize(live, fill, is_whole=True)
        position, in_flight = self.snapshots[location]
        files = {entry.path: entry.digest for entry in self.store.manifest(location).files}
        assert {path: blake3(live.folder.read(path)).hexdigest() for path, _ in live.folder.find()} == files
        assert inspect_live_directory(live).status is LiveStatus.GOOD
        again = cut(live, carry_in_flight=True)
        assert (again.batch_id, again.in_flight is not None) == (position.batch, in_flight)

    def needed_objects(self) -> set[str]:
        needed = set()
        for location in self.snapshots:
            root, directory = location.rsplit("/", 1)
            # A deletion that was cut off at its first step has changed nothing yet.
            needed |= {f"{location}/{METADATA_NAME}", f"{location}/{DELETING_NAME}"}
            needed |= {f"{root}/{object_name(directory, name)}" for name in self.store.manifest(location).objects}
        return needed & self.storage.objects()


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)
