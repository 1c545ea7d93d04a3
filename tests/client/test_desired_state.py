"""One look at a managed stream: each case of desired_state.yaml says what is wanted, what is seen, and what follows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import AlertUntil, DesiredRecord, PreflightRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    ExecutionStatus,
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.client.desired_state import decide
from dagster_ckpt.client.managed_stream import Action, Adopt, Ask, ObservedStream, Run, Settle, StreamLife, Withdraw
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.values.modes import DesiredState, SnapshotKind
from tests.support.manual_clock import ManualClock

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "desired_state.yaml").read_text())


def test_every_case_is_one_of_its_own() -> None:
    assert len({case["it"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["it"])
def test_what_follows(case: dict[str, Any]) -> None:
    row = _row(case)
    decision = decide(row, _desired(case.get("declared")), _policy(case.get("policy", {})), _seen(case["seen"]))

    then = case["then"]
    done = [_shown(action) for action in decision.actions]
    assert done == ([] if then["do"] == "nothing" else then["do"]), decision
    assert decision.reached == then.get("reached", False), decision
    assert decision.begins == then.get("begins", False), decision
    upgrade = decision.upgrade
    if "phase" in then:
        assert (upgrade.phase.value if upgrade is not None else None) == then["phase"], decision
    if "holds" in then:
        assert decision.holds_restart == then["holds"], decision
    if "snapshot" in then:
        assert upgrade is not None
        assert upgrade.snapshot_id == then["snapshot"]
    if "to_version" in then:
        assert upgrade is not None
        assert upgrade.to_version == then["to_version"]
    if "because" in then:
        assert re.search(then["because"], decision.reason), decision
    if "failing_before" in then:
        assert upgrade is not None
        assert upgrade.failing_before == then["failing_before"]
    if "until" in then:
        assert decision.alert_until is AlertUntil(then["until"]), decision
    if then.get("alert") is not None:
        assert re.search(then["alert"], decision.alert or ""), decision
    else:
        assert decision.alert == (None if "alert" in then else row.alert), decision


@pytest.mark.parametrize("retry_refused", [False, True])
def test_an_upgrade_that_failed_for_good_is_started_again_by_who_sets_running_again(
    tmp_path: Path, retry_refused: bool
) -> None:
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=ManualClock(6000))
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
    row = catalog.desired_states.ensure("orders", origin="a test")
    upgrade = _upgrade({"phase": "UPGRADING", "started_at_ms": 2000})
    assert catalog.desired_states.advance(row, upgrade=upgrade, alert=None, request_id=None)

    row = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="a test", retry_refused=retry_refused)
    failed = {"code_version": "2", "status": "FAILED", "ended_at_ms": 5000}
    decision = decide(row, None, _policy({}), _seen({"life": "ENDED", "code_version": "2", "execution": failed}))

    assert decision.upgrade is not None
    assert (decision.upgrade.phase, decision.upgrade.old_execution_id) == (UpgradePhase.STARTING, "newest")
    catalog.close()


def _row(case: dict[str, Any]) -> DesiredRecord:
    given = dict(case.get("row", {}))
    upgrade = case.get("upgrade")
    preflight = given.pop("preflight", None)
    until = given.pop("alert_until", None)
    desired = _desired(given.pop("desired", "RUNNING"))
    facts = {"generation": 3, "reached": 2, "request_id": "r", "alert": None, "changed_at_ms": 1000, **given}
    return DesiredRecord(
        stream_id="orders",
        desired=desired,
        upgrade=_upgrade(upgrade) if upgrade is not None else None,
        preflight=_preflight(preflight) if preflight is not None else None,
        origin="a test",
        updated_at_ms=facts["changed_at_ms"],
        alert_until=AlertUntil(until) if until is not None else None,
        **facts,
    )


def _desired(name: str | None) -> DesiredState | None:
    return DesiredState(name) if name is not None else None


def _upgrade(given: dict[str, Any]) -> UpgradeRecord:
    facts = {"from_version": "1", "to_version": "2", "began_at_ms": 9000, "reason": "a new version", **given}
    return UpgradeRecord(
        **{**facts, "phase": UpgradePhase(facts["phase"]), "mode": UpgradeMode(given.get("mode", "SAVEPOINT"))}
    )


def _preflight(given: dict[str, Any]) -> PreflightRecord:
    return PreflightRecord(**{"code_version": "2", "reason": "as the test says", "batch_id": 7, "at_ms": 9500, **given})


def _policy(given: dict[str, Any]) -> UpgradePolicy:
    return UpgradePolicy(**{"preflight": False, **given, "mode": UpgradeMode(given.get("mode", "SAVEPOINT"))})


def _seen(given: dict[str, Any]) -> ObservedStream:
    life = StreamLife(given["life"])
    has_execution = life is not StreamLife.NEVER_STARTED
    snapshot = given.get("snapshot", {"number": 9000})
    facts = {
        "now_ms": 10_000,
        "code_version": "1",
        "has_state": has_execution,
        **{name: value for name, value in given.items() if name not in ("life", "execution", "request", "snapshot")},
    }
    return ObservedStream(
        life=life,
        execution=_execution(given.get("execution", {})) if has_execution else None,
        request=_request(given["request"]) if "request" in given else None,
        newest_snapshot=_snapshot(snapshot) if snapshot is not None and has_execution else None,
        **facts,
    )


def _execution(given: dict[str, Any]) -> ExecutionRecord:
    facts = {"started_at_ms": 2000, "ended_at_ms": None, "reason": "a reason", "code_version": "1", **given}
    return ExecutionRecord(
        execution_id="newest",
        stream_id="orders",
        run_id="run",
        cause=StartCause(facts.pop("cause", "MANUAL")),
        status=ExecutionStatus(facts.pop("status", "RUNNING")),
        settled=False,
        host="here",
        pid=1,
        recovery=None,
        live_directory="/live",
        progress=None,
        heartbeat_at_ms=facts.pop("heartbeat_at_ms", 0),
        **facts,
    )


def _request(given: dict[str, Any]) -> RequestRecord:
    facts = {"created_at_ms": 9500, "resolved_at_ms": None, "snapshot_id": None, "error": None, **given}
    return RequestRecord(
        request_id="r",
        stream_id="orders",
        arguments={},
        origin="desired state",
        **{**facts, "kind": RequestKind(facts["kind"]), "status": RequestStatus(facts["status"])},
    )


def _snapshot(given: dict[str, Any]) -> SnapshotRecord:
    number = given["number"]
    return SnapshotRecord(
        snapshot_id=f"chk-{number}",
        stream_id="orders",
        execution_id="newest",
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
        completed_at_ms=number,
    )


def _shown(action: Action) -> str:
    if isinstance(action, Ask):
        given = dict(action.arguments)
        start_from = [given.pop("start_from")] if "start_from" in given else []
        given.pop("discard_state", None)
        options = [name if value is True else f"{name}={value}" for name, value in given.items()]
        return " ".join([action.kind.value, *start_from, *options])
    if isinstance(action, Adopt):
        return f"ADOPT {action.desired.value}"
    if isinstance(action, Run):
        return f"RUN {action.step.value}"
    return {Withdraw: "WITHDRAW", Settle: "SETTLE"}[type(action)]
