"""Config on the launchpad: of jobs, and of a stream's function.

A job without `launchpad` shows every default of its op, and the whole config of its resources.

The `config` parameter of a function is kept in a tag of each run. A run that the supervisor sensor launches takes it
from there, so that a restart does not change what the query computes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from typing import Any

import dagster as dg

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG
from dagster_ckpt.orchestration.settings import StreamRunConfig

# Fields that name a stream; the first of an op is the one that it operates.
_STREAM_FIELDS = ("stream_id", "into_stream_id")


def launchpad(node: str, op: dg.OpDefinition, stream_ids: Sequence[str] = ()) -> dg.ConfigMapping:
    """`stream_ids`: those to choose from in the fields that name a stream."""
    assert op.config_field is not None, f"{op.name} has no config"
    fields: Mapping[str, Any] = op.config_field.config_type.fields  # type: ignore[attr-defined]
    shown = {name: _shown(field) for name, field in fields.items()}
    if stream_ids:
        shown |= _choices([name for name in _STREAM_FIELDS if name in fields], fields, sorted(stream_ids))
    # Given, they reach the run, as for `configure_at_launch`.
    others = {
        part: dg.Field(dict, is_required=False, description=f"Rarely needed: {what} of this run.")
        for part, what in (("resources", "resources"), ("execution", "the executor"), ("loggers", "loggers"))
    }
    schema = {"ops": dg.Field({node: dg.Field({"config": dg.Field(shown)})}), **others}
    return dg.ConfigMapping(lambda given: given, schema, receive_processed_config_values=False)


def _shown(field: Any) -> dg.Field:
    """A field without its default, which the op knows and the launchpad would fill in."""
    return dg.Field(field.config_type, is_required=field.is_required, description=_description(field))


def _choices(names: Sequence[str], fields: Any, stream_ids: Sequence[str]) -> dict[str, dg.Field]:
    # Dagster takes types of one name for the same.
    digest = sha256("\n".join(stream_ids).encode()).hexdigest()[:8]
    kind = dg.Enum(f"StreamId_{digest}", [dg.EnumValue(each) for each in stream_ids])
    found = {name: dg.Field(kind, is_required=True, description=fields[name].description) for name in names}
    if len(stream_ids) == 1 and names:
        found[names[0]] = dg.Field(kind, default_value=stream_ids[0], description=fields[names[0]].description)
    return found


def _description(field: Any) -> str:
    described = str(field.description or "")
    if field.is_required or not field.default_provided or field.default_value is None or "Default:" in described:
        return described
    default = field.default_value
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{described} Default: {shown}."


PARAMETER = "config"
# The config of the function, as JSON, on the run that used it.
CONFIG_TAG = "dagster_ckpt/config"
_BY_SUPERVISOR = frozenset({RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG})


def config_class(function: Callable[..., Any]) -> type[dg.Config] | None:
    """The class of the function's `config` parameter; None without one, and for a resource of that name.

    Raises:
        OptionError: It has no such class, or one with fields without default, which no sensor could launch.
    """
    if PARAMETER not in inspect.signature(function).parameters:
        return None
    what = f"streaming_asset {function.__name__}: the parameter config"
    kind = inspect.get_annotations(function).get(PARAMETER)
    if isinstance(kind, str):
        try:
            kind = eval(kind, function.__globals__)
        except NameError as error:
            raise OptionError(f"{what} has the annotation {kind!r}, which its module does not define.") from error
    if isinstance(kind, type) and issubclass(kind, dg.Config) and not issubclass(kind, dg.ConfigurableResource):
        _check(kind, what)
        return kind
    if kind is not None and (not isinstance(kind, type) or issubclass(kind, dg.ConfigurableResource)):
        return None
    raise OptionError(f"{what} has no annotation that is a subclass of dagster.Config. Give it one, or another name.")


def _check(kind: type[dg.Config], what: str) -> None:
    taken = sorted(set(kind.model_fields) & set(StreamRunConfig.model_fields))
    if taken and not issubclass(kind, StreamRunConfig):
        raise OptionError(
            f"{what}: {kind.__name__} has the field {taken[0]}, as every run of a stream has. Name it otherwise, or "
            "derive the class from StreamRunConfig."
        )
    for name, field in kind.model_fields.items():
        if field.is_required():
            raise OptionError(
                f"{what}: field {name} of {kind.__name__} has no default, but the supervisor sensor launches runs "
                "that nobody gives a config. Give it a default."
            )


def fields_of_run(kind: type[dg.Config] | None) -> dict[str, Any]:
    """The config of the op that runs a stream with such a function."""
    own = kind.to_fields_dict() if kind is not None else {}
    return {**StreamRunConfig.to_fields_dict(), **own}


def config_in(context: Any, kind: type[dg.Config]) -> dg.Config:
    """The config in a context, such as one that a test has built."""
    return _made(kind, context.op_execution_context.op_config or {})


def config_of_run(
    context: dg.AssetExecutionContext, kind: type[dg.Config], stream_id: str, catalog: CheckpointCatalogResource
) -> dg.Config:
    """Given to the run or the run before it, and recorded for the next."""
    given: Mapping[str, Any] = context.op_execution_context.op_config
    if _BY_SUPERVISOR & context.run.tags.keys():
        given = {**given, **_of_the_run_before(context.instance, stream_id, catalog)}
    own = {
        name: given[name] for name in kind.model_fields if name in given and name not in StreamRunConfig.model_fields
    }
    context.instance.add_run_tags(context.run.run_id, {CONFIG_TAG: json.dumps(own)})
    return _made(kind, given)


def _of_the_run_before(
    instance: dg.DagsterInstance, stream_id: str, catalog: CheckpointCatalogResource
) -> dict[str, Any]:
    with closing(catalog.catalog()) as opened:
        execution = opened.executions.latest(stream_id)
    run = instance.get_run_by_id(execution.run_id) if execution is not None else None
    recorded = json.loads(run.tags.get(CONFIG_TAG, "{}")) if run is not None else {}
    return dict(recorded)


def _made(kind: type[dg.Config], given: Mapping[str, Any]) -> dg.Config:
    return kind(**{name: given[name] for name in kind.model_fields if name in given})
