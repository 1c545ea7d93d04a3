"""Refuses starts that would discard existing state. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.state_origin import OriginKind
from dagster_ckpt.errors import LiveDirectoryError, StateAtRiskError
from dagster_ckpt.recovery.plan import RecoveryFacts
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import StartPoint

# Maximum number of items listed in a message.
_SHOWN = 12


def refuse_to_forget(facts: RecoveryFacts) -> None:
    """Refuse to start a stream that the catalog knows no start of if state of it exists.

    Raises:
        LiveDirectoryError: State exists.
    """
    is_named = facts.start_from.point is StartPoint.NAMED
    found = [*facts.unknown.directories, *(() if is_named else facts.unknown.snapshots)]
    if not found or facts.snapshots:
        return
    raise LiveDirectoryError(
        f"The catalog has no start of stream {facts.stream.stream_id!r}, but there is state of it: the catalog was "
        "lost, its "
        "URL is wrong, or another environment uses the same folders. Nothing was changed. There are:\n"
        f"{_all_that_is_there(facts)}\n"
        "Name the right catalog, bring it back from a backup, or register what is there by rebuild_catalog_job "
        "(Client.rebuild). A second environment needs folders of its own. A start from one of the snapshots by its "
        "location needs the live directories moved away. start_from=empty with discard_state gives up what is there."
    )


def refuse_unconfirmed(facts: RecoveryFacts) -> None:
    """Refuse an empty start that would discard state, unless the user confirmed it.

    Raises:
        StateAtRiskError: It would.
    """
    if facts.start_from.discard_state:
        return
    given_up = []
    batch = facts.live_batch
    is_broken = facts.live is not None and facts.live.status is LiveStatus.BROKEN
    if batch is not None or is_broken:
        known = "" if batch is None else f", after batch {batch}"
        given_up.append(f"the live directory {facts.stream.live_directory}{known}")
    given_up += [describe_snapshot(snapshot) for snapshot in facts.snapshots]
    origin = facts.stream.origin
    if not given_up and origin is not None and origin.kind is not OriginKind.EMPTY:
        given_up.append(f"the state that {facts.stream.live_directory} was made from: {origin.location or origin.kind}")
    is_unknown = bool(facts.unknown.directories or facts.unknown.snapshots)
    if not given_up and not is_unknown:
        return
    raise StateAtRiskError(
        f"Stream {facts.stream.stream_id!r} is not started empty, nothing was changed: that gives up all its state, "
        "and file "
        f"sinks are rolled back to before their first batch. Its next recoveries would not go back to:\n"
        f"{_listed(given_up) if given_up else _all_that_is_there(facts)}\n"
        "To do so, confirm with discard_state=true. To go on instead, start from latest or from one of these."
    )


def _all_that_is_there(facts: RecoveryFacts) -> str:
    found = [facts.unknown.directories, facts.unknown.snapshots, facts.unknown.sinks]
    return "\n".join(_listed(each) for each in found if each)


def _listed(things: Sequence[str]) -> str:
    more = [f"- and {len(things) - _SHOWN} more"] if len(things) > _SHOWN else []
    return "\n".join([*(f"- {each}" for each in things[:_SHOWN]), *more])
