"""Check whether Spark can resume in a live directory, with the same checks as a cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dagster_ckpt.errors import LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, OFFSETS, STATE, LiveDirectory, Positions
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, parse_query_id


class LiveStatus(StrEnum):
    """Status of a live directory."""

    MISSING = "MISSING"
    EMPTY = "EMPTY"
    GOOD = "GOOD"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class LiveState:
    """Result of an inspection.

    Attributes:
        status: MISSING: the directory does not exist. EMPTY: no batch is committed, and Spark can
            begin there. GOOD: Spark resumes after `batch_id`. BROKEN: Spark could not start there,
            or would compute wrong results.
        reason: One or two sentences for people.
        batch_id: Newest committed batch, if GOOD.
        in_flight: The batch that is planned but not committed and that Spark will replay, or None.
        fenced_at: The batch that a fence prevents from being planned there, so that a successor
            continues elsewhere; or None.
    """

    status: LiveStatus
    reason: str
    batch_id: int | None = None
    in_flight: int | None = None
    fenced_at: int | None = None


def inspect_live_directory(live: LiveDirectory) -> LiveState:
    """Inspect a live directory without changing it.

    Args:
        live: The directory. A query may be running in it.

    Raises:
        StorageAccessError: It cannot be reached, so its status is unknown.
        UnknownLayoutError: A file in it has an unsupported version.
    """
    if not live.exists():
        return LiveState(LiveStatus.MISSING, f"{live.url} does not exist.")
    positions = live.positions()
    try:
        if positions.commit is None:
            return replace(_before_the_first_commit(live, positions), fenced_at=live.fenced_at())
        # A running query may commit concurrently; the cut is then at a newer batch.
        whole = cut(live, carry_in_flight=True)
        _check_in_flight(live, whole.batch_id, whole.in_flight, stateful=bool(whole.properties["state_operators"]))
    except UnknownLayoutError:
        # Not broken: a newer Spark may resume there, and an older snapshot must not replace it.
        raise
    except LiveDirectoryError as error:
        return LiveState(LiveStatus.BROKEN, str(error))
    replay = f", and batch {whole.in_flight} will be replayed" if whole.in_flight is not None else ""
    reason = f"{live.url} is whole after batch {whole.batch_id}{replay}."
    return LiveState(LiveStatus.GOOD, reason, whole.batch_id, whole.in_flight, live.fenced_at())


def _before_the_first_commit(live: LiveDirectory, positions: Positions) -> LiveState:
    if positions.offset is None:
        left = next((path for path, _ in live.folder.find(STATE)), None)
        if left is not None:
            return LiveState(
                LiveStatus.BROKEN,
                f"{live.url} has no batches but holds state ({left}): Spark refuses to start in it.",
            )
        return LiveState(LiveStatus.EMPTY, f"{live.url} holds no batch yet.")
    if positions.offset > 0:
        return LiveState(
            LiveStatus.BROKEN,
            f"{live.url} has planned batch {positions.offset} but no commit: the commit log is lost.",
        )
    try:
        parse_offset_entry(live.folder.read(f"{OFFSETS}/0"), f"{live.url}/{OFFSETS}/0")
        parse_query_id(live.folder.read(METADATA), f"{live.url}/{METADATA}")
    except FileNotFoundError as error:
        return LiveState(LiveStatus.BROKEN, f"{error} is missing, and Spark refuses to start without it.")
    return LiveState(LiveStatus.EMPTY, f"{live.url} has planned batch 0 and not committed it.", in_flight=0)


def _check_in_flight(live: LiveDirectory, batch_id: int, carried: int | None, *, stateful: bool) -> None:
    now = live.positions()
    if now.commit != batch_id or now.offset is None or now.offset <= batch_id or carried is not None:
        return
    if now.offset > batch_id + 1 and stateful:
        raise LiveDirectoryError(
            f"{live.url}/{OFFSETS} is at batch {now.offset}, but the newest commit is {batch_id}: the state "
            "between is "
            "missing. Restore a snapshot."
        )
    if now.offset == batch_id + 1 and stateful and cut(live, carry_in_flight=True).in_flight is None:
        raise LiveDirectoryError(
            f"{live.url}/{OFFSETS}/{now.offset} has another number of state partitions: an offline "
            "repartition was cut "
            "off. Finish it, or restore a snapshot."
        )
