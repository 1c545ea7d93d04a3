"""What Spark pins of a query's state, read from a live directory."""

from __future__ import annotations

from dagster_ckpt.options import PinnedState
from dagster_ckpt.spark.layout import OFFSETS, STATE, LiveDirectory
from dagster_ckpt.spark.logs import parse_offset_entry


def pinned_state(live: LiveDirectory) -> PinnedState:
    """Return what the query in a live directory was begun with; nothing is pinned before its first planned batch.

    Raises:
        LiveDirectoryError: The newest entry of the offset log cannot be read.
        StorageAccessError: The directory cannot be reached.
    """
    positions = live.positions()
    if positions.offset is None:
        return PinnedState(None)
    path = f"{OFFSETS}/{positions.offset}"
    entry = parse_offset_entry(live.folder.read(path), f"{live.url}/{path}")
    # Spark pins a provider for every query, also for one that never opens a store.
    keeps_no_state = positions.commit is not None and not live.folder.list(STATE)
    return PinnedState(None if keeps_no_state else entry.provider_class, entry.conf)
