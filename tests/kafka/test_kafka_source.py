"""A query over a real Kafka broker: a snapshot, a kill, a restore, and the counts of an uninterrupted run.

The broker and Spark's connector come from Maven Central. Where that cannot be reached these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_END, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_broker import Kafka
from kafka_program import SHOPS, STREAM, TOPIC

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client.health import Finding, HealthCheck, Verdict
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.recovery.source_inputs import InputStatus
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.values.durations import utc_time
from tests.support.thorough import either

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
SNAPSHOTTED, KILLED, ALL = 30, 45, 63
RETENTION_MS = 3 * 3_600_000


@dataclass(frozen=True)
class Trial:
    """What became of the program.

    Attributes:
        savepoint: Taken after SNAPSHOTTED sales.
        offsets: By topic and partition, those in the savepoint.
        health: The health checks while the query had read everything.
        preview: What a start from it would do, at KILLED sales.
        counts: The newest count of each shop at the end, after ALL sales.
        recovery: What the start after the kill began with.
        debugged: The log of a replay of the newest batch, and of one after its records were deleted.
        refusal: The log of a start whose next records were deleted from the topic.
    """

    savepoint: SnapshotRecord
    offsets: dict[str, dict[str, int]]
    health: dict[HealthCheck, Finding]
    preview: RewindPreview
    counts: dict[str, int]
    recovery: str
    refusal: str
    debugged: tuple[str, ...]


def newest_counts(folder: Path) -> dict[str, int]:
    path = folder / "counts.jsonl"
    counts: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        counts |= json.loads(line)["counts"]
    return counts


@contextmanager
def program(folder: Path, kafka: Kafka, first: int, beyond: int, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program in a process group of its own, which is killed at the end."""
    jars = ",".join(map(str, kafka.jars))
    code = str(Path(__file__).with_name("kafka_program.py"))
    with (folder / f"log-{kind}").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, code, str(folder), kafka.servers, str(first), str(beyond), kind],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_SUBMIT_ARGS": f"--jars {jars} --conf spark.ui.enabled=false pyspark-shell",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # It may have ended by itself, its JVM too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"the program ended by itself:\n{log.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"the condition did not come to hold:\n{log.read_text()[-5000:]}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def trial(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    folder = tmp_path_factory.mktemp("kafka-program")
    # Nothing is compacted yet: all records are in active segments.
    new = NewTopic(TOPIC, 2, 1, config={"cleanup.policy": "compact,delete", "retention.ms": str(RETENTION_MS)})
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    admin.create_topics([new])[TOPIC].result(DEADLINE_S)
    client = StreamExecutionEnvironment.get_execution_environment(folder=folder / "ckpt").client()

    def is_committed(sales: int) -> bool:
        if sum(newest_counts(folder).values()) < sales:
            return False
        positions = LiveDirectory(client.catalog.streams.get(STREAM).live_directory or "").positions()
        latest = client.catalog.executions.latest(STREAM)
        reported = (latest.progress or {}).get("batch_id") if latest is not None else None
        # Spark reports a batch, with the lag of its sources, after its commit.
        return positions.commit == positions.offset == reported

    with program(folder, kafka, 0, SNAPSHOTTED, "unbounded") as process:
        wait_for(lambda: is_committed(SNAPSHOTTED), process, folder / "log-unbounded")
        savepoint = client.trigger_savepoint(STREAM, label="snapshotted")
        health = {each.check: each for each in client.health(STREAM).findings}
        (folder / "asked").write_text(json.dumps([SNAPSHOTTED, KILLED]))
        (folder / "asked").rename(folder / "more")
        wait_for(lambda: is_committed(KILLED), process, folder / "log-unbounded")
    (folder / "more").unlink()
    preview = client.preview_rewind(STREAM, start_from="snapshotted")
    entry = f"offsets/{savepoint.batch_id}"
    entries: list[bytes] = []
    open_store(FileSystemCheckpointStorage(f"file://{folder / 'ckpt/snapshots'}"), STREAM).extract(
        savepoint.location or "", lambda _, chunks: entries.append(b"".join(chunks)), only=entry.__eq__
    )
    (offsets,) = parse_offset_entry(entries[0], entry).sources.values()
    shutil.rmtree(folder / "ckpt/live")
    with program(folder, kafka, KILLED, ALL, "bounded") as process:
        process.wait(DEADLINE_S)
        assert process.returncode == 0, (folder / "log-bounded").read_text()[-5000:]
    latest = client.catalog.executions.latest(STREAM)
    recovery = str((latest.recovery or {})["kind"]) if latest is not None else ""
    counts = newest_counts(folder)
    debugs = either(quick=lambda: "", thorough=lambda: debug(folder, kafka))
    debugged = [debugs()]
    produce_and_delete(kafka.servers)
    debugged.append(debugs())
    with program(folder, kafka, ALL, ALL, "refused") as process:
        assert process.wait(DEADLINE_S) != 0
    refusal = (folder / "log-refused").read_text()
    assert newest_counts(folder) == counts
    create_again_with_one_partition(kafka.servers)
    debugged.append(debugs())
    return Trial(savepoint, json.loads(offsets or "{}"), health, preview, counts, recovery, refusal, tuple(debugged))


def debug(folder: Path, kafka: Kafka) -> str:
    with program(folder, kafka, ALL, ALL, "debugged") as process:
        assert process.wait(DEADLINE_S) == 0, (folder / "log-debugged").read_text()[-5000:]
    return (folder / "log-debugged").read_text()


def produce_and_delete(servers: str) -> None:
    """Let the topic have records that the query has not read, and delete them, as its retention does."""
    producer = Producer({"bootstrap.servers": servers})
    for partition in range(2):
        for _ in range(5):
            producer.produce(TOPIC, b"late", key=b"0", partition=partition)
    producer.flush()
    admin = AdminClient({"bootstrap.servers": servers})
    to_the_end = [TopicPartition(TOPIC, partition, OFFSET_END) for partition in range(2)]
    for deleted in admin.delete_records(to_the_end).values():
        deleted.result(30)


def create_again_with_one_partition(servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_topics([TOPIC])[TOPIC].result(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(DEADLINE_S)
        except KafkaException:
            # The old one is still being deleted.
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_offsets_in_a_snapshot_are_those_of_its_batch(trial: Trial) -> None:
    assert list(trial.offsets) == [TOPIC]
    assert sum(trial.offsets[TOPIC].values()) == SNAPSHOTTED


def test_the_snapshot_has_the_lag_of_each_partition_and_health_reports_it(trial: Trial) -> None:
    properties = trial.savepoint.properties or {}
    assert properties["records_behind"] == {f"{TOPIC}-0": 0, f"{TOPIC}-1": 0}
    lag = trial.health[HealthCheck.SOURCE_LAG]
    assert lag.verdict is Verdict.PASS
    assert lag.figures["records_behind"] == 0


def test_health_knows_how_long_the_topic_retains_records(trial: Trial) -> None:
    retention = trial.health[HealthCheck.SOURCE_RETENTION]
    assert retention.verdict is Verdict.WARN
    assert utc_time(trial.savepoint.created_at_ms + RETENTION_MS) in retention.message


def test_the_preview_does_not_promise_every_record_of_a_compacted_topic(trial: Trial) -> None:
    (source,) = trial.preview.inputs
    assert source.status is InputStatus.UNKNOWN
    assert f"topic {TOPIC} is compacted" in source.reason


def test_the_preview_counts_the_records_that_are_read_again(trial: Trial) -> None:
    (source,) = trial.preview.sources
    assert (source.kind, source.count) == ("Kafka records", KILLED - SNAPSHOTTED)


def test_a_killed_query_whose_live_directory_is_lost_goes_on_from_its_snapshot(trial: Trial) -> None:
    # The journal has the batch that was killed, or not yet.
    assert trial.recovery in ("RESTORE", "REPLAY")


def test_a_start_whose_next_records_are_gone_is_refused_before_anything_changes(trial: Trial) -> None:
    assert "the source does not have the records that its next batch would read" in trial.refusal
    assert "5 records were deleted" in trial.refusal


def test_each_record_is_counted_once(trial: Trial) -> None:
    assert trial.counts == {str(shop): ALL // SHOPS for shop in range(SHOPS)}


@pytest.mark.thorough
def test_a_batch_is_debugged_until_the_topic_has_deleted_its_records(trial: Trial) -> None:
    replayed, refused, with_fewer_partitions = trial.debugged
    # How many records the batch has follows from their partitions.
    assert re.search(rf"read [1-9]\d? records, gave {SHOPS} counts, ", replayed)
    assert "when it ran first" not in replayed
    assert "the sources no longer have the input of batch" in refused
    assert "records were deleted" in refused
    assert f"Topic {TOPIC} no longer has partition 1" in with_fewer_partitions
