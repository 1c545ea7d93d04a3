"""One stream as its operators and its executions see it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.redaction import refuse_user_info
from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.config.stream_id import checked_stream_id
from dagster_ckpt.policies.restart import DecidingRestartStrategy
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

Clock = Callable[[], int]

# One that was not finished has a suffix; names without a token are older than this rule.
_LIVE_DIRECTORY = re.compile(r"live-(?P<generation>\d+)(-(?P<token>\d+))?(\.partial)?")


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class BuiltDirectory:
    """A live directory that is there, whatever the catalog knows of it.

    Attributes:
        live: The directory.
        generation: Its number among the stream's live directories.
        token: Token of the lease under which it was made; 0 where its name does not say.
    """

    live: LiveDirectory
    generation: int
    token: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it was not moved to its place yet, or never will be."""
        return self.live.url.endswith(".partial")


@dataclass(frozen=True)
class StreamHandle:
    """Everything that the operations of one stream need.

    Attributes:
        stream_id: Stable id of the streaming asset; the name of its folder in storage.
        name: Name the query gets in Spark.
        asset_key: Dagster asset key as a user string ("a/b"), or the name outside Dagster.
        catalog: The record of streams, executions, snapshots, requests and events.
        store: Where this stream's snapshots live.
        options: Checkpointing options.
        restart: What happens after a failure.
        live_root: Folder of live directories; this stream's are `<live_root>/<stream_id>/live-<generation>-<token>`.
        executor_copy_bytes: Snapshots that write more bytes than this are copied by Spark's executors, which must reach
            live directories and snapshots by the same URLs. None: always by the process that supervises the query.
        backend: How the query is to keep its state; None leaves it to the session, unchecked. Its
            `transfer_threads` are those that copy files while a snapshot is taken or restored.
        stall_timeout_ms: A query that stands still for so long, with no task running, fails its run, so that the
            restart strategy begins a new one; None: people decide. See `StallDetector`.
        code_version: Version of the code that describes the query, as its owner names it; snapshots carry it.
    """

    stream_id: str
    name: str
    asset_key: str
    catalog: Catalog
    store: SnapshotStore
    options: CheckpointOptions
    restart: DecidingRestartStrategy
    live_root: str
    backend: StateBackend | None = None
    code_version: str | None = None
    executor_copy_bytes: int | None = None
    stall_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        """Refuse a place that could not be kept in the catalog, and shown.

        Raises:
            OptionError: The folder of live directories names a user, or the stream id another folder.
        """
        checked_stream_id(self.stream_id)
        refuse_user_info("The folder of live directories", self.live_root)

    @property
    def live_folder(self) -> str:
        """Folder that holds this stream's live directories."""
        return f"{self.live_root.rstrip('/')}/{self.stream_id}"

    def live_directory(self, generation: int, token: int) -> LiveDirectory:
        """The live directory that a holder of the lease makes; no other ever builds or deletes under this name.

        Args:
            generation: Its number among the stream's; a new one is made by every restore.
            token: The token of the lease under which it is made.
        """
        return LiveDirectory(f"{self.live_folder}/live-{generation}-{token}")

    def new_live_directory(self, generation: int, token: int) -> LiveDirectory:
        """Where a holder of the lease makes its next live directory: nothing is there, whatever the catalog forgot.

        Args:
            generation: Number of the one before, as the catalog has it.
            token: The token of the lease under which it is made.

        Raises:
            StorageAccessError: The stream's folder cannot be reached.
        """
        newest = max((built.generation for built in self.live_directories()), default=0)
        return self.live_directory(max(generation, newest) + 1, token)

    def token_in_use(self, record: StreamRecord) -> int:
        """The highest token that a live directory carries, where the catalog knows no start of the stream; else 0.

        A catalog that takes the place of a lost one gives out higher tokens: what is older counts as older.

        Raises:
            StorageAccessError: The stream's folder cannot be reached.
        """
        if record.live_generation > 0:
            return 0
        return max((built.token for built in self.live_directories()), default=0)

    def live_directories(self) -> list[BuiltDirectory]:
        """Every live directory in the stream's folder, in use, left behind or unfinished, oldest first.

        Raises:
            StorageAccessError: The folder cannot be reached.
        """
        folder = LiveDirectory(self.live_folder)
        found = [
            BuiltDirectory(folder.sibling(f"/{name}"), int(match["generation"]), int(match["token"] or 0))
            for name, entry in folder.folder.list().items()
            if entry.is_directory and (match := _LIVE_DIRECTORY.fullmatch(name))
        ]
        return sorted(found, key=lambda each: (each.generation, each.token, each.live.url))

    def register(self) -> StreamRecord:
        """Make the stream known to the catalog, or refresh what it says of it."""
        return register(
            self.catalog,
            self.stream_id,
            name=self.name,
            asset_key=self.asset_key,
            options=self.options,
            restart=self.restart,
        )


def register(
    catalog: Catalog,
    stream_id: str,
    *,
    name: str,
    asset_key: str,
    options: CheckpointOptions,
    restart: DecidingRestartStrategy,
) -> StreamRecord:
    """Make a stream known to the catalog, or refresh what it says of it, where its storage need not be opened."""
    return catalog.streams.ensure(
        stream_id,
        name=name,
        asset_key=asset_key,
        options={
            "cleanup": options.cleanup.name,
            "num_retained": options.num_retained,
            "interval_ms": options.interval_ms,
            "restart": restart.get_description(),
        },
    )
