"""Options as Dagster config.

The `config` parameter of a stream's function is kept in a tag of each run, with the names of environment variables
instead of their values. A run that the supervisor sensor launches takes it from there, so that a restart does not
change what the query computes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import fields
from enum import Enum
from hashlib import sha256
from typing import Any, TypeVar, get_type_hints

import dagster as dg
from pydantic import Field, create_model

from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration._compat import resolved_config, unresolved_config
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG
from dagster_ckpt.policies.restart import (
    RestartPolicy,
    RestartStrategies,
    RestartStrategyConfiguration,
    checked_restart,
)
from dagster_ckpt.policies.serialization import own_policy
from dagster_ckpt.policies.upgrade import UpgradePolicy
from dagster_ckpt.stream.start_from import StartFrom, start_options
from dagster_ckpt.values.validation import Choice, Option, WholeNumber, options_of


def described_fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: (
            hints[each.name].__origin__,
            Field(default=each.default, description=hints[each.name].__metadata__[0]),
        )
        for each in fields(kind)
    }


_UpgradeFields: Any = create_model("UpgradeFields", __base__=dg.Config, **described_fields(UpgradePolicy))


class UpgradeSettings(_UpgradeFields):
    """Every option of `UpgradePolicy`; durations are milliseconds.

    Example:
        >>> UpgradeSettings.model_validate({"mode": "LAST_STATE"}).upgrade_policy().preflight
        True
    """

    def upgrade_policy(self) -> UpgradePolicy:
        """Return the settings as a policy."""
        return UpgradePolicy(**dict(self))


def _description(option: Option[Any, Any]) -> str:
    parts = [option.description]
    match option.rule:
        case Choice(enum=enum):
            parts.append(f"One of {', '.join(enum.__members__)}.")
        case WholeNumber(minimum=minimum) if minimum > 0:
            parts.append(f"At least {minimum}.")
    if option.unset:
        parts.append(f"Default: {option.unset}.")
    return " ".join(parts)


def fields_of(options: type[CheckpointOptions]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, option in options_of(options).items():
        default = option.default.name if isinstance(option.default, Enum) else option.default
        plain = option.rule.plain if default is not None else option.rule.plain | None
        found[name] = (plain, Field(default=default, description=_description(option)))
    return found


_Fields: Any = create_model("CheckpointFields", __base__=dg.Config, **fields_of(CheckpointOptions))


class CheckpointSettings(_Fields):
    """Every option of `CheckpointConfig`; durations are milliseconds.

    Example:
        >>> settings = CheckpointSettings.model_validate({"interval": 60_000, "mode": "AT_LEAST_ONCE"})
        >>> settings.checkpoint_config().get_checkpoint_interval()
        60000
    """

    def checkpoint_config(self) -> CheckpointConfig:
        """Return the settings as a `CheckpointConfig`."""
        options: dict[str, Any] = dict(self)
        if options["trigger"] is not None and "interval" not in self.model_fields_set:
            # A subclass may have an interval by default.
            del options["interval"]
        return CheckpointConfig(**options)


def unset_fields_of(options: type[CheckpointOptions]) -> dict[str, Any]:
    set_here = fields_of(options).items()
    return {name: (plain | None, Field(default=None, description=each.description)) for name, (plain, each) in set_here}


CheckpointOverrides = create_model(
    "CheckpointOverrides",
    __base__=dg.Config,
    __doc__="The options of `CheckpointSettings`, each of them unset: what one run is given in place of its asset's.",
    **unset_fields_of(CheckpointOptions),
)


class RestartStrategyKind(Enum):
    """Flink's restart strategies, and OWN. Names equal values, as Dagster's config uses names, and YAML values."""

    NONE = "NONE"
    FIXED_DELAY = "FIXED_DELAY"
    FAILURE_RATE = "FAILURE_RATE"
    EXPONENTIAL_DELAY = "EXPONENTIAL_DELAY"
    FALLBACK = "FALLBACK"
    OWN = "OWN"


class RestartSettings(dg.Config):
    """Every option of `RestartStrategies`, with the names and defaults of Flink's configuration; in ms.

    Example:
        >>> RestartSettings(kind=RestartStrategyKind.FIXED_DELAY, attempts=3, delay=10_000)
    """

    kind: RestartStrategyKind = Field(
        default=RestartStrategyKind.FALLBACK,
        description="NONE, FIXED_DELAY, FAILURE_RATE, EXPONENTIAL_DELAY, OWN, or FALLBACK: Flink's default, which is "
        "NONE without checkpointing and EXPONENTIAL_DELAY with it.",
    )
    own: str | None = Field(
        default=None,
        description="OWN: import path of a restart policy, such as company.policies:OfficeHours.",
    )
    attempts: int = Field(default=1, description="FIXED_DELAY: maximum number of restarts.")
    delay: int = Field(default=1_000, description="FIXED_DELAY, FAILURE_RATE: delay between a failure and the restart.")
    max_failures_per_interval: int = Field(
        default=1, description="FAILURE_RATE: maximum number of failures per interval."
    )
    failure_rate_interval: int = Field(default=60_000, description="FAILURE_RATE: length of the interval.")
    initial_backoff: int = Field(default=1_000, description="EXPONENTIAL_DELAY: initial delay.")
    max_backoff: int = Field(default=60_000, description="EXPONENTIAL_DELAY: maximum delay.")
    backoff_multiplier: float = Field(
        default=1.5, description="EXPONENTIAL_DELAY: factor by which the delay grows, above 1."
    )
    reset_backoff_threshold: int = Field(
        default=3_600_000, description="EXPONENTIAL_DELAY: time without a failure after which the delay is reset."
    )
    jitter_factor: float = Field(default=0.1, description="EXPONENTIAL_DELAY: maximum random share of a delay, 0 to 1.")
    attempts_before_reset_backoff: int = Field(
        default=2**31 - 1, description="EXPONENTIAL_DELAY: maximum number of restarts before the delay is reset."
    )

    def restart_strategy(self) -> RestartStrategyConfiguration | RestartPolicy:
        """Return the settings as a strategy."""
        if (self.kind is RestartStrategyKind.OWN) is not (self.own is not None):
            raise OptionError(
                f"kind is {self.kind.name} and own is {self.own!r}, but own must be the import path of a policy with "
                "kind OWN, and left out with every other kind."
            )
        if self.own is not None:
            return checked_restart("own", own_policy("own", self.own))
        if self.kind is RestartStrategyKind.NONE:
            return RestartStrategies.no_restart()
        if self.kind is RestartStrategyKind.FIXED_DELAY:
            return RestartStrategies.fixed_delay_restart(self.attempts, self.delay)
        if self.kind is RestartStrategyKind.FAILURE_RATE:
            return RestartStrategies.failure_rate_restart(
                self.max_failures_per_interval, self.failure_rate_interval, self.delay
            )
        if self.kind is RestartStrategyKind.EXPONENTIAL_DELAY:
            return RestartStrategies.exponential_delay_restart(
                self.initial_backoff,
                self.max_backoff,
                self.backoff_multiplier,
                self.reset_backoff_threshold,
                self.jitter_factor,
                attempts_before_reset_backoff=self.attempts_before_reset_backoff,
            )
        return RestartStrategies.fall_back_restart()


_Config = TypeVar("_Config", bound=dg.Config)


def with_start_options(config: type[_Config]) -> type[_Config]:
    return with_fields(
        config, {each.name: field_of(each.kind, each.default, each.description) for each in start_options()}
    )


def field_of(kind: Any, default: Any, description: str, **limits: Any) -> tuple[Any, Any]:
    """Make a config field, which without a default may stay unset."""
    return kind if default is not None else kind | None, Field(default=default, description=description, **limits)


def with_fields(config: type[_Config], added: Mapping[str, Any]) -> type[_Config]:
    about: dict[str, Any] = {"__doc__": config.__doc__, "__module__": config.__module__}
    return create_model(config.__name__, __base__=config, **about, **added)


@with_start_options
class StartConfig(dg.Config):
    """Where a stream starts, and what the start may do."""

    # Type checkers do not see the added options.
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def parsed(self) -> StartFrom:
        return StartFrom.from_record(dict(self))


class StreamRunConfig(StartConfig):
    """The launchpad options of a start of a streaming asset.

    Example:
        >>> StreamRunConfig(start_from="before-release-42", accept_loss=True)
    """

    checkpointing: CheckpointOverrides | None = Field(
        default=None,
        description="Checkpointing options that override the asset's for this run, each on its own. Runs that the "
        "supervisor starts later use the asset's options again.",
    )
    preflight: bool = Field(
        default=False,
        description="Do not start the stream; only check, on a copy of the state and without output, whether the "
        "loaded code can continue from it. The stream may be running.",
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @classmethod
    def from_op_config(cls, op_config: Mapping[str, Any] | None) -> StreamRunConfig:
        """Read an op's config, which may have further fields, or none at all."""
        return cls(**{name: value for name, value in (op_config or {}).items() if name in cls.model_fields})


# Fields that name a stream; an op operates on the first that it has.
_STREAM_FIELDS = ("stream_id", "into_stream_id")


def launchpad(node: str, op: dg.OpDefinition, stream_ids: Sequence[str] = ()) -> dg.ConfigMapping:
    """Make a launchpad of one op's options; Dagster's also shows all defaults and the config of resources.

    `stream_ids` are the choices in the fields that name a stream.
    """
    assert op.config_field is not None, f"{op.name} has no config"
    fields: Mapping[str, Any] = op.config_field.config_type.fields  # type: ignore[attr-defined]
    shown = {name: _shown(field) for name, field in fields.items()}
    if stream_ids:
        shown |= _choices([name for name in _STREAM_FIELDS if name in fields], fields, sorted(stream_ids))
    others = {
        part: dg.Field(dict, is_required=False, description=f"Rarely needed: {what} of this run.")
        for part, what in (("resources", "resources"), ("execution", "the executor"), ("loggers", "loggers"))
    }
    schema = {"ops": dg.Field({node: dg.Field({"config": dg.Field(shown)})}), **others}
    return dg.ConfigMapping(lambda given: given, schema, receive_processed_config_values=False)


def _shown(field: Any) -> dg.Field:
    """Copy a field without its default, which the launchpad would fill in."""
    return dg.Field(field.config_type, is_required=field.is_required, description=_shown_description(field))


def _choices(names: Sequence[str], fields: Any, stream_ids: Sequence[str]) -> dict[str, dg.Field]:
    # Dagster takes types of the same name for equal.
    digest = sha256("\n".join(stream_ids).encode()).hexdigest()[:8]
    kind = dg.Enum(f"StreamId_{digest}", [dg.EnumValue(each) for each in stream_ids])
    found = {name: dg.Field(kind, is_required=True, description=fields[name].description) for name in names}
    if len(stream_ids) == 1 and names:
        found[names[0]] = dg.Field(kind, default_value=stream_ids[0], description=fields[names[0]].description)
    return found


def _shown_description(field: Any) -> str:
    described = str(field.description or "")
    if field.is_required or not field.default_provided or field.default_value is None or "Default:" in described:
        return described
    default = field.default_value
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{described} Default: {shown}."


PARAMETER = "config"
CONFIG_TAG = "dagster_ckpt/config"
_BY_SUPERVISOR = frozenset({RESTART_OF_TAG, START_REQUEST_TAG, STEP_TAG})


def config_class(function: Callable[..., Any]) -> type[dg.Config] | None:
    """Return the class of the function's `config` parameter; None without one, or if a resource has that name.

    Raises:
        OptionError: It has no such class, or fields without default, which no sensor could launch.
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
    own = kind.to_fields_dict() if kind is not None else {}
    return {**StreamRunConfig.to_fields_dict(), **own}


def config_in(context: Any, kind: type[dg.Config]) -> dg.Config:
    return _config_from(kind, context.op_execution_context.op_config or {})


def config_of_run(
    context: dg.AssetExecutionContext, kind: type[dg.Config], stream_id: str, catalog: CheckpointCatalogResource
) -> dg.Config:
    """Return the run's config, given or recorded by the run that it continues, and record it."""
    given: dict[str, Any] = dict(context.op_execution_context.op_config)
    fields = {name: each for name, each in kind.to_fields_dict().items() if name not in StreamRunConfig.model_fields}
    own = {name: given[name] for name in fields if name in given}
    for name, value in unresolved_config(context.op_execution_context, fields).items():
        with suppress(LookupError):
            if name in own and resolved_config(fields[name], value) == own[name]:
                own[name] = value
    if _BY_SUPERVISOR & context.run.tags.keys():
        for name, value in _recorded_config(context.instance, stream_id, catalog).items():
            if name in fields:
                own[name], given[name] = value, _resolved(kind, name, fields[name], value)
    context.instance.add_run_tags(context.run.run_id, {CONFIG_TAG: json.dumps(own)})
    return _config_from(kind, given)


def _resolved(kind: type[dg.Config], name: str, field: dg.Field, value: Any) -> Any:
    # Earlier versions recorded resolved values.
    try:
        return resolved_config(field, value)
    except LookupError:
        raise OptionError(
            f"The field {name} of {kind.__name__}, in the config recorded by the run before, names an environment "
            "variable that is not set for this run, or whose value does not fit. Set it where runs are executed."
        ) from None


def _recorded_config(
    instance: dg.DagsterInstance, stream_id: str, catalog: CheckpointCatalogResource
) -> dict[str, Any]:
    with closing(catalog.catalog()) as opened:
        execution = opened.executions.latest(stream_id)
    run = instance.get_run_by_id(execution.run_id) if execution is not None else None
    recorded = json.loads(run.tags.get(CONFIG_TAG, "{}")) if run is not None else {}
    return dict(recorded)


def _config_from(kind: type[dg.Config], given: Mapping[str, Any]) -> dg.Config:
    return kind(**{name: given[name] for name in kind.model_fields if name in given})
