"""Launches a driver that outlives the process that launched it; the catalog keeps its handle."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dagster_ckpt.catalog.records import LaunchRecord, RequestRecord, RequestStatus
from dagster_ckpt.config.redaction import shown_command, without_secrets
from dagster_ckpt.errors import OptionError, RequestFailedError
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import Liveness, ProcessIdentity, boot_id, launch_liveness

# Environment variable with the START request that a driver answers, like `{start_request}` in a
# launch's command.
START_REQUEST_VARIABLE = "DAGSTER_CKPT_START_REQUEST"
_LOG_LINES = 20


@dataclass(frozen=True)
class DriverLaunch:
    """How a driver is launched.

    Attributes:
        command: Its command line. `{stream_id}` and `{start_request}` in it are replaced. If the
            environment does not reach the driver, pass the request with `--conf
            spark.kubernetes.driverEnv.DAGSTER_CKPT_START_REQUEST={start_request}` or `--conf
            spark.yarn.appMasterEnv.DAGSTER_CKPT_START_REQUEST={start_request}`.
        log_directory: Folder for its output, one file per launch.
        environment: Environment variables, in addition to those of the launching process.
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
        """Refuse a command that could not be run."""
        if isinstance(self.command, str) or not self.command:
            raise OptionError(
                f"command is {_shown(self.command)!r}, but must be a list of words such as "
                "('spark-submit', 'orders.py')."
            )
        self.command_line(stream_id="", start_request="")

    def command_line(self, *, stream_id: str, start_request: str) -> list[str]:
        """The command line of one launch."""
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
    """A driver that was launched by this process or another.

    Attributes:
        record: Its handle in the catalog.
        exit_code: Its exit code once it has ended, if this process launched it; None otherwise.
    """

    record: LaunchRecord
    exit_code: Callable[[], int | None] = lambda: None

    def is_here(self) -> bool:
        """Whether the launched process is alive on this machine."""
        return launch_liveness(self.record) is Liveness.ALIVE

    def failure(self) -> str | None:
        """Why it will not start its query any more, or None.

        A submission that ends successfully has handed the driver to a cluster.
        """
        code = self.exit_code()
        if not code:
            return None
        return f"the driver ended with exit code {code}; the end of its log {self.record.log}:\n{self.log_end()}"

    def log_end(self) -> str:
        """The last lines of its output."""
        log = Path(self.record.log)
        if not log.exists():
            return "(no log)"
        return without_secrets("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))


def launch_driver(stream: StreamHandle, launch: DriverLaunch, request: RequestRecord, *, run_id: str) -> LaunchedDriver:
    """Start a driver in a separate session, so that no signal to this process reaches it.

    Args:
        stream: The stream, registered in the catalog.
        launch: How to launch it.
        request: The START request that the driver must answer.
        run_id: The run that launches it.

    Raises:
        RequestFailedError: The command cannot be run.
    """
    command_line = launch.command_line(stream_id=stream.stream_id, start_request=request.request_id)
    log = Path(launch.log_directory) / f"{stream.stream_id}-{request.request_id[:8]}.log"
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A driver's output must not be readable by other users.
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
            f"The driver of stream {stream.stream_id!r} could not be launched: {error}. Look at the command "
            f"{shown_command(command_line)!r} and the log folder {launch.log_directory}."
        ) from error
    record = stream.catalog.launches.record(
        request.request_id,
        stream_id=stream.stream_id,
        run_id=run_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=process.pid,
        process_start_ticks=_start_ticks(process.pid),
        command=subprocess.list2cmdline(shown_command(command_line)),
        log=str(log),
    )
    return LaunchedDriver(record, process.poll)


def driver_on_its_way(stream: StreamHandle) -> LaunchedDriver | None:
    """A driver that was launched on this machine, is alive, and has not started its query yet."""
    record = stream.catalog.launches.latest(stream.stream_id)
    if record is None:
        return None
    driver = LaunchedDriver(record)
    is_open = stream.catalog.requests.get(record.request_id).status is RequestStatus.PENDING
    return driver if is_open and driver.is_here() else None


def _start_ticks(pid: int) -> int | None:
    try:
        return ProcessIdentity.of(pid).start_ticks
    except psutil.NoSuchProcess:
        # It has already ended: no process will ever match this.
        return 0
