"""The names of Dagster that are not public still exist, and do what streaming relies on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import dagster as dg
import pytest

from dagster_ckpt.orchestration._compat import (
    UnresolvedAssetJobDefinition,
    capture_interrupts,
    check_captured_interrupt,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back what Dagster does not: once captured, SIGTERM is handled as SIGINT is."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_this_process_is_captured_and_raises_nothing(sent: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT)
    with capture_interrupts():
        assert not check_captured_interrupt()
        os.kill(os.getpid(), sent)
        assert check_captured_interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    assert not check_captured_interrupt()


def test_a_second_capture_takes_the_handler_back_from_whoever_replaced_it() -> None:
    with capture_interrupts():
        # As pyspark's SparkContext does when it is made.
        signal.signal(signal.SIGINT, lambda _number, _frame: pytest.fail("the replaced handler was called"))
        with capture_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert check_captured_interrupt()


def test_jobs_of_assets_are_of_the_type_that_is_named() -> None:
    assert isinstance(dg.define_asset_job("job"), UnresolvedAssetJobDefinition)
