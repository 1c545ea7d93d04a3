"""Tables that remember batches: what their forecasts share, tables known by name only, Hudi and Paimon."""

from __future__ import annotations

import re
from typing import Self

from dagster_ckpt.sinks.sink import OnRepeat, Replay, Sink, SinkEffect, SinkForecast

BATCH_MEMORY = "remembers batches by number"
_NOT_SHOWN = (
    "By its log each row will be there once, but no test with a real table shows that: no release of Delta or Iceberg "
    "runs a stream on Spark 4.3."
)
_NAMED = re.compile(r"[\w`-]+(?:\.[\w`-]+)+")
_HUDI_OR_PAIMON = re.compile(r"(?i).*(hoodie|hudi|paimon).*")


def forecast_remembered(sink: Sink, last_batch: int | None, replay: Replay, *, advice: str) -> SinkForecast:
    """Forecast a replay for a table that skips the batches it has of the query."""
    if last_batch is None or last_batch <= replay.to_batch:
        return unproven(sink, f"The table holds no batch of this query after {replay.to_batch}.")
    if last_batch == replay.in_flight:
        return unproven(sink, f"The table has batch {last_batch} already, and exactly that is replayed: passed over.")
    return SinkForecast(
        sink.name,
        SinkEffect.LOSE,
        f"The table {BATCH_MEMORY} and query id, up to {last_batch}: it passes over batches {replay.to_batch + 1} to "
        f"{last_batch}, and where they are cut differently than the first time, rows are lost.",
        advice,
    )


def unproven(sink: Sink, found: str) -> SinkForecast:
    """A forecast that the table's log supports, and no test with a real table."""
    return SinkForecast(
        sink.name,
        SinkEffect.UNPROVEN,
        f"{found} {_NOT_SHOWN}",
        "Start with accept_loss where you take that risk, and compare the table's rows afterwards.",
    )


def cannot_look(sink: Sink, kind: str, error: Exception) -> SinkForecast:
    """The forecast for a table whose log cannot be read from here."""
    return SinkForecast(
        sink.name,
        SinkEffect.LOSE,
        f"A {kind} table {BATCH_MEMORY} and query id, and its own log cannot be read from here ({error}): it may pass "
        "over the rewound batches.",
        "Roll the table back, or start with new_query_id and accept repeated rows.",
    )


class NamedTable(Sink):
    """A table known by its name in a catalog only: its forecast is the worst of the possible table formats."""

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name, name) if _NAMED.fullmatch(name) else None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        return forecast_named(self, replay)


def forecast_named(sink: Sink, replay: Replay) -> SinkForecast:
    """Forecast a replay for a table known by its catalog name."""
    if not replay.keeps_query_id:
        return SinkForecast(
            sink.name,
            SinkEffect.DUPLICATE,
            "A table known by name only. As another query, Iceberg takes the rewound batches once more.",
            "Roll the table back first.",
        )
    return SinkForecast(
        sink.name,
        SinkEffect.LOSE,
        "A table known by name only. Iceberg and Paimon pass over a batch number they have of a query, and a batch "
        "that is cut differently then loses rows.",
        "Roll the table back to the time of the batch; Iceberg then forgets the batches after it.",
    )


class HudiOrPaimonTable(Sink):
    """A Hudi or Paimon table, which is not inspected."""

    on_repeat = OnRepeat.RUNS
    is_proven = False
    effect = SinkEffect.LOSE
    reason = (
        "Hudi and Paimon note batch numbers in their commits and pass over those they have, under a name of their own "
        "that a new query id does not change."
    )
    advice = "Roll the table back to the batch (Hudi: a savepoint, or another checkpoint identifier), then start."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _HUDI_OR_PAIMON.fullmatch(name) else None
