"""Describes a checkpoint directory whose query is unknown: its operators, sources, state and Spark version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import features_in_use
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.versions import oldest_release, written_by


@dataclass(frozen=True)
class CheckpointDescription:
    """What a checkpoint directory says of its query.

    Attributes:
        url: The directory.
        batch_id: The newest committed batch.
        in_flight: The batch that is planned and not committed, or None.
        query_id: Id of the query.
        written_by: The releases of Spark that may have written it.
        oldest_spark: The oldest release that can continue there.
        operators: Its stateful operators, one short text each.
        state_store: Class name of the state store provider; None if it keeps no state.
        sources: Its sources, each with its offset, shortened.
        named_sinks: Names of its sinks, if its code names them (Spark 4.2 and later).
        watermark_ms: Its watermark, or 0.
    """

    url: str
    batch_id: int
    in_flight: int | None
    query_id: str
    written_by: str
    oldest_spark: str
    operators: tuple[str, ...]
    state_store: str | None
    sources: tuple[str, ...]
    named_sinks: tuple[str, ...]
    watermark_ms: int

    def messages(self) -> list[str]:
        """The description in a few lines."""
        flight = f"; batch {self.in_flight} is planned and not committed" if self.in_flight is not None else ""
        state = ", ".join(self.operators) or "none"
        kept = f", in {self.state_store}" if self.state_store is not None else ""
        return [
            f"query {self.query_id}, after batch {self.batch_id}{flight}",
            f"written by {self.written_by}; {self.oldest_spark} is the oldest that can continue it",
            f"stateful operators: {state}{kept}",
            *(f"source {source}" for source in self.sources),
            *(f"sink named {name}" for name in self.named_sinks),
        ]


def describe_checkpoint(live: LiveDirectory) -> CheckpointDescription:
    """Describe a checkpoint directory. Its query may be running.

    Raises:
        NothingCommittedError: No batch is committed yet.
        LiveDirectoryError: The directory is incomplete, or a file cannot be read.
        UnsupportedSparkError: No supported Spark can continue there.
        StorageAccessError: It cannot be reached.
    """
    found = cut(live, carry_in_flight=True)
    properties = found.properties
    features = features_in_use(live)
    provider = properties["state_store_provider"]
    return CheckpointDescription(
        url=live.url,
        batch_id=found.batch_id,
        in_flight=found.in_flight,
        query_id=found.query_id,
        written_by=written_by(properties["conf"], features),
        oldest_spark=str(oldest_release(features)),
        operators=tuple(_operator(each) for each in properties["state_operators"]),
        state_store=str(provider).rsplit(".", 1)[-1] if provider else None,
        sources=tuple(f"{name}: {_short(offset)}" for name, offset in properties["source_offsets"].items()),
        named_sinks=tuple(properties["named_sinks"]),
        watermark_ms=int(properties["watermark_ms"]),
    )


def _operator(operator: dict[str, Any]) -> str:
    return f"{operator['name']} ({operator['partitions']} partitions)"


def _short(offset: object) -> str:
    text = str(offset)
    return text if len(text) <= 160 else f"{text[:160]}…"
