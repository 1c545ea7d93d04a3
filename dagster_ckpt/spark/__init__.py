"""Everything that knows Spark: the files of a live directory, and the sessions and queries that write them.

No Dagster, no catalog and no image storage may come in here. Start with `layout.py` and `cut.py` for the way
up (live directory to image), `restore.py` and `file_sink.py` for the way down, `query.py` for a running
query.
"""

from dagster_ckpt.spark.cut import Cut, cut
from dagster_ckpt.spark.file_sink import SINKS_FOLDER, CapturedSink, SinkEntry, roll_back
from dagster_ckpt.spark.inspect import LiveState, LiveStatus, inspect_live_directory
from dagster_ckpt.spark.layout import LiveDirectory, Positions
from dagster_ckpt.spark.pinned_state import pinned_state
from dagster_ckpt.spark.progress import QueryProgress
from dagster_ckpt.spark.query import JvmProcess, SupervisedQuery, jvm_process, start_query
from dagster_ckpt.spark.restore import Filler, Materialized, clone, materialize
from dagster_ckpt.spark.rewind import give_query_id, own_past, retained_batches, roll_back_to_own_past
from dagster_ckpt.spark.settings import apply_state_backend
from dagster_ckpt.spark.sinks import can_replay_a_batch, file_sink_path
from dagster_ckpt.spark.staging import StagedCut, staged_cut, until_not_overtaken

__all__ = [
    "SINKS_FOLDER",
    "CapturedSink",
    "Cut",
    "Filler",
    "JvmProcess",
    "LiveDirectory",
    "LiveState",
    "LiveStatus",
    "Materialized",
    "Positions",
    "QueryProgress",
    "SinkEntry",
    "StagedCut",
    "SupervisedQuery",
    "apply_state_backend",
    "can_replay_a_batch",
    "clone",
    "cut",
    "file_sink_path",
    "give_query_id",
    "inspect_live_directory",
    "jvm_process",
    "materialize",
    "own_past",
    "pinned_state",
    "retained_batches",
    "roll_back",
    "roll_back_to_own_past",
    "staged_cut",
    "start_query",
    "until_not_overtaken",
]
