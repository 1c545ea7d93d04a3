"""Every non-public name of Dagster that this project uses.

Dagster raises `DagsterExecutionInterruptedError` in the main thread. Inside a py4j call, the reply then stays on the
socket, and the next call hangs or reads the wrong answer. So a streaming step captures interrupts and polls a flag.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._check import CheckError
from dagster._config import post_process_config, resolve_defaults, resolve_to_config_type, validate_config
from dagster._core.definitions.asset_selection import KeysAssetSelection
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._utils.interrupts import capture_interrupts, check_captured_interrupt

# Re-exported unchanged.
__all__ = [
    "BaseAssetGraph",
    "DagsterExecutionInterruptedError",
    "KeysAssetSelection",
    "UnresolvedAssetJobDefinition",
    "capture_interrupts",
    "check_captured_interrupt",
]


@dataclass(frozen=True)
class LatestEvaluation:
    stored_at_s: float
    metadata: Mapping[str, dg.MetadataValue]

    def value_of(self, key: str) -> object:
        entry = self.metadata.get(key)
        return entry.value if entry is not None else None


def asset_graph_of(context: dg.OpExecutionContext) -> BaseAssetGraph[Any] | None:
    """Return the asset graph; None outside a code location."""
    try:
        return context.repository_def.asset_graph
    except CheckError:
        return None


def unresolved_config(context: dg.OpExecutionContext, fields: Mapping[str, dg.Field]) -> dict[str, Any]:
    """Return fields of the op's config as given, or their defaults: `{"env": name}` instead of the variable's value."""
    given: Any = context.run.run_config
    mapping = context.job_def.config_mapping
    if mapping is not None:
        given = mapping.resolve_from_unvalidated_config(given)
    for name in context.op_handle.path:
        given = (given.get("ops") or {}).get(name) or {}
    config = given.get("config") or {}
    own = {name: config[name] for name in fields if name in config}
    return dict(resolve_defaults(resolve_to_config_type(dict(fields)), own).value or {})


def resolved_config(field: dg.Field, value: Any) -> Any:
    """Return a field's value with those of environment variables; one that does not fit the field is returned as it is.

    Raises:
        LookupError: A variable is not set, or its value does not fit.
    """
    if not validate_config(field.config_type, value).success:
        return value
    resolved = post_process_config(field.config_type, value)
    if not resolved.success:
        raise LookupError
    return resolved.value


def latest_check_evaluations(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, LatestEvaluation]:
    """Read all checks in one query, unlike Dagster's public method."""
    if not keys:
        return {}
    found = {}
    for key, record in instance.event_log_storage.get_latest_asset_check_execution_by_key(keys).items():
        # Despite its type, it may be a planned evaluation.
        evaluation: object = record.evaluation
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            found[key] = LatestEvaluation(record.create_timestamp, evaluation.metadata)
    return found


@dataclass(frozen=True)
class RunSlots:
    """Maximum numbers of concurrent runs; None: no limit."""

    total: int | None
    of_streams: int | None


def run_slots(instance: dg.DagsterInstance, stream_tag: str) -> RunSlots | None:
    """Return the limits of Dagster's run queue; None if it has none."""
    queue = instance.get_concurrency_config().run_queue_config
    if queue is None:
        return None
    of_streams = [
        limit["limit"]
        for limit in queue.tag_concurrency_limits
        if limit.get("key") == stream_tag and limit.get("value") is None
    ]
    total = queue.max_concurrent_runs
    return RunSlots(total if total >= 0 else None, min(of_streams, default=None))


def put_notes(instance: dg.DagsterInstance, notes: Mapping[str, str]) -> None:
    if notes:
        instance.daemon_cursor_storage.set_cursor_values(dict(notes))


def notes_of(instance: dg.DagsterInstance, keys: Iterable[str]) -> Mapping[str, str]:
    wanted = set(keys)
    return instance.daemon_cursor_storage.get_cursor_values(wanted) if wanted else {}


def changed_fields(
    definition: dg.ResourceDefinition, given: Mapping[str, object], kinds: tuple[type, ...]
) -> list[str]:
    """Return the fields that a run's config sets differently than the code location."""
    kind = getattr(definition, "configurable_resource_cls", None)
    if not isinstance(kind, type) or not issubclass(kind, kinds):
        return []
    field = definition.config_field
    if field is None or not field.default_provided:
        # `configure_at_launch` leaves the config to each run.
        return []
    config = given.get("config")
    if not isinstance(config, Mapping):
        return []
    return [name for name, value in config.items() if value != field.default_value.get(name)]


def plan_outside_runs(instance: dg.DagsterInstance, keys: Iterable[dg.AssetKey]) -> None:
    """Detach the newest planned materialization of each asset from its run, by reporting a runless one.

    `AutomationCondition.eager()` considers an asset in progress until its run materializes it. A stream's run lasts for
    weeks, and its checkpoints are runless events, so nothing downstream would start.
    """
    for key in keys:
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
            job_name=RUNLESS_JOB_NAME,
            message=f"Checkpoints of {key.to_user_string()} are reported as they complete.",
            event_specific_data=AssetMaterializationPlannedData(asset_key=key),
        )
        instance.report_dagster_event(event, run_id=RUNLESS_RUN_ID, log_level=logging.DEBUG)
