"""Whether a source still has what is read again, as cases. No Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from dagster_ckpt.catalog.journal import PlannedBatch
from dagster_ckpt.recovery.plan import RecoveryPlan, Resume, Rewind
from dagster_ckpt.recovery.source_inputs import InputStatus, SourceInput, source_inputs
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.query.sources import COMPACTED, SourceIdentity

CASES = yaml.safe_load((Path(__file__).parent / "source_inputs.yaml").read_text())
LAST, POINT = 5, 2
BEGAN, DAY = 1_700_000_000, 86_400


_OPTIONS = {"clean": "cleansource", "max age": "maxfileage"}


class Read:
    """A query that has read a file in each batch."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        self.landing, self.case = folder / "land ing", case
        if case.get("gone") != "all":
            self.landing.mkdir()
            for number in set(range(LAST + 1)) - {*case.get("gone", ())}:
                path = self.landing / f"{number}.json"
                path.touch()
                modified = self.modified(number) + DAY * case.get("rewritten", {}).get(number, 0)
                os.utime(path, (modified, modified))
        self.live = folder / "live"
        # A snapshot has its own entries up to the point.
        for batch in range(LAST + 1) if case.get("live", True) else range(POINT + 1):
            for path, data in self.planned(batch).items():
                (self.live / path).parent.mkdir(parents=True, exist_ok=True)
                (self.live / path).write_bytes(data)

    def modified(self, number: int) -> float:
        return BEGAN + 0.4 + number * DAY * self.case.get("days apart", 1)

    def planned(self, batch: int) -> dict[str, bytes]:
        offset = self.case.get("offset") or json.dumps({"logOffset": batch}, separators=(",", ":"))
        planned = {f"offsets/{batch}": f"v1\n{{}}\n{offset}".encode()}
        if "offset" not in self.case:
            name = f"file://{str(self.landing).replace(' ', '%20')}/{batch}.json"
            line = json.dumps({"path": name, "timestamp": int(1_000 * self.modified(batch)), "batchId": batch})
            planned[f"sources/0/{batch}"] = f"v1\n{line}".encode()
        return planned

    def recorded(self, options: dict[str, str]) -> list[SourceIdentity]:
        identity = {COMPACTED: self.case["compacted"]} if "compacted" in self.case else {}
        return [SourceIdentity(self.case.get("kind", "file"), None, identity, options)]

    def inputs(self, plan: RecoveryPlan) -> tuple[SourceInput, ...]:
        stream: Any = Mock()
        journal = [PlannedBatch(batch, "", self.planned(batch)) for batch in self.case.get("journal", ())]
        stream.catalog.journal.after.return_value = journal
        known = self.case.keys() & {*_OPTIONS, "kind"}
        options = {name: self.case[key] for key, name in _OPTIONS.items() if key in self.case}
        recorded = [each.as_record() for each in self.recorded(options)]
        stream.catalog.executions.last_sources.return_value = recorded if known else None
        stream.catalog.streams.get.return_value.live_directory = str(self.live)
        stream.catalog.executions.newest_by_other.return_value = {}
        status = LiveStatus.GOOD if self.case.get("live", True) else LiveStatus.MISSING
        facts: Any = Mock(live_batch=LAST)
        facts.live.status = status
        facts.stream.live_directory = str(self.live)
        return source_inputs(stream, facts, plan)


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_what_is_read_again(case: dict[str, Any], tmp_path: Path) -> None:
    (found,) = Read(tmp_path, case).inputs(Rewind(reason="why", from_batch=LAST, to_batch=POINT, point="batch"))

    assert found.status is InputStatus(case["status"])
    assert case.get("reason", "") in found.reason
    assert bool(found.reason) is (found.status not in (InputStatus.AVAILABLE, InputStatus.ASKED_BY_START))


class ReadAfterATopicTwice(Read):
    """A query that reads a topic twice through one DataFrame before the files: two offsets, one log."""

    def planned(self, batch: int) -> dict[str, bytes]:
        topic = b'{"orders":{"0":4}}\n'
        found = super().planned(batch)
        metadata, offset = found[f"offsets/{batch}"].rsplit(b"\n", 1)
        return {
            f"offsets/{batch}": b"".join([metadata, b"\n", topic * 2, offset]),
            f"sources/1/{batch}": found[f"sources/0/{batch}"],
        }

    def recorded(self, _options: dict[str, str]) -> list[SourceIdentity]:
        return [SourceIdentity("kafka", offset_names=("0", "1")), SourceIdentity("file", offset_names=("2",))]


@pytest.mark.parametrize(("gone", "status"), [([0, 1], InputStatus.AVAILABLE), ([5], InputStatus.GONE)])
def test_files_are_those_of_their_source_after_one_that_is_read_twice(
    gone: list[int], status: InputStatus, tmp_path: Path
) -> None:
    read = ReadAfterATopicTwice(tmp_path, {"gone": gone, "kind": "of both"})

    topic, files = read.inputs(Rewind(reason="why", from_batch=LAST, to_batch=POINT, point="batch"))

    assert (topic.source, topic.kind, topic.status) == ("0", "kafka", InputStatus.ASKED_BY_START)
    assert (files.source, files.kind, files.status) == ("1", "file", status)


@pytest.mark.parametrize(("gone", "status"), [([5], InputStatus.GONE), ([4], InputStatus.AVAILABLE)])
def test_a_resume_reads_the_batch_in_flight_again(gone: list[int], status: InputStatus, tmp_path: Path) -> None:
    (found,) = Read(tmp_path, {"gone": gone}).inputs(Resume(reason="why", from_batch=LAST - 1, point="live"))

    assert found.status is status


@pytest.mark.parametrize("offset", [None, '{"orders":{"0":4}}'])
def test_without_one_it_reads_nothing_again(offset: str | None, tmp_path: Path) -> None:
    case = {"gone": [5], **({"offset": offset} if offset is not None else {})}

    assert Read(tmp_path, case).inputs(Resume(reason="why", from_batch=LAST, point="live")) == ()
