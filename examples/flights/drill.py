"""`make demo`: deliberately does to streams what usually loses them, and compares the results.

The streams run under a real `dagster dev` while the flights of 2013 arrive. One is killed in the
middle of a batch, the other loses its live directory, a savepoint is taken and later rewound to,
and then both streams are rewound to one savepoint set. In the end the table of every asset is compared,
row by row, with that of an uninterrupted run of the same feed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
from dagster import DagsterRunStatus
from pyspark.sql import SparkSession
from rich.console import Console

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from examples.flights.assets import SPARK, airport_day_summary_job, departure_delays, flights_with_weather
from examples.flights.compare import TableComparison, compare_tables
from examples.flights.dagster_dev import DagsterDev, running_dagster_dev
from examples.flights.reference import run_reference
from examples.flights.replayer import FeedPlan, Replayer
from examples.flights.report import checkpoint_table, comparison_table
from examples.flights.streams import final_watermarks
from examples.flights.workspace import Workspace

DEFINITIONS = Path(__file__).parents[2] / "definitions.py"
SAVEPOINT_LABEL = "before-the-bad-deployment"
SET_LABEL = "before-the-bad-feed"
# For a machine with other work: there, launching a run alone may take a minute.
STEP_TIMEOUT_S = 300.0
# A stream that reports being idle this long after the last file arrived has processed that file.
SETTLED_MS = 3_000
# A JVM writes its thread stacks when it reaches a safepoint.
STACKS_S = 3.0
# Days before the end of the year at which the feed stops: to continue when the streams run, after the
# savepoint, after the set, and after the last rewind. However slow the machine, the awaited batches then have
# data: without new data, a restarted query produces no batch that only advances the watermark.
STOPS_BEFORE_THE_END = (300, 42, 28, 14)
WIDTH = 170
DAYS_PER_SECOND = 4.0
STREAMS = (departure_delays, flights_with_weather)


class Drill:
    """The steps of the drill; each waits for its effect.

    Args:
        workspace: An empty workspace.
        dev: A running `dagster dev` on it.
        console: Where progress is printed.
    """

    def __init__(self, workspace: Workspace, dev: DagsterDev, console: Console) -> None:
        self._workspace = workspace
        self._dev = dev
        self._console = console
        self._catalog = Catalog(workspace.catalog_url)

    def start(self, stream: StreamingAsset) -> None:
        """Launch a stream like the launchpad."""
        self._dev.launch(f"{stream.name}_stream")

    def await_checkpoint(self, stream: StreamingAsset) -> None:
        """Wait until a stream has completed a checkpoint."""
        self._await(
            lambda: bool(self._catalog.snapshots.completed(stream.stream_id)), f"a checkpoint of {stream.stream_id}"
        )

    def kill_in_the_middle_of_a_batch(self, stream: StreamingAsset) -> str:
        """Send SIGKILL to the stream's process and its JVM while a batch is planned but not committed."""
        execution = self._running(stream)
        live = LiveDirectory(_known(execution.live_directory))
        lease = self._catalog.leases.current(stream.stream_id)
        if lease is None:
            raise CkptError(f"{stream.stream_id} holds no lease although it runs.")
        victims = [psutil.Process(lease.pid), *([psutil.Process(lease.jvm_pid)] if lease.jvm_pid else [])]

        def in_the_middle() -> bool:
            positions = live.positions()
            return positions.offset is not None and positions.offset > (positions.commit or -1)

        self._await(in_the_middle, f"a batch of {stream.stream_id} under way", poll_s=0.01)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        positions = live.positions()
        self._print(f"killed {stream.stream_id} in batch {positions.offset}; committed was {positions.commit}")
        return execution.execution_id

    def delete_live_directory(self, stream: StreamingAsset) -> str:
        """Delete Spark's checkpoint directory while the query is running."""
        execution = self._running(stream)
        directory = _known(execution.live_directory)
        LiveDirectory(directory).delete()
        self._print(f"deleted {directory} under the running query")
        return execution.execution_id

    def await_successor(self, stream: StreamingAsset, execution_id: str) -> None:
        """Wait until another execution of a stream is running, and print what it started from."""

        def runs() -> bool:
            latest = self._catalog.executions.latest(stream.stream_id)
            return (
                latest is not None and latest.execution_id != execution_id and latest.status is ExecutionStatus.RUNNING
            )

        self._await(runs, f"a new execution of {stream.stream_id}")
        successor = self._running(stream)
        reason = (successor.recovery or {}).get("reason", "")
        self._print(f"{stream.stream_id} runs again ({successor.cause.value.lower().replace('_', ' ')}): {reason}")

    def take_savepoint(self, stream: StreamingAsset, label: str) -> None:
        """Trigger a savepoint through its job, while the stream runs."""
        self._run_job("trigger_savepoint_job", "trigger_savepoint", {"stream_id": stream.stream_id, "label": label})

    def rewind(self, stream: StreamingAsset, label: str) -> None:
        """Restart a running stream from a savepoint."""
        before = self._running(stream).execution_id
        self._run_job("restart_stream_job", "restart_stream", {"stream_id": stream.stream_id, "start_from": label})
        self.await_successor(stream, before)

    def take_savepoint_set(self, streams: Sequence[StreamingAsset], label: str) -> None:
        """Take savepoints of several streams that belong together, while they run."""
        selection = ",".join(stream.stream_id for stream in streams)
        self._run_job("savepoint_set_job", "savepoint_set", {"selection": selection, "label": label})

    def rewind_all(self, streams: Sequence[StreamingAsset], label: str) -> None:
        """Take streams back to a set; the run lists the summary, which is built on what that undoes."""
        before = [(stream, self._running(stream).execution_id) for stream in streams]
        run_id = self._run_job("restart_savepoint_set_job", "restart_savepoint_set", {"savepoint_set": label})
        for stream, execution_id in before:
            self.await_successor(stream, execution_id)
        question = """query($run: ID!) { runOrError(runId: $run) { ... on Run { eventConnection(limit: 1000) { events {
            ... on ExecutionStepOutputEvent { metadataEntries {
                label ... on MarkdownMetadataEntry { mdStr } } } } } } } }"""
        events = self._dev.query(question, {"run": run_id})["runOrError"]["eventConnection"]["events"]
        shown = {each["label"]: each.get("mdStr") for event in events for each in event.get("metadataEntries", ())}
        if "airport_day_summary" not in (shown.get("dagster_ckpt/downstream") or ""):
            raise CkptError(f"Run {run_id} does not list airport_day_summary as built on undone data: {shown}")
        self._print("airport_day_summary is built on undone data, and is materialized again in the end")

    def await_caught_up(self, stream: StreamingAsset, final_watermark: str) -> None:
        """Wait until a stream has processed the whole feed: idle for a while, at the feed's final watermark."""
        complete_at_ms = time.time_ns() // 1_000_000

        def caught_up() -> bool:
            execution = self._running(stream)
            progress = execution.progress or {}
            seen_since = execution.heartbeat_at_ms > complete_at_ms + SETTLED_MS
            return seen_since and bool(progress.get("idle")) and progress.get("watermark") == final_watermark

        self._await(caught_up, f"{stream.stream_id} at watermark {final_watermark}")
        self._print(f"{stream.stream_id} has processed the whole feed")

    def await_batches_after(self, stream: StreamingAsset, label: str, *, batches: int) -> None:
        """Wait until a stream has committed batches after a savepoint, so that there is something to rewind."""
        savepoint = next(
            snapshot for snapshot in self._catalog.snapshots.completed(stream.stream_id) if snapshot.label == label
        )
        live = LiveDirectory(_known(self._running(stream).live_directory))
        wanted = (savepoint.batch_id or 0) + batches
        self._await(lambda: (live.positions().commit or 0) >= wanted, f"batch {wanted} of {stream.stream_id}")
        self._print(f"{stream.stream_id} has committed batch {wanted}; the savepoint is at batch {savepoint.batch_id}")

    def stop_all(self, streams: Sequence[StreamingAsset]) -> None:
        """Stop streams with a savepoint each, in parallel."""
        job = "stop_with_savepoint_job"
        runs = [
            self._dev.launch(job, _config("stop_with_savepoint", {"stream_id": stream.stream_id, "label": "the-end"}))
            for stream in streams
        ]
        for run_id in runs:
            self._expect_success(job, run_id)

    def summarise(self) -> None:
        """Materialize the batch asset once the streams have ended."""
        self._await_idle_downstream()
        run_id = self._dev.launch(airport_day_summary_job.name)
        self._expect_success(airport_day_summary_job.name, run_id)

    def refuse_failed_ticks(self) -> None:
        """Fail if a sensor failed in the meantime: the next tick would hide what it left undone."""
        failed = self._dev.failed_ticks()
        if failed:
            raise CkptError(f"{len(failed)} ticks failed, the first with: {failed[0]}. Log: {self._dev.log}")

    def _run_job(self, job: str, op: str, config: dict[str, Any]) -> str:
        run_id = self._dev.launch(job, _config(op, config))
        self._expect_success(job, run_id)
        return run_id

    def _expect_success(self, job: str, run_id: str) -> None:
        status = self._dev.await_end(run_id, timeout_s=STEP_TIMEOUT_S)
        if status is not DagsterRunStatus.SUCCESS:
            raise CkptError(f"{job} ended {status.value}; run {run_id}, log {self._dev.log}")
        self._print(f"{job}: done")

    def _await_idle_downstream(self) -> None:
        question = """query($job: String!) {
            runsOrError(filter: {pipelineName: $job, statuses: [STARTED, STARTING, NOT_STARTED, QUEUED]})
            { ... on Runs { results { runId } } } }"""
        job = {"job": airport_day_summary_job.name}
        self._await(
            lambda: not self._dev.query(question, job)["runsOrError"]["results"],
            f"{airport_day_summary_job.name} to be idle",
        )

    def _running(self, stream: StreamingAsset) -> ExecutionRecord:
        latest = self._catalog.executions.latest(stream.stream_id)
        if latest is None:
            raise CkptError(f"{stream.stream_id} was never started.")
        return latest

    def _await(self, condition: Callable[[], bool], what: str, *, poll_s: float = 0.25) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            if time.monotonic() >= deadline:
                self._have_stacks_logged()
                raise CkptError(f"Waited {STEP_TIMEOUT_S:.0f} s for {what}, in vain. Log: {self._dev.log}")
            time.sleep(poll_s)

    def _have_stacks_logged(self) -> None:
        """Make each stream's JVM log its thread stacks before everything is stopped."""
        for stream in STREAMS:
            lease = self._catalog.leases.current(stream.stream_id)
            if lease is not None and lease.jvm_pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(lease.jvm_pid).send_signal(signal.SIGQUIT)
        time.sleep(STACKS_S)

    def _print(self, sentence: str) -> None:
        self._console.log(sentence, markup=False)


def _config(op: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"ops": {op: {"config": config}}}


def _known(directory: str | None) -> str:
    if directory is None:
        raise CkptError("The execution has no live directory yet.")
    return directory


class Feed:
    """The feed, delivered in the background during the drill; its last days only on demand.

    Args:
        landing: The landing directory.
        pace: Days per second.
    """

    def __init__(self, landing: Path, pace: float) -> None:
        self._replayer = Replayer(landing)
        self._pace = pace
        self._stopped = threading.Event()
        self._stops = {self.plan.days - before: threading.Event() for before in STOPS_BEFORE_THE_END}
        self._days = 0
        self._thread = threading.Thread(target=self._lay, name="feed", daemon=True)

    @property
    def plan(self) -> FeedPlan:
        """The contents of the whole feed."""
        return self._replayer.plan

    @property
    def share(self) -> float:
        """How much of the year has arrived, 0 to 1."""
        return self._days / self.plan.days

    def await_end(self) -> None:
        """Let the whole year arrive, and wait for it."""
        self._pass_all()
        self._thread.join()

    def resume(self) -> None:
        """Let the days up to the next stop arrive."""
        next(stop for stop in self._stops.values() if not stop.is_set()).set()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Deliver the feed until the end of the context or of the year."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._pass_all()
            self._thread.join()

    def _pass_all(self) -> None:
        for stop in self._stops.values():
            stop.set()

    def _lay(self) -> None:
        for _ in self._replayer.replay(self._pace, stopped=self._stopped.is_set):
            self._days += 1
            if (stop := self._stops.get(self._days)) is not None:
                stop.wait()


def run_drill(workspace: Workspace, console: Console, *, pace: float) -> dict[str, TableComparison]:
    """Run all steps while the year arrives, stop the streams, and compare what they wrote.

    Raises:
        CkptError: Something did not happen in time, or a job failed.
    """
    feed = Feed(workspace.landing, pace)
    with ThreadPoolExecutor(1) as aside:
        with running_dagster_dev(workspace, DEFINITIONS) as dev, feed.arriving():
            console.log(f"dagster dev runs at http://localhost:{dev.port}; flights arrive at {pace:g} days a second")
            drill = Drill(workspace, dev, console)
            for stream in STREAMS:
                drill.start(stream)
            drill.await_checkpoint(departure_delays)
            feed.resume()
            console.log("[bold]1. SIGKILL in the middle of a batch[/bold]")
            killed = drill.kill_in_the_middle_of_a_batch(departure_delays)
            console.log("[bold]2. The live directory is deleted[/bold]")
            drill.await_checkpoint(flights_with_weather)
            robbed = drill.delete_live_directory(flights_with_weather)
            drill.await_successor(flights_with_weather, robbed)
            drill.await_successor(departure_delays, killed)
            console.log("[bold]3. A savepoint while it runs[/bold]")
            drill.take_savepoint(departure_delays, SAVEPOINT_LABEL)
            feed.resume()
            drill.await_batches_after(departure_delays, SAVEPOINT_LABEL, batches=2)
            console.log("[bold]4. A bad deployment, rewound to the savepoint[/bold]")
            drill.rewind(departure_delays, SAVEPOINT_LABEL)
            console.log("[bold]5. Both streams and the summary, rewound to one savepoint set[/bold]")
            drill.take_savepoint_set(STREAMS, SET_LABEL)
            feed.resume()
            for stream in STREAMS:
                drill.await_batches_after(stream, SET_LABEL, batches=2)
            drill.summarise()
            drill.rewind_all(STREAMS, SET_LABEL)
            console.log(f"the rest of the year: {feed.share:.0%} has arrived")
            feed.await_end()
            # The feed is complete, so the uninterrupted run can start in parallel with the last
            # steps.
            uninterrupted = aside.submit(run_uninterrupted, workspace)
            watermarks = final_watermarks(feed.plan)
            for stream in STREAMS:
                drill.await_caught_up(stream, watermarks[stream.stream_id])
            console.log("[bold]6. The end: stop with savepoint, summarise[/bold]")
            drill.stop_all(STREAMS)
            drill.summarise()
            drill.refuse_failed_ticks()
        console.log("[bold]7. Compare with an uninterrupted run of the same feed[/bold]")
        spark, root = uninterrupted.result()
        try:
            assets = [*(stream.stream_id for stream in STREAMS), "airport_day_summary"]
            return {asset: compare_tables(spark, str(workspace.output / asset), str(root / asset)) for asset in assets}
        finally:
            spark.stop()


def run_uninterrupted(workspace: Workspace) -> tuple[SparkSession, Path]:
    """Process the whole feed without interruption; returns the session and the folder of its tables."""
    builder = SparkSession.builder
    for name, value in SPARK.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    root = workspace.root / "uninterrupted"
    run_reference(spark, str(workspace.landing), str(root))
    return spark, root


@click.command()
@click.option("--home", type=click.Path(path_type=Path), default=Path(".demo/drill"), show_default=True)
@click.option("--pace", default=DAYS_PER_SECOND, show_default=True, help="Days of 2013 that arrive per second.")
def main(home: Path, pace: float) -> None:
    """Kill, delete and rewind two streams, and compare what they wrote with an uninterrupted run."""
    # A file or a pipe has no width, and the tables need one.
    console = Console(log_path=False) if sys.stdout.isatty() else Console(width=WIDTH, log_path=False)
    began = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    workspace = Workspace(home.resolve())
    try:
        comparisons = run_drill(workspace, console, pace=pace)
    except CkptError as error:
        console.print(f"[red]The drill did not come to its end:[/red] {error}")
        sys.exit(1)
    catalog = Catalog(workspace.catalog_url)
    snapshots = [snapshot for stream in STREAMS for snapshot in reversed(catalog.snapshots.of_stream(stream.stream_id))]
    console.print(checkpoint_table(snapshots))
    console.print(comparison_table(comparisons))
    console.print(f"{time.monotonic() - began:.0f} seconds. Everything is in {workspace.root}")
    if not all(comparison.equal for comparison in comparisons.values()):
        console.print("[red]The outputs differ.[/red]")
        sys.exit(1)
    console.print("[green]Every asset is what an uninterrupted run would have written.[/green]")


if __name__ == "__main__":
    main()
