"""Blocks of a list of files: whatever order files are added and looked up in, with few blocks decoded."""

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import LiveDirectoryError, SnapshotTooLargeError
from dagster_ckpt.snapshot import entries as entries_module
from dagster_ckpt.snapshot.entries import BLOCK_BYTES, BLOCK_FILES, Block, BlockBuilder, FileEntry, ObjectUse
from dagster_ckpt.snapshot.manifest import Manifest, SnapshotHeader

FILES = 30 * BLOCK_FILES


def entry(path: str, **changed: object) -> FileEntry:
    digest = f"{random.Random(repr(path)).getrandbits(256):064x}"
    return FileEntry(digest, path, 7, None, f"801.{path}", "a.pack", 0)._replace(**changed)


ENTRIES = sorted(entry(f"state/0/{number // 100}/{number % 100}.changelog") for number in range(FILES))
IN_ORDER = sorted(ENTRIES, key=lambda each: each.path)


def manifest(header: object, blocks: Iterable[Block]) -> Manifest:
    assert callable(header)
    described = header(1)
    assert isinstance(described, SnapshotHeader)
    return Manifest(described, tuple(blocks))


def built(*parts: Sequence[FileEntry]) -> list[Block]:
    """As a writer makes them: a builder of its own for each part."""
    builder = BlockBuilder()
    for part in parts:
        other = BlockBuilder()
        for each in part:
            other.add(each, stable=True)
        builder.add_all(other)
    return builder.finish()


@pytest.fixture
def decoded() -> Iterator[list[int]]:
    """Number of blocks decoded so far, when it is asked for."""
    entries_module._decoded.cache_clear()

    class Count(list[int]):
        def __len__(self) -> int:
            return entries_module._decoded.cache_info().misses

    yield Count()
    entries_module._decoded.cache_clear()


def test_files_in_order_are_found_with_each_block_decoded_once(header: object, decoded: list[int]) -> None:
    files = manifest(header, built(IN_ORDER))
    assert [files.find(each.path) for each in IN_ORDER] == IN_ORDER
    assert len(decoded) == len(files.blocks) == FILES // BLOCK_FILES


def test_files_of_several_writers_are_found_with_each_block_decoded_once(header: object, decoded: list[int]) -> None:
    third = FILES // 3
    files = manifest(header, built(IN_ORDER[:third], IN_ORDER[third : 2 * third], IN_ORDER[2 * third :]))
    assert [files.find(each.path) for each in IN_ORDER] == IN_ORDER
    assert len(decoded) == len(files.blocks) == FILES // BLOCK_FILES


def test_files_added_in_any_order_are_found(header: object) -> None:
    some = random.Random(1).sample(ENTRIES, 5 * BLOCK_FILES + 3)
    files = manifest(header, built(some))
    assert {each.path for each in files.files} == {each.path for each in some}
    assert all(files.find(each.path) == each for each in some)


def test_what_is_not_there_is_not_found_and_nothing_is_decoded_outside_its_range(
    header: object, decoded: list[int]
) -> None:
    files = manifest(header, built(IN_ORDER))
    assert [files.find(path) for path in ("", "commits/1", "state/0/", "z")] == [None] * 4
    assert len(decoded) == 0
    assert files.find("state/0/17/0.other") is None
    assert len(decoded) == 1


def test_several_threads_find_the_same(header: object) -> None:
    files = manifest(header, built(IN_ORDER))
    orders = [IN_ORDER[:5000], IN_ORDER[5000::-1], random.Random(1).sample(IN_ORDER, 1000)]
    with ThreadPoolExecutor(len(orders)) as pool:
        found = pool.map(lambda order: [files.find(each.path) for each in order], orders)
    assert list(found) == orders


def test_stable_files_are_left_out_on_demand(header: object) -> None:
    stable, other = entry("a"), entry("b")
    files = manifest(header, [*Block.pack([stable], stable=True), *Block.pack([other], stable=False)])
    assert [files.find("a"), files.find("b")] == [stable, other]
    assert [files.find("a", stable=False), files.find("b", stable=False)] == [None, other]


def test_a_block_says_how_it_uses_the_objects() -> None:
    (block,) = Block.pack(
        [
            entry("a", size=5, offset=10),
            entry("b", size=7, offset=0),
            entry("c", size=3, object=None, offset=4),
            entry("d", size=1, object="b.pack", offset=0),
        ],
        stable=True,
    )
    assert block.uses == {"a.pack": ObjectUse(15, 12), "b.pack": ObjectUse(1, 1)}
    assert (block.inline_length, block.full_bytes, block.file_count) == (7, 16, 4)
    assert Block.read(block.packed, stable=True) == block


def test_entries_that_are_long_are_spread_over_more_blocks() -> None:
    long = [entry(f"{number:04}", token="\x01" * 500) for number in range(BLOCK_FILES)]
    blocks = list(Block.pack(long, stable=False))
    assert len(blocks) > 1
    assert [each for block in blocks for each in Block.read(block.packed, stable=False).entries.values()] == long


def test_an_entry_that_no_reader_would_take_is_not_written() -> None:
    with pytest.raises(SnapshotTooLargeError, match="The entry of a has"):
        list(Block.pack([entry("a", token="x" * BLOCK_BYTES)], stable=False))
    with pytest.raises(LiveDirectoryError, match="not UTF-8"):
        list(Block.pack([entry("a\udc80")], stable=False))


@given(
    paths=st.lists(st.text(st.sampled_from('ab",\\ü\n'), min_size=1, max_size=6), unique=True, max_size=40),
    others=st.lists(st.text(st.sampled_from('ab/",\\ü\n'), max_size=6), max_size=40),
    parts=st.integers(1, 3),
)
def test_whatever_the_names_each_file_is_found_and_no_other(paths: list[str], others: list[str], parts: int) -> None:
    entries = {path: entry(path) for path in paths}
    whole = list(entries.values())
    blocks = [block for number in range(parts) for block in Block.pack(whole[number::parts], stable=True)]
    files = Manifest(SnapshotHeader.model_construct(), tuple(Block.read(block.packed, stable=True) for block in blocks))
    for path in [*reversed(paths), *others]:
        assert files.find(path) == entries.get(path)
