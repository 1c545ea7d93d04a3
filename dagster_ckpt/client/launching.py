"""Launches drivers, finds out what a driver was started for, and hands a stream over from the running query.

A user starts a stream with a START request, or by running its program on a terminal. Any other start of a stream that
has run before counts as a restart by a cluster or service manager, so recovery failures are remembered, and the restart
strategy keeps counting.

For rollbacks, each launch is recorded with its execution. Secrets are not, so a launch with secrets cannot be repeated.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.catalog.records import (
    HANDS_OVER,
    LAUNCH_OF,
    RESTART_OF,
    LaunchRecord,
    RequestKind,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.code_check import verify_batches
from dagster_ckpt.client.platforms import PlatformLaunch
from dagster_ckpt.client.preflight import check_start
from dagster_ckpt.client.requests import await_process, await_stop, is_running, start_again
from dagster_ckpt.errors import CatalogError, OptionError, RequestFailedError
from dagster_ckpt.policies.upgrade import UnexpectedRows
from dagster_ckpt.recovery.query_plan_check import refuse_plan_change
from dagster_ckpt.runtime.telemetry import set_up
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity, boot_id, launch_liveness
from dagster_ckpt.stream.predecessor import HIDES_SECRETS, INSTEAD_OF
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.redaction import shown_command, shown_settings, without_secrets
from dagster_ckpt.values.tracing import span

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


START_REQUEST_VARIABLE = "DAGSTER_CKPT_START_REQUEST"
_LOG_LINES = 20
# Short, because nothing writes output during this wait.
_POLL_S = 0.05


@dataclass(frozen=True)
class DriverLaunch:
    """How a driver is launched.

    Attributes:
        command: `{stream_id}` and `{start_request}` in it are replaced. If the environment does not reach the driver,
            pass the request with `--conf spark.kubernetes.driverEnv.DAGSTER_CKPT_START_REQUEST={start_request}` or
            `--conf spark.yarn.appMasterEnv.DAGSTER_CKPT_START_REQUEST={start_request}`.
        log_directory: Folder for its output, one file per launch.
        environment: Variables in addition to those of the launching process.
        start_timeout_s: Seconds that the query may take to start; after that the start is withdrawn.

    Raises:
        OptionError: The command is empty, or contains other placeholders.

    Example:
        >>> DriverLaunch(("spark-submit", "--master", "yarn", "orders.py"), log_directory="/var/log/streams")
    """

    command: Sequence[str] = field(repr=False)
    log_directory: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise OptionError(
                f"command is {_shown(self.command)!r}, but must be a list of words such as "
                "('spark-submit', 'orders.py')."
            )
        self.command_line(stream_id="", start_request="")

    def command_line(self, *, stream_id: str, start_request: str) -> list[str]:
        try:
            return [word.format(stream_id=stream_id, start_request=start_request) for word in self.command]
        except (KeyError, IndexError, ValueError) as error:
            raise OptionError(
                f"command is {shown_command(self.command)!r}, in which only {{stream_id}} and {{start_request}} are "
                f"replaced ({type(error).__name__}: {error}). Double other braces."
            ) from error


def _shown(command: Sequence[str]) -> str:
    return without_secrets(command) if isinstance(command, str) else str(shown_command(command))


@dataclass(frozen=True)
class LaunchedDriver:
    """A driver launched by this process or another.

    Attributes:
        failure: Returns why it will not start its query, if this process launched it.
        cancel: Ends a platform's run before its query starts: it would cost without one.
    """

    record: LaunchRecord
    failure: Callable[[], str | None] = lambda: None
    cancel: Callable[[], None] = lambda: None

    def is_here(self) -> bool:
        return launch_liveness(self.record) is Liveness.ALIVE


def launch_driver(
    stream: StreamHandle, launch: DriverLaunch | PlatformLaunch, request: RequestRecord, *, run_id: str
) -> LaunchedDriver:
    """Launch a driver; a local process gets its own session, so that no signal to this one reaches it."""
    if isinstance(launch, PlatformLaunch):
        submitted = launch.submit_for(stream.stream_id, request.request_id)
        # A platform's run has no local process: the driver is on its way while this process waits.
        record = _recorded(stream, request, run_id, pid=os.getpid(), command=f"{launch.platform} {submitted.run}")
        return LaunchedDriver(record, submitted.failure, submitted.cancel)
    command_line = launch.command_line(stream_id=stream.stream_id, start_request=request.request_id)
    log = Path(launch.log_directory) / f"{stream.stream_id}-{request.request_id[:8]}.log"
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            process = subprocess.Popen(
                command_line,
                env={**os.environ, **launch.environment, START_REQUEST_VARIABLE: request.request_id},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise RequestFailedError(
            f"The driver of stream {stream.stream_id!r} could not be launched: {error}. Check the command "
            f"{shown_command(command_line)!r} and the log folder {launch.log_directory}."
        ) from error
    command = subprocess.list2cmdline(shown_command(command_line))
    record = _recorded(stream, request, run_id, pid=process.pid, command=command, log=str(log))
    return LaunchedDriver(record, partial(_failure, process, log))


def _failure(process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Return how the process failed; one that succeeded has handed the driver to a cluster."""
    code = process.poll()
    if not code:
        return None
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else ["(no log)"]
    end = without_secrets("\n".join(lines))
    return f"the driver ended with exit code {code}; the end of its log {log}:\n{end}"


def _recorded(
    stream: StreamHandle, request: RequestRecord, run_id: str, *, pid: int, command: str, log: str = ""
) -> LaunchRecord:
    return stream.catalog.launches.record(
        LaunchRecord(
            request_id=request.request_id,
            stream_id=stream.stream_id,
            run_id=run_id,
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid=pid,
            process_start_ticks=_start_ticks(pid),
            command=command,
            log=log,
        )
    )


def driver_on_its_way(stream: StreamHandle) -> LaunchedDriver | None:
    record = stream.catalog.launches.latest(stream.stream_id)
    if record is None:
        return None
    driver = LaunchedDriver(record)
    is_open = stream.catalog.requests.get(record.request_id).status is RequestStatus.PENDING
    return driver if is_open and driver.is_here() else None


def _start_ticks(pid: int) -> int | None:
    try:
        return ProcessIdentity.of(pid).start_ticks
    except ProcessLookupError:
        return 0


@dataclass(frozen=True)
class StartOrder:
    """How a driver starts its stream.

    Attributes:
        has_supervisor: Whether its launcher relaunches it after an interrupt.
        restart_of: As in `RunRequest`.
    """

    start_from: StartFrom = field(default_factory=StartFrom)
    cause: StartCause = StartCause.MANUAL
    request_id: str | None = None
    run_id: str | None = None
    has_supervisor: bool = False
    restart_of: str | None = None


def is_by_hand() -> bool:
    has_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    return has_terminal or hasattr(sys, "ps1")


def cause_unasked(catalog: Catalog, stream_id: str) -> StartCause:
    if is_by_hand() or catalog.executions.latest(stream_id) is None:
        return StartCause.MANUAL
    return StartCause.RESTART_NEW_RUN


def start_order(
    catalog: Catalog,
    stream_id: str,
    *,
    otherwise: StartFrom,
    has_waited: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> StartOrder:
    """Return what this driver was started for.

    A driver launched for a request, which `environment` names, follows it once, and is refused if the request failed or
    was withdrawn; started again by its cluster, it continues from the latest state, unless the stream was stopped
    meanwhile. Any other driver takes the oldest open request without a driver; if there is none, it starts from
    `otherwise`, or continues after a wait as a spare.
    """
    launched_for = environment.get(START_REQUEST_VARIABLE)
    if launched_for:
        return _of_launched(catalog, catalog.requests.get(launched_for), stream_id)
    request = unlaunched_start(catalog, stream_id)
    if request is not None:
        return StartOrder(
            start_from=StartFrom.from_record(request.arguments),
            cause=_cause_of(catalog, request),
            request_id=request.request_id,
        )
    if has_waited:
        return StartOrder(cause=StartCause.RESTART_NEW_RUN, restart_of=_latest_id(catalog, stream_id))
    return StartOrder(start_from=otherwise, cause=cause_unasked(catalog, stream_id))


def unlaunched_start(catalog: Catalog, stream_id: str) -> RequestRecord | None:
    pending = catalog.requests.pending(stream_id)
    return next((each for each in pending if each.kind is RequestKind.START and "run_id" not in each.arguments), None)


def _latest_id(catalog: Catalog, stream_id: str) -> str | None:
    latest = catalog.executions.latest(stream_id)
    return latest.execution_id if latest is not None else None


def _cause_of(catalog: Catalog, request: RequestRecord) -> StartCause:
    is_restart = request.arguments.get("cause") == StartCause.RESTART_NEW_RUN.value
    latest = catalog.executions.latest(request.stream_id)
    # Its process was killed before it could answer.
    has_started = latest is not None and latest.started_at_ms >= request.created_at_ms
    return StartCause.RESTART_NEW_RUN if is_restart or has_started else StartCause.MANUAL


def _of_launched(catalog: Catalog, request: RequestRecord, stream_id: str) -> StartOrder:
    if request.stream_id != stream_id or request.kind is not RequestKind.START:
        raise RequestFailedError(
            f"{START_REQUEST_VARIABLE} names request {request.request_id}, which is a {request.kind.value} request of "
            f"stream {request.stream_id!r}, not a START request of {stream_id!r}. Give the program the stream id of "
            "the asset that launches it."
        )
    launch = catalog.launches.get(request.request_id)
    run_id = launch.run_id if launch is not None else request.arguments.get("run_id")
    if request.status is RequestStatus.COMPLETED:
        return StartOrder(
            cause=StartCause.RESTART_NEW_RUN,
            run_id=run_id,
            has_supervisor=True,
            restart_of=_latest_id(catalog, stream_id),
        )
    if request.status is not RequestStatus.PENDING:
        raise RequestFailedError(
            f"The start of stream {stream_id!r} that this process was launched for (request {request.request_id}) is "
            f"{request.status.value}: {request.error or 'no process waits for it any more'}. Start the stream again."
        )
    return StartOrder(
        start_from=StartFrom.from_record(request.arguments),
        cause=_cause_of(catalog, request),
        request_id=request.request_id,
        run_id=run_id,
        has_supervisor=True,
        restart_of=request.arguments.get(RESTART_OF),
    )


def hands_over(stream: StreamHandle, request_id: str | None) -> bool:
    """Whether a start request lets its process stop the running query."""
    request = stream.catalog.requests.find(request_id) if request_id is not None else None
    return request is not None and _is_open(request) and bool(request.arguments.get(HANDS_OVER)) and is_running(stream)


def hand_over(
    stream: StreamHandle,
    request_id: str | None,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    *,
    unexpected: UnexpectedRows | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] | None = None,
) -> None:
    """Check a start with the loaded code, and only then suspend the running query.

    Without a query to hand over, only verify batches, if the start asks for it. If the start is refused, the request
    fails with the reason and the query runs on. If the request is withdrawn, the query runs on, or is started again
    where it stopped.
    """
    report = report or (lambda message: log_message(stream.stream_id, message))
    takes_over = hands_over(stream, request_id)
    is_next = request_id is not None and stream.catalog.requests.stopped_for(request_id)
    if is_next or not (takes_over or start_from.verify_batches):
        # If `is_next`, a process that died has checked the code and stopped the query.
        return
    set_up()
    with span("hand_over", stream=stream.stream_id), failing_start(stream.catalog, request_id):
        if takes_over:
            with span("check"):
                check_loaded_code(stream, describe, start_from, report)
        if start_from.verify_batches:
            with span("verify"):
                verify_batches(
                    stream,
                    describe,
                    start_from.verify_batches,
                    unexpected=unexpected,
                    interrupted=interrupted,
                    report=report,
                )
        if takes_over and request_id is not None:
            _take_over(stream, request_id, interrupted, report)


@contextmanager
def failing_start(catalog: Catalog, request_id: str | None, of: type[BaseException] = Exception) -> Iterator[None]:
    try:
        yield
    except of as error:
        if request_id is not None:
            with suppress(CatalogError):
                catalog.requests.fail_start(request_id, f"{type(error).__name__}: {error}")
        raise


def _take_over(
    stream: StreamHandle, request_id: str, interrupted: Callable[[], bool], report: Callable[[str], None]
) -> None:
    request = stream.catalog.requests.get(request_id)
    withdrawn = RequestFailedError(f"The start of stream {stream.stream_id!r} was withdrawn; its query runs on.")
    if interrupted() or not _is_open(request):
        raise withdrawn
    report("the loaded code can continue; suspending the running query")
    with span("suspend"):
        asked = stream.catalog.requests.suspend_for(request_id)
        if asked is None:
            raise withdrawn
        try:
            await_process(stream, asked, timeout_s=REQUEST_TIMEOUT_S, poll_s=_POLL_S)
        except RequestFailedError:
            # The query may have ended by itself meanwhile.
            if is_running(stream):
                raise
        await_stop(stream, REQUEST_TIMEOUT_S, poll_s=_POLL_S)
    if not _is_open(stream.catalog.requests.get(request_id)):
        start_again(stream, request_id, origin=request.origin)
        raise RequestFailedError(
            f"The start of stream {stream.stream_id!r} was withdrawn while the running query was stopped for it, so "
            "that query is started again where it stopped."
        )


def check_loaded_code(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    report: Callable[[str], None],
) -> None:
    describe()
    change = check_start(stream, describe, start_from, report=report).change
    if change is not None and not change.is_accepted and not start_from.accept_plan_change:
        refuse_plan_change(stream.stream_id, change)


def _is_open(request: RequestRecord) -> bool:
    return request.status is RequestStatus.PENDING


# The recorded field, by class; the rest, such as a platform's client, is that of the loaded code.
_FIELDS = {"command": DriverLaunch, "request": PlatformLaunch}


def record_of(launch: DriverLaunch | PlatformLaunch) -> dict[str, Any]:
    if isinstance(launch, DriverLaunch):
        kept: dict[str, Any] = {"command": list(launch.command), "environment": dict(launch.environment)}
    else:
        kept = {"request": _plain(launch.request)}
    shown = _shown_record(kept)
    return kept if shown == kept else {**shown, HIDES_SECRETS: True}


def launch_to_use(
    catalog: Catalog, stream_id: str, launch: DriverLaunch | PlatformLaunch, request: RequestRecord | None
) -> tuple[DriverLaunch | PlatformLaunch, dict[str, Any]]:
    """Return the launch of a start, and its record: those of the loaded code, unless it was rolled back.

    Raises:
        RequestFailedError: The launch that a rollback names cannot be repeated.
    """
    loaded = record_of(launch)
    named = request.arguments.get(LAUNCH_OF) if request is not None else None
    if named is not None:
        recorded = catalog.executions.get(named).launch
    else:
        # The latest execution may have no launch: a restart in place, or one that failed before its query ran.
        recorded = next((each.launch for each in catalog.executions.of_stream(stream_id) if each.launch), {})
        is_rolled_back = recorded.get(INSTEAD_OF) == loaded
        if not is_rolled_back:
            return launch, loaded
    kept = {name: value for name, value in recorded.items() if name != INSTEAD_OF}
    why = _why_not_again(kept, launch)
    if why is not None:
        raise RequestFailedError(f"The previous driver of stream {stream_id!r} is not launched again: {why}.")
    return replace(launch, **kept), ({**kept, INSTEAD_OF: loaded} if kept != loaded else loaded)


def _why_not_again(kept: Mapping[str, Any], launch: DriverLaunch | PlatformLaunch) -> str | None:
    if not kept:
        return "how it was launched was not recorded"
    if kept.get(HIDES_SECRETS):
        return "its launch contains secrets, which are not recorded"
    kind = next((kind for name, kind in _FIELDS.items() if name in kept), None)
    if kind is None or not isinstance(launch, kind):
        return f"the loaded code launches drivers by {type(launch).__name__}"
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _shown_record(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shown_record(each) for name, each in shown_settings(value).items()}
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return shown_command(value)
    if isinstance(value, list):
        return [_shown_record(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value
