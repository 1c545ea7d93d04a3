"""The driver's part of the protocol: before its first batch, a start becomes the owner of every marker."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.errors import RowsAtRiskError
from dagster_ckpt.sinks.kafka.marker import Marker, Transactions, refuse_others
from dagster_ckpt.sinks.kafka.session import (
    Session,
    await_topic,
    is_fenced,
    kafka_errors,
    marker_at_a_glance,
    unavailable,
)

# A claim that another one has fenced is repeated: the one with the later live directory wins.
_CLAIMS = 3


def claim(target: Transactions, first: int) -> None:
    """Make this start of the query the owner of every marker, before its first batch. Run on the driver.

    Args:
        target: The sink and the run.
        first: The first batch that the run writes; some of the writers may have written it before.

    Raises:
        LeaseLostError: A later live directory of the stream owns a marker: this process was replaced.
        RowsAtRiskError: The topic has batches that the query does not have, or it is unknown which shares of the
            batch it has.
        OptionError: Another deployment or stream uses the same ids.
        StorageAccessError: Kafka does not answer.
    """
    await_topic(target)
    for attempt in range(1, _CLAIMS + 1):
        sessions: list[Session] = []
        try:
            _claim(target, first, sessions)
        except kafka_errors() as error:
            if attempt == _CLAIMS or not is_fenced(error):
                raise unavailable(target, len(sessions) - 1, error) from error
        else:
            return
        finally:
            for session in sessions:
                session.close()


def _claim(target: Transactions, first: int, sessions: list[Session]) -> None:
    found: list[Marker | None] = []
    writers = target.writers
    while len(sessions) < writers:
        writer = len(sessions)
        # Looked at before, so that a process that was replaced does not disturb its successor.
        refuse_others(target, writer, marker_at_a_glance(target, writer))
        session = Session(target, writer)
        sessions.append(session)
        session.begin_epoch()
        marker = session.marker()
        refuse_others(target, writer, marker)
        found.append(marker)
        # Earlier runs may have had more writers.
        writers = max(writers, marker.writers if marker is not None else 0)
    position = _position(target, found, first)
    # From the last: a claim that dies on the way leaves the markers of the number of writers before it together.
    for session, marker in reversed([*zip(sessions, found, strict=True)]):
        keeps = position is None and marker is not None
        session.commit(marker.batch if keeps and marker is not None else first - 1 if position is None else position)


def _position(target: Transactions, found: Sequence[Marker | None], first: int) -> int | None:
    """The batch that all markers get; None if the shares of the batch in flight differ, so that each marker stays."""
    known = {
        writer: marker for writer, marker in enumerate(found) if marker is not None and marker.query == target.query_id
    }
    ahead = max((marker.batch for marker in known.values()), default=-1)
    if ahead > first:
        raise RowsAtRiskError(
            f"Topic {target.topic} has batches up to {ahead} of query {target.query_id}, and the query is about to "
            f"write batch {first}: the query was rewound, but a topic cannot be. Nothing was written. {_WRITE_AGAIN}"
        )
    if ahead < first:
        return first - 1
    done = [writer for writer, marker in known.items() if marker.batch == first]
    # Where a claim with another number died on the way, the batch is one that all writers of either number have.
    writers = min(known[writer].writers for writer in done)
    if {*range(writers)} <= {*done}:
        return first
    missing = sorted({*range(writers)} - {*done})
    if writers == target.writers and all(writer in known for writer in missing):
        return None
    raise RowsAtRiskError(
        f"Writers {done} of topic {target.topic} have written their share of batch {first}, but it is unknown whether "
        f"writers {missing} can still write theirs. Nothing was written. "
        + (
            f"The stream ran with {writers} writers: start it once with the same number, as {target.writers} would "
            "divide the rows differently."
            if writers != target.writers
            else "Kafka deletes the offsets of a group that is unused for offsets.retention.minutes. Compare the topic "
            f"with the rows of the batch. {_WRITE_AGAIN}"
        )
    )


_WRITE_AGAIN = "To write these rows a second time, start from a snapshot or batch-<n> with new_query_id."
