"""Actions that the checkpoint page offers with `--actions`: savepoint, stop and restart, each in the background."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from dagster_ckpt.config.redaction import without_secrets
from dagster_ckpt.errors import CkptError

# What the page shows of past actions. The catalog has the complete record.
_REMEMBERED = 50
Report = Callable[[str], None]


class ActionStatus(StrEnum):
    """Status of an action: RUNNING → DONE or FAILED."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass
class Action:
    """One action that a person started on the page.

    Attributes:
        number: Counts the actions of this server.
        stream_id: The stream.
        title: What it does.
        started_at_ms: When it was started.
        status: Its status.
        messages: Its steps and result, or why it failed.
    """

    number: int
    stream_id: str
    title: str
    started_at_ms: int
    status: ActionStatus = ActionStatus.RUNNING
    messages: list[str] = field(default_factory=list)


class ActionLog:
    """Runs actions in threads, because a savepoint takes longer than a browser waits, and remembers the last ones."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="checkpoint-page")
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._actions: deque[Action] = deque(maxlen=_REMEMBERED)

    def start(self, stream_id: str, title: str, now_ms: int, work: Callable[[Report], list[str]]) -> Action:
        """Start an action.

        Args:
            stream_id: The stream.
            title: What it does.
            now_ms: The current time, ms since the epoch.
            work: Does it; receives a function that reports steps, and returns the result as messages.
        """
        action = Action(next(self._numbers), stream_id, title, now_ms)
        with self._lock:
            self._actions.appendleft(action)
        self._threads.submit(self._run, action, work)
        return action

    def of(self, stream_id: str) -> list[Action]:
        """The last actions on a stream, newest first."""
        with self._lock:
            return [action for action in self._actions if action.stream_id == stream_id]

    def close(self) -> None:
        """Wait for what is running; nothing new is started."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, action: Action, work: Callable[[Report], list[str]]) -> None:
        try:
            action.messages += work(action.messages.append)
            action.status = ActionStatus.DONE
        except CkptError as error:
            action.messages.append(without_secrets(str(error)))
            action.status = ActionStatus.FAILED
        except BaseException as error:
            # The thread ends here, and the person has to see it.
            action.messages.append(without_secrets(f"{type(error).__name__}: {error}"))
            action.status = ActionStatus.FAILED
            raise
