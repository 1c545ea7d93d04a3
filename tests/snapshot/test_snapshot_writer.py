"""docs/snapshot-format.md, section 4: what is written, what is shared, and in which order."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_ckpt.errors import (
    IncompleteCutError,
    SnapshotAbortedError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StorageAccessError,
)
from dagster_ckpt.io.custom import FolderFileIO
from dagster_ckpt.io.file_io import FileIO, no_op
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot import entries as entries_module
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.packs import CHUNK_BYTES, Threads
from dagster_ckpt.snapshot.reader import extract, read_metadata, verify_snapshot
from dagster_ckpt.snapshot.reuse import BaseSnapshot, SourceFile
from dagster_ckpt.snapshot.writer import WriteOptions, WrittenSnapshot, write_snapshot

MakeHeader = Callable[[int], SnapshotHeader]
SHARED = WriteOptions(inline_threshold=10, object_prefix="../shared/")


def restored(space: FileIO, directory: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}

    def write(entry: FileEntry, chunks: Iterable[bytes]) -> None:
        files[entry.path] = b"".join(chunks)

    extract(space, directory, write)
    return files


@pytest.fixture(params=[1024, 2], ids=["one block", "many blocks"], autouse=True)
def block_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "BLOCK_FILES", request.param)


def base_of(space: MemoryFileIO, written: WrittenSnapshot) -> BaseSnapshot:
    return BaseSnapshot(written.metadata, space, f"chk-{written.metadata.manifest.header.number}")


@pytest.fixture
def write(space: MemoryFileIO, header: MakeHeader) -> Callable[..., WrittenSnapshot]:
    def _write(
        number: int, files: list[SourceFile], base: WrittenSnapshot | None = None, options: WriteOptions = SHARED
    ) -> WrittenSnapshot:
        shared = base_of(space, base) if base is not None else None
        return write_snapshot(space, f"chk-{number}", header(number), files, options=options, base=shared)

    return _write


def test_a_snapshot_gives_back_what_was_put_in(space, write, content) -> None:
    files = {"a": b"", "b/c": b"small", "d": b"x" * 100, "e": bytes(3 * 1024 * 1024)}
    written = write(1, [content(data).file(path) for path, data in files.items()])
    assert restored(space, "chk-1") == files
    assert verify_snapshot(space, "chk-1") == []
    assert written.metadata.manifest.full_bytes == sum(map(len, files.values()))
    assert read_metadata(space, "chk-1").manifest == written.metadata.manifest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    snapshots=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=40), max_size=6), min_size=1, max_size=4
    ),
    options=st.builds(
        WriteOptions,
        inline_threshold=st.sampled_from([None, 0, 10, 100]),
        inline_limit_bytes=st.sampled_from([0, 15, 1000]),
        pack_target_bytes=st.sampled_from([1, 30, 1000]),
        object_prefix=st.just("../shared/"),
    ),
)
def test_a_chain_of_snapshots_gives_back_each_of_them(header, content, snapshots, options) -> None:
    space = MemoryFileIO("memory://stream")
    base = None
    for number, files in enumerate(snapshots):
        sources = [content(data).file(path) for path, data in files.items()]
        written = write_snapshot(space, f"chk-{number}", header(number), sources, options=options, base=base)
        base = base_of(space, written)
    assert [restored(space, f"chk-{number}") for number in range(len(snapshots))] == snapshots


def test_a_file_of_known_identity_is_not_even_opened(write, content) -> None:
    sst = content(b"s" * 100)
    first = write(1, [sst.file("state/1.sst", identity="1-uuid")])
    opened = sst.opened
    second = write(2, [sst.file("state/1.sst", identity="1-uuid")], first)
    assert sst.opened == opened
    assert second.new_objects == ()
    assert second.metadata.manifest.objects == first.metadata.manifest.objects


def test_equal_content_is_stored_once_even_under_another_name(write, content) -> None:
    first = write(1, [content(b"v" * 100).file("1.delta")])
    second = write(2, [content(b"v" * 100).file("1.delta"), content(b"v" * 100).file("2.delta")], first)
    assert second.new_objects == ()
    assert {entry.object for entry in second.metadata.manifest.files} == first.metadata.manifest.objects


def test_a_replaced_file_of_the_same_name_and_size_is_written(space, write, content) -> None:
    first = write(1, [content(b"a" * 2_000_000).file("1.zip")])
    write(2, [content(b"b" * 2_000_000).file("1.zip")], first)
    assert restored(space, "chk-1") == {"1.zip": b"a" * 2_000_000}
    assert restored(space, "chk-2") == {"1.zip": b"b" * 2_000_000}


def test_an_identity_of_another_size_is_not_believed(space, write, content) -> None:
    first = write(1, [content(b"a" * 50).file("x", identity="id")])
    write(2, [content(b"b" * 60).file("x", identity="id")], first)
    assert restored(space, "chk-2") == {"x": b"b" * 60}


def test_small_files_need_no_object_until_they_add_up(write, content) -> None:
    options = WriteOptions(inline_threshold=10, inline_limit_bytes=15)
    written = write(1, [content(bytes([n]) * 9).file(str(n)) for n in range(3)], None, options)
    assert {entry.path: entry.object is None for entry in written.metadata.manifest.files} == {
        "0": True,
        "1": False,
        "2": False,
    }
    assert len(written.new_objects) == 1


def test_an_empty_file_needs_no_object_whatever_the_threshold(write, content) -> None:
    written = write(1, [content(b"").file("a")], None, WriteOptions(inline_threshold=0))
    assert written.new_objects == ()


def test_a_file_above_the_target_is_an_object_of_its_own_and_never_split(write, content) -> None:
    options = WriteOptions(inline_threshold=0, pack_target_bytes=100)
    sizes = [40, 40, 250, 40, 60]
    written = write(1, [content(bytes([n]) * size).file(str(n)) for n, size in enumerate(sizes)], None, options)
    packs = [entry.object for entry in written.metadata.manifest.files]
    assert packs[0] == packs[1] != packs[2] != packs[3] == packs[4]
    assert len(written.new_objects) == 3


@pytest.mark.parametrize(("size", "objects"), [(90, 1), (190, 2), (270, 3)])
def test_a_few_data_objects_are_stored_beside_each_other(
    space, header, content, monkeypatch, size: int, objects: int
) -> None:
    stored = threading.Barrier(objects, timeout=20)
    create = space.create

    @contextmanager
    def stored_together(path: str) -> Iterator[BinaryIO]:
        with create(path) as stream:
            yield stream
            stored.wait()

    monkeypatch.setattr(space, "create", stored_together)
    options = replace(SHARED, pack_least_bytes=100, inline_threshold=0)
    files = [content(bytes([number]) * 10).file(f"{number:02}") for number in range(size // 10)]
    written = write_snapshot(space, "chk-1", header(1), files, options=options, runner=Threads(3))
    assert len(written.new_objects) == objects
    assert restored(space, "chk-1") == {file.path: bytes([number]) * 10 for number, file in enumerate(files)}


def test_damage_to_the_base_does_not_spread(space, write, content) -> None:
    sst = content(b"s" * 100)
    first = write(1, [sst.file("a", identity="id")])
    (pack,) = first.new_objects
    space.write(pack.removeprefix("../"), [b"s" * 99])
    write(2, [sst.file("a", identity="id")], first)
    assert verify_snapshot(space, "chk-1") != []
    assert restored(space, "chk-2") == {"a": b"s" * 100}


def test_an_object_that_is_hardly_used_any_more_is_given_up(write, content) -> None:
    survivor = content(b"s" * 20)
    first = write(1, [survivor.file("a", identity="a"), content(b"x" * 100).file("b")])
    second = write(2, [survivor.file("a", identity="a")], first)
    assert second.metadata.manifest.uses[first.new_objects[0]].used == 20
    third = write(3, [survivor.file("a", identity="a")], second)
    assert not third.metadata.manifest.objects & first.metadata.manifest.objects


def test_a_snapshot_that_extends_another_has_all_its_stable_files(space, header, content) -> None:
    def file(name: str, size: int, *, stable: bool = True) -> SourceFile:
        return replace(content(name.encode() * size).file(name), stable=stable)

    first = write_snapshot(
        space, "chk-1", header(1), [file("a", 100), file("b", 3), file("c", 5, stable=False)], options=SHARED
    )
    base = base_of(space, first)
    assert base.can_be_extended
    files = [file("d", 200), file("c", 7, stable=False)]
    second = write_snapshot(space, "chk-2", header(2), files, options=SHARED, base=base, extends=True)
    assert restored(space, "chk-2") == {"a": b"a" * 100, "b": b"bbb", "c": b"c" * 7, "d": b"d" * 200}
    third = write_snapshot(
        space, "chk-3", header(3), [file("e", 4)], options=SHARED, base=base_of(space, second), extends=True
    )
    assert restored(space, "chk-3") == {"a": b"a" * 100, "b": b"bbb", "d": b"d" * 200, "e": b"eeee"}
    assert third.new_objects == ()
    # Read back from storage it can be extended as well.
    read = BaseSnapshot(read_metadata(space, "chk-3"), space, "chk-3")
    assert read.can_be_extended
    write_snapshot(space, "chk-4", header(4), [file("f", 1)], options=SHARED, base=read, extends=True)
    assert restored(space, "chk-4") == restored(space, "chk-3") | {"f": b"f"}


def test_small_state_lies_beside_large_state_and_logs_in_the_metadata(space, header, content) -> None:
    def file(name: str, size: int, *, stable: bool) -> SourceFile:
        return replace(content(name.encode() * size).file(name), stable=stable)

    files = [file("offsets", 1, stable=False), file("small", 1, stable=True), file("large", 10, stable=True)]
    mixed = write_snapshot(space, "chk-1", header(1), files, options=SHARED)
    assert {entry.path for entry in mixed.metadata.manifest.files if entry.object is None} == {"offsets"}
    assert len(mixed.new_objects) == 1
    small = write_snapshot(space, "chk-2", header(2), files[:2], options=SHARED)
    assert small.new_objects == ()


def test_logs_that_stay_as_they_were_are_inlined_once(space, header, content) -> None:
    def logs() -> list[SourceFile]:
        return [content(b"log").file("sources/0/1"), content(b"v1").file("commits/1", identity="v1")]

    stable = replace(content(b"state").file("state"), stable=True)
    first = write_snapshot(space, "chk-1", header(1), [*logs(), stable], options=SHARED)
    second = write_snapshot(space, "chk-2", header(2), logs(), options=SHARED, base=base_of(space, first), extends=True)
    assert second.metadata.inline == first.metadata.inline
    assert restored(space, "chk-2") == restored(space, "chk-1")


@pytest.mark.parametrize("wrong", [5, 99, 101, 2_000_000])
def test_a_file_that_changed_while_it_was_read_is_refused(space, write, content, wrong) -> None:
    with pytest.raises(IncompleteCutError, match=r"state/x .*changed in the meantime"):
        write(1, [content(b"k" * 50).file("kept"), content(b"x" * 100).file("state/x", size=wrong)])
    assert space.list("") == {}


def test_a_file_that_vanished_is_named(space, write) -> None:
    def gone() -> None:
        raise FileNotFoundError("state/x")

    with pytest.raises(IncompleteCutError, match="state/x vanished"):
        write(1, [SourceFile("state/x", 5, None, gone)])
    assert space.list("") == {}


def test_giving_up_leaves_nothing(space, header, content) -> None:
    # So large that each is taken alone.
    files = [content(bytes([n]) * 200_000).file(str(n)) for n in range(3)]
    answers = iter([False, False, True])
    with pytest.raises(SnapshotAbortedError, match="chk-1 was aborted"):
        write_snapshot(space, "chk-1", header(1), files, options=SHARED, should_abort=lambda: next(answers))
    assert space.list("") == {}


def test_a_snapshot_is_never_overwritten(space, write, content) -> None:
    write(1, [content(b"a" * 50).file("x")])
    with pytest.raises(StorageAccessError, match="never overwritten"):
        write(1, [content(b"b" * 50).file("x")])
    assert restored(space, "chk-1") == {"x": b"a" * 50}


def test_of_two_snapshots_with_one_number_the_first_one_is_kept_whole(space, header, content) -> None:
    class OvertakenSpace(FolderFileIO):
        def write(self, path: str, chunks: Iterable[bytes], **options: Any) -> None:
            if not space.size("stream/chk-1/_metadata"):
                write_snapshot(first, "chk-1", header(1), [content(b"a" * 50).file("x")], options=SHARED)
            super().write(path, chunks, **options)

    first = FolderFileIO(space, "stream")
    with pytest.raises(StorageAccessError, match=r"chk-1 contains a snapshot already.*another deployment"):
        write_snapshot(
            OvertakenSpace(space, "stream"), "chk-1", header(1), [content(b"b" * 50).file("x")], options=SHARED
        )
    assert restored(first, "chk-1") == {"x": b"a" * 50}
    assert len(first.list("shared")) == 1


def test_a_snapshot_that_became_visible_although_the_put_failed_keeps_its_objects(header, content) -> None:
    class LateSpace(MemoryFileIO):
        def write(
            self,
            path: str,
            chunks: Iterable[bytes],
            *,
            replace: bool = True,
            before_visible: Callable[[], None] = no_op,
        ) -> None:
            super().write(path, chunks, replace=replace, before_visible=before_visible)
            if path.endswith("_metadata"):
                raise StorageAccessError("time-out")

    space = LateSpace("memory://stream")
    with pytest.raises(StorageAccessError, match="time-out"):
        write_snapshot(space, "chk-1", header(1), [content(b"a" * 50).file("x")], options=SHARED)
    assert restored(space, "chk-1") == {"x": b"a" * 50}


def test_the_metadata_is_made_meanwhile_and_visible_once_the_data_is_durable(header, content) -> None:
    is_made, seen = threading.Event(), []

    class SlowSpace(MemoryFileIO):
        @contextmanager
        def create(self, path: str) -> Iterator[BinaryIO]:
            with super().create(path) as stream:
                yield stream
                assert is_made.wait(60)
                seen.append(self.size("chk-1/_metadata"))

        def write(
            self,
            path: str,
            chunks: Iterable[bytes],
            *,
            replace: bool = True,
            before_visible: Callable[[], None] = no_op,
        ) -> None:
            if path.endswith("_metadata"):
                is_made.set()
            super().write(path, chunks, replace=replace, before_visible=before_visible)

    space = SlowSpace("memory://stream")
    write_snapshot(space, "chk-1", header(1), [content(b"a" * 50).file("x")], options=SHARED)
    assert seen == [None]
    assert restored(space, "chk-1") == {"x": b"a" * 50}


def test_without_a_thread_to_be_had_a_snapshot_is_written_all_the_same(space, header, content, monkeypatch) -> None:
    def none_left(*_arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", none_left)
    write_snapshot(space, "chk-1", header(1), [content(b"a" * 50).file("x")], options=SHARED)
    assert restored(space, "chk-1") == {"x": b"a" * 50}


def test_where_nobody_can_tell_whether_it_became_visible_nothing_is_removed(header, content) -> None:
    class SilentSpace(MemoryFileIO):
        cut_off = False

        def write(
            self,
            path: str,
            chunks: Iterable[bytes],
            *,
            replace: bool = True,
            before_visible: Callable[[], None] = no_op,
        ) -> None:
            before_visible()
            self.cut_off = path.endswith("_metadata")
            if self.cut_off:
                raise StorageAccessError("time-out")
            super().write(path, chunks)

        def size(self, path: str) -> int | None:
            if self.cut_off:
                raise StorageAccessError("unreachable")
            return super().size(path)

    space = SilentSpace("memory://stream")
    with pytest.raises(StorageAccessError, match="time-out"):
        write_snapshot(space, "chk-1", header(1), [content(b"a" * 50).file("x")], options=SHARED)
    assert len(space.list("shared")) == 1


def test_verification_names_every_file_that_is_wrong(space, write, content) -> None:
    written = write(1, [content(bytes([n]) * 100).file(f"f{n}") for n in range(3)])
    (pack,) = written.new_objects
    name = pack.removeprefix("../")
    data = bytearray(space.read(name))
    data[50] ^= 1
    data[250] ^= 1
    space.write(name, [bytes(data)])
    problems = verify_snapshot(space, "chk-1")
    assert ["f0" in problems[0], "f2" in problems[1], len(problems)] == [True, True, 2]
    assert verify_snapshot(space, "chk-1", deep=False) == []
    with pytest.raises(SnapshotCorruptError, match=r"f0 .*altered"):
        restored(space, "chk-1")


@pytest.mark.parametrize(("left", "said"), [(None, "is missing"), (150, "has 150 bytes, 200 are needed")])
def test_verification_tells_missing_and_short_objects(space, write, content, left, said) -> None:
    written = write(1, [content(bytes([n]) * 100).file(f"f{n}") for n in range(2)])
    name = written.new_objects[0].removeprefix("../")
    data = space.read(name)
    space.delete(name)
    if left is not None:
        space.write(name, [data[:left]])
    assert [said in problem for problem in verify_snapshot(space, "chk-1", deep=False)] == [True]
    with pytest.raises(SnapshotCorruptError, match=r"missing|truncated"):
        restored(space, "chk-1")


def test_an_unfinished_snapshot_is_no_snapshot(space) -> None:
    with pytest.raises(SnapshotNotFoundError, match="There is no snapshot at memory://stream/chk-9"):
        read_metadata(space, "chk-9")
    (problem,) = verify_snapshot(space, "chk-9")
    assert "There is no snapshot" in problem


def test_large_files_are_read_in_chunks(write, content) -> None:
    sizes: list[int] = []
    data = content(b"z" * (2 * CHUNK_BYTES + 7))

    class Watched:
        def __init__(self) -> None:
            self.stream = data.open()

        def __enter__(self):
            return self

        def __exit__(self, *details: object) -> None:
            self.stream.close()

        def read(self, size: int) -> bytes:
            sizes.append(size)
            return self.stream.read(size)

    write(1, [SourceFile("big", len(data.data), None, Watched)])
    assert max(sizes) == CHUNK_BYTES
