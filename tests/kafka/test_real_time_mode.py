"""Spark's real-time mode, from a topic to a topic: saved while it runs, killed, and going on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_broker import Kafka
from real_time_program import STREAM, topics_of

from dagster_ckpt import Client
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.thorough(sample="tests/spark/test_spark_guarantees.py"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
KEYS = 6


class Clicks:
    """Two topics, the stream between them, and what readers of the second one have seen of it."""

    def __init__(self, folder: Path, kafka: Kafka, keeps: str) -> None:
        self.folder, self.kafka, self.keeps = folder, kafka, keeps
        self.clicks, counts = topics_of(keeps)
        admin = AdminClient({"bootstrap.servers": kafka.servers})
        topics = [NewTopic(name, num_partitions=2, replication_factor=1) for name in (self.clicks, counts)]
        for made in admin.create_topics(topics).values():
            made.result(30)
        settings = {"bootstrap.servers": kafka.servers, "group.id": str(uuid.uuid4()), "auto.offset.reset": "earliest"}
        self.reader = Consumer(settings)
        self.reader.subscribe([counts])
        self.seen: list[tuple[int, int]] = []
        self.produced = 0

    def produce(self, clicks: int) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.servers})
        for number in range(self.produced, self.produced + clicks):
            value = number % KEYS if self.keeps == "state" else number
            producer.produce(self.clicks, str(value).encode(), partition=number % 2)
        producer.flush()
        self.produced += clicks

    @property
    def wanted(self) -> dict[int, int]:
        """By key, the newest value of an uninterrupted run."""
        numbers = range(self.produced)
        counts = Counter(number % KEYS for number in numbers)
        return dict(counts) if self.keeps == "state" else {number: number for number in numbers}

    def newest(self) -> dict[int, int]:
        while (message := self.reader.poll(0.2)) is not None:
            assert message.error() is None, message.error()
            self.seen.append((int(message.key()), int(message.value())))
        # Counts only grow, and keys have partitions of their own.
        found: dict[int, int] = {}
        for key, value in self.seen:
            found[key] = max(value, found.get(key, 0))
        return found

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        jars = ",".join(map(str, self.kafka.jars))
        code = str(Path(__file__).with_name("real_time_program.py"))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, code, str(self.folder), self.kafka.servers, self.keeps],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PYSPARK_PYTHON": sys.executable,
                    "PYSPARK_SUBMIT_ARGS": f"--jars {jars} pyspark-shell",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def await_all(self, process: subprocess.Popen[bytes]) -> None:
        self.wait(lambda: self.newest() == self.wanted, process)

    def wait(self, until: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert process.poll() is None, self.said()
            assert time.monotonic() < deadline, (self.newest(), self.said())

    def said(self) -> str:
        return (self.folder / "log").read_text()[-5_000:]

    def client(self) -> Client:
        return Client(catalog=f"sqlite:///{self.folder}/catalog.db", storage=f"file://{self.folder}/snapshots")


@pytest.mark.parametrize(
    "keeps",
    [
        pytest.param("nothing", marks=needs(Feature.REAL_TIME)),
        pytest.param("state", marks=needs(Feature.REAL_TIME_STATE)),
    ],
)
def test_killed_query_goes_on_with_exact_state(tmp_path: Path, kafka: Kafka, keeps: str) -> None:
    clicks = Clicks(tmp_path, kafka, keeps)
    clicks.produce(30)
    with clicks.running() as process, clicks.client() as client:
        clicks.await_all(process)
        savepoint = client.trigger_savepoint(STREAM, label="saved")
        assert savepoint.properties["mode"] == "REAL_TIME"
        clicks.produce(15)
        clicks.await_all(process)
    with clicks.running() as process, clicks.client() as client:
        clicks.produce(15)
        clicks.await_all(process)
        live = LiveDirectory(client.catalog.streams.get(STREAM).live_directory or "")
        at_savepoint = savepoint.batch_id or 0
        # The first batch of this process is committed.
        clicks.wait(lambda: (live.positions().commit or 0) > at_savepoint + 1, process)
        preview = client.preview_rewind(STREAM, start_from="saved")
    # The killed batch had not been committed, so its records were read again.
    assert len(clicks.seen) >= clicks.produced
    assert [(each.kind, each.count) for each in preview.sources] == [("Kafka records", 30)]
