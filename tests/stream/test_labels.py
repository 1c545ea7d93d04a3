"""Labels: a start finds a snapshot by its label, so no label may mean something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_ckpt.errors import OptionError
from dagster_ckpt.stream.snapshotting import SnapshotOrder
from dagster_ckpt.stream.start_from import LONGEST_LABEL, StartPoint, checked_label
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.rewind_history import History
from tests.support.verbs import stop_with_savepoint, trigger_savepoint

ORIGIN = "a test"
WORDS = [point.value for point in StartPoint if point not in (StartPoint.NAMED, StartPoint.BATCH)]
REFUSED = [
    *WORDS,
    *(word.upper() for word in WORDS),
    *("batch-3", "BATCH-3", "chk-1", "Chk-17", "all", "", " ", " mine", "mine\n", "a\nb", "\ud800"),
    *("/a/path", "s3://bucket/chk-1", "file:///etc", "3f2b8f0c-5d2e-4b5e-9a51-8f3d1c0a7e11", "x" * (LONGEST_LABEL + 1)),
]
GOOD = ["before-release-42", "empty-2", "my latest", "batch-x", "scheduled-2026-11-22T03-00", "naïve 😀", "a/b", None]


@pytest.mark.parametrize("label", REFUSED)
def test_a_label_that_means_something_else_is_refused_at_every_door(tmp_path: Path, label: str) -> None:
    """Finding f28: a start from the savepoint `empty` gave up all state and emptied the sink's log."""
    stream = History(tmp_path).shelf.stream
    with pytest.raises(OptionError, match="cannot be the label of a snapshot"):
        trigger_savepoint(stream, origin=ORIGIN, label=label)
    with pytest.raises(OptionError, match="cannot be the label of a snapshot"):
        stop_with_savepoint(stream, origin=ORIGIN, label=label)
    with pytest.raises(OptionError, match="cannot be the label of a snapshot"):
        SnapshotOrder(SnapshotKind.SAVEPOINT, 1, label=label)
    assert stream.catalog.snapshots.of_stream(stream.stream_id) == []


@pytest.mark.parametrize(
    ("label", "why"),
    [
        (" ", "it is blank"),
        ("mine ", "it has surrounding whitespace, which start_from strips"),
        (" mine", "it has surrounding whitespace, which start_from strips"),
        ("x" * 129, "it has 129 characters, but at most 128 are allowed"),
        ("a\nb", "it has characters that cannot be printed"),
        ("/a/path", "it looks like a location"),
        ("bucket://chk", "it looks like a location"),
        ("Latest", "it is a keyword of start_from"),
        ("batch-3", "it is a keyword of start_from"),
        ("ALL", "it is a keyword of start_from"),
        ("Live", "it is a keyword of start_from"),
        ("Chk-17", "it looks like the number or the id of a snapshot"),
        ("3f2b8f0c-5d2e-4b5e-9a51-8f3d1c0a7e11", "it looks like the number or the id of a snapshot"),
    ],
)
def test_why_a_label_is_refused_is_told_with_one_that_would_do(label: str, why: str) -> None:
    with pytest.raises(OptionError) as refusal:
        checked_label(label)

    shown = repr(label[:LONGEST_LABEL])
    assert str(refusal.value) == (
        f"{shown} cannot be the label of a snapshot: {why}. Give a name such as before-release-42."
    )


@pytest.mark.parametrize("label", [*GOOD, "x" * LONGEST_LABEL])
def test_any_other_label_is_taken(label: str | None) -> None:
    assert checked_label(label) == label
