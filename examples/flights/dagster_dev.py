"""Runs a real `dagster dev` (webserver and daemon) as a child process and operates it through its GraphQL API."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from dagster import DagsterRunStatus
from dagster_graphql import DagsterGraphQLClient

from dagster_ckpt.errors import CkptError
from examples.flights.workspace import HOME_VARIABLE, Workspace

START_TIMEOUT_S = 120.0
POLL_S = 0.5
TERMINAL = (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)

_FAILED_TICK = re.compile(r"Error occurred during the execution (of evaluation_fn for sensor|function for schedule) ")
INSTANCE_SETTINGS = Path(__file__).parent / "dagster.yaml"


@dataclass(frozen=True)
class DagsterDev:
    """A running `dagster dev`.

    Attributes:
        process: The child process, leader of its process group.
        port: Port of the page.
        log: File with its output.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def client(self) -> DagsterGraphQLClient:
        """Dagster's own client of the page's API."""
        return DagsterGraphQLClient("localhost", port_number=self.port)

    def launch(self, job: str, config: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None) -> str:
        """Launch a job like the launchpad; returns the run id."""
        return self.client.submit_job_execution(job, run_config=dict(config or {}), tags=dict(tags or {}))

    def terminate(self, run_id: str) -> None:
        """Terminate a run like the page's button."""
        self.client.terminate_run(run_id)

    def status(self, run_id: str) -> DagsterRunStatus:
        """Status of a run."""
        return self.client.get_run_status(run_id)

    def await_end(self, run_id: str, *, timeout_s: float) -> DagsterRunStatus:
        """Wait until a run has ended; returns its status.

        Raises:
            CkptError: It has not ended in time.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.status(run_id)) not in TERMINAL:
            if time.monotonic() >= deadline:
                raise CkptError(f"Run {run_id} is {status.value} after {timeout_s:.0f} s. Log: {self.log}")
            time.sleep(POLL_S)
        return status

    def query(self, document: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send any other GraphQL query."""
        answer = requests.post(
            f"http://localhost:{self.port}/graphql",
            json={"query": document, "variables": dict(variables or {})},
            timeout=30,
        )
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        if body.get("errors"):
            raise CkptError(f"GraphQL at localhost:{self.port}: {body['errors']}")
        data: dict[str, Any] = body["data"]
        return data

    def failed_ticks(self) -> list[str]:
        """Log lines of sensors and schedules whose own code failed; a killed code server is not included."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if _FAILED_TICK.search(line)]

    def is_up(self) -> bool:
        """Whether the page answers and has loaded the code location."""
        try:
            data = self.query("{ repositoriesOrError { __typename ... on RepositoryConnection { nodes { name } } } }")
        except (requests.RequestException, CkptError):
            return False
        return bool(data["repositoriesOrError"].get("nodes"))


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prepare_home(workspace: Workspace) -> None:
    """Create the workspace, with the Dagster settings that streams need."""
    workspace.create()
    settings = workspace.dagster_home / "dagster.yaml"
    if not settings.exists():
        settings.write_text(INSTANCE_SETTINGS.read_text())


def environment(workspace: Workspace) -> dict[str, str]:
    """The environment variables for Dagster."""
    return {
        **os.environ,
        HOME_VARIABLE: str(workspace.root),
        "DAGSTER_HOME": str(workspace.dagster_home),
        "PYTHONUNBUFFERED": "1",
    }


def command(definitions: Path, port: int) -> list[str]:
    """The command line of `dagster dev`."""
    return [
        *(sys.executable, "-m", "dagster", "dev", "-f", str(definitions)),
        *("--host", "localhost", "--port", str(port)),
    ]


@contextmanager
def running_dagster_dev(workspace: Workspace, definitions: Path, *, port: int | None = None) -> Iterator[DagsterDev]:
    """Start `dagster dev`, wait until it answers, and stop it with all its children.

    Args:
        workspace: The workspace.
        definitions: The file with the definitions.
        port: Port of the page; None picks a free one.

    Raises:
        CkptError: It ended or did not answer in time; the message names its log.
    """
    prepare_home(workspace)
    log = workspace.root / "dagster-dev.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(definitions, chosen := port or free_port()),
            env=environment(workspace),
            cwd=workspace.root,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    dev = DagsterDev(process, chosen, log)
    try:
        _await_page(dev)
        yield dev
    finally:
        end_group(process)


def _await_page(dev: DagsterDev) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not dev.is_up():
        if dev.process.poll() is not None or time.monotonic() >= deadline:
            tail = "\n".join(dev.log.read_text(errors="replace").splitlines()[-20:])
            raise CkptError(f"dagster dev did not come up. The end of its log {dev.log}:\n{tail}")
        time.sleep(POLL_S)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and everything in its process group: politely first, then by SIGKILL."""
    for sign, patience_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            process.poll()
            if not _group_lives(process.pid):
                return
            time.sleep(0.2)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
