"""The operations under torture: those of `lost_power`, sweeping, and whole runs with their ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dagster_ckpt.catalog.desired_states import UpgradePhase
from dagster_ckpt.catalog.records import Holder, RequestKind, SnapshotStatus
from dagster_ckpt.client.reconciliation import roll_back
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, housekeeping
from dagster_ckpt.runtime.execution import StreamRun
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind, TerminalState
from tests.support.as_writer import holding
from tests.support.failed_upgrade import WRONG, failed_upgrade, row
from tests.support.golden_stream import GoldenStream
from tests.support.lost_lease import take_checkpoint
from tests.support.lost_power import SCENARIOS as OF_POWER_LOSS
from tests.support.lost_power import Scenario, problems_of, problems_of_history, without_lease
from tests.support.played_query import PlayedQuery
from tests.support.rewind_history import LAST, History
from tests.support.verbs import trigger_savepoint

_TTL_MS = 10**9
_HOLDER = Holder("next", "run-next", "host", 1, 1, "boot")


def _make_swept(root: Path) -> None:
    """What crashes leave, beside two checkpoints and a savepoint."""
    golden = GoldenStream(root).make()
    golden.snapshot()
    golden.commit(5)
    golden.snapshot()
    golden.snapshot(SnapshotKind.SAVEPOINT, "sp")
    shared = root / "snapshots/golden/shared"
    shared.mkdir(exist_ok=True)
    (shared / "9-dead-0.pack").write_bytes(b"x" * 100)
    (root / "snapshots/golden/chk-9").mkdir()
    (root / "snapshots/golden/chk-9/9-dead-0.tmp").write_bytes(b"x")
    golden.close()


def _sweep(root: Path) -> None:
    housekeeping(GoldenStream(root).stream, older_than_ms=0)


def _problems_of_golden(root: Path) -> list[str]:
    golden = GoldenStream(root)
    try:
        found = problems_of(golden.stream)
        names = {path.name for path in (root / "snapshots/golden/shared").iterdir()}
        return found + ([] if "9-dead-0.pack" not in names else ["what a crash left is still there after a sweep"])
    finally:
        golden.close()


def _make_history(root: Path) -> None:
    history = History(root)
    trigger_savepoint(history.shelf.stream, origin="torture", label="sp")
    history.commit(LAST + 1)
    history.sinks(history.file_sink)
    history.close()


def _run(start_from: str, *, predecessor_ended: bool) -> Callable[[Path], object]:
    """A whole run of a query that ends at once: lease, plan, restore, roll-back, start, end of the run."""

    def work(root: Path) -> None:
        stream = History.reopened(root).shelf.stream
        request = stream.catalog.requests.submit(stream.stream_id, RequestKind.START, origin="torture")
        lease = stream.catalog.leases.acquire(stream.stream_id, _HOLDER, _TTL_MS)
        try:
            asked = RunRequest(
                "run-next",
                lambda _live: PlayedQuery(ends=True),  # type: ignore[arg-type, return-value]
                start_from=StartFrom(start_from, accept_loss=True),
                start_request_id=request.request_id,
            )
            keeper = LeaseKeeper(stream.catalog, lease, ttl_ms=_TTL_MS)
            acquired = AcquiredLease(replace(lease, predecessor_unproven=not predecessor_ended))
            StreamRun(stream, asked, acquired, keeper).until_the_end("next")
        finally:
            stream.catalog.leases.release(lease)

    return work


def _make_failed_upgrade(root: Path) -> None:
    history = History(root)
    failed_upgrade(history)
    history.sinks(history.file_sink)
    history.close()


def _roll_upgrade_back(root: Path) -> None:
    roll_back(History.reopened(root).shelf.stream, run_id="torture")


def _problems_of_upgrade(root: Path) -> list[str]:
    history = History.reopened(root)
    stream = history.shelf.stream
    try:
        found = problems_of_history(LAST, WRONG)(root)
        if row(history).upgrade is not None and not found:
            # Whatever was left of it: rolling it back ends, and the old code goes on where it had stopped.
            with suppress(RequestFailedError):
                roll_back(stream, run_id="torture again")
            upgrade = row(history).upgrade
            if upgrade is None or upgrade.phase is not UpgradePhase.ROLLED_BACK:
                found.append(f"the upgrade ends as {upgrade}")
            found += problems_of_history(LAST)(root)
        return found
    finally:
        history.close()


def _canceling(root: Path) -> History:
    history = History.reopened(root)
    history.shelf.cleaning_up(ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)
    return history


def _make_canceled(root: Path) -> None:
    history = History(root)
    stream = history.shelf.stream
    trigger_savepoint(stream, origin="torture", label="sp")
    for batch in (LAST + 1, LAST + 2):
        history.commit(batch)
        with holding(stream.catalog, stream.stream_id) as lease:
            take_checkpoint(stream, lease, "first", [history.file_sink])
    history.close()


def _delete_at_cancellation(root: Path) -> None:
    apply_terminal_retention(_canceling(root).shelf.stream, "first", TerminalState.CANCELED)


def _problems_of_canceled(root: Path) -> list[str]:
    """The rest of it goes by the next pass; the savepoint stays, and the stream starts from it."""
    history = _canceling(root)
    stream = history.shelf.stream
    try:
        without_lease(stream)
        apply_terminal_retention(stream, "first", TerminalState.CANCELED)
        housekeeping(stream, older_than_ms=0)
        left = [
            each
            for each in stream.catalog.snapshots.of_stream(stream.stream_id)
            if each.status is not SnapshotStatus.DELETED
        ]
        found = [f"{each.kind} {each.number} is left" for each in left if each.kind == "CHECKPOINT"]
        folder = root / "snapshots" / stream.stream_id
        found += [f"{path.parent.name} is left on storage" for path in folder.glob("chk-*/_metadata")]
        if not found:
            history.start("sp")
            found = problems_of(stream)
        if not found and (history.batch, history.sink_batch) != (LAST, LAST):
            found.append(f"from the savepoint the stream is at batch {history.batch}, the sink at {history.sink_batch}")
        return found
    finally:
        history.close()


# Who deletes what was promised, because that is asked for.
DELETES_SAVEPOINTS = frozenset({"claim"})
DELETES_ALL = frozenset({"end of the run: all is deleted"})

_AFTER_A_RUN = problems_of_history(LAST, LAST + 1)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *OF_POWER_LOSS,
        Scenario("retention and sweep", _make_swept, _sweep, _problems_of_golden),
        Scenario(
            "run: resume, end of the run",
            _make_history,
            _run("latest", predecessor_ended=True),
            _AFTER_A_RUN,
        ),
        Scenario(
            "run: adopt while the old writer may live",
            _make_history,
            _run("latest", predecessor_ended=False),
            _AFTER_A_RUN,
        ),
        Scenario(
            "run: roll back to a savepoint",
            _make_history,
            _run("sp", predecessor_ended=True),
            _AFTER_A_RUN,
        ),
        Scenario("an upgrade rolled back", _make_failed_upgrade, _roll_upgrade_back, _problems_of_upgrade),
        Scenario("end of the run: all is deleted", _make_canceled, _delete_at_cancellation, _problems_of_canceled),
    )
}
