"""A driver that a run launches by a real `spark-submit`, and that outlives it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus, SnapshotRecord, StartCause
from dagster_ckpt.orchestration.metadata import SNAPSHOT_ID_KEY
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG

pytestmark = [pytest.mark.spark, pytest.mark.core(thorough=True), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
DEFINITIONS = Path(__file__).with_name("definitions_of_a_driver.py")
JOB = "sales"
DEADLINE_S = 240.0
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
ROWS = 10


def await_that(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            texts = "\n".join(f"{each}:\n{each.read_text(errors='replace')[-3000:]}" for each in log.glob("*.log"))
            pytest.fail(f"waited {DEADLINE_S:.0f} s for {what}; {texts}")
        time.sleep(0.3)


@dataclass
class Sales:
    """The stream, its folder, and the Dagster instance that its runs are recorded in."""

    folder: Path
    definitions: dg.Definitions
    instance: dg.DagsterInstance
    catalog: Catalog
    files: int = 0
    runs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def feed(self, files: int) -> None:
        """Lay files of ten sales, one hour each."""
        for number in range(self.files, self.files + files):
            at = [BEGIN + timedelta(hours=number, minutes=n % 4) for n in range(ROWS)]
            rows = [{"at": f"{when:%Y-%m-%dT%H:%M:%SZ}", "shop": n % 3} for n, when in enumerate(at)]
            unfinished = self.folder / f"{number}.json"
            unfinished.write_text("\n".join(map(json.dumps, rows)))
            # Spark takes files in the order of their times.
            os.utime(unfinished, ns=((1_700_000_000 + number) * 10**9,) * 2)
            unfinished.replace(self.folder / "landing" / f"{number:04}.json")
        self.files += files

    def expected(self) -> list[tuple[int, datetime, int]]:
        """What an uninterrupted run writes: every hour but the last, which the watermark has not closed."""
        counts: dict[tuple[int, datetime], int] = {}
        for number in range(self.files - 1):
            for n in range(ROWS):
                key = (n % 3, BEGIN + timedelta(hours=number, minutes=n % 4))
                counts[key] = counts.get(key, 0) + 1
        return sorted((shop, at, count) for (shop, at), count in counts.items())

    def rows(self) -> list[tuple[int, datetime, int]]:
        """What the log of the file sink names; part files of a batch that was killed are not in it."""
        log = self.folder / "output" / "_spark_metadata"
        lines = [line for entry in log.glob("[0-9]*") for line in entry.read_text().splitlines()[1:]]
        paths = {json.loads(line)["path"].removeprefix("file://") for line in lines}
        tables = [pq.read_table(path).to_pylist() for path in paths]
        return sorted((row["shop"], row["at"].replace(tzinfo=UTC), row["count"]) for table in tables for row in table)

    def launch(self) -> str:
        """Launch the stream's job as a run of its own process, which follows its driver; returns the run's id."""
        before = {run.run_id for run in self.instance.get_runs()}
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(DEFINITIONS), "-j", "sales_stream"]
        with (self.folder / "logs" / "run.log").open("ab") as log:
            self.runs.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        started = self.runs[-1]
        self.await_that(lambda: len(self.instance.get_runs()) > len(before) or started.poll() is not None, "the run")
        assert started.poll() is None, self.log_of_runs()
        (run,) = [run for run in self.instance.get_runs() if run.run_id not in before]
        return run.run_id

    def log_of_runs(self) -> str:
        """What the launched runs have said."""
        return (self.folder / "logs" / "run.log").read_text()

    def await_running(self, *, besides: str = "") -> ExecutionRecord:
        def running() -> ExecutionRecord | None:
            execution = self.catalog.executions.latest(JOB)
            is_new = execution is not None and execution.execution_id != besides
            return execution if is_new and execution.status is ExecutionStatus.RUNNING else None

        self.await_that(lambda: running() is not None, "a running query")
        found = running()
        assert found is not None
        return found

    def await_checkpoint(self, *, after_batch: int) -> None:
        def newest() -> int:
            return max((snapshot.batch_id or 0 for snapshot in self.snapshots()), default=-1)

        self.await_that(lambda: newest() > after_batch, f"a checkpoint after batch {after_batch}")

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        await_that(condition, what, self.folder / "logs")

    def snapshots(self) -> list[SnapshotRecord]:
        return list(self.catalog.snapshots.completed(JOB))

    def execute(self, job: str, config: dict[str, Any], **tags: str) -> dg.ExecuteInProcessResult:
        (op,) = [node.name for node in self.definitions.resolve_job_def(job).all_node_defs]
        return self.definitions.resolve_job_def(job).execute_in_process(
            {"ops": {op: {"config": config}}}, instance=self.instance, tags=tags
        )

    def tick(self, name: str) -> dg.SensorResult:
        resources = {"checkpoint_catalog": self.definitions.resources["checkpoint_catalog"]}
        with dg.build_sensor_context(self.instance, resources=resources) as context:
            return self.definitions.resolve_sensor_def(name).evaluate_tick(context)


@pytest.fixture
def sales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sales]:
    home = tmp_path / "dagster_home"
    for folder in (home, tmp_path / "landing", tmp_path / "logs"):
        folder.mkdir()
    monkeypatch.setenv("SALES_FOLDER", str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(DEFINITIONS.parent)]))
    spec = importlib.util.spec_from_file_location("definitions_of_a_driver", DEFINITIONS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")
    with dg.DagsterInstance.get() as instance:
        sales = Sales(tmp_path, module.defs, instance, catalog)
        try:
            yield sales
        finally:
            kill(*(run.pid for run in sales.runs), *pids_of_driver(catalog))
            for run in sales.runs:
                run.wait()
            catalog.close()


def pids_of_driver(catalog: Catalog) -> list[int]:
    lease, launch = catalog.leases.current(JOB), catalog.launches.latest(JOB)
    pids = [lease.pid, lease.jvm_pid] if lease is not None else []
    return [pid for pid in (*pids, launch.pid if launch is not None else None) if pid is not None]


def kill(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.thorough(sample="tests/orchestration/test_driver_run.py")
def test_a_driver_outlives_its_run_is_operated_killed_launched_again_and_loses_nothing(sales: Sales) -> None:
    sales.feed(3)

    # The run that launched it is killed, and Dagster's monitoring finds out. The stream goes on.
    first_run = sales.launch()
    first = sales.await_running()
    assert first.run_id == first_run
    assert (first.application or {})["master"] == "local[1]"
    kill(sales.runs[0].pid)
    sales.runs[0].wait()
    sales.instance.report_run_failed(sales.instance.get_run_by_id(first_run))
    sales.await_checkpoint(after_batch=0)
    batch = max(snapshot.batch_id or 0 for snapshot in sales.snapshots())
    sales.feed(2)
    sales.await_checkpoint(after_batch=batch)
    assert sales.catalog.executions.get(first.execution_id).status is ExecutionStatus.RUNNING

    # The sensors: its checkpoints are on the asset, and nobody starts a second writer.
    known = {snapshot.snapshot_id for snapshot in sales.snapshots()}
    events = sales.tick("checkpoint_catalog_sensor").asset_events
    assert known <= {event.metadata[SNAPSHOT_ID_KEY].value for event in events if SNAPSHOT_ID_KEY in event.metadata}
    assert not sales.tick("checkpoint_supervisor_sensor").run_requests

    # Nor does another run of its job: it finds the driver.
    launched = sales.catalog.launches.latest(JOB)
    assert sales.execute("sales_stream", {"follow": False}).success
    assert sales.catalog.launches.latest(JOB) == launched
    assert sales.catalog.executions.latest(JOB).execution_id == first.execution_id

    # A savepoint of the running stream; then the driver is killed, Python and JVM.
    assert sales.execute("trigger_savepoint_job", {"stream_id": JOB, "label": "while it runs"}).success
    pids = pids_of_driver(sales.catalog)
    kill(*pids)
    sales.await_that(lambda: all(map(is_over, pids)), "the end of the driver")
    (request,) = sales.tick("checkpoint_supervisor_sensor").run_requests
    assert request.job_name == "sales_stream"
    assert request.tags[RESTART_OF_TAG] == first.execution_id

    # Launched again by that run, it goes on where it was.
    assert sales.execute(request.job_name, {"follow": False}, **request.tags).success
    second = sales.await_running(besides=first.execution_id)
    assert second.cause is StartCause.RESTART_NEW_RUN
    assert (second.recovery or {})["kind"] == "RESUME"

    # Another run follows it, and ends well when it is stopped with a savepoint.
    following = sales.launch()
    sales.await_that(lambda: f"the driver is running: process {second.pid}" in sales.log_of_runs(), "the run to follow")
    sales.feed(2)
    sales.await_that(lambda: sales.rows() == sales.expected(), "all rows")
    (pid,) = {launch.pid for launch in [sales.catalog.launches.latest(JOB)] if launch is not None}
    assert sales.execute("stop_with_savepoint_job", {"stream_id": JOB, "label": "the end"}).success
    assert sales.runs[1].wait(DEADLINE_S) == 0, sales.log_of_runs()
    assert sales.instance.get_run_by_id(following).status is dg.DagsterRunStatus.SUCCESS
    sales.await_that(lambda: is_over(pid), "the end of the driver")
    end = sales.catalog.executions.latest(JOB)
    assert (end.execution_id, end.status, end.settled) == (second.execution_id, ExecutionStatus.FINISHED, True)
    assert sales.catalog.leases.current(JOB) is None
    assert {snapshot.label for snapshot in sales.snapshots()} >= {"while it runs", "the end"}
    assert sales.rows() == sales.expected()
