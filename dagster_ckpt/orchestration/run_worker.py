"""The process that Dagster started for a run, as the run's own log names it."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg


@dataclass(frozen=True)
class RunWorker:
    """A run's process: the one that executes its steps, or starts a process for each.

    Attributes:
        pid: Its number on its machine.
        seen_at_ms: When it said so, ms since the epoch.
    """

    pid: int
    seen_at_ms: int


def worker_of(instance: dg.DagsterInstance, run_id: str) -> RunWorker | None:
    """The process of a run, or None where none has begun.

    Every launcher's process says so first of all: "Started process for run (pid: 42)", or the executor does.
    """
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event is not None else None
        if pid is not None and str(pid.value).isdigit():
            return RunWorker(int(str(pid.value)), int(entry.timestamp * 1000))
    return None
