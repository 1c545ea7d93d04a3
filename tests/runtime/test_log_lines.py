"""Each transition of a stream is logged once: in a plain program, in a Dagster run, and in a driver."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest

from dagster_ckpt import driver
from dagster_ckpt.catalog import event_log
from dagster_ckpt.catalog.event_log import describe_event, log_transition
from dagster_ckpt.catalog.records import EventType
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.driver import forwarded_log
from dagster_ckpt.errors import CatalogError, LeaseLostError
from dagster_ckpt.flink import program
from dagster_ckpt.orchestration.run_status import transitions_in_run_log
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.values.durations import size
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support.logged_life import LoggedLife, comparable, expected
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import HOLDER, STREAM

DELETE = ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION


@pytest.fixture
def life(tmp_path: Path) -> Iterator[LoggedLife]:
    life = LoggedLife(tmp_path)
    options = replace(life.shelf.stream.options, cleanup=DELETE, tolerable_failures=1)
    life.shelf.stream = replace(life.shelf.stream, options=options)
    yield life
    life.shelf.stream.catalog.close()


def live(life: LoggedLife, stream: StreamHandle) -> None:
    """The whole life, as `run_program` and the op of a streaming asset lead it."""
    request = RunRequest("run", lambda _live: PlayedQuery(), interrupted=lambda: life.interrupted(stream))  # type: ignore[arg-type, return-value]
    outcome = execute_stream(stream, request)
    report = apply_terminal_retention(stream, outcome.execution_id, TerminalState.CANCELED)
    for message in report.messages(unlogged=True):
        event_log.log_message(STREAM, message)


def test_a_plain_program_logs_each_transition_once(life: LoggedLife, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        live(life, life.shelf.stream)

    assert comparable([each.getMessage() for each in caplog.records if each.name.startswith("dagster_ckpt")]) == (
        expected()
    )
    [completed] = [each for each in caplog.records if each.getMessage().startswith("Completed checkpoint 1")]
    assert (completed.stream_id, completed.event, completed.ckpt_number) == (STREAM, "CHECKPOINT_COMPLETED", 1)  # type: ignore[attr-defined]


def test_a_dagster_run_shows_each_transition_once_in_its_log(life: LoggedLife) -> None:
    @dg.op(out={})
    def orders(context):  # type: ignore[no-untyped-def] # Dagster reads the annotation itself
        with transitions_in_run_log(context, STREAM):
            live(life, life.shelf.stream)
            log_transition("another stream", "it is not this run's")

    @dg.job(executor_def=dg.in_process_executor)
    def run() -> None:
        orders()

    with dg.DagsterInstance.ephemeral() as instance:
        result = run.execute_in_process(instance=instance)
        lines = [each for each in instance.all_logs(result.run_id) if each.dagster_event is None]

    assert comparable([each.user_message for each in lines]) == expected()
    assert {each.step_key for each in lines} == {"orders"}


def test_dagster_that_captures_the_logger_itself_shows_no_line_twice(
    life: LoggedLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Mock()
    context.instance.managed_python_loggers = ["dagster_ckpt"]
    with transitions_in_run_log(context, STREAM):
        log_transition(STREAM, "something", level=logging.ERROR)

    context.log.log.assert_not_called()


def test_a_driver_prints_each_transition_once(
    life: LoggedLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = life.shelf.stream

    def execute(of: StreamHandle, asked: RunRequest) -> Any:
        asked = replace(asked, describe=None, interrupted=lambda: life.interrupted(of))
        return execute_stream(of, asked)

    for module, name, stand_in in (
        (driver, "settings_for_a_while", lambda *_: nullcontext()),
        (driver, "start_stream_query", lambda *_: PlayedQuery()),
        (program, "jvm_pid", lambda _spark: None),
        (program, "application_of", lambda _spark: None),
        (program, "execute_stream", execute),
    ):
        monkeypatch.setattr(module, name, stand_in)

    # Pytest's own handlers are a program's logging set up.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    driver.run_stream(
        STREAM,
        lambda _spark: Mock(),
        catalog=f"sqlite:///{tmp_path / 'catalog.db'}",
        storage=FileSystemCheckpointStorage(f"file://{tmp_path}/snapshots", 64, savepoint_path=f"file://{tmp_path}/s"),
        live_root=stream.live_root,
        checkpointing=CheckpointConfig(tolerable_failures=1, cleanup=DELETE, num_retained=1),
        spark=Mock(),
    )

    printed = capfd.readouterr().err.splitlines()
    lines = [line.partition(" dagster_ckpt.transitions: ")[2] for line in printed if "dagster_ckpt." in line]
    assert comparable(lines) == [
        line.replace("Starting stream orders: ", "Starting stream orders: restarted, ") for line in expected()
    ]


def test_a_write_that_is_rolled_back_logs_nothing(life: LoggedLife, caplog: pytest.LogCaptureFixture) -> None:
    catalog = life.shelf.stream.catalog

    def record_and_break() -> None:
        with catalog.database.writing() as connection:
            catalog.database.record_event(connection, STREAM, EventType.ALERT, payload={"alert": "it burns"})
            raise CatalogError("the connection broke")

    with caplog.at_level("DEBUG", "dagster_ckpt"):
        with pytest.raises(CatalogError):
            record_and_break()
        assert caplog.messages == []
        with catalog.database.writing() as connection:
            catalog.database.record_event(connection, STREAM, EventType.ALERT, payload={"alert": "password=secret"})
        assert caplog.messages == ["Alert for stream orders: password=***"]


def test_a_log_that_breaks_ends_nothing_and_the_other_lines_arrive() -> None:
    lines: list[str] = []

    def break_once(_level: int, message: str) -> None:
        lines.append(message)
        if len(lines) == 1:
            raise OSError("the database is away")

    logging.raiseExceptions, before = False, logging.raiseExceptions
    try:
        with forwarded_log(break_once):
            log_transition(STREAM, "one")
            log_transition(STREAM, "two")
    finally:
        logging.raiseExceptions = before
    assert lines == ["one", "two"]


def test_the_level_of_the_package_is_as_before_when_the_last_log_closes() -> None:
    package = logging.getLogger(event_log.PACKAGE_LOGGER)
    before = package.level
    first, second = forwarded_log(lambda *_: None), forwarded_log(lambda *_: None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert package.isEnabledFor(logging.INFO)
    second.__exit__(None, None, None)
    assert package.level == before


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "unknown size"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345_678, "12.3 MB"),
        (999_950, "1.0 MB"),
    ],
)
def test_sizes(count: int | None, words: str) -> None:
    assert size(count) == words


@pytest.mark.parametrize(
    ("event", "payload", "words"),
    [
        (
            EventType.CHECKPOINT_COMPLETED,
            {
                "kind": "CHECKPOINT",
                "number": 7,
                "full_bytes": 12_300_000,
                "incremental_bytes": 400_000,
                "batch_id": 812,
                "duration_ms": 82,
            },
            "Completed checkpoint 7 of stream orders: 12.3 MB (400.0 kB new), batch 812, 82 ms",
        ),
        (
            EventType.RESTORED,
            {
                "origin": "SNAPSHOT",
                "kind": "CHECKPOINT",
                "number": 7,
                "batch_id": 812,
                "full_bytes": 5,
                "duration_ms": 9,
                "live_directory": "/l/live-2-3",
            },
            "Restored stream orders from checkpoint 7 at batch 812: 5 B, 9 ms, /l/live-2-3",
        ),
        (
            EventType.RESTORED,
            {"origin": "DIRECTORY", "new_timeline": True, "batch_id": 8, "live_directory": "/l"},
            "Rewound stream orders to batch 8: /l",
        ),
        (
            EventType.RESTORED,
            {"origin": "DIRECTORY", "new_timeline": False, "batch_id": 8, "live_directory": "/l"},
            "Moved stream orders at batch 8: /l",
        ),
        (
            EventType.RESTORED,
            {"origin": "FORK", "source": "sales", "batch_id": 8, "live_directory": "/l"},
            "Forked stream orders from sales at batch 8: /l",
        ),
        (EventType.RESTORED, {"origin": "EMPTY", "live_directory": "/l"}, "Reset stream orders to empty state: /l"),
        (
            EventType.CHECKPOINT_FAILED,
            {"kind": "CHECKPOINT", "number": 7, "reason": "IO_EXCEPTION: no disk", "failures": 1, "tolerable": 3},
            "Failed checkpoint 7 of stream orders: IO_EXCEPTION: no disk (1 of 3 tolerated failures)",
        ),
        (
            EventType.CHECKPOINT_FAILED,
            {"kind": "CHECKPOINT", "number": 9, "reason": "IO_EXCEPTION: no disk", "failures": 2, "tolerable": 1},
            "Failed checkpoint 9 of stream orders: IO_EXCEPTION: no disk (failure 2 in a row, 1 is tolerated)",
        ),
        (EventType.REQUEST_RESOLVED, {"status": "FAILED"}, "Request resolved of stream orders: status FAILED"),
    ],
)
def test_words_of_events(event: EventType, payload: dict[str, Any], words: str) -> None:
    assert describe_event(STREAM, event, payload)[1] == words


def test_a_lease_logs_trouble_once_and_its_loss_once(life: LoggedLife, caplog: pytest.LogCaptureFixture) -> None:
    catalog = life.shelf.stream.catalog
    lease = catalog.leases.acquire(STREAM, HOLDER, 60_000)
    with caplog.at_level("INFO", "dagster_ckpt"), LeaseKeeper(catalog, lease, ttl_ms=60_000) as keeper:
        caplog.clear()
        for _ in range(3):
            keeper._note_failure(keeper._renewed_at)
        keeper._note_renewed()
        keeper._note_renewed()
        catalog.leases.acquire(STREAM, replace(HOLDER, run_id="successor"), 60_000, take_over=lease)
        for _ in range(2):
            with pytest.raises(LeaseLostError):
                keeper.check()
    trouble, again, taken, lost = caplog.messages
    assert trouble.startswith("Could not renew the lease of stream orders, which expires in")
    assert again == "Renewed the lease of stream orders again, after 0 s"
    assert taken.startswith("Took over the lease of stream orders from run run (process 1 on host), which has ended")
    assert lost.startswith("Lost the lease of stream orders: token")
    assert "run successor" in lost
