"""Our settings and resources as fields of a component: the same names and descriptions, checked at their line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Literal, TypeVar

import dagster as dg
from pydantic import BaseModel, Field, create_model, model_validator

from dagster_ckpt.errors import CkptError, OptionError

Value = TypeVar("Value", bound=BaseModel)
# What people write for an option of Spark's.
Scalar = bool | int | float | str


def in_yaml(value: type[Value], check: Callable[[Value], object]) -> dg.Resolver:
    """How a settings or resource class is written in YAML.

    Unlike Dagster's own config it takes no field that it does not know, so that a misspelled one is told.

    Args:
        value: The class.
        check: Tries a value, as it will be used; what it raises is told with the line of the YAML.

    Example:
        >>> checkpointing: Annotated[
        ...     CheckpointSettings, in_yaml(CheckpointSettings, CheckpointSettings.checkpoint_config)
        ... ]
    """

    def tried(model: BaseModel) -> BaseModel:
        given = model.model_dump(exclude_unset=True)
        # A template has its value later.
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

    return dg.Resolver(resolve, model_field_type=model, description=(value.__doc__ or "").partition("\n")[0])


def templated(value: type[Value]) -> dg.Resolver:
    """How a part of a component is written that is the same in YAML and in Python; templates work anywhere in it.

    Args:
        value: The class.

    Example:
        >>> sink: Annotated[Sink, templated(Sink)]
    """

    def resolve(context: dg.ResolutionContext, given: Value) -> Value:
        resolved = _resolved(context, given.model_dump(by_alias=True, exclude_unset=True))
        for name, each in resolved.items():
            if name != "options" and _has_env_var(each):
                raise OptionError(
                    f"{name} cannot be an env_var: only options, and the fields of resources, are read from the "
                    "environment when a run needs them. Use env for what is no secret."
                )
        return value(**resolved)

    return dg.Resolver(resolve, model_field_type=value)


def settings_in_yaml(description: str) -> dg.Resolver:
    """How free settings of a resource are written; `{{ env_var('NAME') }}` is left to the resource.

    Args:
        description: What they are.
    """
    return dg.Resolver(_resolved, model_field_type=dict[str, Scalar] | None, description=description)


def said(description: str) -> dg.Resolver:
    """The description of a field, where it has a default."""
    resolver: dg.Resolver = dg.Resolver.default(description=description)
    return resolver


def as_text(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Options as Spark takes them: `true`, not `True`; a variable of the environment stays one."""
    return {name: _text(value) for name, value in options.items()}


def with_values(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Options as Spark takes them, variables of the environment with their values.

    Raises:
        OptionError: A variable is not set.
    """
    return {
        name: _value_of(name, value) if isinstance(value, dg.EnvVar) else _text(value)
        for name, value in options.items()
    }


def imported(path: str, field: str) -> Any:
    """What an import path names.

    Args:
        path: Such as company.queries:late_orders.
        field: Where the path was written, for the message.

    Raises:
        OptionError: There is no such module, or nothing of that name in it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"{field} is {path!r}, which cannot be imported: {error}. Give module:function, of a module that the code "
            "location can import."
        ) from error


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


def with_env_vars(given: Any, checked: dict[str, Scalar]) -> dict[str, Scalar]:
    """Checked options, in which pydantic has made plain text of variables of the environment, with these again."""
    return checked | {name: value for name, value in given.items() if isinstance(value, dg.EnvVar)}


def _has_env_var(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_env_var(each) for each in value.values())
    if isinstance(value, list):
        return any(_has_env_var(each) for each in value)
    return isinstance(value, dg.EnvVar)


def _checked(value: type[Value], check: Callable[[Value], object], given: Mapping[str, Any]) -> Value:
    made = value(**given)
    if _has_env_var(given):
        # It has its value in a run, where it is checked.
        return made
    try:
        check(made)
    except CkptError as error:
        # A ValueError is what pydantic tells with the place of the YAML.
        raise OptionError(str(error)) from error
    return made


def _named(annotation: Any) -> Any:
    """The type of a field, where an enum's members go by their names, as in Dagster's config."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Literal[tuple(annotation.__members__)]
    return annotation


def _resolved(context: dg.ResolutionContext, value: Any) -> Any:
    """A value with its templates filled in; text without one stays text, also where it looks like a number."""
    if isinstance(value, dict):
        return {name: _resolved(context.at_path(name), each) for name, each in value.items()}
    if isinstance(value, list):
        return [_resolved(context.at_path(index), each) for index, each in enumerate(value)]
    return context.resolve_value(value) if _has_template(value) else value


def _has_template(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_template(each) for each in value.values())
    if isinstance(value, list):
        return any(_has_template(each) for each in value)
    return isinstance(value, str) and "{{" in value
