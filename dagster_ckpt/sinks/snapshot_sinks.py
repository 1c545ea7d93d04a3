"""The sinks that a snapshot names, and the logs of its file sinks. The only reader of these properties.

`sinks` lists what the snapshot has captured, with its place; `other_sinks` names the sinks that have no log to capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import bare, listed
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.snapshot.store import SnapshotStore, read_files
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, SinkEntry, logs_of_sinks


def captured_sinks(properties: Mapping[str, Any]) -> list[Sink] | None:
    """The sinks whose log is in a snapshot; None if it does not say which sinks its query wrote to."""
    described = properties.get("sinks")
    return [FileSink.at(str(sink["path"])) for sink in described] if isinstance(described, list) else None


def other_sinks(properties: Mapping[str, Any]) -> list[Sink] | None:
    """The sinks that a snapshot only names; None if it does not say."""
    named = properties.get("other_sinks")
    return sinks_of([str(sink) for sink in named]) if isinstance(named, list) else None


def sinks_in(properties: Mapping[str, Any]) -> list[Sink]:
    """All sinks that a snapshot names."""
    return [*(captured_sinks(properties) or ()), *(other_sinks(properties) or ())]


def names_of_others(sinks: Sequence[str]) -> list[str]:
    """The names of the sinks that a cut does not capture, for the properties of a snapshot."""
    return [sink.name for sink in sinks_of(sinks) if not isinstance(sink, FileSink)]


def logs_in_snapshot(store: SnapshotStore, location: str) -> dict[str, list[SinkEntry]]:
    """The logs of file sinks contained in a snapshot, by folder."""
    properties = store.manifest(location).header.properties
    return logs_of_sinks(properties, _files(store, location) if captured_sinks(properties) else {})


def part_files_in_snapshot(store: SnapshotStore, location: str) -> set[str]:
    """Bare names of all part files that the sink logs in a snapshot list, even if it does not name its sinks."""
    entries = _files(store, location).items()
    return {bare(file) for path, data in entries for file in listed(data, f"{location}/{path}")}


def _files(store: SnapshotStore, location: str) -> dict[str, bytes]:
    return read_files(store, location, lambda path: path.startswith(f"{SINKS_FOLDER}/"))
