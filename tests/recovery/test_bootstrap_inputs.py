"""From which sources state can be built: those that can be read up to a position once more, and still have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.errors import InputGoneError, StateRewriteError
from dagster_ckpt.recovery import state_migration
from dagster_ckpt.recovery.state_migration import refuse_gone_input
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.sources import FILE, KAFKA, SourceIdentity
from tests.support.rewind_history import History

WRITER: Any = "a query"


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveDirectory]:
    monkeypatch.setattr(state_migration, "session_of", lambda _writer: None)
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, _began: ())
    history = History(tmp_path)
    yield history.live
    history.close()


def reads(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    monkeypatch.setattr(state_migration, "source_identities", lambda _writer: [SourceIdentity(kind) for kind in kinds])


@pytest.mark.parametrize("kind", ["delta", "iceberg", "socket", "pulsar"])
def test_a_source_that_cannot_be_read_up_to_a_position_is_refused(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reads(monkeypatch, KAFKA, kind)
    with pytest.raises(
        StateRewriteError, match=rf"from source 1 \({kind}\): only files and Kafka .*Nothing was changed"
    ):
        refuse_gone_input(WRITER, live)


def test_kafka_is_asked_for_its_first_records(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch, KAFKA)
    refuse_gone_input(WRITER, live)
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, began: [f"records from {began()}"])
    with pytest.raises(InputGoneError, match="nothing was changed: records from"):
        refuse_gone_input(WRITER, live)


def test_every_file_that_was_read_must_be_there(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch, FILE)
    monkeypatch.setattr(state_migration, "existing_files", lambda _paths, _session: {})
    with pytest.raises(InputGoneError, match=r"is gone.*and 6 more.*Bring the input back"):
        refuse_gone_input(WRITER, live)
