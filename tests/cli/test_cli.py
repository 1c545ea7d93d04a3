"""The command line, as a person at a terminal and a script use it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import click
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import update

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.catalog.tables import executions
from dagster_ckpt.cli.command import FAILED, PROBLEM_FOUND, Deployment
from dagster_ckpt.cli.lifecycle import _after_a_cancel
from dagster_ckpt.cli.main import commands
from dagster_ckpt.cli.output import print_table
from dagster_ckpt.client import Client
from dagster_ckpt.client.description import StreamStatus, StreamSummary
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.recovery import query_plan_check
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
from dagster_ckpt.spark.versions import RELEASES
from dagster_ckpt.state.rewriter import Rewriter
from dagster_ckpt.stream.ownership import OWNER
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.golden_stream import STREAM, GoldenStream, alter, with_a_flipped_bit
from tests.ui.history import LONG_ERROR, lengthen, live_through

COMMAND_LINE = Path(__file__).parents[2] / "docs/command-line.md"


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoldenStream]:
    """A stream that has run up to batch 4 and whose process is gone; the command line finds it by the environment."""
    golden = GoldenStream(tmp_path).make()
    golden.end(ExecutionStatus.SUSPENDED)
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{tmp_path / 'catalog.db'}")
    yield golden
    golden.close()


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(commands(), arguments)
    assert result.exit_code == status, result.output + str(result.exception)
    return result


def as_json(*arguments: str, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status).stdout)


def names(group: click.Group | None = None) -> list[str]:
    """Every command, those of a group with its name."""
    found = []
    for name, command in sorted((group or commands()).commands.items()):
        found += [f"{name} {each}" for each in names(command)] if isinstance(command, click.Group) else [name]
    return found


@pytest.mark.parametrize("name", names())
def test_each_command_has_help_with_an_example(name: str) -> None:
    text = run(*name.split(), "--help").stdout
    assert f"dagster-ckpt {name}" in text or f" {name} " in text.split("Example:")[1]
    assert "--json" in text


@pytest.mark.parametrize("group", [[], ["state"]])
def test_the_list_of_commands_says_what_each_does_in_a_whole_sentence(group: list[str]) -> None:
    listed = run(*group, "--help").stdout.split("Commands:")[1].split("Exit status")[0]
    assert "..." not in listed


def test_streams_and_snapshots_are_listed_for_people_and_programs(golden: GoldenStream) -> None:
    assert STREAM in run("streams").stdout
    assert [each["status"] for each in as_json("streams")] == ["SUSPENDED"]
    savepoint = as_json("savepoint", STREAM, "--label", "before-release")
    assert (savepoint["label"], savepoint["batch_id"]) == ("before-release", 4)
    assert "savepoint before-release" in run("list", STREAM).stdout
    (listed,) = as_json("list", STREAM, "--kind", "savepoint")
    assert listed == as_json("snapshot", STREAM, "before-release")["record"]
    assert "before-release" in run("show", STREAM).stdout
    assert as_json("show", STREAM)["summary"]["stream_id"] == STREAM


def test_a_damaged_snapshot_is_an_exit_status_of_its_own(golden: GoldenStream) -> None:
    location = Path(as_json("savepoint", STREAM, "--label", "s")["location"].removeprefix("file://"))
    run("verify", STREAM, "s")
    metadata = location / "_metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    (result,) = as_json("verify", STREAM, "s", status=PROBLEM_FOUND)
    assert result["problems"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("list golden --limit 0", 2, "is not in the range"),
        ("show golden --limit -1", 2, "is not in the range"),
        ("verify golden chk-99", FAILED, "It has: chk-"),
        ("restart golden --from batch-4 --source-offsets nonsense --preview", FAILED, "source_offsets is 'nonsense'"),
        ("savepoint golden --label latest", FAILED, "keyword of start_from"),
        ("export golden --to relative", FAILED, "relative path"),
        ("cancel golden --yes", FAILED, "is not running"),
        ("fork golden golden", FAILED, "into itself"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(golden: GoldenStream, arguments: str, status: int, says: str) -> None:
    golden.snapshot()
    assert says in run(*arguments.replace("golden", STREAM).split(), status=status).stderr


def test_what_is_refused_says_why_on_the_error_stream_and_changes_nothing(golden: GoldenStream) -> None:
    result = run("savepoint", "orders-typo", status=FAILED)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "orders-typo" in result.stderr


def test_a_rewind_is_previewed_and_asks_before_it_undoes_anything(golden: GoldenStream) -> None:
    run("savepoint", STREAM, "--label", "s")
    preview = as_json("restart", STREAM, "--from", "s", "--preview")
    assert preview["plan"]["kind"] in ("RESTORE", "RESUME", "REWIND")
    result = run("restart", STREAM, "--from", "empty", "--discard-state", status=2)
    assert "--yes" in result.stderr


def test_a_preview_is_that_of_the_restart_with_the_same_options(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_plan_check, "installed_release", lambda: RELEASES[-1])
    golden.snapshot(SnapshotKind.SAVEPOINT, "s")
    golden.commit(5)
    restart = ("restart", STREAM, "--from", "s", "--state-partitions", "12", "--preview")
    shown = run(*restart, "--no-safety-savepoint").stdout
    assert "no safety savepoint is taken" in shown
    assert "the state is rewritten: 2 partitions of RocksDB" in shown
    monkeypatch.setattr(query_plan_check, "installed_release", lambda: RELEASES[0])
    monkeypatch.setattr(Rewriter, "find", lambda: None)
    assert "the start needs `dagster-ckpt rewriter install`" in run(*restart).stdout


@pytest.mark.parametrize(
    "arguments", [("cancel",), ("sweep",), ("clean-sinks",), ("retention",), ("retention", "--ended", "CANCELED")]
)
def test_what_deletes_asks_first(golden: GoldenStream, arguments: tuple[str, ...]) -> None:
    assert "--yes" in run(arguments[0], STREAM, *arguments[1:], status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "says"), [((), "Name a stream, or give --all"), ((STREAM, "--all"), "--all takes neither")]
)
def test_retention_is_for_one_stream_or_for_all(golden: GoldenStream, arguments: tuple[str, ...], says: str) -> None:
    assert says in run("retention", *arguments, status=2).stderr
    assert "--yes" in run("retention", "--all", status=2).stderr


def test_a_dry_run_deletes_nothing_and_does_not_ask(golden: GoldenStream) -> None:
    for name in ("sweep", "clean-sinks", "retention"):
        run(name, STREAM, "--dry-run")
    assert as_json("sweep", STREAM, "--dry-run")["dry_run"] is True
    assert as_json("retention", STREAM, "--ended", "CANCELED", "--dry-run")["dry_run"] is True
    assert as_json("retention", "--all", "--dry-run")[STREAM]["dry_run"] is True


def test_a_stream_without_a_file_sink_has_no_output_files(golden: GoldenStream) -> None:
    assert as_json("output-files", STREAM) == []
    assert run("output-files", STREAM).stdout == ""


def test_doctor_and_health_say_by_their_status_whether_all_is_well(golden: GoldenStream) -> None:
    assert as_json("doctor", STREAM)["can_resume"] is True
    for commit in (golden.live / "commits").iterdir():
        commit.write_bytes(b"not a commit")
    run("doctor", STREAM, status=PROBLEM_FOUND)
    assert {each["check"] for each in as_json("health", STREAM)["findings"]}


def test_watch_prints_a_line_for_each_change(golden: GoldenStream) -> None:
    lines = run("watch", STREAM, "--every", "0.2", "--times", "2").stdout.splitlines()
    assert len(lines) == 1
    assert "SUSPENDED" in lines[0]
    assert json.loads(run("watch", STREAM, "--times", "1", "--json").stdout.removesuffix("\n"))["stream_id"] == STREAM


def test_watch_shows_the_pace_of_a_running_query(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = StreamSummary(STREAM, STREAM, StreamStatus.RUNNING, None, 7, None, None, 1234.5, 60_000)
    monkeypatch.setattr(Client, "describe_stream", lambda *_args, **_named: SimpleNamespace(summary=summary))
    assert "batch 7  newest none  1,234 rows/s  60,000 records behind" in run("watch", STREAM, "--times", "1").stdout


def test_a_list_as_json_has_all_snapshots(golden: GoldenStream) -> None:
    lengthen(golden.stream.catalog, STREAM, 60)
    assert len(as_json("list", STREAM, "--all")) == 60
    assert len(as_json("list", STREAM, "--all", "--limit", "10")) == 10
    assert "10 older ones: --limit 60 shows them" in run("list", STREAM, "--all").stdout


COMMAND = [sys.executable, "-c", "from dagster_ckpt.cli.main import main; main()"]


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which ends with the test."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *arguments], stdout=pipe, stderr=pipe, stdin=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_is_the_ordinary_end_of_watch(golden: GoldenStream) -> None:
    with running("watch", STREAM) as process:
        assert process.stdout is not None
        assert "SUSPENDED" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_restart_that_is_ended_by_a_signal_is_not_carried_out_later(
    golden: GoldenStream, number: signal.Signals
) -> None:
    with running("restart", STREAM) as process:
        assert process.stderr is not None
        while "waiting for the supervisor" not in process.stderr.readline():
            assert process.poll() is None
        [asked] = golden.stream.catalog.requests.unanswered(STREAM)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert f"(request {asked.request_id}) was withdrawn" in process.stderr.read()
    assert golden.stream.catalog.requests.get(asked.request_id).status is RequestStatus.WITHDRAWN


def test_requests_that_nobody_waits_for_are_listed_and_withdrawn(golden: GoldenStream) -> None:
    requests = golden.stream.catalog.requests
    assert "No request waits" in run("requests").stdout
    left = requests.submit(STREAM, RequestKind.START, origin="a killed shell").request_id
    assert "a killed shell" in run("requests", STREAM).stdout
    assert [each["request_id"] for each in as_json("requests")] == [left]
    assert f"START of {STREAM} is WITHDRAWN" in run("withdraw", left).stdout
    assert as_json("requests") == []
    assert "no request 'unknown'" in run("withdraw", "unknown", status=FAILED).stderr
    requests.fail_start(answered := requests.submit(STREAM, RequestKind.START, origin="x").request_id, "no")
    assert "is FAILED" in run("withdraw", answered, status=FAILED).stdout
    left = requests.submit(STREAM, RequestKind.START, origin="x").request_id
    withdrawn = run("withdraw", "unknown", left, "unheard-of", status=FAILED)
    assert withdrawn.stdout == f"START of {STREAM} is WITHDRAWN\n"
    assert all(f"no request {each!r}" in withdrawn.stderr for each in ("unknown", "unheard-of"))


def test_the_deployment_is_found_in_a_file_above(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DAGSTER_CKPT_CATALOG")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert "No catalog is configured" in run("streams", status=2).stderr
    (tmp_path / "dagster_ckpt.toml").write_text(f'catalog = "sqlite:///{tmp_path / "catalog.db"}"\n')
    assert as_json("streams")[0]["stream_id"] == STREAM
    # Relative to the file, wherever the command runs.
    (tmp_path / "dagster_ckpt.toml").write_text('catalog = "sqlite:///catalog.db"\nstorage = "snapshots"\n')
    assert as_json("streams")[0]["stream_id"] == STREAM
    places = 'storage = "hdfs:/checkpoints"\nlive_root = "file:/data/live"\ncatalog = "sqlite+pysqlite:///catalog.db"'
    (tmp_path / "dagster_ckpt.toml").write_text(places)
    found = Deployment()._from_file()
    assert (found.storage, found.live_root) == ("hdfs:/checkpoints", "file:/data/live")
    assert found.catalog == f"sqlite+pysqlite:///{tmp_path}/catalog.db"
    (tmp_path / "dagster_ckpt.toml").write_text('catalogue = "sqlite:////tmp/x.db"\n')
    assert "catalogue" in run("streams", status=2).stderr


def test_the_deployment_is_found_in_dagster_definitions(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DAGSTER_CKPT_CATALOG")
    monkeypatch.setenv("CATALOG_OF_THE_TEST", f"sqlite:///{tmp_path / 'catalog.db'}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "definitions_of_the_cli_test.py").write_text(
        "import dagster as dg\n"
        "from dagster_ckpt import CheckpointCatalogResource\n"
        'catalog = CheckpointCatalogResource(url=dg.EnvVar("CATALOG_OF_THE_TEST"))\n'
        'defs = dg.Definitions(resources={"checkpoint_catalog": catalog})\n'
    )
    assert as_json_of("-m", "definitions_of_the_cli_test", "streams")[0]["stream_id"] == STREAM
    # What is typed comes before the environment.
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", "sqlite:////no/such/folder/catalog.db")
    assert as_json_of("-m", "definitions_of_the_cli_test", "streams")[0]["stream_id"] == STREAM
    assert "cannot be imported" in run("-m", "no_such_module", "streams", status=2).stderr


def defining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    """A module of Dagster definitions in the current folder; a name of its own, because modules stay imported."""
    monkeypatch.delenv("DAGSTER_CKPT_CATALOG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text(
        "import dagster as dg\nfrom dagster_ckpt import CheckpointCatalogResource, CheckpointStorageResource\n" + text
    )
    return name


def test_typed_folders_come_before_those_of_the_definitions(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    golden.snapshot()
    module = defining(
        tmp_path, monkeypatch, "definitions_with_a_storage",
        f'catalog = CheckpointCatalogResource(url="sqlite:///{tmp_path / "new.db"}")\n'
        f'storage = CheckpointStorageResource(path="{tmp_path / "elsewhere"}")\n'
        'defs = dg.Definitions(resources={"checkpoint_catalog": catalog, "checkpoint_storage": storage})\n',
    )  # fmt: skip
    folders = ("--storage", str(tmp_path / "snapshots"), "--live-root", str(tmp_path / "live"))
    run("-m", module, "rebuild", STREAM, status=FAILED)
    rebuild = ("rebuild", STREAM, "--take-over-deployment", golden.stream.catalog.deployment_id, "--yes")
    assert "registered chk-" in run("-m", module, *folders, *rebuild).stdout
    both = run("-m", module, "--catalog", "sqlite:////tmp/other.db", "streams", status=2)
    assert "--catalog and -m both name a catalog" in both.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "definitions_without_their_variable",
            'catalog = CheckpointCatalogResource(url=dg.EnvVar("NOT_SET_ANYWHERE"))\n'
            'defs = dg.Definitions(resources={"checkpoint_catalog": catalog})\n',
            "NOT_SET_ANYWHERE",
        ),
        ("definitions_that_fail", 'open("/no/such/file")\n', "definitions_that_fail.py, line 3"),
        ("definitions_that_exit", 'raise SystemExit("no license")\n', "SystemExit: no license"),
    ],
)
def test_definitions_that_cannot_be_used_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, says: str
) -> None:
    stderr = run("-m", defining(tmp_path, monkeypatch, name, text), "streams", status=2).stderr
    assert f"odule {name} cannot be" in stderr
    assert says in " ".join(stderr.split())


def test_a_stream_whose_catalog_was_lost_is_shown_with_the_command_that_rebuilds_it(
    golden: GoldenStream, tmp_path: Path
) -> None:
    lost = golden.stream.catalog.deployment_id
    (Path(golden.stream.live_folder) / OWNER).write_text(lost)
    new = f"sqlite:///{tmp_path / 'new-catalog.db'}"
    with contextlib.closing(Catalog(new)) as catalog:
        replace(golden.stream, catalog=catalog).register()
    command = f"dagster-ckpt rebuild {STREAM} --take-over-deployment {lost}"
    for shown in ("streams",), ("show", STREAM):
        assert command in re.sub(r"\s+", " ", run("--catalog", new, *shown).stdout)
    run("--catalog", new, *command.split()[1:], "--yes")
    assert command not in run("--catalog", new, "show", STREAM).stdout


def test_a_rebuild_from_wrong_folders_registers_nothing(golden: GoldenStream, tmp_path: Path) -> None:
    new = ("--catalog", f"sqlite:///{tmp_path / 'new.db'}")
    folders = ("--storage", str(tmp_path / "typo"), "--live-root", str(tmp_path / "typo"))
    stderr = run(*new, *folders, "rebuild", STREAM, status=FAILED).stderr
    assert f"no snapshot in file://{tmp_path / 'typo'}" in stderr
    assert "--live-root" in stderr
    assert "Check --storage and --live-root" in run(*new, *folders, "rebuild", status=FAILED).stdout
    assert as_json(*new, "streams") == []


def test_a_refusal_names_the_options_of_the_command_line(golden: GoldenStream, tmp_path: Path) -> None:
    golden.snapshot()
    new = ("--catalog", f"sqlite:///{tmp_path / 'new.db'}")
    assert "--storage s3://" in run(*new, "rebuild", STREAM, status=FAILED).stderr
    folders = ("--storage", str(tmp_path / "snapshots"), "--live-root", str(tmp_path / "live"))
    of = golden.stream.catalog.deployment_id
    assert f"rebuild --take-over-deployment {of}" in run(*new, *folders, "rebuild", STREAM, status=FAILED).stderr
    stderr = run("restart", STREAM, "--from", "empty", "--new-query-id", "--preview", status=FAILED).stderr
    assert "On the command line, start_from is --from, new_query_id is --new-query-id." in stderr


def test_a_label_of_two_snapshots_is_refused_with_their_ids(golden: GoldenStream) -> None:
    first, second = (as_json("savepoint", STREAM)["snapshot_id"] for _ in range(2))
    for each in (first, second):
        # As in a catalog that was rebuilt from what two deployments stored.
        golden.stream.catalog.holds.tag(each, label="twice", holder="a test")
    for command in (("restart", STREAM, "--preview", "--from", "twice"), ("snapshot", STREAM, "twice")):
        stderr = run(*command, status=FAILED).stderr
        assert "2 snapshots of stream 'golden' have the label 'twice'" in stderr
        assert f"- {first}: savepoint twice at batch 4" in stderr
        assert f"- {second}: " in stderr
    assert as_json("restart", STREAM, "--preview", "--from", first)["plan"]["snapshot_id"] == first


@pytest.mark.parametrize("command", ["savepoint", "promote", "tag"])
def test_a_label_that_a_snapshot_has_is_refused(golden: GoldenStream, command: str) -> None:
    first = as_json("savepoint", STREAM, "--label", "release")["snapshot_id"]
    others = [] if command == "savepoint" else [as_json("savepoint", STREAM)["snapshot_id"]]
    stderr = run(command, STREAM, *others, "--label", "release", status=FAILED).stderr
    assert f"already has a snapshot with the label 'release': savepoint release at batch 4 ({first})" in stderr
    assert len(as_json("list", STREAM)) == 1 + len(others)
    assert as_json("tag", STREAM, first, "--label", "release")["label"] == "release"


@pytest.mark.parametrize("report", [RetentionReport(failed=("chk-1: no permission",))])
def test_a_deletion_that_failed_is_an_exit_status(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch, report: RetentionReport
) -> None:
    for name in ("apply_retention", "sweep"):
        monkeypatch.setattr(Client, name, lambda *_args, **_named: report)
    assert "no permission" in run("retention", STREAM, "--yes", status=FAILED).stdout
    assert as_json("sweep", STREAM, "--yes", status=FAILED)["failed"] == ["chk-1: no permission"]


def test_a_wrong_path_of_a_catalog_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    catalog = tmp_path / "typo.db"
    assert f"no file {catalog}" in run("--catalog", f"sqlite:///{catalog}", "streams", status=2).stderr
    assert not catalog.exists()
    run("--catalog", f"sqlite:///{catalog}", "upgrade-catalog")
    assert catalog.exists()


def as_json_of(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_a_request_that_is_refused_without_a_running_stream_fails(golden: GoldenStream) -> None:
    assert "is not running" in run("checkpoint", STREAM, status=FAILED).stderr


NEVER = {"dagster", "pyspark", "alembic"}
# What only commands that open a stream need. Each of them alone makes the start of a command that lists slower.
TO_OPEN_A_STREAM = {
    "fsspec", "pydantic",
    *(f"dagster_ckpt.{package}" for package in ("io", "snapshot", "spark", "sinks", "recovery", "runtime")),
}  # fmt: skip
# What few commands use, each of which makes a start some hundredths of a second slower.
RARELY_USED = {"psutil", "pendulum", "pydantic_core", "urllib.request", "sqlalchemy.dialects.postgresql"}
# What only a description of a stream needs: its recorded options with their policies.
TO_DESCRIBE_A_STREAM = {"dagster_ckpt.stream.handle", "dagster_ckpt.policies.retention"}
TO_LIST = {*NEVER, *TO_OPEN_A_STREAM, *RARELY_USED, *TO_DESCRIBE_A_STREAM}


UNUSED = {
    "--help": {*NEVER, *TO_OPEN_A_STREAM, "sqlalchemy", "msgspec", "rich"},
    "restart --help": {*NEVER, *TO_OPEN_A_STREAM, "sqlalchemy", "msgspec", "rich"},
    "streams": {*TO_LIST, "rich"},
    f"list {STREAM} --json": {*TO_LIST, "rich"},
    f"requests {STREAM} --json": {*TO_LIST, "rich"},
    f"show {STREAM}": {*NEVER, *TO_OPEN_A_STREAM, *RARELY_USED, "rich"},
    f"health {STREAM}": NEVER,
    f"doctor {STREAM}": NEVER,
}


@pytest.mark.parametrize("arguments", UNUSED)
def test_a_command_loads_only_what_it_needs(golden: GoldenStream, arguments: str) -> None:
    program = (
        "import sys; from dagster_ckpt.cli.main import main; sys.argv = ['dagster-ckpt', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end\n"
        "print('LOADED', *sys.modules)"
    )
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("LOADED ")[2].split()
    assert UNUSED[arguments] & set(loaded) == set()


def test_the_help_names_the_default_time_limit() -> None:
    assert f"default: {REQUEST_TIMEOUT_S:.0f}" in run("savepoint", "--help").stdout


def test_a_mapping_of_outputs_is_checked(golden: GoldenStream) -> None:
    assert "OLD=NEW" in run("fork", STREAM, "copy", "--output", "/data", status=2).stderr
    assert isinstance(commands(), click.Group)


def documented() -> list[str]:
    """The commands on all pages, those of docs/command-line.md first."""
    root = Path(__file__).parents[2]
    pages = [COMMAND_LINE, root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = [line for page in pages for line in commands_of(page)]
    return list(dict.fromkeys(found))


def commands_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [line.strip() for line in re.findall(r"(?:^\$ |`)(dagster-ckpt [^`|\n]*)", text, re.M)]


@pytest.mark.parametrize("line", documented())
def test_each_documented_command_exists_with_its_options(line: str) -> None:
    # Parses without running it: a wrong option or a missing argument is a usage error.
    words = shlex.split(line, comments=True)[1:]
    group: click.Group = commands()
    with contextlib.ExitStack() as opened:
        context = None
        while True:
            place = next(number for number, word in enumerate(words) if word in group.commands)
            context = opened.enter_context(group.make_context("dagster-ckpt", words[: place + 1], parent=context))
            command, words = group.commands[words[place]], words[place:]
            if not isinstance(command, click.Group):
                opened.enter_context(command.make_context(words[0], words[1:], parent=context))
                return
            group, words = command, words[1:]


def test_each_command_is_documented() -> None:
    documented = [line.removeprefix("dagster-ckpt ") for line in commands_of(COMMAND_LINE)]
    missing = [name for name in names() if not any(f"{line} ".startswith(f"{name} ") for line in documented)]
    assert missing == ["release"]


def test_long_work_shows_its_progress_on_a_terminal_and_nowhere_else(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):
        golden.snapshot()
    assert run("verify", STREAM, "all").stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = run("verify", STREAM, "all").stderr
    assert f"Verifying {STREAM}" in shown
    assert "2/2" in shown
    shown = run("export", STREAM, "--to", str(tmp_path / "exported")).stderr
    assert "Exporting latest" in shown
    assert re.search(r"(\d+)/\1\b", shown)
    shown = run("savepoint", STREAM).stderr
    assert f"Taking a savepoint of {STREAM}" in shown
    assert re.search(r"(\d+)/\1\b", shown)
    assert "1/1" in run("retention", "--all", "--dry-run").stderr


def test_a_savepoint_says_how_long_the_last_one_took(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "took" not in run("savepoint", STREAM).stderr
    assert re.search(r"the last snapshot took \d", run("savepoint", STREAM).stderr)


def test_the_shell_completes_commands(golden: GoldenStream) -> None:
    program = [sys.executable, "-c", "from dagster_ckpt.cli.main import main; main()"]
    environment = {
        **os.environ, "_DAGSTER_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": "dagster-ckpt savep", "COMP_CWORD": "1",
    }  # fmt: skip
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert "savepoint" in done.stdout


def test_the_shell_completes_streams_of_the_catalog(golden: GoldenStream, tmp_path: Path) -> None:
    def completed(start: str, catalog: str) -> str:
        settings = {"COMP_WORDS": f"dagster-ckpt show {start}", "COMP_CWORD": "2", "DAGSTER_CKPT_CATALOG": catalog}
        settings |= {"_DAGSTER_CKPT_COMPLETE": "bash_complete"}
        return CliRunner().invoke(commands(), env=settings, prog_name="dagster-ckpt").stdout

    catalog = f"sqlite:///{golden.root}/catalog.db"
    assert completed(STREAM[:2], catalog) == f"plain,{STREAM}\n"
    assert completed("none", catalog) == "\n"
    assert completed(STREAM[:2], f"sqlite:///{tmp_path}/none.db") == "\n"
    assert not (tmp_path / "none.db").exists()


def test_the_shell_completes_labels_of_the_stream(golden: GoldenStream) -> None:
    golden.snapshot()
    golden.snapshot(SnapshotKind.SAVEPOINT, label="before-release")

    def completed(*words: str) -> list[str]:
        settings = {"COMP_WORDS": f"dagster-ckpt {' '.join(words)}", "COMP_CWORD": str(len(words))}
        settings |= {"_DAGSTER_CKPT_COMPLETE": "bash_complete"}
        settings |= {"DAGSTER_CKPT_CATALOG": f"sqlite:///{golden.root}/catalog.db"}
        return CliRunner().invoke(commands(), env=settings, prog_name="dagster-ckpt").stdout.split()

    assert completed("snapshot", STREAM, "bef") == ["plain,before-release"]
    assert completed("restart", STREAM, "--from", "chk") == ["plain,chk-1"]
    assert completed("verify", "no-such-stream", "b") == []


def test_show_says_what_each_execution_started_from_and_tells_a_long_error_once(golden: GoldenStream) -> None:
    live_through(golden.stream.catalog, STREAM, failures=2)
    with golden.stream.catalog.database.writing() as connection:
        connection.execute(update(executions).values(reason=LONG_ERROR))
    shown = run("show", STREAM).stdout
    assert shown.count("FileOutputStream") == 1
    assert re.search(r"RESTART_NEW_RUN +the live directory", shown)
    assert re.search(r"MANUAL +empty state", shown)


def test_doctor_has_one_row_for_a_file_that_several_checks_complain_of(golden: GoldenStream) -> None:
    golden.snapshot()
    [damaged, *_] = sorted((golden.live / "state").rglob("*.sst"))
    alter([damaged], with_a_flipped_bit)
    shown = run("doctor", STREAM, status=PROBLEM_FOUND).stdout
    assert shown.count(damaged.name) == 1
    assert "STATE_FILE_DAMAGED, CONTENT_DIFFERS" in shown


def test_doctor_does_not_call_a_file_harmless_that_a_resume_fails_on(golden: GoldenStream) -> None:
    [damaged, *_] = sorted((golden.live / "state").rglob("*.zip"))
    alter([damaged], lambda _: b"")
    shown = run("doctor", STREAM, status=PROBLEM_FOUND).stdout
    assert "SNAPSHOT_UNREADABLE" in shown
    assert "harmless" not in shown


def test_an_export_of_a_stopped_stream_does_not_ask_to_stop_it(golden: GoldenStream, tmp_path: Path) -> None:
    golden.snapshot()
    shown = run("export", STREAM, "--to", str(tmp_path / "exported")).stdout
    assert f"do not start {STREAM} again once the exported query has run" in shown
    assert f"stop {STREAM}" not in shown


def test_a_catalog_that_is_gone_is_answered_with_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    shown = CliRunner().invoke(commands(), ["--catalog", f"sqlite:///{tmp_path}/gone.db", "list", STREAM]).stderr
    assert f"\n  dagster-ckpt --catalog sqlite:///{tmp_path}/gone.db --storage FOLDER_OF_CHECKPOINTS rebuild" in shown


def test_a_dry_run_of_an_adoption_creates_no_catalog(golden: GoldenStream, tmp_path: Path) -> None:
    golden.end()
    plain = shutil.copytree(golden.live, tmp_path / "plain")
    catalog = f"sqlite:///{tmp_path}/new.db"
    places = ("--catalog", catalog, "--storage", f"{tmp_path}/snapshots", "--live-root", f"{tmp_path}/live")
    assert "dry run: nothing was registered" in run(*places, "adopt", "orders", str(plain), "--dry-run").stdout
    assert not (tmp_path / "new.db").exists()


def test_a_question_that_nobody_can_answer_is_no_wrong_use(golden: GoldenStream) -> None:
    asked = run("cancel", STREAM, status=2)
    assert asked.stderr.startswith(f"Error: Cancel {STREAM}?")


def test_a_table_with_a_cell_of_several_lines_keeps_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["stream", "reason"], [("orders", "a\nb"), ("payments", None)], empty="None.")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "stream    reason",
        "orders    a",
        "          b",
        "payments  -",
    ]


def test_a_table_whose_cells_are_lines_has_no_blanks_at_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["stream", "reason"], [("orders", "full"), ("payments", None)], empty="None.")
    assert capsys.readouterr().out == "stream    reason\norders    full\npayments  -\n"


@pytest.mark.parametrize(
    ("cleanup", "count", "said"),
    [
        ("RETAIN_ON_CANCELLATION", 1, "1 checkpoint will be kept (RETAIN_ON_CANCELLATION)."),
        ("NO_EXTERNALIZED_CHECKPOINTS", 3, "3 checkpoints will be deleted; savepoints are kept"),
    ],
)
def test_a_cancel_asks_with_what_it_does_to_the_checkpoints(cleanup: str, count: int, said: str) -> None:
    client = create_autospec(Client, instance=True)
    client.list_snapshots.return_value = [None] * count
    client.describe_stream.return_value.settings.options = CheckpointConfig(cleanup=cleanup).options

    assert said in _after_a_cancel(client, "orders")


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "golden", "--older-than", "inf"),
        ("sweep", "golden", "--older-than", "nan"),
        ("show", "golden", "--limit", "9" * 20),
        ("list", "golden", "--limit", "9" * 20),
        ("prune-history", "golden", "--older-than", "9" * 16),
    ],
)
def test_a_number_that_no_catalog_takes_is_wrong_usage(golden: GoldenStream, arguments: tuple[str, ...]) -> None:
    assert "Invalid value for" in run(*arguments, status=2).output
