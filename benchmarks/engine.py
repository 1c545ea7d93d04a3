"""Every call into the product that is measured, and nothing else of it: as a running driver makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_ckpt import CheckpointConfig, RestartStrategies
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.config.state_backend import DEFAULT_TRANSFER_THREADS
from dagster_ckpt.recovery.live_directories import restore_into
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.store import StoredSnapshot
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, DonorCheck
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshotting import SnapshotOrder, take_snapshot
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.modes import SnapshotKind

STREAM = "bench"


@dataclass(frozen=True)
class Settings:
    """Settings of an engine that a measurement may want otherwise.

    Attributes:
        transfer_threads: Data objects written or read at the same time.
        file_state_size_threshold: See `FileSystemCheckpointStorage`.
        write_buffer_size: See `FileSystemCheckpointStorage`.
    """

    transfer_threads: int = DEFAULT_TRANSFER_THREADS
    file_state_size_threshold: int | None = None
    write_buffer_size: int = -1


DEFAULTS = Settings()


class Engine:
    """One stream, its live directory and its snapshots.

    Attributes:
        live: The stream's live directory; the first of its generations.
        running: What snapshots are taken of: `live`, or where a copy of it lies.

    Args:
        root: Folder of this machine for live directories and the catalog.
        snapshots: URL of the place for snapshots.
        storage_options: Arguments of its file system.
        newest: Number of the newest snapshot that is there already.
        settings: How snapshots are written and read.
    """

    def __init__(
        self,
        root: Path,
        snapshots: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        newest: int = 0,
        settings: Settings = DEFAULTS,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        storage = FileSystemCheckpointStorage(
            snapshots,
            settings.file_state_size_threshold,
            settings.write_buffer_size,
            savepoint_path=f"{snapshots}/savepoints",
            storage_options=storage_options or {},
        )
        self._stream = StreamHandle(
            stream_id=STREAM,
            name=STREAM,
            asset_key=STREAM,
            catalog=Catalog(f"sqlite:///{root / 'catalog.db'}"),
            store=open_store(storage, STREAM, transfer_threads=settings.transfer_threads),
            options=CheckpointConfig().options,
            restart=RestartStrategies.no_restart(),
            live_root=f"{root}/live",
        )
        self._number = newest
        self.live = root / "live" / STREAM / "live-1"
        self.live.parent.mkdir(parents=True, exist_ok=True)
        self.running = LiveDirectory(str(self.live))

    def checkpoint(self, base: str | None = None) -> StoredSnapshot:
        """Take a checkpoint of the live directory.

        Args:
            base: Location of the snapshot before; None takes everything.
        """
        return self._take(SnapshotKind.CHECKPOINT, base)

    def savepoint(self, base: str | None = None) -> StoredSnapshot:
        """Take a savepoint of the live directory.

        Args:
            base: Location of the snapshot before.
        """
        return self._take(SnapshotKind.SAVEPOINT, base)

    def discard(self, location: str) -> None:
        """Delete a snapshot, and the bytes that no other one needs."""
        self._stream.store.discard(location)

    def restore(self, location: str, name: str, check: DonorCheck | None = None) -> Path:
        """Make a live directory of a snapshot, ready for Spark; beside the stream's own.

        Args:
            location: The snapshot.
            name: Name of the directory.
            check: How the files of the stream's own directory are made sure of before they are linked; None: all is
                read from the snapshot.
        """
        target = self.live.with_name(name)
        donor = Donor(self.running, check) if check is not None else None
        restore_into(self._stream, location, LiveDirectory(str(target)), donor=donor)
        return target

    def _take(self, kind: SnapshotKind, base: str | None) -> StoredSnapshot:
        self._number += 1
        order = SnapshotOrder(kind=kind, number=self._number, base=base)
        return take_snapshot(self._stream, self.running, order, now_ms=wall_clock_ms()).stored
