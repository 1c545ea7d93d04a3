"""PyFlink's `StreamExecutionEnvironment` over a Spark session."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.client import Client
from dagster_ckpt.client.connection import GivenStreams
from dagster_ckpt.client.launching import cause_unasked
from dagster_ckpt.config.state_backend import StatePartitions
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.flink import execution_config as allowed
from dagster_ckpt.flink.execution_config import ConfiguredProgram, ExecutionConfig, KryoRegistrations
from dagster_ckpt.flink.program import (
    Deployment,
    JobExecutionResult,
    RegisteredWriter,
    StreamToRun,
    deployment_below,
    run_program,
    start_registered,
)
from dagster_ckpt.policies.restart import effective_restart_strategy
from dagster_ckpt.spark.query.description import (
    brings_a_trigger,
    execution_plan,
    is_described_query,
    same_session,
    session_of,
    with_time,
)
from dagster_ckpt.spark.query.session import (
    active_session,
    application_settings,
    is_classic_session,
    settings_for_a_while,
    start_application,
    unknown_classes,
)
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.validation import OptionDescription, checked_stream_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

DEFAULT_JOB_NAME = "Spark Streaming Stream"


class StreamExecutionEnvironment(ConfiguredProgram):
    """The context of one streaming program, under PyFlink's names; it runs without Dagster.

    Define queries on `env.spark`, add them with `add_writer`, and run them with `execute`: with periodic checkpoints
    and restarts in place.

    Args:
        spark: None uses the session of this process, or starts one when needed.
        folder: Default folder of everything stored.
        live_root: Folder of Spark's checkpoint directories: a path or URL that every executor reaches.
        catalog_url: SQLAlchemy URL of the catalog.
        storage_path: URL of snapshots, unless the checkpoint config or backend names one.

    Raises:
        OptionTypeError: `spark` is no session, or one of Spark Connect.

    Example:
        >>> env = StreamExecutionEnvironment.get_execution_environment()
        >>> env.enable_checkpointing(60_000).set_max_parallelism(8).get_checkpoint_interval()
        60000
    """

    def __init__(
        self,
        *,
        spark: SparkSession | None = None,
        folder: str | Path = "checkpoints",
        live_root: str | None = None,
        catalog_url: str | None = None,
        storage_path: str | None = None,
    ) -> None:
        if spark is not None and not is_classic_session(spark):
            raise OptionTypeError(
                f"spark is {spark!r} ({type(spark).__module__}), but must be a classic SparkSession: over Spark "
                "Connect, the Spark application is not accessible. Use @streaming_asset there."
            )
        super().__init__()
        self._spark = active_session() if spark is None else spark
        self._deployment: Deployment = deployment_below(
            Path(folder), live_root=live_root, catalog_url=catalog_url, storage_path=storage_path
        )
        self._local_parallelism = os.cpu_count() or 1
        self._parallelism: int | None = None
        self._writers: dict[str, RegisteredWriter] = {}

    @staticmethod
    def get_execution_environment(
        *,
        spark: SparkSession | None = None,
        folder: str | Path = "checkpoints",
        live_root: str | None = None,
        catalog_url: str | None = None,
        storage_path: str | None = None,
    ) -> StreamExecutionEnvironment:
        """Create an environment, with the arguments of the class.

        By default, live directories are in `./checkpoints/live`, snapshots in `./checkpoints/snapshots`, and the
        catalog is `./checkpoints/catalog.db`.
        """
        return StreamExecutionEnvironment(
            spark=spark, folder=folder, live_root=live_root, catalog_url=catalog_url, storage_path=storage_path
        )

    @property
    def spark(self) -> SparkSession:
        """The session to define queries on. The first access may start Spark.

        Raises:
            OptionError: A class was registered with Kryo that Spark cannot load; Spark was stopped again.
        """
        if self._spark is None:
            settings = {allowed.SHUFFLE_PARTITIONS: str(self._local_parallelism)} | self._config.kryo.spark_settings()
            if self._backend is not None:
                settings |= self._backend.spark_settings()
            started = start_application(self._local_parallelism, settings)
            try:
                self._config.kryo.refuse_unknown(partial(unknown_classes, started))
            except OptionError:
                # Its registrations cannot change any more.
                started.stop()
                raise
            self._spark = started
        return self._spark

    def describe(self) -> list[OptionDescription]:
        """Return each execution option and its effect on Spark."""
        return self.get_config().describe()

    def get_config(self) -> ExecutionConfig:
        """Return the execution configuration, whose setters also change this environment."""
        return replace(self._config, parallelism=self.get_parallelism(), program=self)

    def set_parallelism(self, parallelism: int) -> Self:
        """Set how many tasks read and shuffle, from 1; -1 uses the session's setting."""
        if allowed.PARALLELISM.typed(parallelism) != allowed.PARALLELISM_DEFAULT:
            allowed.PARALLELISM.checked(parallelism)
        self._change(parallelism=parallelism)
        self._parallelism = parallelism
        return self

    def get_parallelism(self) -> int:
        """Return how many tasks read and shuffle, unless a query sets it itself."""
        if self._parallelism is not None:
            return self._parallelism
        if self._spark is None:
            return self._local_parallelism
        return int(self._spark.conf.get(allowed.SHUFFLE_PARTITIONS) or self._local_parallelism)

    def set_default_local_parallelism(self, parallelism: int) -> None:
        """Set how many threads run tasks if this starts Spark on this machine; default: its cores."""
        allowed.LOCAL_PARALLELISM.checked(parallelism)
        if self._spark is not None:
            raise OptionError(
                f"default local parallelism is {parallelism}, but it must be set before Spark starts, and the session "
                f"of this environment is already running with {self._spark.sparkContext.master!r}. Call it before "
                "env.spark, or set the master on the session."
            )
        self._local_parallelism = parallelism

    def get_default_local_parallelism(self) -> int:
        """Return how many threads run tasks if this starts Spark on this machine."""
        return self._local_parallelism

    def assign_timestamps_and_watermarks(self, frame: DataFrame, column: str, delay: str = "0 seconds") -> DataFrame:
        """Give a stream its time column: for event time an existing `column`, else one that is created or replaced."""
        return with_time(frame, self._config.time_characteristic, column, delay)

    def add_default_kryo_serializer(self, type_class_name: str, serializer_class_name: str) -> None:
        """Same as `register_type_with_kryo_serializer`: Spark has no serializers for subclasses."""
        self.register_type_with_kryo_serializer(type_class_name, serializer_class_name)

    def register_type_with_kryo_serializer(self, type_class_name: str, serializer_class_name: str) -> None:
        """Register a type and what provides its Kryo serializer, before Spark starts, both by the name of a Java class.

        The serializer is an `org.apache.spark.serializer.KryoRegistrator`, Spark's only way to register serializers.
        """
        self._set_kryo(self._config.kryo.with_registrator(type_class_name, serializer_class_name))

    def register_type(self, type_class_name: str) -> None:
        """Register a type with Spark's Kryo serializer, by the full name of its class, before Spark starts."""
        self._set_kryo(self._config.kryo.with_type(type_class_name))

    def add_writer(self, name: str, writer: DataStreamWriter) -> Self:
        """Add a query to the program: the counterpart of a sink in Flink.

        Args:
            name: Stream id. While you keep it, the query continues where it stopped.
            writer: `DataFrame.writeStream`, not started. Its trigger is kept; query name and checkpoint location are
                replaced.
        """
        checked_stream_id(name)
        if name in self._writers:
            raise OptionError(f"name is {name!r}, but another writer has that name already. Choose another one.")
        if not is_described_query(writer):
            raise OptionTypeError(
                f"writer is {writer!r}, but must be what DataFrame.writeStream returns, before it is started."
            )
        self._spark = self._spark or session_of(writer)
        if not same_session(self._spark, session_of(writer)):
            raise OptionError(
                f"The query {name!r} was defined in another Spark session, where the settings of this environment "
                "do not apply. Define it on env.spark."
            )
        self._writers[name] = RegisteredWriter(name, writer, brings_a_trigger(writer))
        return self

    def get_execution_plan(self) -> str:
        """Return the plan of the writers as JSON, in the form of Flink's: nodes with their predecessors."""
        self._check_writers()
        writers = {name: registered.writer for name, registered in self._writers.items()}
        return execution_plan(writers, self.get_parallelism())

    def execute(self, job_name: str | None = None) -> JobExecutionResult:
        """Run the writers until all of them have ended; each continues from where it stopped before.

        Raises:
            OptionError: There is no writer, or options contradict each other.
            StreamFailedError: A query failed, and its restart strategy allows no further restart.
            StatePartitionsError: State has another number of partitions, and may not be rewritten.
            StateBackendChangeError: State is of another backend, and may not be rewritten.
            KeyboardInterrupt: The program was interrupted; its queries were stopped and keep their state.
        """
        self._check_writers()
        shown = job_name or DEFAULT_JOB_NAME
        settings = (self._backend.spark_settings() if self._backend is not None else {}) | self._config.spark_settings()
        with (
            closing(self._deployment.open_catalog()) as catalog,
            settings_for_a_while(self.spark, settings, "The environment"),
        ):
            streams = [self._to_run(catalog, registered, shown) for registered in self._writers.values()]
            return run_program(shown, streams, spark=self.spark)

    def client(self, *, origin: str | None = None) -> Client:
        """Return a client for the queries of this program, which you close; `origin`: who operates."""
        catalog = self._deployment.open_catalog()
        queries = GivenStreams(
            catalog,
            id_of=str,
            open_stream=lambda name: self._stream(catalog, name, DEFAULT_JOB_NAME),
            ids=lambda: [stream.stream_id for stream in catalog.streams.all()],
        )
        return Client.of_streams(queries, origin=origin or DEFAULT_JOB_NAME)

    def _to_run(self, catalog: Catalog, registered: RegisteredWriter, job_name: str) -> StreamToRun:
        stream = self._stream(catalog, registered.name, job_name)
        return StreamToRun(
            stream,
            start_registered(stream, registered, self._config),
            lambda: registered.writer,
            cause=cause_unasked(catalog, stream.stream_id),
        )

    def _stream(self, catalog: Catalog, name: str, job_name: str) -> StreamHandle:
        options = self._checkpoint_config.options
        return self._deployment.stream(
            name,
            catalog=catalog,
            query_name=f"{job_name}: {name}",
            options=options,
            restart=effective_restart_strategy(self._restart, checkpointing_enabled=options.is_checkpointing_enabled),
            backend=self._backend,
            savepoint_url=None if self._savepoints is None else self._savepoints[0],
            on_backend_change=self._on_backend_change,
            state_partitions=self._state_partitions(),
        )

    def _state_partitions(self) -> StatePartitions | None:
        number = self._config.max_parallelism
        is_set = number != allowed.PARALLELISM_DEFAULT
        return StatePartitions(number, self._on_other_partitions) if is_set else None

    def _check_writers(self) -> None:
        if not self._writers:
            raise OptionError("There is no query to execute: add_writer must be called first.")

    def _set_kryo(self, kryo: KryoRegistrations) -> None:
        application: dict[str, Any] = {} if self._spark is None else application_settings(self._spark)
        missing = {} if self._spark is None else kryo.missing_in(application)
        if missing:
            wanted = ", ".join(f"{name}={value}" for name, value in missing.items())
            raise OptionError(
                "Kryo registrations are read by Spark when the application starts, and the session of this "
                f"environment is already running without {wanted}. Register them before env.spark is first used, or "
                "set them on the session."
            )
        if self._spark is not None:
            kryo.refuse_unknown(partial(unknown_classes, self._spark))
        self._change(kryo=kryo)
