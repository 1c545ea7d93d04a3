"""Describe the stateful part of a query from its logical plan: readable, and comparable between starts.

That is operators with their keys, what they compute, the columns computed for them, and watermarks; not filters, other
columns, sources, sinks, triggers, or the body of a Python function (use a code version). Spark compares only types, so
state of one column would continue as that of another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError

from dagster_ckpt.spark.query.description import described_field, items_of, seen_in

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_VERSION = 1
_REVISION = 4
_IGNORES_NULLS = " ignore nulls"
_MAX_OPERATORS = 30
_MAX_SIZE = 32_768

# Names of settings: a digest of what ambiguous columns are made of; the inputs of joins and unions, from the output on,
# that lead to the operator; the time zone of days and hours.
COLUMNS, BRANCH, TIME_ZONE = "columns of ", "branch", "spark.sql.session.timeZone"

Pair = tuple[str, str]


class _Limits(NamedTuple):
    text: int
    items: int


_LIMITS = (_Limits(400, 60), _Limits(120, 30), _Limits(60, 4))


@dataclass(frozen=True)
class PlanOperator:
    """An operator that keeps state, or a watermark below one.

    Attributes:
        definitions: Computed columns up to the previous operator, with their expressions.
    """

    kind: str
    keys: tuple[Pair, ...] = ()
    values: tuple[Pair, ...] = ()
    settings: tuple[Pair, ...] = ()
    definitions: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class PlanDescription:
    """The stateful operators of a query, inputs first; independent of start, machine and input path.

    Attributes:
        numbers: Spark's number of each operator, None for a watermark, if the query has branches that keep state. All
            are None if the numbers are not known. The operators of any other query are numbered from the output to the
            input.
        revision: 1 lacks the settings `COLUMNS` and `BRANCH`, 2 lacks `TIME_ZONE`. Before 4, `COLUMNS` numbered the
            sources of a join across both of its sides.
    """

    operators: tuple[PlanOperator, ...] = ()
    output_mode: str | None = None
    numbers: tuple[int | None, ...] | None = None
    revision: int = _REVISION

    @property
    def has_unknown_numbers(self) -> bool:
        return self.numbers is not None and all(number is None for number in self.numbers)

    def as_described_by(self, revision: int) -> PlanDescription:
        if revision >= _REVISION:
            return self
        before_4 = _without_moving_numbers(self.operators)
        if revision == 3:
            return replace(self, operators=before_4, revision=revision)
        operators = tuple(
            replace(each, settings=tuple(pair for pair in each.settings if pair[0] != TIME_ZONE)) for each in before_4
        )
        if revision >= 2:
            return replace(self, operators=operators, revision=revision)
        operators = tuple(
            replace(
                each,
                values=tuple((text.removesuffix(_IGNORES_NULLS), kind) for text, kind in each.values),
                settings=tuple(pair for pair in each.settings if not _is_of_revision_2(pair)),
            )
            for each in operators
            if each.kind not in ("Except", "Intersect")
        )
        return replace(self, operators=operators, numbers=None, revision=revision)

    def as_record(self) -> dict[str, Any]:
        for limits in _LIMITS:
            record = self._record(limits)
            if _size(record) <= _MAX_SIZE:
                break
        return record

    def _record(self, limits: _Limits) -> dict[str, Any]:
        operators: list[dict[str, Any]] = [
            {
                "kind": operator.kind,
                **{
                    name: [[_short(each, limits.text) for each in pair] for pair in _few(pairs, limits.items)]
                    for name in ("keys", "values", "settings", "definitions")
                    if (pairs := getattr(operator, name))
                },
            }
            for operator in self.operators[:_MAX_OPERATORS]
        ]
        left_out = self.operators[_MAX_OPERATORS:]
        if left_out:
            operators.append({"kind": f"{len(left_out)} more, {_digest(repr(left_out))}"})
        known = self.numbers if not left_out or self.numbers is None else (None,) * len(operators)
        numbers = {"numbers": list(known)} if known is not None else {}
        revised = {"revision": self.revision} if self.revision > 1 else {}
        return {"version": _VERSION, "output_mode": self.output_mode, "operators": operators, **numbers, **revised}

    @property
    def fingerprint(self) -> str:
        """Return `plan-2:` and a SHA-256 of the record; equal for equal plans only."""
        # Older fingerprints were made without these.
        record = {name: value for name, value in self.as_record().items() if name not in ("numbers", "revision")}
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=True, sort_keys=True)
        return f"plan-2:{hashlib.sha256(text.encode()).hexdigest()}"


def _without_moving_numbers(operators: tuple[PlanOperator, ...]) -> tuple[PlanOperator, ...]:
    """Drop settings with numbers across both sides of a join (see `PlanDescription.revision`)."""
    if all(each.kind != "Join" for each in operators):
        return operators
    return tuple(
        replace(each, settings=tuple(pair for pair in each.settings if not pair[0].startswith(COLUMNS)))
        for each in operators
    )


def _is_of_revision_2(setting: Pair) -> bool:
    return setting[0] == BRANCH or setting[0].startswith(COLUMNS)


class _Record(BaseModel):
    version: int
    output_mode: str | None = None
    operators: tuple[PlanOperator, ...]
    numbers: tuple[int | None, ...] | None = None
    revision: int = 1


def read_plan(record: object) -> PlanDescription | None:
    try:
        read = _Record.model_validate(record)
    except ValidationError:
        return None
    if read.version != _VERSION:
        return None
    operators = read.operators if read.revision >= _REVISION else _without_moving_numbers(read.operators)
    return PlanDescription(operators, read.output_mode, read.numbers, read.revision)


def _few(pairs: Sequence[Pair], limit: int) -> Sequence[Pair]:
    if len(pairs) <= limit:
        return pairs
    left_out = pairs[limit - 1 :]
    return [*pairs[: limit - 1], (f"{len(left_out)} more", _digest(repr(left_out)))]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]}… {_digest(text)}"


def _size(record: dict[str, Any]) -> int:
    return len(json.dumps(record))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


WATERMARK = "EventTimeWatermark"
# Operators that need of their input what is needed of their output, and what they name.
_PASS_ON = {
    *("Deduplicate", "DeduplicateWithinWatermark", WATERMARK, "Filter", "GlobalLimit", "LocalLimit"),
    *("Repartition", "RepartitionByExpression", "SubqueryAlias"),
}
_WINDOW = re.compile(
    r"named_struct\('start', knownnullable\(precisetimestampconversion\(\(\(precisetimestampconversion\((?P<time>.+?)\)"
    r" - CASE WHEN \(\(\(precisetimestampconversion\(.+?\) - (?P<start>-?\d+)L\) % (?P<slide>\d+)L\) <"
    r".*\+ (?P<size>\d+)L\)+"
)
# Seeds are generated when a plan is created.
_SEED = re.compile(r"-?\d{5,}L?")


def plan_of_query(query: StreamingQuery) -> PlanDescription | None:
    """Describe the plan; None over Spark Connect, or until it exists."""

    def described(execution: Any) -> PlanDescription:
        plan = execution.logicalPlan()
        return describe_plan(plan, execution.outputMode(), _as_executed(plan, execution.sparkSession()))

    return seen_in(query, described)


def plan_of_writer(writer: DataStreamWriter) -> PlanDescription | None:
    from py4j.protocol import Py4JError

    jvm_writer: Any = getattr(writer, "_jwrite", None)
    if jvm_writer is None:
        return None
    try:
        frame = writer._df._jdf
        plan = frame.queryExecution().analyzed()
        executed = _as_executed(plan, frame.sparkSession())
        return describe_plan(plan, described_field(jvm_writer, "outputMode"), executed)
    except Py4JError:
        return None


def _as_executed(plan: Any, session: Any) -> Any | None:
    """Optimize a plan; None if Spark cannot do this for a stream outside its query."""
    from py4j.protocol import Py4JError

    try:
        return session.sessionState().optimizer().execute(plan)
    except Py4JError:
        return None


def describe_plan(plan: Any, output_mode: object = None, executed: Any | None = None) -> PlanDescription:
    """Describe a plan; the optimized one, `executed`, shows which columns a later `select` keeps, in which order."""
    walk = _Walk(_stored_columns(executed) if executed is not None else None)
    walk.visit(plan, None)
    if all(operator.kind == WATERMARK for operator in walk.operators):
        # A watermark alone keeps no state.
        return PlanDescription()
    mode = str(output_mode) if output_mode is not None else None
    numbers: tuple[int | None, ...] | None = tuple(walk.numbers)
    stateful = [number for number in walk.numbers if number is not None]
    if stateful == sorted(stateful, reverse=True):
        return PlanDescription(tuple(walk.operators), mode)
    if walk.defines_state:
        # They are numbered where they are used, but visited where they are defined.
        numbers = (None,) * len(walk.numbers) if walk.has_branches else None
    return PlanDescription(tuple(walk.operators), mode, numbers)


@dataclass(frozen=True)
class _Stored:
    """What Spark keeps: the place of each aggregate by the id of its result, and ids of columns that joins keep."""

    aggregates: Mapping[int, int]
    joined: Set[int]


class _Walk:
    """Visits inputs first, and follows columns by Spark's ids, which this session assigned."""

    def __init__(self, stored: _Stored | None) -> None:
        self._stored = stored
        self.operators: list[PlanOperator] = []
        self.numbers: list[int | None] = []
        self._counted = 0
        self._computed: dict[int, tuple[str, list[Any]]] = {}
        # The name and source of each column that is read; columns of tables.
        self._read: dict[int, tuple[str, str]] = {}
        self._tables: set[int] = set()
        # By side of the joins above, so that a source added on one side moves no number of the other.
        self._sources: Counter[str] = Counter()
        self._inputs: dict[int, set[int]] = {}
        self._meanings: dict[int, str] = {}
        self.has_branches = False
        # Whether a definition of SQL's WITH keeps state.
        self.defines_state = False

    def visit(self, node: Any, needed: set[int] | None, branch: str = "", side: str = "") -> None:
        name = str(node.nodeName())
        name = _RENAMED.get(name, name)
        below = _needed_below(node, name, needed)
        children = items_of(node.children())
        describe = _STATEFUL.get(name)
        joins_a_table = name == "Join" and not all(child.isStreaming() for child in children)
        if not node.isStreaming() or joins_a_table:
            describe = None
        number: int | None = None
        counted = self._counted
        if describe is not None and name != WATERMARK:
            # Spark numbers an operator before its inputs, and inputs from left to right.
            number, self._counted = self._counted, self._counted + 1
        # Spark executes definitions of SQL's WITH where they are used.
        has_branches = name != "WithCTE" and sum(child.isStreaming() for child in children) > 1
        self.has_branches |= has_branches
        for at, child in enumerate(children):
            if child.isStreaming():
                below_side = f"{side}{at}" if has_branches and name == "Join" else side
                self.visit(child, below, f"{branch}{at}" if has_branches else branch, below_side)
            else:
                self._note_table(child)
        if not children:
            self._note_read(node, f"source {self._sources[side]}{f' of side {side}' if side else ''}")
            self._sources[side] += 1
        if describe is not None:
            self._describe(node, name, describe, below, branch)
            self.numbers.append(number)
        self.defines_state |= name == "CTERelationDef" and self._counted > counted
        self._note_computed(node, name)

    def _describe(self, node: Any, name: str, describe: _Describe, below: set[int] | None, branch: str) -> None:
        described, operands = describe(node, _Needed(below, self._stored))
        if name == WATERMARK:
            self.operators.append(replace(described, kind=name))
            return
        settings = [*described.settings, *([(BRANCH, branch)] if branch else [])]
        used = {number for _, operand in operands for number in _references(operand)}
        unclear = self._ambiguous(self._reached(used))
        settings += [
            (f"{COLUMNS}{text}", _digest(self._resolved(operand)))
            for text, operand in (operands if unclear else ())
            if not unclear.isdisjoint(self._reached(_references(operand)))
        ]
        made = [each for number in self._reached(used) for each in self._computed.get(number, ("", []))[1]]
        zones = {zone for each in (*made, *(operand for _, operand in operands)) for zone in _time_zones(each)}
        settings += [(TIME_ZONE, zone) for zone in sorted(zones)]
        definitions = tuple(self._definitions(used))
        self.operators.append(replace(described, kind=name, settings=tuple(settings), definitions=definitions))

    def _note_read(self, node: Any, source: str) -> None:
        for column in items_of(node.output()):
            self._read[_id(column)] = (str(column.name()), source)

    def _note_table(self, node: Any) -> None:
        self._note_read(node, "a table")
        self._tables |= {_id(column) for column in items_of(node.output())}

    def _ambiguous(self, reached: Set[int]) -> set[int]:
        """Return columns that their name does not identify: others have it, or they are of a table."""
        names = {each: (self._computed.get(each) or self._read[each])[0].casefold() for each in reached}
        found = Counter(names.values())
        return {each for each, name in names.items() if found[name] > 1 or each in self._tables}

    def _made_of(self, number: int) -> set[int]:
        if number not in self._inputs:
            made = self._computed[number][1] if number in self._computed else ()
            self._inputs[number] = {each for expression in made for each in _references(expression)}
        return self._inputs[number]

    def _reached(self, used: Iterable[int]) -> set[int]:
        found: set[int] = set()
        to_follow = list(used)
        while to_follow:
            number = to_follow.pop()
            if number not in found and (number in self._computed or number in self._read):
                found.add(number)
                to_follow += self._made_of(number)
        return found

    def _resolved(self, expression: Any) -> str:
        """Return the expression with what its columns are made of, down to the sources."""
        to_follow, seen = list(_references(expression)), set[int]()
        while to_follow:
            number = to_follow[-1]
            inputs = self._made_of(number) - seen if number not in seen else ()
            seen.add(number)
            if inputs:
                to_follow += inputs
                continue
            to_follow.pop()
            if number in self._computed and number not in self._meanings:
                words = [self._in_words(each) for each in self._computed[number][1]]
                self._meanings[number] = _digest(json.dumps(words))
        return self._in_words(expression)

    def _in_words(self, expression: Any) -> str:
        columns = {_id(column): str(column.name()) for column in _columns_in(expression)}
        meanings = [
            self._meanings.get(number) or " of ".join(self._read.get(number, (name,)))
            for number, name in columns.items()
        ]
        return f"{_window(_sql(expression))} of {meanings}"

    def _note_computed(self, node: Any, name: str) -> None:
        if name in ("Project", "Aggregate"):
            for column in items_of(node.projectList() if name == "Project" else node.aggregateExpressions()):
                if column.nodeName() == "Alias":
                    self._computed[_id(column)] = (str(column.name()), [column.child()])
        elif name == "Expand":
            # Sliding windows make a row for each window.
            rows = [items_of(row) for row in items_of(node.projections())]
            for index, column in enumerate(items_of(node.output())):
                expressions = [row[index] for row in rows]
                if any(each.nodeName() != "AttributeReference" for each in expressions):
                    self._computed[_id(column)] = (str(column.name()), expressions)
        elif name == "Generate":
            for column in items_of(node.generatorOutput()):
                self._computed[_id(column)] = (str(column.name()), [node.generator()])
        elif name == "Union":
            first, *others = [items_of(child.output()) for child in items_of(node.children())]
            for index, column in enumerate(items_of(node.output())):
                from_others = [other[index] for other in others]
                known = self._computed.pop(_id(first[index]), None)
                from_first = known[1] if known is not None else []
                has_other_names = any(str(other.name()) != str(column.name()) for other in from_others)
                if known is not None or has_other_names or any(_id(each) in self._computed for each in from_others):
                    self._computed[_id(column)] = (str(column.name()), [*from_first, *from_others])
                    # It has the same id as the first input's column.
                    self._inputs.pop(_id(column), None)
                    self._meanings.pop(_id(column), None)

    def _definitions(self, used: set[int]) -> Iterable[Pair]:
        found: dict[int, list[Pair]] = {}
        to_follow = list(used)
        while to_follow:
            number = to_follow.pop()
            if number in found or number not in self._computed:
                continue
            name, expressions = self._computed[number]
            texts = dict.fromkeys(_window(_sql(expression)) for expression in expressions)
            found[number] = [(name, text) for text in texts if text != name]
            to_follow += self._made_of(number)
        return sorted({pair for pairs in found.values() for pair in pairs})


def _needed_below(node: Any, name: str, needed: set[int] | None) -> set[int] | None:
    if name == "Project":
        columns = [column for column in items_of(node.projectList()) if needed is None or _id(column) in needed]
        return {number for column in columns for number in _references(column)}
    if name == "Aggregate":
        return _references(node)
    if (name in _PASS_ON or name == "Join") and needed is not None:
        return needed | _references(node)
    return None


def _time_zones(expression: Any) -> Iterator[str]:
    loader = expression.getClass().getClassLoader()
    replaced = loader.loadClass("org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable")
    to_visit = [expression]
    while to_visit:
        node = to_visit.pop()
        if replaced.isInstance(node):
            to_visit.append(node.replacement())
            continue
        to_visit += items_of(node.children())
        if _is_zoned(node):
            # UTC has several names.
            name = str(node.zoneId().normalized().getId())
            yield "UTC" if name == "Z" else name


# Expressions whose result for a timestamp depends on the time zone.
_ZONED = {
    *("Hour", "Minute", "Second", "SecondWithFraction", "TruncTimestamp", "DateFormatClass", "FromUnixTime"),
    *("GetTimestamp", "MonthsBetween"),
}


def _is_zoned(node: Any) -> bool:
    name = node.nodeName()
    if name in ("UnixTimestamp", "ToUnixTimestamp"):
        return str(node.left().dataType().typeName()) != "timestamp"
    if name != "Cast":
        return name in _ZONED
    # Spark 3.5 also claims this of a text that becomes a date.
    is_date = node.child().dataType().typeName() == "string" and node.dataType().typeName() == "date"
    return bool(node.needsTimeZone()) and not is_date


def _references(node: Any) -> set[int]:
    return {_id(column) for column in items_of(node.references().toSeq())}


def _columns_in(expression: Any) -> Iterator[Any]:
    name = expression.nodeName()
    if name == "AttributeReference":
        yield expression
    below = items_of(expression.children())
    if name == "Between":
        below = [expression.replacement()]
    elif name == "With":
        below = [*items_of(expression.defs()), expression.child()]
    for child in below:
        yield from _columns_in(child)


def _stored_columns(executed: Any) -> _Stored:
    aggregates: dict[int, int] = {}
    joined: set[int] = set()

    def visit(node: Any) -> None:
        children = items_of(node.children())
        for expression in items_of(node.aggregateExpressions()) if node.nodeName() == "Aggregate" else ():
            for function in _functions(expression):
                aggregates.setdefault(int(function.resultId().id()), len(aggregates))
        if node.nodeName() == "Join" and all(child.isStreaming() for child in children):
            joined.update(_id(column) for child in children for column in items_of(child.output()))
        for child in children:
            visit(child)

    visit(executed)
    return _Stored(aggregates, joined)


class _Needed(NamedTuple):
    ids: set[int] | None
    stored: _Stored | None


# An operator, and the expressions that describe it, by their text.
_Described = tuple[PlanOperator, list[tuple[str, Any]]]
_Describe = Callable[[Any, _Needed], _Described]


def _aggregate(node: Any, needed: _Needed) -> _Described:
    functions: dict[str, tuple[int, Any]] = {}
    for expression in items_of(node.aggregateExpressions()):
        for function in _functions(expression):
            number = int(function.resultId().id())
            at = needed.stored.aggregates.get(number) if needed.stored is not None else len(functions)
            text = _function_text(function)
            # Spark drops an aggregate that nothing uses, and keeps one of equal ones.
            if at is not None and at < functions.get(text, (at + 1, None))[0]:
                functions[text] = (at, function)
    kept = sorted((at, text, _type(function)) for text, (at, function) in functions.items())
    values = tuple((text, kind) for _, text, kind in kept)
    operands = [*_shown(node.groupingExpressions()), *((text, functions[text][1]) for _, text, _ in kept)]
    return PlanOperator("", _columns(node.groupingExpressions()), values), operands


def _function_text(function: Any) -> str:
    kind = function.aggregateFunction()
    ignores = kind.nodeName() in ("First", "Last") and kind.ignoreNulls()
    return f"{_sql(function)}{_IGNORES_NULLS}" if ignores else _sql(function)


def _functions(expression: Any) -> Iterable[Any]:
    if expression.nodeName() == "AggregateExpression":
        yield expression
        return
    for child in items_of(expression.children()):
        yield from _functions(child)


def _deduplicate(node: Any, _needed: _Needed) -> _Described:
    return PlanOperator("", _columns(node.keys())), _shown(node.keys())


def _distinct(node: Any, _needed: _Needed) -> _Described:
    return PlanOperator("", _columns(node.output())), _shown(node.output())


def _limit(node: Any, _needed: _Needed) -> _Described:
    return PlanOperator("", settings=(("limit", _sql(node.limitExpr())),)), []


def _watermark(node: Any, _needed: _Needed) -> _Described:
    return PlanOperator("", (_column(node.eventTime()),), settings=(("delay", str(node.delay())),)), []


def _join(node: Any, needed: _Needed) -> _Described:
    kept = [
        (side, column)
        for side, child in (("left", node.left()), ("right", node.right()))
        for column in items_of(child.output())
        if (_id(column) in needed.stored.joined if needed.stored is not None else _is_in(column, needed.ids))
    ]
    condition = [node.condition().get()] if node.condition().isDefined() else []
    settings = (("type", str(node.joinType())), ("condition", _sql(condition[0]) if condition else ""))
    values = tuple((f"{side}.{column.name()}", _type(column)) for side, column in kept)
    columns = [(text, column) for (text, _), (_, column) in zip(values, kept, strict=True)]
    return PlanOperator("", values=values, settings=settings), [*(("condition", each) for each in condition), *columns]


def _is_in(column: Any, needed: set[int] | None) -> bool:
    return needed is None or _id(column) in needed


def _groups(*details: str) -> _Describe:

    def describe(node: Any, _needed: _Needed) -> _Described:
        keys = (
            items_of(node.child().output())[: int(node.groupingAttributesLen())]
            if node.nodeName() in ("TransformWithStateInPySpark", *_RENAMED)
            else items_of(node.groupingAttributes())
        )
        settings = tuple((detail, _setting(node, detail)) for detail in details)
        operands = [(_column(key)[0], key) for key in keys]
        return PlanOperator("", tuple(_column(key) for key in keys), settings=settings), operands

    return describe


_INTERVAL = re.compile(r"CAST\(INTERVAL '([^']*)' AS INTERVAL\)")
_REFERENCE = "commonexpressionref()"
# Spark 4.0's name, so that an upgrade keeps the fingerprint.
_RENAMED = {"TransformWithStateInPandas": "TransformWithStateInPySpark"}
_STATEFUL: dict[str, _Describe] = {
    "Aggregate": _aggregate,
    "Deduplicate": _deduplicate,
    "DeduplicateWithinWatermark": _deduplicate,
    "Distinct": _distinct,
    # Against a table: Spark makes each row distinct.
    "Except": _distinct,
    "Intersect": _distinct,
    WATERMARK: _watermark,
    "FlatMapGroupsInPandasWithState": _groups("stateType", "timeout"),
    "FlatMapGroupsWithState": _groups("timeout"),
    "GlobalLimit": _limit,
    "Join": _join,
    "TransformWithState": _groups("timeMode"),
    "TransformWithStateInPySpark": _groups("timeMode"),
}


def _shown(expressions: Any) -> list[tuple[str, Any]]:
    return [(_column(expression)[0], expression) for expression in items_of(expressions)]


def _columns(expressions: Any) -> tuple[Pair, ...]:
    return tuple(_column(expression) for expression in items_of(expressions))


def _column(expression: Any) -> Pair:
    is_column = expression.nodeName() == "AttributeReference"
    return (str(expression.name()) if is_column else _sql(expression), _type(expression))


def _type(expression: Any) -> str:
    return str(expression.dataType().catalogString())


def _setting(node: Any, detail: str) -> str:
    value = getattr(node, detail)()
    return str(value.catalogString() if detail == "stateType" else value)


def _sql(expression: Any) -> str:
    """Return SQL with names instead of column ids, which differ in every session."""
    # Spark 3.5 writes the type of an interval twice.
    sql = _INTERVAL.sub(r"CAST('\1' AS INTERVAL)", _without_between(expression))
    return sql if expression.deterministic() else _SEED.sub("?", sql)


def _without_between(expression: Any) -> str:
    """Return SQL in which BETWEEN is two comparisons, as Spark 3.5 parses it.

    Later releases keep a function; its replacement computes the value once and refers to it twice.
    """
    text, name = str(expression.sql()), expression.nodeName()
    if name == "Between":
        return _without_between(expression.replacement())
    if name == "With" and expression.defs().size() == 1:
        value = _without_between(expression.defs().apply(0).child())
        return _without_between(expression.child()).replace(_REFERENCE, value)
    if "between(" not in text:
        return text
    for child in items_of(expression.children()):
        text = text.replace(str(child.sql()), _without_between(child))
    return text


def _window(text: str) -> str:
    found = _WINDOW.fullmatch(text)
    if found is None:
        return text
    size, slide, start = (int(found[part]) for part in ("size", "slide", "start"))
    return (
        f"window({found['time']}, size {_duration(size)}, slide {_duration(slide)}, start {_duration(start % slide)})"
    )


def _duration(micros: int) -> str:
    return f"{micros / 1_000_000:g} s"


def _id(column: Any) -> int:
    return int(column.exprId().id())
