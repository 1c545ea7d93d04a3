"""Everything that `deploy/` runs, as processes of this machine: `make stack` shows it, `make test-stack` kills it.

PostgreSQL, an object store, Kafka, a Spark cluster of a master and two workers, and Dagster's code location, daemon and
webserver, with the configuration files of `deploy/`. Only what is true of one machine differs: ports, and the run
launcher, as `docs/deployment.md` says for a machine without containers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster.spark_cluster import SparkCluster, running_cluster
from tests.kafka.kafka_broker import Kafka, running_broker
from tests.stack.servers import BUCKET, KEYS, ObjectStore, Postgres
from tests.support.s3a import s3a_jars
from tests.support.server import Server, free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
LOCATION = "streams"
TOPICS = {"orders": 3, "shop-counts": 3}
# What this machine has less of than a cluster.
SMALL = {
    "spark.cores.max": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


@dataclass
class Stack:
    """The running stack.

    Attributes:
        folder: Its logs and files.
        postgres: The catalog's and Dagster's database.
        object_store: Snapshots and live directories.
        kafka: The broker.
        cluster: The Spark cluster.
        dagster: `code-location`, `daemon` and `webserver`.
        page: URL of Dagster's page.
        environment: The places, as every process of Dagster gets them.
    """

    folder: Path
    postgres: Postgres
    object_store: ObjectStore
    kafka: Kafka
    cluster: SparkCluster
    dagster: Mapping[str, Server]
    page: str
    environment: Mapping[str, str]

    @property
    def catalog_url(self) -> str:
        """The catalog."""
        return self.environment["CATALOG_URL"]

    @property
    def orders_table(self) -> Path:
        """Where the orders are kept as Parquet."""
        return Path(self.environment["ORDERS_TABLE"])

    def graphql(self, document: str, **variables: object) -> dict[str, Any]:
        """Ask Dagster's page."""
        body = {"query": document, "variables": variables}
        answer = requests.post(f"{self.page}/graphql", json=body, timeout=60)
        assert answer.ok, answer.text
        told = answer.json()
        assert not told.get("errors"), told["errors"]
        data: dict[str, Any] = told["data"]
        return data

    def keep_up(self) -> None:
        """Start again what has ended, as an init system does."""
        for server in self.dagster.values():
            if server.process.poll() is not None:
                server.start()

    def start_streams(self) -> None:
        """Turn the sensors on and launch both streams, as a user does on the page."""
        repository = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}
        for sensor in ("checkpoint_catalog_sensor", "checkpoint_supervisor_sensor"):
            told = self.graphql(
                "mutation($it: SensorSelector!) { startSensor(sensorSelector: $it) { __typename "
                "... on PythonError { message } } }",
                it={**repository, "sensorName": sensor},
            )
            assert told["startSensor"]["__typename"] == "Sensor", told
        for stream in ("shop_counts", "orders_table"):
            parameters = {"selector": {**repository, "jobName": f"{stream}_stream"}}
            told = self.graphql(
                "mutation($it: ExecutionParams!) { launchRun(executionParams: $it) { __typename "
                "... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
                it=parameters,
            )
            assert told["launchRun"]["__typename"] == "LaunchRunSuccess", told


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    """Start everything, and kill everything at the end.

    Args:
        folder: An empty folder for logs and files.
    """
    with ExitStack() as opened:
        # PostgreSQL runs as another user if this one is root, whose folders are closed.
        postgres_port = free_port()
        postgres = Postgres(Path(tempfile.mkdtemp(prefix="dagster-ckpt-stack-")), postgres_port)
        opened.callback(postgres.close)
        postgres.start()
        postgres.prepare(DEPLOY / "postgres-init.sql")
        object_store = ObjectStore(folder, free_port())
        opened.callback(object_store.stop)
        object_store.start()
        object_store.prepare()
        kafka = opened.enter_context(running_broker(_folder(folder / "kafka")))
        _create_topics(kafka)
        master_port, grpc_port = free_port(), free_port()
        environment = {
            **KEYS,
            "AWS_ENDPOINT_URL": object_store.url,
            "DAGSTER_HOME": str(dagster_home(folder / "home", postgres_port, grpc_port)),
            "DAGSTER_PG_USER": "dagster",
            "DAGSTER_PG_PASSWORD": "dagster",
            "DAGSTER_PG_HOST": "127.0.0.1",
            "DAGSTER_PG_DB": "dagster",
            "CODE_LOCATION_HOST": "127.0.0.1",
            "CATALOG_URL": f"postgresql+psycopg://dagster:dagster@127.0.0.1:{postgres_port}/checkpoints",
            "CHECKPOINT_STORAGE": f"s3://{BUCKET}/snapshots",
            "CHECKPOINT_INTERVAL_MS": "5000",
            "LIVE_DIRECTORY": f"s3a://{BUCKET}/live",
            "ORDERS_TABLE": str(folder / "orders"),
            "KAFKA_SERVERS": kafka.servers,
            "SPARK_MASTER": f"spark://127.0.0.1:{master_port}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_SUBMIT_ARGS": f"--properties-file {_spark_settings(folder)} pyspark-shell",
            "SPARK_JARS_FOLDER": str(_jars(folder / "jars", kafka)),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, DEPLOY))),
            "PYTHONUNBUFFERED": "1",
        }
        cluster = opened.enter_context(running_cluster(folder / "spark", master_port, environment))
        page_port = free_port()
        stack = Stack(
            folder,
            postgres,
            object_store,
            kafka,
            cluster,
            _dagster(folder, environment, grpc_port, page_port),
            f"http://127.0.0.1:{page_port}",
            environment,
        )
        opened.callback(_stop_runs, environment["DAGSTER_HOME"])
        for server in stack.dagster.values():
            opened.callback(server.stop)
            server.start()
        yield stack


def _folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _create_topics(kafka: Kafka) -> None:
    topics = [NewTopic(name, partitions, 1) for name, partitions in TOPICS.items()]
    # The client has to live until the answer is there.
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    for created in admin.create_topics(topics).values():
        created.result(60)


def dagster_home(folder: Path, postgres_port: int, grpc_port: int) -> Path:
    """DAGSTER_HOME with the files of `deploy/`; each run is a process of the code location."""
    settings = yaml.safe_load((DEPLOY / "dagster.yaml").read_text())
    del settings["run_launcher"]
    settings["storage"]["postgres"]["postgres_db"]["port"] = postgres_port
    # A test does not wait a minute for what the daemon finds.
    settings["run_monitoring"]["poll_interval_seconds"] = 5
    (_folder(folder) / "dagster.yaml").write_text(yaml.safe_dump(settings))
    workspace = yaml.safe_load((DEPLOY / "workspace.yaml").read_text())
    workspace["load_from"][0]["grpc_server"]["port"] = grpc_port
    (folder / "workspace.yaml").write_text(yaml.safe_dump(workspace))
    return folder


def _spark_settings(folder: Path) -> Path:
    small = "".join(f"{name} {value}\n" for name, value in SMALL.items())
    file = _folder(folder) / "spark-defaults.conf"
    file.write_text((DEPLOY / "spark-defaults.conf").read_text() + small)
    return file


def _jars(folder: Path, kafka: Kafka) -> Path:
    """Spark's Kafka source and S3A, as the container image has them."""
    for jar in (*s3a_jars(folder.with_name("s3a")), *kafka.jars):
        (_folder(folder) / jar.name).symlink_to(jar)
    return folder


def _dagster(folder: Path, environment: Mapping[str, str], grpc_port: int, page_port: int) -> dict[str, Server]:
    workspace = ["--workspace", f"{environment['DAGSTER_HOME']}/workspace.yaml"]
    code = ["code-server", "start", "--host", "127.0.0.1", "--port", str(grpc_port)]
    module = ["--module-name", "code_location.definitions", "--location-name", LOCATION]

    def serves_code() -> bool:
        from dagster._grpc.client import DagsterGrpcClient

        return DagsterGrpcClient(port=grpc_port, host="127.0.0.1").health_check_query() == "SERVING"

    def serves_pages() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{page_port}/server_info", timeout=5).ok
        except requests.RequestException:
            return False

    def beats() -> bool:
        # Its heartbeats are in the database; what it starts with is enough here.
        return True

    commands = {
        "code-location": ([str(BIN / "dagster"), *code, *module], serves_code),
        "webserver": (
            [str(BIN / "dagster-webserver"), "--host", "127.0.0.1", "--port", str(page_port), *workspace],
            serves_pages,
        ),
        "daemon": ([str(BIN / "dagster-daemon"), "run", *workspace], beats),
    }
    return {name: Server(name, command, folder, up, environment) for name, (command, up) in commands.items()}


def _stop_runs(home: str) -> None:
    """Kill the runs, which are in sessions of their own, and their JVMs."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("DAGSTER_HOME") == home and process.pid != os.getpid():
                process.kill()
        except psutil.Error:
            continue
