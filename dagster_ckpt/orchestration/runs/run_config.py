"""The run config of a stream's start, and the tags of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.config.modes import RecoveryClaimMode
from dagster_ckpt.orchestration.resources.settings import CheckpointOverrides

STREAM_ID_TAG = "dagster_ckpt/stream_id"
# The failed execution that this run restarts.
RESTART_OF_TAG = "dagster_ckpt/restart_of"
# The execution whose externalized retention this run applies.
RETENTION_OF_TAG = "dagster_ckpt/retention_of"
# The catalog request that this run answers.
START_REQUEST_TAG = "dagster_ckpt/start_request"
# The step towards a desired state that this run performs.
STEP_TAG = "dagster_ckpt/step"
# Set on the last run of a stream that will not be restarted: the reason.
TERMINAL_FAILURE_TAG = "dagster_ckpt/terminal_failure"
# Dagster's own tags, on a run launched as a retry of a failed one, and on one re-executed by a
# user.
RETRY_NUMBER_TAG = "dagster/retry_number"
PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"


ACCEPT_PLAN_CHANGE = (
    "Start also where the code keeps other state than what is there: other keys, types, values, windows, operators or "
    "watermarks. Without it such a start is refused, and the message says what is different."
)
DISCARD_STATE = (
    "With start_from=empty: confirm that all state of the stream is given up. Without it such a start is refused, and "
    "the message lists what would be given up."
)
NO_SAFETY_SAVEPOINT = (
    "Take no savepoint of where the stream stands before it is rewound. Without it that is taken, labelled "
    "before-rewind-<n>, to start from to come back; release_checkpoint_job gives it to the stream to delete."
)


class StreamRunConfig(dg.Config):
    """The launchpad options of a start of a streaming asset."""

    start_from: str = Field(
        default="latest",
        description="latest: go on where the query stopped (live directory, else the newest snapshot). "
        "latest-checkpoint, latest-savepoint, preferred-savepoint, or the id, number (chk-7), label or location of "
        "a snapshot: rewind to it. batch-<n>: rewind to a batch that Spark still retains. empty: give up all state and "
        "begin again; needs discard_state.",
    )
    new_query_id: bool = Field(
        default=False,
        description="With a rewind: go on as a new query, so that sinks which remember query ids (Delta, Iceberg) "
        "write the rewound batches once more instead of passing over them.",
    )
    accept_loss: bool = Field(
        default=False,
        description="Start also where a sink could lose rows by the rewind. Without it such a start is refused, and "
        "the message says which sink and why.",
    )
    claim_mode: RecoveryClaimMode = Field(
        default=RecoveryClaimMode.NO_CLAIM,
        description="With a start from a snapshot: NO_CLAIM leaves a savepoint to its owner, the stream never deletes "
        "it. CLAIM makes it the stream's own, deleted like a checkpoint. Flink's LEGACY is not offered.",
    )
    accept_plan_change: bool = Field(default=False, description=ACCEPT_PLAN_CHANGE)
    discard_state: bool = Field(default=False, description=DISCARD_STATE)
    no_safety_savepoint: bool = Field(default=False, description=NO_SAFETY_SAVEPOINT)
    checkpointing: CheckpointOverrides | None = Field(
        default=None,
        description="Checkpointing options for this run in place of the asset's, each by itself. A run that the "
        "supervisor starts later has the asset's again.",
    )
    preflight: bool = Field(
        default=False,
        description="Start nothing: only try whether the code that is loaded can go on from the state, on a copy of it "
        "and without output. The stream may run meanwhile.",
    )

    @classmethod
    def from_op_config(cls, op_config: Mapping[str, Any] | None) -> StreamRunConfig:
        """Parse an op's config; the op may have further fields, or no config at all."""
        return cls(**{name: value for name, value in (op_config or {}).items() if name in cls.model_fields})
