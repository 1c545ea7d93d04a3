"""`external_streaming_asset`: streams whose query outlives every Dagster run.

A run launches the stream's driver, or finds it running, and follows it. However the run ends, the driver continues,
unless a user terminates the run on the page, which cancels the stream.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Unpack

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.records import (
    BATCH_INPUTS,
    LAUNCH,
    RESTART_OF,
    ExecutionRecord,
    ExecutionStatus,
    RequestKind,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.client import requests
from dagster_ckpt.client.client import Client
from dagster_ckpt.client.launching import (
    DriverLaunch,
    LaunchedDriver,
    driver_on_its_way,
    hands_over,
    launch_driver,
    launch_to_use,
)
from dagster_ckpt.client.platforms import PlatformLaunch
from dagster_ckpt.errors import CatalogError, CkptError, OptionError, RequestFailedError
from dagster_ckpt.orchestration._compat import capture_interrupts, check_captured_interrupt, plan_outside_runs
from dagster_ckpt.orchestration.downstream import batch_inputs_of
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.run_status import (
    RESTART_OF_TAG,
    START_REQUEST_TAG,
    STREAM_ID_TAG,
    RunWatch,
    canceled_by_user,
    refuse_overridden_resources,
    report_canceling,
    run_failure,
    run_tags,
    start_cause,
)
from dagster_ckpt.orchestration.settings import StartConfig
from dagster_ckpt.orchestration.stream import StreamingAsset, stream_handle
from dagster_ckpt.orchestration.streaming_asset import StreamingAssetOptions, arguments_of, parts_of
from dagster_ckpt.orchestration.translator import OPERATOR_RESOURCES, StreamTranslator
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import Liveness, execution_liveness
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.redaction import cause_to_show
from dagster_ckpt.values.validation import conforming

POLL_S = 1.0


class DriverRunConfig(StartConfig):
    """The launchpad options of a driver launch."""

    follow: bool = Field(
        default=True,
        description="Stay until the driver ends, and end as it does. Off: the run succeeds once the query is started, "
        "and the stream continues without it.",
    )


def external_streaming_asset(
    name: str,
    *,
    launch: DriverLaunch | PlatformLaunch | None = None,
    stream_id: str | None = None,
    pool: str | None = None,
    translator: StreamTranslator | None = None,
    **options: Unpack[StreamingAssetOptions],
) -> StreamingAsset:
    """Declare a streaming asset whose query runs in a process that outlives every Dagster run.

    Args:
        launch: How a run of its start job launches the driver: a command, or a run of a platform
            (`dagster_ckpt.client.platforms`). None: a service manager or Kubernetes starts it; the asset has no start
            job.
        stream_id: Id in catalog and storage, as the program uses it; default: the asset key joined by dots.
        pool: As in `dagster.asset`, for the run that launches and follows the driver.
        options: As in `streaming_asset`. `checkpointing` must be that of the program; `restart_strategy` decides how
            the supervisor sensor relaunches a dead driver.

    Example:
        >>> orders = external_streaming_asset(
        ...     "orders",
        ...     launch=DriverLaunch(("spark-submit", "--master", "yarn", "orders.py"), log_directory="/var/log/spark"),
        ...     checkpointing=CheckpointConfig(interval=60_000),
        ... )
    """
    conforming(f"external_streaming_asset {name}: launch", launch, DriverLaunch | PlatformLaunch | None)
    names = translator or StreamTranslator()
    spec, asset = parts_of("external_streaming_asset", options, names, stream_id)(name, None)
    if launch is None:
        for option in ("op_tags", "hooks", "desired_state"):
            if getattr(spec, option):
                raise OptionError(
                    f"external_streaming_asset {name}: {option} is given, but without launch no run of Dagster starts "
                    f"the driver. Remove {option}, or give a launch."
                )
        outside = dg.AssetsDefinition(specs=[asset])
        return StreamingAsset.of(outside, spec, runs_externally=True, translator=names)
    holder: list[StreamingAsset] = []

    decorate: Callable[[Callable[..., Iterator[Any]]], dg.AssetsDefinition] = dg.asset(
        **arguments_of(asset),
        required_resource_keys=names.keys_of(OPERATOR_RESOURCES),
        config_schema=DriverRunConfig.to_config_schema().as_field(),
        op_tags=spec.tags_of_op(),
        pool=pool,
        # The end of a run is no materialization.
        output_required=False,
    )

    def launched(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from run_driver(context, holder[0], launch)

    holder.append(StreamingAsset.of(decorate(launched), spec, runs_externally=True, translator=names))
    return holder[0]


def run_driver(
    context: dg.AssetExecutionContext, stream: StreamingAsset, launch: DriverLaunch | PlatformLaunch
) -> Iterator[Any]:
    """Launch or find the driver, and follow it.

    Raises:
        dagster.Failure: It did not start its query, the stream failed or was canceled, or this run was asked to stop
            and leaves the driver running.
    """
    with capture_interrupts():
        # A run from the asset's page has no tags yet.
        context.instance.add_run_tags(context.run.run_id, {STREAM_ID_TAG: stream.stream_id})
        plan_outside_runs(context.instance, stream.keys)
        watch = RunWatch(context.instance, context.run.run_id, signalled=check_captured_interrupt)
        try:
            refuse_overridden_resources(context)
            handle = stream_handle(stream, DeploymentResources.of(context.resources, stream.translator))
            context.instance.add_run_tags(context.run.run_id, run_tags(handle.catalog, stream.stream_id))
            handle.register()
            _find_or_launch(context, handle, launch, watch)
            _report_place(context, handle)
            if context.op_execution_context.op_config["follow"]:
                _follow(context, handle, watch)
        except CkptError as error:
            raise run_failure(str(error), type(error).__name__) from cause_to_show(error)
    yield from ()


def _find_or_launch(
    context: dg.AssetExecutionContext,
    handle: StreamHandle,
    launch: DriverLaunch | PlatformLaunch,
    watch: RunWatch,
) -> None:
    config = context.op_execution_context.op_config
    asked = context.run.tags.get(START_REQUEST_TAG)
    lease = handle.catalog.leases.current(handle.stream_id)
    driver = driver_on_its_way(handle)
    is_running = requests.is_running(handle) and not hands_over(handle, asked)
    if (is_running or driver is not None) and (asked is not None or config["start_from"] != "latest"):
        where = f"run {lease.run_id}, process {lease.pid} on {lease.host}" if lease is not None else "it is starting"
        raise RequestFailedError(
            f"The driver of stream {handle.stream_id!r} is running ({where}), so it cannot be started from "
            f"{config['start_from']!r}. Run restart_stream_job, which stops it first."
        )
    if is_running and lease is not None:
        context.log.info(f"the driver is running: process {lease.pid} on {lease.host}, of run {lease.run_id}")
        return
    if driver is not None:
        context.log.info(f"a driver of run {driver.record.run_id} is starting: process {driver.record.pid}")
        request = handle.catalog.requests.get(driver.record.request_id)
        recorded: dict[str, Any] | None = None
    else:
        ordered = handle.catalog.requests.get(asked) if asked is not None else None
        launch, recorded = launch_to_use(handle.catalog, handle.stream_id, launch, ordered)
        request = ordered or _order(context, handle)
        driver = launch_driver(handle, launch, request, run_id=context.run.run_id)
        where = f"process {driver.record.pid}, log {driver.record.log}" if driver.record.log else "a platform"
        context.log.info(f"launched {driver.record.command}: {where}")
    try:
        requests.await_answer(
            handle, request, timeout_s=launch.start_timeout_s, abort_reason=lambda: _why_not_to_wait(driver, watch)
        )
    except BaseException:
        # If only reading the answer failed, the query may be running.
        with suppress(CatalogError):
            if handle.catalog.requests.get(request.request_id).status is not RequestStatus.COMPLETED:
                driver.cancel()
                requests.start_again(handle, request.request_id, origin=request.origin)
        raise
    execution = handle.catalog.executions.latest(handle.stream_id)
    noted: dict[str, Any] = {LAUNCH: recorded} if recorded is not None else {}
    if between := batch_inputs_of(context.op_execution_context, handle.catalog, list(context.assets_def.keys)):
        noted[BATCH_INPUTS] = between
    if noted and execution is not None:
        with suppress(CatalogError):
            handle.catalog.executions.note(execution.execution_id, noted)


def _why_not_to_wait(driver: LaunchedDriver, watch: RunWatch) -> str | None:
    # The request is then withdrawn, so a later driver starts no query.
    return f"this run was asked to stop: {watch.reason}" if watch.should_stop() else driver.failure()


def _order(context: dg.AssetExecutionContext, handle: StreamHandle) -> RequestRecord:
    """Submit the run's start request, which the supervisor sensor leaves to this run."""
    config = context.op_execution_context.op_config
    start_from = StartFrom.from_record(config)
    cause = start_cause(context.run.tags)
    arguments = {**start_from.as_record(), "run_id": context.run.run_id, "cause": cause.value}
    if cause is StartCause.RESTART_NEW_RUN and RESTART_OF_TAG in context.run.tags:
        arguments[RESTART_OF] = context.run.tags[RESTART_OF_TAG]
    return handle.catalog.requests.submit(
        handle.stream_id,
        RequestKind.START,
        arguments=arguments,
        origin=f"{context.job_name} run {context.run.run_id}",
    )


def _report_place(context: dg.AssetExecutionContext, handle: StreamHandle) -> None:
    execution = handle.catalog.executions.latest(handle.stream_id)
    if execution is not None:
        application = execution.application or {}
        context.log.info(
            f"the query runs in process {execution.pid} on {execution.host}, application {application.get('id')}, "
            f"page {application.get('page') or 'off'}"
        )


def _follow(context: dg.AssetExecutionContext, handle: StreamHandle, watch: RunWatch) -> None:
    first = handle.catalog.executions.latest(handle.stream_id)
    while True:
        with suppress(CatalogError):
            # An unavailable catalog says nothing about the driver.
            execution = handle.catalog.executions.latest(handle.stream_id)
            if execution is not None and first is not None and execution.run_id != first.run_id:
                # Another run follows the next driver.
                execution = handle.catalog.executions.of_run(first.run_id)[0]
                break
            if execution is None or execution.settled:
                if not requests.is_running(handle):
                    break
            elif execution_liveness(handle.catalog, execution) is not Liveness.ALIVE:
                # The driver may have recorded its end meanwhile.
                execution = handle.catalog.executions.latest(handle.stream_id)
                break
        if watch.should_stop():
            _leave(context, handle, watch)
        time.sleep(POLL_S)
    if execution is not None:
        _end_like(context, execution)


def _leave(context: dg.AssetExecutionContext, handle: StreamHandle, watch: RunWatch) -> None:
    if canceled_by_user(context) is None:
        raise run_failure(
            f"This run was asked to stop ({watch.reason}) and no longer follows the driver; the stream continues. "
            "Launch the job again to follow it, cancel_stream_job or stop_with_savepoint_job to stop it.",
            "DETACHED",
        )
    operator = f"{context.job_name} run {context.run.run_id}, which was terminated"
    # The stream may have ended meanwhile.
    with suppress(RequestFailedError):
        Client.of_stream(handle, origin=operator).cancel(handle.stream_id)
    raise run_failure("The stream was canceled: its run was terminated.", "CANCELED")


def _end_like(context: dg.AssetExecutionContext, execution: ExecutionRecord) -> None:
    reason = execution.reason or "no reason was recorded"
    if not execution.settled:
        raise run_failure(
            f"The driver ended unexpectedly (process {execution.pid} on {execution.host}): {reason}. The supervisor "
            "sensor decides whether it is restarted.",
            "DRIVER_GONE",
        )
    if execution.status is ExecutionStatus.CANCELED:
        report_canceling(context, reason)
        raise run_failure(f"The stream was canceled: {reason}", "CANCELED")
    if execution.status is ExecutionStatus.FAILED:
        raise run_failure(f"The stream failed and will not be restarted: {reason}", "FAILED")
    context.log.info(f"{execution.status.value.lower()}: {reason}")
