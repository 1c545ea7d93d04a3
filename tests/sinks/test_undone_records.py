"""What a reader of a topic does next where a roll-back of its writer has left undone records."""

from __future__ import annotations

import random

import pytest

from dagster_ckpt.sinks.kafka.undone import (
    NextRead,
    TopicEnd,
    Undone,
    as_text,
    next_read,
    noted,
    parse,
    skipped_in,
    with_undone,
)
from tests.support.thorough import either

# Records 10 to 20 of partition 0, and 5 to 9 of partition 1.
UNDONE = {0: [Undone(10, 20)], 1: [Undone(5, 9)]}


@pytest.mark.parametrize(
    ("read", "planned", "found"),
    [
        ({0: 20, 1: 9}, None, NextRead()),
        ({0: 25, 1: 9, 2: 3}, {0: 30}, NextRead()),
        ({0: 10, 1: 5, 2: 3}, None, NextRead(behind={0: 20, 1: 9, 2: 3})),
        ({0: 8, 1: 5, 2: 3}, None, NextRead(up_to={0: 10, 1: 5, 2: 3})),
        ({0: 8, 1: 9}, None, NextRead(up_to={0: 10, 1: 9})),
        # A batch that was planned before runs as it was planned.
        ({0: 8, 1: 4}, {0: 9, 1: 5}, NextRead(up_to={0: 9, 1: 5})),
        ({0: 8, 1: 4}, {0: 11, 1: 5}, NextRead(obstacle="its next batch is planned, and reads undone records")),
        ({0: 11, 1: 4}, None, NextRead(obstacle="it has read some of the undone records")),
    ],
)
def test_reader_reads_up_to_what_is_undone_and_goes_on_behind_it(
    read: dict[int, int], planned: dict[int, int] | None, found: NextRead
) -> None:
    assert next_read(read, planned, UNDONE) == found


def test_ranges_that_are_no_longer_recorded_stop_no_reader_behind_them() -> None:
    ranges: list[Undone] = []
    for number in range(9):
        ranges = with_undone(ranges, 10 * number, 10 * number + 5)

    assert ranges[0] == Undone(None, 35)
    assert len(ranges) == 6
    assert next_read({0: 2}, None, {0: ranges}).obstacle
    assert next_read({0: 36}, None, {0: ranges}) == NextRead(up_to={0: 40})


def test_topic_without_a_record_since_has_nothing_undone() -> None:
    assert with_undone([Undone(1, 3)], 7, 7) == [Undone(1, 3)]


def test_ranges_and_ends_are_read_as_they_were_written() -> None:
    ranges = [Undone(None, 4), Undone(7, 9)]
    end = TopicEnd({0: 12, 1: 0}, {0: ranges, 1: []})

    assert parse(as_text(ranges)) == ranges
    assert TopicEnd.of_record(end.as_record()) == end
    assert TopicEnd.of_record({"ends": 3}) is None


def test_note_of_a_source_keeps_its_topics_apart() -> None:
    note = noted(None, "orders", {0: 10, 1: 9}, {0: 20, 1: 9})
    note = noted(note, "alerts", {0: 1}, {0: 2})
    note = noted(note, "orders", {0: 30}, {0: 40})

    assert skipped_in(note, "orders") == {0: [Undone(10, 20), Undone(30, 40)], 1: [Undone(9, 9)]}
    assert skipped_in(note, "alerts") == {0: [Undone(1, 2)]}
    assert skipped_in(None, "orders") == {}


@pytest.mark.parametrize("seed", range(either(quick=40, thorough=400)))
def test_reader_gets_each_kept_record_once_whatever_goes_back_and_when(seed: int) -> None:
    """Against a topic whose records know whether they were undone."""
    chance = random.Random(seed)
    partitions = range(3)
    topic: dict[int, list[int]] = {each: [] for each in partitions}
    kept: dict[int, list[int]] = {each: [] for each in partitions}
    undone: dict[int, list[Undone]] = {each: [] for each in partitions}
    read = dict.fromkeys(partitions, 0)
    seen: dict[int, list[int]] = {each: [] for each in partitions}
    savepoints: list[tuple[TopicEnd, dict[int, list[int]]]] = []
    number = 0

    def read_to(ends: dict[int, int]) -> None:
        for each, end in ends.items():
            seen[each] += topic[each][read[each] : end]
            read[each] = end

    for _ in range(chance.randrange(3, 20)):
        for each in partitions:
            for _ in range(chance.randrange(4)):
                topic[each].append(number)
                kept[each] = [*kept[each], number]
                number += 1
        act = chance.choice(["savepoint", "savepoint", "back", "nothing"])
        if act == "savepoint":
            ends = {each: len(topic[each]) for each in partitions}
            # A reader reads nothing that a later act undoes: it is part of the set.
            read_to_kept = {each: chance.randint(read[each], ends[each]) for each in partitions}
            if next_read(read, None, undone) == NextRead():
                read_to(read_to_kept)
            savepoints = [(TopicEnd(ends, {each: list(undone[each]) for each in partitions}), dict(kept))]
        elif act == "back" and savepoints:
            end, kept_then = savepoints[-1]
            for each in partitions:
                undone[each] = with_undone(end.undone[each], end.ends[each], len(topic[each]))
            kept = dict(kept_then)
    while (step := next_read(read, None, undone)) != NextRead():
        assert not step.obstacle
        read_to(dict(step.up_to)) if step.up_to is not None else read.update(step.behind or {})
    read_to({each: len(topic[each]) for each in partitions})

    assert seen == kept
