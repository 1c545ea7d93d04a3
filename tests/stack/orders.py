"""The flights of 2013 as records of topic `orders`, by their carrier, and what has to become of them."""

from __future__ import annotations

import json
import uuid
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from examples.flights.flights import load_flights

_COLUMNS = ["origin", "dest", "carrier", "flight", "tailnum"]
Row = tuple[str, str]


class Orders:
    """What was put into topic `orders`.

    Args:
        servers: The broker.
    """

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._flights = load_flights().flights[_COLUMNS].itertuples(index=False)
        self.sold: Counter[Row] = Counter()

    def sell(self, number: int) -> None:
        """Put so many flights into the topic, and wait until the broker has each of them once."""
        producer = Producer({"bootstrap.servers": self._servers, "enable.idempotence": True, "acks": "all"})
        for _ in range(number):
            flight = next(self._flights)
            value = json.dumps({"number": self.sold.total(), **{name: str(getattr(flight, name)) for name in _COLUMNS}})
            producer.produce("orders", key=flight.carrier, value=value)
            self.sold[flight.carrier, value] += 1
        assert producer.flush(60) == 0

    @property
    def by_shop(self) -> dict[str, int]:
        """How many each shop has sold."""
        counts: Counter[str] = Counter()
        for (shop, _), times in self.sold.items():
            counts[shop] += times
        return dict(counts)


def published_counts(servers: str) -> dict[str, list[int]]:
    """Every count of each shop in topic `shop-counts`, in order, as a consumer of committed records sees them."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": f"reader-{uuid.uuid4().hex}",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    try:
        partitions = consumer.list_topics("shop-counts", timeout=60).topics["shop-counts"].partitions
        consumer.assign([TopicPartition("shop-counts", partition, 0) for partition in partitions])
        counts: defaultdict[str, list[int]] = defaultdict(list)
        open_ends = set(partitions)
        while open_ends:
            message = consumer.poll(60)
            assert message is not None
            error = message.error()
            if error is None:
                counts[(message.key() or b"").decode()].append(int(message.value() or b"0"))
            elif error.code() == KafkaError._PARTITION_EOF:
                open_ends.discard(message.partition())
            else:
                raise AssertionError(str(error))
        return dict(counts)
    finally:
        consumer.close()


def rows_of_table(folder: Path) -> Counter[Row]:
    """The rows of a table that a file sink writes, by the log of its committed files."""
    rows: Counter[Row] = Counter()
    for path in _committed(folder / "_spark_metadata"):
        table = pq.read_table(path, partitioning=None)
        rows.update(zip(table["shop"].to_pylist(), table["sold"].to_pylist(), strict=True))
    return rows


def _committed(log: Path) -> list[str]:
    if not log.is_dir():
        return []
    entries = [path for path in log.iterdir() if path.name[0].isdigit()]
    compacted = max((int(path.stem) for path in entries if path.suffix == ".compact"), default=-1)
    files: list[str] = []
    for entry in entries:
        if int(entry.stem) > compacted or (int(entry.stem) == compacted and entry.suffix == ".compact"):
            files += [json.loads(line)["path"].removeprefix("file://") for line in entry.read_text().splitlines()[1:]]
    return files
