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
from dagster_ckpt.spark.query.sources import DELTA, FILE, ICEBERG, KAFKA, Leaf, SourceIdentity
from dagster_ckpt.spark.query.table_sources import DeltaOffset, IcebergOffset, delta_offset, iceberg_offset
from tests.support.rewind_history import History

WRITER: Any = "a query"


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveDirectory]:
    monkeypatch.setattr(state_migration, "session_of", lambda _writer: None)
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, _began: ())
    history = History(tmp_path)
    yield history.live
    history.close()


def reads(monkeypatch: pytest.MonkeyPatch, *kinds: str, **options: str) -> None:
    monkeypatch.setattr(state_migration, "source_identities", lambda _writer: [SourceIdentity(kind) for kind in kinds])
    leaves = [Leaf(kind, str(at), at, str(at), is_again=False) for at, kind in enumerate(kinds)]
    monkeypatch.setattr(
        state_migration, "sources_in_entry", lambda _, ends: [(leaf, leaf.name, ends.get("0")) for leaf in leaves]
    )
    monkeypatch.setattr(state_migration, "source_options", lambda _leaf: options)


@pytest.mark.parametrize("kind", ["socket", "pulsar"])
def test_a_source_that_cannot_be_read_up_to_a_position_is_refused(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reads(monkeypatch, KAFKA, kind)
    with pytest.raises(
        StateRewriteError,
        match=rf"from source 1 \({kind}\): only files, Kafka, Delta and Iceberg .*Nothing was changed",
    ):
        refuse_gone_input(WRITER, live)


def test_kafka_is_asked_for_its_first_records(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch, KAFKA)
    refuse_gone_input(WRITER, live)
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, began: [f"records from {began()}"])
    with pytest.raises(InputGoneError, match="nothing was changed: records from"):
        refuse_gone_input(WRITER, live)


def lay(live: LiveDirectory, name: str, text: str) -> None:
    path = Path(live.url) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_source_is_asked_for_where_it_began(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the eleventh one, whose log comes between those of the second and the third."""
    asked: list[list[str | None]] = []
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, began: asked.append([*began().values()]) or ())
    reads(monkeypatch, *[KAFKA] * 9, ICEBERG, ICEBERG)
    for number in range(9):
        lay(live, f"sources/{number}/0", f'v1\n{{"topic-{number}":{{"0":1}}}}')
    lay(live, "sources/10/offsets/0", '{"version":1,"snapshot_id":5,"position":0,"scan_all_files":false}')

    refuse_gone_input(WRITER, live)

    [(*topics, unknown, iceberg)] = asked
    assert topics == [f'{{"topic-{number}":{{"0":1}}}}' for number in range(9)]
    assert (iceberg_offset(unknown), iceberg_offset(iceberg)) == (IcebergOffset(-1, -1), IcebergOffset(5))


def test_a_delta_table_is_asked_for_what_it_had(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(state_migration, "gone_records", lambda _writer, began: asked.extend(began().values()) or ())
    newest = max(int(path.name) for path in (Path(live.url) / "offsets").iterdir() if path.name.isdecimal())
    at = DeltaOffset("2c4d", 7, 2, False)
    lay(live, f"offsets/{newest}", f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{{}}}}\n{at.as_text()}')
    reads(monkeypatch, DELTA)

    refuse_gone_input(WRITER, live)

    assert [delta_offset(text) for text in asked] == [DeltaOffset("2c4d", 6, -1, True)]
    reads(monkeypatch, DELTA, skipchangecommits="true")
    with pytest.raises(StateRewriteError, match=r"from source 0 \(delta\): with skipChangeCommits .*StateMigration"):
        refuse_gone_input(WRITER, live)


def test_every_file_that_was_read_must_be_there(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch, FILE)
    monkeypatch.setattr(state_migration, "existing_files", lambda _paths, _session: {})
    with pytest.raises(InputGoneError, match=r"is gone.*and 6 more.*Bring the input back"):
        refuse_gone_input(WRITER, live)
