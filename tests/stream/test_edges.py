"""Which source of a stream reads which sink of another one, and how far, from the logs of both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagster_ckpt.catalog.records import SOURCE_IDENTITIES
from dagster_ckpt.io.location import Folder, folder_of
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query import sources
from dagster_ckpt.spark.query.sources import SourceIdentity
from dagster_ckpt.stream import edges
from dagster_ckpt.stream.edges import (
    EdgeKind,
    Outputs,
    Read,
    edges_in,
    edges_of,
    last_identities,
    newest_batch,
    reads_in,
    reads_of,
    reads_of_live,
)
from dagster_ckpt.stream.known_sinks import SINK_IDS
from tests.support.as_writer import set_stream
from tests.support.stream_graph import Stage, listed

TOPICS = "ForeachBatchSink[kafka://k:9092"


@pytest.mark.parametrize(
    ("kind", "identity", "sink", "expected"),
    [
        ("file", {"path": "file:/data/a"}, "FileSink[file:///data/a]", (EdgeKind.FILES, "")),
        ("file", {"path": "file:/data/b"}, "FileSink[file:///data/a]", None),
        ("file", {"path": "s3a://lake/a"}, "FileSink[s3://lake/a]", (EdgeKind.FILES, "")),
        ("file", {"path": "file:/data/a/day=1"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "not exactly the folder")),
        ("file", {"path": "file:/data/*"}, "FileSink[file:/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/other/*"}, "FileSink[file:/data/a]", None),
        ("file", {"path": "file:/data/a/*.parquet"}, "FileSink[file:///data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/{a,b}"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/{c,b}"}, "FileSink[/data/a]", None),
        ("file", {"path": "file:/data/[a-c]/day=*/*"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/a/day=*/*"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/a/day=*/*"}, "FileSink[/data/a/day=1/eu]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/a*"}, "FileSink[/data/ab/c]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/*/a"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "file:/data/*/a"}, "FileSink[/data/b/c]", None),
        ("file", {"path": "file:/data/a?"}, "FileSink[/data/a]", None),
        ("file", {"path": "file:/data/a?/x"}, "FileSink[/data/a/x]", None),
        ("file", {"path": "file:/data/[z-a]"}, "FileSink[/data/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "s3a://lake/a/*"}, "FileSink[s3://lake/a]", (EdgeKind.UNKNOWN, "of the pattern")),
        ("file", {"path": "s3a://lake/*"}, "FileSink[s3://other/a]", None),
        ("delta", {"path": "file:/data/a", "table id": "2"}, "DeltaSink[/data/a]", (EdgeKind.TABLE, "")),
        ("delta", {"path": "s3://lake/a", "table id": "1"}, "DeltaSink[/mnt/lake/a]", (EdgeKind.TABLE, "")),
        ("delta", {"path": "s3://lake/a", "table id": "2"}, "DeltaSink[/mnt/lake/a]", None),
        ("delta", {"path": "file:/data/a"}, "ForeachBatchSink[delta:/data/a]", (EdgeKind.TABLE, "")),
        ("delta", {"path": "file:/data/a"}, "FileSink[file:/data/a]", (EdgeKind.UNKNOWN, "kind delta")),
        ("iceberg", {"table": "lake.db.a"}, "IcebergTable[lake.db.a at file:/w/a]", (EdgeKind.TABLE, "")),
        ("iceberg", {"table": "l.a", "table id": "1"}, "IcebergTable[lake.db.a]", (EdgeKind.TABLE, "")),
        ("iceberg", {"table": "lake.db.a"}, "lake.db.a", (EdgeKind.UNKNOWN, "kind iceberg")),
        ("kafka", {"topics": "a,b"}, "KafkaTable[k:9092/b]", (EdgeKind.UNKNOWN, "at least once")),
        ("kafka", {"topics": "a,b"}, "KafkaTable[k:9092/c]", None),
        ("kafka", {"topics": "a"}, "ForeachBatchSink[kafka://k:9092/a?id=shop]", (EdgeKind.TOPIC, "")),
        ("kafka", {"topics": "a"}, "ForeachBatchSink", None),
        ("kafka", {"pattern": "a.*", "id of topic a1": "1"}, f"{TOPICS}/a1?id=shop]", (EdgeKind.TOPIC, "")),
        ("kafka", {"pattern": "a.*", "id of topic a1": "2"}, f"{TOPICS}/a1?id=shop]", None),
        ("kafka", {"pattern": "a.*", "id of topic a1": "1"}, f"{TOPICS}/a2?id=shop]", None),
        ("kafka", {"pattern": "a.*"}, f"{TOPICS}/a1?id=shop]", (EdgeKind.TOPIC, "")),
        ("kafka", {"pattern": "a.*"}, "KafkaTable[k:9092/a1]", (EdgeKind.UNKNOWN, "at least once")),
        ("kafka", {"pattern": "a.*"}, f"{TOPICS}/b1?id=shop]", None),
        ("kafka", {"pattern": "a.*"}, "FileSink[/data/a1]", None),
        ("kafka", {"pattern": r"\p{Lower}+"}, f"{TOPICS}/a1?id=shop]", (EdgeKind.TOPIC, "")),
        ("rate", {}, "FileSink[/data/a]", None),
    ],
)
def test_edge_follows_from_what_source_and_sink_are(
    kind: str, identity: dict[str, str], sink: str, expected: tuple[EdgeKind, str] | None
) -> None:
    of_query = {"0": SourceIdentity(kind, identity=identity)}
    outputs = Outputs({"writer": [sink], "reader": [sink]}, {"writer": {sink: "1"}})

    found = edges_of("reader", of_query, outputs)

    assert [(edge.upstream, edge.sink, edge.kind) for edge in found] == (
        [("writer", sink, expected[0])] if expected else []
    )
    assert all(expected is not None and expected[1] in edge.why for edge in found)


TOPIC = "ForeachBatchSink[kafka://eu:9092/orders?id=shop]"
EU, US = "v1+a/bcdefghijklmnopqA==", "v2-a_bcdefghijklmnopqA"


@pytest.mark.parametrize(
    ("source", "sink", "is_read"),
    [
        ({"id": EU}, {"id": EU}, True),
        ({"id": "v1-a_bcdefghijklmnopqA"}, {"id": EU}, True),
        ({"id": US}, {"id": EU}, False),
        ({"id": US}, {}, True),
        ({}, {"id": EU}, True),
        # From a broker before Kafka 2.8.
        ({"id": "AAAAAAAAAAAAAAAAAAAAAA"}, {"id": EU}, True),
        ({"id": US, "cluster": "us"}, {"id": EU}, False),
        ({"cluster": "us"}, {"id": EU, "cluster": "eu"}, False),
        ({"cluster": "eu"}, {"cluster": "eu"}, True),
        # It was deleted and created again.
        ({"id": US, "cluster": "eu"}, {"id": EU, "cluster": "eu"}, True),
    ],
)
def test_topic_of_another_cluster_is_another_topic(source: dict[str, str], sink: dict[str, str], is_read: bool) -> None:
    named = {"id": "id of topic orders", "cluster": "cluster id"}
    identity = {"topics": "orders", **{named[name]: text for name, text in source.items()}}
    progress = {"sinks": [TOPIC], SINK_IDS: {TOPIC: {"batch": 7, **sink}}}
    outputs = edges._outputs_of({"writer": cast("Any", SimpleNamespace(sinks=[TOPIC], progress=progress))})

    found = edges_of("reader", {"0": SourceIdentity("kafka", identity=identity)}, outputs)

    assert [each.kind for each in found] == [EdgeKind.TOPIC] * is_read


@pytest.mark.parametrize("read_up_to", range(10))
def test_newest_batch_is_found_in_a_compacted_log(tmp_path: Path, read_up_to: int) -> None:
    stage = Stage(tmp_path, "orders")
    for _ in range(10):
        stage.commit()
    files = [each.rpartition("/")[2] for each in listed(stage.sink)]

    batch, found = newest_batch(dict.fromkeys(files[: read_up_to + 1]), str(stage.sink))
    assert (batch, set(found)) == (read_up_to, set(files))
    assert newest_batch({"rolled back": None}, str(stage.sink))[0] is None


def test_newest_batch_has_an_upper_bound_if_earlier_entries_were_deleted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "orders")
    for _ in range(10):
        stage.commit()
    files = [each.rpartition("/")[2] for each in listed(stage.sink)]
    for entry in range(3):
        (stage.sink / "_spark_metadata" / str(entry)).unlink()

    assert newest_batch(dict.fromkeys(files[:2]), str(stage.sink))[0] == 3
    assert newest_batch(dict.fromkeys(files[:6]), str(stage.sink))[0] == 5


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Stage, Stage]:
    orders = Stage(tmp_path, "orders")
    return orders, Stage(tmp_path, "summary", orders)


def test_snapshot_records_how_far_it_has_read(chain: tuple[Stage, Stage]) -> None:
    orders, summary = chain
    for _ in range(3):
        orders.commit()
    summary.commit()
    orders.commit()

    taken = summary.savepoint()

    sink = f"FileSink[file:{orders.sink}]"
    assert reads_in(taken.properties) == (Read("0", "orders", sink, EdgeKind.FILES, timeline=1, batch=2),)
    assert reads_in(orders.savepoint().properties) == ()
    assert [(each.reader, each.upstream) for each in edges_in(orders.catalog)] == [("summary", "orders")]


@pytest.mark.parametrize("has_directory", [True, False])
def test_sources_of_all_streams_are_those_of_each(chain: tuple[Stage, Stage], has_directory: bool) -> None:
    catalog = chain[0].catalog
    if not has_directory:
        set_stream(catalog, "orders", live_directory=None)

    of_each = {
        each.stream_id: catalog.executions.last_sources(each.stream_id, each.live_directory)
        for each in catalog.streams.all()
    }

    known = {stream_id: found for stream_id, found in of_each.items() if found is not None}
    assert known.keys() == ({"orders", "summary"} if has_directory else {"summary"})
    assert catalog.executions.last_sources_of_all() == known


def test_live_directory_shows_how_far_the_query_has_read(chain: tuple[Stage, Stage]) -> None:
    orders, summary = chain
    found = edges_in(orders.catalog)
    orders.commit()
    summary.commit()
    orders.commit()

    assert [each.batch for each in reads_of_live(orders.catalog, found, LiveDirectory(str(summary.live)))] == [0]
    summary.commit()
    assert [each.batch for each in reads_of_live(orders.catalog, found, LiveDirectory(str(summary.live)))] == [1]


@pytest.mark.parametrize(
    ("names", "key", "offset"), [(("0", "1"), "0", "b"), (("2",), "1", "c"), ((), "1", "b"), (("9",), "1", None)]
)
def test_offset_of_a_source_is_the_last_of_its_uses(
    names: tuple[str, ...], key: str, offset: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is read twice through one DataFrame has two offsets and one log, so numbers of logs differ."""
    read: list[str | None] = []
    monkeypatch.setattr(edges, "_read_offset", lambda _catalog, _edge, offset, _note: read.append(offset))
    identity = SourceIdentity("kafka", identity={"topics": "orders"}, offset_names=names)
    found = edges_of("reader", {key: identity}, Outputs({"writer": [TOPIC]}, {}))
    nobody: Any = None

    reads_of(nobody, found, {"offsets/7": b"v1\n{}\na\nb\nc"})

    assert read == [offset]


@pytest.mark.parametrize("uses", ["aab", "aba", "ab"])
def test_sources_know_their_offsets_if_one_is_read_twice(uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Node(str):
        equals = str.__eq__

    monkeypatch.setattr(sources, "read_leaves", lambda _: [Node(each) for each in uses])
    monkeypatch.setattr(sources, "_name", lambda _: None)
    monkeypatch.setattr(sources, "_sides", lambda *_: {})
    monkeypatch.setattr(sources, "_identity", lambda _, node: SourceIdentity(str(node)))
    writer: Any = None

    found = sources.source_identities(writer) or ()

    expected = {"aab": [("0", "1"), ("2",)], "aba": [("0", "2"), ("1",)], "ab": [(), ()]}
    assert [each.offset_names for each in found] == expected[uses]
    assert sources.identities_of_record([each.as_record() for each in found]) == found


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"pending_restore": '{"kind": "TO_BATCH", "batch_id": 0}'}, "orders was being restored"),
        ({}, "the log of the sink could not be read"),
    ],
)
def test_position_that_cannot_be_told_is_unknown_and_the_snapshot_is_taken(
    chain: tuple[Stage, Stage], column: dict[str, Any], why: str
) -> None:
    orders, summary = chain
    orders.commit()
    summary.commit()
    if column:
        set_stream(orders.catalog, "orders", **column)
    else:
        (orders.sink / "_spark_metadata" / "0").write_text("damaged")

    (read,) = reads_in(summary.savepoint().properties) or ()

    assert (read.kind, read.batch) == (EdgeKind.UNKNOWN, None)
    assert why in read.why


def test_before_its_next_start_a_restored_stream_reads_what_its_snapshot_says_and_not_a_later_one() -> None:
    before, later = (SimpleNamespace(properties={SOURCE_IDENTITIES: each}) for each in ("before", "later"))
    catalog: Any = SimpleNamespace(
        executions=SimpleNamespace(last_sources=lambda *_of: None),
        snapshots=SimpleNamespace(by_id=lambda ids: {"restored": before} if "restored" in ids else {}),
        history=SimpleNamespace(newest_of=lambda _ids: {"orders": later}),
    )
    stream: Any = SimpleNamespace(stream_id="orders", live_directory="/live", restored_snapshot_id="restored")
    assert last_identities(catalog, stream) == "before"
    stream.restored_snapshot_id = None
    assert last_identities(catalog, stream) == "later"


def test_each_folder_is_looked_at_once_however_many_streams_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: Counter[str] = Counter()

    def counted(url: str) -> Folder:
        looked_at[url] += 1
        return folder_of(url)

    monkeypatch.setattr(edges, "folder_of", counted)
    outputs = Outputs({f"writer-{number}": [f"FileSink[/data/{number}]"] for number in range(20)}, {})
    found = [
        edge
        for number in range(20)
        for edge in edges_of(
            f"reader-{number}", {"0": SourceIdentity("file", identity={"path": f"/data/{number}"})}, outputs
        )
    ]

    assert [(edge.reader, edge.upstream) for edge in found] == [(f"reader-{n}", f"writer-{n}") for n in range(20)]
    # Once as a source, once as an output.
    assert set(looked_at.values()) == {2}


def test_only_the_folders_around_a_pattern_are_compared_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    sinks = {str(number): [f"FileSink[{tmp_path}/data/{number}]"] for number in range(20)}
    compared: list[str] = []
    related = edges._relation

    def counted(*of: Any) -> Any:
        compared.append(of[2].stream)
        return related(*of)

    monkeypatch.setattr(edges, "_relation", counted)
    source = SourceIdentity("file", identity={"path": f"{tmp_path}/link/7/day=*/*"})
    found = edges_of("reader", {"0": source}, Outputs(sinks, {}))

    assert ([each.upstream for each in found], compared) == (["7"], ["7"])
