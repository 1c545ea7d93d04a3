"""A stream as its operators and its executions see it: its options, its directories, its sinks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StreamRecord
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.config.state_backend import OnStateChange, StateBackend, StatePartitions
from dagster_ckpt.policies.restart import RestartPolicy, restart_description
from dagster_ckpt.sinks.snapshot_sinks import sinks_in
from dagster_ckpt.snapshot.store import SnapshotStore
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.checkpoint_dir.layout import NOT_IN_USE, LiveDirectory
from dagster_ckpt.stream.recorded_settings import RecordedSettings
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.storage_path import location_url
from dagster_ckpt.values.validation import checked_stream_id

Clock = Callable[[], int]


# An unfinished directory has the suffix `.partial`, the temporary copies of a rewrite of state have `.source` and
# `.staged`, and the one in which lost batches are replayed `.replayed`. Names without a token predate this rule.
_LIVE_DIRECTORY = re.compile(r"live-(?P<generation>\d+)(-(?P<token>\d+))?(\.(partial|source|staged|replayed))*")


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def live_folders(live_root: str) -> list[str]:
    """Names of the folders in a live root that hold live directories: the ids of streams, sorted.

    Raises:
        StorageAccessError: The folder cannot be reached.
    """
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
        live: The directory.
        generation: Its number among the stream's live directories.
        token: Token of the lease under which it was created; 0 if its name carries none.
    """

    live: LiveDirectory
    generation: int
    token: int

    @property
    def is_unfinished(self) -> bool:
        """Whether it was not yet renamed to its final name, or never will be."""
        return "." in self.live.url.rpartition("/")[2]


@dataclass(frozen=True)
class StreamHandle:
    """Everything that an operation on one stream needs.

    Attributes:
        stream_id: Stable id of the streaming asset; the name of its folder in storage.
        name: Name of the query in Spark.
        asset_key: Dagster asset key as a user string ("a/b"), or the name outside Dagster.
        catalog: The record of streams, executions, snapshots, requests and events.
        store: Where this stream's snapshots are stored.
        options: Checkpointing options.
        restart: What happens after a failure.
        live_root: Folder of live directories. This stream's are
            `<live_root>/<stream_id>/live-<generation>-<token>`.
        executor_copy_bytes: Spark's executors copy snapshots that write more bytes than this. They must
            reach live directories and snapshots by the same URLs. None: the process that supervises the
            query always copies.
        backend: How the query keeps its state. None uses the session's settings without checking them.
            Its `transfer_threads` copy files while a snapshot is taken or restored.
        on_backend_change: What a start does with state of another backend.
        state_partitions: The configured number of state partitions. None: that of the state, or of the
            session for a query that has none.
        stall_timeout_ms: Fails the run if the query makes no progress for this long and no task is
            running, so that the restart strategy starts a new one. None: never. See `StallDetector`.
        code_version: Version of the code that defines the query, as its owner names it; snapshots
            record it.
        storage: The configured storage that `store` was opened from; None if unknown. The catalog
            records it without credentials.
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
        """Refuse locations that must not be stored in the catalog or displayed.

        Raises:
            OptionError: The folder of live directories is a relative path or contains user credentials, or
                the stream id would name another folder.
        """
        checked_stream_id(self.stream_id)
        refuse_user_info("The folder of live directories", self.live_root)
        location_url("The folder of live directories", self.live_root)

    @property
    def live_folder(self) -> str:
        """Folder that holds this stream's live directories."""
        return f"{self.live_root.rstrip('/')}/{self.stream_id}"

    def live_directory(self, generation: int, token: int) -> LiveDirectory:
        """The live directory that a lease holder creates. No other holder builds or deletes under this name.

        Args:
            generation: Its number among the stream's live directories; every restore creates a new one.
            token: Token of the lease under which it is created.
        """
        return LiveDirectory(f"{self.live_folder}/live-{generation}-{token}")

    def new_live_directory(self, generation: int, token: int) -> LiveDirectory:
        """Path of a lease holder's next live directory, unused even if the catalog has lost track.

        Args:
            generation: Number of the previous one, according to the catalog.
            token: Token of the lease under which it is created.

        Raises:
            StorageAccessError: The stream's folder cannot be reached.
        """
        newest = max((built.generation for built in self.live_directories()), default=0)
        return self.live_directory(max(generation, newest) + 1, token)

    def token_in_use(self, record: StreamRecord) -> int:
        """The highest token in a live directory's name if the catalog knows no start of the stream, else 0.

        A catalog that replaces a lost one must issue higher tokens, so that older directories count
        as older.

        Raises:
            StorageAccessError: The stream's folder cannot be reached.
        """
        return 0 if record.live_generation > 0 else self.newest_token()

    def newest_token(self) -> int:
        """The highest token in a live directory's name; 0 if there is none.

        Raises:
            StorageAccessError: The stream's folder cannot be reached.
        """
        return max((built.token for built in self.live_directories()), default=0)

    def directories_ahead(self, record: StreamRecord) -> list[BuiltDirectory]:
        """Live directories that the query used after what the catalog knows, oldest first.

        None if the catalog knows no start of the stream: then nothing says whose they are.

        Raises:
            StorageAccessError: The folder cannot be reached.
        """
        if record.live_generation == 0:
            return []
        # What an interrupted start left behind has a number too, which the catalog does not count.
        name = _LIVE_DIRECTORY.fullmatch((record.live_directory or "").rstrip("/").rpartition("/")[2])
        known = max(record.live_generation, int(name["generation"]) if name is not None else 0)
        return [
            built
            for built in self.live_directories()
            if built.generation > known and not built.is_unfinished and _is_used(built.live)
        ]

    def live_directories(self) -> list[BuiltDirectory]:
        """Every live directory in the stream's folder, oldest first: in use, abandoned or unfinished.

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
    # A process that was killed as it created or deleted a directory leaves an empty one.
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


def sinks_written(stream: StreamHandle) -> list[str]:
    """The sinks that the newest execution wrote to; after a restore and before the next start, those of the snapshot.

    Raises:
        StreamNotFoundError: The stream was never registered.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    origin = record.origin
    if origin is not None and origin.kind is OriginKind.DIRECTORY:
        origin = origin.earlier
    reported = stream.catalog.executions.last_sinks(stream.stream_id)
    if origin is None or not origin.sinks:
        return reported
    if any(
        each.live_directory == record.live_directory for each in stream.catalog.executions.of_stream(stream.stream_id)
    ):
        return reported
    return list(origin.sinks)


def sinks_of_snapshot(stream: StreamHandle, snapshot: SnapshotRecord) -> tuple[str, ...]:
    """The sinks that a query wrote to when a snapshot was taken, as Spark names them.

    Raises:
        SnapshotCorruptError: The snapshot cannot be read.
        StorageAccessError: It cannot be reached.
    """
    properties = snapshot.properties or (
        stream.store.manifest(snapshot.location).header.properties if snapshot.location else {}
    )
    return tuple(sink.name for sink in sinks_in(properties))


def query_ids_of(stream: StreamHandle) -> list[str]:
    """The ids that the stream's query has had, as far as its executions, snapshots and live directory tell."""
    known = {snapshot.query_id for snapshot in stream.catalog.snapshots.of_stream(stream.stream_id)}
    known |= {(each.progress or {}).get("query_id") for each in stream.catalog.executions.of_stream(stream.stream_id)}
    record = stream.catalog.streams.get(stream.stream_id)
    known |= {str(each) for each in (record.pending_restore or {}).get("query_ids", ())}
    if record.live_directory is not None:
        known.add(live_query_id(LiveDirectory(record.live_directory)))
    return sorted(str(each) for each in known if each is not None)
