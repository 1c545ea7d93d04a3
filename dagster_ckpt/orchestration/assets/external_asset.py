"""Streaming assets whose query runs outside Dagster, in an external program or a driver that a run launches.

The driver calls `run_stream` with the asset's stream id, catalog and storage. The catalog sensor,
operator jobs, preview, fork and doctor work as for any other stream, because they only need the
catalog and the files.
"""

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import dagster as dg

from dagster_ckpt.operations.launching import DriverLaunch
from dagster_ckpt.orchestration.assets.stream import STREAM_TAGS, StreamingAsset
from dagster_ckpt.orchestration.assets.streaming_asset import StreamingAssetOptions, arguments_of, parts_of
from dagster_ckpt.orchestration.runs.driver_run import DriverRunConfig, run_driver
from dagster_ckpt.orchestration.translator import OPERATOR_RESOURCES, StreamTranslator


def external_streaming_asset(
    name: str,
    *,
    launch: DriverLaunch | None = None,
    stream_id: str | None = None,
    translator: StreamTranslator | None = None,
    **options: Unpack[StreamingAssetOptions],
) -> StreamingAsset:
    """Declare a streaming asset whose query runs in a process that outlives every Dagster run.

    Args:
        name: Asset name.
        launch: How a run of its start job launches the driver. None: something outside Dagster starts
            it, such as a service manager or Kubernetes; the asset then has no start job.
        stream_id: Id in catalog and storage, as used by the program; default: the asset key joined by
            dots.
        translator: As in `streaming_asset`.
        options: As in `streaming_asset`. `checkpointing` is that of the program, whose storage locates the
            snapshots; `restart_strategy` decides how the supervisor sensor relaunches a driver that died.

    Raises:
        OptionError: An option or the stream id is not valid.

    Example:
        >>> orders = external_streaming_asset(
        ...     "orders",
        ...     launch=DriverLaunch(("spark-submit", "--master", "yarn", "orders.py"), log_directory="/var/log/spark"),
        ...     checkpointing=CheckpointConfig(interval=60_000),
        ... )
    """
    names = translator or StreamTranslator()
    stream_of, asset_of = parts_of("external_streaming_asset", options, {"kinds": {"spark", "streaming"}})
    asset = names.get_asset_spec(asset_of(name))
    spec = stream_of(stream_id or ".".join(asset.key.path))
    if launch is None:
        outside = dg.AssetsDefinition(specs=[asset])
        return StreamingAsset.of(outside, spec, runs_externally=True, translator=names)
    holder: list[StreamingAsset] = []

    decorate: Callable[[Callable[..., Iterator[Any]]], dg.AssetsDefinition] = dg.asset(
        **arguments_of(asset),
        required_resource_keys=names.keys_of(OPERATOR_RESOURCES),
        config_schema=DriverRunConfig.to_config_schema().as_field(),
        op_tags=STREAM_TAGS,
        # The catalog sensor reports each checkpoint; the end of a run is not another
        # materialization.
        output_required=False,
    )

    def launched(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from run_driver(context, holder[0], launch)

    holder.append(StreamingAsset.of(decorate(launched), spec, runs_externally=True, translator=names))
    return holder[0]
