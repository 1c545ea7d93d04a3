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
    "Start even if the code needs state of another layout: other keys, types, values, windows, "
    "operators or watermarks. Without it such a start is refused, and the message lists the "
    "differences."
)
DISCARD_STATE = (
    "With start_from=empty: confirm that all state of the stream is discarded. Without it such a "
    "start is refused, and the message lists what would be discarded."
)
NO_SAFETY_SAVEPOINT = (
    "Do not take a savepoint before a rewind. By default one labeled before-rewind-<n> is taken, "
    "from which you can undo the rewind; release_checkpoint_job returns it to the stream's "
    "retention."
)


class StreamRunConfig(dg.Config):
    """The launchpad options of a start of a streaming asset."""

    start_from: str = Field(
        default="latest",
        description="latest: continue where the query stopped (live directory, else the newest snapshot). "
        "latest-checkpoint, latest-savepoint, preferred-savepoint, or the id, number (chk-7), label or "
        "location of a snapshot: rewind to it. batch-<n>: rewind to a batch that Spark still retains. "
        "empty: discard all state and start over; requires discard_state.",
    )
    new_query_id: bool = Field(
        default=False,
        description="With a rewind: continue as a new query, so that sinks which remember query ids (Delta, Iceberg) "
        "write the rewound batches again instead of skipping them.",
    )
    accept_loss: bool = Field(
        default=False,
        description="Start even if the rewind could lose rows in a sink. Without it such a start is refused, and the "
        "message names the sink and the reason.",
    )
    claim_mode: RecoveryClaimMode = Field(
        default=RecoveryClaimMode.NO_CLAIM,
        description="With a start from a savepoint. NO_CLAIM: the stream never deletes it. CLAIM: the stream takes "
        "ownership and deletes it like any of its checkpoints. Flink's LEGACY is not supported.",
    )
    accept_plan_change: bool = Field(default=False, description=ACCEPT_PLAN_CHANGE)
    discard_state: bool = Field(default=False, description=DISCARD_STATE)
    no_safety_savepoint: bool = Field(default=False, description=NO_SAFETY_SAVEPOINT)
    checkpointing: CheckpointOverrides | None = Field(
        default=None,
        description="Checkpointing options that override the asset's for this run, each on its own. Runs that the "
        "supervisor starts later use the asset's options again.",
    )
    preflight: bool = Field(
        default=False,
        description="Do not start the stream; only check, on a copy of the state and without output, whether the "
        "loaded code can continue from it. The stream may be running.",
    )

    @classmethod
    def from_op_config(cls, op_config: Mapping[str, Any] | None) -> StreamRunConfig:
        """Parse an op's config; the op may have further fields, or no config at all."""
        return cls(**{name: value for name, value in (op_config or {}).items() if name in cls.model_fields})
