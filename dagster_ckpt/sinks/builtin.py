"""Spark's own sinks that remember no batch: console, memory, noop, `foreachBatch` and `foreach`.

In `foreachBatch` and `foreach` the user's function decides what becomes of a repeated batch. Spark calls every
`foreachBatch` query `ForeachBatchSink`. If the writer has the option `path` or
`table`, the package adds it: `ForeachBatchSink[sqlite:/data/totals.db]`. A kind of sink of your own
is recognized by that name.
"""

from __future__ import annotations

import re
from typing import Self

from dagster_ckpt.sinks.sink import OnRepeat, Sink, SinkEffect
from dagster_ckpt.spark.query.description import FOREACH_BATCH, foreach_batch_name

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


_FOREACH_BATCH = re.compile(r"ForeachBatchSink(\[(?P<place>.+)\])?")
_FOREACH = re.compile(r"Foreach.*")


class ForeachBatchSink(Sink):
    """A function that is called with each batch."""

    # Nothing is known, so nothing speaks against a second stream.
    knows_queries = True

    reason = "The function is called again for batch numbers it has seen, with other rows: it depends on what it does."
    advice = (
        "A function that keeps its own record of batch numbers, such as Delta's txnVersion, has to forget these. "
        "register_sink teaches the package such a sink."
    )

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _FOREACH_BATCH.fullmatch(name)
        return cls(name, match["place"]) if match else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """See `Sink.name_of`."""
        return foreach_batch_name(place) if output_format == FOREACH_BATCH else None


class ForeachSink(Sink):
    """A writer that is called with each row."""

    reason = "The writer gets the rewound rows once more: it depends on what it does."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _FOREACH.fullmatch(name) else None
