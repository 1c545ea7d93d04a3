"""An S3-compatible server on this machine (`rclone serve s3`, real files), also behind a proxy."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_link import Meter, slow_link

KEY, SECRET = "bench-key", "bench-secret"
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


@contextlib.contextmanager
def counted(server: S3Server, latency_s: float = 0, bytes_per_s: float = 0) -> Iterator[tuple[S3Server, Meter]]:
    """The same server behind a proxy that counts; the arguments are those of `slow_link`."""
    with slow_link(server.endpoint.rpartition(":")[2], latency_s, bytes_per_s) as (port, meter):
        yield S3Server(f"http://127.0.0.1:{port}", server.rclone), meter


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
