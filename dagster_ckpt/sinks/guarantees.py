"""The delivery guarantees of a restored query, from its execution mode and its sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import OnRepeat, Sink
from dagster_ckpt.spark.checkpoint_dir.known_query import ExecutionMode


class Guarantee(StrEnum):
    EXACTLY_ONCE = "EXACTLY_ONCE"
    AT_LEAST_ONCE = "AT_LEAST_ONCE"


@dataclass(frozen=True)
class Guarantees:
    """They require sources that return the same rows for the same offsets (files, Kafka, rate; not a socket).

    Attributes:
        state: Also for its position in the input.
        unaligned: Whether a snapshot may include the batch in flight, so that exactly it is replayed.
    """

    mode: ExecutionMode
    state: Guarantee
    sink: Guarantee
    unaligned: bool
    why: str

    def properties(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "guarantee": {
                "state": self.state.value,
                "sink": self.sink.value,
                "unaligned": self.unaligned,
                "why": self.why,
            },
        }


_AT_LEAST_ONCE_MODES = {
    ExecutionMode.ASYNC_PROGRESS: (
        "Asynchronous progress tracking leaves batches out of both logs, and the input after the newest batch in both "
        "is divided into new batches. The query has no state; its sink receives those rows again, under other batch "
        "ids. Only aligned snapshots are taken."
    ),
    ExecutionMode.CONTINUOUS: (
        "Continuous processing resumes after the newest committed epoch, and later epochs are not repeated "
        "identically. The query has no state; its sink receives the rows after that epoch again. Only aligned "
        "snapshots are taken."
    ),
}


def guarantees(mode: ExecutionMode, sinks: Sequence[str]) -> Guarantees:
    """`sinks` as progress names them; none means unknown."""
    exactly, at_least = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
    if mode is ExecutionMode.REAL_TIME:
        why = (
            "In real-time mode a batch gets its offsets only when it ends, so an interrupted batch is run again with "
            "other rows: state is exact (checkpoint format v2), but a sink may show rows twice. Only aligned "
            "snapshots are taken."
        )
        return Guarantees(mode, exactly, at_least, unaligned=False, why=why)
    if mode in _AT_LEAST_ONCE_MODES:
        return Guarantees(mode, at_least, at_least, unaligned=False, why=_AT_LEAST_ONCE_MODES[mode])
    forgetful = [sink for sink in sinks_of(sinks) if not sink.shows_rows_once]
    if sinks and not forgetful:
        why = (
            "Every batch is replayed with the same offsets and state, and its sink recognizes batches that it has "
            "written."
        )
        return Guarantees(mode, exactly, exactly, unaligned=True, why=why)
    unsure = _unsure(forgetful[0]) if forgetful else "its sinks are unknown"
    why = f"Every batch is replayed with the same offsets and state, but {unsure}: a replayed batch may appear twice."
    # The user may let the sink get the batch twice.
    return Guarantees(mode, exactly, at_least, unaligned=True, why=why)


def _unsure(sink: Sink) -> str:
    if sink.on_repeat in (OnRepeat.SKIPS, OnRepeat.RUNS):
        return f"no test with a real table shows that {sink.name} skips batches that it has written"
    return f"{sink.name} does not recognize batches that it has written"


def can_replay_a_batch(sinks: Sequence[str]) -> bool:
    """Whether every sink shows a repeated batch once."""
    return all(sink.shows_rows_once for sink in sinks_of(sinks))
