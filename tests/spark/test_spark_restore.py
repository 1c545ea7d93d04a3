import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from blake3 import blake3
from live_files import LiveFiles

from dagster_ckpt.errors import NothingCommittedError, RestoreError
from dagster_ckpt.io.fsspec import FsspecFileIO
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, DonorCheck, Filler, clone, materialize

Write = Callable[[str, Iterable[bytes]], None]


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    made = LiveFiles(tmp_path / "live-0")
    made.batches(1)
    made.operator()
    made.put("state/0/0/1.delta", b"one")
    made.put("state/0/0/2.delta", b"two")
    return made


@pytest.fixture
def target(tmp_path: Path) -> LiveDirectory:
    return LiveDirectory(str(tmp_path / "live-1"))


def snapshot(files: LiveFiles, *, without: str = "") -> Callable[[Write], None]:
    taken = cut(files.live, carry_in_flight=True)

    def fill(write: Write) -> None:
        for file in taken.files:
            if file.path != without:
                write(file.path, [file.open().read()])

    return fill


def test_a_resumed_query_keeps_its_id(files: LiveFiles, target: LiveDirectory) -> None:
    made = materialize(target, snapshot(files))

    assert (made.batch_id, made.query_id) == (1, "11111111-2222")
    assert inspect_live_directory(target).status is LiveStatus.GOOD


def test_a_fork_gets_an_id_of_its_own(files: LiveFiles, target: LiveDirectory) -> None:
    made = materialize(target, snapshot(files), new_query_id="33333333")

    assert made.query_id == "33333333"
    assert json.loads(target.folder.read("metadata")) == {"id": "33333333"}


def test_the_log_of_a_sink_is_handed_back_and_not_put_into_the_directory(
    files: LiveFiles, target: LiveDirectory
) -> None:
    fill = snapshot(files)

    def with_sinks(write: Write) -> None:
        fill(write)
        write("sinks/1/9.compact", [b"v1\n", b"a"])
        write("sinks/1/10", [b"v1\nb"])

    made = materialize(target, with_sinks)

    assert {i: [(e.name, e.data) for e in sink] for i, sink in made.sinks.items()} == {
        1: [("9.compact", b"v1\na"), ("10", b"v1\nb")]
    }
    assert "sinks" not in target.folder.list()


def test_a_snapshot_that_misses_a_file_leaves_nothing_behind(
    files: LiveFiles, target: LiveDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RestoreError, match=r"2\.delta is missing"):
        materialize(target, snapshot(files, without="state/0/0/2.delta"))

    assert [path.name for path in tmp_path.iterdir()] == ["live-0"]


def test_what_a_killed_restore_left_is_replaced(files: LiveFiles, target: LiveDirectory) -> None:
    target.sibling(".partial").folder.write("state/9/0/1.delta", [b"old"])

    materialize(target, snapshot(files))

    assert sorted(target.folder.list("state")) == ["0"]


def test_a_directory_that_is_there_is_never_overwritten(files: LiveFiles) -> None:
    with pytest.raises(RestoreError, match="exists already"):
        materialize(files.live, snapshot(files))

    assert inspect_live_directory(files.live).status is LiveStatus.GOOD


@pytest.mark.parametrize("path", ["../escaped", "/etc/escaped", "state/../../escaped"])
def test_a_path_that_leaves_the_directory_is_refused(target: LiveDirectory, path: str) -> None:
    with pytest.raises(RestoreError, match="outside of a live directory"):
        materialize(target, lambda write: write(path, [b"x"]))


def test_a_snapshot_is_restored_into_an_object_store(files: LiveFiles) -> None:
    target = LiveDirectory("memory://restored/live-1")

    materialize(target, snapshot(files))

    assert inspect_live_directory(target).batch_id == 1
    assert not target.sibling(".partial").exists()
    target.delete()


def test_a_restore_into_an_object_store_that_is_killed_leaves_nothing_to_resume_from(
    files: LiveFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LiveDirectory("memory://killed/live-1")
    written: list[tuple[str, Positions]] = []
    place = FsspecFileIO.place

    def noted(self: FsspecFileIO, path: str, chunks: Iterable[bytes]) -> None:
        written.append((path, LiveDirectory(target.url).positions()))
        place(self, path, chunks)

    monkeypatch.setattr(FsspecFileIO, "place", noted)
    # As a snapshot gives them: in the order of their names, or of their places in its data objects.
    materialize(target, snapshot(files))

    assert [path for path, _ in written][-3:] == ["offsets/0", "offsets/1", "commits/1"]
    assert {positions.commit for _, positions in written} == {None}
    assert target.positions() == Positions(1, 1)
    target.delete()


def test_a_clone_goes_on_at_the_same_point_without_copying_state(files: LiveFiles, target: LiveDirectory) -> None:
    files.offsets(2, '{"logOffset":2}')
    files.source_entry("2")

    made = clone(files.live, target)

    state = inspect_live_directory(target)
    assert (made.batch_id, state.batch_id, state.in_flight) == (1, 1, 2)
    assert (files.root / "state/0/0/2.delta").samefile(Path(target.url) / "state/0/0/2.delta")


def test_a_late_writer_of_the_original_does_not_reach_its_clone(files: LiveFiles, target: LiveDirectory) -> None:
    clone(files.live, target)

    files.live.folder.write("state/0/0/2.delta", [b"late"])

    assert target.folder.read("state/0/0/2.delta") == b"two"


def of_the_snapshot(files: LiveFiles, *paths: str) -> list[FileEntry]:
    """What a snapshot says of files as they are now."""
    found = [(path, files.live.folder.version(path), files.live.folder.read(path)) for path in paths]
    return [
        FileEntry(blake3(data).hexdigest(), path, size, None, token, None, 0) for path, (size, token), data in found
    ]


def flip_a_bit(path: Path) -> None:
    """As a disk does: no time and no length says so."""
    found, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_files_of_a_snapshot_are_linked_where_they_are_still_there_and_are_not_rewritten(
    files: LiveFiles, target: LiveDirectory
) -> None:
    given = snapshot(files)
    paths = ["metadata", "sinks/0/1", "state/0/0/1.delta", "state/0/0/2.delta", "state/0/_metadata/v2/0"]
    for path in paths[1:]:
        files.put(path, b"x")
    known = of_the_snapshot(files, *paths)
    unknown = known.pop(2)._replace(token=None)
    rest: list[str] = []

    def fill(filler: Filler) -> None:
        rest.extend(entry.path for entry in filler.link_unchanged([*known, unknown], Donor(files.live)))
        given(lambda path, chunks: None if path == "state/0/0/2.delta" else filler(path, chunks))

    materialize(target, fill, new_query_id="33333333", is_whole=True)

    assert sorted(rest) == ["metadata", "sinks/0/1", "state/0/0/1.delta", "state/0/_metadata/v2/0"]
    assert (files.root / "state/0/0/2.delta").samefile(Path(target.url) / "state/0/0/2.delta")
    assert "sinks" not in target.folder.list()


@pytest.mark.parametrize(
    ("check", "linked"),
    [(DonorCheck.DIGEST, ["state/0/0/a.sst"]), (DonorCheck.IDENTITY, ["state/0/0/a.sst", "state/0/0/b.sst"])],
)
def test_a_file_whose_content_was_altered_under_its_old_time_is_not_linked(
    files: LiveFiles, target: LiveDirectory, check: DonorCheck, linked: list[str]
) -> None:
    altered = ["offsets/1", "commits/1", "state/0/0/2.delta", "state/0/0/3.zip", "state/0/0/4.changelog"]
    for path in [*altered[2:], "state/0/0/a.sst", "state/0/0/b.sst"]:
        files.put(path, b"content")
    entries = of_the_snapshot(files, *altered, "state/0/0/a.sst", "state/0/0/b.sst")
    for path in (*altered, "state/0/0/b.sst"):
        flip_a_bit(files.root / path)

    filler = Filler(target.folder, target, None)
    rest = [entry.path for entry in filler.link_unchanged(entries, Donor(files.live, check))]
    filler.close()

    assert sorted(path for path, _ in target.folder.find()) == linked
    assert sorted([*rest, *linked]) == sorted(entry.path for entry in entries)


def test_a_large_state_file_is_compared_to_its_end(files: LiveFiles, target: LiveDirectory) -> None:
    files.put("state/0/0/large.sst", bytes(9 * 1024 * 1024))
    entries = of_the_snapshot(files, "state/0/0/large.sst")
    filler = Filler(target.folder, target, None)

    assert list(filler.link_unchanged(entries, Donor(files.live))) == []
    target.delete()
    path = files.root / "state/0/0/large.sst"
    found = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    filler.close()
    filler = Filler(target.folder, target, None)
    assert list(filler.link_unchanged(entries, Donor(files.live))) == entries
    filler.close()


def test_nothing_can_be_cloned_before_the_first_commit(tmp_path: Path, target: LiveDirectory) -> None:
    with pytest.raises(NothingCommittedError):
        clone(LiveDirectory(str(tmp_path / "none")), target)
