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

from golden_job import GoldenJob
from places import is_local, place
from rewind_history import LAST, History

from dagster_ckpt.errors import CkptError
from dagster_ckpt.operations.operations import preview_start, trigger_savepoint
from dagster_ckpt.operations.requests import Operator
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.retention import housekeeping
from dagster_ckpt.snapshot.manifest import ImageKind
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamingJob
from dagster_ckpt.stream.start_from import StartFrom
from tests.as_writer import keeping


@dataclass(frozen=True)
class Scenario:
    """One.

    Attributes:
        name: In a word or two.
        make: Makes a job in a folder, and lets go of it.
        work: What is done to it by another process.
        problems: What is wrong with what is left; nothing: no state is lost, and the next start goes on.
    """

    name: str
    make: Callable[[Path], object]
    work: Callable[[Path], object]
    problems: Callable[[Path], list[str]]


def problems_of(job: StreamingJob) -> list[str]:
    """Whatever a job lost: listed images that are not whole, or a next start that does not go on, or never ends."""
    without_lease(job)
    found = _broken_images(job, "at first")
    try:
        plan = preview_start(job, StartFrom())
        with keeping(job.catalog, job.job_id) as lease:
            live = prepare(job, plan, lease).live
    except CkptError as error:
        return [*found, f"the next start: {type(error).__name__}: {error}"]
    if plan.kind is RecoveryKind.START_EMPTY:
        found.append(f"all state is given up: {plan.reason}")
    state = inspect_live_directory(live)
    if state.status is not LiveStatus.GOOD:
        found.append(f"{plan.kind.value}: the live directory is {state.status}: {state.reason}")
    housekeeping(job, older_than_ms=0)
    found += [*_broken_images(job, "after housekeeping"), *_unlisted(job)]
    if not found:
        found += _not_over(job, live, state.batch_id)
    return found


def without_lease(job: StreamingJob) -> None:
    """The process that held it is dead, or gave it back: who comes next waits for its end."""
    current = job.catalog.leases.current(job.job_id)
    if current is not None:
        job.catalog.leases.release(current.job_id, current.token)


def _not_over(job: StreamingJob, live: LiveDirectory, batch_id: int | None) -> list[str]:
    """A recovery that has to be done again each time."""
    plan = preview_start(job, StartFrom())
    with keeping(job.catalog, job.job_id) as lease:
        again = prepare(job, plan, lease).live
    if plan.kind is RecoveryKind.RESUME and again == live:
        return []
    state = inspect_live_directory(again)
    if plan.kind is RecoveryKind.FINISH_RESTORE and (again, state.batch_id) == (live, batch_id):
        return []
    return [f"done again, recovery is {plan.kind.value} to batch {state.batch_id}, not in place after {batch_id}"]


def _broken_images(job: StreamingJob, when: str) -> list[str]:
    return [
        f"{when}: {image.kind} {image.number} is listed, but {problem}"
        for image in job.catalog.images.completed(job.job_id)
        for problem in job.store.verify(image.location or "")[:1]
    ]


def _unlisted(job: StreamingJob) -> list[str]:
    listed = {image.location for image in job.catalog.images.of_job(job.job_id)}
    return [
        f"{location} is seen, but: {problem}"
        for location in job.store.checkpoints()
        if location not in listed
        for problem in job.store.verify(location)[:1] or ["the catalog does not know it"]
    ]


def _made(prepared: Callable[[GoldenJob], object], *, num_retained: int = 3) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        golden = GoldenJob(root, num_retained).make()
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


def _done(work: Callable[[GoldenJob], object], *, num_retained: int = 3) -> Callable[[Path], object]:
    return lambda root: work(GoldenJob(root, num_retained))


def _looked_at(*, num_retained: int = 3, keeps_savepoints: bool = True) -> Callable[[Path], list[str]]:
    def problems(root: Path) -> list[str]:
        golden = GoldenJob(root, num_retained)
        try:
            found = problems_of(golden.job)
            if not found:
                found += _altered(root, golden.live)
                golden.image()
            savepoints = list((root / "savepoints").glob("savepoint-*/_metadata"))
            if keeps_savepoints and (root / "has-savepoint").exists() and not savepoints:
                found.append("the savepoint is gone")
        finally:
            golden.close()
        return found

    return problems


def _with_savepoint(golden: GoldenJob) -> None:
    golden.image(ImageKind.SAVEPOINT, "sp")
    (golden.root / "has-savepoint").touch()


def _savepoint_and_no_live_directory(golden: GoldenJob) -> None:
    _with_savepoint(golden)
    shutil.rmtree(golden.live)
    golden.start("sp")


def _more(golden: GoldenJob) -> None:
    golden.image()
    golden.commit(5)


def _claim(golden: GoldenJob) -> None:
    golden.start("sp", claim_mode="CLAIM")
    golden.image()
    golden.subsume()


def _three_images(golden: GoldenJob) -> None:
    for batch in (5, 6, None):
        golden.image()
        if batch is not None:
            golden.commit(batch)


def _lose_live_directory(golden: GoldenJob) -> None:
    golden.image()
    shutil.rmtree(golden.root / "live")


def _make_history(*, with_savepoint: bool) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        history = History(root)
        if with_savepoint:
            trigger_savepoint(history.shelf.job, Operator("a test"), label="sp")
            history.commit(LAST + 1)
            history.commit(LAST + 2)
            history.sinks(history.file_sink)
        history.close()

    return make


def problems_of_history(*batches: int) -> Callable[[Path], list[str]]:
    """The job stands at one of these batches, and its sink with it."""

    def problems(root: Path) -> list[str]:
        history = History.reopened(root)
        try:
            found = problems_of(history.shelf.job)
            if not found and history.batch not in batches:
                found.append(f"the job is at batch {history.batch}")
            if not found and history.sink_batch != history.batch:
                found.append(f"the sink is at batch {history.sink_batch}, the job at {history.batch}")
            if not found:
                found += history.unlike_uninterrupted()
        finally:
            history.close()
        return found

    return problems


def _fork_of(history: History) -> StreamingJob:
    return replace(history.shelf.job, job_id="copy", name="copy", asset_key="copy")


def _fork(root: Path) -> None:
    history = History.reopened(root)
    old, new = history.sink, root / "copied output"
    outputs = {str(old): str(new)} if is_local() else {place(old): place(new)}
    fork(history.shelf.job, _fork_of(history), StartFrom.parse("latest"), origin="a test", outputs=outputs)


def _problems_of_fork(root: Path) -> list[str]:
    history = History.reopened(root)
    try:
        found = problems_of(history.shelf.job)
        job = _fork_of(history)
        known = [record.job_id for record in job.catalog.jobs.all()]
        live = job.catalog.jobs.get("copy").live_directory if "copy" in known else None
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
    Scenario("checkpoint", _made(_more), _done(GoldenJob.image), _looked_at()),
    Scenario("first checkpoint", _made(lambda _: None), _done(GoldenJob.image), _looked_at()),
    Scenario(
        "checkpoint of what is not flushed",
        _made(GoldenJob.image),
        _done(lambda golden: (golden.commit(5), golden.image())),
        _looked_at(),
    ),
    Scenario("savepoint", _made(_more), _done(lambda golden: golden.image(ImageKind.SAVEPOINT, "sp")), _looked_at()),
    Scenario(
        "first checkpoint after a savepoint",
        _made(_savepoint_and_no_live_directory),
        _done(GoldenJob.image),
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
        _made(_three_images, num_retained=1),
        _done(GoldenJob.subsume, num_retained=1),
        _looked_at(num_retained=1),
    ),
    Scenario("restore", _made(_more), _done(lambda golden: golden.start("chk-1")), _looked_at()),
    Scenario("restore of a lost directory", _made(_lose_live_directory), _done(GoldenJob.start), _looked_at()),
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
    Scenario("fork", _make_history(with_savepoint=False), _fork, _problems_of_fork),
)
