"""The protocol of a sink: what the package asks every sink about the batches that it has written.

A query that goes back plans its batches again, so a number can stand for other rows. Some sinks identify a batch by its
number alone (the file sink), some also by the query's id (Delta, Iceberg), some not at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from dagster_ckpt.errors import CkptError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink, SinkEntry, StillMine
from dagster_ckpt.spark.query.description import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_ckpt.spark.doctor.finding import Finding, Subject


class OnRepeat(StrEnum):
    """What a sink does with a batch of its query that it already has.

    SKIPS: Does not run it: its rows are there once, and its state is not written.
    RUNS: Runs it again; its rows are there once.
    REPEATS: Writes its rows twice.
    """

    SKIPS = "SKIPS"
    RUNS = "RUNS"
    REPEATS = "REPEATS"
    UNKNOWN = "UNKNOWN"


class SinkEffect(StrEnum):
    """Effect of a start on the rows of a sink.

    EXACT: Each row is there exactly once, as a test with the real sink shows.
    SKIP: As EXACT, because the sink skips batches that it has.
    DUPLICATE: Rows of the rewound batches are written twice.
    LOSE: Rows may be lost.
    UNKNOWN: The effect cannot be determined from here.
    UNREACHABLE: The sink did not answer: the start fails and can be retried.
    IRREVERSIBLE: The sink would have to be rolled back but cannot be: the start is refused.
    UNTOUCHED: The query about to start does not write there.
    STARTS: The query has not written there before.
    SHARED: Another stream wrote there last, and the query starts from the beginning: rows may be there twice.
    REFUSED: The sink belongs to another query, or is not at the query's batch.
    """

    EXACT = "EXACT"
    SKIP = "SKIP"
    DUPLICATE = "DUPLICATE"
    LOSE = "LOSE"
    UNKNOWN = "UNKNOWN"
    UNREACHABLE = "UNREACHABLE"
    IRREVERSIBLE = "IRREVERSIBLE"
    UNTOUCHED = "UNTOUCHED"
    STARTS = "STARTS"
    SHARED = "SHARED"
    REFUSED = "REFUSED"


@dataclass(frozen=True)
class SinkForecast:
    """What a start does to a sink, why, and how to make it exact."""

    sink: str
    effect: SinkEffect
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Replay:
    """A replay of batches that is about to reach the sinks.

    Attributes:
        to_batch: The batch to which the query goes back; -1 is before the first.
        in_flight: The batch after `to_batch` if exactly its rows are replayed.
        log_entries: Log of each file sink in a snapshot, by folder; None: the sink's own log counts.
        query_ids: All ids that the stream's query has had.
        roll_back_tables: Whether the start may roll a table back; otherwise a person does.
    """

    to_batch: int
    query_id: str | None
    keeps_query_id: bool = True
    in_flight: int | None = None
    log_entries: Mapping[str, Sequence[SinkEntry]] | None = None
    query_ids: Collection[str] = ()
    roll_back_tables: bool = True

    @property
    def back(self) -> RollBack:
        """The roll-back that it amounts to for a sink without a log in a snapshot."""
        return RollBack(
            self.to_batch,
            query_id=self.query_id,
            query_ids=self.query_ids,
            may_repeat=not self.keeps_query_id and self.to_batch >= 0,
            roll_back_tables=self.roll_back_tables,
        )


@dataclass(frozen=True)
class RollBack:
    """The point to which a sink is rolled back.

    Attributes:
        batch_id: The last batch that the sink keeps; -1 keeps none.
        entries: The sink's log in a snapshot; None: the sink's own memory counts.
        may_repeat: Whether a new query id was requested: a table with later writes of others stays as it is, and gets
            the batches again.
        accepts_loss: Whether a table stays as it is if it is unknown what to undo.
        in_flight: Whether only the batch in flight is undone: a table may lack earlier ones, as before.
    """

    batch_id: int
    entries: Sequence[SinkEntry] | None = None
    query_id: str | None = None
    query_ids: Collection[str] = ()
    may_repeat: bool = False
    accepts_loss: bool = False
    in_flight: bool = False
    roll_back_tables: bool = True

    @property
    def own_ids(self) -> frozenset[str]:
        return frozenset((*self.query_ids, *(() if self.query_id is None else (self.query_id,))))


@dataclass(frozen=True)
class FoundSink:
    """The table or topic now at the place of a sink.

    Attributes:
        identity: Its id, which changes if it is re-created; None if nothing is there.
        batch: The newest batch of the stream that readers see, if known.
        is_certain: Whether `batch` comes from its whole history, and the stream writes there with each batch.
        cluster: Of a topic, the id of its Kafka cluster, if known.
    """

    identity: str | None
    batch: int | None = None
    is_certain: bool = False
    cluster: str | None = None


@dataclass(frozen=True)
class ReadOfSink:
    """How far a streaming source has read a sink.

    Attributes:
        batch: The newest batch of the stream that was read; None if none was.
        undone: Number of batches that were read and that a roll-back has undone since.
        why: Why that is unknown, as a clause that ends with "is".
    """

    batch: int | None = None
    undone: int = 0
    why: str = ""


@dataclass(frozen=True)
class AskedBatch:
    """A batch whose rows are looked for in a sink.

    Attributes:
        like: The rows that a replay of the batch produced.
        output_format: Format of the query's writer, such as `parquet`; `options` are of that writer.
        scratch: Folder that the sink may write to; deleted afterwards.
    """

    session: SparkSession
    batch_id: int
    query_id: str | None
    like: DataFrame
    output_format: str
    options: Mapping[str, str]
    scratch: str

    def columns_of(self, rows: DataFrame) -> DataFrame:
        return rows.select(*(quoted(name) for name in self.like.columns if name in rows.columns))


@dataclass(frozen=True)
class BatchRows:
    """The rows that a sink has of a batch.

    Attributes:
        rows: Rows with the columns of the replay; None if the sink cannot tell, for the reason in `says`.
        says: Where the rows are, such as a version of a table.
        replayed: The rows of the replay as the sink would store them, if it changes them, such as by rounding.
    """

    rows: DataFrame | None
    says: str
    replayed: DataFrame | None = None


class Sink:
    """The protocol of all kinds of sinks; by default, a sink of which nothing is known.

    A kind overrides what it knows. A table that can go back is a `TableSink`.

    Attributes:
        names: The names that Spark gives such a sink; the group `place` is its folder, topic or table.
        is_proven: Whether a test with the real sink shows `on_repeat`.
        knows_queries: Whether it keeps the batches of different queries apart, so that several streams may write there.
        has_parts: Whether a batch is several writes: it may know a batch without having all rows.
        remembers_undone: Whether it still skips an undone batch of the same query id: the query needs a new one after a
            roll-back.
        effect: Effect of a replay, for a sink that does not roll back; `reason` and `advice` explain it.
    """

    noun: ClassVar[str] = "sink"
    names: ClassVar[re.Pattern[str] | None] = None
    on_repeat: ClassVar[OnRepeat] = OnRepeat.UNKNOWN
    is_proven: ClassVar[bool] = True
    rolls_back: ClassVar[bool] = False
    knows_queries: ClassVar[bool] = False
    has_parts: ClassVar[bool] = False
    remembers_undone: ClassVar[bool] = False
    effect: ClassVar[SinkEffect] = SinkEffect.UNKNOWN
    reason: ClassVar[str] = (
        "This sink is unknown: rewound batches may be written twice or skipped. Describe it with register_sink."
    )
    advice: ClassVar[str] = ""

    def __init__(self, name: str, place: str | None = None) -> None:
        self.name = name
        self.place = place

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Return the sink of this kind with a name, by default by `names`; None for another kind.

        Args:
            name: `sink.description` of the query's progress, such as `FileSink[file:/data/out]`. A `foreachBatch` query
                whose writer has the option `path` or `table` is named `ForeachBatchSink[<that option>]`.
        """
        match = cls.names.fullmatch(name) if cls.names is not None else None
        return cls(name, match.groupdict().get("place")) if match is not None else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """Return the name that Spark will report for a described query; None for another kind of sink."""
        return None

    @property
    def shows_rows_once(self) -> bool:
        return self.is_proven and self.on_repeat in (OnRepeat.SKIPS, OnRepeat.RUNS)

    def is_same(self, other: Sink) -> bool:
        """Whether both are one sink, in any spelling of its place."""
        if self.name == other.name:
            return True
        if type(self) is not type(other) or self.place is None or other.place is None:
            return False
        return same_folder(self.place, other.place)

    def is_among(self, others: Collection[Sink]) -> bool:
        return any(self.is_same(other) for other in others)

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        """Look up what is now at its place; None if it has no identity, or if this process cannot know.

        Without `query_ids`, no batch is looked for. Raises StorageAccessError if the place cannot be reached.
        """
        return None

    def read_up_to(
        self, offset: str, own: Sequence[str], options: Mapping[str, str], *, rewound: bool, note: bytes | None = None
    ) -> ReadOfSink | None:
        """Return how far a streaming source has read the sink; None if the source's offsets do not show that.

        Must not use a Spark session, since a thread that takes a snapshot asks.

        Args:
            offset: The source's offset, as Spark logs it.
            own: All ids that the query of the writing stream has had, the present one last.
            options: Options of the source, in lower case.
            rewound: Whether the writing stream ever went back.
            note: What a start noted next to the source's log: parts of the sink that it skipped.

        Raises:
            StorageAccessError: The sink cannot be reached.
        """
        return None

    def batch_after(self, replay: Replay) -> int | None:
        """Return the newest batch that readers see after a roll-back; None if unchanged or unknown."""
        return None

    def last_batch(self, query_id: str | None) -> int | None:
        """Return the newest batch that it has of a query; None if none, or if it remembers no batches."""
        return None

    def may_have_forgotten(self, query_id: str, since_ms: int) -> bool:
        """Whether it may have written a batch that a query planned at a time, and would write it again."""
        return False

    def forecast_as(self, effect: SinkEffect, reason: str, advice: str = "") -> SinkForecast:
        return SinkForecast(self.name, effect, reason, advice)

    def capture(self, folder: str, batch_id: int) -> CapturedSink | None:
        """Return what a snapshot needs to roll the sink back; None for nothing."""
        return None

    def forecast(self, replay: Replay) -> SinkForecast:
        """Forecast, without changing anything, what it does with the batches after `replay.to_batch`."""
        if not self.rolls_back:
            return self.forecast_as(self.effect, self.reason, self.advice)
        try:
            last = newest_batch(self, replay.query_id)
        except CkptError as error:
            return self.forecast_as(SinkEffect.UNREACHABLE, f"It must be rolled back but cannot be reached: {error}")
        if last is None or last <= replay.to_batch:
            return self.forecast_as(SinkEffect.EXACT, f"It has no batch after {replay.to_batch}.")
        return self.forecast_as(
            SinkEffect.EXACT,
            f"It is rolled back to batch {replay.to_batch}: batches {replay.to_batch + 1} to {last} are undone.",
        )

    def check_roll_back(self, to: RollBack) -> None:
        """Raise SinkRollbackError, before anything is changed, if the roll-back is known to be impossible."""

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        """Undo all batches after `to.batch_id`. The next start repeats an interrupted roll-back.

        Args:
            still_mine: Enter it around each change (`with still_mine():`). It raises if the stream has another writer.

        Raises:
            SinkRollbackError: The sink cannot be reached or changed.
        """
        raise NotImplementedError(f"{type(self).__name__} sets rolls_back but does not define roll_back.")

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        """Return the rows that it has of a batch, without changing anything."""
        return BatchRows(None, f"the {self.noun} does not record which rows a batch wrote")

    def examine(self, subject: Subject) -> Iterator[Finding]:
        """Compare it with a live directory, for the doctor."""
        yield from ()


def newest_batch(sink: Sink, query_id: str | None) -> int | None:
    """Call `sink.last_batch`; errors of a user's sink become StorageAccessError."""
    try:
        return sink.last_batch(query_id)
    except CkptError:
        raise
    except Exception as error:
        raise StorageAccessError(
            f"The newest batch of the sink {sink.name} cannot be read: {type(error).__name__}: {error}. Make it "
            "reachable, then start again."
        ) from error


def roll_back(sink: Sink, to: RollBack, still_mine: StillMine) -> None:
    """Call `sink.roll_back`; errors of a user's sink become SinkRollbackError."""
    try:
        sink.roll_back(to, still_mine)
    except CkptError:
        raise
    except Exception as error:
        raise SinkRollbackError(
            f"The sink {sink.name} could not be rolled back to batch {to.batch_id}: {type(error).__name__}: {error}. "
            "Make it reachable and start again: the rollback is repeated. Do not start the query before that."
        ) from error


def distinct(sinks: Sequence[Sink]) -> list[Sink]:
    found: list[Sink] = []
    for sink in sinks:
        if not sink.is_among(found):
            found.append(sink)
    return found
