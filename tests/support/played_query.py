"""A query played by the test, and a stage on which a stream starts such queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_ckpt.catalog.records import ExecutionStatus, StartCause
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import Outcome, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import QueryActivity, QueryFacts, QueryProgress, TaskCounts
from dagster_ckpt.stream.handle import StreamHandle
from tests.support.log_lines import collecting


@dataclass
class PlayedQuery:
    """What the supervisor sees of a query: it ends as the test says, or runs until it is stopped."""

    error: str | None = None
    ends: bool = False
    stopped: bool = False
    query_id: str = "query"
    call: object | None = None
    # Called when it is started.
    before: Callable[[], object] = lambda: None

    def wait(self, timeout_s: float) -> bool:
        return self.ends or self.error is not None

    def recent_progress(self) -> list[QueryProgress]:
        return []

    def facts(self) -> QueryFacts:
        return QueryFacts()

    def is_idle(self) -> bool:
        return False

    def activity(self) -> QueryActivity:
        return QueryActivity("Processing new data", in_trigger=True)

    def tasks(self) -> TaskCounts | None:
        return None

    def stack(self) -> list[str]:
        return []

    def stop(self, *, within_ms: int | None = None) -> None:
        self.stopped = True

    def exception(self) -> str | None:
        return self.error

    def trace(self) -> str | None:
        return self.error


@dataclass
class Stage:
    """A stream that was never started, and the queries that its starts get, one after the other."""

    stream: StreamHandle
    queries: list[PlayedQuery | Exception]
    started_in: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    def start_query(self, live: LiveDirectory) -> Any:
        self.started_in.append(live.url)
        query = self.queries.pop(0)
        if isinstance(query, Exception):
            raise query
        query.before()
        Path(live.url).mkdir(parents=True, exist_ok=True)
        return query

    def run(self, **how: Any) -> Outcome:
        with collecting(self.reports):
            return execute_stream(self.stream, RunRequest(run_id="run", start_query=self.start_query, **how))

    def ends(self) -> list[tuple[ExecutionStatus, StartCause, bool]]:
        executions = self.stream.catalog.executions.of_stream("orders")
        return [(execution.status, execution.cause, execution.settled) for execution in reversed(executions)]
