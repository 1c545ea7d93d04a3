"""What a run that launches a driver does at each end: the driver's, and its own. Its drivers have no Spark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster import DagsterRunStatus
from orchestration_catalog import register

from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    LAUNCH_OF,
    RESTART_OF,
    ExecutionStatus,
    RequestKind,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.client import platforms
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE, DriverLaunch
from dagster_ckpt.client.platforms import PlatformLaunch
from dagster_ckpt.orchestration import downstream
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG
from dagster_ckpt.stream.lease import has_living_holder

JOB = "clicks"
DRIVER = Path(__file__).with_name("pretended_driver.py")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


class Driven:
    """The start job of a stream whose driver has the test's command."""

    def __init__(self, folder: Path, resource: CheckpointCatalogResource, instance: dg.DagsterInstance) -> None:
        self.instance, self.catalog, self._folder, self._resource = instance, resource.catalog(), folder, resource
        self.pretended = (sys.executable, str(DRIVER), resource.url, "{stream_id}")
        self.trouble: list[str] = []
        self._watchers: list[threading.Thread] = []

    def run(
        self,
        command: tuple[str, ...] | None = None,
        *,
        start_from: str = "latest",
        follow: bool = True,
        meanwhile: Callable[[], None] | None = None,
        launch: PlatformLaunch | DriverLaunch | None = None,
        **tags: str,
    ) -> tuple[dg.DagsterRun, Any]:
        """The run as it is recorded in the end, and the failure of its step, if it failed.

        Args:
            command: The driver's; default: one that pretends.
            start_from: Of the launchpad.
            follow: Of the launchpad.
            meanwhile: Done once it follows its driver.
            launch: In place of a command.
            tags: Of the run; `__` stands for a slash.
        """
        launch = launch or DriverLaunch(
            command or self.pretended,
            log_directory=str(self._folder / "logs"),
            environment={"PYTHONPATH": str(ROOT)},
            start_timeout_s=DEADLINE_S,
        )
        stream = external_streaming_asset(JOB, launch=launch)
        definitions = dg.Definitions.merge(
            stream_definitions(stream),
            dg.Definitions(
                resources={
                    "checkpoint_storage": CheckpointStorageResource(path=f"file://{self._folder}/checkpoints"),
                    "state_backend": StateBackendResource(live_directory=f"{self._folder}/live"),
                    "checkpoint_catalog": self._resource,
                    "pyspark": dg.ResourceDefinition.none_resource(),
                }
            ),
        )
        if meanwhile is not None:
            self._once_it_follows(meanwhile)
        result = definitions.resolve_job_def("clicks_stream").execute_in_process(
            {"ops": {JOB: {"config": {"start_from": start_from, "follow": follow}}}},
            instance=self.instance,
            raise_on_error=False,
            tags=tags,
        )
        for watcher in self._watchers:
            watcher.join()
        assert self.trouble == []
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        failures = [event.step_failure_data.user_failure_data for event in result.all_events if event.is_step_failure]
        return run, next(iter(failures), None)

    def _once_it_follows(self, act: Callable[[], None]) -> None:
        def watch() -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not self.is_followed():
                if time.monotonic() > deadline:
                    self.trouble.append("the driver did not start")
                    break
                time.sleep(0.05)
            act()

        self._watchers.append(threading.Thread(target=watch))
        self._watchers[-1].start()

    def is_followed(self) -> bool:
        """Whether the run has said where the query runs: only then it waits for the driver's end."""
        runs = self.instance.get_runs(dg.RunsFilter(statuses=[DagsterRunStatus.STARTED]))
        said = [entry.user_message for run in runs for entry in self.instance.all_logs(run.run_id)]
        return any(message.startswith("the query runs in process") for message in said)

    def is_alive(self) -> bool:
        return has_living_holder(self.catalog, JOB)

    def ask(self, kind: RequestKind) -> None:
        self.catalog.requests.submit(JOB, kind, origin="the test")

    def terminate(self) -> None:
        """What the page's button does."""
        (run,) = self.instance.get_runs(dg.RunsFilter(statuses=[DagsterRunStatus.STARTED]))
        self.instance.report_run_canceling(run)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """In files: threads that share a database in memory may find its tables locked."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield instance


@pytest.fixture
def driven(
    tmp_path: Path, catalog_resource: CheckpointCatalogResource, instance: dg.DagsterInstance
) -> Iterator[Driven]:
    before = signal.getsignal(signal.SIGTERM)
    driven = Driven(tmp_path, catalog_resource, instance)
    register(driven.catalog, JOB)
    yield driven
    lease = driven.catalog.leases.current(JOB)
    if lease is not None and psutil.pid_exists(lease.pid):
        os.kill(lease.pid, signal.SIGKILL)
    driven.catalog.close()
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_does_not_follow_succeeds_once_the_query_is_started(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.catalog.streams.ensure("money", name="money", asset_key="payments", options={})
    report = dg.AssetSpec("report", deps=["payments"])
    graph = dg.Definitions([report, dg.AssetSpec(JOB, deps=[report])]).resolve_asset_graph()
    monkeypatch.setattr(downstream, "asset_graph_of", lambda _context: graph)

    run, failure = driven.run(follow=False, start_from="chk-7")

    assert (run.status, failure) == (DagsterRunStatus.SUCCESS, None)
    assert driven.is_alive()
    execution, launch = driven.catalog.executions.latest(JOB), driven.catalog.launches.latest(JOB)
    assert execution is not None
    assert launch is not None
    assert (execution.run_id, execution.pid, execution.cause) == (run.run_id, launch.pid, StartCause.MANUAL)
    assert Path(launch.log).read_text() == "starting from chk-7\n"
    # Its driver knows no asset graph.
    assert execution.batch_inputs == [("money", "report")]


def test_a_run_ends_as_the_driver_that_it_follows(driven: Driven) -> None:
    suspended, _ = driven.run(meanwhile=lambda: driven.ask(RequestKind.SUSPEND))
    canceled, failure = driven.run(meanwhile=lambda: driven.ask(RequestKind.CANCEL))

    assert suspended.status is DagsterRunStatus.SUCCESS
    assert canceled.status is DagsterRunStatus.CANCELED
    assert failure.metadata["dagster_ckpt/end"].value == "CANCELED"


@pytest.mark.thorough
def test_a_driver_that_is_launched_beside_the_running_one_takes_over_from_it(driven: Driven) -> None:
    driven.run(follow=False)
    old = driven.catalog.executions.latest(JOB)
    assert old is not None
    request = driven.catalog.requests.submit(
        JOB, RequestKind.START, arguments={"start_from": "latest", HANDS_OVER: True}, origin="the test"
    )

    run, failure = driven.run(follow=False, **{START_REQUEST_TAG: request.request_id})

    assert (run.status, failure) == (DagsterRunStatus.SUCCESS, None)
    new = driven.catalog.executions.latest(JOB)
    assert new is not None
    assert (new.run_id, new.pid != old.pid) == (run.run_id, True)
    assert driven.catalog.executions.get(old.execution_id).status is ExecutionStatus.SUSPENDED


@pytest.mark.thorough
def test_a_rollback_launches_the_previous_driver_until_another_launch_is_loaded(driven: Driven) -> None:
    def words() -> str:
        latest = driven.catalog.executions.latest(JOB)
        assert latest is not None
        return psutil.Process(latest.pid).cmdline()[-1]

    def stop() -> None:
        driven.run((*driven.pretended, "new"), meanwhile=lambda: driven.ask(RequestKind.SUSPEND))

    driven.run((*driven.pretended, "old"), follow=False)
    old = driven.catalog.executions.latest(JOB)
    assert old is not None
    assert old.launch["command"] == [*driven.pretended, "old"]
    stop()
    driven.run((*driven.pretended, "new"), follow=False)
    assert words() == "new"

    request = driven.catalog.requests.submit(
        JOB,
        RequestKind.START,
        arguments={"start_from": "latest", HANDS_OVER: True, LAUNCH_OF: old.execution_id},
        origin="the test",
    )
    run, failure = driven.run((*driven.pretended, "new"), follow=False, **{START_REQUEST_TAG: request.request_id})
    assert (run.status, failure, words()) == (DagsterRunStatus.SUCCESS, None, "old")
    stop()
    driven.run((*driven.pretended, "new"), follow=False)
    assert words() == "old"
    stop()
    driven.run((*driven.pretended, "mended"), follow=False)
    assert words() == "mended"


def test_terminating_the_run_cancels_the_stream(driven: Driven) -> None:
    run, failure = driven.run(meanwhile=driven.terminate)

    assert run.status is DagsterRunStatus.CANCELED
    assert failure.metadata["dagster_ckpt/end"].value == "CANCELED"
    assert not driven.is_alive()
    assert driven.catalog.executions.latest(JOB).status.value == "CANCELED"


@pytest.mark.thorough
def test_a_run_that_is_stopped_otherwise_leaves_the_driver_and_another_finds_it(driven: Driven) -> None:
    first, failure = driven.run(meanwhile=lambda: os.kill(os.getpid(), signal.SIGINT))

    assert first.status is DagsterRunStatus.FAILURE
    assert failure.metadata["dagster_ckpt/end"].value == "DETACHED"
    assert driven.is_alive()
    launch = driven.catalog.launches.latest(JOB)

    rewind, refusal = driven.run(start_from="chk-7")
    assert rewind.status is DagsterRunStatus.FAILURE
    assert "it cannot be started from 'chk-7'. Run restart_stream_job" in refusal.description

    again, _ = driven.run(meanwhile=driven.terminate)
    assert again.status is DagsterRunStatus.CANCELED
    assert driven.catalog.launches.latest(JOB) == launch
    assert not driven.is_alive()


def test_a_driver_that_is_killed_fails_the_run_that_follows_it(driven: Driven) -> None:
    def kill() -> None:
        os.kill(driven.catalog.leases.current(JOB).pid, signal.SIGKILL)

    run, failure = driven.run(meanwhile=kill)

    assert run.status is DagsterRunStatus.FAILURE
    assert failure.metadata["dagster_ckpt/end"].value == "DRIVER_GONE"
    assert not driven.catalog.executions.latest(JOB).settled, "the supervisor sensor decides what follows"


@pytest.mark.thorough(but="command0-*")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((sys.executable, "-c", "import sys; print('no such table'); sys.exit(3)"), "exit code 3; .*no such table"),
        (("/nowhere/spark-submit",), "could not be launched"),
    ],
)
def test_a_driver_that_does_not_come_up_fails_the_run_and_says_why(
    driven: Driven, command: tuple[str, ...], said: str
) -> None:
    run, failure = driven.run(command)

    assert run.status is DagsterRunStatus.FAILURE
    assert re.search(said, failure.description, re.DOTALL)


class Cloud(PlatformLaunch):
    """Its client notes what it was asked; its request has the command of a driver, or how its run ends."""

    platform = "a cloud"

    def submit(self, request: Mapping[str, Any]) -> str:
        if "command" in request:
            variables = {**os.environ, "PYTHONPATH": str(ROOT), START_REQUEST_VARIABLE: request["start"]}
            subprocess.Popen(request["command"], env=variables, start_new_session=True)
        return "run-1"

    def end(self, run: str) -> str | None:
        return self.request["end"]

    def cancel(self, run: str) -> None:
        self.client.append(f"cancel {run}")


def test_a_platform_runs_the_driver_and_has_no_part_in_what_follows(driven: Driven) -> None:
    request = {"start": "{start_request}", "command": [each.replace("{stream_id}", JOB) for each in driven.pretended]}
    canceled: list[str] = []

    run, failure = driven.run(launch=Cloud(canceled, request), meanwhile=driven.terminate)

    assert (run.status, failure.metadata["dagster_ckpt/end"].value) == (DagsterRunStatus.CANCELED, "CANCELED")
    launched = driven.catalog.launches.latest(JOB)
    assert launched is not None
    assert (launched.command, launched.run_id, canceled) == ("a cloud run-1", run.run_id, [])


def test_a_run_of_a_platform_that_fails_before_its_driver_answers_fails_the_run_and_is_canceled(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "POLL_MS", 0)
    canceled: list[str] = []

    run, failure = driven.run(launch=Cloud(canceled, {"start": "{start_request}", "end": "FAILED: no capacity"}))

    assert run.status is DagsterRunStatus.FAILURE
    assert "a cloud ended its run run-1: FAILED: no capacity" in failure.description
    assert canceled == ["cancel run-1"]


def test_a_run_that_was_asked_for_launches_the_driver_that_answers(driven: Driven) -> None:
    asked = driven.catalog.requests.submit(JOB, RequestKind.START, arguments={"start_from": "chk-9"}, origin="a person")

    run, _ = driven.run(follow=False, **{START_REQUEST_TAG: asked.request_id})

    assert run.status is DagsterRunStatus.SUCCESS
    assert driven.catalog.requests.get(asked.request_id).status is RequestStatus.COMPLETED
    assert driven.catalog.executions.latest(JOB).run_id == run.run_id


@pytest.mark.thorough
def test_a_restart_by_the_supervisor_goes_on_with_the_history_of_failures(driven: Driven) -> None:
    driven.run(follow=False, **{RESTART_OF_TAG: "the execution before"})

    assert driven.catalog.executions.latest(JOB).cause is StartCause.RESTART_NEW_RUN
    request = driven.catalog.requests.get(driven.catalog.launches.latest(JOB).request_id)
    # If the stream is stopped meanwhile, the driver does not start it.
    assert request.arguments[RESTART_OF] == "the execution before"


@pytest.mark.thorough
def test_a_driver_that_is_on_its_way_is_waited_for(driven: Driven, tmp_path: Path) -> None:
    """Two runs at once: the second launches no driver of its own."""
    gate = tmp_path / "gate"
    slow = f"import os, sys, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    exec_driver = f"{slow}os.execv(sys.executable, {[sys.executable, str(DRIVER), driven.pretended[2], JOB]!r})"
    command = (sys.executable, "-c", exec_driver.replace("{", "{{").replace("}", "}}"))
    statuses: list[DagsterRunStatus] = []

    def second() -> None:
        statuses.append(driven.run(command, follow=False)[0].status)

    other = threading.Thread(target=second)
    other.start()
    deadline = time.monotonic() + DEADLINE_S
    while driven.catalog.launches.latest(JOB) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    launch = driven.catalog.launches.latest(JOB)
    threading.Timer(0.5, gate.touch).start()
    statuses.append(driven.run(("/nowhere",), follow=False)[0].status)
    other.join()

    assert statuses == [DagsterRunStatus.SUCCESS, DagsterRunStatus.SUCCESS]
    assert driven.catalog.launches.latest(JOB) == launch
