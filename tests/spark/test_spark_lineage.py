import io

import pytest
from live_files import changelog

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import read_lineage

# The head of a changelog as Spark 4.3 wrote it: one compressed block, then the empty one that ends the stream.
SPARK_WROTE = bytes.fromhex(
    "4c5a34426c6f636b25cb00000013010000d2231205f7420002763300df5b7b2276657273696f6e223a312c22636865636b706f696e"
    "74556e697175654964223a2238633463303565652d326163332d346563372d383938662d343861633764333361623533227d2c4a00"
    "1f324a0004fa1539343233"
)


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_the_lineage_names_the_id_of_every_version(version: str) -> None:
    data = changelog({10: "aa", 11: "bb"}, version=version)

    assert read_lineage(io.BytesIO(data), "11_bb.changelog") == {10: "aa", 11: "bb"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"LZ4Block",
        SPARK_WROTE,
        changelog({1: "a"}, version="v2"),
        changelog({1: "a"})[:-30],
        b"\x28\xb5\x2f\xfd" * 9,
    ],
)
def test_a_changelog_that_cannot_be_read_is_named(data: bytes) -> None:
    with pytest.raises(LiveDirectoryError, match=r"live/11_bb\.changelog has no readable lineage"):
        read_lineage(io.BytesIO(data), "live/11_bb.changelog")
