"""Every way a run ends, done for real to streams under a real `dagster dev`; docs/recovery.md has the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dagster import DagsterRunStatus
from deaths import Deaths
from stage import Ending, Stage

from dagster_ckpt.catalog.records import ExecutionStatus, StartCause

pytestmark = [pytest.mark.dagster_dev, pytest.mark.browser, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    with Stage(tmp_path_factory.mktemp("stage")) as stage:
        deaths = Deaths(stage)
        deaths.play()
        yield deaths


def goes_on(ending: Ending) -> None:
    """A run that nobody wanted to end has failed, lost nothing, and another goes on from where it stopped."""
    assert ending.recorded is DagsterRunStatus.FAILURE
    assert ending.after.status is ExecutionStatus.FAILED
    assert ending.checkpoints > 0
    successor = ending.successor
    assert successor is not None
    assert successor.cause is StartCause.RESTART_NEW_RUN


def resumed_in_place(ending: Ending) -> None:
    goes_on(ending)
    assert ending.successor is not None
    assert (ending.successor.recovery or {})["kind"] == "RESUME"
    assert ending.successor.live_directory == ending.before.live_directory


def resumed_in_a_fresh_directory(ending: Ending) -> None:
    """The process before might still write, as far as anybody can prove."""
    goes_on(ending)
    assert ending.successor is not None
    assert (ending.successor.recovery or {})["kind"] == "CLONE"
    assert ending.successor.live_directory != ending.before.live_directory


@pytest.mark.thorough
def test_terminated_on_the_page(deaths: Deaths) -> None:
    ending = deaths["terminated"]

    assert ending.recorded is DagsterRunStatus.CANCELED
    assert (ending.after.status, ending.after.settled) == (ExecutionStatus.CANCELED, True)
    # DELETE_ON_CANCELLATION
    assert (ending.checkpoints, ending.live_directory_stays) == (0, False)


@pytest.mark.thorough
def test_terminated_on_the_page_with_the_step_in_a_process_of_its_own(deaths: Deaths) -> None:
    ending = deaths["terminated in a step's process"]

    assert ending.recorded is DagsterRunStatus.CANCELED
    assert (ending.after.status, ending.after.settled) == (ExecutionStatus.CANCELED, True)
    assert (ending.checkpoints, ending.live_directory_stays) == (0, False)


@pytest.mark.thorough
def test_force_terminated_and_started_again_at_once(deaths: Deaths) -> None:
    ending = deaths["forced"]

    assert ending.recorded is DagsterRunStatus.CANCELED
    assert (ending.after.status, ending.after.settled) == (ExecutionStatus.CANCELED, True)
    # RETAIN_ON_CANCELLATION
    assert ending.checkpoints > 0
    assert ending.live_directory_stays
    # One writer: the second began after the first had released its lease.
    successor = deaths["SIGKILL of the run worker"].before
    assert successor.cause is StartCause.MANUAL


@pytest.mark.thorough
def test_sigterm(deaths: Deaths) -> None:
    resumed_in_place(deaths["SIGTERM"])


def test_sigkill_of_the_process(deaths: Deaths) -> None:
    resumed_in_place(deaths["SIGKILL of the process"])


@pytest.mark.thorough
@pytest.mark.parametrize("death", ["SIGKILL of the driver", "SIGKILL of the JVM"])
def test_what_dies_below_the_run_is_started_again_within_it(deaths: Deaths, death: str) -> None:
    assert death in deaths.restarted, deaths.troubles
    before, successor = deaths.restarted[death]

    assert deaths.stage.catalog.executions.get(before.execution_id).status is ExecutionStatus.FAILED
    assert successor.run_id == before.run_id
    assert successor.pid not in (before.pid, deaths.stage.worker_pid(successor))
    assert successor.cause is StartCause.RESTART_NEW_RUN
    assert (successor.recovery or {})["kind"] == "RESUME"
    assert successor.live_directory == before.live_directory
    assert (successor.pid == deaths.spare) is (death == "SIGKILL of the driver")
    log = deaths.stage.log(before.run_id)
    assert ("was killed by SIGKILL" if death == "SIGKILL of the driver" else "The stream crashed") in log


@pytest.mark.thorough
def test_sigkill_of_the_step(deaths: Deaths) -> None:
    resumed_in_place(deaths["SIGKILL of the step"])


@pytest.mark.thorough
def test_sigkill_of_the_run_worker_stops_the_orphaned_step(deaths: Deaths) -> None:
    ending = deaths["SIGKILL of the run worker"]

    resumed_in_place(ending)
    assert "stopped: " in ending.log
    assert "has ended" in ending.log or "is recorded as FAILURE" in ending.log


@pytest.mark.thorough
def test_max_runtime(deaths: Deaths) -> None:
    resumed_in_place(deaths["max runtime"])


@pytest.mark.thorough
def test_a_retry_of_dagsters_and_ours_beside_a_hanging_predecessor(deaths: Deaths) -> None:
    ending = deaths["retried while it hangs"]
    resumed_in_a_fresh_directory(ending)
    successor = ending.successor
    assert successor is not None
    # Of the runs that wanted to make the failure good, one could.
    executions = deaths.stage.catalog.executions.of_stream("retried")
    assert [e.run_id for e in executions] == [successor.run_id, ending.before.run_id]
    refused = {run.run_id for run in deaths.runs("retried")} - {e.run_id for e in executions}
    assert all(f"is being written by run {successor.run_id}" in deaths.stage.log(run_id) for run_id in refused)
    assert refused
    # Once it was awake again, the one before stopped, and the other went on.
    assert deaths.living["retried"].status is ExecutionStatus.RUNNING


@pytest.mark.thorough
def test_code_location_reload_leaves_a_stream_running(deaths: Deaths) -> None:
    assert deaths.living["reloaded"].execution_id == deaths.living["often_killed"].execution_id


@pytest.mark.thorough
@pytest.mark.parametrize("death", ["Ctrl-C", "Ctrl-C in a step's process"])
def test_ctrl_c_on_dagster_dev_and_a_later_start_of_it(deaths: Deaths, death: str) -> None:
    ending = deaths[death]

    assert ending.recorded is DagsterRunStatus.FAILURE
    assert ending.checkpoints > 0
    assert ending.live_directory_stays
    successor = deaths.living[f"after {death}"]
    assert successor.cause is StartCause.RESTART_NEW_RUN
    assert successor.live_directory == ending.before.live_directory


@pytest.mark.thorough
def test_sigkill_of_the_code_server_and_a_termination_that_no_signal_can_deliver(deaths: Deaths) -> None:
    ending = deaths["terminated without a code server"]

    assert ending.recorded is DagsterRunStatus.CANCELED
    assert ending.after.status is ExecutionStatus.CANCELED
    assert ending.checkpoints > 0


@pytest.mark.thorough
def test_sigkill_of_the_daemon_leaves_a_stream_running(deaths: Deaths) -> None:
    beside, after = deaths.living["without a daemon"], deaths.living["switched off"]

    assert beside.status is ExecutionStatus.RUNNING
    assert after.execution_id == beside.execution_id == deaths.living["after Ctrl-C"].execution_id


@pytest.mark.thorough
def test_reboot(deaths: Deaths) -> None:
    ending = deaths["reboot"]

    resumed_in_a_fresh_directory(ending)
    assert "has ended without recording it" in ending.log


def test_stopped_with_a_savepoint_by_its_job(deaths: Deaths) -> None:
    ending = deaths["stopped with a savepoint"]

    assert set(deaths.operated.values()) == {DagsterRunStatus.SUCCESS}
    assert ending.recorded is DagsterRunStatus.SUCCESS
    assert (ending.after.status, ending.after.settled) == (ExecutionStatus.FINISHED, True)
    assert ending.checkpoints == 0
    kept = {snapshot.label for snapshot in deaths.stage.catalog.snapshots.completed("often_killed")}
    assert kept == {"trigger_savepoint", "stop_with_savepoint"}


def test_a_stream_that_died_in_every_way_wrote_the_rows_of_an_uninterrupted_run(deaths: Deaths) -> None:
    assert deaths["stopped with a savepoint"]
    numbers = deaths.stage.numbers_written()

    assert len(numbers) > 20
    assert numbers == list(range(len(numbers)))


@pytest.mark.thorough
def test_what_was_reported_before_a_daemon_died_is_not_reported_again(deaths: Deaths) -> None:
    assert deaths["stopped with a savepoint"]
    reported = deaths.reported()

    assert len(reported) == len(set(reported))


def test_no_sensor_of_ours_failed_in_all_of_it(deaths: Deaths) -> None:
    assert deaths["stopped with a savepoint"]
    assert deaths.stage.dev.failed_ticks() == []
