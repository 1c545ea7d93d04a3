import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from live_files import ROCKSDB, LiveFiles, snapshot_zip

from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.spark import LiveDirectory, StagedCut, cut, staged_cut


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    made = LiveFiles(tmp_path / "job" / "live-0")
    made.batches(1)
    made.operator()
    made.put("state/0/0/1.delta", b"one")
    made.put("state/0/0/2.delta", b"two")
    return made


def contents(staged: StagedCut) -> dict[str, bytes]:
    return {file.path: file.open().read() for file in staged.files}


def test_held_files_survive_a_purge(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        shutil.rmtree(files.root)

        held = contents(staged)

    assert held["state/0/0/2.delta"] == b"two"
    assert held["commits/1"].startswith(b"v1")


def test_held_files_are_links_and_cost_no_bytes(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False):
        assert (files.root / "state/0/0/2.delta").stat().st_nlink == 2


def test_held_files_do_not_change_when_spark_replaces_them(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        files.live.folder.write("state/0/0/2.delta", [b"replayed"])

        assert contents(staged)["state/0/0/2.delta"] == b"two"


def test_nothing_is_left_behind(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False):
        assert len(list(files.root.parent.iterdir())) == 2

    assert [path.name for path in files.root.parent.iterdir()] == ["live-0"]


@pytest.mark.parametrize("change", [b"other", None])
def test_a_file_that_changed_since_the_cut_is_noticed(files: LiveFiles, change: bytes | None) -> None:
    taken = cut(files.live, carry_in_flight=False)
    if change is None:
        files.remove("state/0/0/1.delta")
    else:
        files.live.folder.write("state/0/0/1.delta", [change])

    with pytest.raises(IncompleteCutError, match=r"1\.delta was (purged|replaced)"), StagedCut(taken, files.live):
        pass

    assert [path.name for path in files.root.parent.iterdir()] == ["live-0"]


def test_where_links_are_impossible_files_are_copied(files: LiveFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    with staged_cut(files.live, carry_in_flight=False) as staged:
        shutil.rmtree(files.root)

        assert contents(staged)["state/0/0/1.delta"] == b"one"


def test_what_a_killed_process_held_is_let_go_by_the_next(files: LiveFiles) -> None:
    script = (
        "import os, sys\n"
        "from dagster_ckpt.spark import LiveDirectory, staged_cut\n"
        "with staged_cut(LiveDirectory(sys.argv[1]), carry_in_flight=False):\n"
        "    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(files.root)], check=False)
    assert len(list(files.root.parent.iterdir())) == 2

    with staged_cut(files.live, carry_in_flight=False), staged_cut(files.live, carry_in_flight=False):
        assert len(list(files.root.parent.iterdir())) == 3


def test_in_an_object_store_only_files_that_may_change_are_copied(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path / "live-0")
    files.batches(1, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip(("000001-aa.sst", 3)))
    files.put("state/0/0/SSTs/000001-aa.sst", b"abc")
    files.put("state/0/0/2.changelog", b"log")
    memory = fsspec.filesystem("memory")
    memory.put(str(files.root), "/staging/live-0", recursive=True)
    live = LiveDirectory("memory://staging/live-0")

    with staged_cut(live, carry_in_flight=False) as staged:
        memory.rm("/staging/live-0/state/0/0/2.changelog")

        held = contents(staged)

    assert held["state/0/0/2.changelog"] == b"log"
    assert held["state/0/0/SSTs/000001-aa.sst"] == b"abc"
    assert {file.folder.url for file in staged.held if file.identity} == {"memory://staging/live-0"}
    live.delete()
    assert not live.exists()
