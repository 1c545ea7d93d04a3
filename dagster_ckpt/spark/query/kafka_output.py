"""A described query that writes to Kafka in transactions: recognized by the option `kafka.transactional.id`.

Spark's own Kafka sink has no transactions. Given this option, its producer refuses every record, so
such a query never writes without them by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.modes import KAFKA_WRITERS, MOST_KAFKA_WRITERS, TRANSACTIONAL_ID

_SERVERS = "kafka.bootstrap.servers"
_PREFIX = re.compile(r"[\w.-]+")
_PLACE = re.compile(r"kafka://(?P<servers>[^/]+)/(?P<topic>[^/?]+)\?id=(?P<prefix>[\w.-]+)")


@dataclass(frozen=True)
class KafkaPlace:
    """A topic that a query writes to in transactions.

    Attributes:
        servers: `kafka.bootstrap.servers`.
        topic: The topic.
        prefix: Beginning of the ids of its transactions.
        writers: Number of writers.
        client: The options below `kafka.`, without that word; they may contain secrets.
    """

    servers: str
    topic: str
    prefix: str
    writers: int = 1
    client: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """How sinks, catalog and messages name it."""
        return f"kafka://{self.servers}/{self.topic}?id={self.prefix}"

    @staticmethod
    def parse(place: str) -> KafkaPlace | None:
        """The topic with a name; None if the name is another place's."""
        match = _PLACE.fullmatch(place)
        if match is None:
            return None
        client = _clients.get(match["servers"], {"bootstrap.servers": match["servers"]})
        return KafkaPlace(match["servers"], match["topic"], match["prefix"], client=client)


def kafka_sink_name(options: Mapping[str, str]) -> str | None:
    """The name of Spark's own Kafka sink that says where it writes; None if each row names its topic.

    Args:
        options: Options of the writer.
    """
    servers, topic = options.get(_SERVERS), options.get("topic")
    return f"KafkaTable[{servers.replace(' ', '')}/{topic}]" if servers and topic else None


# How the queries that were described in this process reach Kafka: a name carries no secrets.
_clients: dict[str, Mapping[str, str]] = {}


def kafka_place(options: Mapping[str, str]) -> KafkaPlace | None:
    """The topic that a described query writes to in transactions; None for any other query.

    Args:
        options: Options of the writer.

    Raises:
        OptionError: An option is missing or wrong.
    """
    prefix = options.get(TRANSACTIONAL_ID)
    if prefix is None:
        return None
    if not _PREFIX.fullmatch(prefix):
        raise OptionError(f"{TRANSACTIONAL_ID} is {prefix!r}. Use letters, digits, '.', '_' and '-'.")
    servers, topic = options.get(_SERVERS), options.get("topic")
    if not servers or not topic:
        missing = _SERVERS if not servers else "topic"
        raise OptionError(
            f"A query that writes to Kafka in transactions needs the option {missing}. All rows go to one topic; a "
            "column topic names no other."
        )
    writers = options.get(KAFKA_WRITERS, "1")
    if not writers.isdecimal() or not 1 <= int(writers) <= MOST_KAFKA_WRITERS:
        raise OptionError(f"{KAFKA_WRITERS} is {writers!r}. Give a number from 1 to {MOST_KAFKA_WRITERS}.")
    client = {
        name.removeprefix("kafka."): value
        for name, value in options.items()
        if name.startswith("kafka.") and name not in (TRANSACTIONAL_ID, KAFKA_WRITERS)
    }
    servers = servers.replace(" ", "")
    _clients[servers] = client
    return KafkaPlace(servers, topic, prefix, int(writers), client)
