"""Whether new code would fall behind its input, from how long it takes for the batches that it runs again."""

from __future__ import annotations

import pytest

from dagster_ckpt.client.verification import Pace, slower_than_input

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
