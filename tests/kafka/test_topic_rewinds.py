"""Streams with a topic between them go back to one savepoint set, against an uninterrupted run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest
from exactly_once_program import ROWS, STREAM, Run, write_input
from kafka_broker import Kafka
from test_kafka_exactly_once import Copying

from tests.support.shop_tables import PLAY_S, Plays

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.thorough(sample="tests/kafka/test_kafka_positions.py"),
]


class Chain:
    """A stream copies files into a topic, and others read it."""

    def __init__(self, folder: Path, kafka: Kafka) -> None:
        self.folder = folder
        self.copying = Copying(folder, kafka, 0)
        self.first = replace(self.copying.how, jars=",".join(map(str, kafka.jars)))
        self.files = 0

    def reader(self, name: str, *, of: Run | None = None, topic: str = "") -> Run:
        output = "" if topic else str(self.folder / name)
        return replace(of or self.first, stream=name, source=(of or self.first).topic, topic=topic, output=output)

    def run(self, *streams: Run, files: int = 0) -> None:
        """Each to the end of its input, which grows before."""
        write_input(self.folder / "input", self.files, self.files + files)
        self.files += files
        for each in streams:
            self.copying.how = each
            self.copying.finish()

    def once(self) -> dict[str, int]:
        return {str(number): 1 for number in range(self.files * ROWS)}


def rows_of(stream: Run) -> dict[str, int]:
    """As Spark reads the folder: by its log."""
    files: dict[str, None] = {}
    for entry in Path(stream.output, "_spark_metadata").glob("[0-9]*"):
        for line in entry.read_text().splitlines()[1:]:
            files[json.loads(line)["path"].removeprefix("file://")] = None
    table = pyarrow.dataset.dataset(list(files), format="parquet").to_table()
    return dict(Counter(table.column("value").to_pylist()))


@pytest.fixture(scope="module")
def results(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plays]:
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "jars").mkdir()
    for jar in kafka.jars:
        (folder / "jars" / jar.name).symlink_to(jar)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_KAFKA_SERVERS", kafka.servers)
        yield Plays("tests.kafka.topic_graph_program", folder, ())


@pytest.mark.timeout(PLAY_S)
@pytest.mark.parametrize("scenario", ["chain", "diamond", "twice"])
def test_restored_set_ends_as_an_uninterrupted_graph(results: Plays, scenario: str) -> None:
    found = results[scenario]

    assert found["unproven"] == []
    assert found["reads"]["daily"] == [["orders", 1, "TOPIC"]]
    assert set(found["has read undone"].values()) == {True}
    assert (found["line is proven"], found["is back"], found["whole"]) == ([True, True], True, True)


@pytest.mark.timeout(PLAY_S)
@pytest.mark.parametrize("scenario", ["lags", "diamond lags"])
def test_stream_that_has_not_read_what_is_undone_goes_on_behind_it(results: Plays, scenario: str) -> None:
    assert (set(results[scenario]["has read undone"].values()), results[scenario]["whole"]) == ({False}, True)


def test_reader_that_lags_goes_on_behind_what_a_set_undoes(kafka: Kafka, tmp_path: Path) -> None:
    chain = Chain(tmp_path, kafka)
    first, second = chain.first, chain.reader("second")
    chain.run(first, second, files=2)
    chain.run(first, files=2)
    with first.client() as client:
        client.trigger_savepoint_set(f"{STREAM}+", label="june")
        # More batches than the writers' markers remember.
        chain.run(first, second, files=18)
        messages: list[str] = []
        client.restart_savepoint_set("june", start=False, report=messages.append)

        chain.copying.how = second
        assert chain.copying.run() != 0
        assert "went back and has not started since" in chain.copying.said()
        chain.run(first, second, files=1)
        assert rows_of(second) == chain.once()
        client.trigger_savepoint_set(f"{STREAM}+", label="july")
        (read,) = client.savepoint_sets()[0].savepoints["second"].properties["reads"]

        assert (read["batch"], read["undone"]) == (22, 0)
        # And forward again to what was undone.
        client.restart_savepoint_set(f"before-{client.savepoint_sets()[-1].set_id[:8]}", start=False)
    chain.run(first, second, files=1)
    assert rows_of(second) == chain.once()


def test_reader_of_undone_records_follows_a_stream_that_goes_back_alone(kafka: Kafka, tmp_path: Path) -> None:
    chain = Chain(tmp_path, kafka)
    first, second = chain.first, chain.reader("second")
    chain.run(first, second, files=2)
    with first.client() as client:
        for each in (first, second):
            client.trigger_savepoint(each.stream, label="june")
        chain.run(first, second, files=2)
        chain.run(replace(first, start_from="june", new_query_id=True))
        chain.run(first, second, files=1)
        followed = client.describe_stream(second.stream).executions[0].recovery or {}

    assert followed["kind"] == "RESTORE"
    assert rows_of(second) == chain.once()
