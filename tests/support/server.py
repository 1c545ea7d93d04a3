"""A server as a process that a test can kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

DEADLINE_S = 120.0


@dataclass
class Server:
    """A server process that can be killed and started again.

    Attributes:
        name: Its name, and that of its log.
        command: Its command line.
        folder: Where it works.
        is_up: Whether it serves.
        environment: Its environment, beyond that of this process.
        user: The user it runs as; None is this process's.
    """

    name: str
    command: list[str]
    folder: Path
    is_up: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    _process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def log(self) -> Path:
        """Its log."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                cwd=self.folder,
                user=self.user,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + DEADLINE_S
        while not self.is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not come up:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill it and the processes that it has started, but for sessions of their own, with SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def pause(self, seconds: float) -> None:
        """Let it answer nothing for a while."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it with all that it has started."""
        if self._process is None or self._process.poll() is not None:
            return
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
