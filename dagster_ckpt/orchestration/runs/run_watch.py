"""Polls the run of a stream for reasons to stop, because not every termination sends a signal.

If a step's run worker was killed, a run was terminated while its code server was down, or a run was
forcibly marked as ended while its process hung, the process gets no signal and would keep writing
for weeks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import dagster as dg

from dagster_ckpt.orchestration.runs.run_status import RunWorker, worker_of
from dagster_ckpt.stream.handle import Clock, monotonic_ms
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity

# How often each running stream reads its run from Dagster's database (a small query).
LOOK_EVERY_MS = 5_000

_END_REASONS = {
    dg.DagsterRunStatus.CANCELING: "its run is being terminated",
    dg.DagsterRunStatus.CANCELED: "its run is recorded as CANCELED",
    dg.DagsterRunStatus.FAILURE: "its run is recorded as FAILURE",
    dg.DagsterRunStatus.SUCCESS: "its run is recorded as SUCCESS",
}


class RunWatch:
    """Determines whether a stream should stop, and why.

    Args:
        instance: The Dagster instance.
        run_id: The run that the stream belongs to.
        signalled: Whether a signal asked the process to stop.
        clock: Monotonic time in milliseconds.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        run_id: str,
        *,
        signalled: Callable[[], bool],
        clock: Clock = monotonic_ms,
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._signalled = signalled
        self._clock = clock
        self._parent = _run_worker_above(worker_of(instance, run_id))
        self._next_look_ms = clock() + LOOK_EVERY_MS
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the stream should stop, once `should_stop` has returned True."""
        return self._reason

    def should_stop(self) -> bool:
        """Whether the stream should stop; cheap enough to call several times a second."""
        if self._reason is None:
            self._reason = self._look()
        return self._reason is not None

    def _look(self) -> str | None:
        if self._signalled():
            return "a signal"
        if self._parent is not None and self._parent.liveness() is Liveness.ENDED:
            return f"the process of its run, {self._parent.pid}, is gone"
        if self._clock() < self._next_look_ms:
            return None
        self._next_look_ms = self._clock() + LOOK_EVERY_MS
        try:
            run = self._instance.get_run_by_id(self._run_id)
        except Exception:  # noqa: BLE001 - a temporarily unavailable database must not end a stream
            return None
        return "its run was deleted" if run is None else _END_REASONS.get(run.status)


def _run_worker_above(worker: RunWorker | None) -> ProcessIdentity | None:
    """The run's process if it is this process's parent (multiprocess executor), else None."""
    if worker is None or worker.pid == os.getpid() or worker.pid != os.getppid():
        return None
    return ProcessIdentity.of(worker.pid)
