"""The torture with a catalog in PostgreSQL: `python -m tests.torture.postgres`, which starts a server of its own.

A fault is a real one, at the commit of the N-th transaction that writes: the process ends while its transaction is
open, or the server ends the session, before or after the commit.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import NullPool, Table, create_engine, make_url, select, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from dagster_ckpt.catalog.tables import metadata
from tests.support.places import CATALOG_URL
from tests.support.postgres_server import started_server
from tests.support.power_loss import Ran
from tests.torture.faults import ServerFault, in_child
from tests.torture.scenarios import SCENARIOS
from tests.torture.trial import Calls, Outcome, make, new_disk, violations

# Operations whose transactions differ.
OPERATIONS = (
    "checkpoint",
    "savepoint",
    "claim",
    "subsumption",
    "restore",
    "rewind",
    "rewind to a savepoint",
    "fork",
    "run: resume, end of the run",
    "run: adopt while the old writer may live",
    "run: roll back to a savepoint",
    "an upgrade rolled back",
    "end of the run: all is deleted",
)
EACH = Calls()


def torture(server: str, name: str, faults: Sequence[ServerFault], calls: Calls = EACH) -> list[Outcome]:
    """Do an operation again and again, with each fault some commits later each time, until it is not met any more.

    Args:
        server: URL of a server on which databases may be created.
        name: The operation.
        faults: What happens to it.
        calls: At which commits.
    """
    scenario, outcomes = SCENARIOS[name], []
    with new_disk() as disk, _database(server) as database:
        before = make(disk, scenario)
        disk.freeze()
        database.freeze()
        for fault in faults:
            outcome = Outcome(name, fault)
            outcomes.append(outcome)
            for call in calls.tried(outcome):
                disk.thaw()
                database.thaw()
                ran = _run_into(lambda: scenario.work(disk.root), fault, call)
                outcome.calls = max(outcome.calls, len(ran.calls))
                found = violations(scenario, disk, ran, fault, before)
                outcome.violations += [f"commit {call}: {each}" for each in found]
                if not ran.reached:
                    break
                outcome.points += 1
    return outcomes


def _run_into(work: Callable[[], object], fault: ServerFault, call: int) -> Ran:
    """Do something in a process that meets a fault at a commit."""

    def counted(die: Callable[[Sequence[str]], None]) -> Ran:
        made: list[str] = []
        commit = PGDialect_psycopg.do_commit

        def do_commit(dialect: Any, connection: Any) -> None:
            made.append("commit")
            if len(made) != call:
                commit(dialect, connection)
                return
            if fault in (ServerFault.KILLED_AFTER, ServerFault.ANSWER_LOST):
                commit(dialect, connection)
            if fault in (ServerFault.KILLED, ServerFault.KILLED_AFTER):
                die(made)
            session = connection.driver_connection.info
            with psycopg.connect(session.dsn, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 10000)", (session.backend_pid,))
            # What the driver says when it finds that out.
            commit(dialect, connection) if fault is ServerFault.CUT_OFF else connection.cursor().execute("SELECT 1")

        PGDialect_psycopg.do_commit = do_commit  # type: ignore[method-assign]
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - told to the parent
            error = raised
        return Ran(tuple(made), len(made) >= call, error)

    return in_child(counted)


class _Database:
    """A database whose rows can be made as they were."""

    def __init__(self, server: str) -> None:
        self._server = create_engine(server, isolation_level="AUTOCOMMIT")
        self._name = f"torture_{uuid.uuid4().hex}"
        url = make_url(server).set(database=self._name)
        self.url = url.render_as_string(hide_password=False)
        self._engine = create_engine(url, poolclass=NullPool)
        self._frozen: dict[Table, list[dict[str, Any]]] = {}
        self._on_server(f"CREATE DATABASE {self._name}")

    def freeze(self) -> None:
        """Remember every row as it is now."""
        with self._engine.connect() as connection:
            rows = {table: connection.execute(select(table)).mappings().all() for table in metadata.sorted_tables}
        self._frozen = {table: [dict(row) for row in found] for table, found in rows.items()}

    def thaw(self) -> None:
        """Make every row as it was."""
        # The session of a process that was killed may not have ended yet.
        self._on_server(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{self._name}'")
        with self._engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {', '.join(table.name for table in self._frozen)}"))
            for table, rows in self._frozen.items():
                if rows:
                    connection.execute(table.insert(), rows)

    def drop(self) -> None:
        """Leave nothing behind."""
        self._on_server(f"DROP DATABASE {self._name} WITH (FORCE)")
        self._server.dispose()

    def _on_server(self, statement: str) -> None:
        with self._server.connect() as connection:
            connection.execute(text(statement))


@contextmanager
def _database(server: str) -> Iterator[_Database]:
    database = _Database(server)
    before = CATALOG_URL.set(database.url)
    try:
        yield database
    finally:
        CATALOG_URL.reset(before)
        database.drop()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=OPERATIONS, help="one operation")
    parser.add_argument("--step", type=int, default=1, help="only every so many commits")
    asked = parser.parse_args()
    began, points, is_clean = time.monotonic(), 0, True
    with started_server() as server:
        for name in (asked.only,) if asked.only else OPERATIONS:
            for outcome in torture(server, name, list(ServerFault), Calls(step=asked.step)):
                points += outcome.points
                is_clean &= not outcome.violations
                print(f"{name:45} {outcome.fault.name:15} {outcome.points:4} commits", flush=True)
                for violation in outcome.violations:
                    print(f"    {violation[:600]}", flush=True)
    print(f"{points} points in {time.monotonic() - began:.0f} s", flush=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
