"""Many streams that run for long: a catalog and a Dagster instance as they are after a while, and their sensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.database import as_text
from dagster_ckpt.catalog.records import SOURCE_IDENTITIES, EventType, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.catalog.tables import event_counter, events, executions, snapshots
from dagster_ckpt.catalog.tables import streams as stream_table
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.catalog_sensor import build_catalog_sensor
from dagster_ckpt.orchestration.checks import build_health_sensor
from dagster_ckpt.orchestration.jobs.operator_jobs import ROLL_BACK_JOB, build_operator_jobs
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor
from dagster_ckpt.spark.query.sources import FILE, PATH
from dagster_ckpt.values.durations import wall_clock_ms

MINUTE_MS = 60_000
# What nearly every checkpoint is: completed, and by now subsumed.
_RETAINED = 3
_PROGRESS = {
    "batch_id": 7,
    "batch_ms": 300,
    "input_rows": 1000,
    "state_rows": 1_000_000,
    "state_memory": 1_000_000,
    "watermark": "2026-01-01T00:00:00.000Z",
    "sources": [{"source": "FileStreamSource", "behind": 5}],
}
# As many streams stand behind each other, each of which reads what the one before writes.
_CHAIN = 5


@dataclass
class Crowd:
    """Streams with a past.

    Attributes:
        streams: Their assets.
        catalog: The catalog.
        instance: A Dagster instance on SQLite.
        rows: Rows in the catalog.
        sequence: The last event that the sensors have seen.
        rounds: Checkpoints that each of the streams which go on has taken.
    """

    streams: list[StreamingAsset]
    catalog: Catalog
    instance: dg.DagsterInstance
    resource: CheckpointCatalogResource
    rows: int
    sequence: int
    rounds: int

    def sensors(self) -> dict[str, dg.SensorDefinition]:
        """The sensors of a code location with all these streams."""
        jobs = {job.name: job for job in build_operator_jobs(self.streams)}
        retention, roll_back = jobs["apply_retention_job"], jobs[ROLL_BACK_JOB]
        return {
            "catalog": build_catalog_sensor(self.streams),
            "supervisor": build_supervisor_sensor(self.streams, retention, roll_back),
            "health": build_health_sensor(self.streams),
        }

    def tick(self, sensor: dg.SensorDefinition, cursor: str | None) -> Any:
        """Evaluate a sensor as the daemon does; nothing is stored."""
        context = dg.build_sensor_context(self.instance, cursor=cursor, resources={"checkpoint_catalog": self.resource})
        return sensor.evaluate_tick(context)

    def beat(self) -> None:
        """Let all streams give a sign of life, as they do every two seconds."""
        with self.catalog.database.writing() as connection:
            connection.execute(executions.update().values(heartbeat_at_ms=wall_clock_ms()))

    def resume(self, streams: int) -> None:
        """Let so many of the streams take their next checkpoint, a minute after the one before."""
        stream_ids = [stream.stream_id for stream in self.streams[:streams]]
        sequence = self.catalog.events.latest_sequence()
        at_ms = wall_clock_ms() + self.rounds * MINUTE_MS
        _checkpoints(self.catalog, stream_ids, self.rounds, sequence, at_ms=at_ms, deleted=False)
        self.rounds += 1

    def store(self, result: Any) -> None:
        """Store what a tick reports."""
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)


def crowd(folder: Path, *, streams: int, snapshots_each: int, url: str | None = None) -> Crowd:
    """Make streams that all run, each with checkpoints once a minute up to now.

    Args:
        folder: An empty folder.
        streams: How many.
        snapshots_each: Checkpoints of each.
        url: An empty database; default: SQLite in that folder.
    """
    url = url or f"sqlite:///{folder / 'catalog.db'}"
    catalog = Catalog(url)
    (folder / "dagster").mkdir()
    instance = dg.DagsterInstance.local_temp(str(folder / "dagster"))
    assets = [_stream(f"stream_{number:04}") for number in range(streams)]
    now_ms = wall_clock_ms()
    _streams(catalog, instance, assets, now_ms)
    began_ms = now_ms - (snapshots_each + 1) * MINUTE_MS
    sequence = 0
    for number in range(snapshots_each):
        sequence = _checkpoints(
            catalog,
            [stream.stream_id for stream in assets],
            number,
            sequence,
            at_ms=began_ms + number * MINUTE_MS,
            deleted=number < snapshots_each - _RETAINED,
        )
    rows = 2 * streams + snapshots_each * streams + sequence
    return Crowd(assets, catalog, instance, CheckpointCatalogResource(url=url), rows, sequence, snapshots_each)


def _stream(name: str) -> StreamingAsset:
    @streaming_asset(name=name, checkpointing=CheckpointConfig(interval=MINUTE_MS))
    def stream(context: Any) -> Any: ...

    return stream


def _streams(catalog: Catalog, instance: dg.DagsterInstance, streams: list[StreamingAsset], now_ms: int) -> None:
    runs = [
        instance.add_run(dg.DagsterRun(f"{stream.name}_stream", status=dg.DagsterRunStatus.STARTED))
        for stream in streams
    ]
    with catalog.database.writing() as connection:
        connection.execute(
            stream_table.insert(),
            [
                {
                    "stream_id": stream.stream_id, "name": stream.stream_id,
                    "asset_key": stream.stream_id, "options": "{}",
                    "live_directory": f"/live/{number}", "live_generation": 1, "timeline": 0, "next_number": 1,
                    "created_at_ms": 1, "updated_at_ms": 1,
                }
                for number, stream in enumerate(streams)
            ],
        )  # fmt: skip
        connection.execute(
            executions.insert(),
            [
                {
                    "execution_id": f"execution-{stream.stream_id}", "stream_id": stream.stream_id, "ordinal": 1,
                    "run_id": run.run_id, "cause": "MANUAL", "status": "RUNNING", "settled": False, "host": "host",
                    "pid": 1, "started_at_ms": 1, "heartbeat_at_ms": now_ms, "live_directory": f"/live/{number}",
                    "progress": as_text(_PROGRESS | {"sinks": [f"FileSink[file:/lake/{number}]"]}),
                    "recovery": as_text({SOURCE_IDENTITIES: [_source(number)]}),
                }
                for number, (stream, run) in enumerate(zip(streams, runs, strict=True))
            ],
        )  # fmt: skip


def _source(number: int) -> dict[str, Any]:
    folder = f"file:/lake/{number - 1}" if number % _CHAIN else f"file:/landing/{number}"
    return {"kind": FILE, "identity": {PATH: folder}}


def _checkpoints(
    catalog: Catalog, stream_ids: list[str], number: int, sequence: int, *, at_ms: int, deleted: bool
) -> int:
    """One checkpoint of each of these streams, with its events; returns the last sequence."""
    taken = [f"{stream_id}-{number}" for stream_id in stream_ids]
    status = SnapshotStatus.DELETED if deleted else SnapshotStatus.COMPLETED
    told = [EventType.CHECKPOINT_COMPLETED, *([EventType.SNAPSHOT_DELETED] if deleted else [])]
    with catalog.database.writing() as connection:
        connection.execute(
            snapshots.insert(),
            [
                {
                    "snapshot_id": snapshot_id, "stream_id": stream_id, "kind": "CHECKPOINT", "number": number + 1,
                    "status": status.value, "trigger": SnapshotTrigger.PERIODIC.value, "timeline": 0,
                    "location": f"file:///snapshots/{stream_id}/chk-{number + 1}",
                    "batch_id": number, "full_bytes": 10**9,
                    "incremental_bytes": 10**6, "rows": 1000, "state_rows": 10**6, "duration_ms": 300,
                    "properties": "{}", "created_at_ms": at_ms - 300, "completed_at_ms": at_ms,
                }
                for snapshot_id, stream_id in zip(taken, stream_ids, strict=True)
            ],
        )  # fmt: skip
        rows = list(_events(taken, stream_ids, told, sequence, at_ms))
        connection.execute(events.insert(), rows)
        last = sequence + len(rows)
        connection.execute(event_counter.update().values(last_sequence=last))
    return last


def _events(
    taken: list[str], stream_ids: list[str], told: list[EventType], sequence: int, at_ms: int
) -> Iterator[dict[str, Any]]:
    for snapshot_id, stream_id in zip(taken, stream_ids, strict=True):
        for kind in told:
            sequence += 1
            yield {
                "sequence": sequence, "stream_id": stream_id, "type": kind.value, "snapshot_id": snapshot_id,
                "payload": '{"batch_id":7}', "at_ms": at_ms,
            }  # fmt: skip
