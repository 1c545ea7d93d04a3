"""The query of a stream outside of a run: to describe it, or to check it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_ckpt.client import Client
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.stream import (
    QueryDescriber,
    Stream,
    StreamingAsset,
    defined_streams,
    find_stream,
    stream_of_asset,
)
from dagster_ckpt.orchestration.translator import RESOURCES, SPARK
from dagster_ckpt.recovery.compatibility_report import CompatibilityReport
from dagster_ckpt.spark.query.session import active_in_thread, apply_state_backend
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


@dataclass(frozen=True)
class _WithSession:
    spark_session: SparkSession


def describer_of(stream: Stream) -> QueryDescriber:
    if stream.describe is None:
        raise OptionError(
            f"The query of stream {stream.stream_id!r} is described by an asset, op or program of your own, which "
            "cannot be called from here. Call Client.check or Client.debug_batch there."
        )
    return stream.describe


def resource_keys(stream: Stream) -> set[str]:
    # Those of the asset include its IO manager, which no stream uses.
    own: Collection[str] = ()
    if isinstance(stream, StreamingAsset) and stream.asset.is_executable:
        own = stream.asset.op.required_resource_keys
    return {*stream.translator.keys_of(RESOURCES), *own}


@contextmanager
def resources_of(stream: Stream, defined: Mapping[str, Any]) -> Iterator[Any]:
    """Provide a stream's resources as attributes, and tear them down afterwards."""
    keys = resource_keys(stream)
    missing = sorted(keys - defined.keys())
    if missing:
        raise OptionError(f"The definitions lack the resource {missing[0]!r}, which stream {stream.stream_id!r} uses.")
    with dg.build_resources({key: defined[key] for key in keys}) as resources:
        yield resources


@contextmanager
def query_of(
    stream: Stream, defined: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Iterator[tuple[SparkSession, Callable[[SparkSession], DataStreamWriter]]]:
    """Provide the session of a stream's Spark resource, and its query with a `config` as a function of a session."""
    describe, of_spark = describer_of(stream), stream.translator.get_resource_key(SPARK)
    with resources_of(stream, defined) as resources, dg.build_asset_context(asset_config=config) as context:
        given = {key: getattr(resources, key) for key in resource_keys(stream)}

        def with_session(spark: SparkSession) -> DataStreamWriter:
            return describe(context, SimpleNamespace(**{**given, of_spark: _WithSession(spark)}))

        yield given[of_spark].spark_session, with_session


def check_definitions(
    stream: str, definitions: dg.Definitions, *, start_from: str | StartFrom = "latest"
) -> CompatibilityReport:
    """Run `Client.check` with a code location's code and resources; `stream` is an id or asset key."""
    found = find_stream(streams_of(definitions), stream)
    with resources_of(found, definitions.resources or {}) as resources:
        return check_stream(found, resources, start_from=start_from)


def streams_of(definitions: dg.Definitions) -> list[StreamingAsset]:
    assets = [each for each in definitions.assets or () if isinstance(each, dg.AssetsDefinition)]
    return [stream for each in assets if (stream := stream_of_asset(each)) is not None]


def check_stream(
    stream: Stream, resources: object, *, start_from: str | StartFrom = "latest", client: Client | None = None
) -> CompatibilityReport:
    """Run `Client.check`; `resources` has those of the stream as attributes."""
    describe = describer_of(stream)
    deployment = DeploymentResources.of(resources, stream.translator)
    spark = deployment.spark_session
    apply_state_backend(spark, deployment.state_backend.backend())
    given = {key: getattr(resources, key) for key in resource_keys(stream)}
    with active_in_thread(spark), dg.build_asset_context(resources=given) as context:
        if client is not None:
            return client.check(stream.stream_id, lambda: describe(context, resources), start_from=start_from)
        with Client.of_streams(defined_streams([stream], deployment), origin="check") as own:
            return own.check(stream.stream_id, lambda: describe(context, resources), start_from=start_from)
