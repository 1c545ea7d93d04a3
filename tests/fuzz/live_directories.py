"""Live directories under test: a real one, and the log of its sink, with one file changed, lost or added."""

from __future__ import annotations

import contextlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dagster_ckpt.errors import CkptError
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.sinks.file_sink import read_sink_log
from dagster_ckpt.sinks.file_sink_log import logged_batch, own_past
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.snapshot.reader import extract
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import capture
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import inspect_live_directory, live_query_id, retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import read_operators
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import read_lineage, read_member
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.query.sources import distance
from tests.fuzz.case import Case, Target
from tests.fuzz.mutations import mutated_bytes, mutated_text
from tests.fuzz.snapshots import golden

_SNAPSHOT = "format-2/golden/chk-2"
_SINK = "out/_spark_metadata"
_GONE = b"(gone)"
_NAMES = (
    *("9" * 20, "9" * 18, "٣", "²", "-1", "1.compact", "5.tmp", "x", "5", "6", "0005", "5.compact", "a.compact"),
    *("٣.compact", "10.zip", "7_x.zip", "6.changelog", "6.delta", "6.snapshot", "3.zip.crc", ".3.zip.crc", ".5.crc"),
)


@cache
def files() -> dict[str, bytes]:
    """A live directory after batch 4, and the log of a sink beside it."""
    space, found = MemoryFileIO("memory://golden"), dict[str, bytes]()
    for name, data in golden()[_SNAPSHOT].items():
        space.write(name, [data])
    extract(space, "chk-2", lambda entry, chunks: found.update({f"live-1/{entry.path}": b"".join(chunks)}))
    for batch in range(9):
        parts = [
            {"path": f"file:///o/part-{index}", "size": 3, "isDir": False, "modificationTime": 1, "action": "add"}
            for index in range(batch + 1)
        ]
        is_compact = (batch + 1) % 4 == 0
        lines = ["v1", *map(json.dumps, parts if is_compact else parts[-1:])]
        found[f"{_SINK}/{batch}.compact" if is_compact else f"{_SINK}/{batch}"] = "\n".join(lines).encode()
    found["lineage"] = next(data for name, data in found.items() if name.endswith(".changelog"))
    return found


def draw(rng: random.Random) -> Case:
    """Change, remove or add one file."""
    name = rng.choice(sorted(files()))
    data = files()[name]
    kind = rng.random()
    if kind < 0.05:
        return Case(name, _GONE)
    if kind < 0.15:
        return Case(
            f"{name.rpartition('/')[0]}/{rng.choice(_NAMES)}", rng.choice((b"", data, mutated_bytes(rng, data)))
        )
    is_text = data.isascii() and b"\0" not in data
    return Case(name, (mutated_text if is_text and rng.random() < 0.7 else mutated_bytes)(rng, data))


def check(case: Case, scratch: Path) -> None:
    """Read it by every reader of Spark's files; each may refuse, in our words."""
    for name, data in (files() | {case.where: case.data}).items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (name == case.where and data == _GONE):
            path.write_bytes(data)
    sinks = sinks_of([f"FileSink[file:{scratch}/out]"])

    def live() -> LiveDirectory:
        return LiveDirectory(str(scratch / "live-1"))

    readers: list[Callable[[], object]] = [
        lambda: inspect_live_directory(live()),
        lambda: cut(live(), carry_in_flight=True, sinks=sinks),
        lambda: retained_batches(live()),
        lambda: live_query_id(live()),
        lambda: distance(live(), None, 4, 3),
        lambda: read_operators(live().folder, 4),
        lambda: capture(sinks, 5),
        lambda: own_past(f"file:{scratch}/out", 5),
        lambda: read_sink_log(f"file:{scratch}/out"),
        lambda: logged_batch(f"file:{scratch}/out"),
        lambda: clone(live(), LiveDirectory(str(scratch / "live-2"))),
        lambda: read_lineage(io.BytesIO(case.data), "5_x.changelog"),
    ]
    for reader in readers:
        with contextlib.suppress(CkptError):
            reader()
    with contextlib.suppress(KeyError, zipfile.BadZipFile):
        read_member(case.data, "metadata")
    # The doctor is for damage: it has an answer to all of it.
    diagnose(live(), sinks=sinks, expected_query_id="x")


TARGET = Target(draw, check)
