"""Random kills of every process there is, and a watchman who starts Dagster again, as an init system would."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import psutil

from tests.e2e.stage import Stage

# A code server that was killed may be replaced by Dagster itself within this time; then the watchman sees to it.
PATIENCE_S = 20.0


class Mayhem:
    """Kills, at random moments, what is drawn at random.

    Args:
        stage: The Dagster instance.
        streams: Stream ids of the streams.
        random: Decides everything, so that a seed gives the same sequence of blows.
        tell: Told each blow.
    """

    def __init__(self, stage: Stage, streams: Sequence[str], random: Random, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._streams = streams
        self._random = random
        self._tell = tell
        self._down_since: float | None = None
        self.blows: Counter[str] = Counter()

    def rage(self, until: float, *, pause_s: tuple[float, float]) -> None:
        """Strike again and again until a moment of the monotonic clock."""
        while time.monotonic() < until:
            blow = self._random.choice(
                [self._step, self._step, self._jvm, self._hang, self._daemon, self._code_server, self._group, self._all]
            )
            pause = self._random.uniform(*pause_s)
            what = blow()
            if what is not None:
                self.blows[what] += 1
                self._tell(what)
            rested = time.monotonic() + pause
            while time.monotonic() < rested:
                self.keep_watch()
                time.sleep(0.5)

    def keep_watch(self) -> None:
        """Start Dagster again where it is down."""
        if self._stage.dev.process.poll() is None and self._stage.dev.is_up():
            self._down_since = None
            return
        self._down_since = self._down_since or time.monotonic()
        if self._stage.dev.process.poll() is None and time.monotonic() - self._down_since < PATIENCE_S:
            return
        self._tell("starting dagster dev again")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self._stage.dev.process.pid).kill()
        self._stage.start_dagster()
        self._down_since = None

    def _step(self) -> str | None:
        stream = self._random.choice(self._streams)
        lease = self._stage.catalog.leases.current(stream)
        return self._kill(lease and lease.pid, f"SIGKILL of the process of {stream}")

    def _jvm(self) -> str | None:
        stream = self._random.choice(self._streams)
        lease = self._stage.catalog.leases.current(stream)
        return self._kill(lease and lease.jvm_pid, f"SIGKILL of the JVM of {stream}")

    def _hang(self) -> str | None:
        """A process that is stopped for longer than its lease lasts, and wakes up again."""
        stream = self._random.choice(self._streams)
        lease = self._stage.catalog.leases.current(stream)
        if self._kill(lease and lease.pid, "", signal.SIGSTOP) is None or lease is None:
            return None
        asleep = time.monotonic() + self._random.uniform(5.0, 45.0)
        while time.monotonic() < asleep:
            self.keep_watch()
            time.sleep(0.5)
        self._kill(lease.pid, "", signal.SIGCONT)
        return f"SIGSTOP and SIGCONT of the process of {stream}"

    def _daemon(self) -> str | None:
        return self._kill_all(self._stage.processes("dagster._daemon run"), "SIGKILL of the daemon")

    def _code_server(self) -> str | None:
        servers = [*self._stage.processes("api grpc"), *self._stage.processes("code-server start")]
        return self._kill_all(servers, "SIGKILL of the code server")

    def _group(self) -> str | None:
        if self._stage.dev.process.poll() is not None:
            return None
        self._stage.press_ctrl_c()
        return "Ctrl-C"

    def _all(self) -> str:
        self._stage.power_off()
        if self._random.random() < 0.5:
            self._stage.boot_again()
            return "power off, and another boot"
        return "SIGKILL of everything"

    def _kill_all(self, victims: Sequence[psutil.Process], what: str) -> str | None:
        killed = [self._kill(victim.pid, what) for victim in victims]
        return what if any(killed) else None

    def _kill(self, pid: int | None, what: str, sign: signal.Signals = signal.SIGKILL) -> str | None:
        """Signal a process of ours; None where there is none, such as between two lives."""
        if pid is None or pid not in {process.pid for process in self._stage.processes()}:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(sign)
            return what
        return None
