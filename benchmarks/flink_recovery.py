"""The peer Flink of section `recovery`: run by the Python of an environment with apache-flink.

A standalone cluster runs a job with a Python function, state in RocksDB, checkpoints and restarts without a delay. Its
parts are killed; the result is one line of JSON: seconds from a kill until every task runs again.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyflink

from benchmarks.flink_stream import free_port, until

HOME = Path(pyflink.__file__).parent
WORKER, BESIDE, AGAIN = "Python worker", "TaskManager, another waits", "TaskManager, started again"


class Cluster:
    """A JobManager and TaskManagers as processes of this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        conf = folder / "conf"
        shutil.copytree(HOME / "conf", conf)
        self.rest, rpc = free_port(), free_port()
        settings: dict[str, object] = {
            "jobmanager.rpc.address": "localhost",
            "jobmanager.rpc.port": rpc,
            "jobmanager.bind-host": "localhost",
            "jobmanager.memory.process.size": "1g",
            "rest.address": "localhost",
            "rest.bind-address": "localhost",
            "rest.port": self.rest,
            "rest.bind-port": self.rest,
            "taskmanager.host": "localhost",
            "taskmanager.bind-host": "localhost",
            "taskmanager.memory.process.size": "1728m",
            "taskmanager.numberOfTaskSlots": 2,
            "web.refresh-interval": 100,
            "parallelism.default": 2,
            "python.executable": sys.executable,
            "python.client.executable": sys.executable,
            "state.backend.type": "rocksdb",
            "execution.checkpointing.interval": "5 s",
            "execution.checkpointing.dir": f"file://{folder}/checkpoints",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 1_000_000,
            "restart-strategy.fixed-delay.delay": "0 s",
        }
        # What Flink needs of Java 17.
        [opened] = re.findall(r"all: (--add-\S.*)", (HOME / "conf/config.yaml").read_text())
        settings["env.java.opts.all"] = opened
        (conf / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        self._environment = {
            **os.environ,
            "FLINK_HOME": str(HOME),
            "FLINK_CONF_DIR": str(conf),
            "FLINK_LOG_DIR": str(folder / "log"),
            "FLINK_PID_DIR": str(folder),
        }
        self.task_managers: list[subprocess.Popen[bytes]] = []
        self._job_manager = self._start("jobmanager.sh")

    def add_task_manager(self) -> None:
        """Start one more, and do not wait for it."""
        self.task_managers.append(self._start("taskmanager.sh"))

    def wait_for_slots(self, count: int) -> None:
        """Wait until as many slots are free."""
        until(lambda: self.get("/overview")["slots-available"] >= count)

    def get(self, path: str) -> Any:
        """Ask the REST interface; an empty answer before it is up."""
        try:
            with urllib.request.urlopen(f"http://localhost:{self.rest}{path}", timeout=60) as answer:
                return json.load(answer)
        except OSError:
            return {"slots-available": -1, "vertices": []}

    def submit(self, program: str) -> None:
        """Submit a job, the program called without arguments."""
        command = [str(HOME / "bin/flink"), "run", "--detached", "--python", program]
        done = subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2_000:]} {done.stderr[-2_000:]}")

    def end(self) -> None:
        """Kill everything."""
        for process in (*self.task_managers, self._job_manager):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, script: str) -> subprocess.Popen[bytes]:
        with (self._folder / "output").open("ab") as output:
            return subprocess.Popen(
                [str(HOME / "bin" / script), "start-foreground"],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Job:
    """The job on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.submit(str(Path(__file__).with_name("flink_counts.py")))
        [job] = cluster.get("/jobs")["jobs"]
        self._path = f"/jobs/{job['id']}"

    def attempts(self) -> list[tuple[int, str]]:
        """Attempt and status of each task."""
        found = []
        for vertex in self._cluster.get(self._path)["vertices"]:
            details = self._cluster.get(f"{self._path}/vertices/{vertex['id']}")
            found += [(task["attempt"], task["status"]) for task in details.get("subtasks", [])]
        return found

    def wait_until_running(self, *, after: int = -1) -> int:
        """Wait until every task runs in an attempt after one; returns the least attempt."""
        seen: list[tuple[int, str]] = []

        def runs() -> bool:
            seen[:] = self.attempts()
            return bool(seen) and all(attempt > after and status == "RUNNING" for attempt, status in seen)

        until(runs)
        return min(attempt for attempt, _ in seen)

    def wait_for_checkpoint(self) -> None:
        """Wait until one more is complete."""

        def completed() -> int:
            return int(self._cluster.get(f"{self._path}/checkpoints").get("counts", {}).get("completed", 0))

        before = completed()
        until(lambda: completed() > before)

    def recovers(self, kill: Any) -> float:
        """Kill something; returns the seconds until every task runs again."""
        self.wait_for_checkpoint()
        attempt = self.wait_until_running()
        began = time.monotonic()
        kill()
        self.wait_until_running(after=attempt)
        return time.monotonic() - began


def python_workers(of: int) -> list[int]:
    """The Python processes that run the function for a TaskManager, whose process group they are in."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if b"pyflink.fn_execution" in words and os.getpgid(int(folder.name)) == of:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def main(folder: Path, times: int) -> dict[str, list[float]]:
    """Kill each part some times."""
    cluster = Cluster(folder)
    measured: dict[str, list[float]] = {WORKER: [], BESIDE: [], AGAIN: []}
    try:
        cluster.add_task_manager()
        cluster.wait_for_slots(2)
        job = Job(cluster)
        job.wait_until_running()

        def kill_worker() -> None:
            for pid in python_workers(cluster.task_managers[-1].pid):
                os.kill(pid, signal.SIGKILL)

        def kill_oldest() -> None:
            oldest = cluster.task_managers.pop(0)
            os.killpg(oldest.pid, signal.SIGKILL)
            oldest.wait()

        def kill_and_start() -> None:
            kill_oldest()
            cluster.add_task_manager()

        for _ in range(times):
            measured[WORKER].append(job.recovers(kill_worker))
        for _ in range(times):
            measured[AGAIN].append(job.recovers(kill_and_start))
        for _ in range(times):
            cluster.add_task_manager()
            cluster.wait_for_slots(2)
            measured[BESIDE].append(job.recovers(kill_oldest))
    finally:
        cluster.end()
    return measured


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
