"""A standalone Spark cluster: a master and its workers as processes of their own, and the executors they start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyspark

BIN = Path(pyspark.__file__).parent / "bin"
DEADLINE_S = 120.0
WORKERS = 2
_PACKAGE = "org.apache.spark.deploy"
_EXECUTOR = "CoarseGrainedExecutorBackend"


@dataclass
class SparkCluster:
    """A running cluster.

    Attributes:
        folder: Its logs, and the work of its executors.
        port: Port of the master.
        environment: Environment of its processes, which executors inherit.
    """

    folder: Path
    port: int
    environment: Mapping[str, str]
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master(self) -> str:
        """Its URL."""
        return f"spark://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        """Start the master. Workers that know it register again."""
        # What it knows of workers and applications outlives it, as in production.
        recovery = f"-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory={self.folder}/recovery"
        self._start(
            "master",
            "master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--webui-port",
            "0",
            options=recovery,
        )
        self._await_line("master", "I have been elected leader|New state: ALIVE")

    def start_worker(self, number: int) -> None:
        """Start a worker with two cores and wait until the master has it."""
        name = f"worker-{number}"
        size = ["--cores", "2", "--memory", "2g", "--work-dir", str(self.folder / name)]
        self._start(name, "worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", *size, self.master)
        self._await_line(name, "Successfully registered with master")

    def kill(self, name: str) -> None:
        """Kill the master or a worker with SIGKILL; executors of a worker keep running."""
        self._processes[name].kill()
        self._processes[name].wait()

    def is_up(self, name: str) -> bool:
        """Whether the master or a worker runs."""
        return self._processes[name].poll() is None

    def executors(self) -> list[psutil.Process]:
        """The executors of all applications."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = process.cmdline()
                if any(word.endswith(_EXECUTOR) for word in line) and str(self.folder) in process.cwd():
                    found.append(process)
        return found

    def stop(self) -> None:
        """Kill every process of the cluster."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for executor in self.executors():
            with suppress(psutil.Error):
                executor.kill()

    def log(self, name: str) -> Path:
        """The log of the master or a worker."""
        return self.folder / f"{name}.log"

    def _start(self, name: str, main: str, *arguments: str, options: str = "") -> None:
        self.log(name).unlink(missing_ok=True)
        java_options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {options}"
        daemon = {"SPARK_DAEMON_JAVA_OPTS": java_options, "SPARK_DAEMON_MEMORY": "256m"}
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                # A script that becomes the JVM.
                [str(BIN / "spark-class"), f"{_PACKAGE}.{main}", *arguments],
                env={**os.environ, **self.environment, **daemon},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_line(self, name: str, pattern: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, said := self.log(name).read_text()):
            assert self.is_up(name), f"the {name} ended by itself:\n{said[-3000:]}"
            assert time.monotonic() < deadline, f"the {name} did not come up:\n{said[-3000:]}"
            time.sleep(0.1)


@contextmanager
def running_cluster(folder: Path, port: int, environment: Mapping[str, str]) -> Iterator[SparkCluster]:
    """A master and two workers; everything that they have started is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = SparkCluster(folder, port, {"PYSPARK_PYTHON": sys.executable, **environment})
    try:
        cluster.start_master()
        for number in range(1, WORKERS + 1):
            cluster.start_worker(number)
        yield cluster
    finally:
        cluster.stop()
