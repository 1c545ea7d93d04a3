"""Snapshots that extend an earlier one: they look at what is new only, and hold what a full snapshot holds."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from live_files import HDFS, ROCKSDB, LiveFiles, changelog, snapshot_zip

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir import state_files
from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.state_bytes import table

PARTITIONS = 3


@dataclass
class Query:
    """A live directory that grows, and the store of its snapshots."""

    files: LiveFiles
    store: SnapshotStore
    provider: str
    batch: int = -1
    snapshots: list[str] = field(default_factory=list)

    def commit(self, *, change: bool = True) -> None:
        """One batch: sources, offsets, state, commit."""
        self.batch += 1
        batch = self.batch
        self.files.source_entry(str(batch))
        self.files.offsets(batch, f'{{"logOffset":{batch}}}', provider=self.provider, partitions=PARTITIONS)
        for partition in range(PARTITIONS) if change else ():
            suffix = "delta" if self.provider == HDFS else "changelog"
            self.files.put(f"state/0/{partition}/{batch + 1}.{suffix}", os.urandom(30_000))
        self.files.commit(batch)

    def state_snapshot(self) -> None:
        """The snapshot of the newest version, in every partition."""
        for partition in range(PARTITIONS):
            store = f"state/0/{partition}"
            if self.provider == HDFS:
                self.files.put(f"{store}/{self.batch + 1}.snapshot", os.urandom(50_000))
            else:
                name = f"000009-{partition}-{self.batch}.sst"
                content = table(os.urandom(50_000))
                self.files.put(f"{store}/SSTs/{name}", content)
                self.files.put(f"{store}/{self.batch + 1}.zip", snapshot_zip((name, len(content))))

    def snapshot(self, *, base: str | None = None) -> bool:
        """Take a snapshot; returns whether it extends the base."""
        number = len(self.snapshots)
        earlier = self.store.base(base)
        with staged_cut(self.files.live, carry_in_flight=False, base=earlier) as staged:
            header = SnapshotHeader(
                snapshot_id=str(number),
                stream_id="stream",
                kind=SnapshotKind.CHECKPOINT,
                number=number,
                created_at_ms=0,
                batch_id=staged.cut.batch_id,
                query_id=staged.cut.query_id,
                properties=dict(staged.cut.properties),
            )
            extends = staged.cut.extends
            stored = self.store.write_checkpoint(
                header, staged.files, base=earlier, extends=extends, stage=staged.stage
            )
        self.snapshots.append(stored.location)
        return extends

    def contents(self, location: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}

        def take(entry: FileEntry, chunks: Iterable[bytes]) -> None:
            found[entry.path] = b"".join(chunks)

        self.store.extract(location, take)
        return found

    def assert_last_is_whole(self) -> None:
        """The last snapshot has what a full one of the same moment has."""
        last = self.snapshots[-1]
        assert not self.snapshot()
        assert self.contents(last) == self.contents(self.snapshots[-1])
        assert self.store.verify(last) == []


@pytest.fixture(params=[HDFS, ROCKSDB], ids=["heap", "rocksdb"])
def query(request: pytest.FixtureRequest, tmp_path: Path) -> Query:
    files = LiveFiles(tmp_path / "live-0")
    files.query_id()
    files.operator()
    store = open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), "stream")
    made = Query(files, store, request.param)
    made.commit()
    made.state_snapshot()
    made.snapshot()
    return made


def test_a_snapshot_after_some_batches_extends_the_one_before(query: Query) -> None:
    for batches in (1, 2, 3):
        for _ in range(batches):
            query.commit()
        assert query.snapshot(base=query.snapshots[-1])
        query.assert_last_is_whole()


def test_a_chain_of_extending_snapshots_stays_whole(query: Query) -> None:
    for _ in range(12):
        query.commit()
        assert query.snapshot(base=query.snapshots[-1])
    query.assert_last_is_whole()
    query.commit()
    # A restore should not have to replay changes without end.
    assert not query.snapshot(base=query.snapshots[-2])


def test_a_newer_snapshot_is_found_when_the_chain_has_become_long(query: Query) -> None:
    for _ in range(12):
        query.commit()
        query.snapshot(base=query.snapshots[-1])
    query.state_snapshot()
    query.commit()
    assert not query.snapshot(base=query.snapshots[-1])
    assert len([path for path in query.contents(query.snapshots[-1]) if path.endswith((".delta", ".changelog"))]) == 3
    query.commit()
    assert query.snapshot(base=query.snapshots[-1])
    query.assert_last_is_whole()


def test_only_what_is_new_is_read_and_written(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    read: list[str] = []
    folder = type(query.files.live.folder)
    list_names, look_at = folder.listing, folder.look_at

    def listing(self: FileIO, path: str) -> object:
        listed.append(path)
        return list_names(self, path)

    def look_at_many(self: FileIO, paths: list[str], at_most: int) -> object:
        read.extend(paths)
        return look_at(self, paths, at_most)

    monkeypatch.setattr(folder, "listing", listing)
    monkeypatch.setattr(folder, "look_at", look_at_many)
    query.commit()
    assert query.snapshot(base=query.snapshots[-1])
    # What an operator notes of itself is looked at, and no store.
    assert [path for path in listed if path.startswith("state/")] == ["state/0/_metadata/v2"]
    state = [path for path in read if path.startswith("state/") and "_metadata" not in path]
    assert len(state) == PARTITIONS


def test_new_state_that_is_much_for_memory_is_not_read_before_it_is_written(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "HELD_IN_MEMORY_BYTES", 0)
    query.commit()
    assert query.snapshot(base=query.snapshots[-1])
    query.assert_last_is_whole()


def another_query(query: Query) -> None:
    query.files.query_id("another")


def a_replayed_base_batch(query: Query) -> None:
    # As after a roll-back to an earlier batch: the commit has the same name, and is another file.
    query.files.live.folder.write("commits/0", [query.files.live.folder.read("commits/0")])


def a_purged_base_batch(query: Query) -> None:
    query.commit()
    query.files.remove("commits/0")


def another_operator(query: Query) -> None:
    query.files.operator(1)
    for partition in range(PARTITIONS):
        query.files.put(f"state/1/{partition}/2.{'delta' if query.provider == HDFS else 'changelog'}", b"d" * 9)
        query.files.put(f"state/1/{partition}/1.{'delta' if query.provider == HDFS else 'changelog'}", b"d" * 9)


def a_snapshot_in_place_of_a_change(query: Query) -> None:
    suffix = "delta" if query.provider == HDFS else "changelog"
    query.state_snapshot()
    query.files.remove(f"state/0/1/{query.batch + 1}.{suffix}")


def a_lost_data_object(query: Query) -> None:
    folder = Path(query.snapshots[-1].removeprefix("file://")).parent / "shared"
    for pack in folder.iterdir():
        pack.unlink()


@pytest.mark.parametrize(
    "change",
    [
        another_query,
        a_replayed_base_batch,
        a_purged_base_batch,
        another_operator,
        a_snapshot_in_place_of_a_change,
        a_lost_data_object,
    ],
)
def test_where_the_state_may_not_descend_from_the_base_a_full_snapshot_is_taken(
    query: Query, change: Callable[[Query], None]
) -> None:
    query.commit()
    change(query)
    assert not query.snapshot(base=query.snapshots[-1])
    query.assert_last_is_whole()


def test_where_no_batch_was_committed_nothing_is_looked_at(query: Query) -> None:
    for partition in range(PARTITIONS):
        # Whatever lies there: the snapshot of this very commit has what a restore needs.
        for path in (query.files.root / f"state/0/{partition}").glob("*.*"):
            path.rename(path.with_name(f".{path.name}"))
    assert query.snapshot(base=query.snapshots[-1])
    assert query.contents(query.snapshots[-1]) == query.contents(query.snapshots[-2])


@pytest.mark.parametrize("query", [ROCKSDB], indirect=True, ids=["rocksdb"])
def test_without_changelogs_every_snapshot_is_a_cut_of_its_own(query: Query) -> None:
    query.commit(change=False)
    query.state_snapshot()
    assert not query.snapshot(base=query.snapshots[-1])
    query.assert_last_is_whole()


def test_in_format_v2_the_lineage_has_to_lead_to_the_base(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path / "live-0")
    files.batches(0, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1_a.zip", snapshot_zip())
    files.commit(0, {"0": [["a"]]})
    store = open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), "stream")
    query = Query(files, store, ROCKSDB)
    query.snapshot()
    assert query.snapshot(base=query.snapshots[0])
    assert query.contents(query.snapshots[1]) == query.contents(query.snapshots[0])

    def batch(number: int, uid: str, lineage: dict[int, str]) -> None:
        files.offsets(number, f'{{"logOffset":{number}}}', provider=ROCKSDB)
        files.source_entry(str(number))
        files.put(f"state/0/0/{number + 1}_{uid}.changelog", changelog(lineage))
        files.commit(number, {"0": [[uid]]})

    batch(1, "b", {1: "a"})
    batch(2, "c", {1: "a", 2: "b"})
    assert query.snapshot(base=query.snapshots[0])
    query.assert_last_is_whole()
    assert {"state/0/0/2_b.changelog", "state/0/0/3_c.changelog"} <= set(query.contents(query.snapshots[2]))

    # Another attempt at the batch of the base made the version that this one is built on.
    files.put("state/0/0/1_x.zip", snapshot_zip())
    batch(2, "d", {1: "x", 2: "b"})
    assert not query.snapshot(base=query.snapshots[0])


def test_in_format_v2_the_snapshot_that_the_lineage_begins_with_has_to_be_in_the_base(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path / "live-0")
    files.batches(0, provider=ROCKSDB)
    files.operator()
    query = Query(files, open_store(FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots"), "stream"), ROCKSDB)

    def batch(number: int, uid: str, lineage: dict[int, str]) -> None:
        files.offsets(number, f'{{"logOffset":{number}}}', provider=ROCKSDB)
        files.source_entry(str(number))
        files.put(f"state/0/0/{number + 1}_{uid}.changelog", changelog(lineage))
        files.commit(number, {"0": [[uid]]})

    files.put("state/0/0/1_a.changelog", changelog({}))
    files.commit(0, {"0": [["a"]]})
    batch(1, "b", {1: "a"})
    query.snapshot()
    assert "state/0/0/2_b.changelog" in query.contents(query.snapshots[0])

    # Uploaded after the snapshot was cut; from now on lineages begin with it.
    files.put("state/0/0/2_b.zip", snapshot_zip())
    batch(2, "c", {2: "b"})
    assert not query.snapshot(base=query.snapshots[0])
    query.assert_last_is_whole()
    assert "state/0/0/2_b.zip" in query.contents(query.snapshots[1])

    batch(3, "d", {2: "b", 3: "c"})
    assert query.snapshot(base=query.snapshots[1])
    query.assert_last_is_whole()
