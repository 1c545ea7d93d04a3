"""A stream on a standalone cluster, whose processes are killed within a batch: each row is there once.

`make test-cluster`. Master and two workers are processes of their own; executors copy every snapshot and write to a
real Kafka broker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cluster_program import NEW_ROWS, STREAM, Run, once, write_input
from spark_cluster import BIN, SparkCluster, running_cluster

from dagster_ckpt.catalog.records import HANDS_OVER, ExecutionStatus, RequestKind
from dagster_ckpt.client.client import Client
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.versions import Feature
from tests.kafka.kafka_broker import Kafka, running_broker
from tests.kafka.kafka_rows import committed_rows, new_topic
from tests.support.needs import needs
from tests.support.server import free_port

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.cluster]

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
DEADLINE_S = 300.0
FILES = 5


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with running_broker(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    # Executors inherit the path: the program's modules, and the killer that each of their Python processes imports.
    path = os.pathsep.join(map(str, (ROOT / "tests/kafka/mortal_workers", HERE, ROOT)))
    with running_cluster(tmp_path_factory.mktemp("spark"), free_port(), {"PYTHONPATH": path}) as cluster:
        yield cluster


class Numbers:
    """The program, submitted as often as it takes.

    Args:
        folder: Its folder.
        kafka: The broker.
        cluster: The cluster.
    """

    def __init__(self, folder: Path, kafka: Kafka, cluster: SparkCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.how = Run(str(folder), kafka.servers, new_topic(kafka.servers))
        (folder / "events").mkdir()
        write_input(folder / "input", 0, FILES)

    def submit(
        self,
        *,
        deploy_mode: str = "client",
        die_at: str = "",
        cores: int = 2,
        for_start: str | None = None,
        log_name: str = "log",
        **how: Any,
    ) -> int:
        """Run it once with spark-submit, perhaps for a START request; returns its exit code."""
        calls = self.folder / f"calls-{len(list(self.folder.glob('calls-*')))}"
        run = replace(self.how, **how, die_at=die_at and f"{die_at}:{calls}")
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": str(cores),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{self.folder}/events",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.compress": "false",
        }
        command = [str(BIN / "spark-submit"), "--master", self.cluster.master, "--deploy-mode", deploy_mode]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command += [str(HERE / "cluster_program.py"), json.dumps(asdict(run))]
        start = {START_REQUEST_VARIABLE: for_start} if for_start is not None else {}
        with (self.folder / log_name).open("w") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, **start},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            return process.wait(DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def finish(self, **how: Any) -> None:
        assert self.submit(**how) == 0, self.said()

    def said(self) -> str:
        return "\n".join(log.read_text()[-6000:] for log in self.folder.glob("*log"))

    def rows(self) -> dict[str, int]:
        return dict(committed_rows(self.how.servers, self.how.topic))

    def client(self) -> Client:
        return Client(self.how.catalog, storage=self.how.snapshots, live_root=self.how.live_root)

    def executors_that_copied(self) -> set[str]:
        """Ids of the executors that ran tasks of a job that copied a snapshot."""
        stages: set[int] = set()
        copied: set[str] = set()
        for log in (self.folder / "events").iterdir():
            for event in map(json.loads, log.read_text().splitlines()):
                if event["Event"] == "SparkListenerJobStart":
                    described = (event.get("Properties") or {}).get("spark.job.description", "")
                    stages |= set(event["Stage IDs"]) if described == "copy a snapshot" else set()
                elif event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in stages:
                    copied.add(event["Task Info"]["Executor ID"])
        return copied


@pytest.fixture
def numbers(tmp_path: Path, kafka: Kafka, cluster: SparkCluster) -> Numbers:
    return Numbers(tmp_path, kafka, cluster)


def test_executors_copy_snapshots_and_write_each_row_once(numbers: Numbers) -> None:
    with ThreadPoolExecutor(1) as pool, closing(numbers.client()) as client:
        run = pool.submit(numbers.submit, bounded=False)
        deadline = time.monotonic() + DEADLINE_S
        while numbers.rows() != once(FILES):
            assert not run.done(), numbers.said()
            assert time.monotonic() < deadline, numbers.said()
            time.sleep(1)
        savepoint = client.stop(STREAM, timeout_s=DEADLINE_S).savepoint
        assert run.result(DEADLINE_S) == 0, numbers.said()

    assert savepoint is not None
    assert open_store(FileSystemCheckpointStorage(numbers.how.snapshots), STREAM).verify(savepoint.location or "") == []
    assert numbers.executors_that_copied()
    assert numbers.executors_that_copied() <= {"0", "1"}
    assert numbers.rows() == once(FILES)


# Two shares a batch: the fifth call is of the third batch.
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["produce", "commit_transaction"])
def test_the_query_goes_on_when_an_executor_is_killed_within_a_batch(numbers: Numbers, call: str, when: str) -> None:
    numbers.finish(die_at=f"executor:{call}:{when}:{5 if call == 'commit_transaction' else 2 * NEW_ROWS + 30}")

    assert numbers.rows() == once(FILES)


def test_the_query_goes_on_when_a_worker_and_its_executor_are_killed_within_a_batch(numbers: Numbers) -> None:
    try:
        numbers.finish(die_at="node:commit_transaction:after:5")
        dead = [name for name in ("worker-1", "worker-2") if not numbers.cluster.is_up(name)]
    finally:
        for number in (1, 2):
            if not numbers.cluster.is_up(f"worker-{number}"):
                numbers.cluster.start_worker(number)

    assert len(dead) == 1
    assert numbers.rows() == once(FILES)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_driver_goes_on_when_the_driver_is_killed_within_a_batch(numbers: Numbers, when: str) -> None:
    assert numbers.submit(die_at=f"all:commit_transaction:{when}:5") == -signal.SIGKILL, numbers.said()
    assert sum(numbers.rows().values()) < len(once(FILES))

    numbers.finish()
    assert numbers.rows() == once(FILES)


def test_the_query_goes_on_when_the_master_is_killed(numbers: Numbers) -> None:
    numbers.cluster.kill("master")
    numbers.cluster.start_master()

    numbers.finish()
    assert numbers.rows() == once(FILES)


def test_the_next_driver_takes_over_while_the_query_runs(numbers: Numbers) -> None:
    deadline = time.monotonic() + DEADLINE_S
    with ThreadPoolExecutor(2) as pool, closing(numbers.client()) as client:
        old = pool.submit(numbers.submit, bounded=False, cores=1)
        while numbers.rows() != once(FILES):
            assert not old.done(), numbers.said()
            assert time.monotonic() < deadline, numbers.said()
            time.sleep(1)
        first = client.catalog.executions.latest(STREAM)
        arguments = {"start_from": "latest", HANDS_OVER: True, "verify_batches": 2}
        start = client.catalog.requests.submit(STREAM, RequestKind.START, arguments=arguments, origin="a test")
        new = pool.submit(numbers.submit, bounded=False, cores=1, for_start=start.request_id, log_name="new-log")
        files = FILES
        while not old.done() or client.catalog.executions.latest(STREAM).status is not ExecutionStatus.RUNNING:
            assert not new.done(), numbers.said()
            assert time.monotonic() < deadline, numbers.said()
            # The new driver compares batches that come in meanwhile.
            write_input(numbers.folder / "input", files, files + 1)
            files += 1
            time.sleep(2)
        assert old.result() == 0, numbers.said()
        write_input(numbers.folder / "input", files, files + 1)
        files += 1
        while numbers.rows() != once(files):
            assert not new.done(), numbers.said()
            assert time.monotonic() < deadline, numbers.said()
            time.sleep(1)
        second = client.catalog.executions.latest(STREAM)
        client.stop(STREAM, timeout_s=DEADLINE_S)
        assert new.result(DEADLINE_S) == 0, numbers.said()

    assert first is not None
    assert second is not None
    assert second.execution_id != first.execution_id
    assert second.live_directory == first.live_directory
    assert "the same state" in numbers.said()


@needs(Feature.STATE_REWRITER)
def test_executors_rewrite_the_state_before_the_query_goes_on(numbers: Numbers) -> None:
    numbers.finish()
    write_input(numbers.folder / "input", FILES, FILES + 2)

    numbers.finish(state_partitions=3)
    assert numbers.rows() == once(FILES + 2)


def test_a_standalone_cluster_refuses_python_programs_in_cluster_mode(numbers: Numbers) -> None:
    assert numbers.submit(deploy_mode="cluster") != 0

    assert "Cluster deploy mode is currently not supported for python applications" in numbers.said()
