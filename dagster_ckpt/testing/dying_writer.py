"""A process that dies while it writes a checkpoint. Runs as a program that reads its task, pickled, from stdin."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from dagster_ckpt.config.checkpoint_storage import CheckpointStorage
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.snapshot.packs import Create, PackCallbacks, Packed, PackTask, Threads
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.testing.trial_snapshots import TRIAL_STREAM, TrialStream, sources

DEADLINE_S = 120.0
DIED = 9


class Moment(StrEnum):
    """When the process dies.

    IN_THE_DATA: After writing some files but not all.
    BEFORE_THE_MANIFEST: After writing every data object, with nothing that refers to them.
    """

    IN_THE_DATA = "in the data"
    BEFORE_THE_MANIFEST = "before the manifest"


@dataclass(frozen=True)
class DyingWrite:
    """The task of the process: a checkpoint to write, and when to die."""

    storage: CheckpointStorage
    number: int
    files: Mapping[str, bytes]
    moment: Moment

    def do(self) -> None:
        stream = TrialStream(open_store(self.storage, TRIAL_STREAM))
        if self.moment is Moment.IN_THE_DATA:
            last = SourceFile("last", 1000, None, _die)
            stream.stored_of(self.number, [*sources(self.files), last])
        else:
            stream.stored(self.number, self.files, runner=_DiesWhenDone())

    def run_in_process(self) -> bool:
        """False if the process ended normally, with the checkpoint written."""
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((sys.path, pickle.dumps(self))),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
            # Only this package must be importable there; the storage's modules are found through `sys.path`.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode not in (0, DIED):
            raise AssertionError(f"The process failed by itself: {done.stderr.decode(errors='replace')}")
        return done.returncode == DIED


class _DiesWhenDone(Threads):
    """Kills the process once every data object is written."""

    def __init__(self) -> None:
        super().__init__(1)

    def run(self, tasks: Sequence[PackTask], create: Create, callbacks: PackCallbacks) -> Packed:
        super().run(tasks, create, callbacks)
        os._exit(DIED)


def _die() -> BinaryIO:
    os._exit(DIED)


if __name__ == "__main__":
    path, deed = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    pickle.loads(deed).do()
