"""Error messages for unknown fields of a component: where the field is, and the nearest valid name.

Dagster allows a template in every part of a component, so pydantic also tries each part as text,
and JSON schema tools try alternatives. Without this module, both would report the parts around a
misspelled field instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

_Place = tuple[str | int, ...]
# Errors of the alternatives "text" (for a template) and "nothing" for a part that is neither.
_OF_ALTERNATIVES = ("string_type", "none_required")


@cache
def with_field_errors(model: type[BaseModel]) -> type[BaseModel]:
    """A model of a component's YAML whose validation errors and JSON schema name unknown fields.

    Args:
        model: The model that Dagster derived from the component.
    """

    def with_names(cls: type[BaseModel], given: Any, handler: ModelWrapValidatorHandler[BaseModel]) -> BaseModel:
        try:
            return handler(given)
        except ValidationError as error:
            raise _with_field_names(error, cls, given) from None

    validators: dict[str, Any] = {"with_names": model_validator(mode="wrap")(with_names)}
    checked = create_model(
        model.__name__,
        __base__=model,
        __doc__=model.__doc__,
        __validators__=validators,
    )
    checked.model_json_schema = lambda *args, **how: _with_names(  # type: ignore[method-assign]
        model.model_json_schema(*args, **how), model
    )
    return checked


def _with_field_names(error: ValidationError, model: type[BaseModel], given: Any) -> ValidationError:
    placed = [(_place(each["loc"], given, each["type"] == "missing"), each) for each in error.errors()]
    real = [place for place, each in placed if each["type"] not in _OF_ALTERNATIVES]
    details: list[InitErrorDetails] = []
    for place, each in placed:
        if each["type"] in _OF_ALTERNATIVES and any(other[: len(place)] == place for other in real):
            continue
        detail = InitErrorDetails(type=each["type"], loc=place, input=each["input"])
        if "ctx" in each:
            detail["ctx"] = each["ctx"]
        if each["type"] == "extra_forbidden":
            why = _unknown(str(place[-1]), _names_at(model, place[:-1]))
            # Do not show the value: it may be a secret in the wrong place.
            detail = InitErrorDetails(type="value_error", loc=place, input=place[-1], ctx={"error": why})
        details.append(detail)
    return ValidationError.from_exception_data(error.title, details)


def _unknown(name: str, known: Sequence[str]) -> ValueError:
    nearest = get_close_matches(name, known, n=1, cutoff=0.4)
    advice = f"Did you mean {nearest[0]}? " if nearest else ""
    return ValueError(f"There is no field {name} here. {advice}The fields are: {', '.join(known)}.")


def _place(loc: Sequence[str | int], given: Any, is_missing: bool) -> _Place:
    """The location in the YAML: pydantic's location also contains the types it tried."""
    place: list[str | int] = []
    for index, step in enumerate(loc):
        is_item = isinstance(given, list | tuple) and isinstance(step, int) and step < len(given)
        if is_item or (isinstance(given, dict) and step in given):
            given = given[step]
        elif not (is_missing and index == len(loc) - 1):
            continue
        place.append(step)
    return tuple(place)


def _names_at(model: type[BaseModel], place: Iterable[str | int]) -> list[str]:
    models = [model]
    for step in place:
        if isinstance(step, str):
            models = [inner for each in models for inner in _inner(each, step)]
    return sorted({name for each in models for name in _fields(each)})


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _inner(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    return list(_models(_fields(model).get(name)))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _with_names(schema: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Validate names separately from alternatives, so that a wrong name is reported at its own line."""
    for each in [schema, *schema.get("$defs", {}).values()]:
        if each.get("additionalProperties") is False:
            del each["additionalProperties"]
    return {**schema, "allOf": [*schema.get("allOf", []), _names(model)]}


def _names(model: type[BaseModel]) -> dict[str, Any]:
    """A schema of the names that an object may have, recursively; it accepts anything that is not an object."""
    parts = {}
    for name, annotation in _fields(model).items():
        below = [_names(inner) for inner in _models(annotation)]
        if len(below) == 1:
            parts[name] = {**below[0], "items": below[0]}
    return {"propertyNames": {"enum": sorted(_fields(model))}, "properties": parts}
