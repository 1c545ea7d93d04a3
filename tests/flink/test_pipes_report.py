"""A program that Dagster started through Pipes, by Dagster's own client and in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.driver import pipes_report, progress_message
from dagster_ckpt.flink.program import StreamExecution
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.stream.liveness import this_holder
from tests.support.as_writer import as_writer

ROOT = Path(__file__).parents[2]
STREAM = "sales"
PROGRAM = """
import sys, threading
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_message
from dagster_ckpt.driver import pipes_report
from dagster_ckpt.flink.program import StreamExecution
from dagster_ckpt.runtime.run_request import EndKind
from tests.support.as_writer import as_writer

catalog = Catalog(sys.argv[1])
looks = threading.Semaphore(0)
look = catalog.executions.latest
catalog.executions.latest = lambda stream_id: (looks.release(), look(stream_id))[1]

with pipes_report(catalog, "sales", interval_s=0.05) as report:
    assert report.run_id == sys.argv[2]
    log_message("sales", "rolled back the sink")
    for _ in range(3):
        assert looks.acquire(timeout=60)
    if sys.argv[3] == "fail":
        raise ValueError("no such table")
    report.ended(StreamExecution("sales", "e", EndKind.FINISHED, "file:///savepoint"))
"""


@pytest.fixture
def catalog_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    catalog = Catalog(url)
    catalog.streams.ensure(STREAM, name=STREAM, asset_key=STREAM, options={})
    holder = this_holder("e", "r", None)
    as_writer(catalog, STREAM).executions.start("e", run_id="r", cause=StartCause.MANUAL, holder=holder)
    as_writer(catalog, STREAM).executions.heartbeat("e", {"batch_id": 41, "input_rows": 1000})
    catalog.close()
    return url


def run_through_pipes(catalog_url: str, how: str) -> tuple[dg.ExecuteInProcessResult, list[Any], list[str]]:
    """A run whose op starts the program; what it reported, and what it put into Dagster's log."""
    reported: list[Any] = []

    @dg.op(out={})
    def start(context):  # type: ignore[no-untyped-def] # Dagster reads the annotation itself
        client = dg.PipesSubprocessClient(env={**os.environ, "PYTHONPATH": str(ROOT)})
        command = [sys.executable, "-c", PROGRAM, catalog_url, context.run_id, how]
        reported.extend(client.run(command=command, context=context).get_custom_messages())

    @dg.job(executor_def=dg.in_process_executor)
    def pipes() -> None:
        start()

    with dg.DagsterInstance.ephemeral() as instance:
        result = pipes.execute_in_process(instance=instance, raise_on_error=False)
        return result, reported, [entry.user_message for entry in instance.all_logs(result.run_id)]


def test_a_program_tells_its_log_its_progress_and_its_end(catalog_url: str) -> None:
    result, reported, log = run_through_pipes(catalog_url, "end")

    assert result.success
    assert reported == [
        {
            "dagster_ckpt/stream_id": STREAM,
            "dagster_ckpt/execution_id": "e",
            "dagster_ckpt/end": "FINISHED",
            "dagster_ckpt/savepoint": "file:///savepoint",
        }
    ]
    assert log.count("Stream sales: rolled back the sink") == 1
    assert log.count("sales: batch 41, 1000 input rows, no snapshot yet") == 1, "nothing new is not told again"


def test_a_program_that_fails_says_so_and_fails_the_run(catalog_url: str) -> None:
    result, reported, log = run_through_pipes(catalog_url, "fail")

    assert not result.success
    assert reported == []
    assert "sales: failed with ValueError: no such table" in log


def test_without_pipes_nothing_is_reported(catalog_url: str) -> None:
    with pipes_report(Catalog(catalog_url), STREAM, environment={}) as report:
        assert report.run_id is None
        report.ended(StreamExecution(STREAM, "e", EndKind.SUSPENDED))


def test_a_catalog_that_is_away_is_no_end_of_the_program(tmp_path: Path, catalog_url: str) -> None:
    catalog = Catalog(catalog_url)
    (tmp_path / "catalog.db").write_bytes(b"no database any more" * 100)

    assert "did not answer (CatalogError)" in progress_message(catalog, STREAM)
