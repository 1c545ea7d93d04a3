"""Stopping a process as a hanging disk or a suspended machine does, at a moment when it holds up nobody else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil


def freeze(pid: int, within_s: float = 60.0) -> None:
    """Stop a process while it writes to no SQLite database.

    One that is stopped within a transaction, or while it opens or closes a database, keeps it locked for everybody:
    Dagster's own databases as well, and with them its daemon. That is another story than the one that a test tells.

    Args:
        pid: The process.
        within_s: Seconds until such a moment has to come.

    Raises:
        TimeoutError: It wrote at each of these moments.
    """
    deadline = time.monotonic() + within_s
    process = psutil.Process(pid)
    while True:
        process.send_signal(signal.SIGSTOP)
        # All its threads have stopped a little later.
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.001)
        if not _has_locked_for_writing(pid):
            return
        process.send_signal(signal.SIGCONT)
        if time.monotonic() > deadline:
            raise TimeoutError(f"for {within_s:.0f} s process {pid} held a lock for writing whenever it was looked at")
        time.sleep(0.01)


def thaw(pid: int) -> None:
    """Let a frozen process go on."""
    os.kill(pid, signal.SIGCONT)


def _has_locked_for_writing(pid: int) -> bool:
    # SQLite locks ranges of its files; a connection that only stays open has them locked for reading.
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "WRITE" in fields and fields[fields.index("WRITE") + 1] == str(pid):
            return True
    return False
