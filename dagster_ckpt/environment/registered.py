"""A writer that was added to an environment, and how its query is started."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import StatePartitionsError
from dagster_ckpt.lifecycle.execution import StartQuery
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.options import ExecutionConfig
from dagster_ckpt.options.execution_config import PARALLELISM_DEFAULT
from dagster_ckpt.spark import LiveDirectory, SupervisedQuery, pinned_partitions, start_query

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_LOG = logging.getLogger("dagster_ckpt.environment")


@dataclass(frozen=True)
class RegisteredWriter:
    """A query of a program.

    Attributes:
        name: Its stable name.
        writer: Its description.
        has_own_trigger: Whether it was described with a trigger.
    """

    name: str
    writer: DataStreamWriter
    has_own_trigger: bool


def start_registered(job: StreamingJob, registered: RegisteredWriter, config: ExecutionConfig) -> StartQuery:
    """How the query of a writer is started, at first and after each failure.

    Args:
        job: Its job.
        registered: The writer.
        config: How it is executed; its session settings are those of the session meanwhile.
    """

    def start(live: LiveDirectory) -> SupervisedQuery:
        check_partitions(job.job_id, live, config)
        writer = registered.writer
        if not registered.has_own_trigger:
            writer = writer.trigger(processingTime=f"{config.trigger_interval_ms} milliseconds")
        return start_query(writer, job.name, live)

    return start


def check_partitions(job_id: str, live: LiveDirectory, config: ExecutionConfig) -> None:
    """Refuse a max parallelism that the state in a live directory does not have, and tell of another parallelism.

    Spark itself would go on with the number of the first batch, and ignore the other without a word.

    Raises:
        StatePartitionsError: The state is kept in another number of partitions than the max parallelism.
    """
    pinned = pinned_partitions(live)
    if pinned is None:
        return
    if config.max_parallelism == PARALLELISM_DEFAULT:
        if config.parallelism not in (PARALLELISM_DEFAULT, pinned):
            _LOG.warning("%s: state stays in %d partitions, not %d", job_id, pinned, config.parallelism)
        return
    if config.max_parallelism != pinned:
        raise StatePartitionsError(
            f"Job {job_id!r} keeps its state in {pinned} partitions, but the max parallelism is "
            f"{config.max_parallelism}. Spark fixes the number at a query's first batch, because it decides which key "
            f"is in which partition. Set the max parallelism to {pinned}, or leave it unset; to have another one, "
            "begin a new job under another name."
        )
