"""What an operator does with a stream that a test has opened: the verbs of a client for it."""

from __future__ import annotations

from typing import Any

from dagster_ckpt.catalog.desired_states import DesiredRecord
from dagster_ckpt.catalog.records import RequestRecord, SnapshotRecord
from dagster_ckpt.client.client import Client
from dagster_ckpt.client.lifecycle import StopResult
from dagster_ckpt.client.preflight import planned_start, start_preview
from dagster_ckpt.recovery.checkpoint_retention import RetentionReport
from dagster_ckpt.recovery.rewind_preview import RewindPreview
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom

__all__ = ["planned_start", "start_preview"]


def client_of(stream: StreamHandle, origin: str = "a test") -> Client:
    return Client.of_stream(stream, origin=origin)


def trigger_checkpoint(stream: StreamHandle, *, origin: str, **options: Any) -> SnapshotRecord:
    return client_of(stream, origin).trigger_checkpoint(stream.stream_id, **options)


def trigger_savepoint(stream: StreamHandle, *, origin: str, **options: Any) -> SnapshotRecord:
    return client_of(stream, origin).trigger_savepoint(stream.stream_id, **options)


def tag_checkpoint(stream: StreamHandle, reference: str, *, label: str | None, origin: str) -> SnapshotRecord:
    return client_of(stream, origin).tag(stream.stream_id, reference, label=label)


def release_checkpoint(stream: StreamHandle, reference: str) -> SnapshotRecord:
    return client_of(stream).release(stream.stream_id, reference)


def promote_checkpoint(stream: StreamHandle, reference: str, **options: Any) -> SnapshotRecord:
    return client_of(stream).promote(stream.stream_id, reference, **options)


def prefer_savepoint(stream: StreamHandle, reference: str) -> SnapshotRecord:
    return client_of(stream).prefer_savepoint(stream.stream_id, reference)


def stop_with_savepoint(stream: StreamHandle, *, origin: str, **options: Any) -> StopResult:
    return client_of(stream, origin).stop(stream.stream_id, **options)


def suspend(stream: StreamHandle, *, origin: str, **options: Any) -> StopResult:
    return client_of(stream, origin).stop(stream.stream_id, savepoint=False, **options)


def cancel(stream: StreamHandle, *, origin: str, **options: Any) -> StopResult:
    return client_of(stream, origin).cancel(stream.stream_id, **options)


def restart(stream: StreamHandle, start_from: StartFrom, *, origin: str, **options: Any) -> RewindPreview:
    return client_of(stream, origin).restart(stream.stream_id, start_from=start_from, **options)


def request_start(stream: StreamHandle, start_from: StartFrom, *, origin: str) -> RequestRecord:
    return client_of(stream, origin).request_start(stream.stream_id, start_from=start_from)


def set_desired_state(stream: StreamHandle, desired: str | None, *, origin: str, **options: Any) -> DesiredRecord:
    return client_of(stream, origin).set_desired_state(stream.stream_id, desired, **options)


def apply_retention(stream: StreamHandle, **options: Any) -> RetentionReport:
    return client_of(stream).apply_retention(stream.stream_id, **options)


def apply_savepoint_history(stream: StreamHandle, schedule: str, history: Any) -> RetentionReport:
    return client_of(stream).apply_savepoint_history(stream.stream_id, schedule=schedule, history=history)
