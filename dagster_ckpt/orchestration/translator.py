"""Names and resource keys of streams in Dagster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import dagster as dg

from dagster_ckpt.errors import OptionError

SPARK = "pyspark"
CHECKPOINT_STORAGE = "checkpoint_storage"
STATE_BACKEND = "state_backend"
CHECKPOINT_CATALOG = "checkpoint_catalog"
# Operator jobs need these; a run of a stream also needs Spark.
OPERATOR_RESOURCES = frozenset({CHECKPOINT_STORAGE, STATE_BACKEND, CHECKPOINT_CATALOG})
RESOURCES = OPERATOR_RESOURCES | {SPARK}


@dataclass(frozen=True)
class StreamTranslator:
    """Chooses asset specs, names of jobs, sensors and schedules, and resource keys.

    Each of several `stream_definitions` in one code location needs its own names. Pass a translator to the decorator of
    each stream; it names everything else too. For names that no prefix yields, override methods in a subclass.

    Attributes:
        name_prefix: Before the names of jobs, ops, sensors and schedules, with an underscore.
        resource_keys: Keys of the resources `pyspark`, `checkpoint_storage`, `state_backend` and `checkpoint_catalog`,
            where they differ from these names.

    Example:
        >>> EU = StreamTranslator("eu", {"checkpoint_catalog": "eu_catalog", "state_backend": "eu_state"})
        >>> EU.get_job_name("cancel_stream_job")
        'eu_cancel_stream_job'
        >>> EU.get_resource_key("checkpoint_catalog")
        'eu_catalog'
    """

    name_prefix: str | None = None
    resource_keys: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name_prefix is not None and not self.name_prefix.isidentifier():
            raise OptionError(
                f"StreamTranslator: name_prefix is {self.name_prefix!r}, which cannot begin a name in Dagster. Use "
                "letters, digits and '_', beginning with a letter."
            )
        unknown = sorted(set(self.resource_keys) - RESOURCES)
        if unknown:
            raise OptionError(
                f"StreamTranslator: resource_keys names {unknown[0]!r}, but streams use the resources "
                f"{', '.join(sorted(RESOURCES))}. Give keys for these only."
            )

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec of an asset, given that of the decorator.

        Without a `stream_id`, a changed key is another stream.
        """
        return spec

    def get_start_job_name(self, name: str) -> str:
        """Return the name of a start job; `name` is that of the only asset without key prefix, or of the op."""
        return self.get_job_name(f"{name}_stream")

    def get_job_name(self, name: str) -> str:
        """Return the name of a job, given its default name, such as `cancel_stream_job`."""
        return self._prefixed(name)

    def get_op_name(self, name: str) -> str:
        """Return the name of an op, unique in a code location."""
        return self._prefixed(name)

    def get_sensor_name(self, name: str) -> str:
        """Return the name of a sensor, as `get_job_name` does."""
        return self._prefixed(name)

    def get_schedule_name(self, name: str) -> str:
        """Return the name of a schedule, as `get_job_name` does."""
        return self._prefixed(name)

    def get_resource_key(self, resource: str) -> str:
        """Return the key of a resource."""
        return self.resource_keys.get(resource, resource)

    def keys_of(self, resources: Iterable[str]) -> set[str]:
        return {self.get_resource_key(each) for each in resources}

    def _prefixed(self, name: str) -> str:
        return name if self.name_prefix is None else f"{self.name_prefix}_{name}"
