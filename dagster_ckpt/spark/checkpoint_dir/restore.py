"""Build a live directory in which Spark can start, from a snapshot or from another live directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from dagster_ckpt.errors import CkptError, LiveDirectoryError, RestoreError
from dagster_ckpt.io.file_io import FileIO, no_op
from dagster_ckpt.io.hard_links import Linker
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, SinkEntry, sink_entry
from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile, log_offset
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    METADATA,
    NOT_IN_USE,
    OFFSETS,
    SOURCES,
    LiveDirectory,
    NeededFile,
)
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, read_metadata, with_query_id, with_sources
from dagster_ckpt.spark.checkpoint_dir.operators import is_metadata_v2, rewrite_schema_paths
from dagster_ckpt.spark.checkpoint_dir.staging import overtaken, staged_cut, until_not_overtaken

# Called often, from any thread; an exception aborts the work.
Watch = Callable[[], None]

_LOGS = (OFFSETS, COMMITS)
# RocksDB writes these once, and verifies a checksum of each block on every read.
_LARGE_STATE = ".sst"
_LINKED_AT_A_TIME = 4_000
_CHUNK_BYTES = 1 << 20


class DonorCheck(Enum):
    """What to compare between a linked file and the file in the snapshot.

    Attributes:
        DIGEST: The content.
        IDENTITY: Device, inode, time and length of large state files; the content of others. If equal, it is the same
            file, because Spark renames finished files into place; damage by disk, power or a user stays unnoticed.
    """

    DIGEST = "DIGEST"
    IDENTITY = "IDENTITY"


@dataclass(frozen=True)
class Donor:
    """An intact live directory whose files a restore can hard-link."""

    live: LiveDirectory
    check: DonorCheck = DonorCheck.DIGEST

    def is_recognized_by_version(self, entry: FileEntry) -> bool:
        return self.check is DonorCheck.IDENTITY and entry.path.endswith(_LARGE_STATE)


@dataclass(frozen=True)
class Materialized:
    """A live directory built from a snapshot.

    Attributes:
        sinks: Log entries by index of the sink in the snapshot's properties.
        carries_state: As in `Cut`.
    """

    live: LiveDirectory
    batch_id: int
    query_id: str
    sinks: Mapping[int, tuple[SinkEntry, ...]] = field(default_factory=dict)
    carries_state: bool = False


def materialize(
    target: LiveDirectory,
    fill: Callable[[Filler], None],
    *,
    new_query_id: str | None = None,
    is_whole: bool = False,
    is_scratch: bool = False,
    marked: bool = False,
    watch: Watch = no_op,
) -> Materialized:
    """Build a live directory in a temporary location, check it, then move it into place; durable on return.

    An object store cannot rename a tree: there the logs come last, so that no query resumes earlier.

    Args:
        fill: Passes every file of the snapshot to the `Filler`.
        new_query_id: For a fork. None continues the query, which sinks recognize by its id.
        is_whole: `fill` passes a checked cut, so only the logs are checked again.
        marked: Mark the directory as not in use, until `LiveDirectory.note_in_use`.
    """
    if target.exists():
        raise RestoreError(
            f"{target.url} exists already, and a live directory in use must not be overwritten. Restore into "
            "another one, or delete it if nothing of it is needed."
        )
    unfinished = target.sibling(".partial") if target.folder.can_rename else target
    unfinished.delete()
    unfinished.folder.make()
    filler = Filler(unfinished.folder, target, new_query_id, logs_last=unfinished == target, watch=watch)
    try:
        if marked:
            # First, so that a directory with logs always has it.
            unfinished.folder.place(NOT_IN_USE, [b""])
        with contextlib.closing(filler):
            fill(filler)
            filler.write_logs()
        batch_id = _newest_commit(unfinished) if is_whole else _checked(unfinished)
        query_id = _query_id(unfinished)
        watch()
        if not is_scratch:
            unfinished.folder.flush_all()
        if unfinished != target:
            unfinished.folder.rename(target.url)
    except BaseException:
        unfinished.delete()
        raise
    sinks = {index: tuple(entries) for index, entries in sorted(filler.sinks.items())}
    return Materialized(target, batch_id, query_id, sinks)


def clone(
    live: LiveDirectory,
    target: LiveDirectory,
    *,
    at_batch: int | None = None,
    carry_state: bool = False,
    is_scratch: bool = False,
    marked: bool = False,
    watch: Watch = no_op,
) -> Materialized:
    """Let a query continue in a copy, even if an old writer is alive.

    The batch in flight is included and replayed. Local files are hard-linked, because writers never modify them.

    Args:
        at_batch: A retained batch to go back to; the batch after it is replayed.
    """

    def attempt() -> Materialized:
        with staged_cut(live, carry_in_flight=True, at_batch=at_batch, carry_state=carry_state) as staged:

            def fill(filler: Filler) -> None:
                rest = [file for file in staged.hand_over() if file.data is not None or not filler.link(file)]
                for file in staged.stage(rest):
                    with file.open() as stream:
                        filler(file.path, iter(lambda: stream.read(_CHUNK_BYTES), b""))

            made = materialize(target, fill, is_scratch=is_scratch, marked=marked, watch=watch)
            return replace(made, carries_state=staged.cut.carries_state)

    return until_not_overtaken(attempt)


def give_query_id(live: LiveDirectory, query_id: str) -> None:
    """Change the query id of a live directory that is not in use."""
    # As a new file, because the old one may be a hard link.
    data = with_query_id(live.folder.read(METADATA), f"{live.url}/{METADATA}", query_id)
    live.folder.write(METADATA, [data])


class Filler:
    """Places the files of a snapshot in a new live directory: bytes from several threads, links from one only.

    With `logs_last`, the logs wait for `write_logs`.
    """

    def __init__(
        self,
        folder: FileIO,
        target: LiveDirectory,
        new_query_id: str | None,
        *,
        logs_last: bool = False,
        watch: Watch = no_op,
    ) -> None:
        self._folder = folder
        self._target = target
        self._new_query_id = new_query_id
        self._linker = Linker(folder.root) if isinstance(folder, LocalFileIO) else None
        self._logs_last = logs_last
        self._watch = watch
        self._logs: dict[tuple[str, str], bytes] = {}
        self.sinks: dict[int, list[SinkEntry]] = {}

    def __call__(self, path: str, chunks: Iterable[bytes]) -> None:
        chunks = self._watched(chunks)
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise RestoreError(
                f"The snapshot contains a file {path!r}, which is outside of a live directory. Restore "
                "another snapshot."
            )
        if parts[0] == SINKS_FOLDER:
            index, name = sink_entry(path)
            self.sinks.setdefault(index, []).append(SinkEntry(name, b"".join(chunks)))
        elif path == METADATA and self._new_query_id is not None:
            # Reading the old content checks its digest.
            self._folder.place(path, [with_query_id(b"".join(chunks), path, self._new_query_id)])
        elif is_metadata_v2(path):
            try:
                data = rewrite_schema_paths(b"".join(chunks), path, self._target.spark_location)
            except CkptError as error:
                raise RestoreError(f"The snapshot cannot be restored: {error}") from error
            self._folder.place(path, [data])
        elif self._logs_last and parts[0] in _LOGS:
            self._logs[parts[0], "/".join(parts[1:])] = b"".join(chunks)
        else:
            self._folder.place(path, chunks)

    def _watched(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._watch()
            yield chunk

    def write_logs(self) -> None:
        """Write the offsets, then the commits, the newest last: a commit shows that a query has run here."""
        for log, name in sorted(self._logs, key=lambda entry: (_LOGS.index(entry[0]), entry[1].zfill(20))):
            self._folder.place(f"{log}/{name}", [self._logs[log, name]])

    def link(self, file: NeededFile) -> bool:
        if not isinstance(file.folder, LocalFileIO) or self._linker is None:
            return False
        if not self.takes_as_it_is(file.path):
            return False
        self._watch()
        try:
            linked = self._linker.link(str(file.folder.root), file.source, file.path)
        except FileNotFoundError as error:
            raise overtaken(file, "was purged") from error
        if linked and self._linker.linked_version(file.path) != file.version:
            raise overtaken(file, "was replaced")
        return linked

    def link_unchanged(self, entries: Iterable[FileEntry], donor: Donor | None) -> Iterator[FileEntry]:
        root = donor.live.local_path if donor is not None else None
        if self._linker is None or donor is None or root is None:
            yield from entries
            return
        rest = iter(entries)
        while some := list(islice(rest, _LINKED_AT_A_TIME)):
            linkable: list[FileEntry] = []
            for entry in some:
                if entry.token is not None and self.takes_as_it_is(entry.path):
                    linkable.append(entry)
                else:
                    yield entry
            yield from self._linker.link_known(
                str(root), linkable, by_version=donor.is_recognized_by_version, watch=self._watch
            )

    def close(self) -> None:
        if self._linker is not None:
            self._linker.close()

    def takes_as_it_is(self, path: str) -> bool:
        is_rewritten = is_metadata_v2(path) or (path == METADATA and self._new_query_id is not None)
        return not is_rewritten and not path.startswith(f"{SINKS_FOLDER}/")


def _query_id(live: LiveDirectory) -> str:
    try:
        return read_metadata(live.folder).id
    except (LiveDirectoryError, FileNotFoundError) as error:
        raise RestoreError(
            f"Spark cannot resume from the snapshot: {error} contains no query id. Restore another snapshot."
        ) from error


def _newest_commit(live: LiveDirectory) -> int:
    positions = live.positions()
    if positions.commit is None or positions.offset is None or positions.offset < positions.commit:
        raise RestoreError(
            f"Spark cannot resume from the snapshot: its newest commit is {positions.commit}, and the newest offsets "
            f"are {positions.offset}. Restore another snapshot."
        )
    return positions.commit


def _checked(live: LiveDirectory) -> int:
    state = inspect_live_directory(live)
    if state.status is LiveStatus.GOOD and state.batch_id is not None:
        return state.batch_id
    raise RestoreError(f"Spark cannot resume from the snapshot: {state.reason} Restore another snapshot.")


# No source has a name that begins with a dot.
_OLD = ".former"


@dataclass(frozen=True)
class Position:
    """Where a source begins: its offset as JSON text (None before its first data), and its log's files by name."""

    offset: str | None = None
    log: Mapping[str, bytes] = field(default_factory=dict)


BEGINNING = Position()


def after_files(files: Iterable[SourceFile]) -> Position:
    lines = [
        json.dumps({"path": each.path, "timestamp": each.modified_at_ms or 0, "batchId": 0}, separators=(",", ":"))
        for each in files
    ]
    if not lines:
        return BEGINNING
    return Position('{"logOffset":0}', {"0": "\n".join(["v1", *lines]).encode()})


def give_positions(live: LiveDirectory, continued: Mapping[str, str], new: Mapping[str, Position]) -> None:
    """Let the next batch read other sources: those of `continued` and `new`, by number or name.

    The batch in flight was planned for the former sources: its rows are read again by those that continue.

    Args:
        continued: Maps a source to the former source whose offset and log it takes.
        new: Maps a source to where it begins.
    """
    folder, batch_id = live.folder, live.positions().commit
    if batch_id is None:
        raise RestoreError(f"{live.url} has no committed batch, so its sources have no position to give to others.")
    folder.delete(f"{OFFSETS}/{batch_id + 1}")
    folder.flush(OFFSETS)
    order = in_order([*continued, *new])
    for number in (batch_id - 1, batch_id):
        path = f"{OFFSETS}/{number}"
        if folder.size(path) is None:
            continue
        data = folder.read(path)
        before = parse_offset_entry(data, f"{live.url}/{path}").sources
        offsets: dict[str, str | None] = {}
        for source in order:
            offset = before.get(continued[source]) if source in continued else new[source].offset
            # Spark asks a file source again for what lies between these two batches.
            is_before_its_log = source in new and number < batch_id and log_offset(offset) is not None
            offsets[source] = None if is_before_its_log else offset
        folder.write(path, [with_sources(data, f"{live.url}/{path}", offsets)])
    _move_logs(live, continued, new)


def in_order(sources: Iterable[str]) -> list[str]:
    found = list(sources)
    return sorted(found, key=int) if all(each.isdecimal() for each in found) else found


def _move_logs(live: LiveDirectory, continued: Mapping[str, str], new: Mapping[str, Position]) -> None:
    folder = live.folder
    there = [name for name, entry in folder.list(SOURCES).items() if entry.is_directory]
    former = {old: source for source, old in continued.items()}
    moved = [name for name in there if former.get(name) != name]
    # Moved in two steps, because two sources may have changed places.
    for name in moved:
        if name in former:
            _copy(live, f"{SOURCES}/{name}", f"{SOURCES}/{_OLD}-{name}")
        live.sibling(f"/{SOURCES}/{name}").folder.delete_all()
    for name in moved:
        if name in former:
            _copy(live, f"{SOURCES}/{_OLD}-{name}", f"{SOURCES}/{former[name]}")
            live.sibling(f"/{SOURCES}/{_OLD}-{name}").folder.delete_all()
    for source, position in new.items():
        for name, data in position.log.items():
            folder.place(f"{SOURCES}/{source}/{name}", [data])
    folder.flush_all()


def _copy(live: LiveDirectory, source: str, target: str) -> None:
    folder = live.folder
    for path, _entry in list(folder.find(source)):
        folder.place(f"{target}/{path.removeprefix(f'{source}/')}", _chunks(live, path))


def _chunks(live: LiveDirectory, path: str) -> Iterator[bytes]:
    with live.folder.open(path) as stream:
        yield from iter(lambda: stream.read(_CHUNK_BYTES), b"")
