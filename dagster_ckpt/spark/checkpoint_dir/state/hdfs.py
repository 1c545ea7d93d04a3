"""State of `HDFSBackedStateStoreProvider`, which keeps it on the executors' heap.

A version consists of the newest `<S>.snapshot` at or below it and every later `.delta`; version 0
is empty.
"""

from __future__ import annotations

from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.state.store import StoreDirectory


def version_files(store: StoreDirectory, version: int) -> list[NeededFile]:
    """Files that make up a version of a store.

    Raises:
        IncompleteCutError: A file is missing.
    """
    base = store.newest(".snapshot", version)
    files = [store.need(f"{base}.snapshot", "it holds the state")] if base else []
    since = f"{base}.snapshot" if base else "the empty state"
    why = f"version {version} is {since} and every delta after it"
    return files + [store.need(f"{delta}.delta", why) for delta in range(base + 1, version + 1)]
