"""Registering everything again where the catalog was lost: images and live directories say what they are themselves.

After that the next plain start goes on exactly, and retention, labels and `start_from` know the images again. Nothing
but the catalog is changed, in one transaction; the verb may be called again. A new, empty catalog becomes the record of
the deployment that the images name; images of another deployment are never registered. Nobody knows whether the query
that the lost catalog knew of has ended, so the next start fences it off and goes on in a fresh directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_ckpt.catalog.rebuilding import RebuiltJob
from dagster_ckpt.catalog.records import ExecutionStatus, Holder, ImageRecord, ImageStatus, ImageTrigger, StartCause
from dagster_ckpt.errors import CkptError, LiveDirectoryError, OptionError
from dagster_ckpt.snapshot.manifest import ImageHeader
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.stream.handle import BuiltDirectory, StreamingJob
from dagster_ckpt.stream.lease import LeaseKeeper, acquire
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import IF_LOST, owner_of_live_folder
from dagster_ckpt.stream.snapshot_names import describe_image
from dagster_ckpt.stream.start_from import checked_label
from dagster_ckpt.stream.unregistered import DEPLOYMENT

# Of a process that nobody can find any more: what it left is not taken for an end in order.
_LOST = Holder("rebuilt", "rebuilt", "unknown", 0, None, "unknown")


@dataclass(frozen=True)
class RebuildReport:
    """What was found of a job and registered.

    Attributes:
        job_id: The job.
        registered: Images that the catalog did not list, each in a few words.
        live_directory: Where the next plain start goes on; None: it restores the newest image, if there is one.
        passed_over: What was found and not registered, each with the reason.
    """

    job_id: str
    registered: tuple[str, ...]
    live_directory: str | None
    passed_over: tuple[str, ...]

    def sentences(self) -> list[str]:
        """The report for a log."""
        where = self.live_directory or "the newest image, which is restored"
        return [
            *(f"registered {name}" for name in self.registered),
            *(f"passed over {what}" for what in self.passed_over),
            f"the next plain start of {self.job_id} goes on in {where}",
        ]


def rebuild(job: StreamingJob, *, origin: str, take_over_deployment: str | None = None) -> RebuildReport:
    """Register what lies in a job's storage and live folder, and what the catalog does not list.

    Where the catalog knows where the query stands, only missing images are added. The query must not run, also not one
    that an other catalog knows of.

    Args:
        job: The job.
        origin: Who asks, as the lease shows it meanwhile.
        take_over_deployment: Id of the deployment whose catalog was lost: what is its own is registered. Nothing of it
            may run. Without it only what is of this catalog's own deployment is.

    Raises:
        CatalogError: This catalog is in use as the record of its own deployment, so it cannot take over another.
        LiveDirectoryError: What is there is another deployment's; the message names it.
        LeaseHeldError: The job runs.
        StorageAccessError: The storage or the live folder cannot be reached; nothing was changed.
    """
    if take_over_deployment is not None:
        job.catalog.take_over_deployment(take_over_deployment, only_if_unused=True)
    record = job.register()
    holder = this_holder(f"rebuild-{uuid.uuid4()}", origin, None)
    acquired = acquire(job.catalog, job.job_id, holder, above=job.token_in_use(record))
    with LeaseKeeper(job.catalog, acquired.record) as lease:
        known = {image.image_id for image in job.catalog.images.of_job(job.job_id)}
        found, passed_over = _images(job)
        owner = owner_of_live_folder(job)
        if record.live_generation == 0 and not known:
            _refuse_anothers(job, found, owner)
        found = _of_this_deployment(job, found, passed_over)
        missing = [image for image in found if image.image_id not in known]
        numbers = [image.number or 0 for image in found]
        next_number = max(numbers, default=0) + 1
        if record.live_generation > 0:
            job.catalog.rebuilding.add_images(lease.record, missing, next_number=next_number)
            live_directory = record.live_directory
        else:
            is_ours = owner is None or owner == job.catalog.deployment_id
            rebuilt, batch = _job(found, missing, next_number, job.live_directories() if is_ours else [])
            if rebuilt.live_directory is not None or missing:
                _note_execution(job, lease, rebuilt, batch)
                job.catalog.rebuilding.register(lease.record, rebuilt)
            live_directory = rebuilt.live_directory
    names = tuple(describe_image(image) for image in missing)
    return RebuildReport(job.job_id, names, live_directory, tuple(passed_over))


def _refuse_anothers(job: StreamingJob, found: Sequence[ImageRecord], folder_owner: str | None) -> None:
    """Refuse to take what is another deployment's for what a lost catalog knew, unless a person says that it is."""
    own = job.catalog.deployment_id
    named = {str(image.properties[DEPLOYMENT]) for image in found if DEPLOYMENT in image.properties}
    if own in named and folder_owner in (None, own):
        return
    owners = sorted({*named, *([folder_owner] if folder_owner is not None else [])} - {own})
    if owners:
        raise LiveDirectoryError(
            f"What lies in the places of job {job.job_id!r} is of deployment {', '.join(owners)}, and this catalog is "
            f"the record of deployment {own}. Nothing was registered. Where that one still exists, the two share "
            f"folders by mistake: give this one folders of its own. {IF_LOST.format(owner=folder_owner or owners[0])}"
        )


def _images(job: StreamingJob) -> tuple[list[ImageRecord], list[str]]:
    """The job's images that are whole as far as their lengths tell, by number, and why others are left out."""
    found: list[ImageRecord] = []
    passed_over: list[str] = []
    for location in [*job.store.checkpoints(), *job.store.savepoints()]:
        try:
            manifest = job.store.manifest(location)
            problems = job.store.verify(location, deep=False)
        except CkptError as error:
            passed_over.append(f"{location}: {error}")
            continue
        header = manifest.header
        if header.job_id != job.job_id:
            continue
        if problems:
            passed_over.append(f"{location}: {problems[0]}")
            continue
        found.append(_record(header, location, manifest.full_bytes, manifest.file_count))
    return sorted(found, key=lambda image: image.number or 0), passed_over


def _of_this_deployment(job: StreamingJob, found: list[ImageRecord], passed_over: list[str]) -> list[ImageRecord]:
    """The images of the deployment that this catalog is the record of."""
    own = job.catalog.deployment_id
    for image in found:
        if image.properties.get(DEPLOYMENT) != own:
            of = image.properties.get(DEPLOYMENT) or "a deployment that it does not name"
            passed_over.append(f"{image.location}: it is of {of}, and this catalog is the record of {own}")
    return [image for image in found if image.properties.get(DEPLOYMENT) == own]


def _record(header: ImageHeader, location: str, full_bytes: int, file_count: int) -> ImageRecord:
    said = header.properties
    timeline, trigger, schedule = said.get("timeline"), said.get("trigger"), said.get("schedule")
    return ImageRecord(
        image_id=header.image_id,
        job_id=header.job_id,
        execution_id=None,
        kind=header.kind.value,
        number=header.number,
        status=ImageStatus.COMPLETED,
        trigger=ImageTrigger(trigger) if trigger in set(ImageTrigger) else ImageTrigger.MANUAL,
        timeline=timeline if isinstance(timeline, int) else 0,
        location=location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        full_bytes=full_bytes,
        file_count=file_count,
        label=_label(said.get("label")),
        schedule=schedule if isinstance(schedule, str) else None,
        properties=dict(said),
        created_at_ms=header.created_at_ms,
        completed_at_ms=header.created_at_ms,
    )


def _label(said: object) -> str | None:
    try:
        return checked_label(said) if isinstance(said, str) else None
    except OptionError:
        return None


def _job(
    found: Sequence[ImageRecord],
    missing: Sequence[ImageRecord],
    next_number: int,
    built: Sequence[BuiltDirectory],
) -> tuple[RebuiltJob, int | None]:
    timeline = max((image.timeline for image in found), default=0)
    begins, restored = _begins(found)
    live, batch = _where_it_stood(built, found)
    generation = max((each.generation for each in built), default=0)
    later = [image for image in found if image.timeline == timeline and (image.batch_id or 0) > (batch or 0)]
    if live is not None and batch is not None and later:
        # It was rewound after those were taken: they belong to the timeline that was left.
        past = [image for image in found if image.timeline == timeline and (image.batch_id or 0) <= batch]
        begins[timeline + 1] = (timeline, batch)
        restored[timeline + 1] = past[-1].image_id if past else None
        timeline += 1
    plan = found[-1].properties.get("plan") if found else None
    rebuilt = RebuiltJob(
        images=missing,
        next_number=next_number,
        live_directory=live.live.url if live is not None else None,
        live_generation=generation,
        timeline=timeline,
        restored_image_id=restored.get(timeline),
        begins=begins,
        plan=plan if isinstance(plan, dict) else None,
    )
    return rebuilt, batch


def _begins(found: Sequence[ImageRecord]) -> tuple[dict[int, tuple[int, int]], dict[int, str | None]]:
    """Of each timeline whose first image names the one before it: where it goes on from, and with which image."""
    by_id = {image.image_id: image for image in found}
    first: dict[int, ImageRecord] = {}
    for image in found:
        first.setdefault(image.timeline, image)
    begins: dict[int, tuple[int, int]] = {}
    restored: dict[int, str | None] = {}
    for timeline, image in first.items():
        parent = by_id.get(str(image.properties.get("parent_image_id")))
        if parent is not None and parent.timeline != timeline and parent.batch_id is not None:
            begins[timeline] = (parent.timeline, parent.batch_id)
            restored[timeline] = parent.image_id
    return begins, restored


def _where_it_stood(
    built: Sequence[BuiltDirectory], found: Sequence[ImageRecord]
) -> tuple[BuiltDirectory | None, int | None]:
    """The newest live directory, if it is whole; an older one only where no image could be restored instead."""
    for place, each in enumerate(reversed(built)):
        state = inspect_live_directory(each.live)
        if state.status is LiveStatus.GOOD:
            return each, state.batch_id
        if found and place == 0 and state.status is not LiveStatus.EMPTY:
            return None, None
    return None, None


def _note_execution(job: StreamingJob, lease: LeaseKeeper, rebuilt: RebuiltJob, batch: int | None) -> None:
    """What an execution would have reported: where the query writes to, and how far it was."""
    newest = rebuilt.images[-1].properties if rebuilt.images else {}
    noted, others = newest.get("sinks"), newest.get("other_sinks")
    sinks = [f"FileSink[{sink['path']}]" for sink in noted] if isinstance(noted, list) else []
    sinks += [str(sink) for sink in others] if isinstance(others, list) else []
    execution_id = str(uuid.uuid4())
    executions = job.catalog.executions
    executions.begin(lease.record, execution_id, run_id="rebuilt from storage", cause=StartCause.MANUAL, holder=_LOST)
    if rebuilt.live_directory is not None:
        executions.running(lease.record, execution_id, live_directory=rebuilt.live_directory, recovery={})
    progress = {"sinks": sinks} | ({"batch_id": batch} if batch is not None else {})
    executions.heartbeat(lease.record, execution_id, progress)
    reason = "its catalog was lost; registered again from its storage"
    executions.end(lease.record, execution_id, ExecutionStatus.SUSPENDED, reason, settled=True)
