"""Deciding what an execution starts from. Pure: facts in, a plan or an error out.

| live directory | predecessor | what is done |
|---|---|---|
| good | has ended | resume in it |
| good | may still write | adopt: go on from the same point in a fresh directory |
| missing or broken | any | restore the newest image |
| none yet | any | start empty |

A batch named as starting point is gone back to in the live directory itself, as far as Spark retains it. Any other
explicit starting point (a savepoint, `latest-checkpoint`, a name) restores an image. Both make a fresh directory: that
is a rewind, and the sinks that can be rolled back are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.catalog import ImageRecord, ImageTrigger, JobRecord
from dagster_ckpt.errors import ImageNotFoundError, LiveDirectoryError
from dagster_ckpt.lifecycle.rewind_distance import distance_passed_over
from dagster_ckpt.lifecycle.start_from import StartFrom, StartPoint
from dagster_ckpt.options import RecoveryClaimMode, Retained, RetainedKind, image_to_recover_from
from dagster_ckpt.spark import Donor, DonorCheck, LiveDirectory, LiveState, LiveStatus

CHECKPOINT = "CHECKPOINT"
SAVEPOINT = "SAVEPOINT"


class RecoveryKind(Enum):
    """What an execution starts from."""

    START_EMPTY = "START_EMPTY"
    RESUME = "RESUME"
    ADOPT = "ADOPT"
    RESTORE = "RESTORE"
    REWIND = "REWIND"
    FINISH_RESTORE = "FINISH_RESTORE"


@dataclass(frozen=True)
class RecoveryPlan:
    """The decision and its reason.

    Attributes:
        kind: What is done.
        reason: One sentence for a person.
        image: The image to restore, for RESTORE.
        from_batch: The batch the live directory stands at, where known.
        to_batch: The batch the query will stand at, where known; below `from_batch` it is a rewind.
        new_query_id: Whether the query goes on as another one, for RESTORE and REWIND.
        claims: Whether the job owns the image from now on, for RESTORE.
        donor: A live directory whose files may be linked, for RESTORE; None: all is read from the image.
    """

    kind: RecoveryKind
    reason: str
    image: ImageRecord | None = None
    from_batch: int | None = None
    to_batch: int | None = None
    new_query_id: bool = False
    claims: bool = False
    donor: Donor | None = None

    @property
    def rewound_batches(self) -> int:
        """How many committed batches will be processed again."""
        if self.from_batch is None or self.to_batch is None:
            return 0
        return max(0, self.from_batch - self.to_batch)

    def as_record(self) -> dict[str, object]:
        """The plan as the catalog keeps it."""
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "image_id": self.image.image_id if self.image else None,
            "from_batch": self.from_batch,
            "to_batch": self.to_batch,
            "new_query_id": self.new_query_id,
            "claims": self.claims,
        }


@dataclass(frozen=True)
class RecoveryFacts:
    """What is known when a job starts.

    Attributes:
        job: The job as the catalog has it.
        live: State of the job's current live directory; None where it never had one.
        images: Restorable images of the current timeline, newest first.
        all_images: Every completed image of the job, and the one at a location named: what an explicit name may mean.
        last_batch: The newest batch any execution reported as committed in that directory, or None.
        has_run: Whether a query was ever started in that directory.
        predecessor_ended: Whether the execution before can write nothing any more.
        prefer_checkpoint: Flink's prefer-checkpoint-for-recovery.
        start_from: What was asked for.
        retained: Batches that the live directory can be rewound to, ascending; looked for where one is asked for.
        ended_in_order: Whether the last execution in the live directory has a recorded end that was no failure, in
            this boot of this machine.
    """

    job: JobRecord
    live: LiveState | None
    images: Sequence[ImageRecord]
    all_images: Sequence[ImageRecord]
    last_batch: int | None
    has_run: bool
    predecessor_ended: bool
    prefer_checkpoint: bool
    start_from: StartFrom
    retained: Sequence[int] = ()
    ended_in_order: bool = False


def plan_recovery(facts: RecoveryFacts) -> RecoveryPlan:
    """Decide what an execution starts from.

    Raises:
        ImageNotFoundError: The image asked for does not exist, or none exists.
        LiveDirectoryError: The live directory is lost or broken and there is no image; the
            message says how to start empty on purpose. Or the batch asked for is not retained there.
    """
    if facts.start_from.point is StartPoint.EMPTY:
        return RecoveryPlan(
            RecoveryKind.START_EMPTY,
            "start_from=empty: all state is left behind, the query starts from its sources' beginning",
            from_batch=_live_batch(facts),
        )
    if facts.start_from.point is StartPoint.BATCH:
        return _back_to_batch(facts)
    if facts.start_from.point is not StartPoint.LATEST:
        image = _asked_for(facts)
        claims = facts.start_from.claim_mode is RecoveryClaimMode.CLAIM
        owned = ", which the job owns from now on and deletes when it is subsumed (CLAIM)" if claims else ""
        return RecoveryPlan(
            RecoveryKind.RESTORE,
            f"start_from={facts.start_from}: {describe_image(image)}{owned}",
            image=image,
            from_batch=_live_batch(facts),
            to_batch=image.batch_id,
            new_query_id=facts.start_from.new_query_id,
            claims=claims,
            donor=_donor(facts),
        )
    if facts.job.pending_restore is not None and _can_be_finished(facts, facts.job.pending_restore):
        forked_from = facts.job.pending_restore.get("fork_of")
        return RecoveryPlan(
            RecoveryKind.FINISH_RESTORE,
            "an earlier restore was cut off before the sinks were rolled back: it is finished first"
            if forked_from is None
            else f"a fork of job {forked_from} after its batch {facts.job.pending_restore.get('batch_id')}",
        )
    if facts.live is None:
        return _without_live_directory(facts, "the job has no live directory yet")
    if facts.live.status is LiveStatus.GOOD:
        return _from_good_live_directory(facts, facts.live)
    if facts.live.status is LiveStatus.EMPTY and facts.last_batch is None:
        kind = RecoveryKind.RESUME if facts.predecessor_ended else RecoveryKind.START_EMPTY
        return RecoveryPlan(kind, "the query has not committed a batch yet: it begins again")
    return _without_live_directory(
        facts, f"the live directory is {facts.live.status.value.lower()}: {facts.live.reason.rstrip('.')}"
    )


def newest_for_recovery(images: Sequence[ImageRecord], *, prefer_checkpoint: bool) -> ImageRecord | None:
    """The image that an automatic recovery takes.

    The newest one; with `prefer_checkpoint` the newest checkpoint if there is any
    (Flink's CompletedCheckpointStore.getLatestCheckpoint before FLINK-20427).

    Args:
        images: Restorable images, newest first.
        prefer_checkpoint: Skip savepoints where a checkpoint exists.
    """
    oldest_first = [Retained(image.image_id, retained_kind(image)) for image in reversed(images)]
    chosen = image_to_recover_from(oldest_first, prefer_checkpoint=prefer_checkpoint)
    return next((image for image in images if chosen is not None and image.image_id == chosen.image_id), None)


def retained_kind(image: ImageRecord) -> RetainedKind:
    """What an image is to the rules of retention and recovery."""
    if is_owned_by_job(image):
        return RetainedKind.CHECKPOINT
    return RetainedKind.STOP_WITH_SAVEPOINT if image.trigger is ImageTrigger.STOP else RetainedKind.SAVEPOINT


def is_owned_by_job(image: ImageRecord) -> bool:
    """Whether the job deletes an image itself: a checkpoint, or a savepoint that a start has claimed."""
    return image.kind == CHECKPOINT or image.claimed


def describe_image(image: ImageRecord) -> str:
    """One image in a few words: what a person calls it and the batch it stands at."""
    name = f"chk-{image.number}" if image.kind == CHECKPOINT else f"savepoint {image.label or image.image_id}"
    return f"{name} at batch {image.batch_id}"


def is_named(image: ImageRecord, reference: str) -> bool:
    """Whether a reference is the id, label, location or, of a checkpoint, the `chk-<n>` of an image."""
    location = (image.location or "").rstrip("/")
    plain = reference.rstrip("/").removesuffix("/_metadata")
    names = {image.image_id, location, location.removeprefix("file://"), image.label}
    if image.kind == CHECKPOINT:
        names.add(f"chk-{image.number}")
    return plain in names


def _back_to_batch(facts: RecoveryFacts) -> RecoveryPlan:
    batch_id = facts.start_from.batch_id
    if batch_id not in facts.retained:
        retained = f"batches {facts.retained[0]} to {facts.retained[-1]}" if facts.retained else "no batch"
        images = ", ".join(describe_image(image) for image in facts.all_images[:8]) or "none"
        raise LiveDirectoryError(
            f"Job {facts.job.job_id!r} cannot go back to batch {batch_id} in its live directory: it can to {retained} "
            "(spark.sql.streaming.minBatchesToRetain says how many Spark keeps). Name one of them, or an image: "
            f"{images}."
        )
    return RecoveryPlan(
        RecoveryKind.REWIND,
        f"start_from={facts.start_from}: go back in the live directory's own files",
        from_batch=_live_batch(facts),
        to_batch=batch_id,
        new_query_id=facts.start_from.new_query_id,
    )


def _donor(facts: RecoveryFacts) -> Donor | None:
    """The live directory, as far as a restore may link its files; a broken one gives nothing."""
    if facts.live is None or facts.live.status is not LiveStatus.GOOD or facts.job.live_directory is None:
        return None
    # Who names an image has a reason not to trust what is there now.
    is_named = facts.start_from.point in (StartPoint.NAMED, StartPoint.PREFERRED_SAVEPOINT)
    is_trusted = facts.ended_in_order and facts.predecessor_ended and not is_named
    check = DonorCheck.IDENTITY if is_trusted else DonorCheck.DIGEST
    return Donor(LiveDirectory(facts.job.live_directory), check)


def _from_good_live_directory(facts: RecoveryFacts, live: LiveState) -> RecoveryPlan:
    if facts.predecessor_ended:
        return RecoveryPlan(
            RecoveryKind.RESUME,
            f"the live directory is whole and its last writer has ended: resume after batch {live.batch_id}",
            from_batch=live.batch_id,
            to_batch=live.batch_id,
        )
    return RecoveryPlan(
        RecoveryKind.ADOPT,
        f"the last writer could not be proven to have ended: go on after batch {live.batch_id} in a fresh directory",
        from_batch=live.batch_id,
        to_batch=live.batch_id,
    )


def _can_be_finished(facts: RecoveryFacts, pending: Mapping[str, object]) -> bool:
    # An empty start has no directory yet. What was restored or rewound may be lost before its query starts.
    is_empty_start = "location" not in pending and "batch_id" not in pending
    return is_empty_start or (facts.live is not None and facts.live.status is LiveStatus.GOOD)


def _was_never_used(facts: RecoveryFacts, live: LiveState) -> bool:
    # The first start switched to it, and its query could not be started: nothing is lost.
    return live.status is LiveStatus.MISSING and not facts.has_run and facts.last_batch is None


def _without_live_directory(facts: RecoveryFacts, why: str) -> RecoveryPlan:
    image = newest_for_recovery(facts.images, prefer_checkpoint=facts.prefer_checkpoint)
    if image is not None:
        return RecoveryPlan(
            RecoveryKind.RESTORE,
            f"{why}; restore {describe_image(image)}{_passed_over(facts, image)}",
            image=image,
            from_batch=facts.last_batch,
            to_batch=image.batch_id,
        )
    if facts.live is None or facts.job.live_directory is None or _was_never_used(facts, facts.live):
        return RecoveryPlan(RecoveryKind.START_EMPTY, f"{why} and there is no image: start empty")
    raise LiveDirectoryError(
        f"Job {facts.job.job_id!r} cannot be recovered by itself: {why} ({facts.job.live_directory}), and the "
        "catalog has no restorable image of it. Put the live directory back, name an image with start_from "
        "(a location works also for one the catalog does not know), or start with start_from=empty to give "
        "the state up on purpose."
    )


def _passed_over(facts: RecoveryFacts, chosen: ImageRecord) -> str:
    distance = distance_passed_over(facts.images, chosen)
    if distance is None:
        return ""
    return (
        f" (prefer_checkpoint_for_recovery passes over {describe_image(facts.images[0])}: {distance} further back, and "
        "what was written since is written again)"
    )


def _asked_for(facts: RecoveryFacts) -> ImageRecord:
    point = facts.start_from.point
    if point is StartPoint.LATEST_CHECKPOINT:
        return _first(facts, [i for i in facts.images if i.kind == CHECKPOINT], "checkpoint")
    if point is StartPoint.LATEST_SAVEPOINT:
        return _first(facts, [i for i in facts.images if i.kind == SAVEPOINT], "savepoint")
    if point is StartPoint.PREFERRED_SAVEPOINT:
        preferred = facts.job.preferred_savepoint_id
        return _first(facts, [i for i in facts.all_images if i.image_id == preferred], "preferred savepoint")
    reference = facts.start_from.reference or ""
    matches = [image for image in facts.all_images if is_named(image, reference)]
    return _first(facts, matches, f"image named {reference!r}")


def _first(facts: RecoveryFacts, images: Sequence[ImageRecord], what: str) -> ImageRecord:
    if images:
        return images[0]
    known = ", ".join(describe_image(image) for image in facts.all_images[:8]) or "none"
    raise ImageNotFoundError(
        f"Job {facts.job.job_id!r} has no {what}. Images it can start from: {known}. "
        "Choose one of them, or start_from=latest."
    )


def _live_batch(facts: RecoveryFacts) -> int | None:
    if facts.live is not None and facts.live.status is LiveStatus.GOOD:
        return facts.live.batch_id
    return facts.last_batch
