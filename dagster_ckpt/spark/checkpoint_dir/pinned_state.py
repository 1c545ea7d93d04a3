"""Read the state backend and settings that Spark pinned for a query from its live directory."""

from __future__ import annotations

from contextlib import suppress

from dagster_ckpt.config.state_backend import PinnedState
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import INTERNAL_PARTITIONS, SHUFFLE_PARTITIONS, parse_offset_entry


def pinned_state(live: LiveDirectory) -> PinnedState:
    """Return the backend and settings of the query in a live directory; empty before its first planned batch.

    Raises:
        LiveDirectoryError: The newest entry of the offset log cannot be read.
        StorageAccessError: The directory cannot be reached.
    """
    positions = live.positions()
    if positions.offset is None:
        return PinnedState(None)
    path = f"{OFFSETS}/{positions.offset}"
    entry = parse_offset_entry(live.folder.read(path), f"{live.url}/{path}")
    # Spark pins a provider for every query, even if it never opens a store.
    keeps_no_state = positions.commit is not None and not live.folder.list(STATE)
    return PinnedState(None if keeps_no_state else entry.provider_class, entry.conf)


def check_pinned_provider(live: LiveDirectory) -> None:
    """Check that the newest two entries of the offset log name the same provider, which Spark never changes.

    Raises:
        LiveDirectoryError: They differ, so one of them is damaged.
        StorageAccessError: The directory cannot be reached.
    """
    newest = live.positions().offset
    named: dict[str, str | None] = {}
    for number in (newest, newest - 1 if newest is not None else None):
        path = f"{OFFSETS}/{number}"
        with suppress(FileNotFoundError):
            named[path] = parse_offset_entry(live.folder.read(path), f"{live.url}/{path}").provider_class
    if len(set(named.values())) > 1:
        told = ", ".join(f"{path} names {provider}" for path, provider in named.items())
        raise LiveDirectoryError(
            f"{live.url}: {told}. Spark never changes the state store provider of a query, so one of these entries is "
            "damaged. Restore a snapshot."
        )


def pinned_partitions(live: LiveDirectory) -> int | None:
    """Return the number of state partitions of the query in a live directory; None if it keeps no state.

    Raises:
        LiveDirectoryError: The newest entry of the offset log cannot be read.
        StorageAccessError: The directory cannot be reached.
    """
    settings = pinned_state(live).settings
    number = settings.get(INTERNAL_PARTITIONS) or settings.get(SHUFFLE_PARTITIONS)
    return int(number) if number else None
