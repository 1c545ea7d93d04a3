"""Hard links from other directory trees into a new one."""

from pathlib import Path

import pytest

from dagster_ckpt.spark.linking import Linker
from dagster_ckpt.spark.local_folder import LocalFolder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = LocalFolder(tmp_path / "old")
    for path in ("metadata", "state/0/1/SSTs/a.sst", "state/0/1/2.changelog"):
        folder.write(path, [path.encode()])
    return folder.root


def test_a_linked_file_is_the_same_file_in_directories_made_for_it(tree: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "live"
    linker = Linker(new)
    for path in ("state/0/1/SSTs/a.sst", "state/0/1/2.changelog", "metadata"):
        assert linker.link(str(tree), path, path)
        assert (new / path).samefile(tree / path)
        assert linker.version(str(tree), path) == linker.linked_version(path)
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


def test_no_directory_stays_open(tree: Path, tmp_path: Path) -> None:
    def held_open() -> list[str]:
        return [str(link) for fd in Path("/proc/self/fd").iterdir() if tmp_path in (link := fd.resolve()).parents]

    linker = Linker(tmp_path / "new")
    linker.link(str(tree), "metadata", "metadata")
    assert sorted(held_open()) == [str(tmp_path / "new"), str(tree)]
    linker.close()
    assert held_open() == []
