"""What the section on recovery makes of the moments that it was given."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.killing import Memory, Phase, Victim
from benchmarks.recovering_streams import PLAIN, WITH_STANDBY
from benchmarks.sections.recovery import CASES, FLINK_RECOVERY, findings

SUBMITTED = "flink_counts.py"


def test_each_case_has_its_medians_and_its_target() -> None:
    taken = {case: [{Phase.RUNNING: 4.0 + n, Phase.FIRST_BATCH: 5.0 + n} for n in range(3)] for case in CASES}
    taken[WITH_STANDBY, Victim.DRIVER] = [{Phase.DETECTED: 0.1, Phase.RUNNING: 5.5, Phase.FIRST_BATCH: 6.0}] * 3

    found = findings(taken, {"spare": Memory(200_000_000, 150_000_000, 300_000_000)}, {"worker": [1, 2, 9]}, "")

    ours, flink, memory = found.tables
    rows = {row[0]: row[1:] for row in ours.rows}
    assert rows["driver's Python"] == ("", "", "", "", "", "", "5.0", "6.0", "7.0")
    assert rows["driver's Python, with standby"][0] == "0.1"
    assert flink.rows == (("worker", "2.00", "1.00", "9.00"),)
    assert memory.rows == (("spare", "200.0", "150.0", "300.0"),)
    met = {target.what: target.met for target in found.targets}
    assert met["driver's Python killed, until its query runs"] is True
    assert met["driver's Python, with standby killed, until its query runs"] is False
    assert len(met) == 5


def test_without_flink_the_page_says_why() -> None:
    taken = {case: [{Phase.RUNNING: 4.0, Phase.FIRST_BATCH: 5.0}] for case in CASES}

    flink = findings(taken, {}, {}, "could not be installed").tables[1]

    assert (flink.rows, flink.note) == ((), "Not measured: could not be installed")
    assert (PLAIN, Victim.RUN) in CASES


def test_the_programs_for_flink_are_where_they_are_looked_for() -> None:
    found = find_spec(FLINK_RECOVERY)
    assert found is not None
    assert found.origin is not None
    peer = Path(found.origin)
    assert f'"{SUBMITTED}"' in peer.read_text()
    assert peer.with_name(SUBMITTED).is_file()
