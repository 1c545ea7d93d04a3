"""The only reader of the sinks in a snapshot's properties.

`sinks` lists what the snapshot has captured, `other_sinks` names the sinks that have no log to capture.
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
    """None if the snapshot does not say which sinks its query wrote to."""
    described = properties.get("sinks")
    return [FileSink.at(str(sink["path"])) for sink in described] if isinstance(described, list) else None


def other_sinks(properties: Mapping[str, Any]) -> list[Sink] | None:
    """Named, not captured; None if the snapshot does not say."""
    named = properties.get("other_sinks")
    return sinks_of([str(sink) for sink in named]) if isinstance(named, list) else None


def sinks_in(properties: Mapping[str, Any]) -> list[Sink]:
    return [*(captured_sinks(properties) or ()), *(other_sinks(properties) or ())]


def names_of_others(sinks: Sequence[str]) -> list[str]:
    """The sinks that a cut does not capture, for a snapshot's properties."""
    return [sink.name for sink in sinks_of(sinks) if not isinstance(sink, FileSink)]


def logs_in_snapshot(store: SnapshotStore, location: str) -> dict[str, list[SinkEntry]]:
    """By folder."""
    properties = store.manifest(location).header.properties
    return logs_of_sinks(properties, _files(store, location) if captured_sinks(properties) else {})


def part_files_in_snapshot(store: SnapshotStore, location: str) -> set[str]:
    """Bare names, even if the snapshot does not name its sinks."""
    entries = _files(store, location).items()
    return {bare(file) for path, data in entries for file in listed(data, f"{location}/{path}")}


def _files(store: SnapshotStore, location: str) -> dict[str, bytes]:
    return read_files(store, location, lambda path: path.startswith(f"{SINKS_FOLDER}/"))
