"""Where batches begin in a topic, and the newest of which a reader with given offsets has a record."""

from __future__ import annotations

import random

import pytest

from dagster_ckpt.sinks.kafka.marker import (
    Position,
    begins_of_batches,
    newest_read,
    positions_in,
    with_position,
)
from tests.support.thorough import either


def position(batch: int, offset: int, *, epoch: int = 1, query: str = "first") -> Position:
    return Position(batch, offset, (epoch, 0), query)


BEGINS = {0: [position(4, 10), position(5, 20), position(6, 20)], 1: [position(4, 7), position(5, 7), position(6, 9)]}
BACK = {0: [*BEGINS[0], position(5, 30, epoch=2, query="second")]}


@pytest.mark.parametrize(
    ("read", "newest"),
    [
        ({}, None),
        ({0: 0, 1: 0}, None),
        # Earlier than all that are kept: at most the one before.
        ({0: 10, 1: 0}, 3),
        ({0: 11, 1: 7}, 4),
        ({0: 20, 1: 7}, 4),
        # The fifth has no record there, or the sixth has none: the later counts.
        ({0: 21, 1: 7}, 6),
        ({0: 20, 1: 8}, 5),
        ({0: 20, 1: 10}, 6),
    ],
)
def test_newest_batch_of_which_a_record_was_read(read: dict[int, int], newest: int | None) -> None:
    assert newest_read(read, BEGINS, "first", rewound=False) == (newest, 0, "")


@pytest.mark.parametrize(
    ("read", "rewound", "current", "found"),
    [
        ({0: 15}, True, "second", (4, 0, "")),
        # The fifth has no record there: the sixth begins where it does.
        ({0: 21}, True, "second", (4, 1, "")),
        ({0: 31}, True, "second", (5, 1, "")),
        ({0: 31}, True, "third", (None, 0, "the stream has written no batch since it went back, and the position is")),
        ({0: 0}, True, "third", (None, 0, "")),
        ({2: 1}, False, "second", (None, 0, "where batches begin in partition 2 is")),
    ],
)
def test_batches_that_were_replaced_count_as_undone(
    read: dict[int, int], rewound: bool, current: str, found: tuple[int | None, int, str]
) -> None:
    assert newest_read(read, BACK, current, rewound=rewound) == found


def test_newest_positions_are_kept_as_text() -> None:
    text, many = "", ""
    for batch in range(40):
        text = with_position(text, position(batch, 10**15 + batch, epoch=12, query="1f2e3d4c"), 3)
        many = with_position(many, position(batch, batch), 5_000)

    assert positions_in(text)[-1] == position(39, 10**15 + 39, epoch=12, query="1f2e3d4c")
    assert [each.batch for each in positions_in(text)] == list(range(24, 40))
    assert [each.batch for each in positions_in(many)] == [38, 39]
    assert len(text) < 700
    assert positions_in("") == []
    with pytest.raises(ValueError, match="unpack"):
        positions_in("1:2")


def test_no_schedule_of_writers_hides_a_record_that_was_read() -> None:
    """Writers that ask for the end of the topic and append at random, against the records themselves."""
    chance = random.Random(7)
    for _ in range(either(quick=100, thorough=2_000)):
        topic: list[int] = []
        texts = ["", "", ""]
        for batch in range(chance.randrange(1, 6)):
            asked: set[int] = set()
            for writer in [*chance.choices(range(3), k=9), 0, 1, 2]:
                if writer not in asked:
                    asked.add(writer)
                    texts[writer] = with_position(texts[writer], position(batch, len(topic)), 1)
                topic += [batch] * chance.randrange(3)
        begins = {0: begins_of_batches(map(positions_in, texts))}
        for offset in range(len(topic) + 1):
            read = topic[:offset]
            newest, undone, why = newest_read({0: offset}, begins, "first", rewound=False)
            assert (newest, undone, why) == (max(read, default=None), 0, "")
