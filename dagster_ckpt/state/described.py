"""Metadata of operators for a directory of Spark 3.5, which writes none and which Spark's reader of state needs.

It is written into a copy, from which the state is read, and left out of the result: Spark 3.5 has no use for it, and
a later Spark that continues the query writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.operators import UNNAMED, Operator, key_columns
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone, unwatched
from dagster_ckpt.state.stopped_state import StoppedState

# The last column of the key of session windows (`StreamingSessionWindowStateManager`), whose rows of one key RocksDB
# finds by the columns before it, and which has no part in the choice of the partition.
_SESSION_START = "sessionStartTime"
_SESSION = "sessionWindowStateStoreSaveExec"
# Spark treats aggregations, duplicates and state of functions alike here: the whole key decides.
_ANY_OTHER = "stateStoreSave"


@contextmanager
def described(state: StoppedState, watch: Watch) -> Iterator[LiveDirectory]:
    """A copy with the metadata that Spark 4 would have written; deleted at the end."""
    copy = state.live.sibling(".described")
    copy.delete()
    try:
        clone(state.live, copy, is_scratch=True, watch=watch)
        partitions = state.stored.shape.partitions if state.stored is not None else 1
        for operator in state.operators:
            copy.folder.place(_path(operator.number), [_metadata(operator, partitions)])
        yield copy
    finally:
        copy.delete()


@contextmanager
def readable(live: LiveDirectory, batch_id: int) -> Iterator[LiveDirectory]:
    """A copy of a directory at a batch in which Spark's reader finds the operators; deleted at the end."""
    copy = live.sibling(f".at-{batch_id}")
    copy.delete()
    try:
        clone(live, copy, at_batch=batch_id, is_scratch=True)
        state = StoppedState.read(copy)
        if any(not operator.metadata_version for operator in state.operators):
            with described(state, unwatched) as with_metadata:
                yield with_metadata
        else:
            yield copy
    finally:
        copy.delete()


def without_description(target: LiveDirectory) -> None:
    """Delete the metadata from a directory that was made of the copy."""
    for number in batch_ids(target.folder, STATE):
        target.sibling(f"/{STATE}/{number}/_metadata").folder.delete_all()


def _path(operator: int) -> str:
    return f"{STATE}/{operator}/_metadata/metadata"


def _metadata(operator: Operator, partitions: int) -> bytes:
    columns = [column["name"] for column in key_columns(operator.files[0])]
    is_session = len(columns) > 1 and columns[-1] == _SESSION_START
    name = _SESSION if is_session else _ANY_OTHER if operator.name == UNNAMED else operator.name
    stores = [
        {"storeName": store, "numColsPrefixKey": len(columns) - 1 if is_session else 0, "numPartitions": partitions}
        for store in operator.stores
    ]
    info = {"operatorId": operator.number, "operatorName": name}
    return b"v1\n" + json.dumps({"operatorInfo": info, "stateStoreInfo": stores}, separators=(",", ":")).encode()
