"""A stream as its operators and its executions see it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.config.state_backend import OnStateChange, StateBackend, StatePartitions
from dagster_ckpt.policies.restart import RestartPolicy, restart_description
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import NOT_IN_USE, LiveDirectory
from dagster_ckpt.stream.recorded_settings import RecordedSettings
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import checked_stream_id

if TYPE_CHECKING:
    from dagster_ckpt.state.migration import StateMigration

# Suffixes: `.partial` unfinished, `.replayed` for lost batches, the others temporary copies of a state rewrite. Names
# without a token predate this rule.
_LIVE_DIRECTORY = re.compile(
    r"live-(?P<generation>\d+)(-(?P<token>\d+))?(\.(partial|replayed|source|staged|made|given|described))*"
)


def live_folders(live_root: str) -> list[str]:
    root = LiveDirectory(live_root.rstrip("/")).folder
    return [
        name
        for name, entry in sorted(root.list().items())
        if entry.is_directory and any(_LIVE_DIRECTORY.fullmatch(each) for each in root.list(name))
    ]


@dataclass(frozen=True)
class BuiltDirectory:
    """A live directory in storage; `token` is that of the lease that created it, or 0."""

    live: LiveDirectory
    generation: int
    token: int

    @property
    def is_unfinished(self) -> bool:
        return "." in self.live.url.rpartition("/")[2]


@dataclass(frozen=True)
class StreamHandle:
    """Everything that an operation on one stream needs.

    Attributes:
        asset_key: Dagster asset key as a user string ("a/b"), or the name outside Dagster.
        live_root: The stream's live directories are `<live_root>/<stream_id>/live-<generation>-<token>`.
        executor_copy_bytes: Executors copy snapshots that write more bytes. None: the supervising process copies.
        backend: None: the session's settings, unchecked. Its `transfer_threads` copy files.
        state_partitions: None: those of the state, or of the session for a query without state.
        stall_timeout_ms: Fails the run after this long without progress; None: never.
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
    state_migrations: Sequence[StateMigration] = ()

    def __post_init__(self) -> None:
        checked_stream_id(self.stream_id)
        refuse_user_info("The folder of live directories", self.live_root)
        location_url("The folder of live directories", self.live_root)

    @property
    def live_folder(self) -> str:
        return f"{self.live_root.rstrip('/')}/{self.stream_id}"

    def live_directory(self, generation: int, token: int) -> LiveDirectory:
        """The directory of a generation that only the holder of the token builds or deletes."""
        return LiveDirectory(f"{self.live_folder}/live-{generation}-{token}")

    def new_live_directory(self, generation: int, token: int) -> LiveDirectory:
        """An unused directory, numbered above the catalog's `generation` and all that exist."""
        newest = max((built.generation for built in self.live_directories()), default=0)
        return self.live_directory(max(generation, newest) + 1, token)

    def token_in_use(self, record: StreamRecord) -> int:
        """The highest token of a live directory if the catalog knows no start of the stream, else 0.

        A catalog that replaces a lost one must issue higher tokens.
        """
        return 0 if record.live_generation > 0 else self.newest_token()

    def newest_token(self) -> int:
        return max((built.token for built in self.live_directories()), default=0)

    def directories_ahead(self, record: StreamRecord) -> list[BuiltDirectory]:
        """Live directories that the query used after those that the catalog knows, oldest first.

        Empty if the catalog knows no start of the stream: their owner cannot be determined.
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
        """List all, also abandoned and unfinished ones, oldest first."""
        folder = LiveDirectory(self.live_folder)
        found = [
            BuiltDirectory(folder.sibling(f"/{name}"), int(match["generation"]), int(match["token"] or 0))
            for name, entry in folder.folder.list().items()
            if entry.is_directory and (match := _LIVE_DIRECTORY.fullmatch(name))
        ]
        return sorted(found, key=lambda each: (each.generation, each.token, each.live.url))

    def register(self) -> StreamRecord:
        of_backend = self.backend.checkpoint_storage() if self.backend is not None else None
        settings = RecordedSettings(
            options=self.options,
            restart=restart_description(self.restart),
            storage=self.storage,
            is_own_storage=self.options.storage is not None or of_backend is not None,
            live_root=self.live_root,
        )
        return self.catalog.streams.ensure(
            self.stream_id, name=self.name, asset_key=self.asset_key, options=settings.as_record()
        )


def _is_used(live: LiveDirectory) -> bool:
    # A process killed as it created or deleted a directory leaves an empty one.
    names = live.folder.list()
    return bool(names) and NOT_IN_USE not in names
