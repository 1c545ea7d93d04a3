"""The proxy of the benches: what it adds, and what it counts of any protocol."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.slow_link import slow_link


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back whatever it gets on one connection."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def exchanged(connection: socket.socket, size: int) -> None:
    connection.sendall(bytes(size))
    left = size
    while left:
        left -= len(connection.recv(left))


def test_each_connection_and_each_round_trip_takes_the_latency_longer(echo: int) -> None:
    with slow_link(str(echo), latency_s=0.1) as (port, meter), socket.create_connection(("127.0.0.1", port)) as far:
        began = time.monotonic()
        for _ in range(3):
            exchanged(far, 10)
        assert time.monotonic() - began >= 0.4
        taken = meter.taken()
        assert (taken.round_trips, taken.sent, taken.received, taken.requests) == (3, 30, 30, [])
        assert meter.taken().round_trips == 0


def test_no_more_passes_than_the_limit(echo: int) -> None:
    with slow_link(str(echo), bytes_per_s=2_000_000) as (port, _), socket.create_connection(("127.0.0.1", port)) as far:
        began = time.monotonic()
        exchanged(far, 500_000)
        assert time.monotonic() - began >= 0.2
