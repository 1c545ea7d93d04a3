"""The snapshots of an Iceberg table, and to which of them it is rolled back. Works on values alone.

A streaming write stores query id and epoch (the batch) in its snapshot's summary, and skips an epoch not greater than
that of the nearest such ancestor of the current snapshot (`SparkWrite.BaseStreamingWrite`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.sinks.sink import ReadOfSink, RollBack
from dagster_ckpt.spark.query.table_sources import IcebergOffset
from dagster_ckpt.values.safe_parsing import inflated, number_in, reading

METADATA_FOLDER = "metadata"
FENCE, EMPTIED = "dagster-ckpt.fence", "dagster-ckpt.emptied"
MAIN = "main"
DROPPED = ""
_QUERY = "spark.sql.streaming.queryId"
_EPOCH = "spark.sql.streaming.epochId"
_TOTAL_ROWS = "total-records"
_GZIP = 31
# Iceberg refuses a commit if the clocks of two writers differ by more.
_CLOCKS_DIFFER_MS = 60_000
# HadoopTableOperations writes v7.metadata.json, catalogs 00007-<uuid>.metadata.json; also compressed.
_METADATA_NAME = re.compile(r"v?(\d+)(-[^.]+)?(\.gz)?\.metadata\.json(\.gz)?")


class IcebergSnapshot(BaseModel):
    id: int = Field(alias="snapshot-id")
    parent: int | None = Field(default=None, alias="parent-snapshot-id")
    at_ms: int = Field(default=0, alias="timestamp-ms")
    summary: dict[str, str] = {}

    def batch_of(self, query_ids: Collection[str]) -> int | None:
        return number_in(self.summary.get(_EPOCH, "")) if self.summary.get(_QUERY) in query_ids else None

    @property
    def changes_rows(self) -> bool:
        """A rewritten file or an empty commit changes no rows."""
        if EMPTIED in self.summary or FENCE in self.summary:
            return False
        return self.summary.get("operation") != "replace" and self.summary.get("changed-partition-count") != "0"


@dataclass(frozen=True)
class IcebergPlan:
    """What a roll-back would do to a table.

    Attributes:
        snapshot_id: Snapshot to make current; None deletes all rows. Without `reaches_back`, the newest of the branch.
        reaches_back: Whether the remaining snapshots are sufficient to decide.
        branch: Branch of the stream; None for main, `DROPPED` if it was dropped after main got its snapshots. Not
            certain without `reaches_back`.
    """

    moves: bool = False
    snapshot_id: int | None = None
    others: tuple[int, ...] = ()
    reaches_back: bool = True
    branch: str | None = None


class _Ref(BaseModel):
    snapshot: int = Field(alias="snapshot-id")
    kind: str = Field(default="", alias="type")


class MainEntry(BaseModel):
    snapshot: int = Field(alias="snapshot-id")
    at_ms: int = Field(default=0, alias="timestamp-ms")


class _Metadata(BaseModel):
    uuid: str | None = Field(default=None, alias="table-uuid")
    current: int | None = Field(default=None, alias="current-snapshot-id")
    snapshots: list[IcebergSnapshot] = []
    refs: dict[str, _Ref] = {}
    log: list[MainEntry] = Field(default=[], alias="snapshot-log")

    def history(self) -> IcebergHistory:
        heads = {name: ref.snapshot for name, ref in self.refs.items() if ref.kind == "branch" and name != MAIN}
        return IcebergHistory(self.current, self.snapshots, heads, self.log, uuid=self.uuid)


class IcebergHistory:
    """The unexpired snapshots of a table, on any timeline.

    `branches` has the newest snapshot of each branch but main. `main_log` has those that were current, oldest first;
    `expire_snapshots` deletes the entry of an expired one and those before it.
    """

    def __init__(
        self,
        current: int | None,
        snapshots: Collection[IcebergSnapshot],
        branches: Mapping[str, int] | None = None,
        main_log: Sequence[MainEntry] = (),
        *,
        uuid: str | None = None,
    ) -> None:
        self.uuid = uuid
        self._branches = dict(branches or {})
        self._of_main = frozenset(entry.snapshot for entry in main_log)
        self._main_log = frozenset((entry.snapshot, entry.at_ms) for entry in main_log)
        self._log_begins_ms = main_log[0].at_ms if main_log else None
        self._snapshots = {snapshot.id: snapshot for snapshot in snapshots}
        # Java writes -1 where there is none.
        self._current = self._snapshots.get(current) if current is not None else None

    def last_batch(self, query_id: str) -> int | None:
        """Return the newest batch of a query, even an undone one."""
        batches = (snapshot.batch_of([query_id]) for snapshot in self._snapshots.values())
        return max((batch for batch in batches if batch is not None), default=None)

    def snapshot_of(self, query_id: str, batch_id: int) -> IcebergSnapshot | None:
        found = [each for each in self._snapshots.values() if each.batch_of([query_id]) == batch_id]
        return max(found, key=lambda each: each.at_ms, default=None)

    def newest_batch_shown(self, own: Collection[str]) -> tuple[int | None, bool]:
        heads = [self._current, *(self._snapshots.get(head) for head in self._branches.values())]
        newest: list[int] = []
        is_certain = True
        for head in heads:
            for each in self._from(head):
                batch = each.batch_of(own)
                if batch is not None:
                    newest.append(batch)
                    break
                is_certain &= each.parent is None or self._parent(each) is not None
        return max(newest, default=None), is_certain

    def may_have_forgotten(self, query_id: str, since_ms: int) -> bool:
        """Whether it may have had a batch that a query planned at a time, in snapshots that have expired."""
        shown = list(self._from(self._current))
        if not shown or shown[-1].parent is None or self.newest_batch_shown([query_id])[0] is not None:
            return False
        return shown[-1].at_ms + _CLOCKS_DIFFER_MS > since_ms

    def read_up_to(self, offset: IcebergOffset, own: Collection[str]) -> ReadOfSink:
        at = self._snapshots.get(offset.snapshot_id)
        if offset.is_before_the_first or (offset.reads_table and offset.position == 0):
            return ReadOfSink()
        if at is None:
            return ReadOfSink(why="the snapshot that it has read has expired, and the position is")
        if offset.position == 0:
            at = self._parent(at)
        shown = {each.id for each in self._from(self._current)}
        undone = 0
        while at is not None and at.id not in shown:
            undone += at.changes_rows and at.batch_of(own) is not None
            at = self._parent(at)
        last = None
        for each in self._from(at):
            batch = each.batch_of(own)
            if batch is not None:
                return ReadOfSink(batch, undone)
            last = each
        if last is not None and last.parent is not None:
            return ReadOfSink(why="older snapshots of the table have expired, and the position is")
        return ReadOfSink(None, undone)

    def batch_after(self, to: RollBack) -> int | None:
        own = to.own_ids
        found = self.plan(to)
        if not found.reaches_back or not found.moves:
            return None
        target = self._snapshots.get(found.snapshot_id) if found.snapshot_id is not None else None
        batches = (each.batch_of(own) for each in self._from(target))
        return next((batch for batch in batches if batch is not None), None)

    def plan(self, to: RollBack) -> IcebergPlan:
        own = to.own_ids
        branch, newest = self._branch_of(own)
        if branch is not None and not self._is_in_reach_of_log(newest):
            return IcebergPlan(snapshot_id=self._branches[branch], reaches_back=False, branch=branch)
        if branch is not None:
            head = self._current.id if branch == DROPPED and self._current is not None else self._branches[branch]
            on_branch = IcebergHistory(head, self._snapshots.values())
            return replace(on_branch.plan(to), branch=branch)
        wanted = self._holding(own, to.query_id, to.batch_id)
        if wanted is None or wanted.id in {each.id for each in self._from(self._current)}:
            return self._back(wanted, own, to.batch_id)
        if wanted.batch_of(own) != to.batch_id:
            # The batch's own snapshot has expired; a tag keeps an older one.
            return IcebergPlan(reaches_back=False)
        return self._to_another_timeline(wanted, own)

    def _branch_of(self, own: Collection[str]) -> tuple[str | None, int]:
        """Return the branch (None: main) to which the stream writes, and the commit time of its newest batch there."""

        def newest(head: IcebergSnapshot | None, *, or_of_main: bool) -> int:
            batches = (each for each in self._from(head) if each.batch_of(own) is not None)
            return max((each.at_ms for each in batches if or_of_main or each.id not in self._of_main), default=-1)

        # A branch may keep what was undone on main.
        found = {name: newest(self._snapshots.get(head), or_of_main=False) for name, head in self._branches.items()}
        name = max(found, key=found.__getitem__, default=None)
        of_main, published = newest(self._current, or_of_main=True), self._published(own)
        if name is not None and found[name] > of_main:
            return name, found[name]
        if published < 0:
            return None, of_main
        # A person may have brought the branch back.
        return (name if name is not None and self._is_in_reach_of_log(found[name]) else DROPPED), published

    def _published(self, own: Collection[str]) -> int:
        """Return when the newest batch was committed that main got from a branch (`fast_forward`); -1 if none.

        A snapshot that was committed on main is in the log of main, with its own time. Where the newest batch is one,
        the stream writes to main.
        """
        batches = [each for each in self._from(self._current) if each.batch_of(own) is not None]
        if batches and (batches[0].id, batches[0].at_ms) in self._main_log:
            return -1
        found = (each.at_ms for each in batches if each.id not in self._of_main)
        return max((at_ms for at_ms in found if self._is_in_reach_of_log(at_ms)), default=-1)

    def _is_in_reach_of_log(self, at_ms: int) -> bool:
        return self._log_begins_ms is not None and at_ms > self._log_begins_ms + _CLOCKS_DIFFER_MS

    def _holding(self, own: Collection[str], query_id: str | None, batch_id: int) -> IcebergSnapshot | None:
        if batch_id < 0:
            return None
        of_query = [each for each in self._snapshots.values() if query_id is not None and _is_batch_of(each, query_id)]
        kept = [each for each in of_query if (each.batch_of(own) or 0) <= batch_id]
        if kept:
            here = {each.id for each in self._from(self._current)}
            # A batch undone by hand and run again is there twice.
            return max(kept, key=lambda each: (each.batch_of(own) or 0, each.id in here, each.at_ms))
        # The query got a new id after that batch.
        first = min(of_query, key=lambda each: (each.batch_of(own) or 0, each.at_ms), default=None)
        start = self._current if first is None else self._parent(first)
        for each in self._from(start):
            batch = each.batch_of(own)
            if batch is not None and batch <= batch_id:
                return each
        return None

    def _back(self, wanted: IcebergSnapshot | None, own: Collection[str], batch_id: int) -> IcebergPlan:
        oldest: IcebergSnapshot | None = None
        foreign: list[int] = []
        others: list[int] = []
        last: IcebergSnapshot | None = None
        for each in self._from(self._current):
            is_emptied = EMPTIED in each.summary or (batch_id < 0 and each.summary.get(_TOTAL_ROWS) == "0")
            if (wanted is not None and each.id == wanted.id) or (wanted is None and is_emptied):
                last = None
                break
            last, batch = each, each.batch_of(own)
            if EMPTIED in each.summary or (batch is not None and (wanted is not None or batch > batch_id)):
                oldest, others, foreign = each, [*others, *foreign], []
            elif batch is not None:
                # The snapshot does not name this query: its rows stay.
                last = None
                break
            elif each.changes_rows:
                foreign.append(each.id)
        if last is not None and last.parent is not None and self._parent(last) is None:
            return IcebergPlan(reaches_back=False)
        if oldest is None:
            return IcebergPlan()
        return IcebergPlan(True, oldest.parent, tuple(sorted(others)))

    def _to_another_timeline(self, wanted: IcebergSnapshot, own: Collection[str]) -> IcebergPlan:
        ahead = {each.id for each in self._from(wanted)}
        others: list[int] = []
        for each in self._from(self._current):
            if each.id in ahead:
                break
            if each.changes_rows and each.batch_of(own) is None:
                others.append(each.id)
            if each.parent is not None and each.parent not in ahead and self._parent(each) is None:
                # Expired snapshots may hold rows of others.
                return IcebergPlan(reaches_back=False)
        return IcebergPlan(True, wanted.id, tuple(sorted(others)))

    def _from(self, snapshot: IcebergSnapshot | None) -> Iterator[IcebergSnapshot]:
        seen: set[int] = set()
        # A damaged snapshot may be its own ancestor.
        while snapshot is not None and snapshot.id not in seen:
            seen.add(snapshot.id)
            yield snapshot
            snapshot = self._parent(snapshot)

    def _parent(self, snapshot: IcebergSnapshot) -> IcebergSnapshot | None:
        return self._snapshots.get(snapshot.parent) if snapshot.parent is not None else None


def _is_batch_of(snapshot: IcebergSnapshot, query_id: str) -> bool:
    batch = snapshot.batch_of([query_id])
    return batch is not None and batch >= 0


def history_in(text: str | bytes, where: str) -> IcebergHistory:
    with _reading(where):
        return _Metadata.model_validate_json(text).history()


def history_in_folder(table: FileIO) -> IcebergHistory:
    """Read the newest metadata file, certainly the current one only in a Hadoop table; FileNotFoundError if none."""
    matches = [match for match in map(_METADATA_NAME.fullmatch, table.list(METADATA_FOLDER)) if match]
    if not matches:
        raise FileNotFoundError(f"{table.url}/{METADATA_FOLDER}")
    name = max(matches, key=lambda match: int(match[1]))[0]
    data = table.read(f"{METADATA_FOLDER}/{name}")
    where = f"{table.url}/{METADATA_FOLDER}/{name}"
    with _reading(where):
        text = inflated(data, _GZIP) if ".gz" in name else data
    return history_in(text, where)


def _reading(where: str) -> AbstractContextManager[None]:
    return reading(lambda why: LiveDirectoryError(f"{where} is not Iceberg metadata: {why}. Repair the table first."))
