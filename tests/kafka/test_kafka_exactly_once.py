"""A real query into a real topic through `kafka_delivery(Semantic.EXACTLY_ONCE)`, killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from exactly_once_program import ROWS, STREAM, Run, write_input
from kafka_broker import Kafka
from kafka_rows import committed_rows, new_topic

from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.thorough import either

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
DEADLINE_S = 240.0
STEPS = ["init_transactions", "begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction"]
# Calls 1 to 3 claim, and a Python worker keeps its producer: later batches may initialize none.
AT_CALL = {"init_transactions": 5, "produce": 90}


def once(files: int) -> dict[str, int]:
    return {str(number): 1 for number in range(files * ROWS)}


class Copying:
    """The program, run as often as it takes.

    Args:
        folder: Its folder.
        kafka: The broker.
        files: Number of files of its input.
    """

    def __init__(self, folder: Path, kafka: Kafka, files: int) -> None:
        self.folder = folder
        self.how = Run(str(folder), kafka.servers, new_topic(kafka.servers))
        write_input(folder / "input", 0, files)

    def run(self, *, die_at: str = "", dies_when: Callable[[], bool] = lambda: False, **how: Any) -> int:
        """Run it once; returns its exit code. It is killed as soon as `dies_when` returns True."""
        path = f"{HERE / 'mortal_workers'}:{ROOT}" if die_at else str(ROOT)
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYSPARK_PYTHON": sys.executable,
            "DIE_AT": die_at and f"{die_at}:{self.folder / 'calls'}",
        }
        program = [sys.executable, str(HERE / "exactly_once_program.py"), json.dumps(asdict(replace(self.how, **how)))]
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                ["sh", "-c", 'export MORTAL_GROUP=$$; exec "$@"', "sh", *program],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + DEADLINE_S
        try:
            while process.poll() is None and not dies_when():
                assert time.monotonic() < deadline, self.said()
                time.sleep(0.02)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            (self.folder / "calls").unlink(missing_ok=True)

    def finish(self, **how: Any) -> None:
        assert self.run(**how) == 0, self.said()

    def said(self) -> str:
        return (self.folder / "log").read_text()[-8000:]

    def rows(self) -> dict[str, int]:
        return dict(committed_rows(self.how.servers, self.how.topic))


def test_each_row_is_seen_once_after_the_driver_and_a_worker_were_killed_within_a_batch(
    kafka: Kafka, tmp_path: Path
) -> None:
    copying = Copying(tmp_path, kafka, files=5)
    # Calls 1 to 3 claim. The third batch: the first of three shares is committed, and everything dies.
    assert copying.run(die_at="all:commit_transaction:after:10") == -signal.SIGKILL, copying.said()
    part = sum(copying.rows().values())
    assert 2 * ROWS < part < 3 * ROWS
    if either(quick=False, thorough=True):
        # Then a worker alone, in a later batch: the query fails, and the next start runs its share again.
        assert copying.run(die_at="worker:commit_transaction:before:7") != 0
    copying.finish()

    assert copying.rows() == once(5)
    with copying.how.client() as client:
        (sink,) = client.catalog.executions.last_sinks(STREAM)
    assert sink == f"ForeachBatchSink[kafka://{copying.how.servers}/{copying.how.topic}?id={copying.how.topic}]"


def with_savepoint_two(folder: Path, kafka: Kafka, files: int, *, distinct: bool = False) -> Copying:
    """A query that has written some files, and a savepoint after two of them."""
    copying = Copying(folder, kafka, files=2)
    copying.how = replace(copying.how, distinct=distinct)
    copying.finish()
    with copying.how.client() as client:
        client.trigger_savepoint(STREAM, label="two")
    write_input(folder / "input", 2, files)
    copying.finish()
    return copying


@pytest.mark.thorough
def test_a_rewound_query_is_refused_and_writes_again_with_a_new_query_id(kafka: Kafka, tmp_path: Path) -> None:
    copying = with_savepoint_two(tmp_path, kafka, files=4)
    with copying.how.client() as client:
        preview, anew = (
            client.preview_rewind(STREAM, start_from=StartFrom("two", new_query_id=new_query_id))
            for new_query_id in (False, True)
        )
    assert [each.effect for each in preview.sinks] == [SinkEffect.IRREVERSIBLE]
    assert "batches 2 to 3, which cannot be removed" in preview.sinks[0].reason
    assert [each.effect for each in anew.sinks] == [SinkEffect.DUPLICATE]

    assert copying.run(start_from="two") != 0
    assert "SinkRollbackError" in copying.said()
    assert copying.rows() == once(4)

    copying.finish(start_from="two", new_query_id=True)
    assert copying.rows() == once(2) | {str(number): 2 for number in range(2 * ROWS, 4 * ROWS)}


@pytest.mark.thorough
def test_a_start_after_a_long_pause_that_kafka_does_not_answer_plans_no_batch_so_that_the_next_needs_no_marker(
    kafka: Kafka, tmp_path: Path
) -> None:
    copying = Copying(tmp_path, kafka, files=1)
    copying.finish()
    delete_markers(kafka, copying.how.topic)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as catalog, catalog:
        catalog.execute("UPDATE executions SET heartbeat_at_ms = heartbeat_at_ms - ?", [7 * 24 * 3_600_000])
    write_input(tmp_path / "input", 1, 2)

    assert copying.run(servers="127.0.0.1:9") != 0
    assert f"topic {copying.how.topic}" in copying.said()
    assert "Start again when it answers." in copying.said()
    copying.finish()

    assert copying.rows() == once(2)


@pytest.mark.kafka_matrix
def test_a_replay_that_is_killed_on_the_way_writes_no_row_again(kafka: Kafka, tmp_path: Path) -> None:
    copying = with_savepoint_two(tmp_path, kafka, files=9, distinct=True)
    shutil.rmtree(tmp_path / "live")
    write_input(tmp_path / "input", 9, 10)
    # Only the state of the replayed batches knows these lines.
    shutil.copy(tmp_path / "input/005.txt", tmp_path / "input/010.txt")

    def has_replayed_a_part() -> bool:
        return len(list((tmp_path / "live").glob("*/*.replayed/commits/[4-6]"))) > 1

    assert copying.run(dies_when=has_replayed_a_part) == -signal.SIGKILL, copying.said()
    assert copying.rows() == once(9)
    copying.finish()

    assert copying.rows() == once(10)
    with copying.how.client() as client:
        last = client.catalog.executions.latest(STREAM)
    assert last is not None
    assert (last.recovery or {})["kind"] == RecoveryKind.REPLAY.value


@pytest.mark.kafka_matrix
@pytest.mark.parametrize("process", ["all", "worker"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_each_row_is_seen_once_after_a_kill_at_each_step(
    kafka: Kafka, tmp_path: Path, step: str, when: str, process: str
) -> None:
    copying = Copying(tmp_path, kafka, files=4)
    assert copying.run(die_at=f"{process}:{step}:{when}:{AT_CALL.get(step, 8)}") != 0
    copying.finish()

    assert copying.rows() == once(4)


@pytest.mark.kafka_matrix
@pytest.mark.parametrize("chosen", ["offset", "time"])
def test_a_poison_record_is_skipped_by_a_start_from_chosen_offsets(kafka: Kafka, tmp_path: Path, chosen: str) -> None:
    copying = Copying(tmp_path, kafka, files=0)
    source = new_topic(kafka.servers, partitions=1)
    how: dict[str, Any] = {"source": source, "jars": ",".join(map(str, kafka.jars))}
    produce(kafka, source, ["0", "1", "2"])
    copying.finish(**how)
    produce(kafka, source, ["poison"])
    time.sleep(0.01)
    later = datetime.now(UTC).isoformat(timespec="milliseconds")
    produce(kafka, source, ["3", "4"])
    assert copying.run(**how) != 0
    assert "poison" in copying.said()

    offsets = json.dumps({source: {"0": 4} if chosen == "offset" else later})
    copying.finish(**how, start_from="batch-0", source_offsets=offsets)

    assert copying.rows() == {str(number): 1 for number in range(5)}
    with copying.how.client() as client:
        latest = client.catalog.executions.latest(STREAM)
    assert latest is not None
    assert json.loads((latest.recovery or {})["source_offsets"]) == {source: {"0": 4}}


def delete_markers(kafka: Kafka, prefix: str) -> None:
    """What Kafka does after `offsets.retention.minutes`."""
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    groups = [each.group_id for each in admin.list_consumer_groups().result().valid]
    markers = [group for group in groups if group.startswith(f"{prefix}.")]
    assert markers
    for deleted in admin.delete_consumer_groups(markers).values():
        deleted.result()


def produce(kafka: Kafka, topic: str, values: list[str]) -> None:
    producer = Producer({"bootstrap.servers": kafka.servers})
    for value in values:
        producer.produce(topic, value.encode(), partition=0)
    producer.flush()
