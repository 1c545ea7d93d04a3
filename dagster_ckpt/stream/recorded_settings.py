"""The configuration of a stream in the catalog, so that operators without its code need not repeat it.

Neither Spark nor storage is imported: listing streams must load neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from random import Random
from typing import Any

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    CustomCheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import CatalogError, OptionError
from dagster_ckpt.policies.restart import DecidingRestartStrategy, FailureHistory, NoRestart, RestartAt
from dagster_ckpt.policies.retention import RetentionPolicy
from dagster_ckpt.policies.serialization import OWN, read_retention, write_retention
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup

# Where options are unknown, nothing is deleted.
KEEP_EVERYTHING = CheckpointOptions(cleanup=ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION)
_UNKNOWN_RESTART = "unknown"
# Recorded in another form, or not needed by operators.
_NOT_PLAIN = {"storage", "retention", "trigger"}


@dataclass(frozen=True)
class RecordedSettings:
    """The settings of a stream as of its last registration; None where unknown.

    Operators open the stream with these: default options could delete checkpoints that its own keep.

    Attributes:
        storage: Without credentials.
        is_own_storage: The stream's own configuration names it, not the deployment's.
    """

    options: CheckpointOptions | None = None
    restart: str = _UNKNOWN_RESTART
    storage: CheckpointStorage | None = None
    is_own_storage: bool = False
    live_root: str | None = None

    def as_record(self) -> dict[str, Any]:
        return {
            "checkpointing": _options_record(self.options) if self.options is not None else None,
            "restart": self.restart,
            "storage": _storage_record(self.storage) if self.storage is not None else None,
            "is_own_storage": self.is_own_storage,
            "live_root": self.live_root,
        }

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> RecordedSettings:
        """Read plain data; CatalogError if it is unreadable."""
        options, storage, live_root = record.get("checkpointing"), record.get("storage"), record.get("live_root")
        try:
            return RecordedSettings(
                _options(options) if options is not None else None,
                str(record.get("restart") or _UNKNOWN_RESTART),
                _storage(storage) if storage is not None else None,
                is_own_storage=bool(record.get("is_own_storage")),
                live_root=str(live_root) if live_root is not None else None,
            )
        except (OptionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CatalogError(
                f"The catalog's record of a stream's settings cannot be read: {error}. Start the stream once, which "
                "records them again, or give its checkpointing options and storage."
            ) from error


@dataclass(frozen=True)
class RecordedRestartStrategy(DecidingRestartStrategy):
    description: str = _UNKNOWN_RESTART

    def get_description(self) -> str:
        return self.description

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        del failures, now_ms, random
        return NoRestart("This process does not know the stream's restart strategy.")


def _options_record(options: CheckpointOptions) -> dict[str, Any]:
    values = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in _NOT_PLAIN}
    plain = {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}
    return {**plain, "retention": _written(options.retention)}


def _written(policy: RetentionPolicy | None) -> Mapping[str, object] | None:
    try:
        return write_retention(policy) if policy is not None else None
    except OptionError:
        # Only the stream's own process needs such a policy.
        return None


def _options(record: Mapping[str, Any]) -> CheckpointOptions:
    known = {each.name for each in fields(CheckpointOptions)} - _NOT_PLAIN
    # Earlier records have the unit in the names of durations.
    plain = {name.removesuffix("_ms"): value for name, value in record.items()}
    values: dict[str, Any] = {name: value for name, value in plain.items() if name in known}
    written = record.get("retention")
    # What a catalog names is never imported: a user's policy is left out.
    retention = read_retention(written) if written is not None and not _names_own(written) else None
    return CheckpointOptions(**values, retention=retention)


def _names_own(written: object) -> bool:
    if isinstance(written, Mapping):
        return OWN in written or any(map(_names_own, written.values()))
    return isinstance(written, list) and any(map(_names_own, written))


def _storage_record(storage: CheckpointStorage) -> dict[str, Any]:
    if isinstance(storage, CustomCheckpointStorage):
        # The values of its settings may be secrets.
        return {"kind": "CUSTOM", "factory": storage.factory}
    if isinstance(storage, FileSystemCheckpointStorage):
        return {
            "kind": "FILESYSTEM",
            "checkpoint_path": storage.checkpoint_location.url,
            "savepoint_path": storage.savepoint_location.url if storage.savepoint_location is not None else None,
            "file_state_size_threshold": storage.file_state_size_threshold,
            "write_buffer_size": storage.write_buffer_size,
        }
    if isinstance(storage, JobManagerCheckpointStorage):
        locations = (storage.checkpoint_location, storage.savepoint_location)
        checkpoint_path, savepoint_path = (each.url if each is not None else None for each in locations)
        return {
            "kind": "JOBMANAGER",
            "checkpoint_path": checkpoint_path,
            "savepoint_path": savepoint_path,
            "max_state_size": storage.max_state_size,
        }
    raise OptionError(f"checkpoint storage is a {type(storage).__name__}, which is none of this package's classes.")


def _storage(record: Mapping[str, Any]) -> CheckpointStorage | None:
    if record["kind"] == "FILESYSTEM":
        return FileSystemCheckpointStorage(
            record["checkpoint_path"],
            record.get("file_state_size_threshold"),
            record.get("write_buffer_size", -1),
            savepoint_path=record.get("savepoint_path"),
        )
    if record["kind"] == "JOBMANAGER":
        return JobManagerCheckpointStorage(
            record.get("checkpoint_path"), record.get("max_state_size"), savepoint_path=record.get("savepoint_path")
        )
    # What a catalog names is never imported: an operator passes a custom storage.
    return None
