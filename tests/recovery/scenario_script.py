"""The language of the store scenarios: one line for what happens to a stream's snapshots."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.errors import CkptError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, discard, housekeeping, subsume
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.stream.snapshots import newest_for_recovery
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TerminalState
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf


class _Refusing:
    """A store that deletes nothing."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def discard(self, location: str, **_: object) -> None:
        raise StorageAccessError(f"{location} cannot be deleted: the storage is away")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass
class Scenario:
    """A stream's snapshots by the names that the cases give them."""

    shelf: Shelf
    prefer_checkpoint: bool = False
    snapshots: dict[str, SnapshotRecord] = field(default_factory=dict)

    def does(self, line: str) -> None:
        """Carry out one line."""
        words = line.split()
        match words:
            case ["end", state, cleanup]:
                self.shelf.cleaning_up(ExternalizedCheckpointCleanup[cleanup])
                apply_terminal_retention(self.shelf.stream, "first", TerminalState[state])
            case ["start", "from", name, "with", mode]:
                self.start_from(name, claims=mode == "CLAIM")
            case ["the", "entry", "of", name, "is", "damaged"]:
                self.spoil(name, "properties = '{'")
            case [name, "is", "deleted", "by", "its", "owner"]:
                self.shelf.stream.store.discard(self.snapshots[name].location or "")
            case [name, "cannot", "be", "stored"]:
                self.fail_to_store(name)
            case [name, "is", "not", "recorded"]:
                # As after a crash between the last object in storage and the catalog.
                self.take(name)
                self.spoil(name, "status = 'IN_PROGRESS'")
            case [name, "on", base]:
                self.take(name, self.snapshots[base])
            case _ if line in self._plain():
                self._plain()[line]()
            case [name]:
                self.take(name)
            case _:
                raise AssertionError(f"no such step: {line}")

    def _plain(self) -> dict[str, Callable[[], object]]:
        stream = self.shelf.stream
        return {
            "subsume": lambda: discard(stream, subsume(stream), reason="subsumed", lease=None),
            "housekeeping": lambda: housekeeping(stream),
            "open anew": self.open_anew,
            "another execution begins": lambda: self.shelf.execution("second"),
            "nothing can be deleted": lambda: self.store_with(_Refusing(stream.store)),
            "deletion works again": lambda: self.store_with(self.shelf.reopened_store()),
        }

    def store_with(self, store: Any) -> None:
        self.shelf.stream = replace(self.shelf.stream, store=store)

    def start_from(self, name: str, *, claims: bool) -> None:
        stream, snapshot = self.shelf.stream, self.snapshots[name]
        directory = stream.live_directory(2, 0).url
        as_writer(stream.catalog, STREAM).streams.switch_live_directory(
            directory, restored_snapshot_id=snapshot.snapshot_id, claims=claims
        )

    def spoil(self, name: str, how: str) -> None:
        """Change the row of a snapshot behind the catalog's back."""
        with self.shelf.stream.catalog.database.writing() as connection:
            changed = text(f"UPDATE snapshots SET {how} WHERE snapshot_id = :id")
            connection.execute(changed, {"id": self.snapshots[name].snapshot_id})

    def take(self, name: str, base: SnapshotRecord | None = None) -> None:
        if name.startswith("cp"):
            self.snapshots[name] = self.shelf.checkpoint(base=base)
        else:
            trigger = SnapshotTrigger.STOP if name.startswith("stop") else SnapshotTrigger.MANUAL
            self.snapshots[name] = self.shelf.savepoint(name, trigger)

    def fail_to_store(self, name: str) -> None:
        """A checkpoint of one good file and one that cannot be read to its end."""
        self.shelf.numbers += 1
        number = self.shelf.numbers

        def away() -> io.BytesIO:
            raise OSError("the disk is away")

        header = SnapshotHeader(
            snapshot_id=name,
            stream_id=STREAM,
            kind=SnapshotKind.CHECKPOINT,
            number=number,
            created_at_ms=1,
            batch_id=number,
            query_id="query",
        )
        good = partial(io.BytesIO, b"g" * 200)
        with suppress(OSError, CkptError):
            files = [SourceFile("id-good", 200, "id-good", good), SourceFile("id-bad", 200, "id-bad", away)]
            self.shelf.stream.store.write_checkpoint(header, files)
            raise AssertionError("the checkpoint was stored")

    def open_anew(self) -> None:
        """What another process has: a catalog and a store that remember nothing."""
        stream = self.shelf.stream
        url = stream.catalog.database.url.render_as_string(hide_password=False)
        stream.catalog.close()
        self.shelf.stream = replace(stream, catalog=Catalog(url), store=self.shelf.reopened_store())

    def state(self) -> dict[str, Any]:
        """What the cases may state."""
        stream = self.shelf.stream
        listed = self._named(stream.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.COMPLETED))
        chosen = newest_for_recovery(
            stream.catalog.snapshots.restorable(STREAM), prefer_checkpoint=self.prefer_checkpoint
        )
        return {
            "holds": sorted(listed),
            "whole": sorted(name for name in self.snapshots if self._is_whole(name)),
            "broken": sorted(self._named([each for each in stream.catalog.snapshots.of_stream(STREAM) if each.broken])),
            "deleting": sorted(self._named(stream.catalog.snapshots.of_stream(STREAM, status=SnapshotStatus.DELETING))),
            "recovers": next(iter(self._named([chosen])), None) if chosen else None,
            "in_storage": sorted(name for name in self.snapshots if name.startswith("cp") and self._is_whole(name)),
            "bytes_left": len(stream.store.sweep(older_than_ms=0, dry_run=True)),
            "strangers": len(stream.store.checkpoints()) - sum(self._is_stored(name) for name in self.snapshots),
        }

    def _named(self, snapshots: list[SnapshotRecord]) -> Iterator[str]:
        ids = {snapshot.snapshot_id for snapshot in snapshots}
        return (name for name, snapshot in self.snapshots.items() if snapshot.snapshot_id in ids)

    def _is_whole(self, name: str) -> bool:
        try:
            return self.shelf.is_whole(self.snapshots[name])
        except SnapshotNotFoundError:
            return False

    def _is_stored(self, name: str) -> bool:
        return name.startswith("cp") and (self.snapshots[name].location or "") in self.shelf.stream.store.checkpoints()
