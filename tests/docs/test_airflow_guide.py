"""The module of docs/guides/airflow.md, over stand-ins for Airflow: what its sensor waits for, and what its tasks run.

The page was run with a real Airflow, which is not in this environment: its dependencies are other ones.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus, StartCause
from dagster_ckpt.client import requests
from tests.support.as_writer import as_writer
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.page_blocks import blocks_of
from tests.support.retention_shelf import HOLDER
from tests.support.stream_program import StreamProgram

PROGRAM, SENSOR, DAGS = (block.text for block in blocks_of("guides/airflow.md") if block.language == "python")


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


class Trigger:
    """Airflow's base class."""


class Event(SimpleNamespace):
    def __init__(self, payload: Any) -> None:
        super().__init__(payload=payload)


class Sensor:
    """Airflow's base class."""

    def __init__(self, *, task_id: str, execution_timeout: Any = None) -> None:
        self.task_id, self.execution_timeout, self.output = task_id, execution_timeout, MagicMock()

    def __rshift__(self, later: Any) -> Any:
        return later

    __rrshift__ = __rshift__

    def defer(self, **how: Any) -> None:
        self.deferred = how


TASKS: dict[str, Any] = {}


def task(function: Any = None, **_: Any) -> Any:
    """Keeps the function, and makes a DAG of nothing."""

    def keep(function: Any) -> Any:
        TASKS[function.__name__] = function
        return MagicMock()

    return keep if function is None else keep(function)


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path)
    golden.make().snapshot()
    golden.end(ExecutionStatus.FAILED)
    monkeypatch.setattr(requests, "POLL_S", 0.02)
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    yield golden
    golden.close()


@pytest.fixture
def page(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page, whose stream is the golden one."""
    given = {"params": {"version": "2"}, "dag_run": SimpleNamespace(run_after=datetime(2026, 3, 1, 12, tzinfo=UTC))}
    sdk = module(
        "airflow.sdk",
        BaseSensorOperator=Sensor,
        dag=lambda **_: lambda function: function,
        task=task,
        get_current_context=lambda: given,
    )
    fakes = [
        sdk,
        module("airflow.triggers.base", BaseTrigger=Trigger, TriggerEvent=Event),
        module("airflow.providers.standard.operators.bash", BashOperator=MagicMock()),
    ]
    for fake in fakes:
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    names: dict[str, Any] = {"__name__": "stream_sensor"}
    exec(compile(SENSOR, "stream_sensor.py", "exec", dont_inherit=True), names)
    monkeypatch.setitem(sys.modules, "stream_sensor", module("stream_sensor", **names))
    (golden.root / "streams").mkdir()
    (golden.root / "streams/live").write_text("1")
    text = DAGS.replace('"orders"', f'"{STREAM}"').replace("/opt/streams", str(golden.root / "streams"))
    exec(compile(text, "orders.py", "exec", dont_inherit=True), names)
    names["launched"] = []
    names["launch"] = lambda *program: names["launched"].append(program)
    return names


@contextmanager
def running(golden: GoldenStream) -> Iterator[StreamProgram]:
    program = StreamProgram(golden)
    yield program
    program.end()


def seen(page: dict[str, Any], status: str, after_batch: int = -2) -> Any:
    trigger = page["StreamTrigger"](STREAM, status, after_batch)
    path, wanted = trigger.serialize()
    assert path == "stream_sensor.StreamTrigger"

    async def first() -> Any:
        async with aclosing(page["StreamTrigger"](**wanted).run()) as events:
            async for event in events:
                return event.payload
        return None

    return asyncio.run(asyncio.wait_for(first(), timeout=60))


def test_the_sensor_tells_a_process_that_was_killed_from_one_that_waits_for_a_restart(
    page: dict[str, Any], golden: GoldenStream
) -> None:
    assert seen(page, "FAILED")["status"] == "FAILED"
    as_writer(golden.stream.catalog, STREAM).executions.start(
        "killed", run_id="a program", cause=StartCause.MANUAL, holder=HOLDER
    )
    assert seen(page, "DIED")["status"] == "DIED"


def test_the_sensor_waits_for_a_status_without_a_worker(page: dict[str, Any], golden: GoldenStream) -> None:
    sensor = page["StreamSensor"](task_id="running", stream=STREAM, after_batch="3")
    sensor.execute({})
    assert (sensor.deferred["trigger"].status, sensor.deferred["trigger"].after_batch) == ("RUNNING", 3)
    with running(golden):
        assert seen(page, "RUNNING")["status"] == "RUNNING"


def test_an_upgrade_stops_with_a_savepoint_and_a_rollback_starts_the_old_version_from_it(
    page: dict[str, Any], golden: GoldenStream
) -> None:
    with running(golden):
        before = TASKS["stop"]()
    assert (before["label"], before["version"]) == ("before-2-20260301T120000", "1")
    TASKS["start"](before)
    with running(golden), pytest.raises(RuntimeError, match="was rolled back"):
        TASKS["roll_back"](before)
    assert page["launched"] == [("2",), ("1", "before-2-20260301T120000")]
    TASKS["accept"]({"status": "RUNNING"})
    TASKS["relaunch"]({"status": "FAILED"})
    assert page["launched"][-1] == ("2",)


def test_a_first_start_stops_nothing(page: dict[str, Any]) -> None:
    assert TASKS["stop"]() == {"batch": -1}


def test_the_program_is_python_that_a_driver_runs() -> None:
    assert "run_stream" in PROGRAM
    compile(PROGRAM, "orders.py", "exec", dont_inherit=True)
