"""The lease that makes a process the only writer of a stream."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.catalog.leases import lease_held_message
from dagster_ckpt.catalog.records import Holder, LeaseRecord
from dagster_ckpt.catalog.time_limits import DEFAULT_TTL_MS, GIVE_UP_AFTER
from dagster_ckpt.errors import CatalogError, CkptError, LeaseHeldError, LeaseLostError, QueryStopError
from dagster_ckpt.stream.liveness import (
    JVM_GRACE_S,
    Liveness,
    holder_liveness,
    is_held,
    jvm_of,
    process_of,
    this_holder,
)

_LOOK_S = 0.5

HolderIsOver = Callable[[LeaseRecord], bool]


@dataclass(frozen=True)
class AcquiredLease:
    """A lease. `predecessor` is the expired one, if its holder is not proven to have ended.

    Every write carries `record`, and is refused once there is another holder.
    """

    record: LeaseRecord
    predecessor: LeaseRecord | None = None

    @property
    def predecessor_ended(self) -> bool:
        """Whether no earlier holder can still write."""
        return not self.record.predecessor_unproven


def acquire(
    catalog: Catalog,
    stream_id: str,
    holder: Holder,
    *,
    ttl_ms: int = DEFAULT_TTL_MS,
    holder_is_over: HolderIsOver = lambda _lease: False,
    interrupted: Callable[[], bool] = lambda: False,
    above: int = 0,
) -> AcquiredLease:
    """Become the writer of a stream; LeaseHeldError if a live execution is, or `interrupted` returns True.

    An expired lease is taken over at once if nothing shows that its holder is alive. A holder that lives on this
    machine gets the time of its lease again, because the catalog's clock may have jumped ahead. If `holder_is_over`
    (its run is recorded as finished), this call waits for the lease to expire. The new token is higher than `above`.
    """
    catalog.database.limit_calls(ttl_ms)
    grace = _GracePeriod()
    while True:
        present = catalog.leases.current(stream_id)
        is_over = present is not None and holder_liveness(present, jvm_grace_s=JVM_GRACE_S) is Liveness.ENDED
        if present is not None and not is_over and grace.lasts(present):
            if interrupted():
                raise LeaseHeldError(
                    f"Waiting for the lease of stream {stream_id!r} was interrupted: process {present.pid} of run "
                    f"{present.run_id}, which holds it, is alive and may renew it."
                )
            time.sleep(_LOOK_S)
            continue
        try:
            take_over = present if is_over else None
            taken = catalog.leases.acquire(stream_id, holder, ttl_ms, take_over=take_over, above=above)
            return AcquiredLease(taken, None if is_over else present)
        except LeaseHeldError:
            if present is None or is_over or interrupted() or not holder_is_over(present):
                raise
        time.sleep(_LOOK_S)


def acquire_for(catalog: Catalog, stream_id: str, verb: str, origin: str, *, above: int = 0) -> AcquiredLease:
    return acquire(catalog, stream_id, this_holder(f"{verb}-{uuid.uuid4()}", origin, None), above=above)


@contextmanager
def repeating(action: Callable[[], object], *, every_s: float, name: str) -> Iterator[None]:
    """Call `action` in a thread until the end of the context; an error of this package skips one call."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            with suppress(CkptError):
                action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _GracePeriod:
    """Time for a living process to renew its lease, which expired by the catalog's clock."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = 0.0

    def lasts(self, lease: LeaseRecord) -> bool:
        seen = (lease.token, lease.renewed_at_ms)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        # Both times are of the same moment, so a jump of the clock does not matter.
        ttl_s = (lease.expires_at_ms - lease.renewed_at_ms) / 1000
        if not lease.expired or time.monotonic() - self._since >= ttl_s:
            return False
        return lease.pid != os.getpid() and process_of(lease).liveness() is Liveness.ALIVE


def refuse_while_written(catalog: Catalog, stream_id: str, *, holder_is_over: HolderIsOver) -> None:
    """Refuse a start early if a live run writes the stream. `acquire` decides."""
    present = catalog.leases.current(stream_id)
    if present is not None and is_held(present) and not holder_is_over(present):
        raise LeaseHeldError(lease_held_message(present, catalog.now_ms()))


def has_living_holder(catalog: Catalog, stream_id: str) -> bool:
    return is_held(catalog.leases.current(stream_id))


class LeaseKeeper:
    """Renews a lease in a background thread and reports when it is lost.

    A holder that cannot renew stops acting as the writer shortly before the lease expires, so that it never overlaps
    with its successor.
    """

    def __init__(self, catalog: Catalog, lease: LeaseRecord, *, ttl_ms: int = DEFAULT_TTL_MS) -> None:
        self._catalog = catalog
        self._lease = lease
        self._ttl_ms = ttl_ms
        self._stop = threading.Event()
        self._lost: LeaseLostError | None = None
        self._losing = threading.Lock()
        self._renewed_at = time.monotonic()
        self._has_asked = False
        self._trouble = "the catalog did not answer"
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._renew, name=f"lease-{lease.stream_id}", daemon=True)

    @property
    def record(self) -> LeaseRecord:
        return self._lease

    @property
    def lost(self) -> LeaseLostError | None:
        """Why this process is no longer the writer.

        Decided by the clock: the renewing thread may hang in a catalog call.
        """
        age_s = time.monotonic() - self._renewed_at
        if self._lost is None and age_s >= self._give_up_after_s:
            self._lose(LeaseLostError(self._why_not_renewed(age_s)))
        return self._lost

    def _why_not_renewed(self, age_s: float) -> str:
        what = f"The lease of stream {self._lease.stream_id!r}"
        done = "The query is stopped so that a successor can take over."
        if not self._has_asked:
            return (
                f"{what} was not renewed for {age_s:.0f} s, because this process or its machine was paused. {done} If "
                "none does, start the stream again."
            )
        return (
            f"{what} could not be renewed for {age_s:.0f} s and is about to expire ({self._trouble}). {done} Make the "
            "catalog available and start the stream again."
        )

    def _lose(self, error: LeaseLostError) -> None:
        with self._losing:
            is_known, self._lost = self._lost is not None, self._lost or error
        if not is_known:
            stream_id = self._lease.stream_id
            message = f"Lost the lease of stream {stream_id}: token {self._lease.token}. {error}"
            log_transition(stream_id, message, level=logging.ERROR)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lease during a short step, other than catalog writes, that changes what a successor would use.

        Raises CatalogError if the catalog did not hold it until the end.
        """
        with self._noting_a_loss(), self._catalog.leases.held(self._lease):
            yield

    def check(self) -> None:
        """Raise LeaseLostError if the catalog has another writer; for work that destroys nothing a successor uses."""
        with self._noting_a_loss():
            self._catalog.leases.check(self._lease)

    @contextmanager
    def _noting_a_loss(self) -> Iterator[None]:
        lost = self.lost
        if lost is not None:
            raise lost
        try:
            yield
        except LeaseLostError as error:
            self._lose(error)
            raise

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=self._ttl_ms / 1000)
        if self._lost is None and not (_follows_query_stop_error(error) and self._jvm_may_run()):
            # Without the catalog, the lease expires.
            with suppress(CatalogError):
                self._catalog.leases.release(self._lease)

    def _jvm_may_run(self) -> bool:
        """Whether the query may still write; then the lease is not released."""
        jvm = jvm_of(self._lease)
        return jvm is None or jvm.liveness() is not Liveness.ENDED

    @property
    def _give_up_after_s(self) -> float:
        return self._ttl_ms / 1000 * GIVE_UP_AFTER

    def _renew(self) -> None:
        usual_s = self._ttl_ms / 3000
        wait_s = usual_s
        while not self._stop.wait(wait_s) and self.lost is None:
            # The database starts counting after this moment.
            self._has_asked, asked_at = True, time.monotonic()
            try:
                self._catalog.leases.renew(self._lease, self._ttl_ms)
                self._renewed_at, self._has_asked, wait_s = asked_at, False, usual_s
                self._note_renewed()
            except LeaseLostError as error:
                self._lose(error)
            except CkptError as error:
                # The failed call may have taken long: retry soon.
                self._trouble, wait_s = str(error), usual_s / 10
                self._note_failure(asked_at)

    def _note_failure(self, asked_at: float) -> None:
        if self._failing_since is not None or self.lost is not None:
            return
        self._failing_since = asked_at
        left_s = self._give_up_after_s - (time.monotonic() - self._renewed_at)
        stream_id = self._lease.stream_id
        message = f"Could not renew the lease of stream {stream_id}, which expires in {left_s:.0f} s: {self._trouble}"
        log_transition(stream_id, message, level=logging.WARNING)

    def _note_renewed(self) -> None:
        if self._failing_since is None:
            return
        took_s = time.monotonic() - self._failing_since
        self._failing_since = None
        stream_id = self._lease.stream_id
        log_transition(stream_id, f"Renewed the lease of stream {stream_id} again, after {took_s:.0f} s")


def _follows_query_stop_error(error: BaseException | None) -> bool:
    """Whether an error is a QueryStopError, or was raised while one was handled."""
    seen: list[BaseException] = []
    unseen = [error]
    while unseen:
        each = unseen.pop()
        if isinstance(each, QueryStopError):
            return True
        if each is not None and each not in seen:
            seen.append(each)
            unseen += [each.__cause__, each.__context__]
    return False
