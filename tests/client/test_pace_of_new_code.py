"""Whether new code would fall behind its input, from how long it takes for the batches that it runs again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dagster_ckpt.client.code_check import Pace, committed_every_ms, slower_than_input
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

CASES = {
    "nothing was measured": ([], None),
    "as fast as the input": ([(8, 9_000, 10_000)], None),
    "a bit slower, with cold caches": ([(8, 25_000, 10_000)], None),
    "the first batch is slow, and the next one is not": ([(7, 60_000, 10_000), (8, 9_000, 10_000)], None),
    "small batches of a fast stream": ([(8, 4_000, 200)], None),
    "each batch is slow": (
        [(7, 70_000, 10_000), (8, 31_000, 12_000)],
        "it is slower than the input: batch 8 takes 31 s, and the stream committed it 12 s after the batch before it",
    ),
}


@pytest.mark.parametrize(("pace", "reason"), CASES.values(), ids=CASES)
def test_code_is_slower_than_the_input_if_each_batch_takes_much_longer_than_the_next_one_leaves_it(
    pace: list[tuple[int, int, int]], reason: str | None
) -> None:
    assert slower_than_input([Pace(*each) for each in pace]) == reason


def test_batches_that_were_restored_say_nothing_about_the_input(tmp_path: Path) -> None:
    """Their files have the time of the restore."""
    history = History(tmp_path)
    stream = history.shelf.stream
    running = stream.catalog.executions.latest(STREAM)
    assert running is not None
    for batch, after_s in ((LAST - 2, -1), (LAST - 1, 2), (LAST, 5)):
        at = running.started_at_ms / 1000 + after_s
        os.utime(history.shelf.live / "commits" / str(batch), (at, at))

    found = [committed_every_ms(stream, history.live, batch) for batch in (LAST - 1, LAST, LAST + 1)]

    assert found == [None, pytest.approx(3_000, abs=2), None]
    stream.catalog.close()
