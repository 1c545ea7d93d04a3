"""The files of deploy/ are what each tool accepts: checked by schemas that install from PyPI."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from dagster_ckpt.stream.liveness import POD_NAME, POD_NAMESPACE, POD_UID
from tests.stack.running_stack import dagster_home
from tests.stack.servers import Postgres
from tests.support.server import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
POD_VARIABLES = {POD_NAMESPACE: "metadata.namespace", POD_NAME: "metadata.name", POD_UID: "metadata.uid"}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def checked_by(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile() -> None:
    checked_by(BIN / "hadolint", DEPLOY / "Dockerfile")


def test_the_image_runs_as_a_user_without_rights() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]


def test_compose() -> None:
    from compose_spec import ComposeSpecification

    ComposeSpecification.model_validate(read("compose.yaml"))


def test_services_depend_on_services_that_exist() -> None:
    compose = read("compose.yaml")
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], (name, other)
    named = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert {name for name in named if not name.startswith((".", "/"))} <= set(compose["volumes"])


@pytest.mark.parametrize("name", ["streams.yaml"])
def test_kubernetes_objects(name: str) -> None:
    checked_by(BIN / "kubernetes-validate", "--strict", DEPLOY / "kubernetes" / name)


def test_the_runs_of_the_chart_are_pods_that_kubernetes_accepts(tmp_path: Path) -> None:
    from dagster_k8s.job import UserDefinedDagsterK8sConfig
    from dagster_k8s.models import k8s_snake_case_dict
    from kubernetes.client import V1Container, V1JobSpec, V1PodSpec

    given = read("kubernetes/values.yaml")["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]
    UserDefinedDagsterK8sConfig(
        container_config=k8s_snake_case_dict(V1Container, given["containerConfig"]),
        pod_spec_config=k8s_snake_case_dict(V1PodSpec, given["podSpecConfig"]),
        job_spec_config=k8s_snake_case_dict(V1JobSpec, given["jobSpecConfig"]),
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "run"},
        "spec": {**given["podSpecConfig"], "containers": [{"name": "run", "image": "x", **given["containerConfig"]}]},
    }
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    checked_by(BIN / "kubernetes-validate", "--strict", tmp_path / "pod.yaml")


def test_a_pod_is_killed_later_than_dagster_gives_up_on_its_run() -> None:
    values = read("kubernetes/values.yaml")
    grace_s = values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]["podSpecConfig"][
        "terminationGracePeriodSeconds"
    ]
    assert grace_s > values["dagsterDaemon"]["runMonitoring"]["cancelTimeoutSeconds"]


def test_pods_are_told_who_they_are_and_may_ask_about_others() -> None:
    chart = read("kubernetes/values.yaml")["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]["containerConfig"]
    driver = read("kubernetes/spark-application.yaml")["spec"]["driver"]
    for env in (chart["env"], driver["env"]):
        told = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in env}
        assert told.items() >= POD_VARIABLES.items()
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes/streams.yaml").read_text()))
    (role,) = (each for each in objects if each["kind"] == "Role")
    assert any("pods" in rule["resources"] and "get" in rule["verbs"] for rule in role["rules"])
    assert driver["serviceAccount"] == role["metadata"]["name"]


def test_the_driver_of_the_spark_operator_is_a_pod_that_kubernetes_accepts(tmp_path: Path) -> None:
    spec = read("kubernetes/spark-application.yaml")["spec"]
    containers = [
        {"name": role, "image": spec["image"], **{key: spec[role][key] for key in ("env", "envFrom", "volumeMounts")}}
        for role in ("driver", "executor")
        for _ in [spec[role].setdefault("env", [])]
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "driver"},
        "spec": {
            "volumes": spec["volumes"],
            "containers": containers,
            "serviceAccountName": spec["driver"]["serviceAccount"],
            "terminationGracePeriodSeconds": spec["driver"]["terminationGracePeriodSeconds"],
        },
    }
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    checked_by(BIN / "kubernetes-validate", "--strict", tmp_path / "pod.yaml")


def test_dagster_accepts_its_instance_and_loads_every_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dagster._core.instance.config import dagster_instance_config
    from dagster._core.instance.ref import InstanceRef

    for name in ("USER", "PASSWORD", "HOST", "DB"):
        monkeypatch.setenv(f"DAGSTER_PG_{name}", "x")
    monkeypatch.setenv("STREAMS_IMAGE", "streams:1")
    (tmp_path / "dagster.yaml").write_text((DEPLOY / "dagster.yaml").read_text())
    config, _ = dagster_instance_config(str(tmp_path))
    assert config["run_monitoring"]["max_resume_run_attempts"] == 0
    ref = InstanceRef.from_dir(str(tmp_path))
    assert type(ref.run_launcher).__name__ == "DockerRunLauncher"
    assert ref.storage_data is not None
    assert ref.storage_data.class_name == "DagsterPostgresStorage"


def test_the_instance_works_on_postgresql(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"USER": "dagster", "PASSWORD": "dagster", "HOST": "127.0.0.1", "DB": "dagster"}.items():
        monkeypatch.setenv(f"DAGSTER_PG_{name}", value)
    port = free_port()
    with closing(Postgres(Path(tempfile.mkdtemp(prefix="dagster-ckpt-deploy-")), port)) as server:
        server.start()
        server.prepare(DEPLOY / "postgres-init.sql")
        home = dagster_home(tmp_path, port, free_port())
        # With psycopg 3, which the catalog needs, Dagster closes these connections before it uses them.
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.optimize_for_webserver(statement_timeout=10_000, pool_recycle=60, max_overflow=1)
            assert instance.all_instigator_state() == []


def test_dagster_accepts_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.workspace.load import location_origins_from_yaml_paths

    monkeypatch.setenv("CODE_LOCATION_HOST", "code-location")
    (origin,) = location_origins_from_yaml_paths([str(DEPLOY / "workspace.yaml")])
    assert origin.location_name == "streams"


def test_the_code_location_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEPLOY)
    from code_location import definitions, orders

    assert isinstance(definitions.defs, dg.Definitions)
    assert definitions.defs.resolve_job_def("shop_counts_stream")
    assert callable(orders.main)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_units(unit: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    assert parser.sections() == ["Unit", "Service", "Install"]
    service = parser["Service"]
    assert service["ExecStart"].startswith("/opt/streams/.venv/bin/")
    assert service["User"] != "root"
    # /etc is read-only for these units; Dagster writes logs below its home.
    assert service["ProtectSystem"] == "full"
    home = service.get("Environment", "DAGSTER_HOME=/var/lib/streams").removeprefix("DAGSTER_HOME=")
    assert home == f"/var/lib/{service['StateDirectory']}"
    if "--workspace" in service["ExecStart"]:
        assert service["ExecStart"].endswith(f" --workspace {home}/workspace.yaml")
    # The state is kept however a unit ends; a stop that takes longer than this ends as a kill.
    assert int(service["TimeoutStopSec"]) >= 30
