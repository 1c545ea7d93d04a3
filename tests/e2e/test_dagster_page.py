"""Launch, savepoint, terminate, restart, by clicking in Dagster's page; nothing is asked of its API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dagster_page import DagsterPage, dagster_page

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from examples.flights.dagster_dev import DagsterDev, running_dagster_dev
from examples.flights.replayer import Replayer
from examples.flights.workspace import Workspace

pytestmark = [pytest.mark.dagster_dev, pytest.mark.browser, pytest.mark.timeout(1500)]

DEFINITIONS = Path(__file__).parents[2] / "definitions.py"
STREAM = "departure_delays"
DEADLINE_S = 240.0


@dataclass
class Clicked:
    """The page of a `dagster dev`, and the catalog that tells what the clicks have done."""

    page: DagsterPage
    dev: DagsterDev
    catalog: Catalog

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {DEADLINE_S:.0f} s for {what}; see {self.dev.log}")
            time.sleep(0.3)

    def await_running(self, run_id: str) -> ExecutionRecord:
        def running() -> list[ExecutionRecord]:
            found = self.catalog.executions.of_stream(STREAM)
            return [each for each in found if each.run_id == run_id and each.status is ExecutionStatus.RUNNING]

        self.await_that(lambda: bool(running()), "a running query")
        return running()[0]

    def start_stream(self) -> ExecutionRecord:
        return self.await_running(self.page.materialize(f"{STREAM}_stream"))

    def execute_stream(self, job: str, op: str, **config: object) -> None:
        self.page.launch(job, {"ops": {op: {"config": {"stream_id": STREAM, **config}}}})
        self.page.await_status("Success")


@pytest.fixture
def clicked(tmp_path: Path) -> Iterator[Clicked]:
    workspace = Workspace(tmp_path / "flights")
    workspace.create()
    for _ in Replayer(workspace.landing, days=20).replay(pace=0):
        pass
    catalog = Catalog(workspace.catalog_url)
    with (
        running_dagster_dev(workspace, DEFINITIONS) as dev,
        dagster_page(f"http://localhost:{dev.port}", tmp_path / "pictures") as page,
    ):
        yield Clicked(page, dev, catalog)
    catalog.close()


@pytest.mark.thorough(sample="tests/e2e/test_ways_a_run_ends.py")
def test_a_person_launches_saves_terminates_and_restarts_by_clicking(clicked: Clicked) -> None:
    page, catalog = clicked.page, clicked.catalog

    first = clicked.start_stream()
    page.await_status("Started")
    clicked.await_that(lambda: bool(catalog.snapshots.completed(STREAM)), "a checkpoint")

    clicked.execute_stream("trigger_savepoint_job", "trigger_savepoint", label="by clicking")
    assert "by clicking" in {snapshot.label for snapshot in catalog.snapshots.completed(STREAM)}
    page.take_picture("savepoint-run")

    page.open_run(first.run_id)
    page.terminate()
    page.await_status("Canceled")
    clicked.await_that(lambda: catalog.executions.get(first.execution_id).settled, "the end of the stream")
    assert catalog.executions.get(first.execution_id).status is ExecutionStatus.CANCELED

    second = clicked.start_stream()
    assert (second.recovery or {})["kind"] == "RESUME"
    clicked.execute_stream("show_stream_job", "show_stream")
    page.take_picture("show-stream-run")
    clicked.execute_stream("stop_with_savepoint_job", "stop_with_savepoint", label="the end")
    assert catalog.executions.get(second.execution_id).status is ExecutionStatus.FINISHED
    # The other streams were never started, and red ticks are the first thing that a person sees.
    assert clicked.dev.failed_ticks() == []
