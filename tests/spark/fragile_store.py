"""A store of snapshots whose process can be killed at any step that changes the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore, StoreLayout

STREAM_ROOT, SAVEPOINT_ROOT = "mem://snapshots/stream", "mem://savepoints"
# As the options name it, where it counts: small files lie in data objects, as they do in a query of some size.
INLINE_THRESHOLDS = (0, 400, None)


class Killed(BaseException):
    """The process is gone: nothing may handle this, and every further change fails as well."""


class Storage:
    """Outlives the processes that use it."""

    def __init__(self, inline_threshold: int | None) -> None:
        self.spaces = {root: _FragileSpace(root, self) for root in (STREAM_ROOT, SAVEPOINT_ROOT)}
        self._layout = StoreLayout("stream", STREAM_ROOT, SAVEPOINT_ROOT, inline_threshold)
        self._steps_left: int | None = None
        self._is_applied = False

    def process(self) -> ObjectSnapshotStore:
        """A fresh process's store."""
        return ObjectSnapshotStore(replace(self._layout), self.spaces.__getitem__)

    def objects(self) -> set[str]:
        """URLs of everything there is."""
        return {f"{root}/{name}" for root, space in self.spaces.items() for name in space._objects}

    @contextmanager
    def killed_at(self, step: int, *, applied: bool) -> Iterator[None]:
        """Kill what runs inside at a step, after or before it took effect."""
        self._steps_left, self._is_applied = step, applied
        try:
            yield
        except Killed:
            return
        finally:
            self._steps_left = None

    def take_step(self, act: Callable[[], None]) -> None:
        if self._steps_left is None:
            act()
            return
        self._steps_left -= 1
        if self._steps_left > 0 or (self._steps_left == 0 and self._is_applied):
            act()
        if self._steps_left <= 0:
            raise Killed


class _FragileSpace(MemoryFileIO):
    def __init__(self, url: str, storage: Storage) -> None:
        super().__init__(url)
        self._storage = storage

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        # Half written, until it is closed.
        self.write(name, [b""])
        with super().create(name) as stream:
            yield stream

    def write(
        self,
        path: str,
        chunks: Iterable[bytes],
        *,
        replace: bool = True,
        before_visible: Callable[[], None] = no_op,
    ) -> None:
        self._storage.take_step(
            lambda: MemoryFileIO.write(self, path, chunks, replace=replace, before_visible=before_visible)
        )

    def delete(self, name: str) -> None:
        self._storage.take_step(lambda: MemoryFileIO.delete(self, name))
