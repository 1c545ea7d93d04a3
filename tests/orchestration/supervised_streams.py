"""A supervisor sensor with an instance and a catalog, and the runs and executions that it looks at."""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster import DagsterRunStatus
from orchestration_catalog import begin_execution

from dagster_ckpt.catalog.records import (
    ExecutionRecord,
    StartCause,
)
from dagster_ckpt.orchestration.jobs.operator_jobs import build_operator_jobs
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.run_status import (
    DEPLOYMENT_TAG,
    STREAM_ID_TAG,
)
from dagster_ckpt.orchestration.supervisor_sensor import build_supervisor_sensor
from tests.support.manual_clock import ManualClock

DELAY_MS = 60_000


class Supervised:
    """A sensor over an instance and a catalog, and the runs and executions it looks at."""

    def __init__(
        self, instance: dg.DagsterInstance, resource: CheckpointCatalogResource, clock: ManualClock, streams: list[Any]
    ) -> None:
        self.instance = instance
        self.resource = resource
        self.catalog = resource.catalog()
        self.clock = clock
        self.jobs = {job.name: job for job in build_operator_jobs(streams)}
        self.sensor = build_supervisor_sensor(
            streams, self.jobs["apply_retention_job"], self.jobs["roll_back_upgrade_job"]
        )

    def run(self, status: DagsterRunStatus, **tags: str) -> dg.DagsterRun:
        ours = {STREAM_ID_TAG: "orders", DEPLOYMENT_TAG: self.catalog.deployment_id}
        return self.instance.add_run(dg.DagsterRun("orders_stream", status=status, tags={**ours, **tags}))

    def execution(
        self, status: DagsterRunStatus, *, stream_id: str = "orders", cause: StartCause = StartCause.MANUAL
    ) -> ExecutionRecord:
        """An execution that the catalog believes to run, in a run that Dagster recorded with `status`."""
        return begin_execution(self.catalog, stream_id, self.run(status).run_id, cause=cause)

    def failed_for_good(self) -> ExecutionRecord:
        """The last of as many failures as the strategy of `orders` allows, and one more."""
        causes = [StartCause.MANUAL, StartCause.RESTART_NEW_RUN, StartCause.RESTART_NEW_RUN]
        return [self.execution(DagsterRunStatus.FAILURE, cause=cause) for cause in causes][-1]

    def tick(self) -> list[Any]:
        context = dg.build_sensor_context(self.instance, resources={"checkpoint_catalog": self.resource})
        return list(self.sensor.evaluate_tick(context).run_requests or [])


def accepted(supervised: Supervised, request: Any) -> bool:
    """Whether the job takes the request's run config."""
    return bool(dg.validate_run_config(supervised.jobs[request.job_name], request.run_config))
