"""`run_stream`: run one stream in a separate process.

The catalog sensor reports the checkpoints to Dagster, as for every process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import PACKAGE_LOGGER, RunLog
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE, failing_start, hand_over, start_order
from dagster_ckpt.client.spares import await_turn, prepared_spare
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import EXECUTOR_COPY_BYTES, FileSystemCheckpointStorage
from dagster_ckpt.config.state_backend import OnStateChange, StateBackend
from dagster_ckpt.errors import CkptError, LeaseHeldError, RestartWithdrawnError
from dagster_ckpt.flink.program import Deployment, StreamExecution, StreamToRun, run_program
from dagster_ckpt.policies.restart import RestartPolicy, RestartStrategyConfiguration, effective_restart_strategy
from dagster_ckpt.policies.upgrade import UnexpectedRows
from dagster_ckpt.runtime.run_request import StartQuery
from dagster_ckpt.runtime.start import start_stream_query
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.description import QueryToStart
from dagster_ckpt.spark.query.query import SupervisedQuery
from dagster_ckpt.spark.query.session import active_in_thread, active_session, settings_for_a_while, start_application
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import checked_stream_id, conforming

if TYPE_CHECKING:
    from dagster_pipes import PipesContext
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_levels = Lock()
_before: list[int] = []
# Cluster managers stop a driver with SIGTERM, users with Ctrl-C.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_stream(
    stream_id: str,
    start: Callable[[SparkSession], DataStreamWriter],
    *,
    catalog: str,
    storage: str | FileSystemCheckpointStorage,
    live_root: str,
    checkpointing: CheckpointConfig | None = None,
    restart_strategy: RestartStrategyConfiguration | RestartPolicy | None = None,
    state_backend: StateBackend | None = None,
    spark: SparkSession | None = None,
    start_from: str | StartFrom = "latest",
    on_backend_change: OnStateChange = OnStateChange.REFUSE,
    executor_copy_bytes: int | None = None,
    code_version: str | None = None,
    unexpected_rows: UnexpectedRows | None = None,
    state_migrations: Sequence[StateMigration] = (),
    standby: bool = False,
) -> StreamExecution:
    """Run a stream in this process until it ends: under `spark-submit`, or as `python program.py`.

    It behaves like a streaming asset, and continues where it stopped unless a start was requested through the catalog
    (by `restart_stream_job`, or by the run that launched this process). Transitions are logged to
    `dagster_ckpt.transitions`, and printed to stderr if the program has not set up logging.

    Args:
        stream_id: Id in catalog and storage; that of its asset, if Dagster has one.
        start: Returns a `DataStreamWriter` that is not started. Called for each start, also after a failure.
        catalog: SQLAlchemy URL.
        storage: An absolute path, URL or object. Savepoints go to `<storage>/savepoints` unless an object specifies a
            folder.
        live_root: Folder of Spark's live directories, as a path or URL that every executor can reach.
        checkpointing: Default: no periodic checkpoints.
        restart_strategy: Default: exponential delay with checkpointing, and none without.
        state_backend: None uses the session's settings.
        spark: Default: the session of this process, or a new one with the master of `spark-submit`, else this machine's
            cores.
        start_from: Where to start if no request specifies it; a `StartFrom` if the start has options.
        executor_copy_bytes: Executors copy snapshots that write more bytes than this. They must reach live directories
            and snapshots by the same URLs, and have dagster-ckpt installed. Default: the driver copies.
        code_version: Recorded in snapshots.
        unexpected_rows: For `verify_batches`: gets the name of what differs and the rows that differ, and returns those
            that must not.
        state_migrations: For `migrate_state`: rules for the state of operators that a release changes.
        standby: While another process runs the stream, wait with Spark started, and continue if that process or its
            machine dies or is asked to stop, as the restart strategy allows. A process that was launched for a request
            does not wait.

    Raises:
        RequestFailedError: The start that launched this process failed or was withdrawn.
        LeaseHeldError: Another execution of the stream is alive, and this is no spare.
        StreamFailedError: The query failed, and its restart strategy allows no further restart.
        LeaseLostError: Another process is the writer now.
        KeyboardInterrupt: SIGINT or SIGTERM was received; the query was stopped and keeps its state.

    Example:
        >>> run_stream(
        ...     "orders",
        ...     lambda spark: spark.readStream.table("raw").writeStream.option("path", "s3a://bucket/orders"),
        ...     catalog="postgresql+psycopg://dagster@db/catalog",
        ...     storage="s3://bucket/checkpoints",
        ...     live_root="s3a://bucket/live",
        ...     checkpointing=CheckpointConfig(interval=60_000),
        ... )
    """
    checked_stream_id(stream_id)
    otherwise = StartFrom.of(start_from)
    conforming("checkpointing", checkpointing, CheckpointConfig | None)
    conforming("state_backend", state_backend, StateBackend | None)
    on_backend_change = conforming("on_backend_change", on_backend_change, OnStateChange)
    options = (checkpointing or CheckpointConfig()).options
    folder = FileSystemCheckpointStorage(location_url("storage", storage)) if isinstance(storage, str) else storage
    location_url("live_root", live_root)
    copy_bytes = EXECUTOR_COPY_BYTES.checked(executor_copy_bytes) if executor_copy_bytes is not None else None
    deployment = Deployment(live_root=live_root, catalog_url=catalog, storage=folder, executor_copy_bytes=copy_bytes)
    session = spark or active_session() or start_application(os.cpu_count() or 1, {})
    settings = state_backend.spark_settings() if state_backend is not None else {}
    with (
        printed_log(),
        active_in_thread(session),
        closing(deployment.open_catalog()) as opened,
        settings_for_a_while(session, settings, "The state backend"),
        pipes_report(opened, stream_id) as pipes,
    ):
        stream = deployment.stream(
            stream_id,
            catalog=opened,
            query_name=stream_id,
            options=options,
            restart=effective_restart_strategy(
                restart_strategy, checkpointing_enabled=options.is_checkpointing_enabled
            ),
            backend=state_backend,
            savepoint_url=None,
            code_version=code_version,
            on_backend_change=on_backend_change,
            state_migrations=state_migrations,
        )
        attempt = partial(
            _run_once,
            stream,
            partial(start, session),
            spark=session,
            otherwise=otherwise,
            unexpected_rows=unexpected_rows,
            run_id=pipes.run_id,
        )
        is_spare = standby and START_REQUEST_VARIABLE not in os.environ
        has_waited = is_spare and await_turn(stream, partial(prepared_spare, session))
        result = attempt(is_spare=is_spare, has_waited=has_waited)
        while result is None:
            await_turn(stream, partial(prepared_spare, session), has_lost=True)
            result = attempt(is_spare=is_spare, has_waited=True)
        pipes.ended(result)
        return result


def _run_once(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    *,
    spark: SparkSession,
    otherwise: StartFrom,
    unexpected_rows: UnexpectedRows | None,
    run_id: str | None,
    is_spare: bool,
    has_waited: bool,
) -> StreamExecution | None:
    """Return None if another process was faster than this spare, or the stream was stopped."""
    order = start_order(stream.catalog, stream.stream_id, otherwise=otherwise, has_waited=has_waited)
    query = QueryToStart(describe)
    to_run = StreamToRun(
        stream,
        _start(stream, query),
        query.described,
        start_from=order.start_from,
        cause=order.cause,
        start_request_id=order.request_id,
        restart_of=order.restart_of,
        has_supervisor=order.has_supervisor,
        has_spare=is_spare,
    )
    with failing_start(stream.catalog, order.request_id, BaseException):
        checked = QueryToStart(describe).described
        hand_over(stream, order.request_id, checked, order.start_from, unexpected=unexpected_rows)
        try:
            result = run_program(
                stream.stream_id, [to_run], spark=spark, run_id=order.run_id or run_id, signals=_SIGNALS
            )
        except (LeaseHeldError, RestartWithdrawnError):
            if not is_spare:
                raise
            return None
        return result.streams[0]


def _start(stream: StreamHandle, query: QueryToStart) -> StartQuery:
    def start(live: LiveDirectory) -> SupervisedQuery:
        return start_stream_query(stream, query.take(), live)

    return start


# Dagster keeps these lines forever: a third of a megabyte a day.
PROGRESS_INTERVAL_S = 60.0
PIPES_VARIABLE = "DAGSTER_PIPES_CONTEXT"


class PipesReport:
    """Reports to the Dagster run that started this process through Pipes, if any."""

    def __init__(self, context: PipesContext | None) -> None:
        self._context = context

    @property
    def run_id(self) -> str | None:
        """Id of that run."""
        return self._context.run_id if self._context is not None else None

    def ended(self, execution: StreamExecution) -> None:
        """Send how the stream ended; `PipesClientCompletedInvocation.get_custom_messages` returns it."""
        if self._context is not None:
            self._context.report_custom_message(
                {
                    "dagster_ckpt/stream_id": execution.stream_id,
                    "dagster_ckpt/execution_id": execution.execution_id,
                    "dagster_ckpt/end": execution.end.value,
                    "dagster_ckpt/savepoint": execution.savepoint,
                }
            )


@contextmanager
def pipes_report(
    catalog: Catalog,
    stream_id: str,
    *,
    interval_s: float = PROGRESS_INTERVAL_S,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[PipesReport]:
    """Send log, progress and errors to the Dagster run that started this process through Pipes, if any."""
    if PIPES_VARIABLE not in environment:
        yield PipesReport(None)
        return
    from dagster_pipes import PipesContext, open_dagster_pipes  # noqa: PLC0415

    is_ours = not PipesContext.is_initialized()
    context = open_dagster_pipes()
    is_over = threading.Event()

    def report_progress() -> None:
        last = None
        while not is_over.wait(interval_s):
            message = progress_message(catalog, stream_id)
            if message != last:
                context.log.info(message)
            last = message

    reporter = threading.Thread(target=report_progress, name=f"pipes-{stream_id}", daemon=True)
    reporter.start()
    try:
        with forwarded_log(context.log.log, stream_id=stream_id):
            yield PipesReport(context)
    except BaseException as error:
        # Pipes sends only the message, not a traceback.
        context.log.error(f"{stream_id}: failed with {type(error).__name__}: {error}")  # noqa: TRY400
        raise
    finally:
        is_over.set()
        reporter.join()
        if is_ours:
            context.close()


def progress_message(catalog: Catalog, stream_id: str) -> str:
    """Describe the newest batch and snapshot of a stream."""
    try:
        execution = catalog.executions.latest(stream_id)
        snapshots = catalog.snapshots.completed(stream_id)
    except CkptError as error:
        return f"{stream_id}: the catalog did not answer ({type(error).__name__})"
    figures = (execution.progress if execution is not None else None) or {}
    newest = f"newest snapshot at batch {snapshots[0].batch_id}" if snapshots else "no snapshot yet"
    return f"{stream_id}: batch {figures.get('batch_id')}, {figures.get('input_rows')} input rows, {newest}"


@contextmanager
def forwarded_log(to: Callable[[int, str], object], *, stream_id: str | None = None) -> Iterator[None]:
    """Pass transitions, from INFO on, to the log of a Dagster run while the context is open.

    A thread passes them, so that a hanging log delays neither lease nor checkpoint. A `stream_id` selects one stream,
    whose periodic checkpoints are summed up (`RunLog`).
    """
    run_log = RunLog(to)

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                if stream_id is not None:
                    run_log.take(record)
                else:
                    to(record.levelno, record.getMessage())
            except Exception:  # noqa: BLE001 - a log must not end what it reports
                self.handleError(record)

    queue: SimpleQueue[Any] = SimpleQueue()
    handler = QueueHandler(queue)
    if stream_id is not None:
        handler.addFilter(lambda record: getattr(record, "stream_id", stream_id) == stream_id)
    listener = QueueListener(queue, Forward())
    listener.start()
    try:
        with _attached(handler):
            yield
    finally:
        listener.stop()
        with suppress(Exception):
            run_log.flush()


@contextmanager
def printed_log() -> Iterator[None]:
    """Print the package's log to stderr while the context is open, unless the program has set up logging."""
    if logging.getLogger().handlers or logging.getLogger(PACKAGE_LOGGER).handlers:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    with _attached(handler):
        yield


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    package = logging.getLogger(PACKAGE_LOGGER)
    handler.setLevel(logging.INFO)
    with _levels:
        # Streams of one process may be logged at the same time.
        _before.append(package.level)
        if not package.isEnabledFor(logging.INFO):
            package.setLevel(logging.INFO)
        package.addHandler(handler)
    try:
        yield
    finally:
        with _levels:
            package.removeHandler(handler)
            first = _before.pop(0)
            if _before:
                _before[0] = first
            else:
                package.setLevel(first)
