"""Decides for each operator which state is still valid for a changed query. Pure.

Spark stores an aggregation's values as the buffers of its functions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any, NamedTuple

from dagster_ckpt.errors import OptionError, StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.operators import UNNAMED, Operator, key_columns, value_columns
from dagster_ckpt.spark.query.plan import (
    BRANCH,
    COLUMNS,
    TIME_ZONE,
    WATERMARK,
    Pair,
    PlanDescription,
    PlanOperator,
    read_plan,
)
from dagster_ckpt.state.migration import RuledOperator, StateMigration
from dagster_ckpt.state.unsafe_rows import Taken, TakenRows, can_begin, can_widen, is_known

AGGREGATE, JOIN_KIND, LIMIT_KIND = "Aggregate", "Join", "GlobalLimit"
_AGGREGATION = ("stateStoreSave", UNNAMED)
# Schema version of stores with column families: transformWithState, joins with state v3.
_FAMILIES = 3
# From this revision on, a description names the columns that a join keeps.
_EXACT_JOINS = 3
_WITHOUT_ROWS = ": it begins without rows"
_HIDDEN_NUMBERS = "the plan does not show how Spark numbers its branches (SQL's WITH, or many operators)"

_NAMES = {
    "Aggregate": "aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "Except": "subtract",
    "Intersect": "intersect",
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
    after = after.as_described_by(before.revision)
    records = before.as_record(), after.as_record()
    if records[0] == records[1]:
        return ()
    # Of a long description, only a part is recorded.
    return tuple(_differences(read_plan(records[0]) or before, read_plan(records[1]) or after))


def describe_differences(differences: Sequence[str]) -> str:
    return "Differences: " + "; ".join(differences) + "."


def _differences(before: PlanDescription, after: PlanDescription) -> Iterator[str]:
    old, new = before.operators, after.operators
    kinds = SequenceMatcher(None, [each.kind for each in old], [each.kind for each in new], autojunk=False)
    for step, old_from, old_to, new_from, new_to in kinds.get_opcodes():
        if step == "equal":
            for index, one in enumerate(old[old_from:old_to]):
                yield from operator_differences(one, new[new_from + index], old_from + index + 1)
            continue
        for index in range(old_from, old_to):
            yield f"operator {index + 1}, {describe_operator(old[index])}, was removed"
        for index in range(new_from, new_to):
            yield f"operator {index + 1}, {describe_operator(new[index])}, was added"
    if before.output_mode != after.output_mode and None not in (before.output_mode, after.output_mode):
        yield f"output mode: {before.output_mode} -> {after.output_mode}"


def operator_differences(old: PlanOperator, new: PlanOperator, number: int) -> Iterator[str]:
    where = f"operator {number} ({_name(old)})"
    yield from _by_place(f"{where}, key", old.keys, new.keys)
    yield from _by_place(f"{where}, value", old.values, new.values)
    made = [dict(pair for pair in each.settings if pair[0].startswith(COLUMNS)) for each in (old, new)]
    for name in made[0] | made[1]:
        if made[0].get(name) != made[1].get(name):
            yield f"{where}: {name.removeprefix(COLUMNS)} is made of other columns of the same names"
    others = [[pair for pair in each.settings if not pair[0].startswith(COLUMNS)] for each in (old, new)]
    yield from _by_name(where, *others)
    yield from _by_name(f"{where}, computed column", old.definitions, new.definitions)


def _by_place(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    """Compare by position, as Spark does."""
    for index in range(max(len(old), len(new))):
        was = " ".join(old[index]) if index < len(old) else _NOTHING
        now = " ".join(new[index]) if index < len(new) else _NOTHING
        if was != now:
            yield f"{where} {index + 1}: {was} -> {now}"


def _by_name(where: str, old: Sequence[Pair], new: Sequence[Pair]) -> Iterator[str]:
    names = dict.fromkeys(name for name, _ in (*old, *new))
    for name in names:
        was, now = ([text for each, text in pairs if each == name] for pairs in (old, new))
        if was != now:
            yield f"{where} {name}: {_listed(was)} -> {_listed(now)}"


def _listed(texts: Sequence[str]) -> str:
    # A column may have the name.
    return ", ".join(f"`{text}`" if text == _NOTHING else text for text in texts) or _NOTHING


def _name(operator: PlanOperator) -> str:
    return _NAMES.get(operator.kind, operator.kind)


def describe_operator(operator: PlanOperator) -> str:
    keys = ", ".join(name for name, _ in operator.keys)
    return f"{_name(operator)} by {keys}" if keys else _name(operator)


class Fate(StrEnum):
    KEEP = "keep"
    MIGRATE = "migrate"
    ADD = "add"
    DROP = "drop"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """What becomes of the state of one operator, or of a watermark.

    Attributes:
        was: Its place among the operators of the former plan, as `now` in the new one; None: it has none.
        why: What differs; empty if nothing does.
    """

    fate: Fate
    operator: PlanOperator
    was: int | None
    now: int | None
    why: str = ""
    rule: StateMigration | None = None

    @property
    def keeps_state(self) -> bool:
        return self.operator.kind != WATERMARK


def evolve(
    before: PlanDescription, after: PlanDescription, rules: Sequence[StateMigration] = ()
) -> tuple[Decision, ...]:
    """Decide in the order of the old plan, then of the new one; OptionError if a rule names no operator with state."""
    numbers, after = after.numbers, after.as_described_by(before.revision)
    # Of a long description, only what would be recorded can be compared.
    after = replace(read_plan(after.as_record()) or after, numbers=numbers)
    old, new = before.operators, after.operators
    found: list[Decision] = []
    kinds = SequenceMatcher(None, [each.kind for each in old], [each.kind for each in new], autojunk=False)
    for step, old_from, old_to, new_from, new_to in kinds.get_opcodes():
        if step == "equal":
            pairs = zip(range(old_from, old_to), range(new_from, new_to), strict=True)
            found += [_changed(old[was], new[now], was, now) for was, now in pairs]
            continue
        found += [_added_or_removed(Fate.DROP, old[at], at, None, "removed") for at in range(old_from, old_to)]
        found += [_added_or_removed(Fate.ADD, new[at], None, at, "added") for at in range(new_from, new_to)]
    found = list(_with_doubts(found, before, after))
    for rule in rules:
        found = list(_with_rule(found, rule, before, after))
    return tuple(found)


def _with_rule(
    found: Sequence[Decision], rule: StateMigration, before: PlanDescription, after: PlanDescription
) -> Iterator[Decision]:
    now = _place(after, rule.operator, "the new code")
    was = _place(before, rule.former, "the former code") if rule.former is not None else None
    decided = next(each for each in found if each.now == now)
    if decided.fate is Fate.KEEP or decided.operator.kind == LIMIT_KIND:
        yield from found
        return
    for each in found:
        if each is decided:
            why = f"{each.why.removesuffix(_WITHOUT_ROWS)}; {rule}"
            yield replace(each, fate=Fate.MIGRATE, was=each.was if was is None else was, why=why, rule=rule)
        elif each.fate is not Fate.DROP or was is None or each.was != was:
            yield each


def _place(plan: PlanDescription, named: int | str, where: str) -> int:
    stateful = [at for at, each in enumerate(plan.operators) if each.kind != WATERMARK]
    names = {at: describe_operator(plan.operators[at]) for at in stateful}
    found = [at for at in stateful if named in (at + 1, names[at])]
    if len(found) != 1:
        listed = ", ".join(f"{at + 1} ({name})" for at, name in names.items()) or "none"
        how = "several operators" if found else "no operator"
        raise OptionError(
            f"A state migration names operator {named!r}: {where} has {how} called so. It has: {listed}. Nothing was "
            "changed. Name one of these."
        )
    return found[0]


def _added_or_removed(fate: Fate, operator: PlanOperator, was: int | None, now: int | None, why: str) -> Decision:
    if operator.kind == LIMIT_KIND:
        return Decision(Fate.REFUSE, operator, was, now, f"{why}: the counter of a limit cannot be read")
    if fate is Fate.ADD and operator.kind != WATERMARK:
        why = f"{why}{_WITHOUT_ROWS}"
    return Decision(fate, operator, was, now, why)


def _with_doubts(found: list[Decision], before: PlanDescription, after: PlanDescription) -> Iterator[Decision]:
    stateful = [each for each in found if each.keeps_state]
    moves = any(each.fate in (Fate.ADD, Fate.DROP) for each in stateful)
    counts = [Counter(each.kind for each in plan.operators if each.kind != WATERMARK) for plan in (before, after)]
    unclear = moves and any(
        max(count.values(), default=0) > 1 or (JOIN_KIND in count and count.total() > 1) for count in counts
    )
    marks = [sum(each.kind == WATERMARK for each in plan.operators) for plan in (before, after)]
    is_unknown = any(each.why for each in found) and (before.has_unknown_numbers or after.has_unknown_numbers)
    doubt = _HIDDEN_NUMBERS if is_unknown else "several operators are alike"
    for each in found:
        if each.operator.kind == WATERMARK and None in (each.was, each.now) and min(marks) > 0:
            # Its source was added or removed, too.
            yield replace(each, fate=Fate.REFUSE)
        elif (unclear or is_unknown) and each.keeps_state and each.fate is not Fate.REFUSE:
            why = f"{each.why or 'unchanged'}, but which state is whose is not certain: {doubt}"
            yield replace(each, fate=Fate.REFUSE, why=why)
        else:
            yield each
    modes = (before.output_mode, after.output_mode)
    is_continued = any(None not in (each.was, each.now) for each in stateful)
    if is_continued and None not in modes and modes[0] != modes[1]:
        newest = after.operators[-1]
        mode = f"output mode: {before.output_mode} -> {after.output_mode}"
        yield Decision(Fate.REFUSE, newest, len(before.operators) - 1, len(after.operators) - 1, mode)


def _changed(old: PlanOperator, new: PlanOperator, was: int, now: int) -> Decision:
    why = "; ".join(operator_differences(old, new, was + 1))
    if not why:
        return Decision(Fate.KEEP, new, was, now)
    if new.kind == WATERMARK and old.keys == new.keys:
        # A watermark never goes back, so state stays valid.
        return Decision(Fate.MIGRATE, new, was, now, why)
    one, other = _resolved(old), _resolved(new)
    if new.kind != AGGREGATE:
        same = one == other
        return Decision(Fate.MIGRATE if same else Fate.REFUSE, new, was, now, why)
    zones = [[pair for pair in each.settings if pair[0] == TIME_ZONE] for each in (one, other)]
    is_refused = _refused(one, other) or (zones[0] != zones[1] and all(zones))
    return Decision(Fate.REFUSE if is_refused else Fate.MIGRATE, new, was, now, why)


def _refused(old: PlanOperator, new: PlanOperator) -> bool:
    kept = {text for text, _ in new.values} & {text for text, _ in old.values}
    names = {name for pair in (_definitions(old), _definitions(new)) for name in pair}
    changed = {name for name in names if _definitions(old).get(name) != _definitions(new).get(name)}
    texts = [name for name, _ in new.keys] + sorted(kept)
    made = [{name: text for name, text in each.settings if name.startswith(COLUMNS)} for each in (old, new)]
    if any(made[0].get(f"{COLUMNS}{text}") != made[1].get(f"{COLUMNS}{text}") for text in texts):
        return True
    if dict(old.settings).get(BRANCH) != dict(new.settings).get(BRANCH):
        # It gets the rows of another branch.
        return True
    gone, come = ({_unqualified(text) for text, _ in each.values if text not in kept} for each in (old, new))
    if gone & come:
        # An alias or view was renamed, or the column is of another input: the sum must not begin again.
        return True
    return old.keys != new.keys or bool(_mentioned(texts, {**_definitions(old), **_definitions(new)}) & changed)


# As Spark writes them. A text that was shortened has no last quote.
_LITERAL, _QUOTED = r"'(?:[^'\\]|\\.)*'?", r"`(?:[^`]|``)+`"
_QUALIFIED = re.compile(rf"({_LITERAL})|(?:(?:{_QUOTED}|(?!\d+\.)\w+)\.)+(?=[`\w])|({_QUOTED}|\w+|.)", re.DOTALL)


def _unqualified(text: str) -> str:
    """Return a text without qualifiers, and all but its literals in lower case."""
    return _QUALIFIED.sub(lambda part: part[1] or (part[2] or "").casefold(), text)


def _definitions(operator: PlanOperator) -> dict[str, tuple[str, ...]]:
    """Return definitions by name, in lower case, as Spark ignores case."""
    found: dict[str, tuple[str, ...]] = {}
    for name, text in operator.definitions:
        found[name.casefold()] = (*found.get(name.casefold(), ()), text)
    return found


_NO_COLUMNS = (
    _LITERAL,
    # Of a window.
    r", size \S+ s, slide \S+ s, start \S+ s\)",
    # A field of a structure, which Spark always quotes.
    r"(?<=\.)`[A-Za-z_][A-Za-z0-9_]*`",
    r"\d+(?!\w)",
    # A function, or a qualifier.
    r"\w+(?=\(|\.\w)",
)
_WORD = re.compile("|".join((*_NO_COLUMNS, rf"({_QUOTED}|\w+)")), re.DOTALL)
_KEYWORDS = {
    *("AND", "AS", "CASE", "DISTINCT", "ELSE", "END", "IN", "IS", "LIKE", "NOT", "NULL", "OR", "THEN", "WHEN"),
    *("BIGINT", "BINARY", "BOOLEAN", "DATE", "DOUBLE", "FLOAT", "INT", "SMALLINT", "STRING", "TIMESTAMP", "TINYINT"),
    *("INTERVAL", "YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND", "TO"),
}


def _column(word: re.Match[str]) -> str:
    """Return the column that a match of `_WORD` names, in lower case; empty if it names none."""
    name = word[1] or ""
    return (name[1:-1].replace("``", "`") if name.startswith("`") else name).casefold()


def _mentioned(texts: Sequence[str], definitions: Mapping[str, tuple[str, ...]]) -> set[str]:
    found: set[str] = set()
    to_read = list(texts)
    while to_read:
        text = to_read.pop()
        # A name need not be a word.
        words = {_column(word) for word in _WORD.finditer(text)} | ({text.casefold()} & definitions.keys())
        words -= found
        found |= words
        to_read += [text for word in words for text in definitions.get(word, ())]
    return found


def _resolved(operator: PlanOperator) -> PlanOperator:
    """Return an operator with renamed columns under their former names."""
    names = {name: texts[0] for name, texts in _definitions(operator).items() if len(texts) == 1}
    renamed = _origins({name: text for name, text in names.items() if text.isidentifier()})
    # A column may have the name of a keyword.
    keywords = _KEYWORDS - {name for name, _ in operator.definitions}

    def origin(word: re.Match[str]) -> str:
        return word[0] if word[1] in keywords else renamed.get(_column(word), word[0])

    def named(text: str) -> str:
        # A name need not be a word.
        return renamed.get(text.casefold()) or _WORD.sub(origin, text)

    def pairs(found: Sequence[Pair]) -> tuple[Pair, ...]:
        return tuple((named(text), kind) for text, kind in found)

    definitions = tuple((name, named(text)) for name, text in operator.definitions if name.casefold() not in renamed)
    settings = tuple(
        (f"{COLUMNS}{named(name.removeprefix(COLUMNS))}" if name.startswith(COLUMNS) else name, text)
        for name, text in operator.settings
    )
    values = pairs(operator.values)
    return replace(operator, keys=pairs(operator.keys), values=values, settings=settings, definitions=definitions)


def _origins(renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the first name of each renamed column, but not of columns that swapped their names."""
    found = {}
    for name, former in renamed.items():
        seen, origin = {name}, former
        while origin.casefold() in renamed.keys() - seen:
            seen.add(origin.casefold())
            origin = renamed[origin.casefold()]
        if origin.casefold() not in seen or len(seen) == 1:
            found[name] = origin
    return found


def refused_reasons(decisions: Sequence[Decision]) -> list[str]:
    return [f"{describe_operator(each.operator)}: {each.why}" for each in decisions if each.fate is Fate.REFUSE]


class _Buffer(NamedTuple):
    names: tuple[str, ...]
    starts: tuple[int | float | bool | None, ...]


_ONE_NUMBER = _Buffer(("n", "avg", "m2"), (0.0, 0.0, 0.0))
# Spark's `aggBufferAttributes` and `initialValues`.
_BUFFERS = {
    "count": _Buffer(("count",), (0,)),
    "sum": _Buffer(("sum",), (None,)),
    "min": _Buffer(("min",), (None,)),
    "max": _Buffer(("max",), (None,)),
    "avg": _Buffer(("sum", "count"), (0.0, 0)),
    "mean": _Buffer(("sum", "count"), (0.0, 0)),
    "first": _Buffer(("first", "valueSet"), (None, False)),
    "last": _Buffer(("last", "valueSet"), (None, False)),
    **dict.fromkeys(("stddev", "stddev_samp", "stddev_pop", "variance", "var_samp", "var_pop"), _ONE_NUMBER),
}
# Stands for the rest of a long record.
_CUT = re.compile(r"\d+ more")
_OF_THE_RESULT = ("count", "sum", "min", "max", "first", "last")


def has_other_rows(decisions: Sequence[Decision], before: PlanDescription) -> bool:
    """Whether Spark certainly refuses stored rows of an operator, as they have other columns."""
    for each in decisions:
        if each.was is None or each.now is None or each.operator.kind == WATERMARK:
            continue
        old, new = before.operators[each.was], each.operator
        if old.kind == JOIN_KIND and before.revision < _EXACT_JOINS:
            # Its columns were not recorded exactly.
            continue
        if any(_CUT.fullmatch(name) for each_one in (old, new) for name, _ in (*each_one.keys, *each_one.values)):
            continue
        if _are_other(_kinds(old.keys), _kinds(new.keys)) or _are_other(_value_kinds(old), _value_kinds(new)):
            return True
    return False


def _kinds(pairs: Sequence[Pair]) -> list[str | None]:
    # Spark does not compare the names within a structure.
    return [kind if kind.isidentifier() else None for _, kind in pairs]


def _value_kinds(operator: PlanOperator) -> list[str | None] | None:
    """Return the types of the columns that Spark stores; None if the plan does not say."""
    if operator.kind != AGGREGATE:
        return _kinds(operator.values)
    found: list[str | None] = []
    for (text, result), kind in zip(operator.values, _kinds(operator.values), strict=True):
        function = _function(text)
        if function not in _BUFFERS:
            return None
        # A sum of decimals has a flag.
        columns = len(_BUFFERS[function].names) + (function == "sum" and result.startswith("decimal"))
        found += [kind if function in _OF_THE_RESULT else None, *([None] * (columns - 1))]
    return found


def _are_other(old: list[str | None] | None, new: list[str | None] | None) -> bool:
    if old is None or new is None:
        return False
    return len(old) != len(new) or any(None not in pair and pair[0] != pair[1] for pair in zip(old, new, strict=True))


_ADVICE = "Nothing was changed. Let the state be built from its input (bootstrap_state), or start with empty state."


def taken_rows(
    decisions: Sequence[Decision],
    before: PlanDescription,
    after: PlanDescription,
    olds: Sequence[Operator],
    news: Sequence[Operator],
) -> dict[int, TakenRows]:
    """Return what each operator of the new query takes over; `olds` and `news` are in Spark's order.

    Raises:
        StateRewriteError: The stored state does not match the plans.
    """
    old_number, new_number = _numbers(before, after, olds, news)
    found = {}
    for each in decisions:
        if not each.keeps_state or each.was is None or each.now is None or each.rule is not None:
            continue
        was, now = olds[old_number[each.was]], news[new_number[each.now]]
        if UNNAMED not in (was.name, now.name) and was.name != now.name:
            raise _cannot_migrate(each, f"Spark kept it as {was.name}, and keeps it as {now.name}")
        if _FAMILIES in (was.schema_version, now.schema_version):
            if (was.stores, _schemas(was)) != (now.stores, _schemas(now)):
                raise _cannot_migrate(each, "its stored schemas differ, and such schemas are compared as a whole")
            found[now.number] = TakenRows(was.number)
            continue
        if _types(key_columns(was.files[-1])) != _types(key_columns(now.files[-1])):
            raise _cannot_migrate(each, "its key has other types, which decide in which partition a row is")
        if was.schema_version != now.schema_version and each.fate is Fate.MIGRATE:
            raise _cannot_migrate(each, "its stored schema has another version")
        old, new = value_columns(was.files[-1]), value_columns(now.files[-1])
        if each.operator.kind != AGGREGATE or each.fate is Fate.KEEP:
            if _types(old) != _types(new):
                raise _cannot_migrate(each, "its values have other types")
            found[now.number] = TakenRows(was.number)
            continue
        if now.name not in _AGGREGATION:
            raise _cannot_migrate(each, "the values of session windows are not taken apart")
        values = _values(each, _resolved(before.operators[each.was]), _resolved(each.operator), old, new)
        found[now.number] = TakenRows(was.number, len(old), values)
    return found


def ruled_operators(
    decisions: Sequence[Decision],
    before: PlanDescription,
    after: PlanDescription,
    olds: Sequence[Operator],
    news: Sequence[Operator],
) -> list[RuledOperator]:
    old_number, new_number = _numbers(before, after, olds, news)
    return [
        RuledOperator(
            each.rule,
            describe_operator(each.operator),
            news[new_number[each.now]],
            olds[old_number[each.was]] if each.was is not None else None,
        )
        for each in decisions
        if each.rule is not None and each.now is not None
    ]


def _schemas(operator: Operator) -> list[bytes | None]:
    return [file.data for file in operator.files[-len(operator.stores) :]]


def _numbers(
    before: PlanDescription, after: PlanDescription, olds: Sequence[Operator], news: Sequence[Operator]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return Spark's operator numbers, by place in each plan."""
    if before.has_unknown_numbers or after.has_unknown_numbers:
        raise StateRewriteError(
            f"The state cannot be migrated: which state is whose is not certain, because {_HIDDEN_NUMBERS}. {_ADVICE}"
        )
    # Revision 1 has no branches.
    branches = [
        [(each.kind, dict(each.settings).get(BRANCH) if before.revision > 1 else None) for each in plan.operators]
        for plan in (before, after)
    ]
    numbers = before.numbers
    if numbers is None and after.numbers is not None:
        # Earlier versions of this package did not record them; the same operators have the same branches.
        numbers = after.numbers
        if branches[0] != branches[1]:
            raise StateRewriteError(
                "The new query has branches that keep state, and it is not recorded how those of the former one are "
                f"numbered: which state is whose is not certain. {_ADVICE}"
            )
    return _numbers_in(before, olds, numbers), _numbers_in(after, news, after.numbers)


def _numbers_in(
    plan: PlanDescription, stored: Sequence[Operator], numbers: Sequence[int | None] | None
) -> dict[int, int]:
    stateful = [at for at, operator in enumerate(plan.operators) if operator.kind != WATERMARK]
    if len(stateful) != len(stored):
        raise StateRewriteError(
            f"The query has {len(stateful)} operators with state, but {len(stored)} are stored. {_ADVICE}"
        )
    if numbers is not None:
        return {at: number for at, number in enumerate(numbers) if number is not None}
    return {at: len(stateful) - 1 - index for index, at in enumerate(stateful)}


def _values(
    decision: Decision,
    old: PlanOperator,
    new: PlanOperator,
    stored: Sequence[Mapping[str, Any]],
    wanted: Sequence[Mapping[str, Any]],
) -> tuple[Taken, ...]:
    places = _places(decision, old, stored)
    found = []
    for text, at in _places(decision, new, wanted).items():
        starts = _BUFFERS[_function(text)].starts
        for index, column in enumerate(wanted[at]):
            kind = _kind(column)
            if text not in places:
                start = starts[index] if index < len(starts) else None
                if start is not None and not can_begin(kind):
                    raise _cannot_migrate(
                        decision, f"{text} begins with a value of type {kind}, which cannot be written"
                    )
                if column["name"] == "isEmpty":
                    raise _cannot_migrate(decision, f"{text} of type {kind} begins with a value that cannot be written")
                found.append(Taken(kind, None, "", start))
                continue
            source = places[text].start + index
            was = _kind(stored[source])
            if not is_known(kind) or not (was == kind or can_widen(was, kind)):
                raise _cannot_migrate(decision, f"{text} was {was} and is {kind}")
            found.append(Taken(kind, source, was))
    return tuple(found)


def _places(decision: Decision, operator: PlanOperator, stored: Sequence[Mapping[str, Any]]) -> dict[str, slice]:
    found, at = {}, 0
    for text, _ in operator.values:
        buffer = _BUFFERS.get(_function(text))
        if buffer is None:
            raise _cannot_migrate(decision, f"the buffer of {text} is not known")
        names = buffer.names
        if names == ("sum",) and at + 1 < len(stored) and stored[at + 1]["name"] == "isEmpty":
            names = ("sum", "isEmpty")
        if tuple(column["name"] for column in stored[at : at + len(names)]) != names:
            raise _cannot_migrate(decision, f"the buffer of {text} is not where it was expected")
        if text in found:
            raise _cannot_migrate(decision, f"{text} is there twice, under two names of a column")
        found[text] = slice(at, at + len(names))
        at += len(names)
    if at != len(stored):
        raise _cannot_migrate(decision, f"its values have {len(stored)} fields, but {at} were expected")
    return found


def _function(text: str) -> str:
    return text.partition("(")[0].lower()


def _kind(column: Mapping[str, Any]) -> str:
    return str(column["type"])


# Releases of Spark differ in nullability.
_NULLABLE = re.compile(r"'(nullable|containsNull|valueContainsNull)': (True|False)")


def _types(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_NULLABLE.sub("", str(each["type"])) for each in columns]


def _cannot_migrate(decision: Decision, why: str) -> StateRewriteError:
    return StateRewriteError(
        f"The state of the {describe_operator(decision.operator)} cannot be migrated: {why}. {_ADVICE}"
    )
