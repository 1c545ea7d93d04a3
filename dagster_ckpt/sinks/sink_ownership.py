"""Decide who owns a sink before it is changed: see "Ownership of sinks" in docs/internals.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import Past
from dagster_ckpt.sinks.registry import described_sink
from dagster_ckpt.sinks.sink import Sink, distinct
from dagster_ckpt.spark.query.output import NamedOutput


class Start(StrEnum):
    """Kind of start, as seen by a sink.

    TO_SNAPSHOT, TO_BATCH: Back to a snapshot, or to a batch in the live directory.
    FORKED: With the state of another stream, whose output it does not own.
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

    ROLL_BACK: It goes back to the query's batch, or is emptied for a start with empty state.
    BEGIN: The folder gets a log without files up to the batch (`begin_log`).
    """

    LEAVE = "LEAVE"
    CONTINUE = "CONTINUE"
    ROLL_BACK = "ROLL_BACK"
    BEGIN = "BEGIN"
    REFUSE = "REFUSE"


class Refusal(StrEnum):
    ORIGINALS = "it is the output of the stream that the state comes from"
    NOT_MAPPED = "no sink of the imported snapshot is mapped to it"
    ANOTHERS_LOG = "its log is not this stream's"
    FORMER_OUTPUT = (
        "the stream wrote there before, and went on in another folder: its log ends at an earlier batch, and readers "
        "of it would miss the rows in between"
    )
    ANOTHER_STREAMS = "another stream of this catalog writes there"
    LOG_IS_GONE = "its log is missing, and with it the rows that the stream has written there"
    LOG_ELSEWHERE = (
        "its log is not at the position of the stream: either another query writes there, or the live directory is an "
        "old copy, such as from a backup of the disk (dagster-ckpt rebuild shows newer checkpoints and how to continue "
        "from them)"
    )
    LOG_HAS_GAP = "its log lacks an entry that readers and the next batches need"
    FILES_ELSEWHERE = "its log lists files that do not lie there, so it was moved or copied"
    NOT_IN_SNAPSHOT = "it has a log that the snapshot does not contain, so it cannot be rolled back"


@dataclass(frozen=True)
class SinkFacts:
    """Facts about one sink that can be rolled back.

    Attributes:
        batch_id: The batch after which the query continues; -1 is before the first.
        named: The query about to start writes there.
        ours: The catalog says that this stream wrote there last; `anothers`: another one did.
        others_known: The catalog knows other folders to which this stream wrote last.
        noted: The snapshot names the sink.
        originals: It is the output of the stream that a fork or an import comes from.
        mapped: The start is not an import, or the import maps a sink to the folder.
        planned: Newest planned batch of the query, if known, read after the log.
        past: Relation of its log to the snapshot's; for a fork, to the log that it gets.
        left_behind: The snapshot's timeline is abandoned: the log may have diverged since.
        has_log: It is a file sink. In another kind, only what its own stream wrote is undone.
        former: This stream wrote there earlier, and then elsewhere.
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
    has_log: bool = True
    knows_queries: bool = False
    former: bool = False
    trouble: Refusal | None = None


@dataclass(frozen=True)
class Judgement:
    """`owner` is another stream that wrote there last."""

    sink: Sink
    verdict: Verdict
    refusal: Refusal | None = None
    owner: str | None = None


def judge(sink: Sink, facts: SinkFacts) -> Judgement:
    if not facts.named:
        return Judgement(sink, Verdict.LEAVE)
    if facts.originals:
        return Judgement(sink, Verdict.REFUSE, Refusal.ORIGINALS)
    is_shared = facts.anothers and not facts.knows_queries and (facts.last is not None or not facts.has_log)
    if is_shared and (not facts.ours or facts.start is Start.CLEAN):
        return Judgement(sink, Verdict.REFUSE, Refusal.ANOTHER_STREAMS)
    if not facts.mapped:
        return Judgement(sink, Verdict.REFUSE, Refusal.NOT_MAPPED)
    if facts.trouble is not None and not _is_replaced(facts):
        return Judgement(sink, Verdict.REFUSE, facts.trouble)
    decided = _RULES[facts.start](facts) if facts.has_log else _without_log(facts)
    if decided is Refusal.ANOTHERS_LOG and facts.former and facts.past is not Past.STRANGER:
        decided = Refusal.FORMER_OUTPUT
    if isinstance(decided, Refusal):
        return Judgement(sink, Verdict.REFUSE, decided)
    return Judgement(sink, decided)


def _is_replaced(facts: SinkFacts) -> bool:
    if facts.start is Start.TO_SNAPSHOT and facts.trouble is Refusal.LOG_HAS_GAP:
        return facts.noted and facts.past is Past.SAME
    return facts.start in (Start.EMPTY, Start.FORKED)


def _without_log(facts: SinkFacts) -> Verdict:
    goes_back = facts.start in (Start.TO_SNAPSHOT, Start.TO_BATCH, Start.EMPTY)
    return Verdict.ROLL_BACK if goes_back and facts.ours else Verdict.CONTINUE


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
        # Another query's batch must not be undone as one in flight.
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _to_snapshot(facts: SinkFacts) -> Verdict | Refusal:
    if facts.noted:
        other_way = facts.past in (Past.SHARED, Past.PART) and facts.left_behind
        agrees = facts.past in (Past.NONE, Past.SAME) or other_way
        return Verdict.ROLL_BACK if agrees else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    # The snapshot was taken before the catalog knew the folder.
    return Verdict.CONTINUE if facts.ours and facts.last == facts.batch_id else Refusal.NOT_IN_SNAPSHOT


def _to_batch(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Refusal.LOG_IS_GONE if facts.ours else Verdict.BEGIN
    if _is_half_started(facts):
        return Verdict.BEGIN
    if not facts.ours:
        return Refusal.ANOTHERS_LOG
    # Rolling back brings no batch into a log that ends before it.
    return Verdict.ROLL_BACK if facts.last >= facts.batch_id else Refusal.LOG_ELSEWHERE


def _empty(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Verdict.CONTINUE
    return Verdict.ROLL_BACK if facts.ours else Refusal.ANOTHERS_LOG


def _forked(facts: SinkFacts) -> Verdict | Refusal:
    if facts.noted:
        # An interrupted start may have copied some rows of the original.
        is_part = facts.past in (Past.SAME, Past.PART) and facts.last is not None and facts.last <= facts.batch_id
        return Verdict.ROLL_BACK if is_part or facts.past is Past.NONE else Refusal.ANOTHERS_LOG
    if facts.last is None or _is_half_started(facts):
        return Verdict.BEGIN
    if not facts.ours:
        return Verdict.CONTINUE if facts.blank and facts.last == facts.batch_id else Refusal.ANOTHERS_LOG
    return Verdict.CONTINUE if facts.batch_id <= facts.last <= facts.batch_id + 1 else Refusal.ANOTHERS_LOG


def _clean(facts: SinkFacts) -> Verdict | Refusal:
    if facts.last is None:
        return Refusal.LOG_IS_GONE
    if not facts.ours or (facts.noted and facts.past is not Past.SAME):
        return Refusal.ANOTHERS_LOG
    return _where_the_query_stands(facts)


def _where_the_query_stands(facts: SinkFacts) -> Verdict | Refusal:
    # `batch_in_flight.py` decides on the batch in flight; a running query may have planned more.
    ahead = max(facts.batch_id + 1, facts.planned if facts.planned is not None else -1)
    last = facts.last if facts.last is not None else -1
    return Verdict.CONTINUE if facts.batch_id <= last <= ahead else Refusal.LOG_ELSEWHERE


def _is_half_started(facts: SinkFacts) -> bool:
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
class NamedSinks:
    """Sinks of the next query that can be rolled back; `is_seen`: the query itself names them."""

    sinks: tuple[Sink, ...]
    is_seen: bool

    @staticmethod
    def of(output: NamedOutput | None, last_sinks: Sequence[Sink], noted: Sequence[Sink] = ()) -> NamedSinks:
        if output is None:
            known = [sink for sink in (*last_sinks, *noted) if sink.rolls_back]
            return NamedSinks(tuple(distinct(known)), is_seen=False)
        sink = described_sink(output)
        if sink is None and output.place is None:
            same_kind = [each for each in last_sinks if each.rolls_back and _may_be_that_of(each, output)]
            return NamedSinks(tuple(distinct(same_kind)), is_seen=False)
        if sink is None and output.place is not None:
            # A format that is not known may be one that Spark writes with its file sink.
            folder = FileSink.at(output.place)
            sink = next((each for each in (*last_sinks, *noted) if folder.is_same(each)), None)
        return NamedSinks((sink,) if sink is not None and sink.rolls_back else (), is_seen=True)

    def names(self, sink: Sink) -> bool:
        return sink.is_among(self.sinks)


def _may_be_that_of(sink: Sink, output: NamedOutput) -> bool:
    described = described_sink(replace(output, place=sink.place))
    return described is not None and described.is_same(sink) and not isinstance(sink, FileSink)
