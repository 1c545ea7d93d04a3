"""Small snapshots, helpers to write and read them, and a process that dies while it writes one.

That process runs this module, and reads its pickled task from stdin.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.packs import Create, PackCallbacks, Packed, PackTask, Threads
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
    """Make sources of bytes; names that begin with "id-" count as identities, like RocksDB's."""

    def opener(data: bytes) -> Callable[[], io.BytesIO]:
        return lambda: io.BytesIO(data)

    return [
        SourceFile(path, len(data), path if path.startswith("id-") else None, opener(data))
        for path, data in files.items()
    ]


@dataclass(frozen=True)
class TrialStream:
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


DEADLINE_S = 120.0
DIED = 9


class Moment(StrEnum):
    """When the process dies: after some of the files, or after all data objects with nothing that refers to them."""

    IN_THE_DATA = "in the data"
    BEFORE_THE_MANIFEST = "before the manifest"


@dataclass(frozen=True)
class DyingWrite:
    storage: CheckpointStorage
    number: int
    files: Mapping[str, bytes]
    moment: Moment

    def do(self) -> None:
        stream = TrialStream(open_store(self.storage, TRIAL_STREAM))
        if self.moment is Moment.IN_THE_DATA:
            last = SourceFile("last", 1000, None, _die)
            stream.stored_of(self.number, [*sources(self.files), last])
        else:
            stream.stored(self.number, self.files, runner=_DiesWhenDone())

    def run_in_process(self) -> bool:
        """Return whether the process died; otherwise it has written the checkpoint."""
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((sys.path, pickle.dumps(self))),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
            # Only this package must be importable there; the storage's modules are found through `sys.path`.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode not in (0, DIED):
            raise AssertionError(f"The process failed by itself: {done.stderr.decode(errors='replace')}")
        return done.returncode == DIED


class _DiesWhenDone(Threads):
    def __init__(self) -> None:
        super().__init__(1)

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        super().run(tasks, create, callbacks)
        os._exit(DIED)


def _die() -> BinaryIO:
    os._exit(DIED)


if __name__ == "__main__":
    path, deed = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    pickle.loads(deed).do()
