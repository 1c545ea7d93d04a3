"""One program without Dagster: where its streams are stored, and how they run, in a thread each."""

from __future__ import annotations

import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, StartCause
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import DeploymentStorage, FileSystemCheckpointStorage
from dagster_ckpt.config.state_backend import (
    DEFAULT_TRANSFER_THREADS,
    OnStateChange,
    StateBackend,
    StatePartitions,
    storage_of_stream,
)
from dagster_ckpt.errors import LeaseLostError, StreamFailedError
from dagster_ckpt.flink.execution_config import PARALLELISM_DEFAULT, ExecutionConfig
from dagster_ckpt.policies.restart import RestartPolicy, restart_description
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.execution_end import settle_run
from dagster_ckpt.runtime.run_request import EndKind, Outcome, RunRequest, StartQuery
from dagster_ckpt.runtime.start import start_stream_query
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.inspect import pinned_partitions
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery, jvm_pid
from dagster_ckpt.spark.query.session import active_in_thread, application_of
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import UNSEEN_JVM
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import monotonic_ms
from dagster_ckpt.values.storage_path import location_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


@dataclass(frozen=True)
class Deployment:
    """The locations of one program."""

    live_root: str
    catalog_url: str
    storage: FileSystemCheckpointStorage
    executor_copy_bytes: int | None = None

    def stream(
        self,
        stream_id: str,
        *,
        catalog: Catalog,
        query_name: str,
        options: CheckpointOptions,
        restart: RestartPolicy,
        backend: StateBackend | None,
        savepoint_url: str | None,
        code_version: str | None = None,
        on_backend_change: OnStateChange = OnStateChange.REFUSE,
        state_partitions: StatePartitions | None = None,
        state_migrations: Sequence[StateMigration] = (),
    ) -> StreamHandle:
        """Return the handle of a stream."""
        root = self.storage.checkpoint_location.url_to_open
        unset = DeploymentStorage(checkpoint_path=root, savepoint_path=savepoint_url or f"{root}/savepoints")
        storage = storage_of_stream(options.storage, backend, self.storage).configure(unset)
        threads = backend.transfer_threads if backend is not None else DEFAULT_TRANSFER_THREADS
        return StreamHandle(
            stream_id=stream_id,
            name=query_name,
            asset_key=stream_id,
            catalog=catalog,
            store=open_store(storage, stream_id, transfer_threads=threads),
            options=options,
            restart=restart,
            live_root=self.live_root,
            backend=backend,
            code_version=code_version,
            on_backend_change=on_backend_change,
            state_partitions=state_partitions,
            executor_copy_bytes=self.executor_copy_bytes,
            storage=storage,
            state_migrations=tuple(state_migrations),
        )

    def open_catalog(self) -> Catalog:
        """Open the catalog; the folder of a SQLite file is created."""
        return Catalog(self.catalog_url)


def deployment_below(
    folder: Path, *, live_root: str | None, catalog_url: str | None, storage_path: str | None
) -> Deployment:
    """Return locations, by default inside a folder."""
    home = folder.absolute()
    return Deployment(
        live_root=live_root or f"file://{home / 'live'}",
        catalog_url=catalog_url or f"sqlite:///{home / 'catalog.db'}",
        storage=FileSystemCheckpointStorage(location_url("storage_path", storage_path or str(home / "snapshots"))),
    )


_LOG = logging.getLogger("dagster_ckpt.flink")


@dataclass(frozen=True)
class RegisteredWriter:
    """A query of a program under its stable name."""

    name: str
    writer: DataStreamWriter
    has_own_trigger: bool


def start_registered(stream: StreamHandle, registered: RegisteredWriter, config: ExecutionConfig) -> StartQuery:
    """Return what starts a query, by default with the config's trigger interval."""

    def start(live: LiveDirectory) -> SupervisedQuery:
        warn_of_partitions(stream.stream_id, live, config)
        writer = registered.writer
        if not registered.has_own_trigger:
            writer = writer.trigger(processingTime=f"{config.trigger_interval_ms} milliseconds")
        return start_stream_query(stream, writer, live)

    return start


def warn_of_partitions(stream_id: str, live: LiveDirectory, config: ExecutionConfig) -> None:
    """Warn if a parallelism without a max parallelism differs from the state's partitions."""
    pinned = pinned_partitions(live)
    is_fixed = config.max_parallelism != PARALLELISM_DEFAULT
    if pinned is not None and not is_fixed and config.parallelism not in (PARALLELISM_DEFAULT, pinned):
        _LOG.warning("%s: state stays in %d partitions, not %d", stream_id, pinned, config.parallelism)


@dataclass(frozen=True)
class StreamToRun:
    """One stream of a program.

    Attributes:
        restart_of: As in `RunRequest`.
        has_supervisor: A supervisor restarts it after an interrupt, and settles its execution.
        has_spare: After an interrupt, a spare process may continue.
    """

    stream: StreamHandle
    start_query: StartQuery
    describe: Callable[[], DataStreamWriter]
    start_from: StartFrom = field(default_factory=StartFrom)
    cause: StartCause = StartCause.MANUAL
    start_request_id: str | None = None
    restart_of: str | None = None
    has_supervisor: bool = False
    has_spare: bool = False


@dataclass(frozen=True)
class StreamExecution:
    """How a stream ended; `savepoint` is the location of a stop's savepoint."""

    stream_id: str
    execution_id: str
    end: EndKind
    savepoint: str | None = None


@dataclass(frozen=True)
class JobExecutionResult:
    """The result of `execute`; streams are in the order of their writers."""

    run_id: str
    job_name: str
    net_runtime_ms: int
    streams: tuple[StreamExecution, ...]

    def get_job_id(self) -> str:
        """Return the id of this run: as in Flink, each has a new one."""
        return self.run_id

    def get_net_runtime(self) -> int:
        """Return how long the program ran, in ms."""
        return self.net_runtime_ms


def run_program(
    job_name: str,
    streams: Sequence[StreamToRun],
    *,
    spark: SparkSession,
    run_id: str | None = None,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> JobExecutionResult:
    """Run streams until all have ended, each in a thread: an interrupt never lands inside a call into the JVM.

    A signal stops every stream and keeps its state. If one fails, the others are stopped too, and its error is raised.
    """
    began_ms = monotonic_ms()
    run_id = run_id or uuid.uuid4().hex
    stop = threading.Event()
    requests = [
        RunRequest(
            run_id=run_id,
            start_query=to_run.start_query,
            describe=to_run.describe,
            start_from=to_run.start_from,
            cause=to_run.cause,
            start_request_id=to_run.start_request_id,
            restart_of=to_run.restart_of,
            jvm_pid=jvm_pid(spark) or UNSEEN_JVM,
            application=application_of(spark),
            is_launched=to_run.has_supervisor,
            interrupted=stop.is_set,
            # An external stop, e.g. machine shutdown: the next start continues.
            interrupted_as=partial(_interrupted_as, to_run.has_supervisor or to_run.has_spare),
        )
        for to_run in streams
    ]
    with _stopped_by(signals, stop) as interrupted, ThreadPoolExecutor(len(streams), "stream") as threads:
        running = [
            threads.submit(_run, to_run, request, stop, spark)
            for to_run, request in zip(streams, requests, strict=True)
        ]
        wait(running)
    _raise_first(running)
    if interrupted.is_set():
        raise KeyboardInterrupt
    ended = tuple(each.result() for each in running)
    return JobExecutionResult(run_id, job_name, monotonic_ms() - began_ms, ended)


def _run(to_run: StreamToRun, request: RunRequest, stop: threading.Event, spark: SparkSession) -> StreamExecution:
    stream = to_run.stream
    try:
        with active_in_thread(spark):
            outcome = execute_stream(stream, request)
        _settle(to_run, outcome)
    except BaseException:
        # A program runs as a whole or not at all, like a Flink job.
        stop.set()
        raise
    savepoint = outcome.savepoint.location if outcome.savepoint is not None else None
    return StreamExecution(stream.stream_id, outcome.execution_id, outcome.end.kind, savepoint)


def _interrupted_as(another_continues: bool) -> ExecutionStatus:
    return ExecutionStatus.FAILED if another_continues else ExecutionStatus.SUSPENDED


def _settle(to_run: StreamToRun, outcome: Outcome) -> None:
    stream, end = to_run.stream, outcome.end
    if end.kind is EndKind.LEASE_LOST:
        raise LeaseLostError(end.reason)
    settle_run(stream, outcome)
    if end.kind is EndKind.FAILED:
        raise StreamFailedError(
            f"Stream {stream.stream_id!r} failed, and its restart strategy ({restart_description(stream.restart)}) "
            f"does not restart it: {end.reason}\n"
            "Fix the cause and run the program again: it continues where the stream stopped."
        )


def _raise_first(ended: Sequence[Future[StreamExecution]]) -> None:
    errors = [error for each in ended if (error := each.exception()) is not None]
    for other in errors[1:]:
        _LOG.error("%s", other)
    if errors:
        raise errors[0]


@contextmanager
def _stopped_by(signals: Sequence[signal.Signals], stop: threading.Event) -> Iterator[threading.Event]:
    """Let signals set `stop`, in place of Spark's SIGINT handler, which would fail the running batch.

    The yielded event is set by a signal; outside the main thread none are handled.
    """
    interrupted = threading.Event()

    def note(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = {each: signal.signal(each, note) for each in signals}
    try:
        yield interrupted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
