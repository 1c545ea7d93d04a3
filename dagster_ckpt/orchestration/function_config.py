"""The `config` parameter of a stream's function: its fields in the launchpad, and its values in each run.

A run that the supervisor sensor launches has no config of its own: it takes that of the stream's run before, which has
it in a tag, so that a restart does not change what the query computes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import dagster as dg

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG
from dagster_ckpt.orchestration.settings import StreamRunConfig

PARAMETER = "config"
# The config of the function, as JSON, on the run that used it.
CONFIG_TAG = "dagster_ckpt/config"
_BY_SUPERVISOR = frozenset({RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG})


def config_class(function: Callable[..., Any]) -> type[dg.Config] | None:
    """The class of the function's `config` parameter; None without one, and for a resource of that name.

    Raises:
        OptionError: It has no such class, or one that a run which nobody gives a config cannot be made of.
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
    """Given to the run or to the run before it, and recorded for the next."""
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
