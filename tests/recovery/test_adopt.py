"""A checkpoint directory that plain Spark wrote goes under management, and comes out again."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner, Result

from dagster_ckpt.catalog.records import OriginKind
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.client.export import export_snapshot
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import (
    LiveDirectoryError,
    NothingCommittedError,
    OptionError,
    RequestFailedError,
    RestoreError,
    SharedSinkError,
)
from dagster_ckpt.recovery.adopt import Adoption, adopt, take_over
from dagster_ckpt.recovery.live_directories import delete_live_directories
from dagster_ckpt.recovery.plan import RecoveryKind, RecoveryPlan
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.planned_batches import fence
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease, LeaseKeeper
from dagster_ckpt.stream.ownership import CLAIM, check_places, put_up_fence
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import keeping
from tests.support.page_blocks import blocks_of
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Outside:
    """A query of plain Spark that has committed nine batches to a file sink, and a stream that may adopt it."""

    root: Path
    history: History
    stream: StreamHandle

    @staticmethod
    def below(root: Path) -> Outside:
        history = History(root / "theirs")
        shutil.move(history.shelf.live, root / "checkpoint")
        return Outside(root, history, Shelf.reopened(root / "ours").stream)

    @property
    def directory(self) -> Path:
        return self.root / "checkpoint"

    @property
    def sink(self) -> Path:
        return self.history.sink

    def commit(self, batch: int) -> None:
        self.history.commit(batch, live=self.directory)

    def plan_only(self, batch: int) -> None:
        self.commit(batch)
        (self.directory / f"commits/{batch}").unlink()
        (self.sink / f"_spark_metadata/{batch}").unlink()

    def adopt(self, **how: Any) -> Adoption:
        how.setdefault("sinks", [str(self.sink)])
        return adopt(how.pop("stream", self.stream), str(self.directory), origin="a test", **how)

    def start(self, text: str = "latest") -> tuple[RecoveryPlan, PreparedStart]:
        """What the next start gives to Spark."""
        output = NamedOutput("parquet", str(self.sink))
        with keeping(self.stream.catalog, STREAM) as lease:
            check_places(self.stream, StartFrom(text), predecessor_ended=True)
            plan = planned_start(self.stream, StartFrom(text))
            if self.take_over(lease, plan):
                plan = planned_start(self.stream, StartFrom(text))
            return plan, prepare(self.stream, plan, lease, output)

    def take_over(self, lease: LeaseKeeper, plan: RecoveryPlan) -> bool:
        resumes = plan.kind is RecoveryKind.RESUME
        return take_over(self.stream, lease, resumes=resumes, still_mine=lease.check, wait_s=0.0)

    def close(self) -> None:
        self.history.close()
        self.stream.catalog.close()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    outside = Outside.below(tmp_path)
    yield outside
    outside.close()


def test_adopting_reads_and_takes_the_first_snapshot(outside: Outside) -> None:
    before = tree(outside.directory), tree(outside.sink)

    made = outside.adopt(label="from-before")

    assert (tree(outside.directory), tree(outside.sink)) == before
    assert made.snapshot is not None
    assert (made.snapshot.batch_id, made.snapshot.label, made.found.batch_id) == (LAST, "from-before", LAST)
    assert [sink["path"] for sink in made.snapshot.properties["sinks"]] == [str(outside.sink)]
    record = outside.stream.catalog.streams.get(STREAM)
    assert record.origin is not None
    assert (record.live_directory, record.origin.kind) == (str(outside.directory), OriginKind.ADOPTED)
    assert [each.snapshot_id for each in outside.stream.catalog.snapshots.restorable(STREAM)] == [
        made.snapshot.snapshot_id
    ]
    assert any("the next start of orders fences the query" in message for message in made.messages())


def test_a_dry_run_registers_nothing(outside: Outside) -> None:
    made = outside.adopt(dry_run=True)

    assert made.snapshot is None
    assert made.messages()[-1] == "dry run: nothing was registered"
    assert outside.stream.catalog.streams.all() == []


def test_the_start_continues_in_a_copy_after_what_the_query_did_since(outside: Outside) -> None:
    outside.adopt()
    outside.commit(LAST + 1)

    plan, prepared = outside.start()

    assert (plan.kind, plan.to_batch) == (RecoveryKind.CLONE, LAST + 1)
    state = inspect_live_directory(prepared.live)
    assert (state.status, state.batch_id, state.fenced_at) == (LiveStatus.GOOD, LAST + 1, None)
    assert prepared.live.url.startswith(outside.stream.live_folder)
    assert LiveDirectory(str(outside.directory)).fenced_at() == LAST + 2
    assert json.loads((outside.directory / CLAIM).read_text())["stream"] == STREAM
    # The batches of the sink are its own.
    assert (outside.sink / "_spark_metadata" / str(LAST + 1)).exists()


def test_the_batch_in_flight_comes_along(outside: Outside) -> None:
    outside.adopt()
    outside.plan_only(LAST + 1)

    _, prepared = outside.start()

    state = inspect_live_directory(prepared.live)
    assert (state.batch_id, state.in_flight) == (LAST, LAST + 1)


def test_in_place_the_next_batch_is_planned_at_every_moment(outside: Outside) -> None:
    outside.adopt(in_place=True)
    before = tree(outside.directory)

    plan, prepared = outside.start()

    assert plan.kind is RecoveryKind.RESUME
    assert prepared.live.url == str(outside.directory)
    state = inspect_live_directory(prepared.live)
    assert (state.status, state.batch_id, state.in_flight, state.fenced_at) == (
        LiveStatus.GOOD,
        LAST,
        LAST + 1,
        None,
    )
    after = tree(outside.directory)
    assert sorted(after.keys() - before.keys()) == [CLAIM, f"offsets/{LAST + 1}"]
    last, planned = (parse_offset_entry(after[f"offsets/{b}"], f"offsets/{b}") for b in (LAST, LAST + 1))
    assert (planned.sources, planned.conf) == (last.sources, last.conf)
    # From now on it is the stream's directory like any other.
    assert outside.start()[0].kind is RecoveryKind.RESUME


def test_in_place_is_refused_while_a_batch_is_in_flight_and_leaves_the_query_alone(outside: Outside) -> None:
    outside.adopt(in_place=True)
    outside.plan_only(LAST + 1)
    before = tree(outside.directory)

    with pytest.raises(LiveDirectoryError, match=rf"its batch {LAST + 1} was planned and not committed"):
        outside.start()

    assert tree(outside.directory).keys() - before.keys() == {CLAIM}
    outside.commit(LAST + 1)
    assert outside.start()[0].to_batch == LAST + 1


def test_a_start_in_place_that_dies_behind_the_fence_is_finished_in_a_copy(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.adopt(in_place=True)
    with monkeypatch.context() as dies:
        dies.setattr("dagster_ckpt.recovery.adopt.open_fence", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            outside.start()

    plan, prepared = outside.start()

    assert plan.kind is RecoveryKind.CLONE
    assert inspect_live_directory(prepared.live).batch_id == LAST


@pytest.mark.parametrize("step", ["claim", "fence"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_start_that_dies_earlier_is_repeated(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, step: str, in_place: bool
) -> None:
    outside.adopt(in_place=in_place)
    with monkeypatch.context() as dies:
        dies.setattr(f"dagster_ckpt.recovery.adopt.{step}", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            outside.start()

    plan, prepared = outside.start()

    assert plan.kind is (RecoveryKind.RESUME if in_place else RecoveryKind.CLONE)
    assert inspect_live_directory(prepared.live).batch_id == LAST


def test_the_first_snapshot_brings_the_sink_back(outside: Outside) -> None:
    outside.adopt(label="from-before")
    outside.commit(LAST + 1)

    plan, prepared = outside.start("from-before")

    assert plan.kind is RecoveryKind.RESTORE
    assert inspect_live_directory(prepared.live).batch_id == LAST
    assert not (outside.sink / "_spark_metadata" / str(LAST + 1)).exists()
    # Also then the other query is fenced.
    assert LiveDirectory(str(outside.directory)).fenced_at() == LAST + 2


def test_two_deployments_may_adopt_it_and_one_takes_it_over(outside: Outside) -> None:
    other = Shelf.reopened(outside.root / "others").stream
    outside.adopt()
    outside.adopt(stream=other)
    outside.start()

    with pytest.raises(LiveDirectoryError, match=r"its file adopted-by says"):
        Outside(outside.root, outside.history, other).start()
    other.catalog.close()


def test_it_may_be_adopted_again_until_it_is_taken_over(outside: Outside) -> None:
    outside.adopt(sinks=[])
    outside.adopt(in_place=True)
    assert outside.start()[0].kind is RecoveryKind.RESUME

    with pytest.raises(LiveDirectoryError, match=r"it was adopted before"):
        outside.adopt()


def test_a_directory_that_is_gone_is_not_replaced_by_an_older_snapshot(outside: Outside) -> None:
    outside.adopt(label="from-before")
    shutil.rmtree(outside.directory)

    with pytest.raises(LiveDirectoryError, match=r"it does not exist.*start_from"):
        outside.start()
    assert outside.start("from-before")[0].kind is RecoveryKind.RESTORE


def test_no_clean_up_deletes_it(outside: Outside) -> None:
    outside.adopt()
    before = tree(outside.directory)
    with keeping(outside.stream.catalog, STREAM) as lease:
        delete_live_directories(outside.stream, AcquiredLease(lease.record), lease)

    assert tree(outside.directory) == before


def test_a_holder_that_is_lost_before_the_take_over_leaves_the_query_unfenced(outside: Outside) -> None:
    outside.adopt()
    with keeping(outside.stream.catalog, STREAM) as lease:
        put_up_fence(outside.stream, AcquiredLease(lease.record), still_mine=lease.check)

    assert LiveDirectory(str(outside.directory)).fenced_at() is None


def test_a_directory_of_another_stream_is_not_adopted(outside: Outside) -> None:
    live = LiveDirectory(str(outside.directory))
    outside.adopt()
    other = Shelf.reopened(outside.root / "others").stream
    of_the_same_catalog = Outside(outside.root, outside.history, outside.stream)
    second = replace(outside.stream, stream_id="payments", name="payments")
    with pytest.raises(LiveDirectoryError, match=r"it is the directory of stream 'orders'"):
        of_the_same_catalog.adopt(stream=second)
    fence(live.folder, by="somebody", wait_s=0.0)
    with pytest.raises(LiveDirectoryError, match=r"it was fenced before batch 9"):
        outside.adopt(stream=other)
    other.catalog.close()


def test_a_live_directory_is_not_adopted(outside: Outside) -> None:
    outside.adopt()
    _, prepared = outside.start()

    with pytest.raises(LiveDirectoryError, match=r"it is a live directory of deployment"):
        adopt(Shelf.reopened(outside.root / "others").stream, prepared.live.url, origin="a test")


def test_a_stream_with_state_adopts_nothing(outside: Outside) -> None:
    mine = Shelf.at(outside.root / "mine")

    with pytest.raises(RequestFailedError, match=r"already has state"):
        outside.adopt(stream=mine.stream)
    mine.stream.catalog.close()


@pytest.mark.parametrize("last", [LAST - 1, LAST + 3])
def test_the_log_of_another_query_is_not_taken_for_its_own(outside: Outside, last: int) -> None:
    names = sorted((outside.sink / "_spark_metadata").iterdir())
    if last < LAST:
        (outside.sink / f"_spark_metadata/{LAST}").unlink()
    else:
        names[-1].with_name(str(last)).write_text("v1")

    with pytest.raises(SharedSinkError, match=rf"ends at batch {last}"):
        outside.adopt()
    assert outside.stream.catalog.streams.all() == []


def test_a_folder_without_a_log_is_no_sink_of_it(outside: Outside, tmp_path: Path) -> None:
    with pytest.raises(SharedSinkError, match="no file sink has written"):
        outside.adopt(sinks=[str(tmp_path / "elsewhere")])


def test_damage_and_emptiness_are_refused_with_what_was_found(outside: Outside) -> None:
    (outside.directory / f"offsets/{LAST}").write_bytes(b"")
    with pytest.raises(LiveDirectoryError, match=r"Nothing is adopted"):
        outside.adopt()
    shutil.rmtree(outside.directory)
    with pytest.raises(LiveDirectoryError, match="does not exist"):
        outside.adopt()
    outside.directory.mkdir()
    with pytest.raises(NothingCommittedError):
        outside.adopt()


def test_a_folder_that_is_no_checkpoint_directory_is_named_as_such(outside: Outside) -> None:
    """Waiting for a first batch there would be in vain."""
    with pytest.raises(LiveDirectoryError, match=r"is not a checkpoint directory of Spark: .* no file metadata"):
        adopt(outside.stream, str(outside.sink), origin="a test")


@pytest.mark.parametrize("sink", ["orders", "data/orders", "FileSink"])
def test_a_sink_that_is_neither_a_place_nor_a_name_of_spark_is_refused(outside: Outside, sink: str) -> None:
    with pytest.raises(OptionError, match="neither an absolute path or URL nor a name that Spark gives"):
        outside.adopt(sinks=[sink])
    assert outside.stream.catalog.streams.all() == []


def test_a_table_by_its_name_alone_is_refused_with_the_name_to_use(outside: Outside) -> None:
    """Of such a table nothing is known: every start from the first snapshot would be refused."""
    with pytest.raises(OptionError, match=r"IcebergTable\[lake.sales.orders\]"):
        outside.adopt(sinks=["lake.sales.orders"])

    outside.adopt(sinks=["IcebergTable[lake.sales.orders]"])


def test_an_exported_snapshot_is_the_plain_directory(outside: Outside) -> None:
    original = tree(outside.directory)
    outside.adopt(label="from-before")
    outside.commit(LAST + 1)
    to = str(outside.root / "exported")

    made = export_snapshot(outside.stream, "from-before", to)

    found = tree(Path(to))
    assert found == {name: original[name] for name in found}
    assert inspect_live_directory(LiveDirectory(to)).batch_id == made.found.batch_id == LAST
    (sink,) = made.sinks
    assert not sink.is_ready
    assert f"would skip batches {LAST + 1} to {LAST + 1}" in sink.explanation
    with pytest.raises(RestoreError, match="exists already"):
        export_snapshot(outside.stream, "from-before", to)


def test_an_exported_query_gets_its_rows_in_a_new_folder(outside: Outside) -> None:
    outside.adopt(label="from-before")
    outside.commit(LAST + 1)
    new = str(outside.root / "new")

    made = export_snapshot(
        outside.stream, "from-before", str(outside.root / "exported"), outputs={str(outside.sink): new}
    )

    assert [(sink.continues_at, sink.is_ready) for sink in made.sinks] == [(new, True)]
    assert sorted(path.name for path in Path(new).glob("part-*")) == [f"part-{batch}" for batch in range(LAST + 1)]


def test_an_exported_query_gets_its_rows_in_no_folder_of_others(outside: Outside) -> None:
    """With a log, Spark would read only what the log lists: their files would be gone for every reader."""
    outside.adopt(label="from-before")
    theirs = outside.root / "theirs-too"
    theirs.mkdir()
    (theirs / "0001.json").write_text("{}")

    with pytest.raises(SharedSinkError, match=r"theirs-too: 0001.json exists there"):
        export_snapshot(
            outside.stream, "from-before", str(outside.root / "exported"), outputs={str(outside.sink): str(theirs)}
        )

    assert [path.name for path in theirs.iterdir()] == ["0001.json"]
    assert not (outside.root / "exported").exists()


def test_the_folder_of_an_interrupted_export_gets_the_rest(outside: Outside) -> None:
    outside.adopt(label="from-before")
    new = outside.root / "new"
    new.mkdir()
    (new / "part-0").write_text("rows")

    made = export_snapshot(
        outside.stream, "from-before", str(outside.root / "exported"), outputs={str(outside.sink): str(new)}
    )

    assert [sink.is_ready for sink in made.sinks] == [True]


def test_a_new_folder_is_named_by_an_absolute_path(outside: Outside) -> None:
    outside.adopt(label="from-before")

    with Client(outside.stream.catalog) as client, pytest.raises(OptionError, match="a relative path"):
        client.export(STREAM, "from-before", to=str(outside.root / "exported"), outputs={str(outside.sink): "orders-3"})


@pytest.mark.parametrize("gone", [False, True])
def test_a_sink_that_lacks_batches_of_the_snapshot_is_not_ready(outside: Outside, gone: bool) -> None:
    """Its rows were undone since, or its folder was emptied: plain Spark does not write them again."""
    outside.adopt(label="from-before")
    for path in (outside.sink / "_spark_metadata").iterdir():
        if gone or path.name == str(LAST):
            path.unlink()

    made = export_snapshot(outside.stream, "from-before", str(outside.root / "exported"))

    (sink,) = made.sinks
    assert not sink.is_ready
    assert f"lacks the rows of batches {0 if gone else LAST} to {LAST}" in sink.explanation


@pytest.mark.parametrize(
    ("newest", "undone", "is_ready", "says"),
    [
        (LAST, False, True, "write there"),
        (None, False, True, f"no batch of this stream after {LAST}"),
        (LAST + 2, False, False, f"may skip batches {LAST + 1} to {LAST + 2}"),
        # A restored table still skips them under the same query id.
        (LAST + 2, True, False, f"may skip batches {LAST + 1} to {LAST + 2}"),
    ],
)
def test_a_delta_table_is_ready_if_it_skips_no_batch_of_the_exported_query(
    outside: Outside, newest: int | None, undone: bool, is_ready: bool, says: str
) -> None:
    table = outside.root / "table"
    (table / "_delta_log").mkdir(parents=True)
    query_id = json.loads((outside.directory / "metadata").read_text())["id"]
    commits: list[dict[str, Any]] = [
        {"txn": {"appId": query_id if newest is not None else "another", "version": batch}}
        for batch in range((newest or 0) + 1)
    ]
    if undone:
        commits.append({"commitInfo": {"operation": "RESTORE", "operationParameters": {"version": LAST}}})
    for version, action in enumerate(commits):
        (table / f"_delta_log/{version:020}.json").write_text(json.dumps(action))
    outside.adopt(label="from-before", sinks=[str(table)])

    (sink,) = export_snapshot(outside.stream, "from-before", str(outside.root / "exported")).sinks

    assert (sink.name, sink.is_ready) == (f"DeltaSink[{table}]", is_ready)
    assert says in sink.explanation


def test_an_output_that_cannot_be_given_leaves_no_directory(outside: Outside) -> None:
    outside.adopt(label="from-before")
    with pytest.raises(SharedSinkError):
        export_snapshot(
            outside.stream, "from-before", str(outside.root / "exported"), outputs={"/no/sink": str(outside.root / "n")}
        )
    assert not (outside.root / "exported").exists()


def test_nothing_is_exported_among_the_live_directories(outside: Outside) -> None:
    outside.adopt(label="from-before")

    with pytest.raises(OptionError, match="retention would delete"):
        export_snapshot(outside.stream, "from-before", f"{outside.stream.live_folder}/exported")
    with pytest.raises(OptionError, match="retention would delete"):
        export_snapshot(outside.stream, "from-before", f"{outside.stream.live_root}/another_stream/live-7-7")


def test_an_export_deletes_no_directory_that_has_the_name_of_an_unfinished_one(outside: Outside) -> None:
    outside.adopt(label="from-before")
    theirs = outside.root / "exported.partial"
    theirs.mkdir()
    (theirs / "download").write_text("theirs")

    with pytest.raises(OptionError, match="no interrupted export has left it"):
        export_snapshot(outside.stream, "from-before", str(outside.root / "exported"))

    assert (theirs / "download").read_text() == "theirs"


def test_what_a_killed_export_left_is_replaced(outside: Outside) -> None:
    outside.adopt(label="from-before")
    to = outside.root / "exported"
    left = outside.root / "exported.partial"
    left.mkdir()
    (left / "not-in-use").touch()
    (left / "metadata").write_text("half")

    export_snapshot(outside.stream, "from-before", str(to))

    assert not left.exists()
    assert not (to / "not-in-use").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_directory_in_object_storage_is_adopted_as_well(outside: Outside, in_place: bool) -> None:
    bucket = fsspec.filesystem("memory")
    bucket.put(str(outside.directory), "/bucket/checkpoint", recursive=True)
    url = "memory://bucket/checkpoint"
    before = bucket.find("/bucket/checkpoint")

    adopt(outside.stream, url, sinks=[str(outside.sink)], in_place=in_place, origin="a test")
    assert bucket.find("/bucket/checkpoint") == before
    _, prepared = outside.start()

    assert inspect_live_directory(prepared.live).batch_id == LAST
    assert (prepared.live.url == url) is in_place
    assert (LiveDirectory(url).fenced_at() is None) is in_place
    bucket.rm("/bucket", recursive=True)


def test_the_commands_and_examples_of_the_page_run(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "/data/checkpoints/orders": str(outside.directory),
        "/data/orders": str(outside.sink),
    }

    def here(text: str) -> str:
        for place, actual in places.items():
            text = text.replace(place, actual)
        return text

    page = blocks_of("migrate.md")
    lines = [[here(part) for part in shlex.split(line)[1:]] for block in page for line in block.commands]
    assert [line[0] for line in lines] == ["adopt", "adopt", "stop", "export", "export"]
    root = outside.root / "ours"
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{root}/catalog.db")
    monkeypatch.setenv("DAGSTER_CKPT_STORAGE", f"{root}/snapshots")
    monkeypatch.setenv("DAGSTER_CKPT_LIVE_ROOT", f"{root}/live")
    for line in lines:
        # The stream does not run: its savepoint is taken without stopping it.
        arguments = ["savepoint", *line[1:]] if line[0] == "stop" else line
        done = CliRunner().invoke(commands(), arguments)
        assert done.exit_code == 0, done.output
    (example,) = (block.text for block in page if block.text.startswith("client.export"))
    with Client(f"sqlite:///{root}/catalog.db") as client:
        exec(here(example.replace("orders-2", "orders-4")), {"client": client})
    copies = [outside.directory.with_name(f"checkpoint-{number}") for number in (2, 3, 4)]
    assert [inspect_live_directory(LiveDirectory(str(copy))).batch_id for copy in copies] == [LAST, LAST, LAST]


def test_until_the_take_over_operators_see_the_stream_and_change_nothing_of_the_query(outside: Outside) -> None:
    outside.adopt()
    outside.commit(LAST + 1)
    before = tree(outside.directory)
    with Client(outside.stream.catalog) as client:
        assert [each.stream_id for each in client.list_streams()] == [STREAM]
        assert client.describe_stream(STREAM).summary.stream_id == STREAM
        assert client.doctor(STREAM).diagnosis.batch_id == LAST + 1
        assert client.health(STREAM).messages() is not None
        assert "was adopted" in client.preview_rewind(STREAM).plan.reason
        assert all(each.passed for each in client.verify(STREAM, "all"))
        assert client.trigger_savepoint(STREAM, label="later").batch_id == LAST + 1
        client.apply_retention(STREAM)
        client.sweep(STREAM)
        client.rebuild(STREAM)
    assert tree(outside.directory) == before
    assert outside.start()[0].to_batch == LAST + 1


# Flows of Declarative Pipelines, whose directories are numbered


def test_a_flow_that_was_taken_back_to_a_snapshot_is_adopted_again_in_its_next_directory(
    outside: Outside, tmp_path: Path
) -> None:
    flow, stream = tmp_path / "_checkpoints/totals/flow", outside.stream
    flow.mkdir(parents=True)
    outside.directory.rename(flow / "0")
    adopt(stream, str(flow / "0"), sinks=[str(outside.sink)], origin="a test")
    client = Client.of_stream(stream, origin="a test")
    before = client.trigger_savepoint(STREAM, label="before-update-2")
    outside.history.commit(LAST + 1, live=flow / "0")
    assert client.trigger_savepoint(STREAM, label="before-update-3").batch_id == LAST + 1

    rewound = tmp_path / "rewound"
    export_snapshot(stream, before.snapshot_id, str(flow / "1"), outputs={str(outside.sink): str(rewound)})
    found = adopt(stream, str(flow / "1"), sinks=[str(rewound)], origin="a test")

    assert found.snapshot is not None
    assert found.snapshot.batch_id == LAST
    assert {each.label for each in client.list_snapshots(STREAM)} > {"before-update-2", "before-update-3"}
    shutil.copytree(flow / "1", flow.with_name("other") / "2")
    with pytest.raises(RequestFailedError, match="one stream continues one query"):
        adopt(stream, str(flow.with_name("other") / "2"), sinks=[str(rewound)], origin="a test")


def test_numbered_folders_that_are_not_of_a_flow_are_different_queries(outside: Outside, tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    outside.directory.rename(tmp_path / "queries/0")
    shutil.copytree(tmp_path / "queries/0", tmp_path / "queries/1")
    adopt(outside.stream, str(tmp_path / "queries/0"), sinks=[str(outside.sink)], origin="a test")
    with pytest.raises(RequestFailedError, match="one stream continues one query"):
        adopt(outside.stream, str(tmp_path / "queries/1"), sinks=[str(outside.sink)], origin="a test")


def test_the_command_that_drops_an_adoption_asks_and_drops_no_other(outside: Outside) -> None:
    outside.adopt(label="before-adoption")
    catalog, place = outside.stream.catalog, str(outside.directory)

    def undo(*arguments: str) -> Result:
        return CliRunner().invoke(commands(), ["--catalog", catalog.database.shown_url, "adopt", STREAM, *arguments])

    for arguments, why in (
        ((place, "--undo"), "confirm with --yes"),
        ((place, "--undo", "--dry-run"), "takes no option but --yes"),
        ((str(outside.root / "another"), "--undo", "--yes"), f"adopts {place}, not"),
    ):
        refused = undo(*arguments)
        assert refused.exit_code != 0
        assert why in refused.output.replace("\n", " ")
    [savepoint] = catalog.snapshots.completed(STREAM)
    assert outside.stream.store.verify(savepoint.location or "") == []

    done = undo(place, "--undo", "--yes")
    assert (done.exit_code, catalog.snapshots.completed(STREAM)) == (0, [])
