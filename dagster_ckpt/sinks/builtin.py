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
from dagster_ckpt.spark.query.output import FOREACH_BATCH, foreach_batch_name

_CONSOLE = re.compile(r".*Console(Table|Sink).*")
_MEMORY = re.compile(r"MemorySink.*|.*MemoryTable.*")
# Spark's own noop sink, and no other sink with such a word in its name.
_NOOP = re.compile(r"(org\.apache\.spark\.sql\.execution\.datasources\.noop\.)?NoopTable\$?(@[0-9a-f]+)?")


class ConsoleSink(Sink):
    """It prints each batch."""

    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "The rewound batches are printed again."

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

    reason = "Its table lives in the session: after a restart it contains only later rows."

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

    reason = (
        "The function is called again for batch numbers that it has seen, with other rows: the effect depends on the "
        "function."
    )
    advice = (
        "A function that keeps its own record of batch numbers, such as Delta's txnVersion, must forget these. "
        "Describe such a sink with register_sink."
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

    reason = "The writer receives the rewound rows again: the effect depends on the writer."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _FOREACH.fullmatch(name) else None
