"""Launches of drivers on platforms that run Spark.

As with the Pipes clients of Dagster's integrations, your code makes the client (boto3, databricks-sdk, kubernetes) and
writes the request for the platform. The driver answers through the catalog: stops, checkpoints and restarts need
nothing of the platform.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dagster_ckpt.errors import OptionError, RequestFailedError
from dagster_ckpt.values.durations import Clock, monotonic_ms
from dagster_ckpt.values.redaction import without_secrets

# Platforms limit how often a client may ask.
POLL_MS = 10_000


@dataclass(frozen=True)
class PlatformLaunch(ABC):
    """A platform that runs drivers, and what it is to run. Subclass it for a platform of your own.

    Attributes:
        request: The platform's request for a run. In each string, `{stream_id}` and `{start_request}` are replaced; the
            driver gets the latter in its environment variable `DAGSTER_CKPT_START_REQUEST`.
        start_timeout_s: Seconds that the cluster and the query may take to start; after that the run is canceled.

    Raises:
        OptionError: The request does not pass `{start_request}` on.
    """

    client: Any = field(repr=False)
    request: Mapping[str, Any] = field(repr=False)
    start_timeout_s: float = field(default=1800.0, kw_only=True)

    platform: ClassVar[str] = "a platform"

    def __post_init__(self) -> None:
        if "{start_request}" not in str(self.request):
            raise OptionError(
                f"The request of {type(self).__name__} does not contain {{start_request}}, so the driver would not "
                "know which start it answers. Pass it as the driver's environment variable DAGSTER_CKPT_START_REQUEST."
            )

    @abstractmethod
    def submit(self, request: Mapping[str, Any]) -> str:
        """Start a run, and return its id."""

    @abstractmethod
    def end(self, run: str) -> str | None:
        """Return how a run ended, and why; None while it has not."""

    @abstractmethod
    def cancel(self, run: str) -> None:
        """Cancel a run."""

    def submit_for(self, stream_id: str, start_request: str) -> SubmittedRun:
        try:
            run = self.submit(_filled(self.request, stream_id=stream_id, start_request=start_request))
        except Exception as error:
            raise RequestFailedError(
                f"The driver of stream {stream_id!r} could not be submitted to {self.platform}: "
                f"{type(error).__name__}: {without_secrets(str(error))}. Check the request and the credentials."
            ) from error
        return SubmittedRun(self, run)


class SubmittedRun:
    """A run of a platform, until its driver has started the query."""

    def __init__(self, launch: PlatformLaunch, run: str, clock: Clock = monotonic_ms) -> None:
        self.run = run
        self._launch = launch
        self._clock = clock
        self._asked_ms = clock()

    def failure(self) -> str | None:
        """Return why it will not start its query any more; asked again if the platform does not answer."""
        if self._clock() - self._asked_ms < POLL_MS:
            return None
        self._asked_ms = self._clock()
        with suppress(Exception):
            end = self._launch.end(self.run)
            if end is not None:
                return f"{self._launch.platform} ended its run {self.run}: {without_secrets(end)}"
        return None

    def cancel(self) -> None:
        """Cancel the run. If that fails, the driver itself does not start the query of a withdrawn start."""
        with suppress(Exception):
            self._launch.cancel(self.run)


def _filled(value: Any, **names: str) -> Any:
    if isinstance(value, str):
        for name, replacement in names.items():
            value = value.replace(f"{{{name}}}", replacement)
        return value
    if isinstance(value, Mapping):
        return {name: _filled(each, **names) for name, each in value.items()}
    return [_filled(each, **names) for each in value] if isinstance(value, list | tuple) else value


class DatabricksLaunch(PlatformLaunch):
    """A one-time run of Databricks; the client is a `databricks.sdk.WorkspaceClient`.

    Example:
        >>> DatabricksLaunch(WorkspaceClient(), {"run_name": "{stream_id}", "tasks": [{
        ...     "task_key": "driver",
        ...     "spark_python_task": {"python_file": "/Workspace/streams/orders.py"},
        ...     "new_cluster": {
        ...         "spark_version": "18.0.x-scala2.13", "num_workers": 2, "data_security_mode": "SINGLE_USER",
        ...         "spark_env_vars": {"DAGSTER_CKPT_START_REQUEST": "{start_request}"},
        ...     },
        ... }]})
    """

    platform = "Databricks"

    def submit(self, request: Mapping[str, Any]) -> str:
        return str(self.client.api_client.do("POST", "/api/2.2/jobs/runs/submit", body=request)["run_id"])

    def end(self, run: str) -> str | None:
        state = self.client.api_client.do("GET", "/api/2.2/jobs/runs/get", query={"run_id": run})["state"]
        if state["life_cycle_state"] not in ("TERMINATED", "SKIPPED", "INTERNAL_ERROR"):
            return None
        return f"{state.get('result_state', state['life_cycle_state'])}: {state.get('state_message')}"

    def cancel(self, run: str) -> None:
        self.client.api_client.do("POST", "/api/2.2/jobs/runs/cancel", body={"run_id": int(run)})


class EmrLaunch(PlatformLaunch):
    """A cluster of Amazon EMR for one driver, by `run_job_flow`; the client is `boto3.client("emr")`.

    Example:
        >>> EmrLaunch(boto3.client("emr"), {
        ...     "Name": "{stream_id}", "ReleaseLabel": "emr-7.13.0", "Applications": [{"Name": "Spark"}],
        ...     "Instances": {"MasterInstanceType": "m6i.xlarge", "InstanceCount": 1},
        ...     "JobFlowRole": "EMR_EC2_DefaultRole", "ServiceRole": "EMR_DefaultRole",
        ...     "Configurations": [{"Classification": "spark-defaults", "Properties": {
        ...         "spark.yarn.appMasterEnv.DAGSTER_CKPT_START_REQUEST": "{start_request}",
        ...     }}],
        ...     "Steps": [{"Name": "driver", "ActionOnFailure": "TERMINATE_CLUSTER", "HadoopJarStep": {
        ...         "Jar": "command-runner.jar",
        ...         "Args": ["spark-submit", "--deploy-mode", "cluster", "s3://bucket/orders.py"],
        ...     }}],
        ... })
    """

    platform = "Amazon EMR"

    def submit(self, request: Mapping[str, Any]) -> str:
        return str(self.client.run_job_flow(**request)["JobFlowId"])

    def end(self, run: str) -> str | None:
        status = self.client.describe_cluster(ClusterId=run)["Cluster"]["Status"]
        if status["State"] not in ("TERMINATING", "TERMINATED", "TERMINATED_WITH_ERRORS"):
            return None
        return f"{status['State']}: {status.get('StateChangeReason', {}).get('Message')}"

    def cancel(self, run: str) -> None:
        self.client.terminate_job_flows(JobFlowIds=[run])


class EmrServerlessLaunch(PlatformLaunch):
    """A job run of Amazon EMR Serverless; the client is `boto3.client("emr-serverless")`.

    Example:
        >>> EmrServerlessLaunch(boto3.client("emr-serverless"), {
        ...     "applicationId": "00f1a2b3c4d5e6f7", "executionRoleArn": "arn:aws:iam::123456789012:role/streams",
        ...     "mode": "STREAMING",
        ...     "jobDriver": {"sparkSubmit": {
        ...         "entryPoint": "s3://bucket/orders.py",
        ...         "sparkSubmitParameters":
        ...             "--conf spark.emr-serverless.driverEnv.DAGSTER_CKPT_START_REQUEST={start_request}",
        ...     }},
        ... })
    """

    platform = "Amazon EMR Serverless"

    def submit(self, request: Mapping[str, Any]) -> str:
        return str(self.client.start_job_run(**request)["jobRunId"])

    def end(self, run: str) -> str | None:
        job = self.client.get_job_run(applicationId=self.request["applicationId"], jobRunId=run)["jobRun"]
        if job["state"] not in ("SUCCESS", "FAILED", "CANCELLING", "CANCELLED"):
            return None
        return f"{job['state']}: {job['stateDetails']}"

    def cancel(self, run: str) -> None:
        self.client.cancel_job_run(applicationId=self.request["applicationId"], jobRunId=run)


class GlueLaunch(PlatformLaunch):
    """A run of a job of AWS Glue; the client is `boto3.client("glue")`.

    Glue does not let a job set this environment variable, so the program passes its argument on:
    `os.environ["DAGSTER_CKPT_START_REQUEST"] = getResolvedOptions(sys.argv, ["start_request"])["start_request"]`.

    Example:
        >>> GlueLaunch(boto3.client("glue"), {"JobName": "orders", "Arguments": {"--start_request": "{start_request}"}})
    """

    platform = "AWS Glue"

    def submit(self, request: Mapping[str, Any]) -> str:
        return str(self.client.start_job_run(**request)["JobRunId"])

    def end(self, run: str) -> str | None:
        job = self.client.get_job_run(JobName=self.request["JobName"], RunId=run)["JobRun"]
        if job["JobRunState"] not in ("STOPPED", "SUCCEEDED", "FAILED", "TIMEOUT", "ERROR", "EXPIRED"):
            return None
        return f"{job['JobRunState']}: {job.get('ErrorMessage')}"

    def cancel(self, run: str) -> None:
        self.client.batch_stop_job_run(JobName=self.request["JobName"], JobRunIds=[run])


class SparkApplicationLaunch(PlatformLaunch):
    """A `SparkApplication` of Kubernetes' Spark operator; the client is a `kubernetes.client.CustomObjectsApi`.

    Example:
        >>> SparkApplicationLaunch(CustomObjectsApi(), {
        ...     "apiVersion": "sparkoperator.k8s.io/v1beta2", "kind": "SparkApplication",
        ...     "metadata": {"name": "{stream_id}-{start_request}", "namespace": "streams"},
        ...     "spec": {
        ...         "type": "Python", "mode": "cluster", "sparkVersion": "4.1.4", "restartPolicy": {"type": "Never"},
        ...         "mainApplicationFile": "local:///app/orders.py",
        ...         "driver": {"env": [{"name": "DAGSTER_CKPT_START_REQUEST", "value": "{start_request}"}]},
        ...         "executor": {"instances": 2},
        ...     },
        ... })
    """

    platform = "Kubernetes"

    @property
    def _kind(self) -> dict[str, str]:
        group, _, version = str(self.request["apiVersion"]).partition("/")
        namespace = self.request["metadata"]["namespace"]
        return {"group": group, "version": version, "namespace": namespace, "plural": "sparkapplications"}

    def submit(self, request: Mapping[str, Any]) -> str:
        return str(self.client.create_namespaced_custom_object(**self._kind, body=request)["metadata"]["name"])

    def end(self, run: str) -> str | None:
        found = self.client.get_namespaced_custom_object(**self._kind, name=run)
        state = found.get("status", {}).get("applicationState", {})
        if state.get("state") not in ("COMPLETED", "FAILED", "SUBMISSION_FAILED", "FAILING"):
            return None
        return f"{state['state']}: {state.get('errorMessage')}"

    def cancel(self, run: str) -> None:
        self.client.delete_namespaced_custom_object(**self._kind, name=run)
