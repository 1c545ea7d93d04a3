"""The page of the bench says of each target what was measured, and nothing of the machine's whereabouts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.__main__ import MEASURED, PAGE
from benchmarks.machine import describe_machine
from benchmarks.measuring import Sample, Series, run, tree_size
from benchmarks.page import render
from benchmarks.results import SectionResult, Target, at_least, at_most, timing_table
from benchmarks.sections import SECTIONS
from benchmarks.sections.flink import FLINK_STREAM


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (at_least("ours is faster", 4, 4.0), True),
        (at_least("ours is faster", 4, 3.99), False),
        (at_most("new files", 20, 20), True),
        (at_most("new files", 20, 21), False),
        (at_least("ours is faster", 4, None, reason="not installed: restic"), None),
    ],
)
def test_a_target_is_met_up_to_its_limit_and_unknown_without_a_figure(target: Target, met: bool | None) -> None:
    assert target.met is met


def series(**walls: list[float]) -> Series:
    made = Series()
    for name, values in walls.items():
        for value in values:
            made.add(name, Sample(value, value))
    return made


def test_ratios_are_medians_of_pairs_so_that_a_slow_minute_of_the_machine_does_not_count() -> None:
    measured = series(peer=[2.0, 20.0, 2.2], ours=[1.0, 10.0, 1.1])
    assert measured.ratio("peer", "ours") == pytest.approx(2.0)


def test_competitors_change_their_order_from_one_repetition_to_the_next() -> None:
    order: list[str] = []

    def competitor(name: str) -> Sample:
        order.append(name)
        return Sample(1.0, 1.0)

    measured = Series()
    for repetition in range(2):
        measured.interleave({"a": lambda: competitor("a"), "b": lambda: competitor("b")}, repetition)
    assert order == ["a", "b", "b", "a"]


def test_the_page_shows_targets_that_were_not_met_and_sections_that_were_not_run(tmp_path: Path) -> None:
    result = SectionResult(
        name="local",
        title="Snapshots on a local disk",
        method="How.",
        measured_at="2026-01-01T00:00+00:00",
        took_s=1,
        load=(0.1, 0.2),
        machine={"memory": "8 GiB", "Java": "17.0.1"},
        versions={"rsync": "3.5"},
        tables=(timing_table("Full", series(snapshot=[1.0], cp=[3.0]), ours="snapshot"),),
        targets=(at_least("fast", 4, 3.0), at_least("by far", 9, None, reason="no peer")),
    )
    result.keep(tmp_path)
    kept = SectionResult.model_validate_json((tmp_path / "local.json").read_text())
    page = render([kept], ["flink"])
    assert "| fast | at least 4 | 3 | **not met** |" in page
    assert "| by far | at least 9 | not measured: no peer |  |" in page
    assert "| cp | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 |" in page
    assert "0 of 2 are met" in page
    assert "On 8 GiB, Java 17.0.1." in page
    assert "Not measured yet: flink." in page


def test_the_page_of_the_repository_is_that_of_the_kept_results() -> None:
    kept = {path.stem: SectionResult.model_validate_json(path.read_text()) for path in MEASURED.glob("*.json")}
    names = [section.name for section in SECTIONS]
    page = render([kept[name] for name in names if name in kept], [name for name in names if name not in kept])
    assert page == (MEASURED.parent.parent / PAGE).read_text()


def test_the_machine_is_described_without_its_name_and_paths(tmp_path: Path) -> None:
    said = " ".join(describe_machine(tmp_path).values())
    assert socket.gethostname() not in said
    assert str(tmp_path) not in said
    assert "GiB" in said


def test_a_peer_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="status 3: sorry"):
        run("sh", "-c", "echo sorry; exit 3", cwd=tmp_path)


def test_a_peer_that_waits_for_ever_is_killed() -> None:
    with pytest.raises(RuntimeError, match=r"sleep 600 \| cat was killed after 1 s"):
        run("bash", "-c", "sleep 600 | cat", timeout_s=1)


def test_hard_links_to_files_counted_before_are_new_files_without_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    (first / "a").write_bytes(b"12345")
    before = tree_size(first)
    (second / "a").hardlink_to(first / "a")
    (second / "b").write_bytes(b"67")
    after = tree_size(second, without=before)
    assert (after.files, after.bytes) == (2, 2)


def test_the_program_for_flink_is_where_its_section_looks_for_it() -> None:
    """It was renamed, and the bench wrote "not measured" where every ratio to Flink had been."""
    assert FLINK_STREAM.is_file()
