"""A savepoint with edited state, made without Spark."""

from __future__ import annotations

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotTrigger
from dagster_ckpt.client.derived_savepoint import _write, derive_savepoint
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.recovery.live_directories import restore_into
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import query_metadata, read_metadata
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.golden_stream import GoldenStream


def edited_savepoint(golden: GoldenStream, reference: str, label: str) -> SnapshotRecord:
    """An edited savepoint; the id of the edit is its label. Its rows stay as they are."""
    stream = golden.stream
    plan = planned_start(stream, StartFrom(reference))
    original = plan.snapshot
    assert original is not None
    copy = LiveDirectory(str(golden.root / "scratch" / label))
    restore_into(stream, original.location or "", copy, is_scratch=True)
    before = read_metadata(copy.folder).edits
    copy.folder.write(METADATA, [query_metadata(original.query_id or "", label, [*before, label])])
    done = {"id": label, "reason": "request 4711", "by": "ada"}
    return derive_savepoint(
        stream,
        original,
        lambda identity: _write(stream, original, copy, identity, edit=done, target_directory=None),
        trigger=SnapshotTrigger.EDIT,
        label=label,
        target_directory=None,
        purpose="test",
        state_rows=None,
        began_ms=0,
    )
