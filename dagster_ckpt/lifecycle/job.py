"""One streaming job as its operators and its executions see it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from dagster_ckpt.catalog import Catalog, JobRecord
from dagster_ckpt.options import CheckpointOptions, DecidingRestartStrategy, StateBackend
from dagster_ckpt.spark import LiveDirectory
from dagster_ckpt.storage import ImageStore

Clock = Callable[[], int]

# A job id names a folder in every kind of storage.
JOB_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class StreamingJob:
    """Everything that the operations of one streaming job need.

    Attributes:
        job_id: Stable id of the streaming asset; the name of its folder in storage.
        name: Name the query gets in Spark.
        asset_key: Dagster asset key as a user string ("a/b"), or the name outside Dagster.
        catalog: The record of jobs, executions, images, requests and events.
        store: Where this job's images live.
        options: Checkpointing options.
        restart: What happens after a failure.
        live_root: Folder of live directories; this job's are `<live_root>/<job_id>/live-<k>`.
        executor_copy_bytes: Images that write more bytes than this are copied by Spark's executors, which must reach
            live directories and images by the same URLs. None: always by the process that supervises the query.
        backend: How the query is to keep its state; None leaves it to the session, unchecked. Its
            `transfer_threads` are those that copy files while an image is taken or restored.
        standstill_timeout_ms: A query that stands still for so long, with no task running, fails its run, so that the
            restart strategy begins a new one; None: people decide. See `Standstill`.
        code_version: Version of the code that describes the query, as its owner names it; images carry it.
    """

    job_id: str
    name: str
    asset_key: str
    catalog: Catalog
    store: ImageStore
    options: CheckpointOptions
    restart: DecidingRestartStrategy
    live_root: str
    backend: StateBackend | None = None
    code_version: str | None = None
    executor_copy_bytes: int | None = None
    standstill_timeout_ms: int | None = None

    @property
    def live_folder(self) -> str:
        """Folder that holds this job's live directories."""
        return f"{self.live_root.rstrip('/')}/{self.job_id}"

    def live_directory(self, generation: int) -> LiveDirectory:
        """The live directory of one generation; a new one is made by every restore."""
        return LiveDirectory(f"{self.live_folder}/live-{generation}")

    def register(self) -> JobRecord:
        """Make the job known to the catalog, or refresh what it says of it."""
        return register(
            self.catalog,
            self.job_id,
            name=self.name,
            asset_key=self.asset_key,
            options=self.options,
            restart=self.restart,
        )


def register(
    catalog: Catalog,
    job_id: str,
    *,
    name: str,
    asset_key: str,
    options: CheckpointOptions,
    restart: DecidingRestartStrategy,
) -> JobRecord:
    """Make a job known to the catalog, or refresh what it says of it, where its storage need not be opened."""
    return catalog.jobs.ensure(
        job_id,
        name=name,
        asset_key=asset_key,
        options={
            "cleanup": options.cleanup.name,
            "num_retained": options.num_retained,
            "interval_ms": options.interval_ms,
            "restart": restart.get_description(),
        },
    )
