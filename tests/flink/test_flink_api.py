"""Every class and method that PyFlink documents is here, with the same parameters."""

import inspect
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

import dagster_ckpt
from dagster_ckpt import flink

API = yaml.safe_load((Path(__file__).parent / "flink_api.yaml").read_text())
METHODS = [(name, method, text) for name, kind in API.items() for method, text in kind.get("methods", {}).items()]


def written(signature: inspect.Signature) -> str:
    """Write the positional parameters of a signature as documentation does."""
    positional = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    return str(inspect.Signature(positional)).removeprefix("(").removesuffix(")")


@pytest.mark.parametrize("name", list(API))
def test_every_documented_class_is_public(name: str) -> None:
    assert name in flink.__all__
    assert getattr(flink, name).__name__ == name
    assert name in dir(flink)


@pytest.mark.parametrize(("name", "method", "parameters"), METHODS)
def test_every_documented_method_has_its_parameters(name: str, method: str, parameters: str) -> None:
    assert written(inspect.signature(getattr(getattr(flink, name), method))) == parameters


@pytest.mark.parametrize("name", [name for name, kind in API.items() if kind["constructor"]])
def test_a_constructor_takes_the_documented_arguments(name: str) -> None:
    assert written(inspect.signature(getattr(flink, name).__init__)) == API[name]["constructor"]


@pytest.mark.parametrize(
    ("name", "constant"), [(name, constant) for name, kind in API.items() for constant in kind.get("constants", ())]
)
def test_every_documented_constant_is_there_and_pickles(name: str, constant: str) -> None:
    value: Any = getattr(getattr(flink, name), constant)
    assert pickle.loads(pickle.dumps(value)) == value
    assert not isinstance(value, Enum) or pickle.loads(pickle.dumps(value)) is value


def test_every_public_name_can_be_imported() -> None:
    for module in (dagster_ckpt, flink):
        assert all(getattr(module, name) is not None for name in module.__all__)
