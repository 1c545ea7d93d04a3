"""Does a driver outside the orchestrator still live? Only its lease, its process and its heartbeat can tell."""

from __future__ import annotations

import socket

import psutil

from dagster_ckpt.catalog import Catalog, ExecutionRecord
from dagster_ckpt.lifecycle.writer_lease import has_living_holder

# A driver that has stopped its query gives up the lease first, and then applies retention: not for longer than this.
SILENCE_MS = 60_000


def driver_is_gone(catalog: Catalog, execution: ExecutionRecord, *, now_ms: int) -> bool:
    """Whether the process of an unsettled execution will do nothing for it any more.

    Args:
        catalog: The catalog.
        execution: An execution that is not settled.
        now_ms: Wall clock.
    """
    if has_living_holder(catalog, execution.job_id):
        return False
    if execution.host == socket.gethostname() and not _runs(execution.pid):
        return True
    return now_ms - execution.heartbeat_at_ms > SILENCE_MS


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
