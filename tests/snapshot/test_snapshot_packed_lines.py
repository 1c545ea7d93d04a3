"""Finding lines of a large snapshot among packed ones: whatever the order, and with few of them unpacked."""

import gzip
import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.snapshot import packed_lines
from dagster_ckpt.snapshot.entries import AFTER_DIGEST, FileEntry
from dagster_ckpt.snapshot.packed_lines import PackedLines, unpacked

FILES = 3_000
PACKED_BYTES = 4_096
Pack = Callable[[Sequence[bytes]], bytes]


def line(path: str, digest: int | None = None) -> bytes:
    of_its_own = random.Random(path).getrandbits(256) if digest is None else digest
    return FileEntry(f"{of_its_own:064x}", path, 7, None, f"801.{path}", "a.pack", 0).line()


def in_one_member(lines: Sequence[bytes]) -> bytes:
    return gzip.compress(b"".join(each + b"\n" for each in lines))


def in_several_members(lines: Sequence[bytes]) -> bytes:
    return b"".join(in_one_member(lines[begin : begin + 700]) for begin in range(0, len(lines), 700))


def without_a_last_newline(lines: Sequence[bytes]) -> bytes:
    return gzip.compress(b"\n".join(lines))


pack = pytest.mark.parametrize("pack", [in_one_member, in_several_members, without_a_last_newline])
LINES = [line(f"state/0/{number // 100}/{number % 100}.changelog") for number in range(FILES)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces are small; how often one was unpacked is counted here."""
    counted: list[int] = []
    read_on = packed_lines._Place.read_on

    def counting(place: packed_lines._Place, packed: memoryview) -> list[bytes]:
        counted.append(place.position)
        return read_on(place, packed)

    monkeypatch.setattr(packed_lines, "_PACKED_AT_A_TIME", PACKED_BYTES)
    monkeypatch.setattr(packed_lines._Place, "read_on", counting)
    return counted


def starts(lines: Sequence[bytes]) -> list[bytes]:
    return [each[AFTER_DIGEST:-1] for each in lines]


@pack
def test_packed_lines_are_unpacked_piece_by_piece(pack: Pack, reads: list[int]) -> None:
    pieces = list(unpacked(pack(LINES)))
    assert [each for piece in pieces for each in piece] == LINES
    assert len(pieces) == len(reads) > 10


@pack
def test_lines_in_the_order_of_the_list_are_found_with_each_piece_unpacked_twice(pack: Pack, reads: list[int]) -> None:
    lines = PackedLines(pack(LINES))
    assert [lines.find(start) for start in starts(LINES)] == LINES
    # Once to see where they are; two names may look alike in what is remembered of them, hardly ever.
    assert len(reads) < 2 * len(set(reads)) + 10


@pack
def test_lines_are_found_in_any_order_and_no_piece_is_unpacked_for_each_of_them(pack: Pack, reads: list[int]) -> None:
    lines = PackedLines(pack(LINES))
    shuffled = random.Random(1).sample(LINES, FILES)
    assert [lines.find(start) for start in starts(shuffled)] == shuffled
    assert len(reads) < (packed_lines._TOO_OFTEN + 2) * len(set(reads)) < FILES


@pack
def test_several_threads_find_the_same(pack: Pack, reads: list[int]) -> None:
    lines = PackedLines(pack(LINES))
    orders = [LINES, LINES[::-1], random.Random(1).sample(LINES, FILES)]
    with ThreadPoolExecutor(len(orders)) as pool:
        found = pool.map(lambda order: [lines.find(start) for start in starts(order)], orders)
    assert list(found) == orders


def test_what_is_not_there_is_not_found_and_nothing_is_unpacked_for_it(reads: list[int]) -> None:
    lines = PackedLines(in_one_member(LINES))
    assert lines.find(b'"state/0/0/0.changelog",8,') is None
    known = len(reads)
    assert [lines.find(f'"state/0/{number}/other",'.encode()) for number in range(FILES)] == [None] * FILES
    assert len(reads) < known + 10


def test_a_line_is_found_by_the_digest_of_its_content() -> None:
    lines = [*LINES, line("one", 5), line("two", 5)]
    finder = PackedLines(in_one_member(lines))
    assert all(finder.with_digest(each[2:66].decode()) == each for each in LINES)
    assert finder.with_digest(f"{5:064x}") == line("one", 5)
    assert finder.with_digest(f"{6:064x}") is None


def test_of_no_lines_none_is_found() -> None:
    assert PackedLines(b"").find(b'"a",') is None
    assert PackedLines(gzip.compress(b"")).with_digest("0" * 64) is None


@pytest.mark.parametrize("length", [10, PACKED_BYTES, 2 * PACKED_BYTES + 1, -1])
def test_a_list_that_breaks_off_is_refused(reads: list[int], length: int) -> None:
    with pytest.raises(EOFError, match="breaks off"):
        list(unpacked(in_one_member(LINES)[:length]))


def test_lines_are_found_with_a_fraction_of_them_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_lines, "_PACKED_AT_A_TIME", 16 * PACKED_BYTES)
    many = [line(f"state/0/{number // 100}/{number % 100}.changelog") for number in range(20_000)]
    wanted, packed = starts(many), in_one_member(many)
    tracemalloc.start()
    try:
        lines = PackedLines(packed)
        assert all(lines.find(start) is not None for start in wanted)
        kept, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < sum(map(sys.getsizeof, many)) / 2


@given(
    paths=st.lists(st.text(st.sampled_from('ab/",\\ü\n'), min_size=1, max_size=6), unique=True, max_size=40),
    others=st.lists(st.text(st.sampled_from('ab/",\\ü\n'), min_size=1, max_size=6), max_size=40),
    members=st.integers(1, 3),
)
def test_whatever_the_names_each_line_is_found_and_no_other(paths: list[str], others: list[str], members: int) -> None:
    lines = {path: line(path) for path in paths}
    whole = list(lines.values())
    finder = PackedLines(b"".join(in_one_member(whole[number::members]) for number in range(members)))
    for path in [*reversed(paths), *others]:
        start = line(path)[AFTER_DIGEST:]
        assert finder.find(start) == lines.get(path)
