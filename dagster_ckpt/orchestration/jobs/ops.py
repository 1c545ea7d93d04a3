"""Makes ops and jobs of the client's methods."""

import builtins
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import dagster as dg
from pydantic import Field

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client import Client
from dagster_ckpt.client.description import LATEST
from dagster_ckpt.client.examination import ALL
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.metadata import snapshot_metadata
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.run_status import (
    OPERATION_TAG,
    refuse_overridden_resources,
    run_tags,
    transitions_in_run_log,
)
from dagster_ckpt.orchestration.settings import field_of, launchpad, with_fields
from dagster_ckpt.orchestration.stream import Stream, StreamingAsset, defined_streams, find_stream, translator_of
from dagster_ckpt.orchestration.translator import OPERATOR_RESOURCES, RESOURCES
from dagster_ckpt.stream.start_from import StartFrom, start_options
from dagster_ckpt.values.redaction import cause_to_show, without_secrets

STREAM_ID = "Stream id of the streaming asset, such as departure_delays."
SNAPSHOT = f"{LATEST} (the newest snapshot), {ALL}, or the id, number (chk-7), label or location of a snapshot."
_KINDS = (bool, int, float, str, list, dict)
# Not options: `StreamOps` supplies them.
_GIVEN = frozenset({"self", "run_id"})
# These take precedence over docstrings.
_USUAL = {
    "label": "A name to start from later, such as before-release-42.",
    "target_directory": "Folder for the savepoint, as a URL. Default: the configured savepoint folder.",
    "timeout_s": "Seconds to wait for an answer of the running stream; after that the request is withdrawn.",
}
_UNLESS_DESCRIBED = {
    "stream": STREAM_ID,
    "snapshot": "Id, number (chk-7), label or location of a snapshot that the catalog lists.",
    "savepoint": "Snapshot id, label or location of a completed savepoint.",
}
REQUIRED = inspect.Parameter.empty
# Parameters with another name in the launchpad.
_FIELDS = {"stream": "stream_id", "into": "into_stream_id", "timeout_s": "timeout_seconds"}
_PARAMETERS = {field: name for name, field in _FIELDS.items()}
_Config = TypeVar("_Config", bound=dg.Config)
_Result = TypeVar("_Result")


class Parameter(NamedTuple):
    """`kind` is one of `_KINDS`, or an enum; `default` is `REQUIRED` if it has none."""

    name: str
    kind: type[Any]
    default: Any
    description: str


class _Names(dict[str, Any]):
    """Resolves names in annotations; no option has a type that only type checkers import."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def parameters(method: Callable[..., Any]) -> list[Parameter]:
    """Return a method's options; a `StartFrom` stands for its fields."""
    described, found = _described(method), []
    for each in _signature(method):
        if each.annotation is StartFrom:
            found += [Parameter(*option[:4]) for option in start_options()]
        elif each.name not in _GIVEN and (each.annotation in _KINDS or _is_enum(each.annotation)):
            description = _USUAL.get(each.name) or described.get(each.name) or _UNLESS_DESCRIBED.get(each.name, "")
            found.append(Parameter(each.name, each.annotation, each.default, description))
    return found


def arguments(method: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        each.name: StartFrom.from_record(values) if each.annotation is StartFrom else values[each.name]
        for each in _signature(method)
        if each.name in values
    }


def summary(method: Callable[..., Any]) -> str:
    """Return the first paragraph of a method's docstring, without marks of code."""
    return (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ").replace("`", "")


def _signature(method: Callable[..., Any]) -> list[inspect.Parameter]:
    names = _Names({**method.__globals__, StartFrom.__name__: StartFrom})
    found = inspect.signature(method, eval_str=True, locals=names).parameters.values()
    return [each.replace(annotation=_kind_of(each.annotation)) for each in found]


def _kind_of(annotation: Any) -> Any:
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
    return re.sub("^The stream", "Stream id of the stream", text)


class StreamConfig(dg.Config):
    """The config of an op that operates one stream."""

    stream_id: str = Field(description=STREAM_ID)


def with_parameters_of(
    method: Callable[..., Any], *, without: Iterable[str] = ()
) -> Callable[[type[_Config]], type[_Config]]:
    """Add a method's parameters to a config, except those that it declares itself."""

    def added(config: type[_Config]) -> type[_Config]:
        left_out = {*without, *vars(config).get("__annotations__", {})}
        fields = {
            _FIELDS.get(each.name, each.name): _field(each)
            for each in parameters(method)
            if not {each.name, _FIELDS.get(each.name, each.name)} & left_out
        }
        return with_fields(config, fields)

    return added


def _field(parameter: Parameter) -> tuple[Any, Any]:
    kinds: dict[type[Any], Any] = {dict: dict[str, str], list: list[str]}
    kind, default = kinds.get(parameter.kind, parameter.kind), parameter.default
    limits: dict[str, Any] = {"gt": 0} if parameter.name == "timeout_s" else {}
    if default is REQUIRED:
        return kind, Field(description=parameter.description, **limits)
    if parameter.kind in kinds:
        default = parameter.kind()
    return field_of(kind, default, parameter.description, **limits)


@contextmanager
def errors_as_failure() -> Iterator[None]:
    try:
        with transitions_in_run_log(dg.OpExecutionContext.get()):
            yield
    except CkptError as error:
        raise dg.Failure(
            without_secrets(str(error)), metadata={"dagster_ckpt/error": type(error).__name__}, allow_retries=False
        ) from cause_to_show(error)


class StreamOps:
    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._translator = translator_of(streams)
        self._names: dict[str, str] = {}

    def op(self, function: Callable[..., Any]) -> dg.OpDefinition:
        return self._op(function, OPERATOR_RESOURCES)

    def op_with_spark(self, function: Callable[..., Any]) -> dg.OpDefinition:
        return self._op(function, RESOURCES)

    def op_with_code(self, function: Callable[..., Any]) -> dg.OpDefinition:
        assets = [stream.asset for stream in self._streams if isinstance(stream, StreamingAsset)]
        return self._op(function, {*RESOURCES, *(key for asset in assets for key in asset.required_resource_keys)})

    def verb(
        self,
        name: str,
        method: Callable[..., _Result],
        report: Callable[[dg.OpExecutionContext, _Result], Any],
        *,
        without: Iterable[str] = (),
        description: str | None = None,
    ) -> dg.JobDefinition:
        """Make a job of a method: its parameters become the config, its summary the description.

        `report` shows the result and returns the op's output.
        """
        empty: type[dg.Config] = type(f"{name}_config", (dg.Config,), {})
        config_type = with_parameters_of(method, without=without)(empty)

        def body(context: dg.OpExecutionContext, config: dg.Config) -> Any:
            with errors_as_failure():
                result = self.call(context, method, config)
            return report(context, result)

        body.__name__, body.__doc__ = name, description or summary(method)
        body.__annotations__ |= {"config": config_type, "return": get_type_hints(report)["return"]}
        return self.job(self.op(body))

    def call(
        self, context: dg.OpExecutionContext, method: Callable[..., _Result], config: dg.Config, **more: Any
    ) -> _Result:
        """Call a method of the client with a config, and tag the run with its stream, if any."""
        values = {_PARAMETERS.get(name, name): value for name, value in config}
        stream_id = values.get("into") or values.get("stream")
        client = self._client(context) if stream_id is None else self.client(context, stream_id)
        own = {"report": context.log.info, "run_id": context.run_id}
        return method(client, **arguments(method, {**own, **values, **more}))

    def job(self, op: dg.OpDefinition) -> dg.JobDefinition:
        name = self._names[op.name]

        @dg.job(
            name=self._translator.get_job_name(f"{name}_job"),
            description=op.description,
            executor_def=dg.in_process_executor,
            config=launchpad(name, op, [stream.stream_id for stream in self._streams]),
        )
        def operator_job() -> None:
            # Run configs keep the untranslated name.
            (op if op.name == name else op.alias(name))()

        return operator_job

    def stream(self, stream_id: str) -> Stream:
        return find_stream(self._streams, stream_id)

    def client(self, context: dg.OpExecutionContext, stream_id: str) -> Client:
        """Return a client in the name of the run, and tag the run with the stream."""
        client = self._client(context)
        context.instance.add_run_tags(context.run_id, run_tags(client.catalog, self.stream(stream_id).stream_id))
        return client

    def _client(self, context: dg.OpExecutionContext) -> Client:
        refuse_overridden_resources(context)
        context.instance.add_run_tags(context.run_id, {OPERATION_TAG: context.op_handle.name})
        return Client.of_streams(
            defined_streams(self._streams, self.resources(context)),
            origin=f"{context.job_name} run {context.run_id}",
        )

    def resources(self, context: dg.OpExecutionContext) -> DeploymentResources:
        return DeploymentResources.of(context.resources, self._translator)

    def _op(self, function: Callable[..., Any], resources: Iterable[str]) -> dg.OpDefinition:
        # Op names are unique in a code location.
        name = self._translator.get_op_name(function.__name__)
        self._names[name] = function.__name__
        return dg.op(name=name, required_resource_keys=self._translator.keys_of(resources))(function)


def report_snapshot(context: dg.OpExecutionContext, snapshot: SnapshotRecord) -> str:
    location = snapshot.location or ""
    context.log.info(f"{snapshot.kind.lower()} at batch {snapshot.batch_id}: {location}")
    context.add_output_metadata(snapshot_metadata(snapshot))
    return location


def log_messages(context: dg.OpExecutionContext, messages: Iterable[str]) -> None:
    for message in messages:
        context.log.info(message)
