"""A start surveys each sink once after it has the lease: what the check found is what the preparation goes by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from dagster_ckpt.recovery import sink_survey
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.sinks import registry
from dagster_ckpt.sinks.registry import register_sink
from dagster_ckpt.sinks.sink import RollBack, Sink
from dagster_ckpt.sinks.sink_ownership import Judgement, SinkFacts
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.played_query import PlayedQuery, Stage
from tests.support.rewind_history import LAST, History


class Fake(Sink):
    """A sink that can be rolled back, and notes to which batch it was."""

    rolls_back = True
    rolled_back_to: list[int]

    @classmethod
    def of(cls, name: str) -> Self | None:
        return cls(name, name.removeprefix("fake:")) if name.startswith("fake:") else None

    def last_batch(self, query_id: str | None) -> int | None:
        return LAST

    def roll_back(self, to: RollBack, still_mine: Any) -> None:
        Fake.rolled_back_to.append(to.batch_id)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(registry, "_registered", [])
    monkeypatch.setattr(Fake, "rolled_back_to", [], raising=False)
    register_sink(Fake)
    history = History(tmp_path)
    history.sinks(history.file_sink, "fake:table")
    yield history
    history.close()


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each sink was judged."""
    counted: Counter[str] = Counter()
    judge = sink_survey.judge

    def counting(sink: Sink, facts: SinkFacts) -> Judgement:
        counted[sink.name] += 1
        return judge(sink, facts)

    monkeypatch.setattr(sink_survey, "judge", counting)
    return counted


@pytest.mark.parametrize(
    ("start_from", "rolled_back_to"), [("latest", []), ("batch-5", [5]), ("kept", [LAST]), ("empty", [-1])]
)
def test_each_sink_is_surveyed_once(
    history: History, surveys: Counter[str], start_from: str, rolled_back_to: list[int]
) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin="a test", label="kept")
    surveys.clear()
    play = Stage(history.shelf.stream, [PlayedQuery(ends=True)])

    outcome = play.run(start_from=StartFrom(start_from, discard_state=start_from == "empty"))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert surveys == {"fake:table": 1, history.file_sink: 1}
    assert Fake.rolled_back_to == rolled_back_to


def test_a_preview_a_restart_and_its_start_survey_each_sink_twice(history: History, surveys: Counter[str]) -> None:
    """Once before anything is stopped, and once after the lease: a restart goes by the preview that it is given."""
    stream, start = history.shelf.stream, StartFrom("batch-5")
    ahead = verbs.client_of(stream).preview_rewind(stream.stream_id, start_from=start)

    assert verbs.start_preview(stream, start, ahead).messages() == ahead.messages()
    assert surveys == {"fake:table": 1, history.file_sink: 1}

    Stage(stream, [PlayedQuery(ends=True)]).run(start_from=start)
    assert surveys == {"fake:table": 2, history.file_sink: 2}
