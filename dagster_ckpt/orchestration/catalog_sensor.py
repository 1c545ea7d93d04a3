"""The catalog sensor: it observes. Each completed image becomes one event on its streaming asset."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dagster as dg
import pendulum

from dagster_ckpt.catalog import Catalog, EventRecord, EventType, ImageRecord
from dagster_ckpt.errors import CkptError
from dagster_ckpt.lifecycle.job import wall_clock_ms
from dagster_ckpt.orchestration._compat import UnresolvedAssetJobDefinition
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.streaming_asset import StreamingAsset

SEQUENCE_KEY = "dagster_ckpt/sequence"
COMPLETED = (EventType.CHECKPOINT_COMPLETED, EventType.SAVEPOINT_COMPLETED)
# A tick must end well inside Dagster's 60 s; what is left comes with the next one.
EVENTS_PER_TICK = 200
IMAGE_ID_KEY = "dagster_ckpt/image_id"
# Materializations read at a time while looking for what an interrupted tick has stored.
PAGE = 100
# Nothing is reported before it happened. The clocks of catalog and Dagster may differ, by less than this.
CLOCK_SKEW_S = 24 * 3600.0


@dataclass(frozen=True)
class SensorCursor:
    """What the sensor remembers.

    Attributes:
        sequence: The last catalog event it has dealt with.
        downstream_due: Whether downstream assets are still to be started for what was reported.
        downstream_at_ms: When they were started last.
    """

    sequence: int = 0
    downstream_due: bool = False
    downstream_at_ms: int = 0

    @staticmethod
    def parse(text: str | None) -> "SensorCursor":
        """Read a cursor; None and an empty text begin at the start of the catalog."""
        return SensorCursor(**json.loads(text)) if text else SensorCursor()

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def build_catalog_sensor(
    streams: Sequence[StreamingAsset],
    *,
    downstream: UnresolvedAssetJobDefinition | dg.JobDefinition | None = None,
    downstream_interval_seconds: int = 0,
    name: str = "checkpoint_catalog_sensor",
    minimum_interval_seconds: int = 5,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that reports each completed checkpoint and savepoint on its streaming asset, once.

    Its cursor is the sequence of the catalog's events. Dagster stores a tick's events before the
    cursor, so a daemon that dies in between would report some twice; therefore images that are
    already on the asset are left out.

    Args:
        streams: The streaming assets to report on.
        downstream: A job to start after new images, one run at a time.
        downstream_interval_seconds: Shortest time between two starts of it.
        name: Name of the sensor.
        minimum_interval_seconds: Shortest time between two looks.
        default_status: Whether it runs from the start.
    """
    keys = {stream.job_id: stream.key for stream in streams}

    @dg.sensor(
        name=name,
        jobs=[downstream] if downstream is not None else None,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Reports each completed checkpoint and savepoint on its streaming asset, exactly once"
        + (f", and starts {downstream.name}." if downstream is not None else "."),
    )
    def checkpoint_catalog_sensor(
        context: dg.SensorEvaluationContext, checkpoint_catalog: CheckpointCatalogResource
    ) -> dg.SensorResult:
        cursor = SensorCursor.parse(context.cursor)
        catalog = checkpoint_catalog.catalog()
        events = catalog.events.after(cursor.sequence, limit=EVENTS_PER_TICK)
        news = [event for event in events if event.type in COMPLETED and event.job_id in keys]
        reported = {
            key: already_reported(context.instance, key, [event for event in news if keys[event.job_id] == key])
            for key in {keys[event.job_id] for event in news}
        }
        materializations = [
            _materialization(keys[event.job_id], event, _image(catalog, event))
            for event in news
            if _identity(event) not in reported[keys[event.job_id]]
        ]
        sequence = events[-1].sequence if events else cursor.sequence
        due = downstream is not None and (cursor.downstream_due or bool(news))
        started_at_ms = cursor.downstream_at_ms
        requests = []
        rested = wall_clock_ms() - started_at_ms >= downstream_interval_seconds * 1000
        if due and rested and downstream is not None and not _is_in_progress(context.instance, downstream.name):
            requests.append(dg.RunRequest(run_key=f"catalog-{sequence}", job_name=downstream.name))
            due, started_at_ms = False, wall_clock_ms()
        return dg.SensorResult(
            run_requests=requests,
            asset_events=materializations,
            cursor=str(SensorCursor(sequence, due, started_at_ms)),
            skip_reason=None if requests or materializations else dg.SkipReason("no new checkpoints"),
        )

    return checkpoint_catalog_sensor


def already_reported(instance: dg.DagsterInstance, key: dg.AssetKey, news: Sequence[EventRecord]) -> frozenset[str]:
    """Which of these images are on their asset already, from a tick that was cut off or a cursor that was reset.

    Ours are there in the order of the catalog, with other people's materializations anywhere between them.
    """
    candidates = {_identity(event) for event in news}
    since = dg.AssetRecordsFilter(key, after_timestamp=min(event.at_ms for event in news) / 1000 - CLOCK_SKEW_S)
    found: set[str] = set()
    cursor: str | None = None
    while True:
        page = instance.fetch_materializations(since, limit=PAGE, cursor=cursor)
        for record in page.records:
            materialization = record.asset_materialization
            metadata = materialization.metadata if materialization else {}
            sequence, image_id = metadata.get(SEQUENCE_KEY), metadata.get(IMAGE_ID_KEY)
            if image_id is not None and image_id.value in candidates:
                found.add(str(image_id.value))
            elif isinstance(sequence, dg.IntMetadataValue) and (sequence.value or 0) < news[0].sequence:
                return frozenset(found)
        if not page.has_more:
            return frozenset(found)
        cursor = page.cursor


def _identity(event: EventRecord) -> str:
    # Not the sequence: a catalog that was made anew counts from one again.
    return event.image_id or f"event {event.sequence}"


def image_metadata(image: ImageRecord) -> dict[str, Any]:
    """The figures of an image, as Dagster metadata; numbers are plotted on the asset's page."""
    figures: dict[str, Any] = {
        "dagster_ckpt/batch_id": image.batch_id,
        "dagster_ckpt/rows": image.rows,
        "dagster_ckpt/state_rows": image.state_rows,
        "dagster_ckpt/duration_ms": image.duration_ms,
        "dagster_ckpt/full_bytes": image.full_bytes,
        "dagster_ckpt/incremental_bytes": image.incremental_bytes,
        "dagster_ckpt/number": image.number,
        "dagster_ckpt/kind": image.kind,
        "dagster_ckpt/trigger": image.trigger.value,
        "dagster_ckpt/location": dg.MetadataValue.path(image.location or ""),
        IMAGE_ID_KEY: image.image_id,
        "dagster_ckpt/watermark": image.watermark,
    }
    watermark_ms = _epoch_ms(image.watermark)
    if watermark_ms is not None:
        figures["dagster_ckpt/watermark_time"] = dg.MetadataValue.timestamp(watermark_ms / 1000)
        # The page plots whole and decimal numbers only, no timestamps.
        figures["dagster_ckpt/watermark_ms"] = watermark_ms
    return {name: value for name, value in figures.items() if value is not None}


def _epoch_ms(watermark: str | None) -> int | None:
    try:
        if watermark is None:
            return None
        return round(pendulum.from_format(watermark, "YYYY-MM-DDTHH:mm:ss.SSS[Z]", tz="UTC").timestamp() * 1000)
    except ValueError:
        # A damaged row is shown as it is; it must not keep the others from being reported.
        return None


def _materialization(key: dg.AssetKey, event: EventRecord, image: ImageRecord | None) -> dg.AssetMaterialization:
    metadata = image_metadata(image) if image is not None else dict(event.payload)
    batch_id = metadata.get("dagster_ckpt/batch_id", "unknown")
    return dg.AssetMaterialization(
        key,
        description=f"{metadata.get('dagster_ckpt/kind', event.type.value)} at batch {batch_id}",
        metadata={SEQUENCE_KEY: event.sequence, IMAGE_ID_KEY: _identity(event), **metadata},
        tags={"dagster/data_version": str(batch_id)},
    )


def _image(catalog: Catalog, event: EventRecord) -> ImageRecord | None:
    try:
        return catalog.images.get(event.image_id) if event.image_id is not None else None
    except CkptError:
        # A row that cannot be read is reported with what the event itself says.
        return None


def _is_in_progress(instance: dg.DagsterInstance, job_name: str) -> bool:
    statuses = [
        dg.DagsterRunStatus.QUEUED,
        dg.DagsterRunStatus.NOT_STARTED,
        dg.DagsterRunStatus.STARTING,
        dg.DagsterRunStatus.STARTED,
        dg.DagsterRunStatus.CANCELING,
    ]
    return bool(instance.get_runs(dg.RunsFilter(job_name=job_name, statuses=statuses), limit=1))
