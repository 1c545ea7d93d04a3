"""A program that runs the logged life of a stream; OpenTelemetry's SDK can be set up once in a process only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from tests.support.logged_life import LoggedLife
from tests.support.played_query import PlayedQuery


def live(root: Path) -> EndKind:
    life = LoggedLife(root)
    stream = replace(life.shelf.stream, options=replace(life.shelf.stream.options, tolerable_failures=1))
    request = RunRequest("run", lambda _live: PlayedQuery(), interrupted=lambda: life.interrupted(stream))  # type: ignore[arg-type, return-value]
    try:
        return execute_stream(stream, request).end.kind
    finally:
        stream.catalog.close()


if __name__ == "__main__":
    print(f"ended: {live(Path(sys.argv[1])).name}", flush=True)
