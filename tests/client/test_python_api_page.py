"""Every example of docs/python-api.md runs, in the order of the page, on one stream whose process runs as a program."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import RequestKind
from dagster_ckpt.client import Client
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.operations import requests
from dagster_ckpt.operations.start_request import start_order
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run import RunRequest
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.played_query import PlayedQuery

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
    """The program of the stream: it runs a query that waits for data, and starts it again when it is asked to."""

    def __init__(self, golden: GoldenStream) -> None:
        self._stream = golden.stream
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_from, request_id = StartFrom(), None
        while not self._over.is_set():
            request = RunRequest(
                "a program",
                lambda _live: PlayedQuery(),
                start_from=start_from,
                start_request_id=request_id,
                interrupted=self._over.is_set,
            )
            execute_stream(self._stream, request)
            while not self._over.wait(0.05):
                if any(each.kind is RequestKind.START for each in self._stream.catalog.requests.pending(STREAM)):
                    order = start_order(self._stream.catalog, STREAM, otherwise=StartFrom())
                    start_from, request_id = order.start_from, order.request_id
                    break

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
    golden.make()
    shutil.copytree(golden.root / "live", golden.root / "copy")
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
        page["program"].end()
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
