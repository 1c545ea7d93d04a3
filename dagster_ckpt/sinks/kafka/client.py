"""The Kafka client of the transactional sink: its configuration, and what it reads of a topic without a transaction."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.sinks.kafka.marker import Marker, fields_of
from dagster_ckpt.sinks.kafka.session import PRODUCER_ONLY
from dagster_ckpt.sinks.sink import FoundSink
from dagster_ckpt.spark.query.output import KafkaPlace

# For processes that describe no query, such as the command line: properties of the client, a line each.
CLIENT_PROPERTIES = "DAGSTER_CKPT_KAFKA_PROPERTIES"
_LOOK_S = 20.0
_POLL_S = 0.1

# Names of the Java client, which Spark's users know, that librdkafka has under another one.
_RENAMED = {
    "max.request.size": "message.max.bytes",
    "reconnect.backoff.ms": "reconnect.backoff.ms",
    "ssl.keystore.password": "ssl.keystore.password",
}
# Of the Java client only, and without effect on what is written.
_DROPPED = frozenset(
    {"key.serializer", "value.serializer", "max.block.ms", "buffer.memory", "client.dns.lookup", "metadata.max.idle.ms"}
)
_LOGIN = re.compile(r"""(?P<name>username|password)\s*=\s*(?P<quote>["'])(?P<value>.*?)(?P=quote)""")
_JAVA_ONLY = {
    "ssl.truststore.location": "ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "ssl.ca.location (a PEM file needs no password)",
    "ssl.truststore.type": "ssl.ca.location (a PEM file)",
    "sasl.client.callback.handler.class": "sasl.oauthbearer.config",
    "sasl.login.callback.handler.class": "sasl.oauthbearer.config",
}


def client_properties(options: Mapping[str, str]) -> dict[str, str]:
    """Properties of librdkafka for the options of a writer, whose names may be those of the Java client.

    Args:
        options: Options below `kafka.`, without that word.

    Raises:
        OptionError: One has no counterpart.
    """
    properties: dict[str, str] = {}
    for name, value in options.items():
        if name in _JAVA_ONLY:
            raise OptionError(
                f"kafka.{name} is an option of the Java client, and the transactional sink uses librdkafka. Give "
                f"kafka.{_JAVA_ONLY[name]} instead."
            )
        if name == "sasl.jaas.config":
            properties |= _login(value)
        elif name not in _DROPPED:
            properties[_RENAMED.get(name, name)] = value
    return properties


def _login(jaas: str) -> dict[str, str]:
    found = {match["name"]: match["value"] for match in _LOGIN.finditer(jaas)}
    if set(found) != {"username", "password"}:
        raise OptionError(
            "kafka.sasl.jaas.config names no username and password. Give the transactional sink kafka.sasl.username "
            "and kafka.sasl.password, or the properties of librdkafka for your mechanism."
        )
    return {f"sasl.{name}": value for name, value in found.items()}


def markers_in_kafka(place: KafkaPlace) -> list[Marker]:
    """The markers of all streams that write to a topic with the same prefix.

    Raises:
        StorageAccessError: Kafka does not answer, or extra `kafka` is not installed.
        OptionError: Another version of this sink has written one.
    """
    try:
        from confluent_kafka import (  # noqa: PLC0415 - an extra
            ConsumerGroupTopicPartitions,
            KafkaException,
            TopicPartition,
        )
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise StorageAccessError("confluent-kafka is not installed. Run: pip install 'dagster-ckpt[kafka]'.") from error
    settings = _settings(place)
    down: list[str] = []

    def noted(reason: Any) -> None:
        if reason.name() == "_ALL_BROKERS_DOWN":
            down.append(str(reason))

    try:
        admin = AdminClient(settings | {"error_cb": noted, "socket.connection.setup.timeout.ms": "5000"})
        listing = admin.list_consumer_groups(request_timeout=_LOOK_S)
        while not listing.done() and not down:
            admin.poll(_POLL_S)
        if down and not listing.done():
            raise StorageAccessError(f"No broker of {place.servers} answers: {down[0]}.")
        groups = [each.group_id for each in listing.result().valid if may_hold_marker(place, each.group_id)]
        markers = []
        asked = [ConsumerGroupTopicPartitions(group, [TopicPartition(place.topic, 0)]) for group in groups]
        # The client takes one group a call: all are sent before the first answer is awaited.
        sent = [admin.list_consumer_group_offsets([each], request_timeout=_LOOK_S) for each in asked]
        for group, answers in zip(groups, sent, strict=True):
            (answer,) = answers.values()
            (committed,) = answer.result().topic_partitions
            # This look changes nothing, so the group of another application is passed over.
            if fields_of(committed.metadata) is not None:
                marker = Marker.of(group, committed.offset, committed.metadata)
                markers += [marker] if marker is not None else []
    except KafkaException as error:
        raise StorageAccessError(
            f"Kafka at {place.servers} did not return the offsets of the sink's markers: {error}. "
            "Start again when it answers."
        ) from error
    return markers


def topic_id(place: KafkaPlace) -> FoundSink | None:
    """The id of a topic, which another one made under the same name does not have.

    Returns:
        None if the client is not installed, or the brokers give topics no ids (before Kafka 2.8).

    Raises:
        StorageAccessError: Kafka does not answer.
        OptionError: An option of the client has no counterpart.
    """
    try:
        from confluent_kafka import KafkaError, KafkaException, TopicCollection  # noqa: PLC0415 - an extra
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    try:
        admin = AdminClient(_settings(place) | {"socket.connection.setup.timeout.ms": "5000"})
        asked = admin.describe_topics(TopicCollection([place.topic]), request_timeout=_LOOK_S)
        found = asked[place.topic].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return FoundSink(None)
        raise StorageAccessError(
            f"Kafka at {place.servers} did not say which topic {place.topic} is: {error}. Start again when it answers."
        ) from error
    identity = str(found.topic_id)
    return FoundSink(identity) if identity.strip("A=") else None


def _settings(place: KafkaPlace) -> dict[str, Any]:
    given = {**client_properties(place.client), **_from_file()}
    return {name: value for name, value in given.items() if name not in PRODUCER_ONLY}


def may_hold_marker(place: KafkaPlace, group: str) -> bool:
    """Whether a consumer group has the name of one that holds a marker (`Transactions.id_of`)."""
    return bool(re.fullmatch(rf"{re.escape(place.prefix)}\..+:{re.escape(place.topic)}:\d+", group))


def _from_file() -> dict[str, str]:
    path = os.environ.get(CLIENT_PROPERTIES)
    if path is None:
        return {}
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}
