"""`StreamsComponent`: the streams of a code location in YAML, for projects that declare their definitions with `dg`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from pydantic import BaseModel, Field

from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import Stream
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.orchestration.yaml_fields import (
    as_text,
    describe,
    in_yaml,
    settings_in_yaml,
    with_field_errors,
)
from dagster_ckpt.orchestration.yaml_stream import StreamDeclaration
from dagster_ckpt.values.validation import imported


class StreamResources(dg.Resolvable, dg.Model):
    """The resources of all streams in a code location. Omitted ones must exist in the code location."""

    spark_config: Annotated[
        dict[str, Any] | None, settings_in_yaml("Settings of the Spark session, for the resource pyspark.")
    ] = None
    checkpoint_storage: Annotated[
        Annotated[CheckpointStorageResource, in_yaml(CheckpointStorageResource, CheckpointStorageResource.storage)]
        | None,
        describe("Where checkpoints and savepoints are stored."),
    ] = None
    state_backend: Annotated[
        Annotated[StateBackendResource, in_yaml(StateBackendResource, StateBackendResource.backend)] | None,
        describe("State store of running queries, and the folder of their live directories."),
    ] = None
    checkpoint_catalog: Annotated[
        Annotated[CheckpointCatalogResource, in_yaml(CheckpointCatalogResource, lambda catalog: catalog.url)] | None,
        describe("The SQL catalog of streams, snapshots and events."),
    ] = None

    def given(self) -> Mapping[str, Any]:
        found = {
            "pyspark": SparkSessionResource(spark_config=as_text(self.spark_config))
            if self.spark_config is not None
            else None,
            "checkpoint_storage": self.checkpoint_storage,
            "state_backend": self.state_backend,
            "checkpoint_catalog": self.checkpoint_catalog,
        }
        return {name: resource for name, resource in found.items() if resource is not None}


class ScaffoldParams(BaseModel):
    stream: str | None = Field(default=None, description="Name of the stream; default: that of the component.")
    data_directory: str | None = Field(
        default=None, description="Folder of state, checkpoints, catalog and output; default: data in the project."
    )
    name_prefix: str | None = Field(
        default=None, description="Prefix of all names, for a project with several of these components."
    )


class StreamsScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a defs.yaml with one stream and its resources."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        where = (request.params.data_directory or str((request.project_root or Path.cwd()) / "data")).rstrip("/")
        name = request.params.stream or re.sub(r"\W", "_", request.target_path.name)
        stream = {
            "name": name,
            "sources": [{"name": "rates", "format": "rate", "options": {"rowsPerSecond": 10}}],
            "transform": {"sql": "SELECT timestamp, value, value % 10 AS bucket FROM rates"},
            "sink": {"format": "parquet", "path": f"{where}/output/{name}"},
            "trigger": {"processing_time": "10 seconds"},
            "checkpointing": {"interval": 60_000, "num_retained": 3, "cleanup": "RETAIN_ON_CANCELLATION"},
            "restart_strategy": {"kind": "EXPONENTIAL_DELAY"},
        }
        resources = {
            "spark_config": {"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2},
            "checkpoint_storage": {"path": f"file://{where}/checkpoints"},
            "state_backend": {"live_directory": f"{where}/live"},
            "checkpoint_catalog": {"url": f"sqlite:///{where}/catalog.db"},
        }
        prefix = request.params.name_prefix
        names = {} if prefix is None else {"name_prefix": prefix}
        dg.scaffold_component(request, {**names, "streams": [stream], "resources": resources})


@dg.scaffold_with(StreamsScaffolder)
class StreamsComponent(dg.Component, dg.Resolvable, dg.Model):
    """Streams with Flink-grade checkpoints: assets, start jobs, operator jobs, sensors and schedules.

    Its sensors supervise only the streams that it declares. Give each of several components a `name_prefix`. List
    streams that you define in Python in `declared_in_python`.

    Example:
        type: dagster_ckpt.StreamsComponent
        attributes:
          streams:
            - name: orders
              sources: [{name: landing, format: json, path: /data/landing, schema: "at timestamp, amount long"}]
              sink: {format: parquet, path: /data/orders}
              checkpointing: {interval: 60000}
    """

    streams: Annotated[Sequence[StreamDeclaration], describe("The streams that this component declares.")] = ()
    declared_in_python: Annotated[
        Sequence[str],
        describe(
            "Import paths of further streams, such as company.streams:orders, made by streaming_asset, "
            "streaming_multi_asset, external_streaming_asset or declare_stream."
        ),
    ] = ()
    health_checks: Annotated[
        Sequence[HealthCheck] | None,
        describe(
            "The health checks to define; leave out those that can never be evaluated, such as source_retention. "
            "Default: all."
        ),
    ] = None
    operator_jobs: Annotated[
        Sequence[str] | None,
        describe(
            "Names of the operator jobs to define, such as restart_stream_job, without name_prefix. Those that sensors "
            "and savepoint schedules launch are always defined. Default: all."
        ),
    ] = None
    checkpoint_page: Annotated[
        str | None,
        describe(
            "Address of the checkpoint page that `dagster-ckpt ui` serves, such as http://localhost:3080. Each asset "
            "links to it."
        ),
    ] = None
    resources: Annotated[
        StreamResources | None,
        describe("Resources of the streams. Default: those of the code location, under the same names."),
    ] = None
    name_prefix: Annotated[
        str | None,
        describe(
            "Prefix of the names of jobs, sensors, schedules and ops, and of the keys of the resources given here; an "
            "underscore follows it. Several components in one project need different ones. Default: no prefix."
        ),
    ] = None
    resource_keys: Annotated[
        Mapping[str, str],
        describe(
            "Keys of the resources pyspark, checkpoint_storage, state_backend and checkpoint_catalog, where they "
            "differ from these names."
        ),
    ] = {}

    @classmethod
    def model(cls) -> type[BaseModel]:
        return with_field_errors(super().model())

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="Spark Structured Streams with checkpoints, savepoints, restarts and rewinds.",
            tags=["spark", "streaming"],
        )

    @classmethod
    def get_additional_scope(cls) -> Mapping[str, Any]:
        """Add `{{ env_var('NAME') }}`, whose value only runs see."""
        return {"env_var": dg.EnvVar}

    def translator(self) -> StreamTranslator:
        given = self.resources.given() if self.resources is not None and self.name_prefix is not None else {}
        prefixed = {name: f"{self.name_prefix}_{name}" for name in given}
        return StreamTranslator(self.name_prefix, {**prefixed, **self.resource_keys})

    def all_streams(self) -> list[Stream]:
        further = [imported("declared_in_python", path) for path in self.declared_in_python]
        for path, stream in zip(self.declared_in_python, further, strict=True):
            if not isinstance(stream, Stream):
                raise OptionError(
                    f"declared_in_python names {path!r}, which is a {type(stream).__name__}, not a stream. Name what "
                    "streaming_asset, streaming_multi_asset, external_streaming_asset or declare_stream returned."
                )
        translator = self.translator()
        return [*(declared.stream(translator) for declared in self.streams), *further]

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:  # noqa: ARG002 - Dagster's signature
        schedules = {
            declared.stream_id or declared.name: declared.savepoints.periodic()
            for declared in self.streams
            if declared.savepoints is not None
        }
        health = {
            declared.stream_id or declared.name: declared.health.settings()
            for declared in self.streams
            if declared.health is not None
        }
        definitions = stream_definitions(
            *self.all_streams(),
            savepoint_schedules=schedules,
            health=health,
            health_checks=tuple(HealthCheck) if self.health_checks is None else self.health_checks,
            checkpoint_page=self.checkpoint_page,
            operator_jobs=self.operator_jobs,
        )
        if self.resources is None:
            return definitions
        translator = self.translator()
        resources = {translator.get_resource_key(name): resource for name, resource in self.resources.given().items()}
        return dg.Definitions.merge(definitions, dg.Definitions(resources=resources))
