"""Settings and resources as fields in YAML, and errors that name a wrong field.

Dagster allows a template in every part, so pydantic also tries each part as text. Without `with_field_errors`, pydantic
and JSON schema tools would report the parts around a misspelled field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import dagster as dg
from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails

from dagster_ckpt.errors import CkptError, OptionError
from dagster_ckpt.values.validation import did_you_mean

Value = TypeVar("Value", bound=BaseModel)
Scalar = bool | int | float | str


def in_yaml(value: type[Value], check: Callable[[Value], object], description: str = "") -> dg.Resolver:
    """Return the YAML form of a settings or resource class, which refuses unknown fields.

    `check` validates a value as it will be used. Default description: the first line of the docstring.
    """

    def tried(model: BaseModel) -> BaseModel:
        given = model.model_dump(exclude_unset=True)
        # Templates are resolved later.
        if not _has_template(given):
            _checked(value, check, given)
        return model

    fields: dict[str, Any] = {
        name: (_named(field.annotation), field if field.is_required() else Field(None, description=field.description))
        for name, field in value.model_fields.items()
    }
    validators: dict[str, Any] = {"tried": model_validator(mode="after")(tried)}
    model = create_model(
        f"{value.__name__}InYaml",
        __base__=dg.Model,
        __doc__=value.__doc__,
        __validators__=validators,
        **fields,
    )

    def resolve(context: dg.ResolutionContext, given: BaseModel) -> Value:
        return _checked(value, check, _resolved(context, given.model_dump(exclude_unset=True)))

    return dg.Resolver(
        resolve, model_field_type=model, description=description or (value.__doc__ or "").partition("\n")[0]
    )


def templated(value: type[Value]) -> dg.Resolver:
    """Resolve a part that is the same in YAML and in Python; templates work anywhere in it."""

    def resolve(context: dg.ResolutionContext, given: Value) -> Value:
        resolved = _resolved(context, given.model_dump(by_alias=True, exclude_unset=True))
        for name, each in resolved.items():
            if name != "options" and _has_env_var(each):
                raise OptionError(
                    f"{name} cannot be an env_var: only options, and the fields of resources, are read from the "
                    "environment when a run needs them. Use env for values that are not secret."
                )
        return value(**resolved)

    return dg.Resolver(resolve, model_field_type=value)


def settings_in_yaml(description: str, value: Any = Scalar) -> dg.Resolver:
    """Resolve free-form settings, but not their `{{ env_var('NAME') }}`; text that looks like a number stays text."""
    return dg.Resolver(_resolved, model_field_type=dict[str, value] | None, description=description)


def describe(description: str) -> dg.Resolver:
    resolver: dg.Resolver = dg.Resolver.default(description=description)
    return resolver


def as_text(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Convert values to Spark's text form (`true`, not `True`); environment variables are not resolved."""
    return {name: _text(value) for name, value in options.items()}


def with_values(options: Mapping[str, Scalar]) -> dict[str, str]:
    """As `as_text`, and with environment variables resolved."""
    return {
        name: _value_of(name, value) if isinstance(value, dg.EnvVar) else _text(value)
        for name, value in options.items()
    }


def _text(value: Scalar) -> str:
    if isinstance(value, dg.EnvVar):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value_of(option: str, variable: dg.EnvVar) -> str:
    value = variable.get_value()
    if value is None:
        raise OptionError(
            f"Option {option} is read from the environment variable {variable.env_var_name}, which is not set in this "
            "process. Set it where runs of this code location are launched."
        )
    return value


def with_env_vars(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Restore environment variables that pydantic turned into plain text."""
    return check(given) | {name: value for name, value in given.items() if isinstance(value, dg.EnvVar)}


def _has_env_var(value: Any) -> bool:
    return any(isinstance(each, dg.EnvVar) for each in _leaves(value))


def _has_template(value: Any) -> bool:
    return any(isinstance(each, str) and "{{" in each for each in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _checked(value: type[Value], check: Callable[[Value], object], given: Mapping[str, Any]) -> Value:
    made = value(**given)
    if _has_env_var(given):
        # A run knows and validates the value.
        return made
    try:
        check(made)
    except CkptError as error:
        # Pydantic reports a ValueError with its YAML location.
        raise OptionError(str(error)) from error
    return made


def _named(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Literal[tuple(annotation.__members__)]
    return annotation


def _resolved(context: dg.ResolutionContext, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _resolved(context.at_path(name), each) for name, each in value.items()}
    if isinstance(value, list):
        return [_resolved(context.at_path(index), each) for index, each in enumerate(value)]
    return context.resolve_value(value) if _has_template(value) else value


_Place = tuple[str | int, ...]
# Errors of the alternatives "text" (for a template) and "nothing".
_OF_ALTERNATIVES = ("string_type", "none_required")


@cache
def with_field_errors(model: type[BaseModel]) -> type[BaseModel]:
    """Make a component's YAML model report unknown fields in errors and JSON schema."""

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
            # The value may be a secret in the wrong place.
            detail = InitErrorDetails(type="value_error", loc=place, input=place[-1], ctx={"error": why})
        details.append(detail)
    return ValidationError.from_exception_data(error.title, details)


def _unknown(name: str, known: Sequence[str]) -> ValueError:
    advice = did_you_mean(name, known, cutoff=0.4)
    return ValueError(f"There is no field {name} here.{advice} The fields are: {', '.join(known)}.")


def _place(loc: Sequence[str | int], given: Any, is_missing: bool) -> _Place:
    """Return the location in the YAML: pydantic's also contains the types it tried."""
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
    """Validate names apart from alternatives, so that a wrong name is reported at its own line."""
    for each in [schema, *schema.get("$defs", {}).values()]:
        if each.get("additionalProperties") is False:
            del each["additionalProperties"]
    return {**schema, "allOf": [*schema.get("allOf", []), _names(model)]}


def _names(model: type[BaseModel]) -> dict[str, Any]:
    parts = {}
    for name, annotation in _fields(model).items():
        below = [_names(inner) for inner in _models(annotation)]
        if len(below) == 1:
            parts[name] = {**below[0], "items": below[0]}
    return {"propertyNames": {"enum": sorted(_fields(model))}, "properties": parts}
