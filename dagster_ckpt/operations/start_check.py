"""Checks the loaded code against a stream's state, sources and sinks as a start does, while the old query may run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dagster_ckpt.errors import InputGoneError
from dagster_ckpt.operations.requests import is_running
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan
from dagster_ckpt.recovery.plan_check import PlanChange, check_state, plan_change
from dagster_ckpt.recovery.planning import plan_recovery, with_newer_point
from dagster_ckpt.recovery.replay import lost_batches
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.recovery.source_change import refuse_changed_sources
from dagster_ckpt.recovery.source_check import refuse_gone_records, resolved_offsets
from dagster_ckpt.spark.query.description import is_described_query, session_of
from dagster_ckpt.spark.query.output import NamedOutput, named_output
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.sources import source_identities
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.stream.adopted import refuse_unclaimed
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_T = TypeVar("_T")


@dataclass(frozen=True)
class StartCheck:
    """A start that its sinks, its sources and the stored state do not refuse.

    Attributes:
        plan: What it would do.
        rewrite: The shape that the state would be rewritten to; None if it stays as it is.
        change: How the query's plan differs from the one that wrote the state; None if it does not, as far as known.
    """

    plan: RecoveryPlan
    rewrite: StateShape | None
    change: PlanChange | None


def check_start(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    start_from: StartFrom,
    *,
    report: Callable[[str], None],
) -> StartCheck:
    """Check a start with the loaded code, as the start itself would. Changes nothing; the stream may be running.

    What cannot be found out of the query, because it cannot be described, refuses nothing here.

    Args:
        stream: The stream.
        describe: Creates the unstarted writer.
        start_from: Where it would start.
        report: Called with a message for everything that would change.

    Raises:
        CkptError: The error that the start would raise.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    output = _told(describe, named_output)
    facts = recovery_facts(stream, start_from, predecessor_ended=True, remembers=False, output=output)
    while True:
        plan = resolved_offsets(stream, plan_recovery(facts), describe)
        with holding(stream.catalog, [plan.snapshot], "check of a start"):
            refuse_unclaimed(stream, plan.snapshot)
            for message in refuse_changed_sources(stream, plan, _told(describe, source_identities)):
                report(message)
            try:
                _weigh_sinks(stream, facts, plan, output, _told(describe, _session))
                gone = refuse_gone_records(stream, plan, describe, accept_loss=start_from.accept_loss)
            except InputGoneError as error:
                newer = with_newer_point(facts, plan, error.gone)
                if newer is None:
                    raise
                facts = newer
                continue
            for message in gone:
                report(f"accepted without these records: {message}")
            checked = check_state(stream, plan, start_from)
            for message in checked.messages:
                report(message)
            change = plan_change(record, plan, _told(describe, plan_of_writer))
            for difference in change.differences if change is not None else ():
                report(f"the plan differs: {difference}")
            refuse_shared_folder(stream, output)
            return StartCheck(plan, checked.rewrite, change)


def _told(describe: Callable[[], DataStreamWriter], ask: Callable[[DataStreamWriter], _T]) -> _T | None:
    """What a query tells of itself; None if it cannot be created, which its start reports."""
    try:
        return ask(describe())
    except Exception:  # noqa: BLE001 - the start fails in the same way and reports it
        return None


def _session(writer: DataStreamWriter) -> SparkSession | None:
    return session_of(writer) if is_described_query(writer) else None


def _weigh_sinks(
    stream: StreamHandle,
    facts: RecoveryFacts,
    plan: RecoveryPlan,
    output: NamedOutput | None,
    session: SparkSession | None,
) -> None:
    lost, running = lost_batches(stream, facts, plan, output), is_running(stream)
    replayed = plan if lost is None else lost.plan()
    ahead = preview_rewind(stream, facts, replayed, output, session, is_running=running)
    if lost is not None and ahead.gone:
        # As the start does: it replays nothing that the sources no longer have.
        ahead = preview_rewind(stream, facts, plan, output, session, is_running=running)
    refuse_loss(stream, ahead, accept_loss=facts.start_from.accept_loss)
