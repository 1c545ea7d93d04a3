"""`run_to_completion`, and the pages that show it: docs/guides/test-a-stream.md."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import (
    CheckpointCatalogResource,
    CheckpointConfig,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
    StreamSpec,
    StreamTranslator,
    declare_stream,
    streaming_asset,
)
from dagster_ckpt.errors import OptionError, StreamFailedError
from dagster_ckpt.orchestration import StateBackendKind, StreamRunConfig
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.testing import run_to_completion
from tests.support.needs import needs
from tests.support.page_blocks import blocks_of
from tests.support.small_spark import lay_file, small_spark

pytestmark = pytest.mark.spark


class Shop(dg.ConfigurableResource):  # type: ignore[type-arg]
    folder: str


@streaming_asset(
    checkpointing=CheckpointConfig(interval=60_000, storage="file:///nowhere"),
    translator=StreamTranslator("eu", {"pyspark": "eu_spark", "state_backend": "eu_state"}),
)
def orders(context: Any, pyspark: SparkSessionResource, shop: Shop) -> Any:
    rows = pyspark.spark_session.readStream.schema("id long").json(f"{shop.folder}/in")
    written = rows.dropDuplicates(["id"]).writeStream.format("json").option("path", f"{shop.folder}/out")
    return written.trigger(processingTime="1 hour")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    (tmp_path / "in").mkdir()
    lay_file(tmp_path / "in", 0, [{"id": 1}, {"id": 2}, {"id": 2}])
    return Shop(folder=str(tmp_path))


def production(shop: Shop) -> dict[str, Any]:
    """Resources of a deployment that a test must not touch."""
    return {
        "shop": shop,
        "eu_state": StateBackendResource(live_directory="/nowhere/live", kind=StateBackendKind.HASHMAP),
        "checkpoint_storage": CheckpointStorageResource(path="s3://nowhere/checkpoints"),
        "checkpoint_catalog": CheckpointCatalogResource(url=dg.EnvVar("NOWHERE")),
    }


def test_the_places_of_a_deployment_are_replaced_and_its_state_backend_is_kept(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    setting = "spark.sql.streaming.stateStore.providerClass"
    before = spark.conf.get(setting)

    done = run_to_completion(orders, production(shop))

    assert sorted(row.id for row in done.rows) == [1, 2]
    assert not Path("/nowhere").exists()
    assert done.savepoint("before").label == "before"
    live = next((done.folder / "live/orders").iterdir())
    assert list(live.glob("state/0/0/*.delta")), "the state is not that of the heap backend"
    assert spark.conf.get(setting) == before
    folder = done.folder
    del done
    gc.collect()
    assert not folder.exists()


@needs(Feature.STATE_READER)
def test_a_later_run_in_the_folder_continues_and_one_from_a_savepoint_goes_back(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    first = run_to_completion(orders, production(shop), folder=tmp_path / "run")
    first.savepoint("first")
    lay_file(tmp_path / "in", 1, [{"id": 2}, {"id": 3}])

    second = run_to_completion(orders, production(shop), folder=tmp_path / "run")
    assert sorted(row.id for row in second.rows) == [1, 2, 3]
    assert sorted(row.key.id for row in second.state()) == [1, 2, 3]
    assert "first" in {each.label for each in second.snapshots}

    again = run_to_completion(orders, production(shop), folder=tmp_path / "run", start_from="first")
    assert sorted(row.id for row in again.rows) == [1, 2, 3]


def test_a_failure_is_raised_and_leaves_no_temporary_folder(
    spark: SparkSession, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refuse(frame: Any, _batch: int) -> None:
        raise ValueError("a wrong shop")

    @streaming_asset()
    def failing(context: Any, pyspark: SparkSessionResource) -> Any:
        return (
            pyspark.spark_session.readStream.schema("id long").json(f"{tmp_path}/in").writeStream.foreachBatch(refuse)
        )

    with pytest.raises(StreamFailedError, match="a wrong shop"):
        run_to_completion(failing)
    assert not list(tmp_path.glob("dagster_ckpt_test_*"))


def test_rows_that_only_the_test_can_read_are_refused(spark: SparkSession, shop: Shop) -> None:
    seen: list[int] = []

    @streaming_asset()
    def own(context: Any, pyspark: SparkSessionResource) -> Any:
        rows = pyspark.spark_session.readStream.schema("id long").json(f"{shop.folder}/in")
        return rows.writeStream.foreachBatch(lambda frame, _batch: seen.extend(row.id for row in frame.collect()))

    done = run_to_completion(own)

    assert sorted(seen) == [1, 2, 2]
    with pytest.raises(OptionError, match=r"cannot be read back from its sink \(foreachbatch\)"):
        _ = done.rows


class Lowest(dg.Config):
    id: int = 2
    output: str = "some"


def test_the_function_has_its_config(spark: SparkSession, shop: Shop) -> None:
    @streaming_asset()
    def some(context: Any, pyspark: SparkSessionResource, config: Lowest) -> Any:
        rows = pyspark.spark_session.readStream.schema("id long").json(f"{shop.folder}/in")
        return (
            rows.where(f"id >= {config.id}")
            .writeStream.format("parquet")
            .option("path", f"{shop.folder}/{config.output}")
        )

    assert [row.id for row in run_to_completion(some).rows] == [2, 2]
    assert len(run_to_completion(some, config=Lowest(id=1, output="other")).rows) == 3


def test_a_stream_of_a_users_own_asset_has_no_function_to_call() -> None:
    @dg.asset(output_required=False, config_schema=StreamRunConfig.to_fields_dict())
    def mine(context): ...  # type: ignore[no-untyped-def]

    stream = declare_stream(StreamSpec.of("mine"), mine)
    with pytest.raises(OptionError, match="described by an asset, op or program of your own"):
        run_to_completion(stream)
    with pytest.raises(OptionError, match="cannot be called"):
        stream()


def test_the_function_stays_callable() -> None:
    @streaming_asset()
    def plain(context: Any, pyspark: Any, times: Any = 2) -> Any:
        return (context, pyspark, times)

    assert plain("a context", pyspark="a session", times=3) == ("a context", "a session", 3)


@needs(Feature.STATE_READER)
def test_the_tests_of_the_guide_pass(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {}
    for block in blocks_of("guides/test-a-stream.md"):
        assert block.file_name is not None
        name = block.file_name.removesuffix(".py")
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(block.text, block.file_name, "exec", dont_inherit=True), vars(module))
        modules[name] = vars(module)

    modules["test_shop"]["test_each_order_is_written_once"](tmp_path / "one")
    (tmp_path / "two").mkdir()
    modules["test_shop"]["test_the_query_is_described_without_a_run"](tmp_path / "two", SparkSessionResource())
