"""Small snapshots, and helpers to write and read them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.reuse import Source, SourceFile
from dagster_ckpt.snapshot.store import SnapshotStore, StoredSnapshot
from dagster_ckpt.values.modes import SnapshotKind

TRIAL_STREAM = "flights.delays"
# Two files are too large to be stored inside a snapshot's metadata by default.
FILES: Mapping[str, bytes] = {
    "metadata": b"{}",
    "offsets/3": b"v1\n{}",
    "id-1.sst": b"s" * 30_000,
    "1.zip": b"z" * 25_000,
    "empty": b"",
}


def header(number: int | None, kind: SnapshotKind = SnapshotKind.CHECKPOINT) -> SnapshotHeader:
    return SnapshotHeader(
        snapshot_id=f"snapshot-{number}",
        stream_id=TRIAL_STREAM,
        kind=kind,
        number=number,
        created_at_ms=1,
        batch_id=number or 0,
        query_id="query",
    )


def sources(files: Mapping[str, bytes]) -> list[Source]:
    """Names that begin with "id-" count as identities, like RocksDB's."""

    def opener(data: bytes) -> Callable[[], io.BytesIO]:
        return lambda: io.BytesIO(data)

    return [
        SourceFile(path, len(data), path if path.startswith("id-") else None, opener(data))
        for path, data in files.items()
    ]


@dataclass(frozen=True)
class TrialStream:
    """A stream whose snapshots contain a few small files."""

    store: SnapshotStore

    def stored(
        self, number: int | None, files: Mapping[str, bytes], base: str | None = None, **how: Any
    ) -> StoredSnapshot:
        return self.store.write_checkpoint(header(number), sources(files), base=base, **how)

    def stored_of(self, number: int, files: Sequence[Source], **how: Any) -> StoredSnapshot:
        return self.store.write_checkpoint(header(number), files, **how)

    def checkpoint(self, number: int, files: Mapping[str, bytes], base: str | None = None) -> str:
        return self.stored(number, files, base).location

    def stored_savepoint(
        self, number: int, files: Mapping[str, bytes], target: str | None = None, base: str | None = None
    ) -> StoredSnapshot:
        order = header(number, SnapshotKind.SAVEPOINT)
        return self.store.write_savepoint(order, sources(files), target_directory=target, base=base)

    def savepoint(
        self, number: int, files: Mapping[str, bytes], target: str | None = None, base: str | None = None
    ) -> str:
        return self.stored_savepoint(number, files, target, base).location

    def restored(self, location: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}

        def write(entry: FileEntry, chunks: Iterable[bytes]) -> None:
            files[entry.path] = b"".join(chunks)

        self.store.extract(location, write)
        return files
