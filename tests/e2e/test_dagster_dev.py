"""A real `dagster dev`, its daemon and its page: what a person does by clicking, through the page's GraphQL API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from dagster import DagsterRunStatus

from dagster_ckpt.catalog import Catalog, ExecutionRecord, ExecutionStatus, ImageRecord
from dagster_ckpt.demo.dagster_dev import DagsterDev, running_dagster_dev
from dagster_ckpt.demo.replayer import Replayer
from dagster_ckpt.demo.workspace import Workspace

pytestmark = [pytest.mark.dagster_dev, pytest.mark.timeout(900)]

DEFINITIONS = Path(__file__).parents[2] / "definitions.py"
STREAM = "departure_delays"
STREAM_JOB = "departure_delays_stream"
DEADLINE_S = 240.0


def await_that(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            pytest.fail(f"waited {DEADLINE_S:.0f} s for {what}; the end of the log:\n{tail}")
        time.sleep(0.3)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("flights"))
    workspace.create()
    for _ in Replayer(workspace.landing, days=20).replay(pace=0):
        pass
    return workspace


@pytest.fixture(scope="module")
def catalog(workspace: Workspace) -> Iterator[Catalog]:
    catalog = Catalog(workspace.catalog_url)
    yield catalog
    catalog.close()


def latest(catalog: Catalog) -> ExecutionRecord:
    execution = catalog.executions.latest(STREAM)
    assert execution is not None
    return execution


def await_running(catalog: Catalog, dev: DagsterDev, *, besides: str | None = None) -> ExecutionRecord:
    def runs() -> bool:
        execution = catalog.executions.latest(STREAM)
        return (
            execution is not None and execution.execution_id != besides and execution.status is ExecutionStatus.RUNNING
        )

    await_that(runs, "a running execution", dev.log)
    return latest(catalog)


def await_checkpoint(catalog: Catalog, dev: DagsterDev, execution: ExecutionRecord) -> ImageRecord:
    def images() -> list[ImageRecord]:
        return [i for i in catalog.images.completed(STREAM) if i.execution_id == execution.execution_id]

    await_that(lambda: bool(images()), "a checkpoint", dev.log)
    return images()[0]


def reported_sequences(dev: DagsterDev) -> list[int]:
    """Sequence of each event on the streaming asset, as the asset's page shows them."""
    data = dev.query(
        """query($key: [String!]!) { assetOrError(assetKey: {path: $key}) { ... on Asset {
            assetMaterializations { metadataEntries { label ... on IntMetadataEntry { intValue } } } } } }""",
        {"key": [STREAM]},
    )
    return [
        entry["intValue"]
        for materialization in data["assetOrError"].get("assetMaterializations", [])
        for entry in materialization["metadataEntries"]
        if entry["label"] == "dagster_ckpt/sequence"
    ]


def failure_of(dev: DagsterDev, run_id: str) -> str:
    data = dev.query(
        """query($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
            ... on ExecutionStepFailureEvent { error { message } failureMetadata { description } } } } } }""",
        {"run": run_id},
    )
    return " ".join(
        f"{(event.get('failureMetadata') or {}).get('description')} {(event.get('error') or {}).get('message')}"
        for event in data["logsForRun"]["events"]
        if event
    )


def completed_events(catalog: Catalog) -> list[int]:
    return [
        event.sequence
        for event in catalog.events.after(0, limit=10_000)
        if event.job_id == STREAM and event.type.value in ("CHECKPOINT_COMPLETED", "SAVEPOINT_COMPLETED")
    ]


def test_a_stream_is_launched_terminated_restarted_and_survives_a_kill(workspace: Workspace, catalog: Catalog) -> None:
    with running_dagster_dev(workspace, DEFINITIONS) as dev:
        # Launch, as from the launchpad.
        first_run = dev.launch(STREAM_JOB)
        first = await_running(catalog, dev)
        image = await_checkpoint(catalog, dev, first)
        assert image.batch_id is not None

        # A second run of the same asset is refused, and says by whom.
        second_run = dev.launch(STREAM_JOB)
        assert dev.await_end(second_run, timeout_s=DEADLINE_S) is DagsterRunStatus.FAILURE
        assert f"is being written by run {first_run}" in failure_of(dev, second_run)
        assert dev.status(first_run) is DagsterRunStatus.STARTED
        assert latest(catalog).execution_id == first.execution_id

        # Terminate, as with the page's button: cancelled, and its checkpoints retained as configured.
        dev.terminate(first_run)
        assert dev.await_end(first_run, timeout_s=DEADLINE_S) is DagsterRunStatus.CANCELED
        await_that(lambda: latest(catalog).settled, "the cancelled execution to be settled", dev.log)
        assert latest(catalog).status is ExecutionStatus.CANCELED
        assert catalog.leases.current(STREAM) is None
        assert catalog.images.completed(STREAM)

        # Start again: it resumes in the same live directory.
        third_run = dev.launch(STREAM_JOB)
        third = await_running(catalog, dev, besides=first.execution_id)
        assert third.run_id == third_run
        assert third.live_directory == first.live_directory
        assert (third.recovery or {})["kind"] == "RESUME"

        # SIGKILL, to the process and its JVM: the supervisor sensor starts it again.
        lease = catalog.leases.current(STREAM)
        assert lease is not None
        assert lease.jvm_pid is not None
        for pid in (lease.pid, lease.jvm_pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        fourth = await_running(catalog, dev, besides=third.execution_id)
        assert fourth.cause.value == "RESTART_NEW_RUN"
        assert (fourth.recovery or {})["kind"] == "RESUME"
        assert dev.await_end(third_run, timeout_s=DEADLINE_S) is DagsterRunStatus.FAILURE

        # A savepoint through its job, while the stream runs in another process; then a stop with one.
        for job, op in (
            ("trigger_savepoint_job", "trigger_savepoint"),
            ("stop_with_savepoint_job", "stop_with_savepoint"),
        ):
            run = dev.launch(job, {"ops": {op: {"config": {"job_id": STREAM, "label": op}}}})
            assert dev.await_end(run, timeout_s=DEADLINE_S) is DagsterRunStatus.SUCCESS, failure_of(dev, run)
        assert dev.await_end(fourth.run_id, timeout_s=DEADLINE_S) is DagsterRunStatus.SUCCESS
        labels = {image.label for image in catalog.images.completed(STREAM)}
        assert {"trigger_savepoint", "stop_with_savepoint"} <= labels

        # A job id that does not exist is a clear error of our own.
        unknown = dev.launch("trigger_savepoint_job", {"ops": {"trigger_savepoint": {"config": {"job_id": "nope"}}}})
        assert dev.await_end(unknown, timeout_s=DEADLINE_S) is DagsterRunStatus.FAILURE
        assert "No streaming asset with job id 'nope'" in failure_of(dev, unknown)
        # So is a savepoint of a stream that was never started.
        never = dev.launch(
            "trigger_savepoint_job",
            {"ops": {"trigger_savepoint": {"config": {"job_id": "flights_with_weather"}}}},
        )
        assert dev.await_end(never, timeout_s=DEADLINE_S) is DagsterRunStatus.FAILURE
        assert "knows no job 'flights_with_weather'" in failure_of(dev, never)

    # The daemon is new now. Each completed image is on the asset once, and no second time.
    with running_dagster_dev(workspace, DEFINITIONS) as dev:
        await_that(
            lambda: set(completed_events(catalog)) <= set(reported_sequences(dev)),
            "every completed image on the asset",
            dev.log,
        )
        assert sorted(reported_sequences(dev)) == completed_events(catalog)
