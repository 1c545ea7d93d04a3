"""Decide whether the process behind a lease, an execution or a launch is dead.

Only `ENDED` is a proof. A process is identified by what no clock change affects: host, boot and pid namespace, pid, and
start time in kernel ticks.

In Kubernetes, the API server proves the end of another pod, if its manifest passed its name, namespace and UID in the
variables below (Downward API), and the service account may `get` pods.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, Holder, LaunchRecord, LeaseRecord

if TYPE_CHECKING:
    import ssl
    import urllib.error


# The JVM ends when the Python side of its pipe closes.
JVM_GRACE_S = 10.0
LIVELY_MS = 15_000
# An unobservable process without a lease counts as inactive after this silence, longer than a driver applies retention
# after releasing its lease.
SILENCE_MS = 60_000
# The same for a run that is starting Spark and sends no heartbeats yet.
SLOW_START_MS = 180_000

# Pid of a JVM that cannot be observed, such as a Spark Connect server's. Its query outlives the process that starts it.
UNSEEN_JVM = 0

# Tolerance between a start time and the clock that dated a log entry.
_CLOCK_SLACK_MS = 50
# Indexes into /proc/<pid>/stat after the parenthesized name: fields 3 and 22.
_STATE, _START_TICKS = 0, 19
_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self/stat").exists()


class Liveness(Enum):
    """A process of another machine or boot is UNKNOWN, unless Kubernetes knows the end of its pod."""

    ALIVE = "ALIVE"
    ENDED = "ENDED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process. Without `start_ticks` (since boot), nothing can be proven of it."""

    pid: int
    start_ticks: int | None
    host: str
    boot_id: str | None

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Identify a process of this machine; ProcessLookupError if there is none."""
        seen = _seen(pid)
        return ProcessIdentity(pid, seen.start_ticks if seen is not None else None, socket.gethostname(), boot_id())

    def liveness(self) -> Liveness:
        """Whether exactly this process lives; a zombie has ended."""
        if not self.boot_id or self.start_ticks is None:
            return Liveness.UNKNOWN
        if (self.host, self.boot_id) != (socket.gethostname(), boot_id()):
            return Liveness.ENDED if pod_has_ended(self.boot_id) else Liveness.UNKNOWN
        try:
            seen = _seen(self.pid)
        except ProcessLookupError:
            return Liveness.ENDED
        if seen is None:
            return Liveness.UNKNOWN
        return Liveness.ALIVE if seen.start_ticks == self.start_ticks and seen.runs else Liveness.ENDED

    def send(self, number: signal.Signals) -> None:
        """Send a signal to exactly this process, if it is known to be running.

        Raises ProcessLookupError if it has ended, PermissionError if it belongs to another user.
        """
        if not hasattr(os, "pidfd_open"):
            if self.liveness() is Liveness.ALIVE:
                os.kill(self.pid, number)
            return
        # Check again with the pidfd, which never refers to a later process with the same pid.
        handle = os.pidfd_open(self.pid)
        try:
            if self.liveness() is Liveness.ALIVE:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def kill(self, *, within_s: float) -> bool:
        """Kill exactly this process, and return whether it has provably ended in time."""
        with suppress(ProcessLookupError, PermissionError):
            self.send(signal.SIGKILL)
        deadline = time.monotonic() + within_s
        while self.liveness() is Liveness.ALIVE and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.liveness() is Liveness.ENDED


def boot_id() -> str:
    """Identity of this machine's boot and, in a container, of its namespaces and its pod.

    Containers may share their host's name but not its processes. Empty: nothing can be proven.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        return _boot_session()
    # Start ticks are relative to the reader's time namespace.
    namespaces = [Path("/proc/self/ns") / kind for kind in ("pid", "time")]
    names = [namespace.readlink().name for namespace in namespaces if namespace.is_symlink()]
    pod = Pod.of(os.environ)
    return " ".join([path.read_text().strip(), *names, *([str(pod)] if pod is not None else [])])


def this_holder(execution_id: str, run_id: str, jvm_pid: int | None) -> Holder:
    """This process as a holder; `jvm_pid` is None for work without a query."""
    me = ProcessIdentity.of(os.getpid())
    jvm = ProcessIdentity.of(jvm_pid) if jvm_pid else None
    return Holder(
        execution_id=execution_id,
        run_id=run_id,
        host=me.host,
        pid=me.pid,
        process_start_ticks=me.start_ticks,
        jvm_pid=jvm_pid,
        jvm_start_ticks=jvm.start_ticks if jvm else None,
        boot_id=me.boot_id or "",
    )


def process_of(record: LeaseRecord | ExecutionRecord | LaunchRecord) -> ProcessIdentity:
    return ProcessIdentity(record.pid, record.process_start_ticks, record.host, record.boot_id)


def jvm_of(lease: LeaseRecord) -> ProcessIdentity | None:
    if lease.jvm_pid is None:
        return None
    return ProcessIdentity(lease.jvm_pid, lease.jvm_start_ticks, lease.host, lease.boot_id)


def holder_liveness(lease: LeaseRecord, *, jvm_grace_s: float = 0.0) -> Liveness:
    """Whether the Python process or the JVM of a lease's holder lives, and can still write."""
    python = process_of(lease).liveness()
    jvm = jvm_of(lease)
    if python is not Liveness.ENDED or jvm is None:
        return python
    deadline = time.monotonic() + jvm_grace_s
    while (answer := jvm.liveness()) is Liveness.ALIVE and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def is_held(lease: LeaseRecord | None) -> bool:
    return lease is not None and not lease.expired and holder_liveness(lease) is not Liveness.ENDED


def holds_lease(catalog: Catalog, stream_id: str, run_id: str) -> bool:
    lease = catalog.leases.current(stream_id)
    return lease is not None and lease.run_id == run_id and is_held(lease)


def execution_liveness(catalog: Catalog, execution: ExecutionRecord) -> Liveness:
    """Whether an execution's process lives; UNKNOWN after a long silence without lease or other sign."""
    if is_held(catalog.leases.current(execution.stream_id)):
        return Liveness.ALIVE
    if process_of(execution).liveness() is Liveness.ENDED:
        return Liveness.ENDED
    # The catalog's clock dated the heartbeats; this machine's may be hours off.
    silent_ms = catalog.now_ms() - execution.heartbeat_at_ms
    return Liveness.UNKNOWN if silent_ms > SILENCE_MS else Liveness.ALIVE


def launch_liveness(launch: LaunchRecord) -> Liveness:
    return process_of(launch).liveness()


def run_liveness(
    catalog: Catalog, run_id: str, stream_id: str, *, pid: int, seen_at_ms: int, silent_ms: int
) -> Liveness:
    """Whether an orchestrator's run lives of which only a pid, of any machine, was logged at `seen_at_ms`.

    ENDED only if the identity that its execution recorded proves it, UNKNOWN after a long silence.
    """
    if _may_run_since(pid, seen_at_ms):
        return Liveness.ALIVE
    if holds_lease(catalog, stream_id, run_id):
        return Liveness.ALIVE
    executions = catalog.executions.of_run(run_id)
    if executions and process_of(executions[0]).liveness() is Liveness.ENDED:
        return Liveness.ENDED
    return Liveness.UNKNOWN if silent_ms > SLOW_START_MS else Liveness.ALIVE


@dataclass(frozen=True)
class _Seen:
    start_ticks: int
    runs: bool


def _seen(pid: int) -> _Seen | None:
    """Look at a process; None if it is hidden from this user, ProcessLookupError if there is none."""
    if _HAS_PROC:
        try:
            stat = (_PROC / f"{pid}/stat").read_bytes()
        except PermissionError:
            return None
        except (FileNotFoundError, ProcessLookupError) as error:
            # With the mount option `hidepid`, /proc has no entries for other users' processes.
            if _is_there(pid):
                return None
            raise ProcessLookupError(f"no process {pid}") from error
        fields = stat[stat.rindex(b")") + 1 :].split()
        return _Seen(int(fields[_START_TICKS]), fields[_STATE] not in (b"Z", b"X", b"x"))
    import psutil  # noqa: PLC0415 - see _may_run_since

    try:
        process = psutil.Process(pid)
        # Seconds as the kernel recorded them. `create_time()` would shift with the wall clock.
        started_s: float = process._proc.create_time(monotonic=True)  # type: ignore[attr-defined]
        return _Seen(round(started_s * 1_000_000), process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _boot_session() -> str:
    try:
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.strip()


def _may_run_since(pid: int, at_ms: int) -> bool:
    # No proof, since it compares two clocks: it only keeps a run from being reported as dead.
    import psutil  # noqa: PLC0415 - what /proc does not say; a command that lists streams starts without it

    try:
        started_at_ms = psutil.Process(pid).create_time() * 1000
        seen = _seen(pid)
        return started_at_ms <= at_ms + _CLOCK_SLACK_MS and seen is not None and seen.runs
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


POD_NAMESPACE, POD_NAME, POD_UID = "DAGSTER_CKPT_POD_NAMESPACE", "DAGSTER_CKPT_POD_NAME", "DAGSTER_CKPT_POD_UID"

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_S = 3.0
# Loops ask several times a second whether a holder lives.
_ASK_AGAIN_S = 2.0
_PREFIX = "pod:"


class PodState(Enum):
    """What the API server says of a pod.

    GONE: It was deleted or replaced.
    TERMINATED: All its containers have terminated.
    """

    GONE = "GONE"
    TERMINATED = "TERMINATED"
    RUNS = "RUNS"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Pod:
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.namespace}/{self.name}/{self.uid}"

    @staticmethod
    def recorded(text: str | None) -> Pod | None:
        word = next((each for each in (text or "").split() if each.startswith(_PREFIX)), None)
        parts = word.removeprefix(_PREFIX).split("/") if word is not None else []
        return Pod(*parts) if len(parts) == 3 and all(parts) else None

    @staticmethod
    def of(environment: Mapping[str, str]) -> Pod | None:
        parts = [environment.get(name, "") for name in (POD_NAMESPACE, POD_NAME, POD_UID)]
        return Pod(*parts) if all(part and not set(part) & set("/ ") for part in parts) else None


class KubernetesApi:
    def __init__(
        self, url: str | None = None, account: Path = _ACCOUNT, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._account = account
        self._clock = clock
        self._known: dict[Pod, tuple[PodState, float]] = {}

    def state(self, pod: Pod) -> PodState:
        known, at = self._known.get(pod, (PodState.UNKNOWN, None))
        if known in (PodState.GONE, PodState.TERMINATED):
            return known
        if at is not None and self._clock() - at < _ASK_AGAIN_S:
            return known
        state = self._ask(pod)
        self._known[pod] = (state, self._clock())
        return state

    def _ask(self, pod: Pod) -> PodState:
        url = self._url or _address(os.environ)
        if url is None:
            return PodState.UNKNOWN
        # Slow to import, and needed only in Kubernetes.
        import urllib.error  # noqa: PLC0415
        import urllib.request  # noqa: PLC0415

        try:
            # The kubelet renews the token.
            token = (self._account / "token").read_text(encoding="utf-8").strip()
            request = urllib.request.Request(
                f"{url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", headers={"Authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(request, timeout=_ANSWER_S, context=self._trust(url)) as answer:
                return _state_of(json.load(answer), pod)
        except urllib.error.HTTPError as error:
            return _missing(error)
        except (OSError, ValueError):
            return PodState.UNKNOWN

    def _trust(self, url: str) -> ssl.SSLContext | None:
        if not url.startswith("https:"):
            return None
        import ssl  # noqa: PLC0415 - loaded by then

        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


def _missing(error: urllib.error.HTTPError) -> PodState:
    """Only the API server itself says that this pod does not exist (GONE), not a proxy before it."""
    if error.code != 404:
        return PodState.UNKNOWN
    try:
        told = json.load(error)
        is_about_a_pod = told["kind"] == "Status" and told["reason"] == "NotFound" and told["details"]["kind"] == "pods"
    except (OSError, ValueError, KeyError, TypeError):
        return PodState.UNKNOWN
    return PodState.GONE if is_about_a_pod else PodState.UNKNOWN


def _state_of(told: object, pod: Pod) -> PodState:
    if not isinstance(told, dict) or told.get("kind") != "Pod":
        return PodState.UNKNOWN
    metadata, status = told.get("metadata"), told.get("status")
    if not isinstance(metadata, dict) or not isinstance(status, dict):
        return PodState.UNKNOWN
    if metadata.get("uid") != pod.uid:
        return PodState.GONE
    # The phase alone is no proof: pods of an unreachable node get one, too.
    containers = status.get("containerStatuses")
    if status.get("phase") not in ("Succeeded", "Failed") or not isinstance(containers, list) or not containers:
        return PodState.RUNS
    states = [each.get("state", {}) if isinstance(each, dict) else {} for each in containers]
    return PodState.TERMINATED if all("terminated" in state for state in states) else PodState.RUNS


def _address(environment: Mapping[str, str]) -> str | None:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


_api = KubernetesApi()


def pod_has_ended(recorded_boot: str | None) -> bool:
    pod = Pod.recorded(recorded_boot)
    if pod is None or pod == Pod.of(os.environ):
        return False
    return _api.state(pod) in (PodState.GONE, PodState.TERMINATED)
