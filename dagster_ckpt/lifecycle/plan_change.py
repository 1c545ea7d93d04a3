"""What differs between the plan that made a state and the plan that goes on from it. Pure: values in, words out.

What is in neither description is harmless: filters, columns that are only passed on, sources, sinks, triggers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import NoReturn

from dagster_ckpt.errors import PlanChangedError
from dagster_ckpt.spark import Pair, PlanDescription, PlanOperator

_NAMES = {
    "Aggregate": "aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "EventTimeWatermark": "watermark",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "GlobalLimit": "limit",
    "Join": "stream-stream join",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithStateInPandas",
}
_NOTHING = "nothing"


def plan_differences(before: PlanDescription, after: PlanDescription) -> tuple[str, ...]:
    """What is different for the state, each difference as one line.

    Args:
        before: The plan that the state was made by.
        after: The plan that is to go on from it.

    Returns:
        Nothing where the state means to both the same.
    """
    if before.as_record() == after.as_record():
        return ()
    return tuple(_differences(before, after))


def refuse_plan_change(job_id: str, differences: Sequence[str], *, came_from: str, fingerprint: str) -> NoReturn:
    """Refuse a start whose code means by the state something else than the code before.

    Args:
        job_id: The job.
        differences: What is different.
        came_from: What the state is that the start goes on from.
        fingerprint: That of the plan of the code.

    Raises:
        PlanChangedError: Always.
    """
    raise PlanChangedError(
        f"Job {job_id!r} is not started, nothing was changed: the code would go on from {came_from} with another "
        f"plan than the one that made this state. {told(differences)} Spark compares types only, so it may mix the "
        "old state with the new. If the change is meant, start it with accept_plan_change; from a program: "
        f"operations.accept_plan_change(job, {fingerprint!r}). Else bring the query back to what it was, or let it "
        "begin without state: start_from empty, or a new job."
    )


def told(differences: Sequence[str]) -> str:
    """Differences as one text."""
    return "Differences: " + "; ".join(differences) + "."


def _differences(before: PlanDescription, after: PlanDescription) -> Iterator[str]:
    old, new = before.operators, after.operators
    kinds = SequenceMatcher(None, [each.kind for each in old], [each.kind for each in new], autojunk=False)
    for step, old_from, old_to, new_from, new_to in kinds.get_opcodes():
        if step == "equal":
            for index, one in enumerate(old[old_from:old_to]):
                yield from _in_operator(one, new[new_from + index], old_from + index + 1)
            continue
        for index in range(old_from, old_to):
            yield f"operator {index + 1}, {_described(old[index])}, was removed"
        for index in range(new_from, new_to):
            yield f"operator {index + 1}, {_described(new[index])}, was added"
    if before.output_mode != after.output_mode and None not in (before.output_mode, after.output_mode):
        yield f"output mode: {before.output_mode} -> {after.output_mode}"


def _in_operator(old: PlanOperator, new: PlanOperator, number: int) -> Iterator[str]:
    where = f"operator {number} ({_name(old)})"
    yield from _by_place(f"{where}, key", old.keys, new.keys)
    yield from _by_place(f"{where}, value", old.values, new.values)
    yield from _by_name(where, old.settings, new.settings)
    yield from _by_name(f"{where}, computed column", old.definitions, new.definitions)


def _by_place(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    """Keys and values: what Spark finds by place, whatever it is called."""
    for index in range(max(len(old), len(new))):
        was = " ".join(old[index]) if index < len(old) else _NOTHING
        now = " ".join(new[index]) if index < len(new) else _NOTHING
        if was != now:
            yield f"{where} {index + 1}: {was} -> {now}"


def _by_name(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    names = dict.fromkeys(name for name, _ in (*old, *new))
    for name in names:
        was = ", ".join(text for each, text in old if each == name) or _NOTHING
        now = ", ".join(text for each, text in new if each == name) or _NOTHING
        if was != now:
            yield f"{where} {name}: {was} -> {now}"


def _name(operator: PlanOperator) -> str:
    return _NAMES.get(operator.kind, operator.kind)


def _described(operator: PlanOperator) -> str:
    keys = ", ".join(name for name, _ in operator.keys)
    return f"{_name(operator)} by {keys}" if keys else _name(operator)
