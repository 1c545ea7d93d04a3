"""A proxy in front of a server: counts round trips, requests and bytes, and can be as far and as narrow as a network.

A separate process (`python -m benchmarks.slow_link TARGET LATENCY_S BYTES_PER_S`), so that it takes no time of the
process that is measured. It prints its port; each line on stdin is answered by what passed since the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

REQUEST = re.compile(rb"(PUT|POST|GET|HEAD|DELETE) (/[^ \r\n]*) HTTP/1\.1\r\n")
LONGEST_REQUEST_LINE = 4096
CHUNK_BYTES = 1 << 18
# A shorter sleep takes longer than it should.
SHORTEST_SLEEP_S = 0.002


class Request(NamedTuple):
    """`kind` is as S3's price list has it: PUT (also a part), POST, GET, HEAD, DELETE, and LIST, COPY."""

    kind: str
    target: str


@dataclass(frozen=True)
class Traffic:
    """What passed: S3 requests, round trips of whatever protocol, and bytes from the client and to it."""

    requests: Sequence[Request]
    round_trips: int
    sent: int
    received: int

    @property
    def kinds(self) -> Counter[str]:
        """How many requests of each kind."""
        return Counter(each.kind for each in self.requests)

    @property
    def puts(self) -> int:
        """PUT requests; each part of an upload in parts is one."""
        return self.kinds["PUT"]


class Meter:
    """Asks the proxy."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def taken(self) -> Traffic:
        """What passed since this was called last."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("The proxy was started without pipes.")
        stdin.write("\n")
        stdin.flush()
        requests, *counts = json.loads(stdout.readline())
        return Traffic([Request(*each) for each in requests], *counts)


@contextlib.contextmanager
def slow_link(target: str, latency_s: float = 0, bytes_per_s: float = 0) -> Iterator[tuple[int, Meter]]:
    """A port that leads to the server.

    Args:
        target: Port of the server on this machine, or path of its socket.
        latency_s: What each round trip, and each new connection, takes longer.
        bytes_per_s: How much passes in each direction; 0: no limit.
    """
    command = [sys.executable, "-m", "benchmarks.slow_link", target]
    process = subprocess.Popen(
        [*command, str(latency_s), str(bytes_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield int(process.stdout.readline() if process.stdout is not None else 0), Meter(process)
    finally:
        process.kill()
        process.wait()


@dataclass
class _Direction:
    """Shared by all connections."""

    bytes_per_s: float
    bytes: int = 0
    _free_at: float = 0

    async def take(self, size: int) -> None:
        self.bytes += size
        if not self.bytes_per_s:
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        if self._free_at - now > SHORTEST_SLEEP_S:
            await asyncio.sleep(self._free_at - now)


@dataclass
class _Proxy:
    target: str
    latency_s: float
    up: _Direction
    down: _Direction
    requests: list[Request] = field(default_factory=list)
    round_trips: int = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.latency_s)
        if self.target.isdecimal():
            upstream, downstream = await asyncio.open_connection("127.0.0.1", int(self.target))
        else:
            upstream, downstream = await asyncio.open_unix_connection(self.target)
        answered = asyncio.Event()
        answered.set()
        await asyncio.gather(
            self._pass_on(reader, downstream, self.up, answered), self._pass_on(upstream, writer, self.down, answered)
        )

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: _Direction,
        answered: asyncio.Event,
    ) -> None:
        rest = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if direction is self.down:
                    answered.set()
                else:
                    rest = self._seen(rest + data)
                    if answered.is_set():
                        answered.clear()
                        self.round_trips += 1
                        await asyncio.sleep(self.latency_s)
                await direction.take(len(data))
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            writer.close()

    def _seen(self, data: bytes) -> bytes:
        """Returns its end: a request line may come in two pieces."""
        end = 0
        for match in REQUEST.finditer(data):
            self.requests.append(_request(match, data))
            end = match.end()
        return data[max(end, len(data) - LONGEST_REQUEST_LINE) :]


def _request(match: re.Match[bytes], data: bytes) -> Request:
    method, target = match[1].decode(), match[2].decode()
    head = data[match.end() :].partition(b"\r\n\r\n")[0].lower()
    if method == "PUT" and b"x-amz-copy-source:" in head:
        method = "COPY"
    if method == "GET" and re.search(r"[?&](list-type|prefix|delimiter)=", target):
        method = "LIST"
    return Request(method, target)


async def _serve(target: str, latency_s: float, bytes_per_s: float) -> None:
    proxy = _Proxy(target, latency_s, _Direction(bytes_per_s), _Direction(bytes_per_s))
    server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0, limit=4 * CHUNK_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        counts = proxy.round_trips, proxy.up.bytes, proxy.down.bytes
        print(json.dumps([proxy.requests, *counts]), flush=True)
        proxy.requests, proxy.round_trips, proxy.up.bytes, proxy.down.bytes = [], 0, 0, 0


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
