"""What goes wrong at a call, of a disk or of the catalog, and running something into it."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

from sqlalchemy import Connection

from dagster_ckpt.catalog.database import Database
from dagster_ckpt.errors import CatalogError
from tests.support.power_loss import Disk, Ran, Survivors, Trouble
from tests.torture.bucket import ObjectFault, Requests

_CHILD_S = 120


class FileFault(Enum):
    """What happens at a file call; each with what a page says of it."""

    KILLED = "the process is killed (not at a flush: that leaves the same as at the next call)"
    POWER_FLUSHED = "power loss: only what was flushed survives"
    POWER_NAMES = "power loss: names survive, data does not"
    POWER_SOME = "power loss: a part of both survives"
    FAILS = "the call fails once (EIO)"
    DISK_FULL = "the disk is full from there on (ENOSPC; not at a flush, which needs no space)"
    ANSWER_LOST = "the call is done, and its answer is lost"

    def trouble(self, call: int) -> Trouble:
        """The fault at a call."""
        match self:
            case FileFault.KILLED:
                return Trouble(call, only_changes=True)
            case FileFault.POWER_FLUSHED:
                return Trouble(call, Survivors.FLUSHED)
            case FileFault.POWER_NAMES:
                return Trouble(call, Survivors.NAMES, seed=call)
            case FileFault.POWER_SOME:
                return Trouble(call, Survivors.SOME, seed=call)
            case FileFault.FAILS:
                return Trouble(call, error=errno.EIO)
            case FileFault.DISK_FULL:
                return Trouble(call, error=errno.ENOSPC, lasts=True, only_changes=True)
            case _:
                return Trouble(call, error=errno.EIO, done=True)


class LeaseFault(Enum):
    """What happens before a step: a file call, or a transaction with the catalog."""

    LOST = (
        "the lease is lost; a successor starts, commits batches and takes a checkpoint, then the old process continues"
    )
    LOST_WITHOUT_RENAME = "the same where directories cannot be renamed, as in an object store"


class CatalogFault(Enum):
    """What happens at a transaction with the catalog."""

    KILLED = "the process is killed before one that writes; after one, it is killed before the next, or at a file call"
    FAILS = "it fails once, also one that only reads"
    AWAY = "the catalog is unavailable from there on, reads included"
    ANSWER_LOST = "one that writes is committed, and its answer is lost"

    @property
    def only_writes(self) -> bool:
        """Whether only transactions that write count: at others it would be the same as at the next, or as FAILS."""
        return self in (CatalogFault.KILLED, CatalogFault.ANSWER_LOST)


class ServerFault(Enum):
    """What happens at the commit of a transaction with a catalog in PostgreSQL: see `tests/torture/postgres.py`."""

    KILLED = "the process is killed before the server has committed"
    KILLED_AFTER = "the process is killed after the server has committed, before it learns of it"
    CUT_OFF = "the connection is lost before the server has committed"
    ANSWER_LOST = "the connection is lost after the server has committed, before the process learns of it"


Fault = FileFault | ObjectFault | CatalogFault | ServerFault | LeaseFault


def run_into(disk: Disk, work: Callable[[], object], fault: FileFault | ObjectFault | CatalogFault, call: int) -> Ran:
    """Do something, from the frozen disk, in a process that meets a fault at a call."""
    disk.thaw()
    if isinstance(fault, FileFault):
        return disk.run(work, fault.trouble(call))

    def counted(die: Callable[[Sequence[str]], None]) -> Ran:
        calls: Requests | _Transactions
        calls = Requests(fault, call, die) if isinstance(fault, ObjectFault) else _Transactions(fault, call, die)
        calls.install()
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - told to the parent
            error = raised
        return Ran(tuple(calls.made), len(calls.made) >= call, error)

    return in_child(counted)


def in_child(work: Callable[[Callable[[Sequence[str]], None]], Ran]) -> Ran:
    """Do something in a process of its own, which may die in it; it is given a way to."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(_CHILD_S)
        _tell(writer, work(lambda made: _tell(writer, Ran(tuple(made), reached=True))))
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    assert data, f"the child did not come to its end: {status}"
    ran: Ran = pickle.loads(data)
    return ran


def _tell(writer: int, ran: Ran) -> None:
    try:
        data = pickle.dumps(ran)
    except Exception:  # noqa: BLE001 - an exception that cannot be sent is sent by its words
        data = pickle.dumps(Ran(ran.calls, ran.reached, RuntimeError(f"{type(ran.error).__name__}: {ran.error}")))
    while data:
        data = data[os.write(writer, data) :]
    os._exit(0)


class _Transactions:
    """The transactions of this process."""

    def __init__(self, fault: CatalogFault, call: int, die: Callable[[Sequence[str]], None]) -> None:
        self.made: list[str] = []
        self._fault = fault
        self._call = call
        self._die = die

    def install(self) -> None:
        """Count from now on."""
        if not self._fault.only_writes:
            Database.reading = self._of(Database.reading)  # type: ignore[method-assign]
        Database.writing = self._of(Database.writing)  # type: ignore[method-assign]

    def _of(self, real: Callable[..., AbstractContextManager[Connection]]) -> Any:
        @contextmanager
        def counted(database: Database, **named: Any) -> Iterator[Connection]:
            self.made.append(real.__name__)
            number, fault = len(self.made), self._fault
            is_it = number == self._call
            if is_it and fault is CatalogFault.KILLED:
                self._die(self.made)
            if (is_it and fault is CatalogFault.FAILS) or (number >= self._call and fault is CatalogFault.AWAY):
                raise CatalogError("The catalog does not answer: a fault of the torture.")
            with real(database, **named) as connection:
                yield connection
            if is_it and fault is CatalogFault.ANSWER_LOST:
                raise CatalogError("The catalog's answer was lost: a fault of the torture.")

        return counted
