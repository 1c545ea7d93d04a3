"""A stream with several savepoints to recover from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, SnapshotRecord, StartCause
from dagster_ckpt.policies.restart import RestartStrategies
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.verbs import trigger_savepoint


class Ladder:
    """A stream that stands at batch 13, with savepoints at 8, 10 and 12."""

    def __init__(self, root: Path) -> None:
        self.history = History(root)
        self.history.sinks(f"FileSink[file:{self.history.sink}]")
        self.stream = replace(self.history.shelf.stream, restart=RestartStrategies.fixed_delay_restart(20, 1))
        self.snapshots: list[SnapshotRecord] = []
        for batch in range(LAST, 14):
            if batch > LAST:
                self.history.commit(batch)
            if batch % 2 == 0:
                self.snapshots.insert(0, trigger_savepoint(self.stream, origin="a test", label=f"at {batch}"))
        self.first = self.history.live
        self.stage = Stage(self.stream, [])

    def run(self, *queries: PlayedQuery | Exception, **how: Any) -> Any:
        self.stage.queries = [*queries]
        return self.stage.run(**{"cause": StartCause.RESTART_NEW_RUN, **how})

    @property
    def batches(self) -> tuple[int | None, int]:
        """What the stream and its sink stand at."""
        return self.history.batch, self.history.sink_batch

    def lose_live_directory(self) -> None:
        shutil.rmtree(self.first.url.removeprefix("file://"))

    def count_events(self, what: EventType) -> int:
        return sum(event.type is what for event in self.stream.catalog.events.after(0))

    def last(self) -> tuple[ExecutionStatus, bool]:
        last = self.stream.catalog.executions.latest(STREAM)
        assert last is not None
        return last.status, last.settled

    def close(self) -> None:
        self.history.close()
