"""Hard links from other directory trees into a new one, of files whose content is known."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from dagster_ckpt.io.hard_links import Linker
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.snapshot.entries import FileEntry


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = LocalFileIO(tmp_path / "old")
    for path in ("metadata", "state/0/1/SSTs/a.sst", "state/0/1/2.changelog"):
        folder.write(path, [path.encode()])
    return folder.root


def test_a_linked_file_is_the_same_file_in_directories_made_for_it(tree: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "live"
    linker = Linker(new)
    for path in ("state/0/1/SSTs/a.sst", "state/0/1/2.changelog", "metadata"):
        assert linker.link(str(tree), path, path)
        assert (new / path).samefile(tree / path)
        assert LocalFileIO(tree).version(path) == linker.linked_version(path)
    linker.close()


def test_directories_that_are_there_are_used(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "new" / "state").mkdir(parents=True)
    linker = Linker(tmp_path / "new")
    assert linker.link(str(tree), "metadata", "state/0/metadata")
    linker.close()
    assert (tmp_path / "new" / "state" / "0" / "metadata").read_bytes() == b"metadata"


def test_a_file_that_is_not_there_is_told_from_one_that_cannot_be_linked(tree: Path, tmp_path: Path) -> None:
    linker = Linker(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        linker.link(str(tree), "gone", "gone")
    # A directory takes no second name.
    assert not linker.link(str(tree), "state", "state")
    linker.close()


def entries(tree: Path, *paths: str) -> list[FileEntry]:
    """What a snapshot says of files as they are now."""
    versions = {path: LocalFileIO(tree).version(path) for path in paths}
    return [FileEntry("0" * 64, path, *(size, None, token), None, 0) for path, (size, token) in versions.items()]


def test_files_that_are_still_those_of_a_snapshot_are_linked(tree: Path, tmp_path: Path) -> None:
    old = LocalFileIO(tree)
    same, replaced, gone = wanted = entries(tree, "metadata", "state/0/1/2.changelog", "state/0/1/SSTs/a.sst")
    # Of the same length, and of the same time.
    time_ns = (tree / replaced.path).stat().st_mtime_ns
    old.write(replaced.path, [replaced.path[::-1].encode()])
    os.utime(tree / replaced.path, ns=(time_ns, time_ns))
    old.delete(gone.path)

    linker = Linker(tmp_path / "new")
    assert linker.link_known(str(tmp_path / "none"), wanted, by_version=bool) == wanted
    assert linker.link_known(str(tree), wanted, by_version=bool) == [replaced, gone]
    linker.close()

    assert [path for path, _ in LocalFileIO(tmp_path / "new").find()] == [same.path]
    assert (tmp_path / "new" / same.path).samefile(tree / same.path)


def test_a_file_that_is_replaced_at_the_last_moment_is_not_taken(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = entries(tree, "metadata")
    link = os.link

    def replaced_first(source: str, target: str, **directories: int) -> None:
        LocalFileIO(tree).write("metadata", [b"metadata"])
        link(source, target, **directories)

    monkeypatch.setattr(os, "link", replaced_first)
    linker = Linker(tmp_path / "new")
    assert linker.link_known(str(tree), [file], by_version=bool) == [file]
    linker.close()

    assert not (tmp_path / "new" / "metadata").exists()


def test_many_directories_are_made_at_once(tmp_path: Path) -> None:
    tree = LocalFileIO(tmp_path / "old")
    paths = sorted(f"state/{operator}/{store}/SSTs/{store}.sst" for operator in range(2) for store in range(100))
    for path in paths:
        tree.write(path, [b""])

    linker = Linker(tmp_path / "new")
    assert linker.link_known(str(tree.root), entries(tree.root, *paths), by_version=bool) == []
    linker.close()

    assert sorted(path for path, _ in LocalFileIO(tmp_path / "new").find()) == paths


def test_no_directory_stays_open(tree: Path, tmp_path: Path) -> None:
    def held_open() -> list[str]:
        return [str(link) for fd in Path("/proc/self/fd").iterdir() if tmp_path in (link := fd.resolve()).parents]

    linker = Linker(tmp_path / "new")
    linker.link(str(tree), "metadata", "metadata")
    assert sorted(held_open()) == [str(tmp_path / "new"), str(tree)]
    linker.close()
    assert held_open() == []


@pytest.mark.parametrize("size", [0, 100, 3_000_000, 9_000_000])
def test_files_are_recognized_by_their_content(tmp_path: Path, size: int) -> None:
    tree, data = LocalFileIO(tmp_path / "old"), os.urandom(size)
    for name in ("same", "altered", "grown"):
        tree.write(f"d/{name}", [data])
    wanted = [
        entry._replace(digest=blake3(data).hexdigest())
        for entry in entries(tree.root, "d/same", "d/altered", "d/grown")
    ]
    for name, content in {"altered": data[:-1] + b"!", "grown": data + b"!"}.items():
        # As a disk error or a user does: the file stays the same one.
        with (tree.root / "d" / name).open("r+b") as file:
            file.write(content)

    linker = Linker(tmp_path / "new")
    left = linker.link_known(str(tree.root), wanted, by_version=lambda _: False)
    linker.close()

    assert {entry.path for entry in left} == {"d/altered", "d/grown"}
    assert [path for path, _ in LocalFileIO(tmp_path / "new").find()] == ["d/same"]


def test_a_watch_ends_the_comparison(tree: Path, tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("no longer the writer")

    linker = Linker(tmp_path / "new")
    with pytest.raises(RuntimeError, match="no longer the writer"):
        linker.link_known(str(tree), entries(tree, "metadata"), by_version=lambda _: False, watch=lost)
    linker.close()
