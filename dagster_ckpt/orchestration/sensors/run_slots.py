"""Whether Dagster's run queue can hold the streams of a code location."""

from __future__ import annotations

import dagster as dg

from dagster_ckpt.orchestration._compat import RunSlots, run_slots
from dagster_ckpt.orchestration.run_status import STREAM_ID_TAG


def slots_warning(instance: dg.DagsterInstance, streams: int) -> str | None:
    """What to change in dagster.yaml; None if that many streams fit in, with a slot to spare for a restart."""
    slots = run_slots(instance, STREAM_ID_TAG)
    return describe_slots(slots, streams) if slots is not None else None


def describe_slots(slots: RunSlots, streams: int) -> str | None:
    """As `slots_warning`. Pure."""
    limits = {"concurrency.runs.max_concurrent_runs": slots.total, f"the limit of {STREAM_ID_TAG}": slots.of_streams}
    short = [f"{name} is {limit}" for name, limit in limits.items() if limit is not None and limit <= streams]
    if not short:
        return None
    return (
        f"dagster.yaml leaves no slot to spare: {' and '.join(short)}, and this code location has {streams} streams, "
        "each of which occupies a slot for as long as it runs. Runs beyond that, of streams, restarts and batch work, "
        "wait in the queue. Raise the limits: one slot per stream, some for restarts and operator jobs, and those of "
        "batch work"
    )
