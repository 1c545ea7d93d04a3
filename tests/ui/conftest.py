"""A checkpoint page on a free port, over a stream whose state Spark wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import uvicorn

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client import Client
from dagster_ckpt.ui.app import checkpoint_page
from tests.support.golden_stream import GoldenStream

TOKEN = "a-secret-of-this-test"


@contextmanager
def served(client: Client, token: str | None) -> Iterator[str]:
    """The page in a thread of this process; the value is its address."""
    server = uvicorn.Server(uvicorn.Config(checkpoint_page(client, token=token), port=0, log_level="warning"))
    sockets = [server.config.bind_socket()]
    # A request from now on waits until the server has started.
    sockets[0].listen()
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    """A stream that has run up to batch 4 and was suspended; it has a checkpoint."""
    golden = GoldenStream(tmp_path).make()
    golden.snapshot()
    golden.end(ExecutionStatus.SUSPENDED)
    yield golden
    golden.close()


@pytest.fixture
def client(golden: GoldenStream) -> Iterator[Client]:
    with Client(f"sqlite:///{golden.root / 'catalog.db'}", origin="the checkpoint page") as client:
        yield client


@pytest.fixture
def page(client: Client) -> Iterator[str]:
    """Address of a page that is read-only."""
    with served(client, None) as address:
        yield address


@pytest.fixture
def acting(client: Client) -> Iterator[str]:
    """Address of a page with actions."""
    with served(client, TOKEN) as address:
        yield address


@pytest.fixture
def signed_in(acting: str) -> Iterator[requests.Session]:
    """A browser that has opened the printed address."""
    with requests.Session() as session:
        assert session.get(f"{acting}/sign-in", params={"token": TOKEN}).ok
        yield session
