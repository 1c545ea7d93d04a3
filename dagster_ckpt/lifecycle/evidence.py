"""Has the process that holds a lease ended? Only a proof counts; a guess does not."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dagster_ckpt.catalog import Holder, LeaseRecord

# A start time read twice may differ by the kernel's clock tick.
START_TIME_SLACK_MS = 50
# The JVM ends by itself when the Python side of its pipe is gone; give it time to.
JVM_GRACE_S = 10.0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started_at_ms: int

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Identity of a running process.

        Raises:
            psutil.NoSuchProcess: There is no such process now.
        """
        return ProcessIdentity(pid, int(psutil.Process(pid).create_time() * 1000))

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not: it writes nothing any more)."""
        try:
            process = psutil.Process(self.pid)
            started_at_ms = int(process.create_time() * 1000)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        return abs(started_at_ms - self.started_at_ms) <= START_TIME_SLACK_MS


def lives_since(pid: int, at_ms: int) -> bool:
    """Whether the process that had this number at a moment still runs on this machine.

    Args:
        pid: Its number.
        at_ms: A moment at which it ran, ms since the epoch. A process that began later is another one.
    """
    try:
        process = ProcessIdentity.of(pid)
    except psutil.NoSuchProcess:
        return False
    return process.started_at_ms <= at_ms + START_TIME_SLACK_MS and process.is_alive()


def boot_id() -> str:
    """Identity of this boot of this machine and, in a container, of its own processes; pids mean nothing across two.

    Containers may share the name of their host, and none sees the processes of another one.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        return f"booted-{int(psutil.boot_time())}"
    processes = Path("/proc/self/ns/pid")
    namespace = processes.readlink().name if processes.is_symlink() else ""
    return f"{path.read_text().strip()} {namespace}".rstrip()


def this_holder(execution_id: str, run_id: str, jvm_pid: int | None) -> Holder:
    """Describe this process, and the JVM that works for it, as a lease holder."""
    me = ProcessIdentity.of(os.getpid())
    jvm = ProcessIdentity.of(jvm_pid) if jvm_pid is not None else None
    return Holder(
        execution_id=execution_id,
        run_id=run_id,
        host=socket.gethostname(),
        pid=me.pid,
        process_started_at_ms=me.started_at_ms,
        jvm_pid=jvm.pid if jvm else None,
        jvm_started_at_ms=jvm.started_at_ms if jvm else None,
        boot_id=boot_id(),
    )


def has_provably_ended(lease: LeaseRecord, *, jvm_grace_s: float = JVM_GRACE_S) -> bool:
    """Whether the holder of `lease` can write nothing any more, as far as this machine can prove.

    A proof needs the same machine, the same boot, and both the Python process and its
    JVM gone. From another machine nothing can be proven, and the answer is False.

    Args:
        lease: The lease somebody else holds.
        jvm_grace_s: Seconds to wait for the JVM of a dead Python process to end.
    """
    if lease.host != socket.gethostname() or lease.boot_id != boot_id():
        return False
    if ProcessIdentity(lease.pid, lease.process_started_at_ms).is_alive():
        return False
    if lease.jvm_pid is None or lease.jvm_started_at_ms is None:
        return True
    jvm = ProcessIdentity(lease.jvm_pid, lease.jvm_started_at_ms)
    deadline = time.monotonic() + jvm_grace_s
    while jvm.is_alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
