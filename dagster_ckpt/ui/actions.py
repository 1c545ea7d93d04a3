"""Actions that the checkpoint page offers with `--actions`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from dagster_ckpt.errors import CkptError
from dagster_ckpt.values.redaction import without_secrets

# Past actions on the page; the catalog has all.
_REMEMBERED = 50
_AT_ONCE = 4
# How long the server waits for actions when it ends.
_CLOSING_S = 5.0
Report = Callable[[str], None]


class ActionStatus(StrEnum):
    """Status of an action: RUNNING → DONE or FAILED."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass
class Action:
    """An action started on the page; its messages are steps, and result or failure."""

    number: int
    stream_id: str
    title: str
    started_at_ms: int
    status: ActionStatus = ActionStatus.RUNNING
    messages: list[str] = field(default_factory=list)


class ActionLog:
    """Runs actions in threads: a savepoint takes longer than a browser waits."""

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_AT_ONCE)
        self._is_closing = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._actions: deque[Action] = deque(maxlen=_REMEMBERED)

    def start(self, stream_id: str, title: str, now_ms: int, work: Callable[[Report], list[str]]) -> Action:
        """`work` receives a reporter of steps, and returns its result as messages."""
        action = Action(next(self._numbers), stream_id, title, now_ms)
        with self._lock:
            self._actions.appendleft(action)
        threading.Thread(target=self._run, args=(action, work), name="checkpoint-page", daemon=True).start()
        return action

    def of(self, stream_id: str) -> list[Action]:
        """Newest first."""
        with self._lock:
            return [action for action in self._actions if action.stream_id == stream_id]

    def close(self, withdraw: Callable[[], None]) -> None:
        """End what is running, and return within seconds; nothing new is started.

        `withdraw` withdraws the actions' requests, and is called until all have ended: an action may make another.
        """
        self._is_closing = True
        until = time.monotonic() + _CLOSING_S
        while self._running() and time.monotonic() < until:
            withdraw()
            time.sleep(0.1)

    def _running(self) -> list[Action]:
        with self._lock:
            return [action for action in self._actions if action.status is ActionStatus.RUNNING]

    def _run(self, action: Action, work: Callable[[Report], list[str]]) -> None:
        try:
            with self._slots:
                if self._is_closing:
                    action.status = ActionStatus.FAILED
                    return
                action.messages += work(action.messages.append)
            action.status = ActionStatus.DONE
        except CkptError as error:
            action.messages.append(without_secrets(str(error)))
            action.status = ActionStatus.FAILED
        except BaseException as error:
            # The thread ends here; the page shows why.
            action.messages.append(without_secrets(f"{type(error).__name__}: {error}"))
            action.status = ActionStatus.FAILED
            raise
