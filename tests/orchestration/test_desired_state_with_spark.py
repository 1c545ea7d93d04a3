"""A stream goes through its versions in Dagster, with real queries: refused, upgraded, rolled back, suspended.

The sensor is ticked as the daemon does it, and each run that it asks for executes in a thread of this process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.values.modes import DesiredState
from tests.support.small_spark import lay_file, small_spark

pytestmark = [pytest.mark.spark, pytest.mark.thorough(sample="tests/client/test_roll_back.py")]
DEADLINE_S = 240
Change = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.shuffle.partitions": "1"}) as session:
        apply_state_backend(session, EmbeddedRocksDBStateBackend(True))
        yield session


class Deployment:
    """A code location whose code can be changed, and the daemon that ticks its sensor."""

    def __init__(self, spark: SparkSession, root: Path, instance: dg.DagsterInstance) -> None:
        self.spark = spark
        self.root = root
        self.instance = instance
        self.resource = CheckpointCatalogResource(url=f"sqlite:///{root / 'catalog.db'}")
        self.catalog: Catalog = self.resource.catalog()
        self.files = 0
        self.landing = "landing"
        self.mode = UpgradeMode.SAVEPOINT
        self.launched: set[str] = set()
        self.threads: list[threading.Thread] = []
        self.definitions = dg.Definitions()

    def load(self, code_version: str, *, key: str = "shop", output: str = "output", only: str = "true") -> None:
        """Load the code of a version: what it counts by, where it writes, and which rows it counts."""
        stream = self._stream(code_version, key, output, only)
        self.definitions = dg.Definitions.merge(
            stream_definitions(stream),
            dg.Definitions(
                resources={
                    "pyspark": dg.ResourceDefinition.hardcoded_resource(_Session(self.spark)),
                    "checkpoint_storage": CheckpointStorageResource(path=f"file://{self.root}/snapshots"),
                    "state_backend": StateBackendResource(live_directory=str(self.root / "live")),
                    "checkpoint_catalog": self.resource,
                }
            ),
        )

    def _stream(self, code_version: str, key: str, output: str, only: str) -> StreamingAsset:
        @streaming_asset(
            checkpointing=CheckpointConfig(interval=300),
            restart_strategy=RestartStrategies.no_restart(),
            desired_state=DesiredState.RUNNING,
            upgrade=UpgradePolicy(self.mode, rollback_after_ms=DEADLINE_S * 1000),
            code_version=code_version,
        )
        def orders(context: Any, pyspark: Any) -> Any:
            counts = self.counts(key, only)
            return counts.writeStream.format("parquet").option("path", str(self.root / output))

        return orders

    def counts(self, key: str = "shop", only: str = "true") -> DataFrame:
        stream = self.spark.readStream.schema("at timestamp, shop long").option("maxFilesPerTrigger", 1)
        rows = stream.json(str(self.root / self.landing)).where(only).withWatermark("at", "10 minutes")
        counts = rows.groupBy(F.window("at", "30 minutes"), F.expr(key).alias("shop")).count()
        return counts.select("window.start", "shop", "count")

    def set_state(self, **config: Any) -> None:
        job = self.definitions.resolve_job_def("set_desired_state_job")
        said = {"ops": {"set_desired_state": {"config": {"stream_id": "orders", **config}}}}
        assert job.execute_in_process(said, instance=self.instance).success

    def restart(self, **config: Any) -> str | None:
        """Restart it as a person does; returns why that failed."""
        job = self.definitions.resolve_job_def("restart_stream_job")
        said = {"ops": {"restart_stream": {"config": {"stream_id": "orders", **config}}}}
        ended: list[Any] = []

        def execute() -> None:
            ended.append(job.execute_in_process(said, instance=self.instance, raise_on_error=False))

        asked = threading.Thread(target=execute)
        asked.start()
        self.until(lambda: not asked.is_alive())
        [failure] = [each for each in ended[0].all_events if each.is_step_failure] or [None]
        return failure.step_failure_data.user_failure_data.description if failure is not None else None

    def feed(self, files: int) -> None:
        landing = self.root / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number % 24:02}:{n:02}:00Z", "shop": n % 3} for n in range(10)]
            lay_file(landing, number, rows)
        self.files += files

    def tick(self) -> None:
        sensor = self.definitions.resolve_sensor_def("checkpoint_supervisor_sensor")
        context = dg.build_sensor_context(
            self.instance, resources={"checkpoint_catalog": self.resource}, definitions=self.definitions
        )
        for request in sensor.evaluate_tick(context).run_requests or []:
            assert request.run_key is not None
            if request.run_key not in self.launched:
                self.launched.add(request.run_key)
                self.threads.append(threading.Thread(target=self.execute, args=(request,), daemon=True))
                self.threads[-1].start()

    def execute(self, request: Any) -> None:
        job = self.definitions.resolve_job_def(request.job_name)
        job.execute_in_process(
            request.run_config, instance=self.instance, tags=dict(request.tags), raise_on_error=False
        )

    def until(self, done: Callable[[], bool]) -> None:
        """Tick until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.tick()
            if done():
                return
            if time.monotonic() > deadline:
                pytest.fail(f"it did not come to that: {self.row}, {self.newest}")
            time.sleep(0.2)

    @property
    def row(self) -> DesiredRecord | None:
        return self.catalog.desired_states.find("orders")

    @property
    def newest(self) -> ExecutionRecord | None:
        return self.catalog.executions.latest("orders")

    def is_in(self, phase: UpgradePhase, version: str) -> bool:
        upgrade = self.row.upgrade if self.row is not None else None
        return upgrade is not None and (upgrade.phase, upgrade.to_version) == (phase, version)

    def has_read_all(self) -> bool:
        """Whether the query that runs has committed every file and waits for more."""
        live = LiveDirectory(self.catalog.streams.get("orders").live_directory or "")
        sources = [int(name.removesuffix(".compact")) for name in live.folder.list("sources/0")]
        positions = live.positions()
        progress = (self.newest.progress if self.newest is not None else None) or {}
        return (
            max(sources, default=-1) >= self.files - 1
            and positions.offset == positions.commit
            and bool(progress.get("idle"))
            # What was idle may have been the query before the newest files, and its last batch is one without data.
            and self.windows_shown() == self.files - 1
        )

    def windows_shown(self) -> int:
        """How many windows have come out; the watermark closes that of a file with the next file."""
        try:
            return len({row[0] for row in self.rows()})
        except AnalysisException:
            # Nothing has come out yet.
            return 0

    def rows(self, folder: str = "output") -> Counter[tuple[Any, ...]]:
        return Counter(tuple(row) for row in self.spark.read.parquet(str(self.root / folder)).collect())

    def uninterrupted(self) -> Counter[tuple[Any, ...]]:
        writer = self.counts().writeStream.format("parquet").option("path", str(self.root / "reference"))
        query = writer.option("checkpointLocation", str(self.root / "reference-live")).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return self.rows("reference")


class _Session:
    """Stands where the `pyspark` resource is."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark_session = spark


@pytest.fixture
def deployment(spark: SparkSession, tmp_path: Path) -> Iterator[Deployment]:
    home = tmp_path / "dagster"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        deployment = Deployment(spark, tmp_path, instance)
        yield deployment
        for query in spark.streams.active:
            query.stop()
        for thread in deployment.threads:
            thread.join(DEADLINE_S)
        deployment.catalog.close()


def test_a_stream_goes_through_its_versions_and_its_output_is_that_of_an_uninterrupted_one(
    deployment: Deployment,
) -> None:
    deployment.feed(3)
    deployment.load("1")
    deployment.until(lambda: deployment.newest is not None and deployment.has_read_all())
    old = deployment.newest

    # Another type of the grouping key: found while the old code runs, and runs on.
    deployment.load("2", key="cast(shop AS string)")
    deployment.until(lambda: deployment.is_in(UpgradePhase.REFUSED, "2"))
    assert deployment.row is not None
    assert "the keys of the state differ" in (deployment.row.alert or "")
    assert "key 2: shop bigint -> CAST(shop AS STRING) string" in (deployment.row.alert or "")
    deployment.feed(1)
    deployment.until(deployment.has_read_all)
    assert old is not None
    assert deployment.newest is not None
    assert (deployment.newest.execution_id, deployment.newest.status) == (old.execution_id, ExecutionStatus.RUNNING)

    # Another key that Spark goes on with: only a person can say that it means the same.
    deployment.load("3", key="shop + 0")
    deployment.until(lambda: deployment.is_in(UpgradePhase.REFUSED, "3"))
    assert "shop bigint -> (shop + CAST(0 AS BIGINT)) bigint" in (deployment.row.alert or "")
    deployment.set_state(state="AS_DEFINED", accept_plan_change=True)
    # It is tried, and takes over at a savepoint.
    deployment.until(lambda: deployment.is_in(UpgradePhase.STABLE, "3"))
    preflight = deployment.row.preflight
    assert preflight is not None
    assert (preflight.passed, preflight.code_version) == (True, "3")
    assert "was replayed on a copy" in preflight.reason
    assert deployment.newest.code_version == "3"
    savepoint = deployment.row.upgrade.snapshot_id if deployment.row.upgrade is not None else None
    assert savepoint is not None
    assert deployment.catalog.snapshots.get(savepoint).kind == "SAVEPOINT"
    deployment.feed(2)
    deployment.until(deployment.has_read_all)

    # A version that fails where the preflight cannot see it: at its sink. It is rolled back, and not started again.
    deployment.load("4", key="shop + 0", output="landing/0000.json/no-folder")
    deployment.until(lambda: deployment.is_in(UpgradePhase.ROLLED_BACK, "4"))
    failed = deployment.newest.execution_id
    deployment.tick()
    assert deployment.newest.execution_id == failed
    assert "rolled back to savepoint" in (deployment.row.alert or "")

    # The next version goes on from the savepoint that was gone back to.
    deployment.load("5", key="shop + 0")
    deployment.until(lambda: deployment.is_in(UpgradePhase.STABLE, "5"))
    deployment.feed(1)
    deployment.until(deployment.has_read_all)

    deployment.set_state(state="SUSPENDED")
    deployment.until(lambda: deployment.row is not None and deployment.row.reached == deployment.row.generation)
    assert deployment.newest.status is ExecutionStatus.FINISHED

    rows = deployment.rows()
    assert rows
    assert rows == deployment.uninterrupted()
    assert not list((deployment.root / "live" / ".scratch" / "orders").iterdir())


def test_a_restart_with_code_that_is_refused_leaves_the_running_query_alone(deployment: Deployment) -> None:
    deployment.feed(3)
    deployment.load("1")
    deployment.until(lambda: deployment.newest is not None and deployment.has_read_all())
    old = deployment.newest
    assert old is not None

    deployment.load("1", key="cast(shop AS STRING)")
    told = deployment.restart()
    assert "PlanChangedError" in str(told)
    assert "key 2: shop bigint -> CAST(shop AS STRING) string" in str(told)

    (deployment.root / "moved").mkdir()
    deployment.landing = "moved"
    deployment.load("1")
    assert "SourceChangedError" in str(deployment.restart())
    deployment.landing = "landing"

    # It has not been touched, and goes on.
    deployment.feed(1)
    deployment.until(deployment.has_read_all)
    assert deployment.newest is not None
    assert (deployment.newest.execution_id, deployment.newest.status) == (old.execution_id, ExecutionStatus.RUNNING)

    deployment.load("1")
    assert deployment.restart() is None
    new = deployment.newest
    assert (new.execution_id != old.execution_id, new.status) == (True, ExecutionStatus.RUNNING)
    assert deployment.catalog.executions.get(old.execution_id).status is ExecutionStatus.SUSPENDED
    deployment.feed(1)
    deployment.until(deployment.has_read_all)

    deployment.set_state(state="SUSPENDED")
    deployment.until(lambda: deployment.row is not None and deployment.row.reached == deployment.row.generation)
    assert deployment.rows() == deployment.uninterrupted()


def test_a_stream_is_handed_over_to_code_that_does_the_same_and_not_to_other_code(deployment: Deployment) -> None:
    deployment.mode = UpgradeMode.HAND_OVER
    deployment.feed(4)
    deployment.load("1")
    deployment.until(lambda: deployment.newest is not None and deployment.has_read_all())
    old = deployment.newest
    assert old is not None

    deployment.load("2", only="shop <> 1")
    deployment.until(lambda: deployment.is_in(UpgradePhase.REFUSED, "2"))
    assert deployment.row is not None
    assert "not handed over: RequestFailedError" in (deployment.row.alert or "")
    assert "the loaded code does something else. batch" in (deployment.row.alert or "")
    deployment.feed(1)
    deployment.until(deployment.has_read_all)
    assert deployment.newest is not None
    assert (deployment.newest.execution_id, deployment.newest.status) == (old.execution_id, ExecutionStatus.RUNNING)

    deployment.load("3", only="shop >= 0")
    deployment.until(lambda: deployment.is_in(UpgradePhase.UPGRADING, "3"))
    ended = deployment.catalog.executions.get(old.execution_id)
    assert ended.status is ExecutionStatus.SUSPENDED
    deployment.feed(1)
    deployment.until(lambda: deployment.is_in(UpgradePhase.STABLE, "3"))
    deployment.until(deployment.has_read_all)
    assert deployment.row.preflight is not None
    assert "the same state" in deployment.row.preflight.reason

    deployment.set_state(state="SUSPENDED")
    deployment.until(lambda: deployment.row is not None and deployment.row.reached == deployment.row.generation)
    assert deployment.rows() == deployment.uninterrupted()


def test_an_upgrade_that_is_regretted_is_undone_and_the_old_code_goes_on(deployment: Deployment) -> None:
    deployment.feed(3)
    deployment.load("1")
    deployment.until(lambda: deployment.newest is not None and deployment.has_read_all())

    # It leaves rows out, which nothing notices.
    deployment.load("2", only="shop <> 1")
    deployment.until(lambda: deployment.is_in(UpgradePhase.STABLE, "2"))
    deployment.feed(2)
    deployment.until(deployment.has_read_all)

    job = deployment.definitions.resolve_job_def("roll_back_upgrade_job")
    said = {"ops": {"roll_back_upgrade": {"config": {"stream_id": "orders"}}}}
    assert job.execute_in_process(said, instance=deployment.instance).success
    deployment.until(lambda: deployment.is_in(UpgradePhase.ROLLED_BACK, "2"))
    assert deployment.row is not None
    assert "load code version 1" in (deployment.row.alert or "")

    deployment.load("1")
    deployment.until(lambda: deployment.is_in(UpgradePhase.STABLE, "1"))
    deployment.feed(1)
    deployment.until(deployment.has_read_all)
    deployment.set_state(state="SUSPENDED")
    deployment.until(lambda: deployment.row is not None and deployment.row.reached == deployment.row.generation)
    assert deployment.rows() == deployment.uninterrupted()
