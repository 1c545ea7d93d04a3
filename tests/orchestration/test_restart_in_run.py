"""Who continues after the death of a driver: the spare process, another one, or nobody in this run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import begin_execution

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.orchestration import restart_in_run
from dagster_ckpt.orchestration.child_process import DELAY_S, Spare, Standby
from dagster_ckpt.orchestration.restart_in_run import _await_restart, _restarting
from dagster_ckpt.policies.restart import RestartStrategies, effective_restart_strategy
from tests.support.as_writer import as_writer
from tests.support.streams import stream_at

# A child that does not end must not hold the suite.
pytestmark = pytest.mark.timeout(60)

RUN = "run"
STRATEGY = effective_restart_strategy(RestartStrategies.fixed_delay_restart(3, 0), checkpointing_enabled=True)


def context() -> Any:
    instance = SimpleNamespace(
        all_logs=lambda *_, **__: [], get_run_by_id=lambda _: SimpleNamespace(status=dg.DagsterRunStatus.STARTED)
    )
    return SimpleNamespace(instance=instance, run=SimpleNamespace(run_id=RUN), log=logging.getLogger("test"))


def failed_stream(root: Path) -> tuple[Callable[[], Any], str]:
    stream = stream_at(root, restart=STRATEGY)
    stream.register()
    execution = begin_execution(stream.catalog, "orders", RUN)
    as_writer(stream.catalog).executions.end(execution.execution_id, ExecutionStatus.FAILED, "killed")
    return lambda: stream, execution.execution_id


@pytest.mark.parametrize(
    ("was_seen", "was_spare", "continues"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_only_a_spare_may_end_before_its_execution_begins(
    tmp_path: Path, was_seen: bool, was_spare: bool, continues: bool
) -> None:
    open_stream, failed = failed_stream(tmp_path)

    after = failed if was_seen else None
    assert _await_restart(context(), open_stream, after=after, was_spare=was_spare) == (failed if continues else None)


def test_a_spare_takes_over_and_if_it_dies_at_once_another_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def await_restart(_context: Any, _open: Any, *, after: str | None, was_spare: bool) -> str:
        (tmp_path / f"decided-{len(list(tmp_path.glob('decided-*')))}").write_text(f"{after} {was_spare}")
        return "first"

    monkeypatch.setattr(restart_in_run, "_await_restart", await_restart)
    now = [0.0]

    def work() -> str:
        lives = len(list(tmp_path.glob("life-*")))
        (tmp_path / f"life-{lives}").write_text(str(os.getpid()))
        if lives < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return "ended by itself"

    standby = Standby(lambda: Spare(lambda: lambda: True, work), lambda _: None, clock=lambda: now[0])
    now[0] = DELAY_S
    standby.tend()
    spare = standby._spare
    assert spare is not None

    assert _restarting(context(), lambda: None, work, standby) == "ended by itself"  # type: ignore[arg-type, return-value]

    pids = [int((tmp_path / f"life-{life}").read_text()) for life in range(3)]
    assert pids.index(spare.pid) == 1
    assert len(set(pids)) == 3
    decisions = [(tmp_path / f"decided-{number}").read_text() for number in range(2)]
    assert decisions == ["None False", "first True"]
