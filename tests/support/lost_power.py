"""What is done while the power goes (`power_loss.py`), and what has to be true of what is left.

Each scenario is made, then done in a child process that ends at some file call, then looked at as the next process
finds it. All but the disk is real: catalog, storage, live directory, sink log.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.checkpoint_retention import housekeeping, settle_dead_attempts
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.live_directories import StateRewrite, delete_older_live_directories
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import REWRITE_ID
from dagster_ckpt.spark.checkpoint_dir.state_files import LAYOUT, ROCKSDB
from dagster_ckpt.state import rewriting
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import keeping
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.places import has_files, is_local, place
from tests.support.rewind_history import LAST, History
from tests.support.verbs import trigger_savepoint


@dataclass(frozen=True)
class Scenario:
    """One.

    Attributes:
        name: In a word or two.
        make: Makes a stream in a folder, and lets go of it.
        work: What is done to it by another process.
        problems: What is wrong with what is left; nothing: no state is lost, and the next start goes on.
    """

    name: str
    make: Callable[[Path], object]
    work: Callable[[Path], object]
    problems: Callable[[Path], list[str]]


def problems_of(stream: StreamHandle) -> list[str]:
    """What a stream lost: listed snapshots that are not whole, or a next start that does not resume, or never ends."""
    without_lease(stream)
    found = _broken_snapshots(stream, "at first")
    try:
        with keeping(stream.catalog, stream.stream_id) as lease:
            # As a start does before it plans.
            settle_dead_attempts(stream, lease.record)
        plan = planned_start(stream, StartFrom())
        with keeping(stream.catalog, stream.stream_id) as lease:
            live = prepare(stream, plan, lease).live
    except CkptError as error:
        return [*found, f"the next start: {type(error).__name__}: {error}"]
    if plan.kind is RecoveryKind.START_EMPTY:
        found.append(f"all state is discarded: {plan.reason}")
    state = inspect_live_directory(live)
    if state.status is not LiveStatus.GOOD:
        found.append(f"{plan.kind.value}: the live directory is {state.status}: {state.reason}")
    housekeeping(stream, older_than_ms=0)
    found += [*_broken_snapshots(stream, "after housekeeping"), *_unlisted(stream)]
    if not found:
        found += _not_over(stream, live, state.batch_id)
    return found


def without_lease(stream: StreamHandle) -> None:
    """The process that held it is dead, or gave it back: who comes next waits for its end."""
    current = stream.catalog.leases.current(stream.stream_id)
    if current is not None:
        stream.catalog.leases.release(current)


def _not_over(stream: StreamHandle, live: LiveDirectory, batch_id: int | None) -> list[str]:
    """A recovery that has to be done again each time."""
    plan = planned_start(stream, StartFrom())
    with keeping(stream.catalog, stream.stream_id) as lease:
        again = prepare(stream, plan, lease).live
    if plan.kind is RecoveryKind.RESUME and again == live:
        return []
    state = inspect_live_directory(again)
    if plan.kind is RecoveryKind.FINISH_RESTORE and (again, state.batch_id) == (live, batch_id):
        return []
    return [f"done again, recovery is {plan.kind.value} to batch {state.batch_id}, not in place after {batch_id}"]


def _broken_snapshots(stream: StreamHandle, when: str) -> list[str]:
    return [
        f"{when}: {snapshot.kind} {snapshot.number} is listed, but {problem}"
        for snapshot in stream.catalog.snapshots.completed(stream.stream_id)
        for problem in stream.store.verify(snapshot.location or "")[:1]
    ]


def _unlisted(stream: StreamHandle) -> list[str]:
    listed = {snapshot.location for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id)}
    return [
        f"{location} is seen, but: {problem}"
        for location in stream.store.checkpoints()
        if location not in listed
        for problem in stream.store.verify(location)[:1] or ["the catalog does not know it"]
    ]


def _made(prepared: Callable[[GoldenStream], object], *, num_retained: int = 3) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        golden = GoldenStream(root, num_retained).make()
        prepared(golden)
        _remember(root, golden.live)
        golden.close()

    return make


def _remember(root: Path, live: Path) -> None:
    """Every file of every batch, by content: none may come back with another one."""
    files = [path for path in live.rglob("*") if path.is_file()]
    contents = {path.relative_to(live).as_posix(): path.read_bytes().hex() for path in files}
    (root / "before.json").write_text(json.dumps(contents))


def _altered(root: Path, live: Path) -> list[str]:
    before = json.loads((root / "before.json").read_text())
    return [
        f"{live.name}/{path} has another content, and the start takes it"
        for path, content in before.items()
        if (live / path).is_file() and (live / path).read_bytes().hex() != content
    ]


def _done(work: Callable[[GoldenStream], object], *, num_retained: int = 3) -> Callable[[Path], object]:
    return lambda root: work(GoldenStream(root, num_retained))


def played_rewrite(text: str) -> Callable[[GoldenStream], object]:
    """A start that rewrites the state. Spark's part is to copy: every other file and step is that of a rewrite."""

    def work(golden: GoldenStream) -> None:
        plan = planned_start(golden.stream, StartFrom(text))
        everything = property(lambda rewrite: rewrite.source.operators)
        with (
            mock.patch.object(rewriting, "rewriter_for", return_value=None),
            mock.patch.object(rewriting._Rewrite, "copied", everything),
            keeping(golden.stream.catalog, golden.stream.stream_id) as lease,
        ):
            prepare(golden.stream, plan, lease, rewrite=StateRewrite(Any, StateShape(ROCKSDB, 2)))  # type: ignore[arg-type]

    return work


def _rewritten(root: Path) -> list[str]:
    """The stream has the state of before in the old directory or the new one, and its next snapshot is of that one."""
    golden = GoldenStream(root)
    try:
        found = problems_of(golden.stream)
        if found:
            return found
        live = golden.live
        for path, content in json.loads((root / "before.json").read_text()).items():
            is_row = path.startswith("state/0/") and "_metadata" not in path
            if is_row and (live / path).is_file() and (live / path).read_bytes().hex() != content:
                found.append(f"{live.name}/{path} has other rows than before")
        taken = golden.snapshot()
        found += [f"the next snapshot has another {path} than the directory" for path in golden.unlike(taken)]
        is_rewritten = isinstance(json.loads((live / "metadata").read_bytes()).get(REWRITE_ID), str)
        if is_rewritten == live.name.startswith("live-1-"):
            found.append(f"{live.name} is the live directory, and {'rewritten' if is_rewritten else 'as it was'}")
        [base] = [each for each in golden.stream.catalog.snapshots.completed(STREAM) if each.number == 1]
        if is_rewritten and base.properties[LAYOUT] == taken.properties[LAYOUT]:
            found.append("the next snapshot extends one from before the rewrite")
        left = {path.name for path in live.parent.iterdir() if has_files(path)} - {live.name}
        found += [f"{name} is not deleted by the next start" for name in sorted(left) if not _is_deleted(golden, name)]
        return found
    finally:
        golden.close()


def _is_deleted(golden: GoldenStream, name: str) -> bool:
    """Whether the first checkpoint of the next start deletes a directory that an earlier start has left."""
    with keeping(golden.stream.catalog, STREAM) as lease:
        delete_older_live_directories(golden.stream, LiveDirectory(golden.live_url), lease)
    return not has_files(golden.live.parent / name)


def _looked_at(*, num_retained: int = 3, keeps_savepoints: bool = True) -> Callable[[Path], list[str]]:
    def problems(root: Path) -> list[str]:
        golden = GoldenStream(root, num_retained)
        try:
            found = problems_of(golden.stream)
            if not found:
                found += _altered(root, golden.live)
                golden.snapshot()
            savepoints = list((root / "savepoints").glob("savepoint-*/_metadata"))
            if keeps_savepoints and (root / "has-savepoint").exists() and not savepoints:
                found.append("the savepoint is gone")
        finally:
            golden.close()
        return found

    return problems


def _with_savepoint(golden: GoldenStream) -> None:
    golden.snapshot(SnapshotKind.SAVEPOINT, "sp")
    (golden.root / "has-savepoint").touch()


def _savepoint_and_no_live_directory(golden: GoldenStream) -> None:
    _with_savepoint(golden)
    shutil.rmtree(golden.live)
    golden.start("sp")


def _more(golden: GoldenStream) -> None:
    golden.snapshot()
    golden.commit(5)


def _claim(golden: GoldenStream) -> None:
    golden.start("sp", claim_mode="CLAIM")
    golden.snapshot()
    golden.subsume()


def _three_snapshots(golden: GoldenStream) -> None:
    for batch in (5, 6, None):
        golden.snapshot()
        if batch is not None:
            golden.commit(batch)


def _lose_live_directory(golden: GoldenStream) -> None:
    golden.snapshot()
    shutil.rmtree(golden.root / "live")


def _make_history(*, with_savepoint: bool) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        history = History(root)
        if with_savepoint:
            trigger_savepoint(history.shelf.stream, origin="a test", label="sp")
            history.commit(LAST + 1)
            history.commit(LAST + 2)
            history.sinks(history.file_sink)
        history.close()

    return make


def problems_of_history(*batches: int) -> Callable[[Path], list[str]]:
    """The stream stands at one of these batches, and its sink with it."""

    def problems(root: Path) -> list[str]:
        history = History.reopened(root)
        try:
            found = problems_of(history.shelf.stream)
            if not found and history.batch not in batches:
                found.append(f"the stream is at batch {history.batch}")
            if not found and history.sink_batch != history.batch:
                found.append(f"the sink is at batch {history.sink_batch}, the stream at {history.batch}")
            if not found:
                found += history.unlike_uninterrupted()
        finally:
            history.close()
        return found

    return problems


def _fork_of(history: History) -> StreamHandle:
    return replace(history.shelf.stream, stream_id="copy", name="copy", asset_key="copy")


def _fork(root: Path) -> None:
    history = History.reopened(root)
    old, new = history.sink, root / "copied output"
    outputs = {str(old): str(new)} if is_local() else {place(old): place(new)}
    fork(history.shelf.stream, _fork_of(history), StartFrom("latest"), origin="a test", outputs=outputs)


def _problems_of_fork(root: Path) -> list[str]:
    history = History.reopened(root)
    try:
        found = problems_of(history.shelf.stream)
        stream = _fork_of(history)
        known = [record.stream_id for record in stream.catalog.streams.all()]
        live = stream.catalog.streams.get("copy").live_directory if "copy" in known else None
        if live is not None:
            state = inspect_live_directory(LiveDirectory(live))
            found += [] if state.batch_id == LAST else [f"the fork is {state.status}: {state.reason}"]
            log = root / "copied output/_spark_metadata"
            found += [] if (log / "8").is_file() and "part-8" in (log / "8").read_text() else ["the fork has no output"]
            found += [
                f"part-{n} is lost" for n in range(LAST + 1) if (root / f"copied output/part-{n}").read_text() != "rows"
            ]
    finally:
        history.close()
    return found


SCENARIOS = (
    Scenario("checkpoint", _made(_more), _done(GoldenStream.snapshot), _looked_at()),
    Scenario("first checkpoint", _made(lambda _: None), _done(GoldenStream.snapshot), _looked_at()),
    Scenario(
        "checkpoint of what is not flushed",
        _made(GoldenStream.snapshot),
        _done(lambda golden: (golden.commit(5), golden.snapshot())),
        _looked_at(),
    ),
    Scenario(
        "savepoint", _made(_more), _done(lambda golden: golden.snapshot(SnapshotKind.SAVEPOINT, "sp")), _looked_at()
    ),
    Scenario(
        "first checkpoint after a savepoint",
        _made(_savepoint_and_no_live_directory),
        _done(GoldenStream.snapshot),
        _looked_at(),
    ),
    Scenario(
        "claim",
        _made(lambda golden: (_with_savepoint(golden), golden.commit(5)), num_retained=1),
        _done(_claim, num_retained=1),
        _looked_at(num_retained=1, keeps_savepoints=False),
    ),
    Scenario(
        "subsumption",
        _made(_three_snapshots, num_retained=1),
        _done(GoldenStream.subsume, num_retained=1),
        _looked_at(num_retained=1),
    ),
    Scenario("restore", _made(_more), _done(lambda golden: golden.start("chk-1")), _looked_at()),
    Scenario("restore of a lost directory", _made(_lose_live_directory), _done(GoldenStream.start), _looked_at()),
    Scenario(
        "rewind",
        _make_history(with_savepoint=False),
        lambda root: History.reopened(root).start("batch-5"),
        problems_of_history(5, LAST),
    ),
    Scenario(
        "rewind to a savepoint",
        _make_history(with_savepoint=True),
        lambda root: History.reopened(root).start("sp"),
        problems_of_history(LAST, LAST + 2),
    ),
    Scenario("rewrite of the state", _made(_more), _done(played_rewrite("latest")), _rewritten),
    Scenario("rewrite of a checkpoint's state", _made(_more), _done(played_rewrite("chk-1")), _rewritten),
    Scenario("fork", _make_history(with_savepoint=False), _fork, _problems_of_fork),
)
