"""Decide what happens to the batch in flight, from what each sink remembers of it.

See "The batch in flight" in docs/internals.md. Checkpoint format v2 identifies state by ids that only the missing
commit would contain, so there the sink must go back: Spark 4.3 does not even resume in place
(`CheckpointInfo length: 0`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster_ckpt.errors import CkptError, LiveDirectoryError, RowsAtRiskError
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import OnRepeat, RollBack, Sink, SinkEffect, SinkForecast, newest_batch, roll_back
from dagster_ckpt.sinks.table import TableSink
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine
from dagster_ckpt.spark.checkpoint_dir.cut import state_after
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, OFFSETS, STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import read_commit_entry, read_metadata, read_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode, read_operators
from dagster_ckpt.spark.checkpoint_dir.restore import give_query_id
from dagster_ckpt.spark.query.sources import planned_at_ms


class InFlight(StrEnum):
    """What happens to the batch after the committed one.

    SKIPPED: The sink has it, and its state is available or the query keeps none.
    ROLL_BACK: The sink has it without its state: it goes back, and Spark runs the batch again.
    REFUSE: As ROLL_BACK, but the sink cannot go back.
    FOREIGN: Another query wrote later batches, up to which Spark would skip this query's own.
    AHEAD: The sink has later batches of this query, which its live directory has lost.
    FORGOTTEN: The sink may have had it, and would write it again.
    """

    RUN = "RUN"
    SKIPPED = "SKIPPED"
    ROLL_BACK = "ROLL_BACK"
    REFUSE = "REFUSE"
    FOREIGN = "FOREIGN"
    AHEAD = "AHEAD"
    FORGOTTEN = "FORGOTTEN"


@dataclass(frozen=True)
class Unfinished:
    """What a live directory has of the batch in flight.

    Attributes:
        planned: The offsets of the next batch exist, so exactly this batch is run again.
        unique_ids: State is in checkpoint format v2.
        state_is_there: The complete state after the next batch exists.
    """

    batch_id: int = BEFORE_THE_FIRST_BATCH
    planned: bool = True
    stateful: bool = True
    unique_ids: bool = False
    state_is_there: bool = False


def decide_in_flight(at: Unfinished, *, in_sink: bool, can_go_back: bool) -> InFlight:
    if not in_sink:
        return InFlight.RUN
    has_its_state = not at.stateful or (at.state_is_there and not at.unique_ids)
    if at.planned and has_its_state:
        return InFlight.SKIPPED
    return InFlight.ROLL_BACK if can_go_back else InFlight.REFUSE


@dataclass(frozen=True)
class Decision:
    """What a start does about a batch in flight that a sink may have; `batch_id` is the committed one before it."""

    sink: Sink
    batch_id: int
    what: InFlight

    def forecast(self) -> SinkForecast | None:
        forecast_as, next_batch = self.sink.forecast_as, self.batch_id + 1
        has = f"It has batch {next_batch} already, which is not committed"
        match self.what:
            case InFlight.RUN:
                return None
            case InFlight.SKIPPED:
                return forecast_as(SinkEffect.SKIP, f"{has}: the same batch is replayed and skipped.")
            case InFlight.ROLL_BACK:
                return forecast_as(
                    SinkEffect.EXACT,
                    f"{has}, and the query cannot continue from the state after it: the sink goes back to batch "
                    f"{self.batch_id}, and the batch is run again.",
                )
            case InFlight.FOREIGN:
                return forecast_as(
                    SinkEffect.IRREVERSIBLE,
                    f"It has batches after {next_batch}, which this query never planned: another query wrote them, and "
                    "Spark would skip this query's own batches up to there.",
                    "Start from a snapshot with start_from=...: that rolls the sink back.",
                )
            case InFlight.AHEAD:
                back = "empty and discard_state" if self.batch_id < 0 else f"batch-{self.batch_id}"
                return forecast_as(
                    SinkEffect.IRREVERSIBLE,
                    f"It has batches after {next_batch} of this query, which the live directory does not have: a power "
                    "failure lost its newest files, or it is an older copy. The query would plan these batches again, "
                    "and the sink would drop their rows.",
                    f"Start with start_from={back}, which takes the sink back, or from a newer snapshot.",
                )
            case InFlight.FORGOTTEN:
                return forecast_as(
                    SinkEffect.LOSE,
                    f"Whether it has batch {next_batch}, which is not committed, is not known: the snapshots since the "
                    "batch was planned have expired. If it has the batch, its rows are written twice.",
                    f"Delete the rows of batch {next_batch} if the table has them, and start with accept_loss.",
                )
            case InFlight.REFUSE:
                return forecast_as(
                    SinkEffect.IRREVERSIBLE,
                    f"{has}, and the query cannot continue from the state after it: Spark would skip the batch without "
                    "computing its state, and fail at the next one.",
                    f"Restore the table to its version before batch {next_batch}, and start from a snapshot or "
                    "batch-<n> with new_query_id.",
                )


def unfinished(live: LiveDirectory) -> Unfinished:
    folder = live.folder
    positions = live.positions()
    batch_id = BEFORE_THE_FIRST_BATCH if positions.commit is None else positions.commit
    planned = positions.offset == batch_id + 1
    if not keeps_state(live):
        return Unfinished(batch_id, planned, stateful=False)
    commit = read_commit_entry(folder, batch_id) if batch_id >= 0 else None
    is_there = False
    if planned:
        offsets, query_id = read_offset_entry(folder, batch_id + 1), read_metadata(folder).id
        # Other checks report a damaged directory.
        with suppress(LiveDirectoryError, FileNotFoundError):
            operators = read_operators(folder, batch_id + 1)
            is_there = state_after(folder, query_id, operators, offsets, commit) is not None
    unique_ids = commit is not None and commit.state_ids is not None
    return Unfinished(batch_id, planned, stateful=True, unique_ids=unique_ids, state_is_there=is_there)


def keeps_state(live: LiveDirectory) -> bool:
    return any(name.isdecimal() for name in live.folder.listing(STATE).names)


def forecast_in_flight(
    live: LiveDirectory, sinks: Sequence[str], *, roll_back_tables: bool = True
) -> list[SinkForecast]:
    found = _decided(live, sinks, roll_back_tables=roll_back_tables)
    return [forecast for each in found if (forecast := each.forecast()) is not None]


def settle_in_flight(
    live: LiveDirectory,
    sinks: Sequence[str],
    *,
    still_mine: StillMine,
    roll_back_tables: bool = True,
    query_ids: Collection[str] = (),
    before_roll_back: Callable[[int], None] = lambda _batch_id: None,
) -> list[Sink]:
    """Roll back and return the sinks that would skip a batch whose state is missing. Repeatable if interrupted.

    Args:
        before_roll_back: Called with the batch to which a sink is about to go back.
    """
    found = refuse_skipped_batch(live, sinks, roll_back_tables=roll_back_tables)
    to_roll_back = [each for each in found if each.what is InFlight.ROLL_BACK]
    for each in to_roll_back:
        to = RollBack(each.batch_id, query_id=live_query_id(live), query_ids=query_ids, in_flight=True)
        each.sink.check_roll_back(to)
        before_roll_back(each.batch_id)
        roll_back(each.sink, to, still_mine)
        if each.sink.remembers_undone:
            with still_mine():
                give_query_id(live, str(uuid.uuid4()))
    return [each.sink for each in to_roll_back]


def refuse_skipped_batch(live: LiveDirectory, sinks: Sequence[str], *, roll_back_tables: bool) -> list[Decision]:
    """Raise RowsAtRiskError if a sink would skip a batch without its state, and cannot be rolled back."""
    found = _decided(live, sinks, roll_back_tables=roll_back_tables)
    stops = (InFlight.REFUSE, InFlight.FOREIGN, InFlight.AHEAD)
    forecasts = [each.forecast() for each in found if each.what in stops]
    refused = " ".join(f"{each.sink}: {each.reason} {each.advice}" for each in forecasts if each is not None)
    if refused:
        raise RowsAtRiskError(f"The query is not started in {live.url}, and no sink was changed. {refused}")
    return found


def _decided(live: LiveDirectory, sinks: Sequence[str], *, roll_back_tables: bool) -> list[Decision]:
    memories = [sink for sink in sinks_of(sinks) if sink.on_repeat is OnRepeat.SKIPS or _drops_unplanned(sink)]
    if not memories:
        return []
    at = unfinished(live)
    found = []
    for sink in memories:
        can_go_back = sink.rolls_back and (roll_back_tables or not isinstance(sink, TableSink))
        decide = _of_query if sink.knows_queries else _of_any_query
        what = decide(live, at, sink, can_go_back=can_go_back)
        if what is not None:
            found.append(Decision(sink, at.batch_id, what))
    return found


def _of_any_query(live: LiveDirectory, at: Unfinished, sink: Sink, *, can_go_back: bool) -> InFlight:
    newest = newest_batch(sink, None)
    if newest is not None and newest > at.batch_id + 1 and _never_planned(live, newest):
        return InFlight.FOREIGN
    return decide_in_flight(at, in_sink=newest == at.batch_id + 1, can_go_back=can_go_back)


def _of_query(live: LiveDirectory, at: Unfinished, sink: Sink, *, can_go_back: bool) -> InFlight | None:
    must_answer = sink.on_repeat is OnRepeat.SKIPS and _asks_the_sink(at)
    newest = None
    # Otherwise, an unreadable table must not prevent a start.
    with nullcontext() if must_answer else suppress(CkptError):
        if must_answer or _drops_unplanned(sink):
            newest = _newest_known(sink, live_query_id(live))
    is_ahead = newest is not None and newest > at.batch_id and _never_planned(live, newest)
    if is_ahead and newest != at.batch_id + 1:
        return InFlight.AHEAD
    if not (is_ahead or must_answer):
        return InFlight.FORGOTTEN if newest is None and _is_forgotten(live, at, sink) else None
    return decide_in_flight(at, in_sink=newest == at.batch_id + 1, can_go_back=can_go_back)


def _is_forgotten(live: LiveDirectory, at: Unfinished, sink: Sink) -> bool:
    query_id = live_query_id(live)
    if not at.planned or query_id is None or sink.on_repeat is not OnRepeat.RUNS:
        return False
    with suppress(CkptError):
        return sink.may_have_forgotten(query_id, planned_at_ms(live.folder.read(f"{OFFSETS}/{at.batch_id + 1}")))
    return False


def _drops_unplanned(sink: Sink) -> bool:
    """Whether it drops a batch that it has of the query even if the query has planned it again, with other rows."""
    return sink.knows_queries and sink.rolls_back


def _newest_known(sink: Sink, query_id: str | None) -> int | None:
    if sink.on_repeat is OnRepeat.SKIPS or query_id is None:
        return newest_batch(sink, query_id)
    # It does not recognize an undone batch.
    found = sink.look([query_id])
    return found.batch if found is not None else None


def _never_planned(live: LiveDirectory, batch_id: int) -> bool:
    # A query plans each batch before it writes it.
    planned = live.positions().offset
    return planned is None or batch_id > planned


def _asks_the_sink(at: Unfinished) -> bool:
    """Whether it matters if the sink has the planned batch: not if the state after it is available."""
    return at.planned and decide_in_flight(at, in_sink=True, can_go_back=False) is not InFlight.SKIPPED


class Guarantee(StrEnum):
    EXACTLY_ONCE = "EXACTLY_ONCE"
    AT_LEAST_ONCE = "AT_LEAST_ONCE"


@dataclass(frozen=True)
class Guarantees:
    """What a query guarantees if its sources repeat the same rows for the same offsets (files, Kafka, rate; no socket).

    Attributes:
        unaligned: Whether a snapshot may include the batch in flight, so that exactly this batch is replayed.
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
    # Unaligned all the same: the user may accept that the sink gets the batch twice.
    return Guarantees(mode, exactly, at_least, unaligned=True, why=why)


def _unsure(sink: Sink) -> str:
    if sink.on_repeat in (OnRepeat.SKIPS, OnRepeat.RUNS):
        return f"no test with a real table shows that {sink.name} skips batches that it has written"
    return f"{sink.name} does not recognize batches that it has written"


def can_replay_a_batch(sinks: Sequence[str]) -> bool:
    return all(sink.shows_rows_once for sink in sinks_of(sinks))
