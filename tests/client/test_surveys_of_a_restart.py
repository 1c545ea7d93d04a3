"""Asking every sink takes long: one restart asks each of them at most twice, before it and after its lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import pytest
from click.testing import CliRunner

from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.sinks import registry
from dagster_ckpt.sinks.registry import register_sink
from dagster_ckpt.sinks.sink import Replay, Sink, SinkForecast
from dagster_ckpt.snapshot.manifest import SnapshotKind
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.stream_program import StreamProgram


class Counted(Sink):
    """A sink that counts how often it is asked what it would do."""

    asked: ClassVar[list[int]] = []

    @classmethod
    def of(cls, name: str) -> Self | None:
        return cls(name, name) if name.startswith("counted:") else None

    def forecast(self, replay: Replay) -> SinkForecast:
        Counted.asked.append(replay.to_batch)
        return super().forecast(replay)


class Program(StreamProgram):
    """Starts as a run does: it asks the sinks what it would undo, under its lease."""

    def _start(self) -> None:
        stream = self._golden.stream
        for request in self._catalog.requests.pending(STREAM):
            if request.kind is RequestKind.START:
                facts = recovery_facts(stream, StartFrom.from_record(request.arguments), predecessor_ended=True)
                refuse_loss(stream, preview_rewind(stream, facts, plan_recovery(facts)), accept_loss=True)
        super()._start()


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    monkeypatch.setattr(registry, "_registered", [])
    monkeypatch.setattr("dagster_ckpt.client.requests.POLL_S", 0.02)
    monkeypatch.setattr(Counted, "asked", [])
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path / 'catalog.db'}")
    register_sink(Counted)
    golden = GoldenStream(tmp_path).make()
    as_writer(golden.stream.catalog, STREAM).executions.heartbeat("first", {"batch_id": 4, "sinks": ["counted:rows"]})
    golden.snapshot(SnapshotKind.SAVEPOINT, "s")
    golden.commit(5)
    golden.end(ExecutionStatus.SUSPENDED)
    yield golden
    golden.close()


@pytest.mark.parametrize("was_running", [True, False])
def test_the_command_line_asks_once_and_the_run_once(golden: GoldenStream, *, was_running: bool) -> None:
    program = Program(golden)
    if not was_running:
        program.stop()

    done = CliRunner().invoke(commands(), ["restart", STREAM, "--from", "s", "--accept-loss", "--yes"])
    program.end()

    assert done.exit_code == 0, done.output + str(done.exception)
    assert Counted.asked == [4, 4]


def test_a_preview_of_another_point_is_not_reused(golden: GoldenStream) -> None:
    program = Program(golden)
    newer = golden.snapshot(SnapshotKind.SAVEPOINT, "newer")
    with Client.of_stream(golden.stream, origin="a test") as client:
        ahead = client.preview_rewind(STREAM, start_from="s")
        done = client.restart(STREAM, start_from=StartFrom("newer", accept_loss=True), ahead=ahead)
    program.end()

    assert done.plan.snapshot is not None
    assert done.plan.snapshot.snapshot_id == newer.snapshot_id
