"""Spark's sinks for trials: console, memory and noop."""

from __future__ import annotations

import re
from typing import Self

from dagster_ckpt.sinks.sink import OnRepeat, Sink, SinkEffect

_CONSOLE = re.compile(r".*Console(Table|Sink).*")
_MEMORY = re.compile(r"MemorySink.*|.*MemoryTable.*")
# Spark's own noop sink, and no other sink with such a word in its name.
_NOOP = re.compile(r"(org\.apache\.spark\.sql\.execution\.datasources\.noop\.)?NoopTable\$?(@[0-9a-f]+)?")


class ConsoleSink(Sink):
    """It prints each batch."""

    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "The rewound batches are printed once more."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _CONSOLE.fullmatch(name) else None


class NoopSink(Sink):
    """It discards all rows."""

    effect = SinkEffect.EXACT
    reason = "It keeps nothing."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _NOOP.fullmatch(name) else None


class MemorySink(Sink):
    """A table in the session."""

    reason = "Its table lives in the session: after any restart it holds only what came since."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _MEMORY.fullmatch(name) else None
