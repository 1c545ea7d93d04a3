"""Everything that knows Spark: the files of a live directory, and the sessions and queries that write them.

No Dagster, no catalog and no image storage may come in here. Start with `layout.py` and `cut.py` for the way
up (live directory to image), `restore.py` and `file_sink.py` for the way down, `query.py` for a running
query.
"""

from dagster_ckpt.spark.activity import STARTING, QueryActivity, TaskCounts
from dagster_ckpt.spark.application import (
    SparkApplication,
    active_session,
    application_of,
    application_settings,
    is_classic_session,
    start_application,
)
from dagster_ckpt.spark.cut import Cut, cut
from dagster_ckpt.spark.described_query import (
    QueryToStart,
    brings_a_trigger,
    execution_plan,
    is_described_query,
    same_session,
    session_of,
)
from dagster_ckpt.spark.donors import Donor, DonorCheck
from dagster_ckpt.spark.executor_copy import ExecutorCopy, executors_above
from dagster_ckpt.spark.fence import Fence, fence
from dagster_ckpt.spark.file_sink import SINKS_FOLDER, CapturedSink, SinkEntry, StillMine, roll_back
from dagster_ckpt.spark.guarantees import ExecutionMode, Guarantee, Guarantees, guarantees
from dagster_ckpt.spark.in_flight import carries_state, forecast_in_flight, keeps_state, settle_in_flight
from dagster_ckpt.spark.inspect import LiveState, LiveStatus, inspect_live_directory
from dagster_ckpt.spark.layout import LiveDirectory, Positions
from dagster_ckpt.spark.output import (
    NamedOutput,
    begin_log,
    empty_log,
    folders_overlap,
    logged_batch,
    named_output,
    same_folder,
)
from dagster_ckpt.spark.output_fork import copied_files, fork_output, strange_file
from dagster_ckpt.spark.part_files import (
    PartFile,
    SinkLog,
    delete_part_files,
    names_in,
    part_files,
    read_sink_log,
    storage_time_ms,
)
from dagster_ckpt.spark.pinned_state import check_pinned_provider, pinned_partitions, pinned_state
from dagster_ckpt.spark.plan import plan_of_query, plan_of_writer
from dagster_ckpt.spark.plan_description import Pair, PlanDescription, PlanOperator, read_plan
from dagster_ckpt.spark.progress import QueryProgress
from dagster_ckpt.spark.query import JvmProcess, QueryFacts, SupervisedQuery, jvm_process, start_query, trace_of
from dagster_ckpt.spark.restore import Filler, Materialized, Watch, clone, materialize, sink_entry, unwatched
from dagster_ckpt.spark.rewind import (
    give_query_id,
    live_query_id,
    own_past,
    retained_batches,
    roll_back_to_own_past,
)
from dagster_ckpt.spark.settings import apply_state_backend, settings_for_a_while
from dagster_ckpt.spark.sink_effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.sink_forecast import forecast
from dagster_ckpt.spark.sink_past import Past, files_of, past_of, read_log_at_hand
from dagster_ckpt.spark.sinks import can_replay_a_batch, file_sink_path, sink_place
from dagster_ckpt.spark.source_distance import Distance, SourceDistance, distance
from dagster_ckpt.spark.staging import StagedCut, staged_cut, until_not_overtaken
from dagster_ckpt.spark.timestamps import with_time
from dagster_ckpt.spark.trial_batch import Trial, copy_for_trial, in_plain_words, run_trial

__all__ = [
    "SINKS_FOLDER",
    "STARTING",
    "CapturedSink",
    "Cut",
    "Distance",
    "Donor",
    "DonorCheck",
    "ExecutionMode",
    "ExecutorCopy",
    "Fence",
    "Filler",
    "Guarantee",
    "Guarantees",
    "JvmProcess",
    "LiveDirectory",
    "LiveState",
    "LiveStatus",
    "Materialized",
    "NamedOutput",
    "Pair",
    "PartFile",
    "Past",
    "PlanDescription",
    "PlanOperator",
    "Positions",
    "QueryActivity",
    "QueryFacts",
    "QueryProgress",
    "QueryToStart",
    "Replay",
    "SinkEffect",
    "SinkEntry",
    "SinkForecast",
    "SinkLog",
    "SourceDistance",
    "SparkApplication",
    "StagedCut",
    "StillMine",
    "SupervisedQuery",
    "TaskCounts",
    "Trial",
    "Watch",
    "active_session",
    "application_of",
    "application_settings",
    "apply_state_backend",
    "begin_log",
    "brings_a_trigger",
    "can_replay_a_batch",
    "carries_state",
    "check_pinned_provider",
    "clone",
    "copied_files",
    "copy_for_trial",
    "cut",
    "delete_part_files",
    "distance",
    "empty_log",
    "execution_plan",
    "executors_above",
    "fence",
    "file_sink_path",
    "files_of",
    "folders_overlap",
    "forecast",
    "forecast_in_flight",
    "fork_output",
    "give_query_id",
    "guarantees",
    "in_plain_words",
    "inspect_live_directory",
    "is_classic_session",
    "is_described_query",
    "jvm_process",
    "keeps_state",
    "live_query_id",
    "logged_batch",
    "materialize",
    "named_output",
    "names_in",
    "own_past",
    "part_files",
    "past_of",
    "pinned_partitions",
    "pinned_state",
    "plan_of_query",
    "plan_of_writer",
    "read_log_at_hand",
    "read_plan",
    "read_sink_log",
    "retained_batches",
    "roll_back",
    "roll_back_to_own_past",
    "run_trial",
    "same_folder",
    "same_session",
    "session_of",
    "settings_for_a_while",
    "settle_in_flight",
    "sink_entry",
    "sink_place",
    "staged_cut",
    "start_application",
    "start_query",
    "storage_time_ms",
    "strange_file",
    "trace_of",
    "until_not_overtaken",
    "unwatched",
    "with_time",
]
