"""Tables that remember batches: what their messages share, tables known by name only, Hudi and Paimon."""

from __future__ import annotations

import re
from typing import Self

from dagster_ckpt.sinks.sink import OnRepeat, Replay, Sink, SinkEffect, SinkForecast

BATCH_MEMORY = "remembers batches by number"
LEFT_TO_YOU = "which this stream leaves to you (roll_back_tables is False)"
_NAMED = re.compile(r"[\w`-]+(?:\.[\w`-]+)+")
_HUDI_OR_PAIMON = re.compile(r"(?i).*(hoodie|hudi|paimon).*")


def cannot_look(sink: Sink, kind: str, error: Exception) -> SinkForecast:
    """The forecast for a table whose log cannot be read from here."""
    return SinkForecast(
        sink.name,
        SinkEffect.LOSE,
        f"A {kind} table {BATCH_MEMORY} and query id, and its own log cannot be read from here ({error}): it may skip "
        "the rewound batches.",
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
        if not replay.keeps_query_id:
            return SinkForecast(
                self.name,
                SinkEffect.DUPLICATE,
                "A table known by name only. Under another query id, Paimon accepts the rewound batches again.",
                "Roll the table back first.",
            )
        return SinkForecast(
            self.name,
            SinkEffect.LOSE,
            "A table known by name only. Tables that record batch numbers skip the batches that they have of a query, "
            "and a batch with other boundaries then loses rows.",
            "Roll the table back to the time of the batch.",
        )


class HudiOrPaimonTable(Sink):
    """A Hudi or Paimon table, which is not inspected."""

    on_repeat = OnRepeat.RUNS
    is_proven = False
    effect = SinkEffect.LOSE
    reason = (
        "Hudi and Paimon record batch numbers in their commits and skip the batches that they have, under an "
        "identifier that a new query id does not change."
    )
    advice = "Roll the table back to the batch (Hudi: a savepoint, or another checkpoint identifier), then start."

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        return cls(name) if _HUDI_OR_PAIMON.fullmatch(name) else None
