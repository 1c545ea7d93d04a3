"""Turning a snapshot into a live directory that Spark can start in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from dagster_ckpt.errors import CkptError, LiveDirectoryError, RestoreError
from dagster_ckpt.foreign import number_in
from dagster_ckpt.io.folder import Folder
from dagster_ckpt.io.local_folder import LocalFolder
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.donors import Donor, altered
from dagster_ckpt.spark.checkpoint_dir.file_sink_log import SINKS_FOLDER, SinkEntry
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.checkpoint_dir.hard_links import Linker
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_query_id
from dagster_ckpt.spark.checkpoint_dir.needed import NeededFile
from dagster_ckpt.spark.checkpoint_dir.operators import is_metadata_v2, rewrite_schema_paths
from dagster_ckpt.spark.checkpoint_dir.staging import overtaken, staged_cut, until_not_overtaken

# Called often while files are laid; what it raises ends that, and what was laid is deleted.
Watch = Callable[[], None]

_LOGS = (OFFSETS, COMMITS)
# Enough for their directories to be worth being made together.
_LINKED_AT_A_TIME = 4_000


def unwatched() -> None:
    """Let it come to its end."""


@dataclass(frozen=True)
class Materialized:
    """A live directory made from a snapshot.

    Attributes:
        live: The directory.
        batch_id: The batch it resumes after.
        query_id: Id of the query in it.
        sinks: Index of a sink in the snapshot's properties to its log entries, for `roll_back`.
        carries_state: Whether the state after the batch in flight came along, so that a sink may pass over it.
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
    watch: Watch = unwatched,
) -> Materialized:
    """Build a live directory aside, check that it is whole, then move it into place; on return it is durable.

    In an object store, where nothing can be moved at once, it is built in place, the logs last: until then there is
    nothing that a query could resume from, and a start that was killed here is simply made again.

    Args:
        target: Where it is to be; nothing may be there.
        fill: Called once with what takes the files of the snapshot; gives it every file, from several threads if it
            likes.
        new_query_id: A fork's own query id. None keeps the snapshot's: the query goes on, and
            sinks that remember query ids know it again.
        is_whole: What `fill` gives is a cut that was whole, down to the last checked byte, so that only the logs are
            looked at once more.
        is_scratch: It is deleted after a look, so it need not outlive a loss of power.
        watch: Called while files are laid, from the threads that lay them; what it raises ends that.

    Raises:
        RestoreError: Something is at the target, or the snapshot makes no whole live directory.
        StorageAccessError: The target cannot be written.
    """
    if target.exists():
        raise RestoreError(
            f"{target.url} exists already, and a live directory in use must not be overwritten. Restore into "
            "another one, or delete it if nothing of it is needed."
        )
    unfinished = target.sibling(".partial") if target.folder.moves_at_once else target
    unfinished.delete()
    unfinished.folder.make()
    filler = Filler(unfinished.folder, target, new_query_id, logs_last=unfinished == target, watch=watch)
    try:
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
    watch: Watch = unwatched,
) -> Materialized:
    """Go on from a live directory in a fresh one, beside a writer that may still be there.

    The batch in flight is carried, so that exactly it is replayed. Files are linked where
    both are on one local disk: a late writer replaces files and never modifies them.

    Args:
        live: The directory to go on from; it is left as it is.
        target: Where the query is to go on; nothing may be there.
        at_batch: A committed batch that Spark still retains, to go back to it; exactly the batch after it is
            replayed, and those after that are planned afresh. Default: the newest.
        carry_state: Also take the state after the batch in flight, if all of it is there: see `cut`.
        is_scratch: See `materialize`.
        watch: See `materialize`.

    Raises:
        NothingCommittedError: No batch is committed there yet.
        IncompleteCutError: The directory is not whole.
        RestoreError: Something is at the target.
        StorageAccessError: A directory cannot be read or written.
    """

    def attempt() -> Materialized:
        with staged_cut(live, carry_in_flight=True, at_batch=at_batch, carry_state=carry_state) as staged:

            def fill(filler: Filler) -> None:
                rest = [file for file in staged.hand_over() if file.data is not None or not filler.link(file)]
                for file in staged.hold(rest):
                    with file.open() as stream:
                        filler(file.path, iter(lambda: stream.read(1 << 20), b""))

            made = materialize(target, fill, is_scratch=is_scratch, watch=watch)
            return replace(made, carries_state=staged.cut.carries_state)

    return until_not_overtaken(attempt)


class Filler:
    """Takes the files of a snapshot, each to its place in a new live directory.

    Bytes may come from several threads at once, links from one.

    Args:
        folder: Where the files go.
        target: Where the directory will be in the end.
        new_query_id: A query id of its own, or None.
        logs_last: Hold the entries of offset and commit log back until `write_logs`.
        watch: See `materialize`.
    """

    def __init__(
        self,
        folder: Folder,
        target: LiveDirectory,
        new_query_id: str | None,
        *,
        logs_last: bool = False,
        watch: Watch = unwatched,
    ) -> None:
        self._folder = folder
        self._target = target
        self._new_query_id = new_query_id
        self._linker = Linker(folder.root) if isinstance(folder, LocalFolder) else None
        self._logs_last = logs_last
        self._watch = watch
        self._logs: dict[tuple[str, str], bytes] = {}
        self.sinks: dict[int, list[SinkEntry]] = {}

    def __call__(self, path: str, chunks: Iterable[bytes]) -> None:
        """Take one file.

        Args:
            path: Its path in the snapshot.
            chunks: Its content.
        """
        chunks = self._watched(chunks)
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise RestoreError(f"The snapshot holds a file {path!r}, which lies outside of a live directory.")
        if parts[0] == SINKS_FOLDER:
            index, name = sink_entry(path)
            self.sinks.setdefault(index, []).append(SinkEntry(name, b"".join(chunks)))
        elif path == METADATA and self._new_query_id is not None:
            # The old one is still checked, by being used up.
            b"".join(chunks)
            self._folder.create(path, [json.dumps({"id": self._new_query_id}, separators=(",", ":")).encode()])
        elif is_metadata_v2(path):
            try:
                data = rewrite_schema_paths(b"".join(chunks), path, self._target.spark_location)
            except CkptError as error:
                raise RestoreError(f"The snapshot cannot be restored: {error}") from error
            self._folder.create(path, [data])
        elif self._logs_last and parts[0] in _LOGS:
            self._logs[parts[0], "/".join(parts[1:])] = b"".join(chunks)
        else:
            self._folder.create(path, chunks)

    def _watched(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._watch()
            yield chunk

    def write_logs(self) -> None:
        """Write what was held back: first what was planned, then what was committed, the newest commit at the end."""
        # A commit makes a directory one that a query has been in.
        for log, name in sorted(self._logs, key=lambda entry: (_LOGS.index(entry[0]), entry[1].zfill(20))):
            self._folder.create(f"{log}/{name}", [self._logs[log, name]])

    def link(self, file: NeededFile) -> bool:
        """Take a file by a hard link instead of its bytes.

        Returns:
            False where that is impossible: then it has to be given as bytes.

        Raises:
            CutOvertakenError: It is not there any more, or is another one by now.
        """
        if not isinstance(file.folder, LocalFolder) or self._linker is None:
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
        """Take files of a snapshot by hard links to where they came from, as far as they are what they were.

        Spark writes a file once and renames it into place, so one of the same device, inode, time and size is the very
        file that the snapshot was taken of, or a link to it. What a disk, a loss of power or a person did to its
        content shows in none of these.

        Args:
            entries: The files.
            donor: A live directory that may still have them.

        Yields:
            Those that it has not: they have to be given as bytes.
        """
        root = donor.live.local_path if donor is not None else None
        if self._linker is None or donor is None or root is None:
            yield from entries
            return
        rest = iter(entries)
        while some := list(islice(rest, _LINKED_AT_A_TIME)):
            self._watch()
            linkable: list[FileEntry] = []
            for entry in some:
                if entry.token is not None and self.takes_as_it_is(entry.path):
                    linkable.append(entry)
                else:
                    yield entry
            unlinked = self._linker.link_unchanged(str(root), linkable)
            yield from unlinked
            left = {entry.path for entry in unlinked}
            # Under their new names nobody puts another file in their place.
            linked = [entry for entry in linkable if entry.path not in left]
            for entry in altered(self._linker.root, linked, donor.check, watch=self._watch):
                self._linker.unlink(entry.path)
                yield entry

    def close(self) -> None:
        """Let go of the directories that were linked from."""
        if self._linker is not None:
            self._linker.close()

    def takes_as_it_is(self, path: str) -> bool:
        """Whether a file goes into the live directory, and with the bytes it has in the snapshot."""
        is_rewritten = is_metadata_v2(path) or (path == METADATA and self._new_query_id is not None)
        return not is_rewritten and not path.startswith(f"{SINKS_FOLDER}/")


def sink_entry(path: str) -> tuple[int, str]:
    """Index of the sink and name of the log entry that a file of a snapshot is for.

    Raises:
        RestoreError: It is for none.
    """
    _, *rest = path.split("/")
    index = number_in(rest[0]) if rest else None
    if index is None or len(rest) != 2 or entry_id(rest[1]) is None:
        raise RestoreError(
            f"The snapshot holds a file {path!r}, which is no entry of a sink's log. Restore another snapshot."
        )
    return index, rest[1]


def _query_id(live: LiveDirectory) -> str:
    try:
        return parse_query_id(live.folder.read(METADATA), f"{live.url}/{METADATA}")
    except (LiveDirectoryError, FileNotFoundError) as error:
        raise RestoreError(
            f"The snapshot makes no live directory that Spark could resume in: {error} holds no id of a query. Restore "
            "another snapshot."
        ) from error


def _newest_commit(live: LiveDirectory) -> int:
    positions = live.positions()
    if positions.commit is None or positions.offset is None or positions.offset < positions.commit:
        raise RestoreError(
            "The snapshot makes no live directory that Spark could resume in: its newest commit is "
            f"{positions.commit}, "
            f"and the newest offsets are {positions.offset}. Restore another snapshot."
        )
    return positions.commit


def _checked(live: LiveDirectory) -> int:
    state = inspect_live_directory(live)
    if state.status is LiveStatus.GOOD and state.batch_id is not None:
        return state.batch_id
    raise RestoreError(
        f"The snapshot makes no live directory that Spark could resume in: {state.reason} Restore another snapshot."
    )
