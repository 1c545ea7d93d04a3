"""What a query keeps state for, as values that a person can read and that two starts can be compared by.

Bounded in size: it is part of every snapshot. What is longer is cut, and ends with a digest of the whole, so that a
    change
in what was cut off is a change still.
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

# A name and a type, a name and a value, or a column and how it is computed.
Pair = tuple[str, str]


class _Limits(NamedTuple):
    """How long a text may be, and how many there may be of a kind."""

    text: int
    items: int


_LIMITS = (_Limits(400, 60), _Limits(120, 30), _Limits(60, 4))


@dataclass(frozen=True)
class PlanOperator:
    """An operator that keeps state, or a watermark below one.

    Attributes:
        kind: Spark's name of the logical operator, such as `Aggregate`.
        keys: What it keeps state by, in the order of the key, with types.
        values: What it keeps, in the order of the value, with types.
        settings: What else it was told, such as the delay of a watermark.
        definitions: The computed columns that it uses, below the operator before it, and how they are computed.
    """

    kind: str
    keys: tuple[Pair, ...] = ()
    values: tuple[Pair, ...] = ()
    settings: tuple[Pair, ...] = ()
    definitions: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class PlanDescription:
    """The stateful part of a query; the same after a restart, on another machine and for another path of the input.

    Attributes:
        operators: Inputs before what uses them; none for a query that keeps no state.
        output_mode: Spark's name of it, where known.
    """

    operators: tuple[PlanOperator, ...] = ()
    output_mode: str | None = None

    def as_record(self) -> dict[str, Any]:
        """The same as JSON; what would be too large is cut shorter."""
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
        """`plan-2:` and a SHA-256 of the record: two plans are the same if and only if theirs are."""
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
    """Read a description as a snapshot or the catalog has it.

    Args:
        record: What `as_record` made.

    Returns:
        The description; None where there is none that this version can read, so that nothing can be compared.
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
