"""Compares the code of a stream with the state that its next start continues from.

Each part is judged by the function that the start itself calls, so the verdict is that of the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_ckpt.client.preflight import ahead_of
from dagster_ckpt.errors import (
    CkptError,
    InputGoneError,
    RecoveryExhaustedError,
    SnapshotNotFoundError,
    StorageAccessError,
    StreamNotFoundError,
)
from dagster_ckpt.recovery.compatibility import (
    Action,
    CompatibilityReport,
    Part,
    Step,
    operator_steps,
    source_steps,
)
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryPlan, Restore, StartEmpty
from dagster_ckpt.recovery.plan_check import check_state, old_plan, plan_change
from dagster_ckpt.recovery.rewind_preview import refuse_loss
from dagster_ckpt.recovery.sink_survey import refuse_shared_folder
from dagster_ckpt.recovery.source_change import judge_sources
from dagster_ckpt.recovery.source_check import refuse_gone_records
from dagster_ckpt.recovery.source_mapping import plan_of_start, source_changes
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.query.description import is_described_query, session_of
from dagster_ckpt.spark.query.output import named_output
from dagster_ckpt.spark.query.plan import plan_of_writer
from dagster_ckpt.spark.query.sources import source_identities
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.snapshots import describe_snapshot, holding
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def check_code(
    stream: StreamHandle, describe: Callable[[], DataStreamWriter], start_from: StartFrom
) -> CompatibilityReport:
    """Carry out `Client.check`."""
    try:
        stream.catalog.streams.get(stream.stream_id)
    except StreamNotFoundError:
        return CompatibilityReport(stream.stream_id, "nothing: the stream was never started", ())
    return _CodeCheck(stream, describe, start_from).run()


@dataclass
class _CodeCheck:
    stream: StreamHandle
    describe: Callable[[], DataStreamWriter]
    start_from: StartFrom
    notes: list[str] = field(default_factory=list)

    def run(self) -> CompatibilityReport:
        stream = self.stream
        try:
            facts, plan = self._planned()
        except StorageAccessError as error:
            facts, plan = None, self._newest(error)
        except (RecoveryExhaustedError, SnapshotNotFoundError):
            raise
        except CkptError as error:
            return self._report("its state", [Step(Part.STATE, "start", Action.REFUSE, str(error))])
        if isinstance(plan, StartEmpty):
            return self._report("nothing: the start begins with empty state", [])
        with holding(stream.catalog, [plan.snapshot], "check of code"):
            steps = [step for judge in self._judges(facts, plan) for step in judge]
        where = describe_snapshot(plan.snapshot) if plan.snapshot is not None else f"batch {plan.to_batch}"
        return self._report(where, steps)

    def _report(self, compared_with: str, steps: list[Step]) -> CompatibilityReport:
        return CompatibilityReport(self.stream.stream_id, compared_with, steps, tuple(dict.fromkeys(self.notes)))

    def _planned(self) -> tuple[RecoveryFacts, RecoveryPlan]:
        start_from = self.start_from
        if start_from.point is StartPoint.EMPTY:
            start_from = replace(start_from, discard_state=True)
        facts = recovery_facts(
            self.stream,
            start_from,
            predecessor_ended=True,
            remembers=False,
            output=named_output(self.describe()),
        )
        return facts, plan_of_start(self.stream, facts, self.describe)

    def _newest(self, error: StorageAccessError) -> RecoveryPlan:
        """For a machine that reaches the catalog only."""
        newest = next(iter(self.stream.catalog.snapshots.restorable(self.stream.stream_id)), None)
        if newest is None:
            raise error
        self.notes.append(f"compared with the catalog only: {error}")
        return Restore(reason="the newest snapshot in the catalog", snapshot=newest)

    def _judges(self, facts: RecoveryFacts | None, plan: RecoveryPlan) -> Iterator[list[Step]]:
        yield self._judged(Part.SOURCE, "all", lambda: self._sources(plan))
        yield self._judged(Part.OPERATOR, "all", lambda: self._operators(plan))
        yield self._judged(Part.STATE, "layout", lambda: self._state(plan))
        is_elsewhere = facts is None or (
            isinstance(plan, Restore)
            and self.start_from.point is StartPoint.LATEST
            and facts.live is not None
            and facts.live.status is LiveStatus.MISSING
        )
        yield self._judged(Part.SINK, "output", lambda: self._sinks(None if is_elsewhere else facts, plan))

    def _judged(self, part: Part, name: str, judge: Callable[[], list[Step]]) -> list[Step]:
        try:
            return judge()
        except StorageAccessError as error:
            # Nobody has looked, so it is not SAME.
            return [Step(part, name, Action.KEEP, f"not compared: {error}")]
        except CkptError as error:
            return [Step(part, name, Action.REFUSE, str(error))]

    def _sources(self, plan: RecoveryPlan) -> list[Step]:
        judgement = judge_sources(self.stream, plan, source_identities(self.describe()))
        steps = list(source_steps(judgement)) if judgement is not None else []
        self.notes.extend(source_changes(self.stream, plan))
        if any(step.action is not Action.KEEP for step in steps) and (judgement is None or judgement.mapping is None):
            # Which offsets are asked for is decided by the mapping.
            return steps
        try:
            gone = refuse_gone_records(self.stream, plan, self.describe, accept_loss=self.start_from.accept_loss)
        except InputGoneError as error:
            return [*steps, Step(Part.SOURCE, "input", Action.REFUSE, str(error))]
        self.notes.extend(f"accepted without these records: {each}" for each in gone)
        return steps

    def _operators(self, plan: RecoveryPlan) -> list[Step]:
        record = self.stream.catalog.streams.get(self.stream.stream_id)
        new = plan_of_writer(self.describe())
        change = plan_change(record, plan, new)
        steps = operator_steps(old_plan(record, plan), new, self.start_from, self.stream.state_migrations)
        if change is None or not (change.is_accepted or self.start_from.accept_plan_change):
            return list(steps)
        return [
            replace(step, action=Action.KEEP, reason=f"accepted: {step.reason}", options={})
            if step.action is not Action.KEEP
            else step
            for step in steps
        ]

    def _state(self, plan: RecoveryPlan) -> list[Step]:
        checked = check_state(self.stream, plan, self.start_from)
        if checked.rewrite is not None:
            asked = self.start_from.state_partitions
            options: dict[str, str | bool | int] = {"state_partitions": asked} if asked is not None else {}
            return [Step(Part.STATE, "layout", Action.MIGRATE, "; ".join(checked.messages), options)]
        self.notes.extend(checked.messages)
        return [Step(Part.STATE, "layout", Action.KEEP)]

    def _sinks(self, facts: RecoveryFacts | None, plan: RecoveryPlan) -> list[Step]:
        stream, output = self.stream, named_output(self.describe())
        refuse_shared_folder(stream, output)
        if facts is not None:
            writer = self.describe()
            session = session_of(writer) if is_described_query(writer) else None
            ahead = ahead_of(stream, facts, plan, output, session)
            refuse_loss(stream, ahead, accept_loss=self.start_from.accept_loss)
        else:
            self.notes.append("the live directory cannot be reached from here: what sinks have is not compared")
        sink, before = described_sink(output), sinks_of(sinks_written(stream))
        name = sink.name if sink is not None else "output"
        is_other = sink is not None and bool(before) and not sink.is_among(before)
        was = ", ".join(each.name for each in before)
        return [Step(Part.SINK, name, Action.KEEP, f"the query wrote to {was}" if is_other else "")]
