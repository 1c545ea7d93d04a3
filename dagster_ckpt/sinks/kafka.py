"""Spark's Kafka sink: it writes without transactions and remembers no batch."""

from __future__ import annotations

import re
from typing import Self

from dagster_ckpt.sinks.sink import OnRepeat, Sink, SinkEffect

# Spark's name for it contains the class of the table, and no topic.
_NAME = re.compile(r".*Kafka(Table|Sink|SourceProvider).*")


class KafkaSink(Sink):
    """Kafka topics."""

    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "Kafka keeps no memory of batches: the records of the rewound ones are sent once more."
    advice = "Let consumers drop repeated keys; Spark does not write in transactions."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _NAME.fullmatch(name) else None
