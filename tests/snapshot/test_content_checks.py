"""What enters a snapshot has the checksums that it was written with; damage leaves the earlier snapshots alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from random import Random

import pytest

from dagster_ckpt.errors import DamagedCutError
from dagster_ckpt.spark.checkpoint_dir.checksums import Lz4Check, check_of, content_trouble
from tests.support.golden_stream import GoldenStream

_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x55]) + data[len(data) // 2 + 1 :],
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: data[: len(data) // 2],
}


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    stream = GoldenStream(tmp_path).make()
    yield stream
    stream.close()


@pytest.mark.parametrize("damage", ["flip", "zeros"])
@pytest.mark.parametrize("pattern", ["*.changelog", "*.sst"])
def test_damaged_state_enters_no_snapshot(golden: GoldenStream, pattern: str, damage: str) -> None:
    for path in golden.live.glob(f"state/**/{pattern}"):
        path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DamagedCutError, match="is damaged, so no snapshot was written"):
        golden.snapshot()
    assert golden.stream.store.checkpoints() == []


@pytest.mark.parametrize("damage", list(_DAMAGES))
def test_damage_to_a_new_file_leaves_the_checkpoint_before(golden: GoldenStream, damage: str) -> None:
    before = golden.snapshot()
    golden.commit(5)
    changelog = golden.live / "state/0/1/6.changelog"
    changelog.write_bytes(_DAMAGES[damage](changelog.read_bytes()))
    with pytest.raises(DamagedCutError, match=r"state/0/1/6\.changelog"):
        golden.snapshot()
    assert golden.stream.store.checkpoints() == [before.location]
    assert golden.stream.store.verify(before.location or "") == []


def test_a_log_that_does_not_match_hadoops_checksum_enters_no_snapshot(golden: GoldenStream) -> None:
    entry = golden.live / "sources/0/4"
    data = entry.read_bytes()
    sums = b"".join(struct.pack(">I", zlib.crc32(data[at : at + 512])) for at in range(0, len(data), 512))
    entry.with_name(".4.crc").write_bytes(b"crc\0" + struct.pack(">i", 512) + sums)
    golden.snapshot()
    entry.write_bytes(data.replace(b".json", b".jsom"))
    with pytest.raises(DamagedCutError, match="Hadoop's checksum"):
        golden.snapshot()


def test_a_file_read_in_pieces_is_judged_like_the_whole(golden: GoldenStream) -> None:
    random = Random(7)
    files = [path for path in golden.live.glob("state/**/*") if path.suffix in (".sst", ".changelog", ".zip")]
    assert {path.suffix for path in files} >= {".sst", ".changelog"}
    for path in files:
        name, data = str(path.relative_to(golden.live)), path.read_bytes()
        assert content_trouble(name, data) is None
        for at in random.sample(range(len(data)), 20):
            altered = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            check = check_of(name, len(data), lambda altered=altered: BytesIO(altered))  # type: ignore[misc]
            assert check is not None
            begin = 0
            while begin < len(altered):
                step = random.randrange(1, 700)
                check.update(altered[begin : begin + step])
                begin += step
            assert check.trouble() == content_trouble(name, altered)


def test_a_flipped_bit_of_a_block_of_a_table_is_found(golden: GoldenStream) -> None:
    for path in golden.live.glob("state/**/*.sst"):
        data = path.read_bytes()
        # The rest of the footer is padding.
        for at in range(len(data) - 53):
            assert content_trouble("state/x.sst", data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]) is not None, at


def test_another_codec_is_not_examined() -> None:
    check = Lz4Check()
    check.update(b"\x28\xb5\x2f\xfd" + bytes(range(1, 100)))
    assert check.trouble() is None
