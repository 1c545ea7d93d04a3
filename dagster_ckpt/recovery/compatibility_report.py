"""How the code of a stream fits the state that its next start continues from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dagster_ckpt.recovery.operator_compatibility import Decision, Fate, describe_operator, evolve
from dagster_ckpt.recovery.source_change import SourceJudgement
from dagster_ckpt.spark.checkpoint_dir.restore import in_order
from dagster_ckpt.spark.query.plan import PlanDescription
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.stream.start_from import SourceMapping, StartFrom


class Compatibility(StrEnum):
    """Whether code can continue from a state.

    COMPATIBLE: A plain start continues, although something differs.
    MIGRATABLE: A start with the options of the report rewrites the state, or the positions of the sources.
    """

    SAME = "SAME"
    COMPATIBLE = "COMPATIBLE"
    MIGRATABLE = "MIGRATABLE"
    INCOMPATIBLE = "INCOMPATIBLE"


class Part(StrEnum):
    SOURCE = "source"
    OPERATOR = "operator"
    STATE = "state"
    SINK = "sink"


class Action(StrEnum):
    KEEP = "keep"
    MIGRATE = "migrate"
    BOOTSTRAP = "bootstrap"
    DROP = "drop"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Step:
    """What a start does with one source, operator or sink.

    Attributes:
        name: Such as `0` for a source, or `1 (aggregation by site)` for an operator.
        options: Options of `StartFrom` that this step needs.
    """

    part: Part
    name: str
    action: Action
    reason: str = ""
    options: Mapping[str, str | bool | int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.part} {self.name}: {self.action}{f' ({self.reason})' if self.reason else ''}"

    def as_record(self) -> dict[str, object]:
        needs = {"options": dict(self.options)} if self.options else {}
        return {"part": self.part.value, "name": self.name, "action": self.action.value, "reason": self.reason, **needs}


def verdict_of(steps: Iterable[Step]) -> Compatibility:
    found = list(steps)
    if any(step.action is Action.REFUSE for step in found):
        return Compatibility.INCOMPATIBLE
    if any(step.action is not Action.KEEP for step in found):
        return Compatibility.MIGRATABLE
    return Compatibility.COMPATIBLE if any(step.reason for step in found) else Compatibility.SAME


@dataclass(frozen=True)
class CompatibilityReport:
    """The verdict on code and state; `compared_with` is the state, such as `checkpoint 7 of batch 812`."""

    stream_id: str
    compared_with: str
    steps: Sequence[Step]
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Compatibility:
        return verdict_of(self.steps)

    @property
    def reason(self) -> str:
        return "; ".join(str(step) for step in self.steps if step.reason)

    def messages(self) -> list[str]:
        asked = " ".join(
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value!r}")
            for name, value in self.options.items()
        )
        return [
            f"{self.stream_id}: {self.verdict.value}, compared with {self.compared_with}",
            *map(str, self.steps),
            *self.notes,
            *([f"start with: {asked}"] if self.verdict is Compatibility.MIGRATABLE and asked else []),
        ]

    @property
    def options(self) -> dict[str, str | bool | int]:
        return {name: value for step in self.steps for name, value in step.options.items()}

    def as_record(self) -> dict[str, object]:
        return {
            "stream_id": self.stream_id,
            "verdict": self.verdict.value,
            "compared_with": self.compared_with,
            "steps": [step.as_record() for step in self.steps],
            "options": self.options,
            "notes": list(self.notes),
        }


def source_steps(judgement: SourceJudgement) -> tuple[Step, ...]:
    """Return a step for each source of the query, then for each former one that is dropped.

    Without a mapping, changed sources get the steps of the one that a refused start proposes.
    """
    mapping = judgement.mapping
    if mapping is None and judgement.refused:
        mapping = judgement.proposed
    if mapping is None:
        reasons = {each.source: str(each) for each in judgement.differences}
        sources = {**judgement.read, **judgement.now}
        return tuple(Step(Part.SOURCE, source, Action.KEEP, reasons.get(source, "")) for source in sources)
    return tuple(_mapped(judgement, mapping))


def _mapped(found: SourceJudgement, mapping: SourceMapping) -> Iterator[Step]:
    options = {"map_sources": str(mapping)}
    refused = {each.source: str(each) for each in found.differences if each.is_refused} if found.mapping else {}
    for source in in_order(mapping.sources):
        what = str(found.now.get(source, "unknown"))
        if source in refused:
            yield Step(Part.SOURCE, source, Action.REFUSE, refused[source])
        elif source in mapping.new:
            yield Step(Part.SOURCE, source, Action.BOOTSTRAP, f"{what} is new", options)
        elif mapping.continued[source] != source:
            yield Step(
                Part.SOURCE,
                source,
                Action.MIGRATE,
                f"{what} continues the former source {mapping.continued[source]}",
                options,
            )
        else:
            yield Step(Part.SOURCE, source, Action.KEEP)
    for former, read in found.read.items():
        if former not in mapping.continued.values():
            yield Step(Part.SOURCE, f"former {former}", Action.DROP, f"{read} is no longer read", options)
    for why in found.crossed:
        yield Step(Part.SOURCE, "join", Action.REFUSE, why)


def operator_steps(
    before: PlanDescription | None,
    after: PlanDescription | None,
    start_from: StartFrom | None = None,
    rules: Sequence[StateMigration] = (),
) -> tuple[Step, ...]:
    """Return a step for each operator with state, in the order of the old plan, then of the new one.

    Empty if a plan is unknown, as a start then compares nothing either. What can be migrated counts as migrated.
    """
    if before is None or after is None:
        return ()
    decisions = evolve(before, after, rules)
    if start_from is not None and start_from.bootstrap_state and any(each.why for each in decisions):
        options: dict[str, str | bool | int] = {"bootstrap_state": True}
        return tuple(_operator(each, Action.BOOTSTRAP, options) for each in decisions if each.now is not None)
    if any(each.fate is Fate.REFUSE for each in decisions):
        # Then nothing is migrated, not even what could be.
        return tuple(_operator(each, Action.REFUSE if each.why else Action.KEEP, {}) for each in decisions)
    return tuple(
        _operator(each, _ACTIONS[each.fate], {"migrate_state": True} if each.why else {}) for each in decisions
    )


_ACTIONS = {
    Fate.KEEP: Action.KEEP,
    Fate.MIGRATE: Action.MIGRATE,
    Fate.ADD: Action.BOOTSTRAP,
    Fate.DROP: Action.DROP,
}


def _operator(decision: Decision, action: Action, options: Mapping[str, str | bool | int]) -> Step:
    place = decision.was if decision.was is not None else decision.now or 0
    name = f"{place + 1} ({describe_operator(decision.operator)})"
    return Step(Part.OPERATOR, name, action, decision.why, options)
