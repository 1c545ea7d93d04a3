"""The crowd of the sensor bench is one that the sensors find as they would find a real one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.crowd import crowd
from benchmarks.sections.sensors import _byte_table
from dagster_ckpt.client.health import HealthCheck
from dagster_ckpt.orchestration.catalog_sensor import SensorCursor


def test_the_sensors_find_running_streams_with_a_past_and_new_checkpoints(tmp_path: Path) -> None:
    many = crowd(tmp_path, streams=3, snapshots_each=5)
    many.resume(2)
    many.beat()
    sensors = many.sensors()

    reported = many.tick(sensors["catalog"], str(SensorCursor(many.sequence))).asset_events
    checks = many.tick(sensors["health"], None).asset_events
    supervised = many.tick(sensors["supervisor"], None)

    assert [event.asset_key.to_user_string() for event in reported] == ["stream_0000", "stream_0001"]
    assert len(checks) == 3 * len(HealthCheck)
    assert not supervised.run_requests
    assert "no action needed" in supervised.skip_message


def test_a_day_is_computed_from_the_bytes_of_one_event() -> None:
    table = _byte_table({"checkpoint": 1000.0, "failed checkpoint": 500.0, "health check": 100.0})
    assert table.rows[0] == ("a checkpoint every 1 s", "86,400", "86.40", "1,440", "1.44")
    assert table.rows[2] == ("a checkpoint every 60 s", "1,440", "1.44", "1,440", "1.44")
