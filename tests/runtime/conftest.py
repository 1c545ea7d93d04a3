"""What every test of a run has in common."""

from __future__ import annotations

import pytest

from dagster_ckpt.runtime import start as starting


@pytest.fixture(autouse=True)
def a_start_that_polls_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a request submitted before the start to the supervisor, however long a busy machine takes to start.

    A test about a start that is stopped sets its own interval.
    """
    monkeypatch.setattr(starting, "REQUEST_POLL_MS", 3_600_000)
