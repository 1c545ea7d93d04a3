"""A stream that has run: a real catalog, a store with tiny snapshots, and a live directory, all written by hand."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from sqlalchemy import text

from dagster_ckpt.catalog.records import (
    EventType,
    Holder,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
    StateOrigin,
)
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.snapshot import object_store
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.streams import storage_at, stream_at

QUERY_ID = "11111111-2222"
STREAM = "orders"
HOLDER = Holder("unused", "run", "host", 1, 1, "boot")
# Above the inline threshold, so that every file has an object of its own to delete.
FILE_BYTES = 200


@contextmanager
def storage_clock_ahead(by_ms: int) -> Iterator[None]:
    """Let time have passed on the storage, whose clock alone says how old an object is."""
    real = object_store.storage_time_ms
    with patch.object(object_store, "storage_time_ms", lambda space: (real(space) or 0) + by_ms):
        yield


@dataclass
class Shelf:
    """The stream, and short words for what happens to it."""

    root: Path
    stream: StreamHandle
    storage: CheckpointStorage
    numbers: int = 0
    taken_by: str = "first"

    def __post_init__(self) -> None:
        self._store = self.stream.store

    @staticmethod
    def at(
        root: Path,
        *,
        num_retained: int = 3,
        storage: CheckpointStorage | None = None,
        catalog_url: str | None = None,
    ) -> Shelf:
        shelf = Shelf.reopened(root, num_retained=num_retained, storage=storage, catalog_url=catalog_url)
        stream = shelf.stream
        stream.register()
        shelf.execution("first")
        as_writer(stream.catalog, STREAM).streams.switch_live_directory(
            stream.live_directory(1, 0).url, origin=StateOrigin.empty(None)
        )
        shelf.write_live_directory()
        return shelf

    @staticmethod
    def reopened(
        root: Path,
        *,
        num_retained: int = 3,
        storage: CheckpointStorage | None = None,
        catalog_url: str | None = None,
    ) -> Shelf:
        """The stream as another process finds it."""
        storage = storage or storage_at(root)
        stream = stream_at(root, STREAM, catalog=catalog_url, storage=storage, num_retained=num_retained)
        return Shelf(root, stream, storage)

    def cleaning_up(self, cleanup: ExternalizedCheckpointCleanup) -> Shelf:
        self.stream = replace(self.stream, options=replace(self.stream.options, cleanup=cleanup))
        return self

    def reopened_store(self) -> SnapshotStore:
        """The store as another process opens it; what lives in this process's memory cannot be opened from another."""
        if isinstance(self.storage, JobManagerCheckpointStorage):
            return self._store
        return open_store(self.storage, STREAM)

    @property
    def live(self) -> Path:
        return self.root / "live" / STREAM / "live-1-0"

    def execution(self, execution_id: str) -> None:
        as_writer(self.stream.catalog, STREAM).executions.start(
            execution_id, run_id=f"run-{execution_id}", cause=StartCause.MANUAL, holder=HOLDER
        )

    def write_live_directory(self) -> None:
        """A stateless query that has committed batch 0 of a file source."""
        offsets = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {"spark.sql.shuffle.partitions": "1"}}
        entry = {"path": "file:///in/0.json", "timestamp": 1, "batchId": 0}
        files = {
            "metadata": json.dumps({"id": QUERY_ID}),
            "sources/0/0": f"v1\n{json.dumps(entry)}",
            "offsets/0": "\n".join(["v1", json.dumps(offsets), '{"logOffset":0}']),
            "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        }
        for path, content in files.items():
            (self.live / path).parent.mkdir(parents=True, exist_ok=True)
            (self.live / path).write_text(content)

    def commit_batch(self, batch: int) -> None:
        """Another batch of the query, with what batch 0 has read."""
        for path in ("sources/0", "offsets", "commits"):
            folder = self.live / path
            (folder / str(batch)).write_text((folder / "0").read_text())

    def break_live_directory(self, how: str) -> None:
        lost = {"missing": [self.live], "emptied": [*self.live.iterdir()]}
        lost["without logs"] = [self.live / "offsets", self.live / "commits"]
        for path in lost.get(how, [self.live / "sources"]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def checkpoint(self, *, base: SnapshotRecord | None = None, rows: int | None = None) -> SnapshotRecord:
        """A checkpoint of one file of its own, and of all files of its base."""
        return self._snapshot(SnapshotKind.CHECKPOINT, SnapshotTrigger.PERIODIC, base=base, rows=rows)

    def savepoint(
        self, label: str, trigger: SnapshotTrigger = SnapshotTrigger.MANUAL, *, schedule: str | None = None
    ) -> SnapshotRecord:
        return self._snapshot(SnapshotKind.SAVEPOINT, trigger, label=label, schedule=schedule)

    def _snapshot(
        self,
        kind: SnapshotKind,
        trigger: SnapshotTrigger,
        *,
        base: SnapshotRecord | None = None,
        label: str | None = None,
        rows: int | None = None,
        schedule: str | None = None,
    ) -> SnapshotRecord:
        self.numbers += 1
        number, snapshot_id = self.numbers, f"snapshot-{self.numbers}"
        catalog, store = self.stream.catalog, self.stream.store
        as_writer(catalog, STREAM).snapshots.start(
            snapshot_id=snapshot_id,
            execution_id=self.taken_by,
            kind=kind,
            number=number,
            trigger=trigger,
            timeline=catalog.streams.get(STREAM).timeline,
            label=label,
            schedule=schedule,
        )
        header = SnapshotHeader(
            snapshot_id=snapshot_id,
            stream_id=STREAM,
            kind=kind,
            number=number,
            created_at_ms=1,
            batch_id=number,
            query_id=QUERY_ID,
            properties={"deployment_id": catalog.deployment_id},
        )
        names = [f"id-{number}"]
        if base is not None and base.location is not None:
            names += [file.path for file in store.manifest(base.location).files]
        files = [
            SourceFile(name, FILE_BYTES, name, partial(io.BytesIO, name.encode().ljust(FILE_BYTES))) for name in names
        ]
        if kind is SnapshotKind.CHECKPOINT:
            stored = store.write_checkpoint(header, files, base=base.location if base else None)
        else:
            stored = store.write_savepoint(header, files)
        return as_writer(catalog, STREAM).complete(
            snapshot_id,
            location=stored.location,
            batch_id=number,
            query_id=QUERY_ID,
            full_bytes=stored.full_bytes,
            incremental_bytes=stored.incremental_bytes,
            file_count=stored.file_count,
            rows=rows,
        )

    def listed(self, status: SnapshotStatus = SnapshotStatus.COMPLETED) -> set[str]:
        """Ids of the snapshots in the catalog."""
        return {snapshot.snapshot_id for snapshot in self.stream.catalog.snapshots.of_stream(STREAM, status=status)}

    def is_whole(self, snapshot: SnapshotRecord) -> bool:
        return self.stream.store.verify(snapshot.location or "") == []

    def data_files(self) -> list[str]:
        """Everything on disk below the folder of checkpoints."""
        folder = self.root / "snapshots"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def completed_at(self, snapshot: SnapshotRecord, at_ms: int) -> None:
        """Let a snapshot have been completed at another time."""
        with self.stream.catalog.database.writing() as connection:
            changed = text("UPDATE snapshots SET completed_at_ms = :at_ms WHERE snapshot_id = :id")
            connection.execute(changed, {"at_ms": at_ms, "id": snapshot.snapshot_id})

    def reasons(self) -> list[str]:
        """Why snapshots were deleted, as the catalog tells it."""
        events = self.stream.catalog.events.after(0)
        return [str(event.payload["reason"]) for event in events if event.type is EventType.SNAPSHOT_DELETED]

    def deletions(self) -> list[str]:
        """Snapshots in the order in which they were reported as deleted."""
        events = self.stream.catalog.events.after(0)
        return [str(event.snapshot_id) for event in events if event.type is EventType.SNAPSHOT_DELETED]
