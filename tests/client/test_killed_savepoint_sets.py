"""A process is killed with SIGKILL before any of its changes while it takes a savepoint set or restarts from one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_ckpt.catalog.database import Database
from tests.client.test_savepoint_sets import Pipeline
from tests.support.executioner import CHANGES, Executioner
from tests.support.thorough import either

STEPS = (*CHANGES[:-2], (Database, "writing"))


def is_killed(pipeline: Pipeline, work: Callable[[Pipeline], object], *, at_step: int) -> bool:
    """Let a process do the work, and kill it before the n-th change of files or catalog; False if it ends first."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            Executioner(patch, at_step, *STEPS, is_real=True)
            try:
                work(pipeline)
            except BaseException as error:  # noqa: BLE001 - whatever a child of a test raises must not go on in the test
                print(f"the child failed: {error!r}")
                os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_set_is_taken_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    step = 0
    while True:
        pipeline = Pipeline(tmp_path / str(step), whole=False)
        pipeline.commit(2)
        killed = is_killed(pipeline, lambda at: at.client.trigger_savepoint_set("orders+", label="june"), at_step=step)
        found = pipeline.client.savepoint_sets()
        assert [set(each.savepoints) for each in found] in ([], [{"orders", "left"}])
        rebuilt, _ = pipeline.rebuilt()
        in_storage = rebuilt.savepoint_sets.all()
        assert [set(each.savepoints) for each in in_storage] in ([], [{"orders", "left"}])
        assert {each.set_id for each in found} <= {each.set_id for each in in_storage}
        rebuilt.close()
        if not killed:
            assert found
            break
        # All but one that was complete at that moment belong to their streams, which delete them like checkpoints.
        in_sets = {each.snapshot_id for made in found for each in made.savepoints.values()}
        kept = [
            each
            for stage in pipeline.stages
            for each in stage.catalog.snapshots.completed(stage.name)
            if not each.claimed and each.snapshot_id not in in_sets
        ]
        assert len(kept) <= 1
        pipeline.commit()
        assert pipeline.take().savepoints["left"].batch_id == 2
        pipeline.assert_uninterrupted()
        pipeline.catalog.close()
        step += either(quick=17, thorough=1)
    assert step > 20


def test_restart_is_finished_or_undone(tmp_path: Path) -> None:
    step = 0
    while True:
        pipeline = Pipeline(tmp_path / str(step), whole=False)
        pipeline.commit(2)
        june = pipeline.client.trigger_savepoint_set("orders+", label="june")
        pipeline.commit(2)
        if not is_killed(pipeline, lambda at: at.client.restart_savepoint_set("june", start=False), at_step=step):
            assert pipeline.batches == [1, 1]
            break
        pipeline.assert_consistent()
        before = f"before-{june.set_id[:8]}"
        can_be_undone = before in {each.label for each in pipeline.client.savepoint_sets()}
        if step % 2 or not can_be_undone:
            pipeline.client.restart_savepoint_set("june", start=False)
            assert pipeline.batches == [1, 1]
        pipeline.client.restart_savepoint_set(before, start=False)
        assert pipeline.batches == [3, 3]
        pipeline.commit(3)
        pipeline.assert_uninterrupted()
        pipeline.catalog.close()
        step += either(quick=41, thorough=1)
    assert step > 60
