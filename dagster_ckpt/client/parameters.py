"""The parameters of the client's methods as options, from which Dagster config and command line are made."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from dagster_ckpt.stream.start_from import StartFrom, start_options

_KINDS = (bool, int, float, str, list, dict)
# What callers supply, besides sessions, callbacks and results of other methods.
_GIVEN = frozenset({"self", "run_id"})
# Docstrings describe the others.
_USUAL = {
    "label": "A name to start from later, such as before-release-42.",
    "target_directory": "Folder for the savepoint, as a URL. Default: the configured savepoint folder.",
    "timeout_s": "Seconds to wait for an answer of the running stream; after that the request is withdrawn.",
}
_UNLESS_DESCRIBED = {
    "stream": "Stream id (or asset key) of the streaming asset, such as departure_delays.",
    "snapshot": "Id, number (chk-7), label or location of a snapshot that the catalog lists.",
    "savepoint": "Snapshot id, label or location of a completed savepoint.",
}
REQUIRED = inspect.Parameter.empty


class Parameter(NamedTuple):
    """A parameter of a method.

    Attributes:
        kind: bool, int, float, str, list, dict, or an enum.
        default: `REQUIRED`: it has none; None: no value.
    """

    name: str
    kind: type[Any]
    default: Any
    description: str


class _Names(dict[str, Any]):
    """Names in annotations; no option has a type that only type checkers import."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def parameters(method: Callable[..., Any]) -> list[Parameter]:
    """A method's options; a `StartFrom` stands for its fields."""
    described, found = _described(method), []
    for each in _signature(method):
        if each.annotation is StartFrom:
            found += [Parameter(*option[:4]) for option in start_options()]
        elif each.name not in _GIVEN and (each.annotation in _KINDS or _is_enum(each.annotation)):
            description = _USUAL.get(each.name) or described.get(each.name) or _UNLESS_DESCRIBED.get(each.name, "")
            found.append(Parameter(each.name, each.annotation, each.default, description))
    return found


def arguments(method: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn option values into the method's arguments."""
    return {
        each.name: StartFrom.from_record(values) if each.annotation is StartFrom else values[each.name]
        for each in _signature(method)
        if each.name in values
    }


def summary(method: Callable[..., Any]) -> str:
    """The first sentence of a method's docstring, without marks of code."""
    return (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ").replace("`", "")


def _signature(method: Callable[..., Any]) -> list[inspect.Parameter]:
    names = _Names({**method.__globals__, StartFrom.__name__: StartFrom})
    found = inspect.signature(method, eval_str=True, locals=names).parameters.values()
    return [each.replace(annotation=_kind(each.annotation)) for each in found]


def _kind(annotation: Any) -> Any:
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    kinds = [get_origin(each) or each for each in members if each is not NoneType]
    best = next((each for each in kinds if each is StartFrom or _is_enum(each)), kinds[0])
    return next((kind for origin, kind in ((Mapping, dict), (Sequence, list)) if best is origin), best)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _described(method: Callable[..., Any]) -> dict[str, str]:
    _, _, below = (inspect.getdoc(method) or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", below)[0]
    texts = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: _readable(text) for name, text in texts}


def _readable(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace("`", "")
    return re.sub("^The stream", "Stream id (or asset key) of the stream", text)
