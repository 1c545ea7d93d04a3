"""A catalog under test: one cell of a real one holds something else."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dagster_ckpt.catalog.records import Holder, RequestKind
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.checkpoint_retention import subsume
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.fuzz.case import Case, Target
from tests.support.as_writer import as_writer
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.streams import storage_at, stream_at

_TABLES = ("streams", "snapshots", "executions", "leases", "requests", "events", "desired_states", "launches")
_VALUES: tuple[Any, ...] = (
    *(None, "", "x", -1, 0, 2**62, 1.5, "{}", "[]", "null", '{"a":', "NaN", "2024-01-01", "latest", "a" * 5000),
    *('{"location": 5}', '{"batch_id": "x", "sinks": 3}', '{"fork_of": 1}', "[" * 3000, '{"a":"\\ud800"}'),
    *('{"sinks":[{"path":"/etc"}],"batch_id":1}', '{"sources": [1, {"source": {}}], "sinks": [[]]}', '{"phase": []}'),
)


def draw(rng: random.Random) -> Case:
    """Choose a cell and what it holds; text without quotes is stored as bytes."""
    table = rng.choice(_TABLES)
    with contextlib.closing(sqlite3.connect(_good())) as database:
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    value = rng.choice(_VALUES)
    data = b"\xff\xfe" if rng.random() < 0.05 else json.dumps(value).encode()
    return Case(f"{table}.{rng.choice(columns)}", data)


def check(case: Case, scratch: Path) -> None:
    """Read it by every reader; each may refuse, in our words, and none may take the stream for a new one."""
    shutil.copy(_good(), scratch / "catalog.db")
    table, _, column = case.where.partition(".")
    value = case.data if case.data == b"\xff\xfe" else json.loads(case.data)
    with contextlib.closing(sqlite3.connect(scratch / "catalog.db")) as database, database:
        # Otherwise it is refused as a copy.
        database.execute("UPDATE deployment SET home = NULL")
        try:
            database.execute(f'UPDATE {table} SET "{column}" = ?', (value,))
        except sqlite3.Error:
            return
    stream = _stream(scratch / "catalog.db", _good().parent)
    catalog = stream.catalog
    readers: list[Callable[[], object]] = [
        catalog.streams.all,
        lambda: catalog.streams.get("golden"),
        lambda: catalog.snapshots.of_stream("golden"),
        lambda: catalog.snapshots.restorable("golden"),
        lambda: catalog.history.of_streams({"golden": 0}),
        lambda: catalog.history.newest_of(["golden"]),
        lambda: catalog.executions.of_stream("golden"),
        lambda: catalog.executions.last_sinks("golden"),
        lambda: catalog.executions.last_batch("golden", None),
        catalog.executions.unsettled,
        lambda: catalog.executions.failures_since_manual_start("golden"),
        lambda: catalog.leases.current("golden"),
        lambda: catalog.requests.pending("golden"),
        lambda: catalog.events.after(0),
        catalog.desired_states.all,
        lambda: catalog.launches.latest("golden"),
        lambda: planned_start(stream, StartFrom("sp")),
        lambda: subsume(stream),
    ]
    for reader in readers:
        with contextlib.suppress(CkptError):
            reader()
    with contextlib.suppress(CkptError):
        assert planned_start(stream, StartFrom()).kind is not RecoveryKind.START_EMPTY
    catalog.close()


@cache
def _good() -> Path:
    root = Path(mkdtemp(prefix="dagster-ckpt-fuzz-"))
    golden = GoldenStream(root).make()
    golden.snapshot()
    golden.snapshot(SnapshotKind.SAVEPOINT, "sp")
    catalog = golden.stream.catalog
    as_writer(catalog, STREAM).executions.heartbeat("first", {"batch_id": 4, "sinks": ["ForeachBatchSink"]})
    catalog.requests.submit(STREAM, RequestKind.START, arguments={"start_from": "latest"}, origin="fuzz")
    catalog.leases.acquire(STREAM, Holder("first", "run-first", "host", 1, 1, "boot"), 10**9)
    catalog.desired_states.ensure(STREAM, origin="fuzz")
    golden.close()
    with contextlib.closing(sqlite3.connect(root / "catalog.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return root / "catalog.db"


def _stream(catalog: Path, root: Path) -> StreamHandle:
    return stream_at(root, "golden", catalog=f"sqlite:///{catalog}", storage=storage_at(root, inline_bytes=256))


TARGET = Target(draw, check)
