"""How the code of a stream fits the state that its next start continues from: a verdict, and what the start would do.

Pure. A start and a check without a start judge by the same functions: sources by `source_change`, settings of the state
by `plan_check`, operators by `operator_steps` below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum

from dagster_ckpt.recovery.plan_check import describe_operator, operator_differences
from dagster_ckpt.spark.query.plan import PlanDescription


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
    # Partitions, backend and checkpoint format.
    STATE = "state"
    SINK = "sink"


class Action(StrEnum):
    """What the start does with a part. REFUSE: nothing, so it does not start."""

    KEEP = "keep"
    MIGRATE = "migrate"
    BOOTSTRAP = "bootstrap"
    DROP = "drop"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Step:
    """One source, operator or sink, and what a start does with it.

    Attributes:
        name: Such as `0` for a source, or `1 (aggregation by site)` for an operator.
        reason: What differs; empty if nothing does.
        options: Options of the start that this step needs, as `StartFrom` takes them.
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
    """The verdict on code and state, with a step for each source, operator and sink.

    Attributes:
        compared_with: The state, such as `checkpoint 7 of batch 812`.
        notes: What the start reports beside the steps.
    """

    stream_id: str
    compared_with: str
    steps: Sequence[Step]
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Compatibility:
        return verdict_of(self.steps)

    @property
    def reason(self) -> str:
        """Why it is not SAME."""
        return "; ".join(str(step) for step in self.steps if step.reason)

    @property
    def options(self) -> dict[str, str | bool | int]:
        """Of the start that does the migration."""
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


def operator_steps(before: PlanDescription | None, after: PlanDescription | None) -> tuple[Step, ...]:
    """What a start does with the state of each operator, in the order of the old plan, then of the new one.

    Empty if a plan is unknown: then nothing is compared, as by the start.
    """
    if before is None or after is None:
        return ()
    old, new = before.operators, after.operators
    kinds = SequenceMatcher(None, [each.kind for each in old], [each.kind for each in new], autojunk=False)
    steps: list[Step] = []
    for step, old_from, old_to, new_from, new_to in kinds.get_opcodes():
        if step == "equal":
            for index, was in enumerate(old[old_from:old_to]):
                now = new[new_from + index]
                differences = "; ".join(operator_differences(was, now, old_from + index + 1))
                action = Action.REFUSE if differences else Action.KEEP
                steps.append(_operator(old_from + index, describe_operator(now), action, differences))
            continue
        steps += [_operator(at, describe_operator(old[at]), Action.REFUSE, "removed") for at in range(old_from, old_to)]
        steps += [_operator(at, describe_operator(new[at]), Action.REFUSE, "added") for at in range(new_from, new_to)]
    if before.output_mode != after.output_mode and None not in (before.output_mode, after.output_mode):
        mode = f"output mode: {before.output_mode} -> {after.output_mode}"
        steps.append(Step(Part.OPERATOR, "output", Action.REFUSE, mode))
    return tuple(steps)


def _operator(index: int, described: str, action: Action, reason: str) -> Step:
    return Step(Part.OPERATOR, f"{index + 1} ({described})", action, reason)
