"""What a `read_committed` consumer sees of a topic, and topics of a test's own."""

from __future__ import annotations

import uuid
from collections import Counter

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

DEADLINE_S = 60.0


def new_topic(servers: str, *, partitions: int = 3) -> str:
    topic = f"topic-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": servers})
    (created,) = admin.create_topics([NewTopic(topic, partitions, 1)]).values()
    created.result(DEADLINE_S)
    return topic


def committed_rows(servers: str, topic: str) -> Counter[str]:
    """How often each value is in a topic, for a consumer of committed transactions, up to the last stable offset."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": f"reader-{uuid.uuid4().hex}",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    try:
        partitions = consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        seen: Counter[str] = Counter()
        open_ends = set(partitions)
        while open_ends:
            message = consumer.poll(DEADLINE_S)
            assert message is not None, f"no answer for {topic}"
            error = message.error()
            if error is None:
                seen[(message.value() or b"").decode()] += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                open_ends.discard(message.partition())
            else:
                raise AssertionError(str(error))
        return seen
    finally:
        consumer.close()
