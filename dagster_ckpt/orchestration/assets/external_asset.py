"""Streaming assets whose query runs outside Dagster, in an external program or a driver that a run launches.

The driver calls `run_stream` with the asset's stream id, catalog and storage. The catalog sensor,
operator jobs, preview, fork and doctor work as for any other stream, because they only need the
catalog and the files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.assets.stream import STREAM_TAGS, StreamingAsset, StreamSpec
from dagster_ckpt.orchestration.assets.streaming_asset import arguments_of
from dagster_ckpt.orchestration.resources.settings import CheckpointSettings, RestartSettings
from dagster_ckpt.orchestration.runs.driver_run import DriverRunConfig, run_driver
from dagster_ckpt.orchestration.translator import OPERATOR_RESOURCES, StreamTranslator
from dagster_ckpt.policies.restart import RestartPolicy
from dagster_ckpt.policies.restart_strategies import RestartStrategyConfiguration


def external_streaming_asset(
    name: str,
    *,
    launch: DriverLaunch | None = None,
    checkpointing: CheckpointConfig | CheckpointSettings | None = None,
    restart_strategy: RestartStrategyConfiguration | RestartPolicy | RestartSettings | None = None,
    stream_id: str | None = None,
    key_prefix: str | Sequence[str] | None = None,
    deps: Sequence[Any] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    code_version: str | None = None,
    owners: Sequence[str] | None = None,
    translator: StreamTranslator | None = None,
) -> StreamingAsset:
    """Declare a streaming asset whose query runs in a process that outlives every Dagster run.

    Args:
        name: Asset name.
        launch: How a run of its start job launches the driver. None: something outside Dagster starts
            it, such as a service manager or Kubernetes; the asset then has no start job.
        checkpointing: The same checkpointing options as in the program; its storage locates the
            snapshots.
        restart_strategy: How the supervisor sensor relaunches a driver that died.
        stream_id: Id in catalog and storage, as used by the program; default: the asset key joined by
            dots.
        key_prefix: As in `dagster.asset`.
        deps: As in `dagster.asset`.
        group_name: As in `dagster.asset`.
        description: As in `dagster.asset`.
        metadata: As in `dagster.asset`.
        tags: As in `dagster.asset`.
        code_version: As in `dagster.asset`.
        owners: As in `dagster.asset`.
        translator: As in `streaming_asset`.

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
    asset = names.get_asset_spec(
        dg.AssetSpec(
            [*([key_prefix] if isinstance(key_prefix, str) else key_prefix or []), name],
            deps=deps,
            group_name=group_name,
            description=description,
            metadata=metadata,
            tags=tags,
            code_version=code_version,
            owners=owners,
            kinds={"spark", "streaming"},
        )
    )
    spec = StreamSpec.of(
        stream_id or ".".join(asset.key.path), checkpointing=checkpointing, restart_strategy=restart_strategy
    )
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
