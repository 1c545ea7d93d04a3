"""What the sensors cost: the time of a tick with many streams, and the bytes that Dagster keeps of what they report."""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.bench import Bench, Findings, Section
from benchmarks.crowd import Crowd, crowd
from benchmarks.measuring import Sample, timed, tree_size
from benchmarks.results import Table, Target, at_most
from dagster_ckpt.catalog.history import SnapshotTally
from dagster_ckpt.catalog.records import EventRecord, EventType
from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.orchestration.catalog_sensor import EVENTS_IN_FIRST_TICK, EVENTS_PER_TICK, SensorCursor
from dagster_ckpt.orchestration.checks import STREAMS_PER_TICK
from dagster_ckpt.orchestration.metadata import failure_observation, materialization

STREAMS = 1000
SNAPSHOTS_EACH = 35
# Of 1,000 streams with a checkpoint a minute, so many complete between two ticks of five seconds.
FRESH = 84
TICK_MS = 100
REPORTED = 150
DAY_S = 24 * 3600
REPORTS_A_DAY = DAY_S // 60
CHECKPOINT_EVERY_S = (1, 10, 60)


def _measure(bench: Bench) -> Findings:
    many = crowd(bench.repetition(0), streams=STREAMS, snapshots_each=SNAPSHOTS_EACH)
    _settle_in(many)
    times = 3 * bench.repetitions
    sensors = many.sensors()
    idle = str(SensorCursor(many.catalog.events.latest_sequence()))
    ticks = {
        "catalog sensor, nothing new": _ticks(many, sensors["catalog"], idle, times),
        f"catalog sensor, {FRESH} new checkpoints": _ticks_with_news(many, times),
        f"catalog sensor, first tick of a process, {EVENTS_IN_FIRST_TICK} new checkpoints": _first_ticks(many, times),
        f"supervisor sensor, {STREAMS} running streams": _ticks(many, sensors["supervisor"], None, times),
        f"health sensor, {STREAMS_PER_TICK} streams in turn": _ticks(many, sensors["health"], "0", times),
    }
    kept = _bytes_of_events(bench.repetition(1), many)
    return Findings(
        tables=(_tick_table(ticks, many.rows), _byte_table(kept)), targets=tuple(_targets(ticks)), versions={}
    )


def _settle_in(many: Crowd) -> None:
    """Let the assets that the ticks look at have what they would have: a report, and evaluations of their checks."""
    many.resume(FRESH)
    sensors = many.sensors()
    many.store(many.tick(sensors["catalog"], str(SensorCursor(many.sequence))))
    many.sequence = many.catalog.events.latest_sequence()
    many.store(many.tick(sensors["health"], "0"))


def _ticks(many: Crowd, sensor: dg.SensorDefinition, cursor: str | None, times: int) -> list[Sample]:
    many.beat()
    many.tick(sensor, cursor)
    return [timed(lambda: many.tick(sensor, cursor)) for _ in range(times)]


def _ticks_with_news(many: Crowd, times: int) -> list[Sample]:
    """Ticks of one process, one after the other: each has new checkpoints, and what it reports is stored."""
    sensor = many.sensors()["catalog"]
    cursor = str(SensorCursor(many.sequence))
    samples: list[Sample] = []
    # What remains of the first one, which does not take as many, comes with the second.
    for _ in range(2 + times):
        many.resume(FRESH)
        sample, result = _timed(many, sensor, cursor)
        samples.append(sample)
        many.store(result)
        cursor = result.cursor
    many.sequence = many.catalog.events.latest_sequence()
    return samples[2:]


def _first_ticks(many: Crowd, times: int) -> list[Sample]:
    """First ticks of a process, where `FRESH` checkpoints are new. Warm, except for what a sensor remembers."""
    many.resume(FRESH)
    cursor = str(SensorCursor(many.sequence))
    return [_timed(many, many.sensors()["catalog"], cursor)[0] for _ in range(times)]


def _timed(many: Crowd, sensor: dg.SensorDefinition, cursor: str) -> tuple[Sample, Any]:
    results: list[Any] = []
    sample = timed(lambda: results.append(many.tick(sensor, cursor)))
    return sample, results[0]


def _bytes_of_events(folder: Path, many: Crowd) -> dict[str, float]:
    """Bytes that a Dagster instance on SQLite grows by with one event of each kind."""
    stream = many.streams[0]
    snapshot = many.catalog.history.newest_of([stream.stream_id])[stream.stream_id]
    tally = SnapshotTally(60, 60_000, 60_000_000)
    event = EventRecord(1, stream.stream_id, EventType.CHECKPOINT_COMPLETED, snapshot.snapshot_id, None, {}, 1)
    failed = replace(event, type=EventType.CHECKPOINT_FAILED, payload={"reason": "IO_EXCEPTION: the disk is full"})
    [check, *_] = many.tick(many.sensors()["health"], str(STREAMS_PER_TICK)).asset_events
    kinds: dict[str, Callable[[int], Any]] = {
        "checkpoint": lambda n: materialization(stream.key, replace(event, sequence=n), snapshot, tally),
        "failed checkpoint": lambda n: failure_observation(stream.key, replace(failed, sequence=n)),
        "health check": lambda _: check,
    }
    return {
        name: _grows_by(folder / name.replace(" ", "-"), map(make, range(REPORTED))) for name, make in kinds.items()
    }


def _grows_by(folder: Path, reports: Iterable[Any]) -> float:
    folder.mkdir(parents=True)
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        before = _database_bytes(folder)
        for report in reports:
            instance.report_runless_asset_event(report)
        return (_database_bytes(folder) - before) / REPORTED


def _database_bytes(folder: Path) -> int:
    """What the databases hold, once SQLite has emptied its write-ahead logs: they are no growth."""
    for path in folder.rglob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return tree_size(folder).bytes


def _tick_table(ticks: dict[str, list[Sample]], rows: int) -> Table:
    return Table(
        title="A tick",
        headings=("", "median ms", "min ms", "CPU ms"),
        rows=tuple(
            (
                what,
                f"{_median_ms(samples):.1f}",
                f"{min(sample.wall_s for sample in samples) * 1000:.1f}",
                f"{statistics.median(sample.cpu_s for sample in samples) * 1000:.1f}",
            )
            for what, samples in ticks.items()
        ),
        note=(
            f"The catalog has {rows:,} rows. A tick takes at most {EVENTS_PER_TICK} events; the next tick continues."
        ),
    )


def _byte_table(kept: dict[str, float]) -> Table:
    checkpoint, failed, check = kept["checkpoint"], kept["failed checkpoint"], kept["health check"]
    rows = [
        (
            f"a checkpoint every {every_s} s",
            f"{DAY_S // every_s:,}",
            _mb(DAY_S / every_s * checkpoint),
            f"{min(REPORTS_A_DAY, DAY_S // every_s):,}",
            _mb(min(REPORTS_A_DAY, DAY_S / every_s) * checkpoint),
        )
        for every_s in CHECKPOINT_EVERY_S
    ]
    rows.append(
        ("failures every second", f"{DAY_S:,}", _mb(DAY_S * failed), f"{REPORTS_A_DAY:,}", _mb(REPORTS_A_DAY * failed))
    )
    checks = len(HealthCheck)
    looks = DAY_S // 30 * checks
    rows.append(
        (
            f"{checks} health checks, looked at every 30 s",
            f"{looks:,}",
            _mb(looks * check),
            f"{checks}",
            _mb(checks * check),
        )
    )
    return Table(
        title="What Dagster keeps of one stream, in a day",
        headings=("", "events if each is reported", "MB", "events reported", "MB"),
        rows=tuple(rows),
        note=(
            f"SQLite, {REPORTED} events of each kind in a separate instance: {checkpoint:,.0f} bytes per "
            f"checkpoint, {failed:,.0f} per failed one, {check:,.0f} per evaluation of a "
            "check. The figures for a day follow from these."
        ),
    )


def _targets(ticks: dict[str, list[Sample]]) -> Iterable[Target]:
    for what, samples in ticks.items():
        yield at_most(f"{what}: a tick", TICK_MS, _median_ms(samples), unit="ms")


def _median_ms(samples: list[Sample]) -> float:
    return statistics.median(sample.wall_s for sample in samples) * 1000


def _mb(size: float) -> str:
    return f"{size / 1e6:.2f}"


SENSORS = Section(
    name="sensors",
    title="Sensors",
    method=(
        f"{STREAMS:,} running streams, each with {SNAPSHOTS_EACH} checkpoints in a catalog on SQLite, and a "
        "Dagster instance on SQLite with a run for each stream. A tick is the evaluation that the daemon requests, "
        "from opening the catalog to the result, without Dagster's storing of the reports."
    ),
    measure=_measure,
)
