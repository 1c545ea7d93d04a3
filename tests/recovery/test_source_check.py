"""What a start says of a topic that does not have the records that it would read next. No Spark, no broker."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.recovery import source_check


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (range(5), "continues at 7, the topic ends at 5: it was deleted and created again"),
        (range(7), None),
        (range(3, 9), None),
        (range(7, 9), None),
        (range(8, 9), "the topic begins at 8; 1 records were deleted"),
        (None, "Topic sales no longer has partition 0"),
    ],
)
def test_a_topic_without_the_next_records_is_told(
    kept: range | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_check, "kept_offsets", lambda *_: {("sales", 0): kept})
    nobody: Any = Mock()

    gone = list(source_check._gone(nobody, nobody, {"sales": {"0": 7}}))

    assert [said in each for each in gone] == [True] if said is not None else gone == []
