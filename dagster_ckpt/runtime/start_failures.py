"""After a start or its query failed: examine what it began from, and note damage in the catalog."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from dagster_ckpt.errors import CkptError, LeaseLostError
from dagster_ckpt.recovery.damage import is_suspicious, is_suspicious_end
from dagster_ckpt.recovery.examination import Damage, Examiner, describe_point
from dagster_ckpt.recovery.loading_trial import unloadable_state
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.recovery_points import NOT_LOADABLE, live_point, point_of_origin
from dagster_ckpt.runtime.run import QueryEnd, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper


class StartFailures:
    """The failures of one execution.

    Args:
        stream: The stream.
        request: What the run was asked to do.
        lease: The lease that makes this process the writer.
        execution_id: The execution.
        examiner: Examines the points that the run starts from.
    """

    def __init__(
        self, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str, examiner: Examiner
    ) -> None:
        self._stream = stream
        self._request = request
        self._lease = lease
        self._execution_id = execution_id
        self._examiner = examiner

    def passes_over(self, plan: RecoveryPlan, live: LiveDirectory | None, error: Exception) -> bool:
        """Whether a start failed because the point that it began from is damaged. If so, that is noted.

        Args:
            plan: What the start did.
            live: The directory that it had prepared; None if it failed before.
            error: Why it failed. If the point is good, it is given a note that says so.
        """
        if not is_suspicious(error) or (live is None and not isinstance(error, CkptError)):
            # Before the query was started, any other error is one of its description.
            return False
        try:
            damage = self._examiner.damage_of_point(plan) if live is None else self._examine(live)
        except CkptError as trouble:
            # Nothing is known, so nothing changes.
            error.add_note(f"What the start began from could not be examined after the failure: {trouble}")
            return False
        if damage is None:
            error.add_note(_told(describe_point(plan, live), None))
            return False
        if live is None:
            self._note_failure(plan.point or "", damage, plan.to_batch, plan=plan)
        return True

    def examined(self, live: LiveDirectory, end: QueryEnd) -> QueryEnd:
        """After the started query failed: its end, with what an examination of its live directory found.

        Damage is noted, so that the next start chooses another point.

        Args:
            live: The directory in which the query ran.
            end: How it failed.
        """
        if self._request.interrupted() or not is_suspicious_end(end.trace or end.reason):
            return end
        try:
            damage = self._examine(live)
            found = _told(f"The live directory {live.url}", damage)
        except CkptError as error:
            # Nothing is known, so nothing changes.
            found = f"The live directory {live.url} could not be examined after the failure: {error}"
        return replace(end, reason=f"{end.reason}\n{found}")

    def _examine(self, live: LiveDirectory) -> Damage | None:
        """Examine the directory in which a query failed. Damage of it, and of what it was made from, is noted."""
        damage = self._examiner.damage_of_live(live)
        if damage is None:
            request = self._request
            trouble = unloadable_state(self._stream, live, request.describe, interrupted=request.interrupted)
            damage = Damage(NOT_LOADABLE, trouble) if trouble is not None else None
        if damage is None:
            return None
        with suppress(LeaseLostError):
            self._note_failure(live_point(live.url), damage, None)
            record = self._stream.catalog.streams.get(self._stream.stream_id)
            origin = record.origin if record.live_directory == live.url else None
            point = point_of_origin(origin)
            # Damage that it already had comes back each time that the directory is made from it.
            inherited = self._examiner.damage_of_origin(record) if point is not None else None
            if origin is not None and point is not None and inherited is not None:
                self._note_failure(point, inherited, origin.batch_id)
        return damage

    def _note_failure(
        self, point: str, damage: Damage, batch_id: int | None, *, plan: RecoveryPlan | None = None
    ) -> None:
        self._stream.catalog.recoveries.failed(
            self._lease.record,
            self._execution_id,
            point,
            error=damage.error,
            detail=damage.detail,
            is_certain=True,
            batch_id=batch_id,
            rewound_batches=plan.rewound_batches if plan is not None else None,
            rewound_ms=plan.rewound_ms if plan is not None else None,
        )


def _told(what: str, damage: Damage | None) -> str:
    if damage is not None:
        return f"{what} was examined after the failure and is damaged: {damage.detail}"
    return (
        f"{what} was examined after the failure and is intact, so the stream stays there: the cause lies in the "
        "code, a source, a sink or the environment."
    )
