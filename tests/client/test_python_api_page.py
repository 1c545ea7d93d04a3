"""Every example of docs/python-api.md runs, in the order of the page, on one stream whose process runs as a program."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.client import Client, requests
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.stream_program import StreamProgram

PAGE = Path(__file__).parents[2] / "docs/python-api.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
EXAMPLES = [
    pytest.param(section.partition("\n")[0], example, id=f"{section.partition(chr(10))[0]} {number}")
    for section in SECTIONS
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
]
METHODS = {name for name in dir(Client) if not name.startswith("_")} - {
    *("catalog", "origin", "close", "from_resources", "of_stream", "of_streams")
}


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
        program = StreamProgram(golden)
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
        .replace("s3://second/checkpoints", str(golden.root / "second"))
        .replace('"orders', f'"{STREAM}')
        .replace("1f2e3d4c-5b6a-4788-9a0b-1c2d3e4f5061", golden.stream.catalog.deployment_id)
    )

    exec(compile(code, PAGE.name, "exec"), page)


def test_every_method_is_on_the_page() -> None:
    assert set(re.findall(r"`(\w+)", PAGE.read_text())) | set(re.findall(r"client\.(\w+)", PAGE.read_text())) >= METHODS
    assert sys.modules[Client.__module__].__doc__
