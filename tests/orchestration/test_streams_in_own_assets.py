"""One query that writes two assets, decorated and in a body of one's own, on a real Spark: exact through a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import PySparkResource
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.settings import StreamRunConfig
from dagster_ckpt.orchestration.stream import StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.streaming_asset import StreamResource, declare_stream, streaming_multi_asset
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark

TABLES = ("good", "bad")
SPECS = [dg.AssetSpec(table, skippable=True) for table in TABLES]
EVERY_SECOND = CheckpointConfig(interval=1000)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


def sorted_out(spark: SparkSession, home: Path) -> DataStreamWriter:
    """Orders of an even number are good; each batch writes both tables, a second time over the first."""

    def write(rows: DataFrame, batch_id: int) -> None:
        for table, condition in zip(TABLES, ("number % 2 = 0", "number % 2 = 1"), strict=True):
            rows.where(condition).write.mode("overwrite").parquet(f"{home}/{table}/batch={batch_id}")

    orders = spark.readStream.schema("number long").option("maxFilesPerTrigger", 1).json(f"{home}/landing")
    return orders.writeStream.foreachBatch(write).trigger(availableNow=True)


def decorated(home: Path) -> StreamingAsset:
    @streaming_multi_asset(specs=SPECS, checkpointing=EVERY_SECOND)
    def orders(context: Any, pyspark: PySparkResource) -> DataStreamWriter:
        return sorted_out(pyspark.spark_session, home)

    return orders


def of_ones_own(home: Path) -> StreamingAsset:
    spec = StreamSpec.of("orders", checkpointing=EVERY_SECOND)

    @dg.multi_asset(specs=SPECS)
    def orders(context: dg.AssetExecutionContext, config: StreamRunConfig, streams: StreamResource) -> Iterator[Any]:
        outcome = yield from streams.run(context, spec, describe=lambda session: sorted_out(session, home))
        assert outcome is not None
        (home / "ends").open("a").write(f"{outcome.end.kind.name}\n")

    return declare_stream(spec, orders)


@pytest.mark.thorough(but="of_ones_own")
@pytest.mark.parametrize("form", [decorated, of_ones_own], ids=lambda form: form.__name__)
def test_two_tables_of_one_query_are_exact_through_a_restart_and_told_of_alike(
    form: Any, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "landing").mkdir()
    parts = {
        "pyspark": PySparkResource(spark_config={}),
        "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/checkpoints"),
        "state_backend": StateBackendResource(live_directory=f"{tmp_path}/live"),
        "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{tmp_path}/catalog.db"),
    }
    stream = form(tmp_path)
    resources = {**parts, "streams": StreamResource(**parts)}
    definitions = dg.Definitions.merge(stream_definitions(stream), dg.Definitions(resources=resources))

    with dg.DagsterInstance.ephemeral() as instance:
        for files in (range(3), range(3, 5)):
            for file in files:
                lay_file(tmp_path / "landing", file, [{"number": file * 10 + row} for row in range(10)])
            assert definitions.resolve_job_def("orders_stream").execute_in_process(instance=instance).success
        savepoint = {"trigger_savepoint": {"config": {"stream_id": stream.stream_id}}}
        job = definitions.resolve_job_def("trigger_savepoint_job")
        assert job.execute_in_process({"ops": savepoint}, instance=instance).success
        context = dg.build_sensor_context(instance, resources={"checkpoint_catalog": parts["checkpoint_catalog"]})
        told = build_catalog_sensor([stream], report_interval_seconds=0).evaluate_tick(context).asset_events

    written = {
        table: [row.number for row in spark.read.parquet(f"{tmp_path}/{table}").orderBy("number").collect()]
        for table in TABLES
    }
    assert written == {"good": list(range(0, 50, 2)), "bad": list(range(1, 50, 2))}
    snapshots = {table: [event.metadata for event in told if event.asset_key == dg.AssetKey(table)] for table in TABLES}
    assert snapshots["good"] == snapshots["bad"] != []
    assert snapshots["good"][-1]["dagster_ckpt/kind"].value == "SAVEPOINT"
    if form is of_ones_own:
        assert (tmp_path / "ends").read_text() == "ENDED_BY_ITSELF\n" * 2
