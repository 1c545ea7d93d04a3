"""What the launchpad of a job shows.

A job without this shows every default of its op, and the whole config of its resources. Run configs keep their form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import dagster as dg

# Fields that name a stream of the code location; the first of an op is the one that it operates.
_STREAM_FIELDS = ("stream_id", "into_stream_id")


def launchpad(node: str, op: dg.OpDefinition, stream_ids: Sequence[str] = ()) -> dg.ConfigMapping:
    """`stream_ids`: those to choose from in the fields that name a stream."""
    assert op.config_field is not None, f"{op.name} has no config"
    fields: Mapping[str, Any] = op.config_field.config_type.fields  # type: ignore[attr-defined]
    shown = {name: _shown(field) for name, field in fields.items()}
    if stream_ids:
        shown |= _choices([name for name in _STREAM_FIELDS if name in fields], fields, sorted(stream_ids))
    # Given, they reach the run, as for a resource that `configure_at_launch` leaves to it.
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
    # Dagster takes types of one name for the same, also those of different streams.
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
