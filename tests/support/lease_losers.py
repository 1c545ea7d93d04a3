"""What a process is about when it loses its lease: every operation that writes for a stream."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dagster_ckpt.catalog.records import RequestKind, StartCause
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.reconciliation import roll_back
from dagster_ckpt.errors import LeaseLostError, RowsAtRiskError, SinkRollbackError
from dagster_ckpt.recovery import live_directories, prepare
from dagster_ckpt.recovery.adopt import adopt
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention
from dagster_ckpt.recovery.live_directories import StateRewrite
from dagster_ckpt.recovery.prepare import PreparedStart
from dagster_ckpt.runtime.batch_progress import BatchLog
from dagster_ckpt.runtime.checkpoint_attempts import AttemptRunner
from dagster_ckpt.runtime.checkpoint_messages import (
    Alignment,
    Attempt,
    AttemptCompleted,
    AttemptFailed,
    CleaningChanged,
    Event,
)
from dagster_ckpt.runtime.execution import StreamRun
from dagster_ckpt.runtime.execution_end import RetryQueue
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.runtime.triggers import TriggerKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.state.rewriting import Rewritten
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support.as_writer import holding, set_stream
from tests.support.failed_upgrade import failed_upgrade
from tests.support.lost_lease import LONG_MS, OLD, Old, Scene, Steps, make_fork, take_checkpoint
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM
from tests.support.verbs import trigger_savepoint


def with_savepoint(scene: Scene) -> None:
    """A savepoint at batch 8, three batches since, and what a start left behind long ago."""
    trigger_savepoint(scene.history.shelf.stream, origin="me", label="sp")
    for batch in (9, 10, 11):
        scene.history.commit(batch)
    scene.history.sinks(f"FileSink[file:{scene.history.sink}]")
    shutil.copytree(scene.history.shelf.live, scene.history.shelf.live.with_name("live-0"))


def with_checkpoint(scene: Scene) -> None:
    with_savepoint(scene)
    stream = scene.history.shelf.stream
    with holding(stream.catalog, STREAM) as lease:
        take_checkpoint(stream, lease, "first", stream.catalog.executions.last_sinks(STREAM))
    scene.history.commit(12)


def with_unfinished_restore(scene: Scene) -> None:
    with_savepoint(scene)

    def die(*_: Any, **_named: Any) -> None:
        raise SinkRollbackError("the process died here")

    with pytest.MonkeyPatch.context() as patch, suppress(SinkRollbackError):
        patch.setattr(prepare, "roll_back", die)
        scene.history.start("sp")


def with_adopted_directory(scene: Scene, *, in_place: bool = False) -> None:
    """A query of plain Spark, whose directory the stream has adopted; its first start is due."""
    stream, plain = scene.history.shelf.stream, scene.history.shelf.root / "plain"
    shutil.move(scene.history.shelf.live, plain)
    set_stream(stream.catalog, STREAM, live_directory=None, live_generation=0, origin=None)
    shutil.rmtree(scene.history.shelf.live.parent, ignore_errors=True)
    adopt(stream, str(plain), sinks=[str(scene.history.sink)], in_place=in_place, label="sp", origin="me")


def start(start_from: str, *, predecessor_ended: bool = True, **how: Any) -> Old:
    """A whole run of a query that ends at once: lease, plan, restore, roll-back, start, end."""

    def ready(stream: StreamHandle) -> Callable[[], None]:
        request = stream.catalog.requests.submit(STREAM, RequestKind.START, origin="me")
        lease = stream.catalog.leases.acquire(STREAM, OLD, LONG_MS)
        keeper = LeaseKeeper(stream.catalog, lease, ttl_ms=LONG_MS)

        def start_query(live: LiveDirectory) -> Any:
            assert not Steps.now().has_come, "a query is started beside the successor's"
            if not live.exists():
                Path(live.url).mkdir(parents=True)
                (Path(live.url) / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
            return PlayedQuery(ends=True)

        asked = RunRequest(
            "run of the old",
            start_query,
            start_from=StartFrom(start_from, accept_loss=True, **how),
            start_request_id=request.request_id,
        )

        def run() -> None:
            outcome = StreamRun(
                stream, asked, AcquiredLease(replace(lease, predecessor_unproven=not predecessor_ended)), keeper
            ).until_the_end("old")
            if outcome.end.kind is EndKind.LEASE_LOST:
                raise LeaseLostError(outcome.end.reason)

        return run

    return ready


def copied_state(
    _spark: object, source: LiveDirectory, target: LiveDirectory, *, shape: StateShape, watch: Watch, **_: Any
) -> Rewritten:
    """A rewrite without Spark, whose part is to copy: every other file and step is that of a rewrite."""
    made = clone(source, target, marked=True, watch=watch)
    return Rewritten(target, made.batch_id, "a rewrite", shape, {}, 0)


def rewritten(start_from: str) -> Old:
    """A start that rewrites the state."""

    def ready(stream: StreamHandle) -> Callable[[], None]:
        lease = stream.catalog.leases.acquire(STREAM, OLD, LONG_MS)
        keeper = LeaseKeeper(stream.catalog, lease, ttl_ms=LONG_MS)
        plan = planned_start(stream, StartFrom(start_from, accept_loss=True))
        rewrite = StateRewrite(Any, StateShape(ROCKSDB, 12))  # type: ignore[arg-type]

        def run() -> None:
            try:
                with mock.patch.object(live_directories, "rewrite_state", copied_state):
                    prepare.prepare(stream, plan, keeper, rewrite=rewrite)
            except RowsAtRiskError:
                # It saw batches of its successor in the sink; a run then records that it failed.
                keeper.check()
                raise

        return run

    return ready


def checkpoint(stream: StreamHandle) -> Callable[[], None]:
    """A checkpoint in its threads, which subsumes the one before; then older live directories go."""
    lease = stream.catalog.leases.acquire(STREAM, OLD, LONG_MS)
    keeper = LeaseKeeper(stream.catalog, lease, ttl_ms=LONG_MS)
    stream.catalog.executions.start(lease, "old", run_id="run of the old", cause=StartCause.MANUAL, holder=OLD)
    record = stream.catalog.streams.get(STREAM)
    runner = AttemptRunner(
        stream,
        "old",
        PreparedStart(LiveDirectory(record.live_directory or "")),
        BatchLog(),
        keeper,
        retry_queue=RetryQueue(),
        facts=QueryFacts,
        predecessor_ended=True,
        wall_clock=lambda: 1,
    )

    def until(kind: type[Event]) -> None:
        while True:
            for event in runner.news():
                if isinstance(event, kind):
                    return
                assert not isinstance(event, AttemptFailed), event
            time.sleep(0.001)

    def run() -> None:
        try:
            number = record.next_number
            runner.start(Attempt(number, TriggerKind.CHECKPOINT, None, Alignment.NEWEST_COMMIT, None, 1 << 60))
            runner.order_cuts(lambda _number: None)
            until(AttemptCompleted)
            if runner.subsume_checkpoints():
                until(CleaningChanged)
        finally:
            runner.close("the test is over")

    return run


def retention(stream: StreamHandle) -> Callable[[], None]:
    """A cancellation that deletes everything; it takes the lease itself."""
    return lambda: print(apply_terminal_retention(stream, "first", TerminalState.CANCELED))


def forked(stream: StreamHandle) -> Callable[[], None]:
    """A fork, which takes the lease of the new stream itself."""
    return lambda: make_fork(stream)


def upgrade_rolled_back(stream: StreamHandle) -> Callable[[], None]:
    return lambda: print(roll_back(stream, run_id="run of the old"))


@dataclass(frozen=True)
class Case:
    """An operation whose process loses its lease.

    Attributes:
        old: What the old process does.
        before: What there is already.
        options: Of the stream.
        beside_disk: Whether it makes directories, which is another way where nothing can be renamed.
        every: The suite takes only every so many steps; `make torture` takes all.
    """

    old: Old
    before: Callable[[Scene], None] = with_savepoint
    options: Mapping[str, Any] = field(default_factory=dict)
    beside_disk: bool = True
    every: int = 1


CASES = {
    "RESUME": Case(start("latest"), beside_disk=False),
    "CLONE": Case(start("latest", predecessor_ended=False)),
    "RESTORE": Case(start("sp")),
    "RESTORE as a separate query": Case(start("sp", new_query_id=True), beside_disk=False, every=3),
    "REWIND": Case(start("batch-3")),
    "START_EMPTY": Case(start("empty", discard_state=True), beside_disk=False),
    "FINISH_RESTORE": Case(start("latest"), with_unfinished_restore),
    "rewrite of the state": Case(rewritten("latest"), every=2),
    "rewrite of a snapshot's state": Case(rewritten("sp"), every=3),
    "checkpoint, subsume, clean up": Case(checkpoint, with_checkpoint, {"num_retained": 1}, beside_disk=False),
    "retention": Case(
        retention,
        with_checkpoint,
        {"cleanup": ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION},
        beside_disk=False,
    ),
    "fork": Case(forked, options={"is_fork": True}),
    "adopted": Case(start("latest"), with_adopted_directory, beside_disk=False, every=6),
    "adopted in place": Case(
        start("latest"), partial(with_adopted_directory, in_place=True), beside_disk=False, every=4
    ),
    "an upgrade rolled back": Case(
        upgrade_rolled_back, lambda scene: failed_upgrade(scene.history), beside_disk=False, every=3
    ),
}
