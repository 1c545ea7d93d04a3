"""The markers of the transactional sink: who may write, and which batch is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from dagster_ckpt.errors import LeaseLostError, OptionError


@dataclass(frozen=True, order=True)
class Epoch:
    """Which of two live directories of a stream is the later one.

    Attributes:
        token: Token of the lease under which it was created.
        generation: Its number.
    """

    token: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Transactions:
    """Everything that a share needs to know of its sink and of the run that writes it.

    Attributes:
        client: Properties of the client, as librdkafka names them; they may contain secrets.
        topic: The topic. Its partition 0 names the markers.
        prefix: Beginning of the ids of transactions and groups; deployments that share a cluster have different ones.
        writers: Number of writers.
        deployment: Id of the deployment.
        stream: Id of the stream.
        query_id: Id of the query.
        epoch: The live directory that it runs in.
        owner: Identifies this start of the query.
    """

    client: Mapping[str, str] = field(repr=False)
    topic: str
    prefix: str
    writers: int
    deployment: str
    stream: str
    query_id: str
    epoch: Epoch
    owner: str

    def id_of(self, writer: int) -> str:
        """The `transactional.id` of a writer, and the name of the consumer group that holds its marker."""
        return f"{self.prefix}.{self.stream}.{writer}"


@dataclass(frozen=True)
class Marker:
    """What a writer has committed together with its newest share.

    Attributes:
        batch: The newest batch whose share it has written.
        query: Id of the query.
        deployment: Id of the deployment.
        stream: Id of the stream.
        token: See `Epoch`.
        generation: See `Epoch`.
        owner: The start of the query that may write.
        writers: Number of writers.
    """

    batch: int
    query: str
    deployment: str
    stream: str
    token: int
    generation: int
    owner: str
    writers: int

    @property
    def epoch(self) -> Epoch:
        """The live directory of its owner."""
        return Epoch(self.token, self.generation)

    def as_metadata(self) -> str:
        """The metadata of the committed offset."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "batch"})

    @staticmethod
    def of(group: str, offset: int, metadata: str | None) -> Marker | None:
        """Parse a committed offset; None if the group has none.

        Raises:
            OptionError: The group is not one of this sink.
        """
        if offset < 0:
            return None
        try:
            told = json.loads(metadata or "")
            return Marker(
                offset - 1,
                str(told["query"]),
                str(told["deployment"]),
                str(told["stream"]),
                int(told["token"]),
                int(told["generation"]),
                str(told["owner"]),
                int(told["writers"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"Consumer group {group!r} has committed offset {offset} with metadata {metadata!r}, which this sink "
                "did not write. The names of its groups begin with kafka.transactional.id: give the sink one that "
                "no other application uses."
            ) from error


def refuse_others(target: Transactions, writer: int, marker: Marker | None) -> None:
    """Pass a marker that a run may claim.

    Raises:
        LeaseLostError: A later run owns it.
        OptionError: Another deployment does, or another stream: `shop.eu` and stream `orders` have the ids of `shop`
            and stream `eu.orders`.
    """
    if marker is None:
        return
    is_anothers = (marker.deployment, marker.stream) != (target.deployment, target.stream)
    # A catalog that was lost and rebuilt may be another deployment; the query is the same.
    if marker.query != target.query_id and is_anothers:
        raise OptionError(
            f"Transactions {target.id_of(writer)} on topic {target.topic} belong to deployment {marker.deployment}, "
            f"stream {marker.stream!r}, and this is deployment {target.deployment}, stream {target.stream!r}. Nothing "
            "was written. Give the sink another kafka.transactional.id."
        )
    if marker.epoch > target.epoch:
        raise replaced(target, writer)


def replaced(target: Transactions, writer: int) -> LeaseLostError:
    """The error of a run whose marker belongs to a later one."""
    return LeaseLostError(
        f"Writer {writer} of topic {target.topic} belongs to a later run of stream {target.stream!r}: this process was "
        "replaced. Nothing was written."
    )
