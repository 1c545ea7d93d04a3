"""Descriptions of the stateful part of a query: readable, and comparable between starts.

Their size is bounded, because every snapshot contains one. Longer text is truncated and ends with a
digest of the whole, so a change in the truncated part is still detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

_VERSION = 1
_MAX_OPERATORS = 30
_MAX_SIZE = 32_768

# A name and a type, a name and a value, or a column and its expression.
Pair = tuple[str, str]


class _Limits(NamedTuple):
    """Limits on the length of texts and on their number."""

    text: int
    items: int


_LIMITS = (_Limits(400, 60), _Limits(120, 30), _Limits(60, 4))


@dataclass(frozen=True)
class PlanOperator:
    """An operator that keeps state, or a watermark below one.

    Attributes:
        kind: Spark's name of the logical operator, such as `Aggregate`.
        keys: Key columns of its state, in order, with types.
        values: Value columns of its state, in order, with types.
        settings: Other parameters, such as the delay of a watermark.
        definitions: The computed columns that it uses, up to the previous operator, with their
            expressions.
    """

    kind: str
    keys: tuple[Pair, ...] = ()
    values: tuple[Pair, ...] = ()
    settings: tuple[Pair, ...] = ()
    definitions: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class PlanDescription:
    """The stateful part of a query. It does not depend on the start, the machine or the path of the input.

    Attributes:
        operators: The operators, inputs first; empty for a query that keeps no state.
        output_mode: Spark's name of the output mode, if known.
    """

    operators: tuple[PlanOperator, ...] = ()
    output_mode: str | None = None

    def as_record(self) -> dict[str, Any]:
        """The description as JSON; values that would be too large are truncated."""
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
                    for name, pairs in _lists(operator)
                    if pairs
                },
            }
            for operator in self.operators[:_MAX_OPERATORS]
        ]
        left_out = self.operators[_MAX_OPERATORS:]
        if left_out:
            operators.append({"kind": f"{len(left_out)} more, {_digest(repr(left_out))}"})
        return {"version": _VERSION, "output_mode": self.output_mode, "operators": operators}

    @property
    def fingerprint(self) -> str:
        """`plan-2:` and a SHA-256 of the record: two plans are equal if and only if their fingerprints are."""
        text = json.dumps(self.as_record(), separators=(",", ":"), ensure_ascii=True, sort_keys=True)
        return f"plan-2:{hashlib.sha256(text.encode()).hexdigest()}"


class _Operator(BaseModel):
    kind: str
    keys: list[Pair] = []
    values: list[Pair] = []
    settings: list[Pair] = []
    definitions: list[Pair] = []


class _Record(BaseModel):
    version: int
    output_mode: str | None = None
    operators: list[_Operator]


def read_plan(record: object) -> PlanDescription | None:
    """Parse a description from a snapshot or the catalog.

    Args:
        record: The result of `as_record`.

    Returns:
        The description; None if this version cannot parse it, so that no comparison is possible.
    """
    try:
        read = _Record.model_validate(record)
    except ValidationError:
        return None
    if read.version != _VERSION:
        return None
    operators = (
        PlanOperator(each.kind, tuple(each.keys), tuple(each.values), tuple(each.settings), tuple(each.definitions))
        for each in read.operators
    )
    return PlanDescription(tuple(operators), read.output_mode)


def _lists(operator: PlanOperator) -> tuple[tuple[str, Sequence[Pair]], ...]:
    return (
        ("keys", operator.keys),
        ("values", operator.values),
        ("settings", operator.settings),
        ("definitions", operator.definitions),
    )


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
