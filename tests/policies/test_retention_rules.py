from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies.retention import (
    KeepAtEnd,
    Latest,
    RetainedKind,
    RetainedSnapshot,
    RetentionContext,
    decide_retention,
    deletes_live_directory,
    needed_for_recovery,
    snapshot_to_recover_from,
)
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState

HERE = Path(__file__).parent
RETENTION = yaml.safe_load((HERE / "retention.yaml").read_text())
SUBSUMPTION = yaml.safe_load((HERE / "subsumption.yaml").read_text())
RECOVERY = yaml.safe_load((HERE / "recovery.yaml").read_text())

KINDS = {
    "cp": RetainedKind.CHECKPOINT,
    "sp": RetainedKind.SAVEPOINT,
    "stop": RetainedKind.STOP_WITH_SAVEPOINT,
}


def queue(names: list[str]) -> list[RetainedSnapshot]:
    return [RetainedSnapshot(name, KINDS[name.rstrip("0123456789")]) for name in names]


def subsumed(snapshots: list[RetainedSnapshot], num_retained: int) -> list[RetainedSnapshot]:
    needed = needed_for_recovery(snapshots)
    return list(decide_retention(Latest(num_retained), snapshots, RetentionContext(0), needed=needed).dropped)


def keeps_checkpoints(state: TerminalState, cleanup: ExternalizedCheckpointCleanup) -> bool:
    checkpoint = RetainedSnapshot("cp1")
    return list(KeepAtEnd(cleanup).keep([checkpoint], RetentionContext(0, ended_as=state))) == [checkpoint]


@pytest.mark.parametrize("case", RETENTION, ids=lambda case: f"{case['cleanup']}-{case['state']}")
def test_what_is_kept_at_the_end_follows_the_policy(case: dict[str, Any]) -> None:
    state = TerminalState(case["state"])
    cleanup = ExternalizedCheckpointCleanup[case["cleanup"]]
    assert keeps_checkpoints(state, cleanup) is case["keeps"]
    assert deletes_live_directory(state, cleanup) is case["live_directory_deleted"]


def test_the_retention_table_is_complete() -> None:
    told = {(case["cleanup"], case["state"]) for case in RETENTION}
    assert told == {(c.name, s.value) for c in ExternalizedCheckpointCleanup for s in TerminalState}


def test_a_live_directory_is_never_deleted_where_its_snapshots_are_kept() -> None:
    for state in TerminalState:
        for cleanup in ExternalizedCheckpointCleanup:
            assert not (keeps_checkpoints(state, cleanup) and deletes_live_directory(state, cleanup))


@pytest.mark.parametrize("case", [c for c in SUBSUMPTION if "leaves" in c], ids=lambda case: case["says"])
def test_a_new_snapshot_takes_the_place_of_old_ones(case: dict[str, Any]) -> None:
    leaves = subsumed(queue(case["snapshots"]), case["num_retained"])
    assert [snapshot.snapshot_id for snapshot in leaves] == case["leaves"]


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=12),
    num_retained=st.integers(1, 5),
)
def test_savepoints_push_no_checkpoint_out_unless_they_are_counted(kinds: list[str], num_retained: int) -> None:
    snapshots = queue([f"{kind}{number}" for number, kind in enumerate(kinds)])
    checkpoints = [snapshot for snapshot in snapshots if snapshot.kind is RetainedKind.CHECKPOINT]

    # A policy is shown savepoints only if they count.
    assert subsumed(checkpoints, num_retained) == checkpoints[:-num_retained]
    counted = subsumed(snapshots, num_retained)
    assert snapshot_to_recover_from(snapshots, prefer_checkpoint=False) not in counted
    # As in Flink, at most as many leave as are in excess.
    assert len(counted) <= max(0, len(snapshots) - num_retained)


@pytest.mark.parametrize("case", [c for c in SUBSUMPTION if "rejects" in c], ids=lambda case: case["says"])
def test_fewer_than_one_retained_snapshot_is_rejected(case: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=case["rejects"]):
        subsumed(queue(case["snapshots"]), case["num_retained"])


@pytest.mark.parametrize("case", RECOVERY, ids=lambda case: case["says"])
def test_a_recovery_takes_the_newest_snapshot_of_its_preference(case: dict[str, Any]) -> None:
    snapshot = snapshot_to_recover_from(queue(case["snapshots"]), prefer_checkpoint=case["prefer_checkpoint"])
    assert (snapshot and snapshot.snapshot_id) == case["takes"]
