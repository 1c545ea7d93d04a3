"""`run_to_completion`: run the query of a streaming asset to the end of its input, within a test."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_ckpt.client import Client
from dagster_ckpt.client.state_browsing import LIVE
from dagster_ckpt.errors import OptionError
from dagster_ckpt.flink.program import StreamToRun, run_program
from dagster_ckpt.orchestration.query import query_of
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    DeploymentResources,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import Stream, stream_handle
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG, CHECKPOINT_STORAGE, SPARK, STATE_BACKEND
from dagster_ckpt.policies.restart import RestartStrategies, effective_restart_strategy
from dagster_ckpt.runtime.start import start_stream_query
from dagster_ckpt.spark.query.description import QueryToStart, described_options
from dagster_ckpt.spark.query.output import FOREACH_BATCH, NamedOutput, named_output, table_of
from dagster_ckpt.spark.query.session import active_in_thread, settings_for_a_while
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.catalog.records import SnapshotRecord
    from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
    from dagster_ckpt.spark.query.query import SupervisedQuery

# Formats whose readers take the schema of the rows; tables have their own.
_FILES = ("parquet", "orc", "json", "csv", "avro")


@dataclass(frozen=True)
class CompletedStream:
    """The result of `run_to_completion`; `folder` has catalog, snapshots and live directory."""

    folder: Path
    snapshots: list[SnapshotRecord]
    _stream: Stream
    _resources: DeploymentResources
    _spark: SparkSession
    _writer: DataStreamWriter

    @cached_property
    def rows(self) -> list[Row]:
        """Every row in the query's sink, also those of earlier runs.

        Raises:
            OptionError: The sink cannot be read back, such as `foreachBatch`.
        """
        writer = self._writer
        table, output = table_of(writer), named_output(writer)
        if table is not None:
            return self._spark.read.table(table).collect()
        if output is None or output.place is None or output.format in (FOREACH_BATCH, "kafka"):
            raise OptionError(_unreadable(self._stream, output))
        reader = self._spark.read.format(output.format)
        if output.format in _FILES:
            given = described_options(writer)
            reader = reader.options(**{name: given[name] for name in given if name != "path"}).schema(writer._df.schema)
        return reader.load(output.place).collect()

    def state(self, operator: int | str | None = None, state: str | None = None) -> list[Row]:
        """The rows of one state after the last batch, as `Client.state` reads them.

        Raises:
            OptionError: The query keeps several states, and these arguments do not select one; or it keeps none.
        """
        with self._client() as client, client.state(self._stream.stream_id, LIVE, spark=self._spark) as found:
            return found.rows(operator, state).collect()

    def savepoint(self, label: str | None = None) -> SnapshotRecord:
        """Take a savepoint, for example to start the next version of the code from it."""
        with self._client() as client:
            return client.trigger_savepoint(self._stream.stream_id, label=label)

    @contextmanager
    def _client(self) -> Iterator[Client]:
        handle = stream_handle(self._stream, self._resources)
        with closing(handle.catalog):
            yield Client.of_stream(handle, origin="test")


def run_to_completion(
    stream: Stream,
    resources: Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    config: dg.Config | None = None,
    start_from: str | StartFrom = "latest",
) -> CompletedStream:
    """Run the query of a stream in this process until it has read all input that there is.

    It runs as in production, with its own sources and sink, except that its trigger is `availableNow`, a failure is not
    restarted, and catalog, snapshots and live directory are in a folder of the test. No Dagster run is started.

    Args:
        stream: A `streaming_asset`, `streaming_multi_asset`, or stream of a component.
        resources: Those that the stream's function names, by key. Catalog, storage and live directory in them are
            replaced, so you may pass those of `Definitions`. Default of `pyspark`: this process's Spark session.
        folder: In the folder of an earlier run, the stream continues where that run ended. Default: a temporary folder,
            deleted with the result.
        config: For the `config` parameter of the stream's function; default: its defaults.
        start_from: As in `Client.restart`.

    Raises:
        OptionError: The stream has no function to call, or a resource is missing.

    Example:
        >>> def test_orders_are_counted(tmp_path):
        ...     done = run_to_completion(orders, {"shop": Shop(folder=str(tmp_path))})
        ...     assert [row.orders for row in done.rows] == [3]
    """
    root = Path(folder if folder is not None else tempfile.mkdtemp(prefix="dagster_ckpt_test_")).absolute()
    try:
        given: Any = dg.RunConfig({"it": config}) if config is not None else None
        own = given.to_config_dict()["ops"]["it"]["config"] if given is not None else None
        done = _run(stream, dict(resources or {}), root, own, StartFrom.of(start_from))
    except BaseException:
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(done, shutil.rmtree, root, ignore_errors=True)
    return done


def _run(
    stream: Stream, given: dict[str, Any], root: Path, config: Mapping[str, Any] | None, start_from: StartFrom
) -> CompletedStream:
    key = stream.translator.get_resource_key
    root.mkdir(parents=True, exist_ok=True)
    deployment = DeploymentResources(
        CheckpointStorageResource(path=str(root / "snapshots")),
        _backend_with_live_directory(given.get(key(STATE_BACKEND)), root / "live"),
        CheckpointCatalogResource(url=f"sqlite:///{root / 'catalog.db'}"),
    )
    resources = {
        key(SPARK): SparkSessionResource(),
        **given,
        key(CHECKPOINT_STORAGE): deployment.checkpoint_storage,
        key(STATE_BACKEND): deployment.state_backend,
        key(CHECKPOINT_CATALOG): deployment.checkpoint_catalog,
    }
    with query_of(stream, resources, config) as (spark, query):
        no_restart = effective_restart_strategy(RestartStrategies.no_restart(), checkpointing_enabled=False)
        # A storage in the stream's options would be that of production.
        options = replace(stream.spec.options, storage=None)
        tested = replace(stream, spec=replace(stream.spec, options=options, restart=no_restart))
        handle = stream_handle(tested, deployment)
        to_start = QueryToStart(lambda: query(spark).trigger(availableNow=True))
        writers: list[DataStreamWriter] = []

        def start(live: LiveDirectory) -> SupervisedQuery:
            writers.append(to_start.take())
            return start_stream_query(handle, writers[-1], live)

        to_run = StreamToRun(handle, start, to_start.described, start_from=start_from)
        settings = deployment.state_backend.backend().spark_settings()
        with (
            closing(handle.catalog),
            active_in_thread(spark),
            settings_for_a_while(spark, settings, "The state backend"),
        ):
            run_program(stream.stream_id, [to_run], spark=spark)
            snapshots = Client.of_stream(handle, origin="test").list_snapshots(stream.stream_id)
        return CompletedStream(root, snapshots, tested, deployment, spark, writers[-1])


def _backend_with_live_directory(given: Any, live: Path) -> StateBackendResource:
    if not isinstance(given, StateBackendResource):
        return StateBackendResource(live_directory=str(live))
    fields = {name: getattr(given, name) for name in type(given).model_fields}
    return type(given)(**{**fields, "live_directory": str(live)})


def _unreadable(stream: Stream, output: NamedOutput | None) -> str:
    sink = output.format if output is not None else "of Spark Connect"
    return (
        f"The rows of stream {stream.stream_id!r} cannot be read back from its sink ({sink}). Read what the query "
        "wrote where your function writes it."
    )
