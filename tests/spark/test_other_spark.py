"""The child process in which another Spark rewrites state, with programs in its place that need no Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock, patch

import pytest

from dagster_ckpt.errors import OptionError, StateRewriteError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state import rewriter as rewriters
from dagster_ckpt.state.diff import Change
from dagster_ckpt.state.editing import EditedRows, StateEdit, edit_rows
from dagster_ckpt.state.reading import OF_CONDITIONS, StateName
from dagster_ckpt.state.rewriter import (
    VARIABLE,
    Rewriter,
    install_rewriter,
    installed_place,
    rewrite_elsewhere,
    rewriter_for,
)
from dagster_ckpt.state.stopped_state import StateShape
from tests.support.golden_stream import GoldenStream

if TYPE_CHECKING:
    from pyspark.sql import Column

SHAPE = StateShape("provider", 12, 1)


def rewriter(folder: Path, program: str) -> Rewriter:
    """A rewriter whose interpreter runs a program."""
    file = folder / "interpreter"
    file.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\norder = json.loads(sys.stdin.readline())\n{program}"
    )
    file.chmod(0o755)
    return Rewriter(file)


def rewritten(
    by: Rewriter, folder: Path, *, watch: object = lambda: None, report: object = lambda _message: None
) -> Mapping[str, Any]:
    source, target = LiveDirectory(f"{folder}/source"), LiveDirectory(f"{folder}/target")
    with patch.object(rewriters, "settings_of", return_value={"a": "b"}):
        return rewrite_elsewhere(by, Session(), source, target, SHAPE, watch=watch, report=report)  # type: ignore[arg-type]


def test_progress_and_result_are_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    program = """
print("a warning of Spark")
print(json.dumps({"progress": json.dumps(order, sort_keys=True)}))
print(json.dumps({"rewrite_id": "id", "batch_id": 7, "stores": [[0, "dedupe", "default", 3, 99]]}))
"""
    made = rewritten(rewriter(tmp_path, program), tmp_path, report=said.append)
    assert made == {"rewrite_id": "id", "batch_id": 7, "stores": [[0, "dedupe", "default", 3, 99]]}
    assert json.loads(said[0]) == {
        "settings": {"a": "b"},
        "shape": ["provider", 12, 1],
        "source": f"{tmp_path}/source",
        "target": f"{tmp_path}/target",
    }
    assert "a warning of Spark" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print(json.dumps({'error': 'the batch is incomplete'}))", "the batch is incomplete"),
        ("sys.exit(3)", "ended with status 3 before it was done"),
        ("os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
    ids=["error", "exit", "kill"],
)
def test_what_a_failed_rewriter_has_written_is_deleted(tmp_path: Path, program: str, message: str) -> None:
    written = f"os.makedirs({str(tmp_path / 'target/state')!r})\n{program}"
    with pytest.raises(StateRewriteError, match=message):
        rewritten(rewriter(tmp_path, written), tmp_path)
    assert not (tmp_path / "target").exists()


def test_an_edit_is_passed_on_as_sql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GoldenStream(tmp_path).make()
    program = """
print(json.dumps({"progress": json.dumps(order)}))
name = [0, "stateStoreSave", "default", 3]
print(json.dumps({"rewrite_id": "id", "batch_id": 4, "changes": [[name, {"REMOVED": 1}]], "skipped": [name]}))
"""
    monkeypatch.setenv(VARIABLE, str(rewriter(tmp_path, program).place))
    session = Mock(version="4.1.4")
    session.sql.return_value.collect.return_value = []
    session.conf.get.side_effect = {name: name.upper() for name in OF_CONDITIONS}.__getitem__
    said: list[str] = []
    places = LiveDirectory(golden.live_url), LiveDirectory(f"{tmp_path}/edited")
    edit = StateEdit("stateStoreSave", forget="k = 2")

    done = edit_rows(session, *places, [edit], report=said.append)

    name = StateName(0, "stateStoreSave", "default", 3)
    assert done == EditedRows("id", 4, {name: {Change.REMOVED: 1}}, (name,))
    order = json.loads(said[-1])
    assert order["edits"] == [["stateStoreSave", "k = 2", None]]
    # A condition means the same as in the session.
    assert order["settings"] == {name: name.upper() for name in OF_CONDITIONS}
    with pytest.raises(UnsupportedSparkError, match="Give it as SQL"):
        edit_rows(session, *places, [StateEdit(forget=cast("Column", object()))])
    wrong = "print(json.dumps({'error': 'no operator 3', 'kind': 'OptionError'}))"
    monkeypatch.setenv(VARIABLE, str(rewriter(tmp_path, wrong).place))
    with pytest.raises(OptionError, match="no operator 3"):
        edit_rows(session, *places, [edit])
    golden.close()


def test_a_canceled_rewrite_ends_the_child_and_what_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"""
child = os.fork()
if child == 0:
    time.sleep(600)
open({str(pid)!r}, "w").write(str(child))
print(json.dumps({{"progress": "writing"}}), flush=True)
time.sleep(600)
"""
    said: list[str] = []

    def watch() -> None:
        if said:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewritten(rewriter(tmp_path, program), tmp_path, watch=watch, report=said.append)
    assert_ended(int(pid.read_text()))


def assert_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} still runs")


def test_the_named_rewriter_comes_before_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Rewriter.find() is None
    installed = tmp_path / "dagster_ckpt/rewriter"
    installed.mkdir(parents=True)
    assert Rewriter.find() == Rewriter(installed)
    monkeypatch.setenv(VARIABLE, "/opt/rewriter")
    assert Rewriter.find() == Rewriter(Path("/opt/rewriter"))


def test_a_folder_comes_before_the_spark_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/spark/python")
    for name in ("SPARK_HOME", "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"):
        monkeypatch.setenv(name, "of this Spark")
    found = Rewriter(tmp_path)
    environment = found.environment()
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path)
    assert paths[-1] == "/spark/python"
    assert not {"SPARK_HOME", "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"} & set(environment)
    assert found.command()[0] == environment["PYSPARK_PYTHON"] == sys.executable


class Session:
    """A session of a Spark that cannot rewrite state."""

    version = "3.5.9"


@pytest.mark.parametrize(
    ("is_classic", "what"),
    [(True, r"has Spark 3\.5\.9"), (False, "is a client of Spark Connect")],
    ids=["old", "connect"],
)
def test_without_a_rewriter_a_refusal_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_classic: bool, what: str
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(rewriters, "is_classic_session", lambda _: is_classic)
    with pytest.raises(UnsupportedSparkError, match=rf"{what}\. .* `dagster-ckpt rewriter install`"):
        rewriter_for(Session())  # type: ignore[arg-type]
    (tmp_path / "dagster_ckpt/rewriter").mkdir(parents=True)
    assert rewriter_for(Session()) == Rewriter(tmp_path / "dagster_ckpt/rewriter")  # type: ignore[arg-type]


def test_an_installation_is_found_once_it_is_whole_and_a_failed_one_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    release, status, seen = "4.3.0", 0, []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(Rewriter.find())
        whole = Path(command[command.index("--target") + 1])
        whole.mkdir()
        (whole / "release").write_text(release)
        return subprocess.CompletedProcess(command, status, "", "no such index")

    monkeypatch.setattr(rewriters.subprocess, "run", pip)
    assert install_rewriter(print) == installed_place()
    release, status = "4.3.1", 1
    with pytest.raises(StateRewriteError, match="no such index"):
        install_rewriter(print)
    assert (installed_place() / "release").read_text() == "4.3.0"
    status = 0
    install_rewriter(print)
    assert (installed_place() / "release").read_text() == "4.3.1"
    assert seen == [None, Rewriter(installed_place()), Rewriter(installed_place())]
    assert [each.name for each in installed_place().parent.iterdir()] == ["rewriter"]
