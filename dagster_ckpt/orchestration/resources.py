"""Dagster resources: checkpoint storage, state backend, catalog, and Spark session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dagster import ConfigurableResource, get_dagster_logger
from pydantic import Field, PrivateAttr, field_validator

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend, PredefinedOptions
from dagster_ckpt.config.state_backend import CustomStateBackend, HashMapStateBackend, OnStateChange, StateBackend
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.translator import (
    CHECKPOINT_CATALOG,
    CHECKPOINT_STORAGE,
    SPARK,
    STATE_BACKEND,
    StreamTranslator,
)
from dagster_ckpt.spark.query.class_archive import look_after_archive, with_class_archive
from dagster_ckpt.spark.query.session import session_with
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class HasResources(Protocol):
    @property
    def resources(self) -> Any: ...


class HasSparkSession(Protocol):
    @property
    def spark_session(self) -> SparkSession: ...


class SparkSessionResource(ConfigurableResource):  # type: ignore[type-arg]
    """The `pyspark` resource, whose first use starts Spark: a refused run starts none.

    Settings may come from environment variables (`EnvVar`). Any resource with a `spark_session`, such as
    `PySparkResource` of `dagster-pyspark`, can take its place.

    Example:
        >>> SparkSessionResource(spark_config={"spark.driver.memory": "4g"})
    """

    spark_config: dict[str, str] = Field(
        default_factory=dict, description="Settings of the Spark session, by Spark's names."
    )
    class_archive: str | None = Field(
        default=None,
        description="Path of an archive of Java's classes, with which Spark starts faster. A missing one is written a "
        "minute after the start, in the background; `dagster-ckpt class-archive` writes one for an image.",
    )
    _session: Any = PrivateAttr(default=None)

    @property
    def spark_session(self) -> SparkSession:
        """The session, which the first use starts or takes from this process's Spark application."""
        if self._session is None:
            archive, settings = self.class_archive, self.spark_config
            if archive is None:
                self._session = session_with(settings)
            else:
                self._session = session_with(with_class_archive(settings, archive))
                look_after_archive(self._session, Path(archive), settings, get_dagster_logger().info)
        session: SparkSession = self._session
        return session


class CheckpointStorageKind(Enum):
    """Flink's checkpoint storages, by their names in Dagster's config."""

    FILESYSTEM = "FILESYSTEM"
    JOBMANAGER = "JOBMANAGER"
    CUSTOM = "CUSTOM"


class CheckpointStorageResource(ConfigurableResource):  # type: ignore[type-arg]
    """Where checkpoints and savepoints are stored: any path that fsspec can write.

    Example:
        >>> CheckpointStorageResource(path="s3://bucket/checkpoints", savepoint_path="s3://bucket/savepoints")
    """

    kind: CheckpointStorageKind = Field(
        default=CheckpointStorageKind.FILESYSTEM,
        description="FILESYSTEM: snapshots are files below path. JOBMANAGER: they are in memory of the process that "
        "runs the stream, for trials; savepoints go to path. CUSTOM: a store of your own.",
    )
    path: str | None = Field(
        default=None,
        description="Folder of checkpoints, as a URL such as s3://bucket/checkpoints or an absolute path. Snapshots of "
        "a stream are below <path>/<stream id>. Required by FILESYSTEM.",
    )
    savepoint_path: str | None = Field(
        default=None,
        description="Folder of savepoints, as a URL or an absolute path. Default: <path>/savepoints.",
    )
    file_state_size_threshold: int | None = Field(
        default=None,
        description="FILESYSTEM: files smaller than this many bytes are stored inside the snapshot's metadata "
        "(0 to 1048576). Default: 20480.",
    )
    write_buffer_size: int = Field(
        default=-1, description="FILESYSTEM: bytes written at a time on a local disk; -1 is 4096."
    )
    max_state_size: int | None = Field(
        default=None, description="JOBMANAGER: largest snapshot in bytes; a larger one is declined. Default: 5242880."
    )
    factory: str | None = Field(
        default=None, description="CUSTOM: import path of the store's factory, such as company.storage:open_tape."
    )
    factory_settings: dict[str, Any] = Field(
        default_factory=dict, description="CUSTOM: keyword arguments of the factory."
    )
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        description="Options of the fsspec file system, such as key, secret and endpoint_url for S3.",
    )
    executor_copy_bytes: int | None = Field(
        default=None,
        description="Snapshots that write more bytes than this are copied by Spark's executors, as a Spark job. "
        "Every executor must reach live directories and snapshots, and have dagster-ckpt installed. Default: the "
        "driver copies.",
    )

    @field_validator("executor_copy_bytes")
    @classmethod
    def _not_negative(cls, value: int | None) -> int | None:
        # Not `ge=0`: a component accepts no field types with constraints.
        if value is not None and value < 0:
            raise ValueError(
                f"executor_copy_bytes is {value}, but must be a number of bytes, 0 or more. Leave it out to let the "
                "driver copy."
            )
        return value

    def storage(self) -> CheckpointStorage:
        """Return the storage as a plain value."""
        _refuse_fields_of_others(self, self.kind, _STORAGE_FIELDS)
        if self.kind is CheckpointStorageKind.CUSTOM:
            return CustomCheckpointStorage(self.factory, self.factory_settings)
        if self.kind is CheckpointStorageKind.JOBMANAGER:
            return JobManagerCheckpointStorage(
                self._checkpoint_path(),
                self.max_state_size,
                savepoint_path=self._savepoint_path(),
                storage_options=self.storage_options,
            )
        return FileSystemCheckpointStorage(
            self._checkpoint_path(),
            self.file_state_size_threshold,
            self.write_buffer_size,
            savepoint_path=self._savepoint_path(),
            storage_options=self.storage_options,
        )

    def deployment(self) -> DeploymentStorage:
        """Return defaults for a storage that a stream configures in code."""
        return DeploymentStorage(
            checkpoint_path=self._checkpoint_path(),
            savepoint_path=self._savepoint_path(),
            file_state_size_threshold=self.file_state_size_threshold,
            write_buffer_size=self.write_buffer_size,
            storage_options=self.storage_options,
        )

    def _checkpoint_path(self) -> str | None:
        return location_url("path", self.path) if self.path is not None else None

    def _savepoint_path(self) -> str | None:
        if self.savepoint_path is not None:
            return location_url("savepoint_path", self.savepoint_path)
        checkpoints = self._checkpoint_path()
        return f"{checkpoints.rstrip('/')}/savepoints" if checkpoints is not None else None


class StateBackendKind(Enum):
    """Spark's state store providers, by their names in Dagster's config."""

    ROCKSDB = "ROCKSDB"
    HASHMAP = "HASHMAP"
    CUSTOM = "CUSTOM"


class StateBackendResource(ConfigurableResource):  # type: ignore[type-arg]
    """How running queries keep their state, and where their live checkpoint directories are.

    Example:
        >>> StateBackendResource(live_directory="s3a://bucket/live", kind=StateBackendKind.ROCKSDB)
    """

    live_directory: str = Field(
        description="Folder of Spark's live checkpoint directories, as a path or URL that every executor can "
        "reach. Those of a stream are <live_directory>/<stream id>/live-<k>-<token>."
    )
    kind: StateBackendKind = Field(
        default=StateBackendKind.ROCKSDB,
        description="ROCKSDB: RocksDB state store, state may exceed memory. HASHMAP: Spark's heap state store. "
        "CUSTOM: a provider of your own.",
    )
    incremental: bool = Field(
        default=True,
        description=(
            "ROCKSDB: upload changelogs per batch and snapshots in the background, instead of a snapshot per batch."
        ),
    )
    predefined_options: PredefinedOptions = Field(
        default=PredefinedOptions.DEFAULT,
        description="ROCKSDB: options for a kind of disks, nearest to Flink's of that name.",
    )
    options_factory: str | None = Field(
        default=None,
        description="ROCKSDB: import path of a RocksDBOptionsFactory, applied on top of predefined_options.",
    )
    db_storage_paths: list[str] = Field(
        default_factory=list,
        description="ROCKSDB: local directories of the working state on each executor. Set spark.local.dir of the "
        "pyspark resource to the same directories.",
    )
    transfer_threads: int | None = Field(
        default=None, description="ROCKSDB: threads that move files while snapshotting and restoring. Default: 4."
    )
    provider_class: str | None = Field(
        default=None, description="CUSTOM: full name of a Java class that extends Spark's StateStoreProvider."
    )
    settings: dict[str, str] = Field(
        default_factory=dict,
        description="ROCKSDB and CUSTOM: further Spark SQL settings of the state store, applied to the session before "
        "the query starts.",
    )

    on_change: OnStateChange = Field(
        default=OnStateChange.REFUSE,
        description="What a start does with state of another provider or checkpoint format. REFUSE: it is refused. "
        "CONVERT: the state is rewritten first. Before Spark 4.2 this needs `dagster-ckpt rewriter install`.",
    )

    def backend(self) -> StateBackend:
        """Return the backend as a plain value."""
        _refuse_fields_of_others(self, self.kind, _BACKEND_FIELDS)
        if self.kind is StateBackendKind.HASHMAP:
            return HashMapStateBackend()
        if self.kind is StateBackendKind.CUSTOM:
            return CustomStateBackend(self.provider_class or "", self.settings)
        backend = EmbeddedRocksDBStateBackend(self.incremental, settings=self.settings)
        backend.set_predefined_options(self.predefined_options)
        backend.set_db_storage_paths(*self.db_storage_paths)
        if self.options_factory is not None:
            backend.set_options(self.options_factory)
        if self.transfer_threads is not None:
            backend.set_number_of_transfer_threads(self.transfer_threads)
        return backend


_STORAGE_FIELDS: dict[Enum, set[str]] = {
    CheckpointStorageKind.FILESYSTEM: {"file_state_size_threshold", "write_buffer_size"},
    CheckpointStorageKind.JOBMANAGER: {"max_state_size"},
    CheckpointStorageKind.CUSTOM: {"factory", "factory_settings"},
}
_BACKEND_FIELDS: dict[Enum, set[str]] = {
    StateBackendKind.ROCKSDB: {
        "predefined_options",
        "options_factory",
        "db_storage_paths",
        "transfer_threads",
        "settings",
    },
    StateBackendKind.HASHMAP: set(),
    StateBackendKind.CUSTOM: {"provider_class", "settings"},
}


def _refuse_fields_of_others(
    resource: CheckpointStorageResource | StateBackendResource, kind: Enum, fields: dict[Enum, set[str]]
) -> None:
    for name in sorted(set().union(*fields.values()) - fields[kind]):
        value = getattr(resource, name)
        if value == type(resource).model_fields[name].get_default(call_default_factory=True):
            continue
        # Values of a factory's settings may be secrets.
        shown = sorted(value) if isinstance(value, dict) else repr(value)
        kinds = " or ".join(str(other.value) for other, names in fields.items() if name in names)
        raise OptionError(
            f"{type(resource).__name__}: kind is {kind.value}, which takes no {name}, but {name} has {shown}. "
            f"Remove it, or choose kind {kinds}."
        )


class CheckpointCatalogResource(ConfigurableResource):  # type: ignore[type-arg]
    """The SQL record of streams, executions, snapshots, requests and events.

    Example:
        >>> CheckpointCatalogResource(url="sqlite:////var/lib/streams/catalog.db")
    """

    url: str = Field(
        description="SQLAlchemy URL: sqlite:////absolute/path/catalog.db for one machine, "
        "postgresql+psycopg://user@host/database for more than one. Read a URL with a password from an "
        "environment variable: EnvVar, or env_var in YAML."
    )

    def catalog(self) -> Catalog:
        """Open the catalog, and create or migrate its tables."""
        return Catalog(self.url)


def catalog_of(context: HasResources, key: str) -> Catalog:
    resource: CheckpointCatalogResource = getattr(context.resources, key)
    return resource.catalog()


@dataclass(frozen=True)
class DeploymentResources:
    checkpoint_storage: CheckpointStorageResource
    state_backend: StateBackendResource
    checkpoint_catalog: CheckpointCatalogResource
    pyspark: HasSparkSession | None = None

    @property
    def spark_session(self) -> SparkSession:
        """The Spark session."""
        assert self.pyspark is not None, "the step requires no Spark session"
        return self.pyspark.spark_session

    @staticmethod
    def of(given: object, translator: StreamTranslator) -> DeploymentResources:
        return DeploymentResources(
            getattr(given, translator.get_resource_key(CHECKPOINT_STORAGE)),
            getattr(given, translator.get_resource_key(STATE_BACKEND)),
            getattr(given, translator.get_resource_key(CHECKPOINT_CATALOG)),
            getattr(given, translator.get_resource_key(SPARK), None),
        )
