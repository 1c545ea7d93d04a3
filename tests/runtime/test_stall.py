"""Since when a query is stalled: what counts as progress, and what does not."""

from __future__ import annotations

import pytest

from dagster_ckpt.runtime.stall import LOOK_AT_TASKS_AFTER_MS, QueryInactivity, StallDetector
from dagster_ckpt.spark.query.query import QueryActivity, TaskCounts

STEP_MS = 2_000
LONG = 3 * LOOK_AT_TASKS_AFTER_MS // STEP_MS
STARTING = QueryActivity("Initializing sources", in_trigger=False, trigger=-1)
WORKING = QueryActivity("Processing new data", in_trigger=True, trigger=5)
LOOKING = QueryActivity("Getting offsets from FileStreamSource[/in]", in_trigger=True, trigger=5)
WAITING = QueryActivity("Waiting for next trigger", in_trigger=False, trigger=5)


class Watched:
    """A query that is looked at every two seconds."""

    def __init__(self) -> None:
        self.now_ms, self.looks = 1_000, 0
        self.counts: TaskCounts | None = None
        self._stall_detector = StallDetector(self.now_ms)

    def look(self, activity: QueryActivity, batch: int | None = 7, *, times: int = 1) -> QueryInactivity:
        for _ in range(times):
            self.now_ms += STEP_MS
            still = self._stall_detector.note(activity, batch=batch, tasks=self._tasks, now_ms=self.now_ms)
        return still

    def _tasks(self) -> TaskCounts | None:
        self.looks += 1
        return self.counts


@pytest.mark.parametrize("activity", [STARTING, WORKING, LOOKING], ids=lambda each: each.doing)
def test_a_query_that_stays_at_the_same_thing_stands_still(activity: QueryActivity) -> None:
    watched = Watched()
    watched.look(activity)

    assert watched.look(activity, times=LONG) == QueryInactivity(
        activity.doing, is_idle=False, stalled_for_ms=LONG * STEP_MS
    )


def test_a_query_that_waits_for_its_next_trigger_never_stands_still() -> None:
    # A trigger of an hour; what Spark calls data that is available there is what it has just processed.
    assert Watched().look(WAITING, times=1800) == QueryInactivity(WAITING.doing, is_idle=True, stalled_for_ms=0)


@pytest.mark.parametrize(
    ("activity", "batch"),
    [
        (LOOKING, 7),
        (QueryActivity(WORKING.doing, in_trigger=True, trigger=6), 7),
        (WORKING, 8),
    ],
    ids=["it is at something else", "another trigger", "a batch was reported"],
)
def test_a_sign_of_life_ends_it(activity: QueryActivity, batch: int) -> None:
    watched = Watched()
    watched.look(WORKING, times=LONG)

    assert watched.look(activity, batch).stalled_for_ms == 0


def test_a_batch_whose_tasks_come_to_their_ends_does_not_stand_still() -> None:
    watched = Watched()
    watched.look(WORKING)
    for done in range(1, 40):
        watched.counts = TaskCounts(jobs=1, running=2, done=done, total=40)
        still = watched.look(WORKING, times=3)

    assert still.stalled_for_ms <= LOOK_AT_TASKS_AFTER_MS + 3 * STEP_MS
    stuck = watched.look(WORKING, times=LONG)
    assert stuck.stalled_for_ms >= LONG * STEP_MS - STEP_MS
    assert stuck.tasks == watched.counts


def test_tasks_are_looked_at_only_of_a_trigger_that_lasts() -> None:
    watched = Watched()
    watched.look(WORKING)
    watched.look(WORKING, times=LOOK_AT_TASKS_AFTER_MS // STEP_MS - 1)
    assert watched.looks == 0

    assert watched.look(WORKING).tasks is watched.counts
    assert watched.looks == 1


@pytest.mark.parametrize(
    ("still", "is_over"),
    [
        (QueryInactivity(STARTING.doing, is_idle=False, stalled_for_ms=60_001), True),
        (QueryInactivity(STARTING.doing, is_idle=False, stalled_for_ms=60_000), False),
        (QueryInactivity(WAITING.doing, is_idle=True, stalled_for_ms=60_001), False),
        (QueryInactivity(WORKING.doing, is_idle=False, stalled_for_ms=60_001, tasks=TaskCounts(1, 1, 0, 8)), False),
        (QueryInactivity(WORKING.doing, is_idle=False, stalled_for_ms=60_001, tasks=TaskCounts(1, 0, 0, 8)), True),
    ],
    ids=["too long", "just long enough", "at rest", "a task runs", "a stream waits"],
)
def test_a_stall_is_over_the_limit_only_where_no_task_runs(still: QueryInactivity, is_over: bool) -> None:
    assert still.is_over(60_000) is is_over


@pytest.mark.parametrize(
    "record", [None, {}, "nonsense", {"doing": 1, "is_idle": 0, "stalled_for_ms": 1, "tasks": {"x": 1}}]
)
def test_what_another_version_wrote_is_not_known(record: object) -> None:
    assert QueryInactivity.of_record(record) is None
