"""Launches on platforms: the calls that each makes, against botocore's Stubber and servers that play the REST APIs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from databricks.sdk import WorkspaceClient
from kubernetes import client as kubernetes

from dagster_ckpt.client.platforms import (
    POLL_MS,
    DatabricksLaunch,
    EmrLaunch,
    EmrServerlessLaunch,
    GlueLaunch,
    PlatformLaunch,
    SparkApplicationLaunch,
    SubmittedRun,
)
from dagster_ckpt.errors import OptionError, RequestFailedError

REQUEST_ID = "0b1c2d3e-start"
VARIABLE = "DAGSTER_CKPT_START_REQUEST"
APPLICATIONS = "/apis/sparkoperator.k8s.io/v1beta2/namespaces/streams/sparkapplications"


@dataclass
class Server:
    """Answers each request below `root` in turn and notes what it was asked; of others it knows nothing."""

    root: str
    answers: list[Any]
    asked: list[tuple[str, str, Any]] = field(default_factory=list)

    def __enter__(self) -> Server:
        noted = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not self.path.startswith(noted.root):
                    self.send_error(404)
                    return
                noted.asked.append((self.command, self.path, json.loads(body) if body else None))
                text = json.dumps(noted.answers.pop(0)).encode()
                self.send_response(201 if self.command == "POST" else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


@dataclass
class Played:
    """A platform that runs a driver, whose run then fails, and is canceled.

    Attributes:
        run: Its id.
        end: How it failed.
        check: What it was asked, once all was asked.
    """

    launch: PlatformLaunch
    run: str
    end: str
    check: Callable[[], None]


def databricks() -> Iterator[Played]:
    request = {
        "run_name": "{stream_id}",
        "tasks": [{"task_key": "driver", "new_cluster": {"spark_env_vars": {VARIABLE: "{start_request}"}}}],
    }
    states = [
        {"life_cycle_state": "PENDING"},
        {"life_cycle_state": "INTERNAL_ERROR", "result_state": "FAILED", "state_message": "no capacity"},
    ]
    with Server("/api/2.2/jobs/", [{"run_id": 455}, *({"state": state} for state in states), {}]) as server:
        client = WorkspaceClient(host=server.url, token="t", auth_type="pat")

        def check() -> None:
            submitted, running, _, canceled = server.asked
            task = {"task_key": "driver", "new_cluster": {"spark_env_vars": {VARIABLE: REQUEST_ID}}}
            assert submitted == ("POST", "/api/2.2/jobs/runs/submit", {"run_name": "orders", "tasks": [task]})
            assert running == ("GET", "/api/2.2/jobs/runs/get?run_id=455", None)
            assert canceled == ("POST", "/api/2.2/jobs/runs/cancel", {"run_id": 455})

        yield Played(DatabricksLaunch(client, request), "455", "FAILED: no capacity", check)


def spark_application() -> Iterator[Played]:
    request = {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": {"name": "{stream_id}-{start_request}", "namespace": "streams"},
        "spec": {"driver": {"env": [{"name": VARIABLE, "value": "{start_request}"}]}},
    }
    name = f"orders-{REQUEST_ID}"
    failed = {"applicationState": {"state": "SUBMISSION_FAILED", "errorMessage": "no quota"}}
    with Server(APPLICATIONS, [{"metadata": {"name": name}}, {"metadata": {}}, {"status": failed}, {}]) as server:
        client = kubernetes.CustomObjectsApi(kubernetes.ApiClient(kubernetes.Configuration(host=server.url)))

        def check() -> None:
            created, running, _, deleted = server.asked
            assert created[:2] == ("POST", APPLICATIONS)
            assert created[2]["metadata"]["name"] == name
            assert created[2]["spec"]["driver"]["env"] == [{"name": VARIABLE, "value": REQUEST_ID}]
            assert running == ("GET", f"{APPLICATIONS}/{name}", None)
            assert deleted[:2] == ("DELETE", f"{APPLICATIONS}/{name}")

        yield Played(SparkApplicationLaunch(client, request), name, "SUBMISSION_FAILED: no quota", check)


def of_aws(
    kind: type[PlatformLaunch],
    service: str,
    request: Mapping[str, Any],
    run: str,
    end: str,
    *calls: tuple[str, Any, Any],
) -> Iterator[Played]:
    """The Stubber refuses requests and answers that are not of the service's model."""
    client = boto3.client(service, region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b")
    with Stubber(client) as stub:
        for method, expected, answer in calls:
            stub.add_response(method, answer, expected)
        yield Played(kind(client, request), run, end, stub.assert_no_pending_responses)


def emr() -> Iterator[Played]:
    def request(start: str) -> dict[str, Any]:
        properties = {f"spark.yarn.appMasterEnv.{VARIABLE}": start}
        return {
            "Name": "orders",
            "Instances": {"InstanceCount": 1},
            "Configurations": [{"Classification": "spark-defaults", "Properties": properties}],
        }

    def cluster(state: str, **reason: Any) -> dict[str, Any]:
        return {"Cluster": {"Status": {"State": state, **reason}}}

    failed = cluster("TERMINATED_WITH_ERRORS", StateChangeReason={"Message": "no such subnet"})
    yield from of_aws(
        *(EmrLaunch, "emr", request("{start_request}"), "j-1", "TERMINATED_WITH_ERRORS: no such subnet"),
        ("run_job_flow", request(REQUEST_ID), {"JobFlowId": "j-1"}),
        ("describe_cluster", {"ClusterId": "j-1"}, cluster("STARTING")),
        ("describe_cluster", {"ClusterId": "j-1"}, failed),
        ("terminate_job_flows", {"JobFlowIds": ["j-1"]}, {}),
    )


def emr_serverless() -> Iterator[Played]:
    arn = "arn:aws:emr-serverless:eu-west-1:123456789012:/applications/00f1/jobruns/jr1"
    role = "arn:aws:iam::123456789012:role/streams"
    of_run = {"applicationId": "00f1", "jobRunId": "jr1"}

    def request(start: str) -> dict[str, Any]:
        conf = f"--conf spark.emr-serverless.driverEnv.{VARIABLE}={start}"
        spark_submit = {"entryPoint": "s3://bucket/orders.py", "sparkSubmitParameters": conf}
        return {
            **{"applicationId": "00f1", "executionRoleArn": role, "mode": "STREAMING", "clientToken": "once"},
            "jobDriver": {"sparkSubmit": spark_submit},
        }

    def job(state: str, details: str) -> dict[str, Any]:
        known = {**of_run, "arn": arn, "createdBy": role, "createdAt": 0, "updatedAt": 0, "executionRole": role}
        known |= {"releaseLabel": "emr-7.13.0", "jobDriver": {"sparkSubmit": {"entryPoint": "s3://bucket/orders.py"}}}
        return {"jobRun": {**known, "state": state, "stateDetails": details}}

    yield from of_aws(
        *(EmrServerlessLaunch, "emr-serverless", request("{start_request}"), "jr1", "FAILED: no worker"),
        ("start_job_run", request(REQUEST_ID), {**of_run, "arn": arn}),
        ("get_job_run", of_run, job("SCHEDULED", "-")),
        ("get_job_run", of_run, job("FAILED", "no worker")),
        ("cancel_job_run", of_run, of_run),
    )


def glue() -> Iterator[Played]:
    of_run = {"JobName": "orders", "RunId": "jr_1"}
    yield from of_aws(
        *(GlueLaunch, "glue", {"JobName": "orders", "Arguments": {"--start_request": "{start_request}"}}),
        *("jr_1", "ERROR: no such script"),
        ("start_job_run", {"JobName": "orders", "Arguments": {"--start_request": REQUEST_ID}}, {"JobRunId": "jr_1"}),
        ("get_job_run", of_run, {"JobRun": {"JobRunState": "WAITING"}}),
        ("get_job_run", of_run, {"JobRun": {"JobRunState": "ERROR", "ErrorMessage": "no such script"}}),
        ("batch_stop_job_run", {"JobName": "orders", "JobRunIds": ["jr_1"]}, {}),
    )


@pytest.fixture(params=[databricks, emr, emr_serverless, glue, spark_application], ids=lambda each: each.__name__)
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    yield from request.param()


def test_a_run_is_submitted_for_one_start_watched_and_canceled(played: Played) -> None:
    submitted = played.launch.submit_for("orders", REQUEST_ID)
    assert submitted.run == played.run

    assert played.launch.end(submitted.run) is None
    assert played.launch.end(submitted.run) == played.end
    played.launch.cancel(submitted.run)

    played.check()


class Cloud(PlatformLaunch):
    """Its client is what it answers."""

    platform = "a cloud"

    def submit(self, request: Mapping[str, Any]) -> str:
        raise self.client

    def end(self, run: str) -> str | None:
        answer: str | Exception | None = self.client.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, run: str) -> None:
        raise ConnectionError


def test_a_platform_is_asked_now_and_then_and_one_that_does_not_answer_again() -> None:
    now_ms = 0
    launch = Cloud([None, ConnectionError(), "FAILED: token=abc123"], {"start": "{start_request}"})
    run = SubmittedRun(launch, "r1", lambda: now_ms)

    assert run.failure() is None
    assert len(launch.client) == 3
    for _ in range(2):
        now_ms += POLL_MS
        assert (run.failure(), run.failure()) == (None, None)
    now_ms += POLL_MS
    assert run.failure() == "a cloud ended its run r1: FAILED: token=***"
    run.cancel()


def test_a_submission_that_fails_says_where() -> None:
    launch = Cloud(ConnectionError("no route"), {"start": "{start_request}"})
    with pytest.raises(RequestFailedError, match="could not be submitted to a cloud: ConnectionError: no route"):
        launch.submit_for("orders", REQUEST_ID)


def test_a_request_that_does_not_pass_the_start_on_is_refused() -> None:
    with pytest.raises(OptionError, match="DAGSTER_CKPT_START_REQUEST"):
        GlueLaunch(None, {"JobName": "orders"})
