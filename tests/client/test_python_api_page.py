"""Every example of docs/python-api.md runs, in the order of the page, on one stream whose process runs as a program."""

from __future__ import annotations

import re
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestRecord, RequestStatus, StartCause
from dagster_ckpt.checkpointing.stopped_savepoint import savepoint_of_stopped_stream
from dagster_ckpt.client import Client
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.operations import requests
from dagster_ckpt.stream.liveness import this_holder
from tests.support.as_writer import LONG_MS, as_writer
from tests.support.golden_stream import STREAM, GoldenStream

PAGE = Path(__file__).parents[2] / "docs/python-api.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
EXAMPLES = [
    pytest.param(section.partition("\n")[0], example, id=f"{section.partition(chr(10))[0]} {number}")
    for section in SECTIONS
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
]
METHODS = {name for name in dir(Client) if not name.startswith("_")} - {
    *("catalog", "close", "from_resources", "of_streams")
}


class Program:
    """The process of the stream, without Spark: it answers each request, and starts again when it is asked to."""

    def __init__(self, golden: GoldenStream) -> None:
        self._golden = golden
        self._catalog = golden.stream.catalog
        self._over = threading.Event()
        self._start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        self._execution_id = str(uuid.uuid4())
        holder = this_holder(self._execution_id, "a program", None)
        self._lease = self._catalog.leases.acquire(STREAM, holder, LONG_MS)
        writer = as_writer(self._catalog, STREAM).executions
        writer.start(self._execution_id, run_id="a program", cause=StartCause.MANUAL, holder=holder)
        writer.running(self._execution_id, live_directory=self._golden.live_url, recovery={})

    def _run(self) -> None:
        while not self._over.wait(0.02):
            for request in self._catalog.requests.pending(STREAM):
                self._answer(request)

    def _answer(self, request: RequestRecord) -> None:
        snapshot_id = None
        if request.kind is RequestKind.START:
            self._start()
        elif request.kind is RequestKind.CHECKPOINT:
            snapshot_id = self._golden.snapshot().snapshot_id
        elif request.kind is not RequestKind.SUSPEND:
            label = request.arguments.get("label")
            snapshot_id = savepoint_of_stopped_stream(self._golden.stream, label=label).snapshot_id
        answer = as_writer(self._catalog, STREAM).requests.resolve
        answer(request.request_id, RequestStatus.COMPLETED, snapshot_id=snapshot_id)
        if request.kind in (RequestKind.SUSPEND, RequestKind.STOP_WITH_SAVEPOINT):
            self.stop()

    def stop(self) -> None:
        end = as_writer(self._catalog, STREAM).executions.end
        end(self._execution_id, ExecutionStatus.SUSPENDED, "it was asked to", settled=True)
        self._catalog.leases.release(STREAM, self._lease.token)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the examples share, with the places of the page mapped to a folder."""
    root = tmp_path_factory.mktemp("page")
    golden = GoldenStream(root)
    options = CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION", num_retained=5).options
    golden.stream = replace(golden.stream, options=options)
    golden.make().snapshot()
    golden.end()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "POLL_S", 0.02)
        program = Program(golden)
        yield {"golden": golden, "program": program}
        program.end()
    golden.close()


@pytest.mark.parametrize(("section", "example"), EXAMPLES)
def test_an_example_runs(page: dict[str, Any], section: str, example: str) -> None:
    golden = page["golden"]
    if section == "A lost catalog":
        page["program"].stop()
    code = (
        example.replace("/var/lib/streams/checkpoints", str(golden.root / "snapshots"))
        .replace("/var/lib/streams", str(golden.root))
        .replace('"orders', f'"{STREAM}')
        .replace("1f2e3d4c-5b6a-4788-9a0b-1c2d3e4f5061", golden.stream.catalog.deployment_id)
    )

    exec(compile(code, PAGE.name, "exec"), page)


def test_every_method_is_on_the_page() -> None:
    assert set(re.findall(r"`(\w+)", PAGE.read_text())) | set(re.findall(r"client\.(\w+)", PAGE.read_text())) >= METHODS
    assert sys.modules[Client.__module__].__doc__
