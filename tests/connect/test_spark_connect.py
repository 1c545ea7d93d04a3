"""Streams of a Spark Connect client and a separate server process; docs/compatibility.md lists what works."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyspark
import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from tests.support.needs import needs_rewriter
from tests.support.small_spark import lay_file

SPARK_HOME = Path(pyspark.__file__).parent
PROGRAM = Path(__file__).with_name("connect_program.py")
DEADLINE_S = 120
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    # The server's jar is not in the wheel of 3.5.
    pytest.mark.skipif(
        not list((SPARK_HOME / "jars").glob("spark-connect_*.jar")), reason="this PySpark brings no Connect server"
    ),
]
BATCHES_OF_THE_CLIENT, BATCHES_OF_THE_SERVER = 3, 2


def wait_until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Connect server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    folder = tmp_path_factory.mktemp("connect-server")
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    submit = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]"]
    submit += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            submit, cwd=folder, env={**os.environ, "SPARK_HOME": str(SPARK_HOME)}, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port), "the server answers")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Sales:
    """The places of the stream, and its clients."""

    def __init__(self, folder: Path, remote: str) -> None:
        self.folder = folder
        self.remote = remote
        self.files = 0
        (folder / "in").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number:02}:{minute:02}:00Z", "shop": minute % 3} for minute in range(9)]
            lay_file(self.folder / "in", number, rows)
        self.files += files

    def client(self, trigger: str, start_from: str = "latest", **options: object) -> subprocess.Popen[str]:
        words = [sys.executable, str(PROGRAM), str(self.folder), self.remote, trigger, start_from, json.dumps(options)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, start_from: str = "latest", **options: object) -> dict[str, Any]:
        """Run a client until it has taken all files."""
        client = self.client("all", start_from, **options)
        output, errors = client.communicate(timeout=2 * DEADLINE_S)
        assert client.returncode == 0, errors[-3000:]
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    def commits(self, live: str) -> int:
        return len(list((self.folder / "live" / "sales" / live / "commits").glob("[0-9]*")))

    def uninterrupted(self) -> list[list[object]]:
        """Every window that the watermark has closed: of each hour but the last."""
        hours = [datetime(2024, 1, 1) + timedelta(hours=number) for number in range(self.files - 1)]
        return [[str(hour), shop, 3] for hour in hours for shop in range(3)]


@pytest.fixture
def sales(tmp_path: Path, remote: str) -> Sales:
    return Sales(tmp_path / "stream", remote)


def test_the_query_of_a_client_that_died_is_fenced_and_no_row_is_lost_or_repeated(sales: Sales) -> None:
    """The server continues the query of a killed client. The next start once ran a second one in its directory."""
    sales.feed(BATCHES_OF_THE_CLIENT)
    client = sales.client("on")
    try:
        wait_until(
            lambda: sales.commits("live-1-1") >= BATCHES_OF_THE_CLIENT or client.poll() is not None,
            "the client's batches",
        )
        assert client.poll() is None
    finally:
        client.send_signal(signal.SIGKILL)
        client.communicate()
    sales.feed(BATCHES_OF_THE_SERVER)
    wait_until(
        lambda: sales.commits("live-1-1") >= BATCHES_OF_THE_CLIENT + BATCHES_OF_THE_SERVER, "the server's batches"
    )
    catalog = Catalog(f"sqlite:///{sales.folder}/catalog.db")
    with catalog.database.writing() as connection:
        connection.execute(text("UPDATE leases SET expires_at_ms = 1"))
    catalog.close()
    sales.feed(2)

    found = sales.run()

    assert found["recovery"] == "CLONE"
    # If the server's query has read all files, Spark runs no batch without data after the start, which would close a
    # window.
    sales.feed(1)
    assert sales.run()["rows"] == sales.uninterrupted()
    assert {path.name for path in (sales.folder / "live" / "sales").glob("live-*")} >= {"live-2-2"}


@pytest.mark.thorough(sample="tests/runtime/test_run_and_recover.py")
def test_a_stream_goes_on_and_goes_back_exactly(sales: Sales) -> None:
    sales.feed(4)
    assert sales.run() == {"recovery": "START_EMPTY", "rows": sales.uninterrupted()}
    sales.feed(2)
    assert sales.run() == {"recovery": "RESUME", "rows": sales.uninterrupted()}
    assert sales.run("batch-3") == {"recovery": "REWIND", "rows": sales.uninterrupted()}


@needs_rewriter()
@pytest.mark.thorough
def test_a_second_spark_rescales_the_state_of_a_client(sales: Sales) -> None:
    sales.feed(4)
    sales.run()
    sales.feed(2)

    found = sales.run(state_partitions=3)

    assert found["rows"] == sales.uninterrupted()
    assert list((sales.folder / "live" / "sales").glob("live-*/state/0/2"))
