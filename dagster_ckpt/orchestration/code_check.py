"""Checks the code of defined streams against their state, outside of a run of the stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from dagster_ckpt.client import Client
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset, defined_streams, find_stream, stream_of_asset
from dagster_ckpt.orchestration.translator import RESOURCES
from dagster_ckpt.recovery.compatibility import CompatibilityReport
from dagster_ckpt.spark.query.session import active_in_thread, apply_state_backend
from dagster_ckpt.stream.start_from import StartFrom


def check_definitions(
    stream: str, definitions: dg.Definitions, *, start_from: str | StartFrom = "latest"
) -> CompatibilityReport:
    """`Client.check` with the code and the resources of a code location; `stream` is a stream id or an asset key."""
    found = find_stream(streams_of(definitions), stream)
    with _resources(found, definitions.resources or {}) as resources:
        return check_stream(found, resources, start_from=start_from)


def streams_of(definitions: dg.Definitions) -> list[StreamingAsset]:
    """The streaming assets of a code location."""
    assets = [each for each in definitions.assets or () if isinstance(each, dg.AssetsDefinition)]
    return [stream for each in assets if (stream := stream_of_asset(each)) is not None]


def check_stream(
    stream: Stream, resources: object, *, start_from: str | StartFrom = "latest", client: Client | None = None
) -> CompatibilityReport:
    """`Client.check` with the code of a stream; `resources` has those of the stream as attributes."""
    describe = stream.describe
    if describe is None:
        raise OptionError(
            f"The query of stream {stream.stream_id!r} is described by an asset, op or program of your own, which a "
            "check cannot call. Call Client.check there, or start the stream with preflight: true."
        )
    deployment = DeploymentResources.of(resources, stream.translator)
    spark = deployment.spark_session
    apply_state_backend(spark, deployment.state_backend.backend())
    given = {key: getattr(resources, key) for key in _keys(stream)}
    with active_in_thread(spark), dg.build_asset_context(resources=given) as context:
        if client is not None:
            return client.check(stream.stream_id, lambda: describe(context, resources), start_from=start_from)
        with Client.of_streams(defined_streams([stream], deployment), origin="check") as own:
            return own.check(stream.stream_id, lambda: describe(context, resources), start_from=start_from)


def _keys(stream: Stream) -> set[str]:
    # Those of the asset include its IO manager, which no stream uses.
    own: Collection[str] = ()
    if isinstance(stream, StreamingAsset) and stream.asset.is_executable:
        own = stream.asset.op.required_resource_keys
    return {*stream.translator.keys_of(RESOURCES), *own}


@contextmanager
def _resources(stream: Stream, defined: Mapping[str, Any]) -> Iterator[Any]:
    keys = _keys(stream)
    missing = sorted(keys - defined.keys())
    if missing:
        raise OptionError(f"The definitions lack the resource {missing[0]!r}, which stream {stream.stream_id!r} uses.")
    with dg.build_resources({key: defined[key] for key in keys}) as resources:
        yield resources
