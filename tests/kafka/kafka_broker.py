"""A real Kafka broker of the tests' own, and Spark's connector, from Maven Central by the Ivy that Spark brings."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dagster_ckpt.spark.versions import SparkRelease, installed_release
from tests.support.maven import from_maven, java
from tests.support.server import free_port

# Another broker: `KAFKA_BROKER=4.4.0`.
BROKER = ("org.apache.kafka", "kafka_2.13", os.environ.get("KAFKA_BROKER", "3.9.1"))
# Scala, the connector, and the module for its tokens, which no test here uses: the newest of each that Maven Central
# has for a release of Spark. There is none for 4.3; that of 4.2 talks to it as well.
CONNECTORS = {
    "3.5": ("2.12", "3.5.7", "3.5.7"),
    "4.0": ("2.13", "4.0.4", "4.0.0"),
    "4.1": ("2.13", "4.1.3", "4.1.1"),
    "4.2": ("2.13", "4.2.0", "4.2.0"),
    "4.3": ("2.13", "4.2.0", "4.2.0"),
}
CLIENT = [("org.apache.commons", "commons-pool2", "2.12.1"), ("org.apache.kafka", "kafka-clients", "3.9.1")]
DEADLINE_S = 180.0
CONFIGURATION = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
num.partitions=2
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
"""


@dataclass
class Kafka:
    """A running broker.

    Attributes:
        servers: Its address.
        jars: What Spark needs to talk to it.
        folder: Its jars and data.
    """

    servers: str
    jars: tuple[Path, ...]
    folder: Path
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with the data that it has."""
        command = [
            java(),
            "-Xmx256m",
            "-cp",
            f"{self.folder}/broker/*",
            "kafka.Kafka",
            f"{self.folder}/server.properties",
        ]
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        await_port(self._process, int(self.servers.rpartition(":")[2]), self.folder / "log")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def connector_of(release: SparkRelease) -> list[tuple[str, str, str]]:
    """The modules of Spark's connector for Kafka."""
    scala, connector, tokens = CONNECTORS[release.minor]
    return [
        ("org.apache.spark", f"spark-sql-kafka-0-10_{scala}", connector),
        ("org.apache.spark", f"spark-token-provider-kafka-0-10_{scala}", tokens),
    ]


@contextmanager
def running_broker(folder: Path) -> Iterator[Kafka]:
    """One broker that is its own controller (KRaft), with its jars and its data in a folder."""
    from_maven(folder / "broker", BROKER, "master")
    from_maven(folder / "broker", BROKER, "runtime")
    for module in connector_of(installed_release()) + CLIENT:
        from_maven(folder / "connector", module, "master")
    port, controller = free_port(), free_port()
    configuration = folder / "server.properties"
    configuration.write_text(CONFIGURATION.format(port=port, controller=controller, folder=folder))
    format_storage = ["kafka.tools.StorageTool", "format", "-t", "dagster-ckpt-tests-0001", "-c", str(configuration)]
    command = [java(), "-Xmx256m", "-cp", f"{folder}/broker/*"]
    subprocess.run([*command, *format_storage], check=True, capture_output=True, timeout=DEADLINE_S)
    kafka = Kafka(f"127.0.0.1:{port}", tuple(sorted((folder / "connector").glob("*.jar"))), folder)
    try:
        kafka.start()
        yield kafka
    finally:
        kafka.kill()


def await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            assert process.poll() is None, f"the broker ended by itself:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"the broker did not answer:\n{log.read_text()}"
            time.sleep(0.1)
