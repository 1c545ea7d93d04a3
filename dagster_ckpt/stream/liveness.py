"""Is the process that held a lease, ran an execution or was launched dead? One answer, by one set of time limits.

Only `ENDED` is a proof. A process is identified by what no clock can change: the host, the boot and the pid namespace,
its number, and the kernel's own count of when it started. Wall-clock times prove nothing: they are stepped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import psutil

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, Holder, LaunchRecord, LeaseRecord

# The JVM ends by itself when the Python side of its pipe is gone; give it time to.
JVM_GRACE_S = 10.0
# A heartbeat comes every two seconds; an execution with one so young needs no look.
LIVELY_MS = 15_000
# A process that cannot be seen, holds no lease and has sent no heartbeat for so long does nothing any more. A driver
# that has stopped its query gives up the lease first, and then applies retention: not for longer than this.
SILENCE_MS = 60_000
# The same for a run that has not begun an execution yet: until then it starts Spark, and sends nothing.
SLOW_START_MS = 180_000

# A start time that is compared with the clock by which a log entry was written.
_CLOCK_SLACK_MS = 50
# /proc/<pid>/stat after the name in parentheses, which may hold anything: field 3 is the first, field 22 the start.
_STATE, _START_TICKS = 0, 19
_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self/stat").exists()


class Liveness(Enum):
    """What is known of a process. ENDED is a proof; UNKNOWN is all that can be said from another machine or boot."""

    ALIVE = "ALIVE"
    ENDED = "ENDED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same number, nor for one of another machine or boot.

    Attributes:
        pid: Its number.
        start_ticks: When the kernel says that it started, counted from the boot and untouched by the wall clock; None
            where this was not recorded, and nothing can be proven.
        host: Its machine.
        boot_id: The boot of that machine and its pid namespace; see `boot_id`.
    """

    pid: int
    start_ticks: int | None
    host: str
    boot_id: str | None

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Identity of a process that runs on this machine.

        Raises:
            psutil.NoSuchProcess: There is no such process now.
        """
        seen = _seen(pid)
        return ProcessIdentity(pid, seen.start_ticks if seen is not None else None, socket.gethostname(), boot_id())

    def liveness(self) -> Liveness:
        """Whether this very process still runs; a zombie has ended, it writes nothing any more."""
        if not self.boot_id or self.start_ticks is None:
            return Liveness.UNKNOWN
        if (self.host, self.boot_id) != (socket.gethostname(), boot_id()):
            return Liveness.UNKNOWN
        try:
            seen = _seen(self.pid)
        except psutil.NoSuchProcess:
            return Liveness.ENDED
        if seen is None:
            return Liveness.UNKNOWN
        return Liveness.ALIVE if seen.start_ticks == self.start_ticks and seen.runs else Liveness.ENDED


def boot_id() -> str:
    """Identity of this boot of this machine and, in a container, of its own processes; pids mean nothing across two.

    Containers may share the name of their host, and none sees the processes of another one. Empty where the system has
    no such identity: then nothing is ever proven.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        return _boot_session()
    # Start ticks are shown as the reader's time namespace counts them.
    namespaces = [Path("/proc/self/ns") / kind for kind in ("pid", "time")]
    names = [namespace.readlink().name for namespace in namespaces if namespace.is_symlink()]
    return " ".join([path.read_text().strip(), *names])


def this_holder(execution_id: str, run_id: str, jvm_pid: int | None) -> Holder:
    """Describe this process, and the JVM that works for it, as a lease holder."""
    me = ProcessIdentity.of(os.getpid())
    jvm = ProcessIdentity.of(jvm_pid) if jvm_pid is not None else None
    return Holder(
        execution_id=execution_id,
        run_id=run_id,
        host=me.host,
        pid=me.pid,
        process_start_ticks=me.start_ticks,
        jvm_pid=jvm.pid if jvm else None,
        jvm_start_ticks=jvm.start_ticks if jvm else None,
        boot_id=me.boot_id or "",
    )


def jvm_of(lease: LeaseRecord) -> ProcessIdentity | None:
    """The JVM that works for a lease's holder, or None where it names none."""
    if lease.jvm_pid is None:
        return None
    return ProcessIdentity(lease.jvm_pid, lease.jvm_start_ticks, lease.host, lease.boot_id)


def holder_liveness(lease: LeaseRecord, *, jvm_grace_s: float = 0.0) -> Liveness:
    """Whether the holder of a lease can write nothing any more. It has ended once Python process and JVM both have.

    Args:
        lease: The lease, run out or not.
        jvm_grace_s: Seconds to wait for the JVM of a Python process that has ended.
    """
    python = ProcessIdentity(lease.pid, lease.process_start_ticks, lease.host, lease.boot_id).liveness()
    jvm = jvm_of(lease)
    if python is not Liveness.ENDED or jvm is None:
        return python
    deadline = time.monotonic() + jvm_grace_s
    while (answer := jvm.liveness()) is Liveness.ALIVE and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def is_held(lease: LeaseRecord | None) -> bool:
    """Whether a lease is in force: it has not run out, and its holder is not proven to have ended."""
    return lease is not None and not lease.expired and holder_liveness(lease) is not Liveness.ENDED


def execution_liveness(catalog: Catalog, execution: ExecutionRecord) -> Liveness:
    """Whether the process of an unsettled execution will do something for it yet.

    UNKNOWN once it holds no lease, cannot be seen from here, and has been silent for longer than any step takes.

    Args:
        catalog: The catalog.
        execution: An execution that is not settled.
    """
    if is_held(catalog.leases.current(execution.stream_id)):
        return Liveness.ALIVE
    if _process_of(execution).liveness() is Liveness.ENDED:
        return Liveness.ENDED
    # By the clock that dates the heartbeats: this machine's may be hours away from it.
    silent_ms = catalog.now_ms() - execution.heartbeat_at_ms
    return Liveness.UNKNOWN if silent_ms > SILENCE_MS else Liveness.ALIVE


def launch_liveness(launch: LaunchRecord) -> Liveness:
    """Whether the process that was launched still runs."""
    return ProcessIdentity(launch.pid, launch.process_start_ticks, launch.host, launch.boot_id).liveness()


def run_liveness(
    catalog: Catalog, run_id: str, stream_id: str, *, pid: int, seen_at_ms: int, silent_ms: int
) -> Liveness:
    """Whether the process of an orchestrator's run is there, of which only its number is known.

    UNKNOWN once it cannot be seen from here and has given no sign of life for longer than any step takes. ENDED only by
    the proof of what its execution recorded.

    Args:
        catalog: The catalog.
        run_id: The run.
        stream_id: The stream that it runs.
        pid: Number of its process, on a machine that is not known.
        seen_at_ms: When that process said so.
        silent_ms: How long nothing new has been seen of it, by a clock that never goes back.
    """
    if _may_run_since(pid, seen_at_ms):
        return Liveness.ALIVE
    lease = catalog.leases.current(stream_id)
    if lease is not None and lease.run_id == run_id and is_held(lease):
        return Liveness.ALIVE
    executions = catalog.executions.of_run(run_id)
    if executions and _process_of(executions[0]).liveness() is Liveness.ENDED:
        return Liveness.ENDED
    return Liveness.UNKNOWN if silent_ms > SLOW_START_MS else Liveness.ALIVE


def _process_of(execution: ExecutionRecord) -> ProcessIdentity:
    return ProcessIdentity(execution.pid, execution.process_start_ticks, execution.host, execution.boot_id)


@dataclass(frozen=True)
class _Seen:
    start_ticks: int
    runs: bool


def _seen(pid: int) -> _Seen | None:
    """A process as the system shows it; None where there is one that it does not show to this user.

    Raises:
        psutil.NoSuchProcess: There is none.
    """
    if _HAS_PROC:
        try:
            stat = (_PROC / f"{pid}/stat").read_bytes()
        except PermissionError:
            return None
        except (FileNotFoundError, ProcessLookupError) as error:
            # Mounted with `hidepid`, /proc has no entry for the processes of other users.
            if _is_there(pid):
                return None
            raise psutil.NoSuchProcess(pid) from error
        fields = stat[stat.rindex(b")") + 1 :].split()
        return _Seen(int(fields[_START_TICKS]), fields[_STATE] not in (b"Z", b"X", b"x"))
    process = psutil.Process(pid)
    # What the kernel noted once, in seconds. `create_time()` would be moved with the clock.
    started_s: float = process._proc.create_time(monotonic=True)  # type: ignore[attr-defined]
    return _Seen(round(started_s * 1_000_000), process.status() != psutil.STATUS_ZOMBIE)


def _is_there(pid: int) -> bool:
    """Whether a process has this number, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _boot_session() -> str:
    """MacOS names each of its boots."""
    try:
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.strip()


def _may_run_since(pid: int, at_ms: int) -> bool:
    # No proof of anything: it compares two clocks. It only keeps a run from being given up.
    try:
        started_at_ms = psutil.Process(pid).create_time() * 1000
        seen = _seen(pid)
        return started_at_ms <= at_ms + _CLOCK_SLACK_MS and seen is not None and seen.runs
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
