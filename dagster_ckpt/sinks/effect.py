"""The possible effects of replayed batches on the rows of a sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.spark.checkpoint_dir.file_sink_log import SinkEntry


class SinkEffect(StrEnum):
    """Effect of a start on the rows of a sink.

    EXACT: Each row is written exactly once, as a test with the real sink shows.
    SKIP: The sink skips batches that it has, and these contain the same rows: each row is written
        exactly once.
    UNPROVEN: According to the sink's own log each row is written exactly once; no test with the
        real sink shows it.
    DUPLICATE: Rows of the rewound batches are written twice.
    LOSE: Rows may be lost.
    UNKNOWN: The effect depends on facts that are not visible here.
    UNREACHABLE: The sink has to be rolled back but cannot be: the start is refused.
    UNTOUCHED: The query about to start does not write there: the sink is not changed.
    STARTS: The query has not written there before: the sink contains only rows from now on.
    REFUSED: The sink belongs to another query, or is at another batch than the query: the start is
        refused.
    """

    EXACT = "EXACT"
    SKIP = "SKIP"
    UNPROVEN = "UNPROVEN"
    DUPLICATE = "DUPLICATE"
    LOSE = "LOSE"
    UNKNOWN = "UNKNOWN"
    UNREACHABLE = "UNREACHABLE"
    UNTOUCHED = "UNTOUCHED"
    STARTS = "STARTS"
    REFUSED = "REFUSED"


@dataclass(frozen=True)
class SinkForecast:
    """The expected effect on one sink.

    Attributes:
        sink: Spark's name for it.
        effect: Effect on its rows.
        reason: Why, in a sentence or two.
        advice: How to make it exact, or an empty string.
    """

    sink: str
    effect: SinkEffect
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Replay:
    """The replay that the sinks will see.

    Attributes:
        to_batch: The batch to which the query goes back; -1 is before the first.
        query_id: Id of the query before the start.
        keeps_query_id: Whether the started query has the same id.
        in_flight: The batch after `to_batch` if exactly its rows are replayed, else None.
        stateful: Whether the query keeps state, which is not written for a batch that a sink skips
            without running it.
        carries_state: Whether the state after `in_flight` is included.
        log_entries: Log entries of each file sink from a snapshot, by its folder. None reads the
            sink's own log.
    """

    to_batch: int
    query_id: str | None
    keeps_query_id: bool = True
    in_flight: int | None = None
    stateful: bool = False
    carries_state: bool = False
    log_entries: Mapping[str, Sequence[SinkEntry]] | None = None
