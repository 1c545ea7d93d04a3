"""A fingerprint of what a query keeps state for.

It is the same after a restart, on another machine and for another path of the input, and changes when the stateful
part of the query does: an operator, its keys, what it computes, the columns computed for it, a watermark. Filters,
columns that are only passed on, sinks and triggers are not in it, nor is the body of a Python function (a code
version tells that).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_FORMAT = "plan-1"
# Logical operators of Spark 4.3 that keep state when their input is a stream, and what their expressions do not tell.
_STATEFUL: dict[str, tuple[str, ...]] = {
    "Aggregate": (),
    "Distinct": (),
    "Deduplicate": (),
    "DeduplicateWithinWatermark": (),
    "EventTimeWatermark": ("delay",),
    "FlatMapGroupsInPandasWithState": ("stateType", "timeout"),
    "FlatMapGroupsWithState": ("timeout",),
    "GlobalLimit": (),
    "Join": ("joinType",),
    "TransformWithState": ("timeMode",),
    "TransformWithStateInPySpark": ("timeMode",),
}

_Described = list[Any]


def plan_fingerprint(query: StreamingQuery) -> str | None:
    """Fingerprint of a running or stopped query, such as `plan-1:` and 64 hexadecimal digits.

    Args:
        query: The query; its first batch has been planned.

    Returns:
        The fingerprint, or None where the plan cannot be seen: over Spark Connect, or before Spark has made it.
    """
    # Imported here: whoever only reads live directories needs no Spark.
    from py4j.protocol import Py4JError  # noqa: PLC0415

    jvm_query: Any = getattr(query, "_jsq", None)
    if jvm_query is None:
        return None
    try:
        return fingerprint(jvm_query.streamingQuery().logicalPlan())
    except Py4JError:
        return None


def fingerprint(plan: Any) -> str:
    """Fingerprint of a logical plan of the JVM.

    Args:
        plan: A Catalyst `LogicalPlan`, as py4j gives it.
    """
    # Columns computed above the topmost operator are for the sink alone.
    _, operators = _describe(plan)
    text = json.dumps(operators, separators=(",", ":"), ensure_ascii=True)
    return f"{_FORMAT}:{hashlib.sha256(text.encode()).hexdigest()}"


def _describe(node: Any) -> tuple[list[str], list[_Described]]:
    """Columns computed for whoever keeps state above, and the operators at and below a node."""
    computed: list[str] = []
    operators: list[_Described] = []
    for child in _items(node.children()):
        child_computed, child_operators = _describe(child)
        computed += child_computed
        operators += child_operators
    name = str(node.nodeName())
    if name == "Project":
        # A name alone passes a column on; Spark adds and removes such projections as it likes.
        computed += [_sql(column) for column in _items(node.projectList()) if column.nodeName() == "Alias"]
    if not _keeps_state(node, name):
        return computed, operators
    details = [str(getattr(node, detail)()) for detail in _STATEFUL[name]]
    expressions = [_sql(expression) for expression in _items(node.expressions())]
    return [], [[name, details, expressions, str(node.schema().catalogString()), computed, operators]]


def _keeps_state(node: Any, name: str) -> bool:
    if name not in _STATEFUL or not node.isStreaming():
        return False
    return name != "Join" or all(child.isStreaming() for child in _items(node.children()))


def _sql(expression: Any) -> str:
    """An expression by its names: the ids that Spark gives to columns are others in every session."""
    return str(expression.sql())


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]
