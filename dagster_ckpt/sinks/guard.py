"""Guard: decide who owns a sink's log before a start, restore, rewind, fork, roll-back or clean-up changes it.

A log is rolled back, emptied or continued only if the query about to start names its folder, and if
catalog, stream and log agree on who wrote it. A folder that a snapshot names and the query does not
is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.sinks.parquet import Past
from dagster_ckpt.spark.query.output import NamedOutput, same_folder
from dagster_ckpt.spark.query.sinks import file_sink_path


class Start(StrEnum):
    """Kind of start, as seen by a sink.

    RESUME: The query continues where it stopped.
    TO_SNAPSHOT: It goes back to a snapshot.
    TO_BATCH: It goes back to a batch in the live directory.
    EMPTY: It starts with empty state.
    FORKED: It starts with the state of another stream, whose output it does not own.
    CLEAN: Nothing is started: files that no log lists are deleted.
    """

    RESUME = "RESUME"
    TO_SNAPSHOT = "TO_SNAPSHOT"
    TO_BATCH = "TO_BATCH"
    EMPTY = "EMPTY"
    FORKED = "FORKED"
    CLEAN = "CLEAN"


class Verdict(StrEnum):
    """What happens to the log of a folder.

    LEAVE: Nothing: the query does not write there.
    CONTINUE: Nothing: it is at the same batch as the query.
    ROLL_BACK: It is rolled back to the batch; for a start with empty state, to before the first
        batch.
    BEGIN: The folder gets a log without files up to the batch: Spark rejects a log with a hole at
        its next compaction.
    REFUSE: The query is not started.
    """

    LEAVE = "LEAVE"
    CONTINUE = "CONTINUE"
    ROLL_BACK = "ROLL_BACK"
    BEGIN = "BEGIN"
    REFUSE = "REFUSE"


class Refusal(StrEnum):
    """Why a query is not started on a folder."""

    ORIGINALS = "it is the output of the stream that the state comes from"
    NOT_MAPPED = "no sink of the imported snapshot is mapped to it"
    ANOTHERS_LOG = "its log is not this stream's"
    ANOTHER_STREAMS = "another stream of this catalog writes there"
    LOG_IS_GONE = "its log is gone, and with it the rows that the stream has written there"
    LOG_ELSEWHERE = "its log does not stand where the stream stands"
    NOT_IN_SNAPSHOT = "it holds a log that the snapshot does not know, so it cannot be brought back"


@dataclass(frozen=True)
class SinkFacts:
    """Facts about one folder.

    Attributes:
        start: The kind of start.
        batch_id: The batch after which the query continues; -1 is before the first.
        named: The query about to start writes there.
        ours: According to the catalog, this stream wrote there last.
        others_known: The catalog knows other folders to which this stream wrote last.
        noted: The snapshot names the folder.
        originals: It is the output of the stream that a fork or an import comes from.
        anothers: According to the catalog, another of its streams wrote there last.
        mapped: The start is not an import, or the import maps a sink to the folder.
        last: Newest batch of its log; None if it has none.
        planned: Newest batch that the query has planned, read after the log; None if unknown.
        blank: Its log lists no file.
        past: Relation of its log to the snapshot's; for a fork, to the log that it gets.
        left_behind: The snapshot is of an abandoned timeline, so the log may have diverged since.
    """

    start: Start
    batch_id: int
    named: bool = True
    ours: bool = True
    others_known: bool = False
    noted: bool = False
    originals: bool = False
    anothers: bool = False
    mapped: bool = True
    last: int | None = None
    planned: int | None = None
    blank: bool = False
    past: Past = Past.SAME
    left_behind: bool = False


@dataclass(frozen=True)
class Judgement:
    """Decision for one folder.

    Attributes:
        path: The folder.
        verdict: What happens to its log.
        refusal: Why the start is refused, for REFUSE.
    """

    path: str
    verdict: Verdict
    refusal: Refusal | None = None


def judge(path: str, facts: SinkFacts) -> Judgement:
    """Decide what a start does with the log of one folder. A pure function."""
    if not facts.named:
        return Judgement(path, Verdict.LEAVE)
    if facts.originals:
        return Judgement(path, Verdict.REFUSE, Refusal.ORIGINALS)
    if facts.anothers and facts.last is not None and (not facts.ours or facts.start is Start.CLEAN):
        return Judgement(path, Verdict.REFUSE, Refusal.ANOTHER_STREAMS)
    if not facts.mapped:
        return Judgement(path, Verdict.REFUSE, Refusal.NOT_MAPPED)
    decided = _RULES[facts.start](facts)
    if isinstance(decided, Refusal):
        return Judgement(path, Verdict.REFUSE, decided)
    return Judgement(path, decided)


def _resume(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        if facts.batch_id < 0:
            return Verdict.CONTINUE
        return Refusal.LOG_IS_GONE if facts.ours else Verdict.BEGIN
    if facts.others_known and _is_half_started(facts):
        return Verdict.BEGIN
    if not facts.ours and facts.others_known and not facts.blank:
        return Refusal.ANOTHERS_LOG
    planned = facts.planned if facts.planned is not None else facts.batch_id
    if not facts.ours and facts.last > max(facts.batch_id, planned):
        # The query of this live directory never wrote it: undoing it as a batch in flight would
        # undo another query's batch.
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _to_snapshot(facts: SinkFacts) -> Verdict | Refusal:
    if facts.noted:
        other_way = facts.past in (Past.SHARED, Past.PART) and facts.left_behind
        agrees = facts.past in (Past.NONE, Past.SAME) or other_way
        return Verdict.ROLL_BACK if agrees else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    # The snapshot was taken before the catalog knew the folder, of a query that was at the batch of
    # the log.
    return Verdict.CONTINUE if facts.ours and facts.last == facts.batch_id else Refusal.NOT_IN_SNAPSHOT


def _to_batch(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Refusal.LOG_IS_GONE if facts.ours else Verdict.BEGIN
    if _is_half_started(facts):
        return Verdict.BEGIN
    return Verdict.ROLL_BACK if facts.ours else Refusal.ANOTHERS_LOG


def _empty(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Verdict.CONTINUE
    return Verdict.ROLL_BACK if facts.ours else Refusal.ANOTHERS_LOG


def _forked(facts: SinkFacts) -> Verdict | Refusal:
    if facts.noted:
        # The folder gets the rows of the original. Part of them may exist from an earlier,
        # interrupted start.
        is_part = facts.past in (Past.SAME, Past.PART) and facts.last is not None and facts.last <= facts.batch_id
        return Verdict.ROLL_BACK if is_part or facts.past is Past.NONE else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    if not facts.ours:
        # A log created by `begin_log` lists no file.
        return Verdict.CONTINUE if facts.blank and facts.last == facts.batch_id else Refusal.ANOTHERS_LOG
    return Verdict.CONTINUE if facts.batch_id <= facts.last <= facts.batch_id + 1 else Refusal.ANOTHERS_LOG


def _clean(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Refusal.LOG_IS_GONE
    if not facts.ours or (facts.noted and facts.past is not Past.SAME):
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _where_the_query_stands(facts: SinkFacts) -> Verdict | Refusal:
    # The log may be one batch ahead: the batch in flight, which is decided separately. A query that
    # still runs may plan further batches.
    ahead = max(facts.batch_id + 1, facts.planned if facts.planned is not None else -1)
    last = facts.last if facts.last is not None else -1
    return Verdict.CONTINUE if facts.batch_id <= last <= ahead else Refusal.LOG_ELSEWHERE


def _is_half_started(facts: SinkFacts) -> bool:
    """Whether the log exists because a start was interrupted while it created the log of a new folder."""
    return not facts.ours and facts.blank and facts.last is not None and facts.last < facts.batch_id


_RULES = {
    Start.RESUME: _resume,
    Start.TO_SNAPSHOT: _to_snapshot,
    Start.TO_BATCH: _to_batch,
    Start.EMPTY: _empty,
    Start.FORKED: _forked,
    Start.CLEAN: _clean,
}


@dataclass(frozen=True)
class NamedFolders:
    """Folders to which the query about to start writes files.

    Attributes:
        folders: The folders.
        is_seen: Whether the folders come from the query itself. Otherwise, if the query is not
            available, they come from the catalog and the snapshot.
    """

    folders: tuple[str, ...]
    is_seen: bool

    @staticmethod
    def of(output: NamedOutput | None, last_sinks: Sequence[str], noted: Sequence[str] = ()) -> NamedFolders:
        """The folders of a described query, or if there is none, those to which the stream is known to write."""
        if output is not None:
            return NamedFolders((output.folder,) if output.folder is not None else (), is_seen=True)
        last = [path for path in map(file_sink_path, last_sinks) if path is not None]
        return NamedFolders(tuple(dict.fromkeys([*last, *noted])), is_seen=False)

    def names(self, path: str) -> bool:
        """Whether a folder is among them, in any spelling."""
        return any(same_folder(path, folder) for folder in self.folders)
