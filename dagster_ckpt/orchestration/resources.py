"""Dagster resources: where images live, how Spark keeps state, and the catalog."""

from __future__ import annotations

from enum import Enum

from dagster import ConfigurableResource
from pydantic import Field

from dagster_ckpt.catalog import Catalog
from dagster_ckpt.errors import OptionError
from dagster_ckpt.options import (
    CheckpointStorage,
    EmbeddedRocksDBStateBackend,
    FileSystemCheckpointStorage,
    HashMapStateBackend,
    StateBackend,
)


class CheckpointStorageResource(ConfigurableResource):  # type: ignore[type-arg]
    """Where checkpoints and savepoints live: any path that fsspec can write."""

    path: str = Field(
        description="Folder of checkpoints as a URL with its scheme, such as s3://bucket/checkpoints or "
        "file:///var/lib/checkpoints. Images of a job are below <path>/<job id>."
    )
    savepoint_path: str | None = Field(
        default=None,
        description="Folder of savepoints. Default: <path>/savepoints.",
    )
    file_state_size_threshold: int | None = Field(
        default=None,
        description="Files smaller than this many bytes are stored inside the image's metadata "
        "(0 to 1048576). Default: 20480.",
    )
    write_buffer_size: int = Field(default=-1, description="Bytes written at a time on a local disk; -1 is 4096.")
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        description="Options of the fsspec file system, such as key, secret and endpoint_url for S3.",
    )

    def storage(self) -> CheckpointStorage:
        """The storage as a plain value."""
        return FileSystemCheckpointStorage(
            self.path,
            self.file_state_size_threshold,
            self.write_buffer_size,
            savepoint_path=self.savepoint_path or f"{self.path.rstrip('/')}/savepoints",
            storage_options=self.storage_options,
        )


class StateBackendKind(Enum):
    """Spark's state store providers."""

    ROCKSDB = "rocksdb"
    HASHMAP = "hashmap"


class StateBackendResource(ConfigurableResource):  # type: ignore[type-arg]
    """How running queries keep their state, and where their live checkpoint directories are."""

    live_directory: str = Field(
        description="Folder of Spark's live checkpoint directories, as a path or URL that every executor can "
        "reach. A job's are <live_directory>/<job id>/live-<k>."
    )
    kind: StateBackendKind = Field(
        default=StateBackendKind.ROCKSDB,
        description="rocksdb: RocksDB state store, state may exceed memory. hashmap: Spark's heap state store.",
    )
    incremental: bool = Field(
        default=True,
        description="rocksdb only: upload changelogs per batch and snapshots in the background, "
        "instead of a snapshot per batch.",
    )
    settings: dict[str, str] = Field(
        default_factory=dict,
        description="rocksdb only: further Spark SQL settings of the state store, applied to the session before "
        "the query starts.",
    )

    def backend(self) -> StateBackend:
        """The backend as a plain value.

        Raises:
            OptionError: Settings were given that belong to another backend.
        """
        if self.kind is StateBackendKind.ROCKSDB:
            return EmbeddedRocksDBStateBackend(self.incremental, settings=self.settings)
        if self.settings:
            raise OptionError(
                f"state_backend: kind is hashmap, which takes no settings, but settings has {sorted(self.settings)}. "
                "Remove them, choose kind: rocksdb, or put session settings into the pyspark resource."
            )
        return HashMapStateBackend()


class CheckpointCatalogResource(ConfigurableResource):  # type: ignore[type-arg]
    """The SQL record of jobs, executions, images, requests and events."""

    url: str = Field(
        description="SQLAlchemy URL: sqlite:////absolute/path/catalog.db for one machine, "
        "postgresql+psycopg://user:password@host/database for more than one."
    )

    def catalog(self) -> Catalog:
        """Open the catalog; its tables are made or migrated first.

        Raises:
            CatalogError: The database cannot be reached or is of a newer version.
        """
        return Catalog(self.url)
