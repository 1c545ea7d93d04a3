"""`Client`: every operation on the streams of a catalog, from any process.

Its methods are grouped by subject, one module each, next to pure functions that decide. Nothing here imports Dagster,
and each method imports what only it needs, so that reading a catalog starts quickly. Begin with `client.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_ckpt.client.client import Client

if TYPE_CHECKING:
    from dagster_ckpt.catalog.history import Branch, HistoryCursor, HistoryPage, SnapshotFigures
    from dagster_ckpt.catalog.records import (
        EventRecord,
        EventType,
        ExecutionRecord,
        ExecutionStatus,
        SnapshotRecord,
        SnapshotStatus,
    )
    from dagster_ckpt.client.description import StreamDescription, StreamSummary
    from dagster_ckpt.client.graph import StreamConnections
    from dagster_ckpt.client.health import StreamHealth
    from dagster_ckpt.io.location import lies_in
    from dagster_ckpt.recovery.rewind_preview import RewindPreview
    from dagster_ckpt.snapshot.manifest import SnapshotHeader
    from dagster_ckpt.state.editing import StateEdit
    from dagster_ckpt.state.migration import StateMigration
    from dagster_ckpt.stream.snapshots import describe_snapshot
    from dagster_ckpt.stream.start_from import StartFrom, is_location, start_options

_NAMES = {
    "catalog.history": "Branch HistoryCursor HistoryPage SnapshotFigures",
    "catalog.records": "EventRecord EventType ExecutionRecord ExecutionStatus SnapshotRecord SnapshotStatus",
    "io.location": "lies_in",
    "client.description": "StreamDescription StreamSummary",
    "client.graph": "StreamConnections",
    "client.health": "StreamHealth",
    "recovery.rewind_preview": "RewindPreview",
    "snapshot.manifest": "SnapshotHeader",
    "state.editing": "StateEdit",
    "state.migration": "StateMigration",
    "stream.snapshots": "describe_snapshot",
    "stream.start_from": "StartFrom is_location start_options",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Branch",
    "Client",
    "EventRecord",
    "EventType",
    "ExecutionRecord",
    "ExecutionStatus",
    "HistoryCursor",
    "HistoryPage",
    "RewindPreview",
    "SnapshotFigures",
    "SnapshotHeader",
    "SnapshotRecord",
    "SnapshotStatus",
    "StartFrom",
    "StateEdit",
    "StateMigration",
    "StreamConnections",
    "StreamDescription",
    "StreamHealth",
    "StreamSummary",
    "describe_snapshot",
    "is_location",
    "lies_in",
    "start_options",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dagster_ckpt.{_MODULES[name]}"), name)
