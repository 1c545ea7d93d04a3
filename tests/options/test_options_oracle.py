"""The same calls that were made against PyFlink 1.20.5, with the same answers."""

import ast
import json
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import options
from dagster_ckpt.errors import CkptError

HERE = Path(__file__).parent
CASES = json.loads((HERE / "oracle_cases.json").read_text())["cases"]
EXCEPTIONS = yaml.safe_load((HERE / "oracle_exceptions.yaml").read_text())
REJECTIONS = yaml.safe_load((HERE / "oracle_rejections.yaml").read_text())

EXCEPTED = {exception["case"] for exception in EXCEPTIONS}
ASKED = [case for case in CASES if case["case"] not in EXCEPTED]


def answer(call: str) -> Any:
    """Run the lines of a call and return the value of the last one."""
    *statements, expression = call.split("\n")
    names = {name: getattr(options, name) for name in options.__all__} | {"cc": options.CheckpointConfig()}
    exec("\n".join(statements), names)
    return eval(expression, names)


def as_recorded(value: Any) -> Any:
    """Write a value the way the recording does."""
    if isinstance(value, Enum):
        return {"enum": str(value), "value": value.value, "str": str(value), "repr": repr(value)}
    if isinstance(value, timedelta):
        return {"timedelta_ms": value / timedelta(milliseconds=1)}
    if isinstance(value, tuple):
        return {"type": "tuple", "items": [as_recorded(item) for item in value]}
    if isinstance(value, dict):
        return {"type": "dict", "items": {key: as_recorded(item) for key, item in value.items()}}
    return value


def rejected_call(call: str) -> ast.Call:
    """Find the call that is refused: the first one in the text."""
    first = ast.parse(call).body[0]
    assert isinstance(first, ast.Expr | ast.Assign)
    assert isinstance(first.value, ast.Call)
    return first.value


def expected_message(call: ast.Call) -> dict[str, str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    with_arguments = f"{name}({', '.join(ast.unparse(node) for node in [*call.args, *call.keywords])})"
    expected: dict[str, str] = REJECTIONS.get(with_arguments) or REJECTIONS[name]
    return expected


def refused_value(call: ast.Call) -> str:
    """Return the refused argument as it is shown: None if there is one, else the last."""
    values = [eval(ast.unparse(node)) for node in [*call.args, *(keyword.value for keyword in call.keywords)]]
    if not values:
        return "()"
    return repr(None if None in values and values[-1] != -2 else values[-1])


def fitting_kind(flink_says: str) -> type[Exception]:
    # py4j knows no Python type error: a method for the type given "does not exist". A Python integer
    # that needs a Java long is the exception: its type is right and its value too large.
    about_the_value = ("IllegalArgument", "NullPointer", "class java.lang.Long", "must not be None")
    return ValueError if any(sign in flink_says for sign in about_the_value) else TypeError


@pytest.mark.parametrize("case", [c for c in ASKED if not c.get("rejects")], ids=lambda case: case["case"])
def test_the_answer_is_pyflinks(case: dict[str, Any]) -> None:
    assert as_recorded(answer(case["call"])) == case["result"]


@pytest.mark.parametrize("case", [c for c in ASKED if c.get("rejects")], ids=lambda case: case["case"])
def test_what_pyflink_rejects_is_rejected_in_words_that_help(case: dict[str, Any]) -> None:
    call = rejected_call(case["call"])
    expected = expected_message(call)
    with pytest.raises(CkptError) as rejection:
        answer(case["call"])
    message = str(rejection.value)
    assert isinstance(rejection.value, fitting_kind(case["flink_says"]))
    assert expected["option"] in message
    assert expected["allowed"] in message
    assert refused_value(call) in message


def test_every_exception_names_a_recorded_case_and_a_reason() -> None:
    assert {case["case"] for case in CASES} >= EXCEPTED
    assert all(len(exception["reason"]) > 40 for exception in EXCEPTIONS)
