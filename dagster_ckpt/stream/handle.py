"""A stream as its operators and its executions see it: its settings, also as recorded, and its directories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from random import Random
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    CustomCheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.config.state_backend import OnStateChange, StateBackend, StatePartitions
from dagster_ckpt.errors import CatalogError, OptionError
from dagster_ckpt.policies.restart import (
    DecidingRestartStrategy,
    FailureHistory,
    NoRestart,
    RestartAt,
    RestartPolicy,
    restart_description,
)
from dagster_ckpt.policies.retention import RetentionPolicy
from dagster_ckpt.policies.serialization import OWN, read_retention, write_retention
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import NOT_IN_USE, LiveDirectory
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import checked_stream_id

# Suffixes: `.partial` unfinished, `.source` and `.staged` temporary copies of a state rewrite,
# `.replayed` for lost batches. Names without a token predate this rule.
_LIVE_DIRECTORY = re.compile(r"live-(?P<generation>\d+)(-(?P<token>\d+))?(\.(partial|source|staged|replayed))*")


def live_folders(live_root: str) -> list[str]:
    """Folders in a live root that hold live directories: the ids of streams, sorted."""
    root = LiveDirectory(live_root.rstrip("/")).folder
    return [
        name
        for name, entry in sorted(root.list().items())
        if entry.is_directory and any(_LIVE_DIRECTORY.fullmatch(each) for each in root.list(name))
    ]


@dataclass(frozen=True)
class BuiltDirectory:
    """A live directory that exists in storage, whether or not the catalog knows it.

    Attributes:
        generation: Its number among the stream's live directories.
        token: Token of the lease under which it was created; 0 if its name carries none.
    """

    live: LiveDirectory
    generation: int
    token: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it was never renamed to its final name."""
        return "." in self.live.url.rpartition("/")[2]


@dataclass(frozen=True)
class StreamHandle:
    """Everything that an operation on one stream needs.

    Attributes:
        stream_id: Stable id of the streaming asset; the name of its folder in storage.
        asset_key: Dagster asset key as a user string ("a/b"), or the name outside Dagster.
        live_root: The stream's live directories are
            `<live_root>/<stream_id>/live-<generation>-<token>`.
        executor_copy_bytes: Spark's executors copy snapshots that write more bytes than this. They
            must reach live directories and snapshots by the same URLs. None: the supervising
            process always copies.
        backend: None: the session's settings, unchecked. Its `transfer_threads` copy files.
        state_partitions: None: those of the state, or of the session for a query without state.
        stall_timeout_ms: Fails the run after this long without progress (see `StallDetector`);
            None: never.
        storage: The configuration that `store` was opened from; None if unknown.
    """

    stream_id: str
    name: str
    asset_key: str
    catalog: Catalog
    store: SnapshotStore
    options: CheckpointOptions
    restart: RestartPolicy
    live_root: str
    backend: StateBackend | None = None
    on_backend_change: OnStateChange = OnStateChange.REFUSE
    state_partitions: StatePartitions | None = None
    code_version: str | None = None
    executor_copy_bytes: int | None = None
    stall_timeout_ms: int | None = None
    storage: CheckpointStorage | None = None

    def __post_init__(self) -> None:
        """Refuse locations that must not be stored in the catalog or displayed."""
        checked_stream_id(self.stream_id)
        refuse_user_info("The folder of live directories", self.live_root)
        location_url("The folder of live directories", self.live_root)

    @property
    def live_folder(self) -> str:
        """Folder that holds this stream's live directories."""
        return f"{self.live_root.rstrip('/')}/{self.stream_id}"

    def live_directory(self, generation: int, token: int) -> LiveDirectory:
        """The live directory that the holder of a token creates; no other holder builds or deletes it."""
        return LiveDirectory(f"{self.live_folder}/live-{generation}-{token}")

    def new_live_directory(self, generation: int, token: int) -> LiveDirectory:
        """The next live directory, unused even if the catalog, which gives `generation`, has lost track."""
        newest = max((built.generation for built in self.live_directories()), default=0)
        return self.live_directory(max(generation, newest) + 1, token)

    def token_in_use(self, record: StreamRecord) -> int:
        """The highest token in a live directory's name if the catalog knows no start of the stream, else 0.

        A catalog that replaces a lost one must issue higher tokens, so that older directories count
        as older.
        """
        return 0 if record.live_generation > 0 else self.newest_token()

    def newest_token(self) -> int:
        """The highest token in a live directory's name; 0 if there is none."""
        return max((built.token for built in self.live_directories()), default=0)

    def directories_ahead(self, record: StreamRecord) -> list[BuiltDirectory]:
        """Live directories that the query used after what the catalog knows, oldest first.

        Empty if the catalog knows no start of the stream: then their owner cannot be determined.
        """
        if record.live_generation == 0:
            return []
        # What an interrupted start left has a number too, which the catalog does not count.
        name = _LIVE_DIRECTORY.fullmatch((record.live_directory or "").rstrip("/").rpartition("/")[2])
        known = max(record.live_generation, int(name["generation"]) if name is not None else 0)
        return [
            built
            for built in self.live_directories()
            if built.generation > known and not built.is_unfinished and _is_used(built.live)
        ]

    def live_directories(self) -> list[BuiltDirectory]:
        """Every live directory in the stream's folder, oldest first: in use, abandoned or unfinished."""
        folder = LiveDirectory(self.live_folder)
        found = [
            BuiltDirectory(folder.sibling(f"/{name}"), int(match["generation"]), int(match["token"] or 0))
            for name, entry in folder.folder.list().items()
            if entry.is_directory and (match := _LIVE_DIRECTORY.fullmatch(name))
        ]
        return sorted(found, key=lambda each: (each.generation, each.token, each.live.url))

    def register(self) -> StreamRecord:
        """Register the stream in the catalog, or update its entry."""
        return register(
            self.catalog,
            self.stream_id,
            name=self.name,
            asset_key=self.asset_key,
            settings=RecordedSettings(
                options=self.options,
                restart=restart_description(self.restart),
                storage=self.storage,
                is_own_storage=self._names_storage(),
                live_root=self.live_root,
            ),
        )

    def _names_storage(self) -> bool:
        of_backend = self.backend.checkpoint_storage() if self.backend is not None else None
        return self.options.storage is not None or of_backend is not None


def _is_used(live: LiveDirectory) -> bool:
    # A process killed as it created or deleted a directory leaves an empty one.
    names = live.folder.list()
    return bool(names) and NOT_IN_USE not in names


def register(
    catalog: Catalog,
    stream_id: str,
    *,
    name: str,
    asset_key: str,
    settings: RecordedSettings,
) -> StreamRecord:
    """Register a stream in the catalog, or update its entry, without opening its storage."""
    return catalog.streams.ensure(stream_id, name=name, asset_key=asset_key, options=settings.as_record())


# For unknown options: nothing is deleted that other options would keep.
KEEP_EVERYTHING = CheckpointOptions(cleanup=ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION)
_UNKNOWN_RESTART = "unknown"
# Recorded in another form, or not needed by operators.
_NOT_PLAIN = {"storage", "retention", "trigger"}


@dataclass(frozen=True)
class RecordedSettings:
    """The settings of a stream as of its last registration; None where unknown.

    Operators without the stream's code open it with these: default options could delete checkpoints
    that its own options keep. Credentials are never recorded.

    Attributes:
        storage: Where its snapshots are stored, without credentials.
        is_own_storage: The stream's own configuration names that storage, not the deployment's.
    """

    options: CheckpointOptions | None = None
    restart: str = _UNKNOWN_RESTART
    storage: CheckpointStorage | None = None
    is_own_storage: bool = False
    live_root: str | None = None

    def as_record(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {
            "checkpointing": _options_record(self.options) if self.options is not None else None,
            "restart": self.restart,
            "storage": _storage_record(self.storage) if self.storage is not None else None,
            "is_own_storage": self.is_own_storage,
            "live_root": self.live_root,
        }

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> RecordedSettings:
        """The settings from plain data; CatalogError if they cannot be read."""
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
    """The restart strategy of a stream whose code is elsewhere: only its description is known."""

    description: str = _UNKNOWN_RESTART

    def get_description(self) -> str:
        """Return the recorded description."""
        return self.description

    def decide(self, failures: FailureHistory, now_ms: int, random: Random) -> RestartAt | NoRestart:
        """Never restart: the stream's own process or the supervisor sensor decides."""
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
        # Only the stream's own process needs it.
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
