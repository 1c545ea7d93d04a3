"""The operations under torture: those of `lost_power`, sweeping, and whole runs with their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from golden_job import GoldenJob
from lost_power import SCENARIOS as OF_POWER_LOSS
from lost_power import Scenario, problems_of
from rewind_history import LAST, History
from test_run_job_refusals import PlayedQuery

from dagster_ckpt.catalog import Holder, RequestKind
from dagster_ckpt.image import ImageKind
from dagster_ckpt.lifecycle.execution import RunRequest, _Run
from dagster_ckpt.lifecycle.operations import Operator, trigger_savepoint
from dagster_ckpt.lifecycle.retention import housekeeping
from dagster_ckpt.lifecycle.start_from import StartFrom
from dagster_ckpt.lifecycle.writer_lease import AcquiredLease, LeaseKeeper

_TTL_MS = 10**9
_HOLDER = Holder("next", "run-next", "host", 1, 1, "boot")


def _make_swept(root: Path) -> None:
    """What crashes leave, beside two checkpoints and a savepoint."""
    golden = GoldenJob(root).make()
    golden.image()
    golden.commit(5)
    golden.image()
    golden.image(ImageKind.SAVEPOINT, "sp")
    shared = root / "images/golden/shared"
    shared.mkdir(exist_ok=True)
    (shared / "9-dead-0.pack").write_bytes(b"x" * 100)
    (root / "images/golden/chk-9").mkdir()
    (root / "images/golden/chk-9/9-dead-0.tmp").write_bytes(b"x")
    golden.close()


def _sweep(root: Path) -> None:
    housekeeping(GoldenJob(root).job, older_than_ms=0)


def _problems_of_golden(root: Path) -> list[str]:
    golden = GoldenJob(root)
    try:
        found = problems_of(golden.job)
        names = {path.name for path in (root / "images/golden/shared").iterdir()}
        return found + ([] if "9-dead-0.pack" not in names else ["what a crash left is still there after a sweep"])
    finally:
        golden.close()


def _make_history(root: Path) -> None:
    history = History(root)
    trigger_savepoint(history.shelf.job, Operator("torture"), label="sp")
    history.commit(LAST + 1)
    history.sinks(f"FileSink[file:{history.sink}]")
    history.close()


def _run(start_from: str, *, predecessor_ended: bool) -> Callable[[Path], object]:
    """A whole run of a query that ends at once: lease, plan, restore, roll-back, start, end of the run."""

    def work(root: Path) -> None:
        job = History.reopened(root).shelf.job
        request = job.catalog.requests.submit(job.job_id, RequestKind.START, origin="torture")
        lease = job.catalog.leases.acquire(job.job_id, _HOLDER, _TTL_MS)
        try:
            asked = RunRequest(
                "run-next",
                lambda _live: PlayedQuery(ends=True),  # type: ignore[arg-type, return-value]
                start_from=StartFrom.parse(start_from, accept_loss=True),
                start_request_id=request.request_id,
            )
            keeper = LeaseKeeper(job.catalog, lease, ttl_ms=_TTL_MS)
            acquired = AcquiredLease(replace(lease, predecessor_unproven=not predecessor_ended))
            _Run(job, asked, acquired, keeper).until_the_end("next")
        finally:
            job.catalog.leases.release(job.job_id, lease.token)

    return work


def _problems_of_history(root: Path) -> list[str]:
    history = History.reopened(root)
    try:
        # The process that held it is dead, or gave it back: who comes next waits for its end.
        current = history.shelf.job.catalog.leases.current(history.shelf.job.job_id)
        if current is not None:
            history.shelf.job.catalog.leases.release(current.job_id, current.token)
        found = problems_of(history.shelf.job)
        if not found and history.batch not in (LAST, LAST + 1):
            found.append(f"the job is at batch {history.batch}")
        if not found and history.sink_batch != history.batch:
            found.append(f"the sink is at batch {history.sink_batch}, the job at {history.batch}")
        return found
    finally:
        history.close()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *OF_POWER_LOSS,
        Scenario("retention and sweep", _make_swept, _sweep, _problems_of_golden),
        Scenario(
            "run: resume, end of the run", _make_history, _run("latest", predecessor_ended=True), _problems_of_history
        ),
        Scenario(
            "run: adopt beside a writer that may live",
            _make_history,
            _run("latest", predecessor_ended=False),
            _problems_of_history,
        ),
        Scenario(
            "run: roll back to a savepoint", _make_history, _run("sp", predecessor_ended=True), _problems_of_history
        ),
    )
}
