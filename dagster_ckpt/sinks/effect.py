"""What may become of the rows of a sink when batches come again: the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.spark.checkpoint_dir.file_sink_log import SinkEntry


class SinkEffect(StrEnum):
    """What becomes of the rows of a sink.

    EXACT: Each row is there once: a test with the real sink shows it.
    SKIP: The sink passes over batches it has, and these are the very same rows: each row is there once.
    UNPROVEN: By the sink's own log each row is there once; no test with the real sink shows it.
    DUPLICATE: Rows of the rewound batches are there twice.
    LOSE: Rows may be missing afterwards.
    UNKNOWN: It depends on what cannot be seen from here.
    UNREACHABLE: The sink has to be brought back and cannot be: the start is refused.
    UNTOUCHED: The query about to start does not write there: it is left as it is.
    BEGINS: The query has not written there before: it holds what comes from now on.
    REFUSED: It is another's, or does not stand where the query stands: the start is refused.
    """

    EXACT = "EXACT"
    SKIP = "SKIP"
    UNPROVEN = "UNPROVEN"
    DUPLICATE = "DUPLICATE"
    LOSE = "LOSE"
    UNKNOWN = "UNKNOWN"
    UNREACHABLE = "UNREACHABLE"
    UNTOUCHED = "UNTOUCHED"
    BEGINS = "BEGINS"
    REFUSED = "REFUSED"


@dataclass(frozen=True)
class SinkForecast:
    """What is to be expected of one sink.

    Attributes:
        sink: What Spark calls it.
        effect: What becomes of its rows.
        reason: Why, in a sentence or two.
        advice: What makes it exact, or the empty text.
    """

    sink: str
    effect: SinkEffect
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Replay:
    """What the sinks will see.

    Attributes:
        to_batch: The batch the query goes back to; -1 is before the first.
        query_id: Id of the query as it was.
        keeps_query_id: Whether the query that goes on has this id too.
        in_flight: The batch after `to_batch` where exactly its rows are replayed, else None.
        stateful: Whether the query keeps state: nothing writes it for a batch that a sink passes over without running.
        carries_state: Whether the state after `in_flight` comes along.
        log_entries: From a snapshot: log entries of each file sink, by its folder. None reads the sink's own log.
    """

    to_batch: int
    query_id: str | None
    keeps_query_id: bool = True
    in_flight: int | None = None
    stateful: bool = False
    carries_state: bool = False
    log_entries: Mapping[str, Sequence[SinkEntry]] | None = None
