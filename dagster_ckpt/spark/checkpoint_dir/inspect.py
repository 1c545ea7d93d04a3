"""Whether and with which Spark a live directory can be resumed, what it pins, and what it contains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dagster_ckpt.config.state_backend import PinnedState
from dagster_ckpt.errors import LiveDirectoryError, UnknownLayoutError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.cut import Cut, cut
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, STATE, LiveDirectory, Positions, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import (
    JOIN_FORMAT,
    STATE_FORMAT,
    QueryMetadata,
    partitions_in,
    read_commit_entry,
    read_metadata,
    read_offset_entry,
)
from dagster_ckpt.spark.checkpoint_dir.operators import JOIN, NOTHING_KNOWN, ExecutionMode, KnownQuery, read_operators
from dagster_ckpt.spark.checkpoint_dir.rocksdb_zip_version import is_of_spark_4_0
from dagster_ckpt.spark.versions import Feature, SparkRelease, oldest_release, written_by


class LiveStatus(StrEnum):
    MISSING = "MISSING"
    EMPTY = "EMPTY"
    GOOD = "GOOD"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class LiveState:
    """The result of an inspection; a fence keeps batch `fenced_at` from being planned.

    Attributes:
        status: EMPTY: no batch is committed, and Spark can begin there. GOOD: Spark resumes after `batch_id`. BROKEN:
            Spark could not start, or would compute wrong results.
    """

    status: LiveStatus
    reason: str
    batch_id: int | None = None
    in_flight: int | None = None
    fenced_at: int | None = None


def inspect_live_directory(live: LiveDirectory, known: KnownQuery = NOTHING_KNOWN) -> LiveState:
    if not live.exists():
        return LiveState(LiveStatus.MISSING, f"{live.url} does not exist.")
    positions = live.positions()
    try:
        if positions.commit is None:
            return replace(_before_the_first_commit(live, positions), fenced_at=live.fenced_at())
        whole = cut(live, carry_in_flight=True, known=known)
        _check_in_flight(live, whole, known)
    except UnknownLayoutError:
        # A newer Spark may resume, so no older snapshot may replace the directory.
        raise
    except LiveDirectoryError as error:
        return LiveState(LiveStatus.BROKEN, str(error))
    replay = f", and batch {whole.in_flight} will be replayed" if whole.in_flight is not None else ""
    reason = f"{live.url} is intact up to batch {whole.batch_id}{replay}."
    return LiveState(LiveStatus.GOOD, reason, whole.batch_id, whole.in_flight, live.fenced_at())


def retained_batches(live: LiveDirectory) -> list[int]:
    """List the batches to which the logs can be rewound, ascending; only a cut shows whether their state exists."""
    offsets = set(batch_ids(live.folder, OFFSETS))
    # Spark also needs the offsets of the batch before.
    return [
        batch for batch in batch_ids(live.folder, COMMITS) if batch in offsets and (batch == 0 or batch - 1 in offsets)
    ]


def live_metadata(live: LiveDirectory) -> QueryMetadata | None:
    try:
        return read_metadata(live.folder)
    except (FileNotFoundError, LiveDirectoryError):
        return None


def live_query_id(live: LiveDirectory) -> str | None:
    metadata = live_metadata(live)
    return metadata.id if metadata is not None else None


def state_edits(live: LiveDirectory) -> tuple[str, ...]:
    try:
        return read_metadata(live.folder).edits
    except FileNotFoundError:
        return ()


def pinned_state(live: LiveDirectory) -> PinnedState:
    positions = live.positions()
    if positions.offset is None:
        return PinnedState(None)
    entry = read_offset_entry(live.folder, positions.offset)
    # Spark pins a provider even for a stateless query.
    keeps_no_state = positions.commit is not None and not live.folder.list(STATE)
    return PinnedState(None if keeps_no_state else entry.provider_class, entry.conf)


def check_pinned_provider(live: LiveDirectory) -> None:
    newest = live.positions().offset
    named: dict[str, str | None] = {}
    for number in (newest, newest - 1) if newest is not None else ():
        with suppress(FileNotFoundError):
            named[f"{OFFSETS}/{number}"] = read_offset_entry(live.folder, number).provider_class
    if len(set(named.values())) > 1:
        conflicting = ", ".join(f"{path} names {provider}" for path, provider in named.items())
        raise LiveDirectoryError(
            f"{live.url}: {conflicting}. Spark never changes the state store provider of a query, so one of these "
            "entries is damaged. Restore a snapshot."
        )


def pinned_partitions(live: LiveDirectory) -> int | None:
    return partitions_in(pinned_state(live).settings)


def refuse_unknown_state(live: LiveDirectory, release: SparkRelease) -> None:
    with suppress(LiveDirectoryError, FileNotFoundError):
        needed = features_in_use(live)
        for feature in needed:
            release.require(feature, f"Resuming the query of {live.url}")
        is_later = Feature.CHECKPOINT_FORMAT_2 in needed and release.has(Feature.ONE_SNAPSHOT_VERSION)
        if is_later and is_of_spark_4_0(live):
            raise UnsupportedSparkError(
                f"Spark 4.0 wrote the state in {live.url}, in checkpoint format v2, whose snapshots no other Spark "
                f"reads. Convert it first: with Spark 4.0, set {STATE_FORMAT}=1, and start the stream once with "
                "on_backend_change CONVERT."
            )


def features_in_use(live: LiveDirectory) -> list[Feature]:
    batch_id = live.positions().commit
    if batch_id is None:
        return []
    offsets, committed = read_offset_entry(live.folder, batch_id), read_commit_entry(live.folder, batch_id)
    operators = read_operators(live.folder, batch_id)
    join_state = offsets.conf.get(JOIN_FORMAT) if any(operator.name == JOIN for operator in operators) else None
    transforms = any(operator.name.startswith("transformWithState") for operator in operators)
    needed = {
        Feature.OFFSET_LOG_2: offsets.format_version == 2,
        Feature.NAMED_SINKS: committed.format_version == 3,
        Feature.CHECKPOINT_FORMAT_2: committed.state_ids is not None,
        Feature.JOIN_STATE_3: join_state == "3",
        Feature.JOIN_STATE_4: join_state == "4",
        Feature.TRANSFORM_WITH_STATE_IN_PANDAS: transforms,
    }
    return [feature for feature, is_needed in needed.items() if is_needed]


def missing_batch_before(offset: int, offsets: Sequence[int], commits: Sequence[int], known: KnownQuery) -> int | None:
    return offset - 1 if offset - 1 not in offsets and not known.is_asynchronous(offsets, commits) else None


def _before_the_first_commit(live: LiveDirectory, positions: Positions) -> LiveState:
    if positions.offset is None:
        left = next((path for path, _ in live.folder.find(STATE)), None)
        if left is not None:
            return LiveState(
                LiveStatus.BROKEN,
                f"{live.url} has no batches but contains state ({left}): Spark refuses to start in it.",
            )
        return LiveState(LiveStatus.EMPTY, f"{live.url} has no batch yet.")
    if positions.offset > 0:
        return LiveState(
            LiveStatus.BROKEN,
            f"{live.url} has planned batch {positions.offset} but no commit: the commit log is lost.",
        )
    try:
        read_offset_entry(live.folder, 0)
        read_metadata(live.folder)
    except FileNotFoundError as error:
        return LiveState(LiveStatus.BROKEN, f"{error} is missing, and Spark refuses to start without it.")
    return LiveState(LiveStatus.EMPTY, f"{live.url} has planned batch 0 and not committed it.", in_flight=0)


def _check_in_flight(live: LiveDirectory, whole: Cut, known: KnownQuery) -> None:
    batch_id, stateful = whole.batch_id, bool(whole.properties["state_operators"])
    now = live.positions()
    if now.commit != batch_id or now.offset is None or now.offset <= batch_id or whole.in_flight is not None:
        return
    before = missing_batch_before(now.offset, batch_ids(live.folder, OFFSETS), batch_ids(live.folder, COMMITS), known)
    if before is not None and whole.properties["mode"] != ExecutionMode.CONTINUOUS:
        raise LiveDirectoryError(
            f"{live.url}/{OFFSETS}/{before} is missing, although batch {now.offset} is planned and batch {batch_id} is "
            "the newest commit: Spark needs it to resume. Restore a snapshot."
        )
    if now.offset > batch_id + 1 and stateful:
        raise LiveDirectoryError(
            f"{live.url}/{OFFSETS} is at batch {now.offset}, but the newest commit is {batch_id}: the state between "
            "is missing. Restore a snapshot."
        )
    if now.offset == batch_id + 1 and stateful and cut(live, carry_in_flight=True).in_flight is None:
        raise LiveDirectoryError(
            f"{live.url}/{OFFSETS}/{now.offset} has another number of state partitions: an offline repartition was "
            "interrupted. Finish it, or restore a snapshot."
        )


@dataclass(frozen=True)
class CheckpointDescription:
    url: str
    batch_id: int
    in_flight: int | None
    query_id: str
    written_by: str
    oldest_spark: str
    operators: tuple[str, ...]
    state_store: str | None
    sources: tuple[str, ...]
    named_sinks: tuple[str, ...]
    watermark_ms: int

    def messages(self) -> list[str]:
        flight = f"; batch {self.in_flight} is planned and not committed" if self.in_flight is not None else ""
        state = ", ".join(self.operators) or "none"
        kept = f", in {self.state_store}" if self.state_store is not None else ""
        return [
            f"query {self.query_id}, after batch {self.batch_id}{flight}",
            f"written by {self.written_by}; {self.oldest_spark} is the oldest that can continue it",
            f"stateful operators: {state}{kept}",
            *(f"source {source}" for source in self.sources),
            *(f"sink named {name}" for name in self.named_sinks),
        ]


def describe_checkpoint(live: LiveDirectory) -> CheckpointDescription:
    found = cut(live, carry_in_flight=True)
    properties = found.properties
    features = features_in_use(live)
    provider = properties["state_store_provider"]
    return CheckpointDescription(
        url=live.url,
        batch_id=found.batch_id,
        in_flight=found.in_flight,
        query_id=found.query_id,
        written_by=written_by(properties["conf"], features),
        oldest_spark=str(oldest_release(features)),
        operators=tuple(_operator(each) for each in properties["state_operators"]),
        state_store=str(provider).rsplit(".", 1)[-1] if provider else None,
        sources=tuple(f"{name}: {_short(offset)}" for name, offset in properties["source_offsets"].items()),
        named_sinks=tuple(properties["named_sinks"]),
        watermark_ms=int(properties["watermark_ms"]),
    )


def _operator(operator: dict[str, Any]) -> str:
    return f"{operator['name']} ({operator['partitions']} partitions)"


def _short(offset: object) -> str:
    text = str(offset)
    return text if len(text) <= 160 else f"{text[:160]}…"
