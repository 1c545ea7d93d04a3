"""One life of a stream with each transition that a run goes through, and the lines that it logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.stream.handle import StreamHandle
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM, Shelf

# Each line once, in this order. N stands for a number that differs from run to run.
LINES = """
Acquired the lease of stream orders: token N, run RUN (process N on HOST)
Stream orders is FAILED after N ms: its process had ended when execution ID started
Starting stream orders: run RUN
Stream orders: the live directory is intact and its last writer has ended: resume after batch 0
Stream orders is running: resumes after batch 0
Triggering checkpoint 1 (type=MANUAL) of stream orders
Completed checkpoint 1 of stream orders: SIZE (SIZE new), batch 0, N ms
Triggering savepoint 2 (type=MANUAL) of stream orders
Completed savepoint 2 of stream orders: SIZE (SIZE new), batch 0, N ms, label 'mine', PLACE
Triggering checkpoint 3 (type=MANUAL) of stream orders
Failed checkpoint 3 of stream orders after N ms: IO_EXCEPTION: the disk is full (1 of 1 tolerated failures)
Triggering checkpoint 4 (type=MANUAL) of stream orders
Completed checkpoint 4 of stream orders: SIZE (SIZE new), batch 1, N ms
Deleted checkpoint 1 of stream orders (SIZE, batch 0): subsumed, not kept by Latest(count=1)
Stream orders is CANCELED after N ms: cancel requested by a test
Released the lease of stream orders: token N
Acquired the lease of stream orders: token N, run RUN (process N on HOST)
Deleted checkpoint 4 of stream orders (SIZE, batch 1): DELETE_ON_CANCELLATION at CANCELED
Released the lease of stream orders: token N
Stream orders: deleted the live directories PLACE
"""
_HIDDEN = [
    (r"run [\w-]+", "run RUN"),
    (r"on [\w.-]+\)", "on HOST)"),
    (r"execution [0-9a-f-]{36}", "execution ID"),
    (r"(token|process) \d+", r"\1 N"),
    (r"\d+ ms", "N ms"),
    (r"[\d.]+ k?B", "SIZE"),
    (r"(file://)?/\S+", "PLACE"),
]


def expected() -> list[str]:
    return LINES.strip().splitlines()


def comparable(lines: list[str]) -> list[str]:
    """Lines of the log without what differs from run to run."""
    for pattern, word in _HIDDEN:
        lines = [re.sub(pattern, word, line) for line in lines]
    return lines


class LoggedLife:
    """Asks for a checkpoint, a savepoint, a checkpoint that fails, another checkpoint, and a cancel."""

    def __init__(self, root: Path) -> None:
        self.shelf = Shelf.at(root, num_retained=1)
        as_writer(self.shelf.stream.catalog, STREAM).executions.heartbeat("first", {"sinks": ["noop"]})
        kinds = [RequestKind.CHECKPOINT, RequestKind.SAVEPOINT, None, RequestKind.CHECKPOINT, RequestKind.CANCEL]
        self._todo: list[RequestKind | None] = list(kinds)
        self._asked: str | None = None

    def interrupted(self, stream: StreamHandle) -> bool:
        """Polled by the run, four times a second: ask for the next thing once the last one is answered."""
        catalog = stream.catalog
        latest = catalog.executions.latest(STREAM)
        if latest is None or latest.status is not ExecutionStatus.RUNNING or not self._todo:
            return False
        asked = catalog.requests.find(self._asked) if self._asked is not None else None
        if asked is not None and asked.status in (RequestStatus.PENDING, RequestStatus.ACCEPTED):
            return False
        deleted = any(each.type is EventType.SNAPSHOT_DELETED for each in catalog.events.after(0))
        if self._todo == [RequestKind.CANCEL] and not deleted:
            return False
        kind = self._todo.pop(0)
        if kind is None:
            # Of an unchanged position, no other checkpoint is written.
            self.shelf.commit_batch(1)
            self._fail_once(stream)
        arguments = {"label": "mine"} if kind is RequestKind.SAVEPOINT else {}
        kind = kind or RequestKind.CHECKPOINT
        self._asked = catalog.requests.submit(STREAM, kind, arguments=arguments, origin="a test").request_id
        return False

    def _fail_once(self, stream: StreamHandle) -> None:
        store: Any = stream.store
        write = store.write_checkpoint

        def fail(*_args: Any, **_how: Any) -> Any:
            store.write_checkpoint = write
            raise StorageAccessError("the disk is full")

        store.write_checkpoint = fail
