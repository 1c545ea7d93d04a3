"""Whose sink is it? Asked before a start, restore, rewind, fork, roll-back or clean-up changes the log of one.

A log is rolled back, emptied or continued only where the query about to start names its folder, and where catalog,
stream and log agree on who wrote it. A folder that a snapshot names and the query does not is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.sinks.parquet import Past
from dagster_ckpt.spark.query.output import NamedOutput, same_folder
from dagster_ckpt.spark.query.sinks import file_sink_path


class Start(StrEnum):
    """What kind of start a sink sees.

    RESUME: The query goes on where it stopped.
    TO_SNAPSHOT: It goes back to a snapshot.
    TO_BATCH: It goes back to a batch in the live directory.
    EMPTY: It begins without state.
    FORKED: It begins with the state of another one, whose output is not its own.
    CLEAN: Nothing is started: files that no log names are deleted.
    """

    RESUME = "RESUME"
    TO_SNAPSHOT = "TO_SNAPSHOT"
    TO_BATCH = "TO_BATCH"
    EMPTY = "EMPTY"
    FORKED = "FORKED"
    CLEAN = "CLEAN"


class Verdict(StrEnum):
    """What is done with the log of a folder.

    LEAVE: Nothing: the query does not write there.
    CONTINUE: Nothing: it stands where the query stands.
    ROLL_BACK: It goes back to the batch; to before the first for an empty start.
    BEGIN: The folder is given a log without files up to the batch: Spark refuses one with a hole at its next
        compaction.
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
    """What is known of one folder.

    Attributes:
        start: The kind of start.
        batch_id: The batch the query goes on after; -1 is before the first.
        named: The query about to start writes there.
        ours: The catalog says that this stream wrote there last.
        others_known: The catalog knows of other places that this stream wrote to last.
        noted: The snapshot names the folder.
        originals: It is the output of the stream that a fork or an import comes from.
        anothers: The catalog says that another of its streams wrote there last.
        mapped: No import is to be started, or the import maps a sink to the folder.
        last: Newest batch of its log; None where it has none.
        planned: Newest batch that the query has planned, looked at after its log; None where that is not known.
        blank: Its log names no file.
        past: How its log stands to the snapshot's; for a fork, to the log that it is given.
        left_behind: The snapshot is of a timeline that was left, so that the log may have gone another way since.
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
    """What is done with one folder.

    Attributes:
        path: The folder.
        verdict: What is done.
        refusal: Why not, for REFUSE.
    """

    path: str
    verdict: Verdict
    refusal: Refusal | None = None


def judge(path: str, facts: SinkFacts) -> Judgement:
    """Decide what a start does with the log of one folder. Pure."""
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
        # The query that has this live directory never wrote it: to undo it as a batch in flight would undo another's.
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _to_snapshot(facts: SinkFacts) -> Verdict | Refusal:
    if facts.noted:
        other_way = facts.past in (Past.SHARED, Past.PART) and facts.left_behind
        agrees = facts.past in (Past.NONE, Past.SAME) or other_way
        return Verdict.ROLL_BACK if agrees else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    # Taken before the catalog was told of the folder, of a query that stood where its log stands now.
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
        # It is given the rows of the original. Half of them may be there, of a time before when that was cut off.
        is_part = facts.past in (Past.SAME, Past.PART) and facts.last is not None and facts.last <= facts.batch_id
        return Verdict.ROLL_BACK if is_part or facts.past is Past.NONE else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    if not facts.ours:
        # What it was given by `begin` names no file.
        return Verdict.CONTINUE if facts.blank and facts.last == facts.batch_id else Refusal.ANOTHERS_LOG
    return Verdict.CONTINUE if facts.batch_id <= facts.last <= facts.batch_id + 1 else Refusal.ANOTHERS_LOG


def _clean(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Refusal.LOG_IS_GONE
    if not facts.ours or (facts.noted and facts.past is not Past.SAME):
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _where_the_query_stands(facts: SinkFacts) -> Verdict | Refusal:
    # One more than the query: the batch in flight, which is decided by itself. One that still runs goes on meanwhile.
    ahead = max(facts.batch_id + 1, facts.planned if facts.planned is not None else -1)
    last = facts.last if facts.last is not None else -1
    return Verdict.CONTINUE if facts.batch_id <= last <= ahead else Refusal.LOG_ELSEWHERE


def _is_half_started(facts: SinkFacts) -> bool:
    """Whether a log is there because a start was cut off while it gave a new folder one."""
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
    """Folders that the query about to start writes files to.

    Attributes:
        folders: The folders.
        is_seen: Whether the described query says so. Otherwise it is what the catalog and the snapshot know of the
            stream: nothing else can be looked at where the query is not at hand.
    """

    folders: tuple[str, ...]
    is_seen: bool

    @staticmethod
    def of(output: NamedOutput | None, last_sinks: Sequence[str], noted: Sequence[str] = ()) -> NamedFolders:
        """The folders of a described query; where there is none, those that the stream is known to write to."""
        if output is not None:
            return NamedFolders((output.folder,) if output.folder is not None else (), is_seen=True)
        last = [path for path in map(file_sink_path, last_sinks) if path is not None]
        return NamedFolders(tuple(dict.fromkeys([*last, *noted])), is_seen=False)

    def names(self, path: str) -> bool:
        """Whether a folder is among them, however it is spelled."""
        return any(same_folder(path, folder) for folder in self.folders)
