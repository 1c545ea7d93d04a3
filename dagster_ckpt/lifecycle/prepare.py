"""Carrying out a recovery plan: at the end a live directory stands ready for Spark.

Order makes a crash harmless. The new directory is built aside and renamed; one catalog transaction
makes it the job's directory and notes that sinks are still to be rolled back; then the sinks
are rolled back (idempotent); then the note is cleared. Whatever is cut off is finished by the next start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.catalog import JobRecord
from dagster_ckpt.errors import CkptError, RestoreError
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.lifecycle.recovery import RecoveryKind, RecoveryPlan
from dagster_ckpt.spark import LiveDirectory, SinkEntry, clone, materialize, roll_back

BEFORE_THE_FIRST_BATCH = -1


@dataclass(frozen=True)
class PreparedStart:
    """What Spark is started on.

    Attributes:
        live: The live directory.
        generation: Its number among the job's live directories.
        rolled_back: Paths of the sinks that were brought back to the restored batch.
        may_repeat: Descriptions of sinks that cannot be rolled back: they get the rewound batches again.
    """

    live: LiveDirectory
    generation: int
    rolled_back: tuple[str, ...] = ()
    may_repeat: tuple[str, ...] = ()
