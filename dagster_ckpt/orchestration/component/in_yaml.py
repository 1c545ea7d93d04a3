"""Settings and resources as fields of a component: same names and descriptions, validated with their YAML location."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Literal, TypeVar

import dagster as dg
from pydantic import BaseModel, Field, create_model, model_validator

from dagster_ckpt.errors import CkptError, OptionError

Value = TypeVar("Value", bound=BaseModel)
# The types of values that YAML may hold for a Spark option.
Scalar = bool | int | float | str


def in_yaml(value: type[Value], check: Callable[[Value], object]) -> dg.Resolver:
    """The YAML form of a settings or resource class.

    Unlike Dagster's own config it accepts no unknown fields, so that misspelled ones are reported.

    Args:
        value: The class.
        check: Validates a value as it will be used; its errors are reported with their YAML line.

    Example:
        >>> checkpointing: Annotated[
        ...     CheckpointSettings, in_yaml(CheckpointSettings, CheckpointSettings.checkpoint_config)
        ... ]
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

    return dg.Resolver(resolve, model_field_type=model, description=(value.__doc__ or "").partition("\n")[0])


def templated(value: type[Value]) -> dg.Resolver:
    """The YAML form of a part that is the same in YAML and in Python; templates work anywhere in it.

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
    """The YAML form of a resource's free-form settings; `{{ env_var('NAME') }}` is left to the resource.

    Args:
        description: Description of the settings.
    """
    return dg.Resolver(_resolved, model_field_type=dict[str, Scalar] | None, description=description)


def describe(description: str) -> dg.Resolver:
    """A field description, for a field with a default."""
    resolver: dg.Resolver = dg.Resolver.default(description=description)
    return resolver


def as_text(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Convert options to Spark's text form (`true`, not `True`); environment variables are not resolved."""
    return {name: _text(value) for name, value in options.items()}


def with_values(options: Mapping[str, Scalar]) -> dict[str, str]:
    """Convert options to Spark's text form, with environment variables resolved.

    Raises:
        OptionError: A variable is not set.
    """
    return {
        name: _value_of(name, value) if isinstance(value, dg.EnvVar) else _text(value)
        for name, value in options.items()
    }


def imported(path: str, field: str) -> Any:
    """Import the object at an import path.

    Args:
        path: For example company.queries:late_orders.
        field: The field that holds the path, for the message.

    Raises:
        OptionError: The module or the name does not exist.
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
    """Restore environment variables that pydantic's validation of options turned into plain text."""
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
        # The value is known only in a run, which validates it.
        return made
    try:
        check(made)
    except CkptError as error:
        # Pydantic reports a ValueError with its YAML location.
        raise OptionError(str(error)) from error
    return made


def _named(annotation: Any) -> Any:
    """The type of a field; enum members are written by name, as in Dagster's config."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Literal[tuple(annotation.__members__)]
    return annotation


def _resolved(context: dg.ResolutionContext, value: Any) -> Any:
    """Resolve the templates in a value. Text without a template stays text, even if it looks like a number."""
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
