"""The same calls that were made against PyFlink 1.20.5, with the same answers."""

import ast
import json
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import flink as options
from dagster_ckpt.errors import CkptError
from dagster_ckpt.flink.environment import StreamExecutionEnvironment
from dagster_ckpt.values.durations import iso_duration

HERE = Path(__file__).parent
CASES = json.loads((HERE / "oracle_cases.json").read_text())["cases"]
MORE = json.loads((HERE / "oracle_more_cases.json").read_text())["cases"]
EXCEPTIONS = yaml.safe_load((HERE / "oracle_exceptions.yaml").read_text())
REJECTIONS = yaml.safe_load((HERE / "oracle_rejections.yaml").read_text())

EXCEPTED = {exception["case"] for exception in EXCEPTIONS if "case" in exception}
EXCEPTED_CALLS = {call for exception in EXCEPTIONS for call in exception.get("calls", ())}
ASKED = [case for case in CASES if case["case"] not in EXCEPTED]


def one_line(case: dict[str, Any]) -> str:
    return str(case["call"]).replace("\n", "; ")


MORE_ASKED = [case for case in MORE if one_line(case) not in EXCEPTED_CALLS]


def answer(call: str) -> Any:
    """Run the lines of a call and return the value of the last one."""
    *statements, expression = call.split("\n")
    names = {name: getattr(options, name) for name in options.__all__} | {
        "cc": options.CheckpointConfig(),
        "env": StreamExecutionEnvironment.get_execution_environment(),
        "StreamExecutionEnvironment": StreamExecutionEnvironment,
        "timedelta": timedelta,
    }
    exec("\n".join(statements), names)
    return eval(expression, names)


def as_recorded(value: Any) -> Any:
    """Write a value the way the recording does."""
    if isinstance(value, Enum):
        recorded = as_recorded(value.value)
        return {"enum": str(value), "value": recorded, "str": str(value), "repr": repr(value)}
    if isinstance(value, options.Duration):
        return {"duration": iso_duration(value // timedelta(milliseconds=1))}
    if isinstance(value, timedelta):
        return {"timedelta_ms": value / timedelta(milliseconds=1)}
    if isinstance(value, tuple):
        return {"type": "tuple", "items": [as_recorded(item) for item in value]}
    if isinstance(value, list):
        return {"type": "list", "items": [as_recorded(item) for item in value]}
    if isinstance(value, dict):
        return {"type": "dict", "items": {key: as_recorded(item) for key, item in value.items()}}
    return value


def rejected_call(call: str) -> ast.Call:
    """Find the call that is refused: the setter, or where there is none the constructor."""
    calls = [line.value for line in ast.parse(call).body if isinstance(line, ast.Expr | ast.Assign)]
    made = [each for each in calls if isinstance(each, ast.Call)]
    setters = [each for each in made if isinstance(each.func, ast.Attribute) and each.func.attr.startswith("set_")]
    return (setters or made)[0]


def call_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def expected_message(call: ast.Call) -> dict[str, str]:
    name = call_name(call)
    with_arguments = f"{name}({', '.join(ast.unparse(node) for node in [*call.args, *call.keywords])})"
    expected: dict[str, str] = REJECTIONS.get(with_arguments) or REJECTIONS[name]
    return expected


def refused_value(call: ast.Call) -> str:
    """Return the refused argument as it is shown: None if there is one, else the last one."""
    values = [eval(ast.unparse(node)) for node in [*call.args, *(keyword.value for keyword in call.keywords)]]
    if not values:
        return "()" if call_name(call) in ("StateBackend", "CheckpointStorage") else "None"
    return repr(None if None in values and values[-1] != -2 else values[-1])


def fitting_kind(flink_says: str) -> type[Exception]:
    # py4j knows no Python type error: a method for the type given "does not exist". A Python integer
    # that needs a Java long is the exception: its type is right and its value too large.
    about_the_value = (
        *("IllegalArgument", "NullPointer", "class java.lang.Long", "must not be None", "is required"),
        *("ClassNotFound", "does not implement"),
    )
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


@pytest.mark.parametrize("case", [c for c in MORE_ASKED if not c.get("rejects")], ids=one_line)
def test_more_answers_are_pyflinks(case: dict[str, Any]) -> None:
    assert as_recorded(answer(case["call"])) == case["result"]


@pytest.mark.parametrize("case", [c for c in MORE_ASKED if c.get("rejects")], ids=one_line)
def test_more_that_pyflink_rejects_is_rejected_with_what_is_allowed(case: dict[str, Any]) -> None:
    with pytest.raises(CkptError, match="must ") as rejection:
        answer(case["call"])
    assert isinstance(rejection.value, ValueError | TypeError)


def test_every_exception_names_recorded_cases_and_a_reason() -> None:
    assert {case["case"] for case in CASES} >= EXCEPTED
    assert {one_line(case) for case in MORE} >= EXCEPTED_CALLS
    assert all(len(exception["reason"]) > 40 for exception in EXCEPTIONS)
