"""Metadata, links and tables of streams for Dagster's pages."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import dagster as dg

from dagster_ckpt.catalog.history import SnapshotTally
from dagster_ckpt.catalog.records import EventRecord, EventType, SnapshotRecord
from dagster_ckpt.errors import OptionError
from dagster_ckpt.sinks.registry import sinks_in
from dagster_ckpt.stream.snapshots import COLUMNS

SEQUENCE_KEY = "dagster_ckpt/sequence"
# Also the name of a tag of runs.
DEPLOYMENT_KEY = "dagster_ckpt/deployment"
SNAPSHOT_ID_KEY = "dagster_ckpt/snapshot_id"
BATCH_ID_KEY = "dagster_ckpt/batch_id"
STREAM_ID_KEY = "dagster_ckpt/stream_id"
# Kafka partitions whose lag a report plots.
PLOTTED_PARTITIONS = 16
_END_OF_9999_MS = 253_402_300_799_999
TIMELINE_KEY = "dagster_ckpt/timeline"
PAGE_KEY = "dagster_ckpt/checkpoint_page"
GRAPH_KEY = "dagster_ckpt/stream_graph"


@dataclass(frozen=True)
class CheckpointPage:
    """Links to the page of `dagster-ckpt ui`; `url` is its address in users' browsers."""

    url: str

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise OptionError(f"checkpoint_page is {self.url!r}, but must be an address such as http://localhost:3080.")

    def of_stream(self, stream_id: str) -> dg.UrlMetadataValue:
        return dg.MetadataValue.url(f"{self.url.rstrip('/')}/streams/{quote(stream_id)}")

    def of_graph(self, stream_id: str) -> dg.UrlMetadataValue:
        return dg.MetadataValue.url(f"{self.url.rstrip('/')}/graph?stream={quote(stream_id, safe='')}")

    def of_snapshot(self, stream_id: str, snapshot_id: str) -> dg.UrlMetadataValue:
        return dg.MetadataValue.url(f"{self.of_stream(stream_id).url}/-/snapshots/{quote(snapshot_id)}")


def identity(event: EventRecord) -> str:
    """Identify an event by its snapshot if it has one: a re-created catalog counts from one again."""
    return event.snapshot_id or f"event {event.sequence}"


def materialization(
    key: dg.AssetKey,
    event: EventRecord,
    snapshot: SnapshotRecord | None,
    tally: SnapshotTally | None,
    page: CheckpointPage | None = None,
    *,
    deployment: str | None = None,
) -> dg.AssetMaterialization:
    """Make a materialization of a snapshot, or of its event if its row cannot be read.

    `tally` has the checkpoints since the previous report, with this one.
    """
    metadata = snapshot_metadata(snapshot) if snapshot is not None else dict(event.payload)
    batch_id = metadata.get(BATCH_ID_KEY, "unknown")
    since = (
        {}
        if tally is None
        else {
            "dagster_ckpt/new_checkpoints": tally.count,
            "dagster_ckpt/new_rows": tally.rows,
            "dagster_ckpt/new_mb": _mb(tally.incremental_bytes),
        }
    )
    if page is not None and event.snapshot_id is not None:
        metadata[PAGE_KEY] = page.of_snapshot(event.stream_id, event.snapshot_id)
    return dg.AssetMaterialization(
        key,
        description=f"{metadata.get('dagster_ckpt/kind', event.type.value)} at batch {batch_id}",
        metadata={**_of(event, deployment), **metadata, **since, **_output(snapshot)},
        tags={"dagster/data_version": str(batch_id)},
    )


def _output(snapshot: SnapshotRecord | None) -> dict[str, Any]:
    places = {sink.place for sink in sinks_in(snapshot.properties)} if snapshot is not None else set()
    if snapshot is None or len(places) != 1 or (place := places.pop()) is None:
        return {}
    columns = [dg.TableColumn(name, kind) for name, kind in snapshot.properties.get(COLUMNS) or ()]
    schema = {"dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns))} if columns else {}
    return {"dagster/uri": place, **schema}


def failure_observation(key: dg.AssetKey, event: EventRecord, deployment: str | None = None) -> dg.AssetObservation:
    kind = "savepoint" if event.type is EventType.SAVEPOINT_FAILED else "checkpoint"
    return dg.AssetObservation(
        key,
        description=f"a {kind} failed",
        metadata={**_of(event, deployment), "dagster_ckpt/failure": str(event.payload.get("reason", "unknown"))},
    )


def _of(event: EventRecord, deployment: str | None) -> dict[str, Any]:
    return known({SEQUENCE_KEY: str(event.sequence), SNAPSHOT_ID_KEY: identity(event), DEPLOYMENT_KEY: deployment})


def snapshot_metadata(snapshot: SnapshotRecord) -> dict[str, Any]:
    """Describe a snapshot. The asset's page plots numbers, so ids and positions are text."""
    watermark_ms = snapshot.watermark_ms
    figures: dict[str, Any] = {
        "dagster_ckpt/snapshot": snapshot.reference,
        BATCH_ID_KEY: None if snapshot.batch_id is None else str(snapshot.batch_id),
        STREAM_ID_KEY: snapshot.stream_id,
        TIMELINE_KEY: str(snapshot.timeline),
        "dagster_ckpt/rows": snapshot.rows,
        "dagster_ckpt/state_rows": snapshot.state_rows,
        "dagster_ckpt/duration_s": None if snapshot.duration_ms is None else snapshot.duration_ms / 1000,
        "dagster_ckpt/full_mb": _mb(snapshot.full_bytes),
        "dagster_ckpt/incremental_mb": _mb(snapshot.incremental_bytes),
        "dagster_ckpt/kind": snapshot.kind.value,
        "dagster_ckpt/trigger": snapshot.trigger.value,
        "dagster_ckpt/location": dg.MetadataValue.path(snapshot.location or ""),
        SNAPSHOT_ID_KEY: snapshot.snapshot_id,
        "dagster_ckpt/watermark": (
            snapshot.watermark
            if watermark_ms is None or watermark_ms > _END_OF_9999_MS
            else dg.MetadataValue.timestamp(watermark_ms / 1000)
        ),
    }
    if lags := snapshot.lags:
        figures["dagster_ckpt/records_behind"] = sum(lags.values())
        # There may be thousands.
        worst = sorted(lags, key=lambda name: (-lags[name], name))[:PLOTTED_PARTITIONS]
        figures |= {f"dagster_ckpt/records_behind/{name}": lags[name] for name in sorted(worst)}
    return known(figures)


def _mb(count: int | None) -> float | None:
    return None if count is None else round(count / 1e6, 3)


def number_in(metadata: Mapping[str, dg.MetadataValue], key: str) -> int | None:
    """Read a number, which reports store as text and older reports stored as a number."""
    value = metadata[key].value if key in metadata else None
    return int(str(value)) if str(value).isdecimal() else None


def known(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, at_most: int | None = None) -> str:
    """Make a table, or "none" without rows. Rows beyond `at_most` are only counted."""
    every = list(rows)
    shown = every if at_most is None else every[:at_most]
    if not shown:
        return "none"
    lines = map(_row, [header, ["---"] * len(header), *shown])
    more = len(every) - len(shown)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, str | int | None]]) -> dg.TableMetadataValue:
    """Make a sortable table. Its cells must not be empty, so None and "" are shown as a dash."""
    records = [
        dg.TableRecord({name: "-" if value in (None, "") else value for name, value in row.items()}) for row in rows
    ]
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table(records=records, schema=schema)


def _row(cells: Sequence[object]) -> str:
    # A vertical bar or a line break would end the cell.
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


class OtherDeployments:
    """Decides whether this process reports a stream that another deployment reports, too.

    The code location that was loaded last reports it. The other logs that once and is silent until it is loaded again,
    so a new catalog takes over at once, and reports never alternate.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._silent: set[str] = set()

    def silence(self, stream_id: str, reported_by: Collection[object], ours: str, log: logging.Logger) -> bool:
        """Whether to report nothing; `reported_by` has the deployments of the newest reports (None: unknown)."""
        others = sorted({str(each) for each in reported_by if each not in (None, ours)})
        if not others or stream_id not in self._reported:
            self._reported.add(stream_id)
            self._silent.discard(stream_id)
            return False
        if stream_id not in self._silent:
            self._silent.add(stream_id)
            log.error(
                f"{stream_id}: deployment {', '.join(others)} has reported on the same asset keys since this one "
                f"({ours}) did. This sensor reports nothing of the stream any more. Give the streams of one of the two "
                "code locations a key_prefix; if the other is gone, reload this code location"
            )
        return True
