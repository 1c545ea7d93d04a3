"""What a snapshot contains of a query's sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dagster_ckpt.errors import LiveDirectoryError, RestoreError
from dagster_ckpt.snapshot.reuse import ContentCheck
from dagster_ckpt.spark.checkpoint_dir.checksums import HadoopCheck
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.values.safe_parsing import number_in

SINKS_FOLDER = "sinks"
# Entered around each change that a successor would see; raises if this process is not the writer.
StillMine = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class CapturedSink:
    """A sink's record of its batches up to that of a snapshot; `newest` may be later."""

    place: str
    last_batch: int | None
    files: tuple[NeededFile, ...]
    newest: int | None = None
    kind: str = "file"

    def properties(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": self.place, "last_batch": self.last_batch}


@dataclass(frozen=True)
class SinkEntry:
    name: str
    data: bytes


class SinkLogFile(NeededFile):
    def check(self) -> ContentCheck:
        return _EntryCheck(self.folder, self.source)


class _EntryCheck(HadoopCheck):
    def trouble(self) -> str | None:
        where = f"{self.folder.url}/{self.path}"
        try:
            parse_log_lines(self.data, where)
        except LiveDirectoryError as trouble:
            return str(trouble)
        found = super().trouble()
        return f"{where}: {found}" if found is not None else None


class SinkToCapture(Protocol):
    def capture(self, folder: str, batch_id: int) -> CapturedSink | None:
        """Return what a snapshot needs to roll the sink back to a batch; None if nothing."""


def capture(sinks: Sequence[SinkToCapture], batch_id: int) -> list[CapturedSink]:
    captured: list[CapturedSink] = []
    for sink in sinks:
        found = sink.capture(f"{SINKS_FOLDER}/{len(captured)}", batch_id)
        captured += [found] if found is not None else []
    return captured


def sink_entry(path: str) -> tuple[int, str]:
    _, *rest = path.split("/")
    index = number_in(rest[0]) if rest else None
    if index is None or len(rest) != 2 or entry_id(rest[1]) is None:
        raise RestoreError(
            f"The snapshot contains a file {path!r}, which is not an entry of a sink's log. Restore another snapshot."
        )
    return index, rest[1]


def logs_of_sinks(properties: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, list[SinkEntry]]:
    described = properties.get("sinks")
    places = [str(sink["path"]) for sink in described] if isinstance(described, list) else []
    logs: dict[str, list[SinkEntry]] = {place: [] for place in places}
    for path, data in files.items():
        if path.startswith(f"{SINKS_FOLDER}/"):
            index, name = sink_entry(path)
            logs[places[index]].append(SinkEntry(name, data))
    return logs
