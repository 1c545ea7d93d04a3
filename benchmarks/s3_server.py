"""An S3-compatible server on this machine (`rclone serve s3`, real files), and a proxy that counts requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY, SECRET = "bench-key", "bench-secret"
REQUEST = re.compile(rb"(PUT|POST|GET|HEAD|DELETE) /[^ \r\n]* HTTP/1\.1\r\n")
LONGEST_REQUEST_LINE = 4096
START_DEADLINE_S = 20


@dataclass(frozen=True)
class S3Server:
    """A server that runs.

    Attributes:
        endpoint: Its URL.
        rclone: The rclone program.
    """

    endpoint: str
    rclone: str

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments of s3fs."""
        return {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": self.endpoint}}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment in which rclone knows the server as `bench:`, and restic its credentials."""
        return {
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "Rclone",
            "RCLONE_CONFIG_BENCH_ENDPOINT": self.endpoint,
            "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": KEY,
            "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": SECRET,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }


@contextlib.contextmanager
def s3_server(rclone: Path, folder: Path, *buckets: str) -> Iterator[S3Server]:
    """Serve a folder until the block is left.

    Args:
        rclone: The rclone program.
        folder: Where the objects lie.
        buckets: Buckets to make.

    Raises:
        TimeoutError: The server does not answer.
    """
    for bucket in buckets:
        (folder / bucket).mkdir(parents=True)
    port = _free_port()
    command = [str(rclone), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    process = subprocess.Popen(
        [*command, "--config", "/dev/null"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port)
        yield S3Server(f"http://127.0.0.1:{port}", str(rclone))
    finally:
        process.terminate()
        process.wait()


@dataclass
class RequestCounter:
    """What has passed a counting proxy.

    Attributes:
        requests: Method to how many requests.
    """

    requests: Counter[str] = field(default_factory=Counter)

    @property
    def puts(self) -> int:
        """PUT requests; each part of an upload in parts is one."""
        return self.requests["PUT"]


@contextlib.contextmanager
def counted(server: S3Server) -> Iterator[tuple[S3Server, RequestCounter]]:
    """The same server behind a proxy that counts; too slow to be timed."""
    counter = RequestCounter()
    target = int(server.endpoint.rpartition(":")[2])
    port = _free_port()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", target)
        # At the end of the proxy, connections are canceled.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(_pass_on(reader, downstream, counter), _pass_on(upstream, writer, None))

    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(connect, "127.0.0.1", port), loop).result()
    try:
        yield S3Server(f"http://127.0.0.1:{port}", server.rclone), counter
    finally:
        asyncio.run_coroutine_threadsafe(_end(listening), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: RequestCounter | None) -> None:
    """Pass bytes on; a request line may come in two pieces."""
    rest = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if counter is not None:
                rest += data
                end = 0
                for match in REQUEST.finditer(rest):
                    counter.requests[match.group(1).decode()] += 1
                    end = match.end()
                rest = rest[max(end, len(rest) - LONGEST_REQUEST_LINE) :]
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()


async def _end(listening: asyncio.Server) -> None:
    """Clients keep their connections open; nobody needs them any more."""
    listening.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"rclone serve s3 does not answer on port {port} after {START_DEADLINE_S} s.")
