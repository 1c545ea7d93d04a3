import pytest

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.logs import (
    parse_commit_entry,
    parse_log_lines,
    parse_metadata,
    parse_offset_entry,
)

METADATA = (
    b'{"batchWatermarkMs":42,"batchTimestampMs":1,"conf":{"spark.sql.shuffle.partitions":"8",'
    b'"spark.sql.streaming.stateStore.providerClass":"com.example.Provider"}}'
)


def test_an_offset_entry_of_version_1_names_sources_by_their_place() -> None:
    entry = parse_offset_entry(b"v1\n" + METADATA + b'\n{"logOffset":6}\n-', "live/offsets/7")

    assert entry.batch_id == 7
    assert entry.watermark_ms == 42
    assert entry.sources == {"0": '{"logOffset":6}', "1": None}
    assert entry.partitions == 8
    assert entry.provider_class == "com.example.Provider"


def test_an_offset_entry_of_version_2_names_sources_by_their_names() -> None:
    text = b"v2\n" + METADATA + b'\n0:{"logOffset":6}\norders:{"topic":{"0":9}}'

    assert parse_offset_entry(text, "offsets/7").sources == {"0": '{"logOffset":6}', "orders": '{"topic":{"0":9}}'}


def test_an_offline_repartition_counts_more_than_the_session_for_the_number_of_partitions() -> None:
    conf = b'{"conf":{"spark.sql.shuffle.partitions":"8","spark.sql.streaming.internal.stateStore.partitions":"3"}}'

    assert parse_offset_entry(b"v2\n" + conf, "offsets/0").partitions == 3


@pytest.mark.parametrize("damaged", [b'{"t":{"0":7', b'{"t":{"0":7}}\n{"\xff":{"0":7}}'])
def test_an_offset_that_spark_cannot_read_is_damage(damaged: bytes) -> None:
    with pytest.raises(LiveDirectoryError, match="offsets/3"):
        parse_offset_entry(b"v1\n{}\n" + damaged, "offsets/3")


def test_continuous_processing_leaves_the_metadata_line_empty() -> None:
    entry = parse_offset_entry(b'v1\n\n{"0":5}', "offsets/3")

    assert (entry.partitions, entry.watermark_ms, entry.sources) == (None, 0, {"0": '{"0":5}'})


def test_a_commit_of_format_1_names_no_state() -> None:
    entry = parse_commit_entry(b'v1\n{"nextBatchWatermarkMs":9}', "commits/4")

    assert (entry.batch_id, entry.next_watermark_ms, entry.state_ids) == (4, 9, None)


@pytest.mark.parametrize("version", [b"v2", b"v3"])
def test_a_commit_of_a_later_format_names_the_state_by_operator_partition_and_store(version: bytes) -> None:
    text = version + b'\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["a","b"],["c","d"]]},"sinkMetadataMap":{}}'

    assert parse_commit_entry(text, "commits/4").state_ids == {0: (("a", "b"), ("c", "d"))}


def test_the_query_id_is_read_from_the_metadata() -> None:
    assert parse_metadata(b'{"id":"a1553ec0"}', "metadata").id == "a1553ec0"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "it is empty"),
        (b"v1", "ends after its version line"),
        (b"9\n{}", "first line is '9'"),
        (b'v1\n{"batchWatermarkMs":', "Invalid JSON"),
        (b'v2\n{"conf":{}}\nnonsense', "no source name"),
        (b'v1\n{"conf":[]}', "should be an object"),
    ],
)
def test_a_malformed_offset_entry_is_named(data: bytes, found: str) -> None:
    with pytest.raises(LiveDirectoryError, match=found) as caught:
        parse_offset_entry(data, "file:///live/offsets/12")

    assert "file:///live/offsets/12" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"v2\n", b"v1\n{", b'v2\n{"stateUniqueIds":{"x":1}}', b"\xff\xfe"])
def test_a_malformed_commit_is_named(data: bytes) -> None:
    with pytest.raises(LiveDirectoryError, match="live/commits/3"):
        parse_commit_entry(data, "live/commits/3")


@pytest.mark.parametrize("data", [b"", b"{", b'{"id":""}', b"[]"])
def test_malformed_query_metadata_is_named(data: bytes) -> None:
    with pytest.raises(LiveDirectoryError, match="live/metadata"):
        parse_metadata(data, "live/metadata")


def test_lines_of_a_file_log_are_objects() -> None:
    assert parse_log_lines(b'v1\n{"path":"a"}\n{"path":"b"}', "log/0") == [{"path": "a"}, {"path": "b"}]
    assert parse_log_lines(b"v1\n", "log/0") == []
    with pytest.raises(LiveDirectoryError, match="log/0"):
        parse_log_lines(b"v1\n[1]", "log/0")
