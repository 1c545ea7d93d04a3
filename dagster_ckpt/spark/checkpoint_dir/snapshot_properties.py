"""Snapshot properties that describe the query, for users and for checks before a restore.

The names are those in the snapshot's header (docs/evidence/coverage.md lists them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink
from dagster_ckpt.spark.checkpoint_dir.logs import CommitEntry, OffsetEntry
from dagster_ckpt.spark.checkpoint_dir.operators import Operator
from dagster_ckpt.spark.execution_mode import mode_in_logs
from dagster_ckpt.values.untrusted import from_json

# Settings that Spark pins per kind of operator, by operator name.
_STATE_FORMATS = {
    "stateStoreSave": "aggregation",
    "sessionWindowStateStoreSaveExec": "sessionWindow",
    "symmetricHashJoin": "join",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "flatMapGroupsWithState",
}


@dataclass(frozen=True)
class CutFacts:
    """What a cut has read from the live directory.

    Attributes:
        committed: Offsets of the committed batch.
        before: The entry before it.
        in_flight: The entry of the batch in flight, if it is included.
        commit: The commit.
        operators: The stateful operators.
        captured: What the sinks remember of their batches.
    """

    committed: OffsetEntry
    before: OffsetEntry | None
    in_flight: OffsetEntry | None
    commit: CommitEntry
    operators: Sequence[Operator]
    captured: Sequence[CapturedSink]


def describe(facts: CutFacts) -> dict[str, Any]:
    """The properties of a snapshot, as far as the live directory contains them."""
    committed, commit, operators = facts.committed, facts.commit, facts.operators
    return {
        "watermark_ms": max(committed.watermark_ms, commit.next_watermark_ms),
        "in_flight_batch": facts.in_flight.batch_id if facts.in_flight else None,
        "conf": dict(committed.conf),
        "source_offsets": {name: _offset(text) for name, text in committed.sources.items()},
        "state_store_provider": committed.provider_class if operators else None,
        "state_partitions": committed.partitions if operators else None,
        "state_operators": [_operator(operator, committed, commit) for operator in operators],
        "sinks": [sink.properties() for sink in facts.captured],
        "named_sinks": {name: dict(sink) for name, sink in commit.sinks.items()},
        "formats": {
            "offset_log": committed.format_version,
            "commit_log": commit.format_version,
            "state_checkpoint": None if not operators else 1 if commit.state_ids is None else 2,
        },
        "pyspark_of_reader": _pyspark_version(),
        "mode": mode_in_logs(committed, facts.before).value,
    }


def _operator(operator: Operator, committed: OffsetEntry, commit: CommitEntry) -> dict[str, Any]:
    ids = (commit.state_ids or {}).get(operator.number)
    kind = _STATE_FORMATS.get(operator.name)
    version = committed.conf.get(f"spark.sql.streaming.{kind}.stateFormatVersion") if kind else None
    return {
        "number": operator.number,
        "name": operator.name,
        "stores": list(operator.stores),
        "partitions": 1 if operator.single_partition else len(ids) if ids else committed.partitions,
        "state_format": int(version) if version else None,
        "metadata_format": operator.metadata_version,
        "schema_format": operator.schema_version,
    }


def _offset(text: str | None) -> Any:
    """An offset as Spark wrote it: JSON, or arbitrary text for a custom source."""
    try:
        return None if text is None else from_json(text)
    except ValueError:
        return text


@cache
def _pyspark_version() -> str | None:
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return None
