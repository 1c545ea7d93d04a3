"""Checks the code of defined streams against their state, outside of a run of the stream."""

from __future__ import annotations

import dagster as dg

from dagster_ckpt.client import Client
from dagster_ckpt.orchestration.query import describer_of, resource_keys, resources_of
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset, defined_streams, find_stream, stream_of_asset
from dagster_ckpt.recovery.compatibility import CompatibilityReport
from dagster_ckpt.spark.query.session import active_in_thread, apply_state_backend
from dagster_ckpt.stream.start_from import StartFrom


def check_definitions(
    stream: str, definitions: dg.Definitions, *, start_from: str | StartFrom = "latest"
) -> CompatibilityReport:
    """`Client.check` with the code and the resources of a code location; `stream` is a stream id or an asset key."""
    found = find_stream(streams_of(definitions), stream)
    with resources_of(found, definitions.resources or {}) as resources:
        return check_stream(found, resources, start_from=start_from)


def streams_of(definitions: dg.Definitions) -> list[StreamingAsset]:
    """The streaming assets of a code location."""
    assets = [each for each in definitions.assets or () if isinstance(each, dg.AssetsDefinition)]
    return [stream for each in assets if (stream := stream_of_asset(each)) is not None]


def check_stream(
    stream: Stream, resources: object, *, start_from: str | StartFrom = "latest", client: Client | None = None
) -> CompatibilityReport:
    """`Client.check` with the code of a stream; `resources` has those of the stream as attributes."""
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
