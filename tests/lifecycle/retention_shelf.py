"""A job that has run: a real catalog, a real store with tiny images, and a live directory, all written by hand."""

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

from places import is_local, place
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import EventType, Holder, ImageRecord, ImageStatus, ImageTrigger, StartCause
from dagster_ckpt.catalog.recovery_records import StateOrigin
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.modes import ExternalizedCheckpointCleanup
from dagster_ckpt.policies.restart_strategies import RestartStrategies
from dagster_ckpt.snapshot import object_store
from dagster_ckpt.snapshot.manifest import ImageHeader, ImageKind
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.snapshot.store import ImageStore
from dagster_ckpt.stream.handle import StreamingJob
from tests.as_writer import as_writer

JOB = "orders"
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
    """The job, and short words for what happens to it."""

    root: Path
    job: StreamingJob
    storage: CheckpointStorage
    numbers: int = 0

    def __post_init__(self) -> None:
        self._store = self.job.store

    @staticmethod
    def at(
        root: Path,
        *,
        num_retained: int = 3,
        storage: CheckpointStorage | None = None,
        catalog_url: str | None = None,
    ) -> Shelf:
        shelf = Shelf.reopened(root, num_retained=num_retained, storage=storage, catalog_url=catalog_url)
        job = shelf.job
        job.register()
        shelf.execution("first")
        as_writer(job.catalog, JOB).jobs.switch_live_directory(
            job.live_directory(1, 0).url, origin=StateOrigin.nothing(None)
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
        """The job as another process finds it."""
        storage = storage or FileSystemCheckpointStorage(
            place(root / "images"), 64, savepoint_path=place(root / "savepoints")
        )
        job = StreamingJob(
            job_id=JOB,
            name=JOB,
            asset_key=JOB,
            catalog=Catalog(catalog_url or f"sqlite:///{root / 'catalog.db'}"),
            store=open_store(storage, JOB),
            options=CheckpointConfig(num_retained=num_retained).options,
            restart=RestartStrategies.no_restart(),
            live_root=str(root / "live") if is_local() else place(root / "live"),
        )
        return Shelf(root, job, storage)

    def cleaning_up(self, cleanup: ExternalizedCheckpointCleanup) -> Shelf:
        self.job = replace(self.job, options=replace(self.job.options, cleanup=cleanup))
        return self

    def reopened_store(self) -> ImageStore:
        """The store as another process opens it; what lives in this process's memory cannot be opened from another."""
        if isinstance(self.storage, JobManagerCheckpointStorage):
            return self._store
        return open_store(self.storage, JOB)

    @property
    def live(self) -> Path:
        return self.root / "live" / JOB / "live-1-0"

    def execution(self, execution_id: str) -> None:
        as_writer(self.job.catalog, JOB).executions.begin(
            execution_id, run_id=f"run-{execution_id}", cause=StartCause.MANUAL, holder=HOLDER
        )

    def write_live_directory(self) -> None:
        """A stateless query that has committed batch 0 of a file source."""
        offsets = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {"spark.sql.shuffle.partitions": "1"}}
        entry = {"path": "file:///in/0.json", "timestamp": 1, "batchId": 0}
        files = {
            "metadata": json.dumps({"id": "11111111-2222"}),
            "sources/0/0": f"v1\n{json.dumps(entry)}",
            "offsets/0": "\n".join(["v1", json.dumps(offsets), '{"logOffset":0}']),
            "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        }
        for path, content in files.items():
            (self.live / path).parent.mkdir(parents=True, exist_ok=True)
            (self.live / path).write_text(content)

    def break_live_directory(self, how: str) -> None:
        shutil.rmtree(self.live if how == "missing" else self.live / "sources")

    def checkpoint(self, *, base: ImageRecord | None = None, rows: int | None = None) -> ImageRecord:
        """A checkpoint of one file of its own, and of all files of its base."""
        return self._image(ImageKind.CHECKPOINT, ImageTrigger.PERIODIC, base=base, rows=rows)

    def savepoint(
        self, label: str, trigger: ImageTrigger = ImageTrigger.MANUAL, *, schedule: str | None = None
    ) -> ImageRecord:
        return self._image(ImageKind.SAVEPOINT, trigger, label=label, schedule=schedule)

    def _image(
        self,
        kind: ImageKind,
        trigger: ImageTrigger,
        *,
        base: ImageRecord | None = None,
        label: str | None = None,
        rows: int | None = None,
        schedule: str | None = None,
    ) -> ImageRecord:
        self.numbers += 1
        number, image_id = self.numbers, f"image-{self.numbers}"
        catalog, store = self.job.catalog, self.job.store
        as_writer(catalog, JOB).images.begin(
            image_id=image_id,
            execution_id="first",
            kind=kind.value,
            number=number,
            trigger=trigger,
            timeline=catalog.jobs.get(JOB).timeline,
            label=label,
            schedule=schedule,
        )
        header = ImageHeader(
            image_id=image_id,
            job_id=JOB,
            kind=kind,
            number=number,
            created_at_ms=1,
            batch_id=number,
            query_id="query",
            properties={"deployment_id": catalog.deployment_id},
        )
        names = [f"id-{number}"]
        if base is not None and base.location is not None:
            names += [file.path for file in store.manifest(base.location).files]
        files = [
            SourceFile(name, FILE_BYTES, name, partial(io.BytesIO, name.encode().ljust(FILE_BYTES))) for name in names
        ]
        if kind is ImageKind.CHECKPOINT:
            stored = store.write_checkpoint(header, files, base=base.location if base else None)
        else:
            stored = store.write_savepoint(header, files)
        return as_writer(catalog, JOB).complete(
            image_id,
            location=stored.location,
            batch_id=number,
            query_id="query",
            full_bytes=stored.full_bytes,
            incremental_bytes=stored.incremental_bytes,
            file_count=stored.file_count,
            rows=rows,
        )

    def listed(self, status: ImageStatus = ImageStatus.COMPLETED) -> set[str]:
        """Ids of the images in the catalog."""
        return {image.image_id for image in self.job.catalog.images.of_job(JOB, status=status)}

    def is_whole(self, image: ImageRecord) -> bool:
        return self.job.store.verify(image.location or "") == []

    def data_files(self) -> list[str]:
        """Everything on disk below the folder of checkpoints."""
        folder = self.root / "images"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def completed_at(self, image: ImageRecord, at_ms: int) -> None:
        """Let an image have been completed at another time."""
        with self.job.catalog.database.writing() as connection:
            changed = text("UPDATE images SET completed_at_ms = :at_ms WHERE image_id = :id")
            connection.execute(changed, {"at_ms": at_ms, "id": image.image_id})

    def reasons(self) -> list[str]:
        """Why images were deleted, as the catalog tells it."""
        events = self.job.catalog.events.after(0)
        return [str(event.payload["reason"]) for event in events if event.type is EventType.IMAGE_DELETED]

    def deletions(self) -> list[str]:
        """Images in the order in which they were reported as deleted."""
        events = self.job.catalog.events.after(0)
        return [str(event.image_id) for event in events if event.type is EventType.IMAGE_DELETED]
