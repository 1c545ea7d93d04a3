"""A local disk whose file calls are numbered, and on which the power, the process or one call fails at any of them.

`Disk.run` does something in a child process, which ends at the given call; then the disk is made what a power failure
leaves of it, in one of three models. Identity survives with the content: a file that is still there keeps its inode,
length and time, as it does on a real disk, so that what trusts these three is found out.

A database that flushes by itself (SQLite with `synchronous=FULL`) is kept out of the model by its name.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pickle
import random
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dagster_ckpt.io import local as flushing

CATALOG = "catalog.db"
# A child that hangs is a finding, not a reason to wait.
_CHILD_S = 120
_DEAD = 9

Names = dict[str, tuple[int, bool]]


class Survivors(Enum):
    """What is left after the power went.

    Attributes:
        FLUSHED: Only what was flushed: of a file the content, of a folder the names, as they were at the last flush.
        NAMES: Every name; of the data only what was flushed, else nothing or zeros of the right length: what delayed
            allocation leaves.
        SOME: Each change of a name with one half probability; of the data that was not flushed a part.
    """

    FLUSHED = "FLUSHED"
    NAMES = "NAMES"
    SOME = "SOME"


@dataclass(frozen=True)
class Trouble:
    """What happens, and before which file call (the first is 1); a number beyond the last means: after all of them.

    Attributes:
        call: The number.
        survivors: The power goes, and this is left. None: not that.
        seed: For what is left to chance.
        error: The call fails with this `errno`, and nothing else happens. None: the process ends there.
        lasts: All calls from there on that change something fail, not only this one.
        done: The call is done before it fails: only its answer is lost.
        only_changes: Calls that change nothing of what others see, which is to flush, are not numbered: a process that
            is killed before one leaves what it leaves before the next.
    """

    call: int
    survivors: Survivors | None = None
    seed: int = 0
    error: int | None = None
    lasts: bool = False
    done: bool = False
    only_changes: bool = False


@dataclass(frozen=True)
class Ran:
    """What became of a run.

    Attributes:
        calls: The file calls that it made, in words.
        reached: Whether the call was reached.
        error: The exception that the work ended with, or None.
    """

    calls: tuple[str, ...]
    reached: bool
    error: BaseException | None = None


@dataclass
class Disk:
    """A folder of this machine as a disk that forgets what was not flushed.

    Attributes:
        root: The folder; what is in it at the start of a run is durable.
    """

    root: Path
    _frozen: list[tuple[Path, bytes | None, int]] = field(default_factory=list)

    @property
    def _vault(self) -> Path:
        return self.root.with_name(f"{self.root.name}.vault")

    def freeze(self) -> None:
        """Remember everything as it is now, for `thaw`. No database may be open."""
        shutil.rmtree(self._vault, ignore_errors=True)
        self._vault.mkdir(parents=True)
        self._frozen = []
        for path in sorted(self.root.rglob("*")):
            is_file = path.is_file() and not path.is_symlink()
            if is_file and not _is_database(self.root, path):
                os.link(path, self._vault / str(len(self._frozen)))
            content = path.read_bytes() if is_file else None
            self._frozen.append((path, content, path.lstat().st_mtime_ns))

    def thaw(self) -> None:
        """Make everything as it was, every file with its inode, length and time."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for index, (path, content, modified_ns) in enumerate(self._frozen):
            if content is None:
                path.mkdir()
            elif _is_database(self.root, path):
                path.write_bytes(content)
            else:
                os.link(self._vault / str(index), path)
                _set_content(path, content, modified_ns)

    def run(self, work: Callable[[], object], trouble: Trouble) -> Ran:
        """Do something in a child process that meets some trouble.

        Args:
            work: What is done; it must open its databases itself.
            trouble: What happens to it.

        Raises:
            AssertionError: The child hung, or died by itself.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(_CHILD_S)
            _in_child(self.root, work, trouble, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            told = stream.read()
        _, status = os.waitpid(child, 0)
        assert told, f"the child did not come to its end: {status}"
        calls, reached, error, flushed, names = pickle.loads(told)
        if trouble.survivors is not None:
            _lose(self.root, flushed, names, trouble.survivors, random.Random(trouble.seed))
        return Ran(tuple(calls), reached, error)


def every_call(
    disk: Disk, work: Callable[[], object], survivors: Survivors | None, *, seeds: int = 1, step: int = 1
) -> Iterator[tuple[Trouble, Ran]]:
    """Do the same again and again, each time from the frozen disk and with the trouble one call later.

    Args:
        disk: The disk, frozen; when this gives a pair, it is as the trouble left it.
        work: What is done.
        survivors: What the power leaves, or None for a kill.
        seeds: How often each call is tried.
        step: Every so many calls only.
    """
    call = 1
    while True:
        for seed in range(seeds):
            disk.thaw()
            trouble = Trouble(call, survivors, seed)
            ran = disk.run(work, trouble)
            yield trouble, ran
        if not ran.reached:
            return
        call += step


class Calls:
    """The file calls of this process below a folder, and what of it is durable."""

    def __init__(self, root: Path, trouble: Trouble, die: Callable[[Calls], None]) -> None:
        self.root = str(root)
        self.trouble = trouble
        self.made: list[str] = []
        self.flushed: dict[int, bytes] = {}
        self.names: dict[int, Names] = {}
        self._die = die
        self._lock = threading.RLock()
        self._held: list[int] = []
        self._answer_is_lost = False
        self._open = io.open
        self._real = {
            name: getattr(os, name)
            for name in (
                *("open", "fsync", "fdatasync", "rename", "replace", "link", "symlink"),
                *("unlink", "remove", "mkdir", "rmdir", "write", "writev", "close"),
            )
        }
        self._note(root)

    def install(self) -> None:
        """Count from now on."""
        os.open = self._os_open  # type: ignore[assignment]
        io.open = builtins.open = self._io_open  # type: ignore[assignment]
        os.fsync = os.fdatasync = self._fsync  # type: ignore[assignment]
        for name in ("rename", "replace", "link", "symlink"):
            setattr(os, name, self._of_two(name))
        for name in ("unlink", "remove", "mkdir", "rmdir"):
            setattr(os, name, self._of_one(name))
        for name in ("write", "writev"):
            setattr(os, name, self._of_descriptor(name))
        flushing.sync_file_system = self._sync_file_system  # type: ignore[assignment]

    def _note(self, folder: Path) -> None:
        """What is there now is durable."""
        for place, _, files in os.walk(folder):
            self.names[Path(place).stat().st_ino] = _names(place)
            for name in files:
                path = Path(place, name)
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and not _is_database(Path(self.root), path):
                    with self._open(path, "rb") as stream:
                        self.flushed[found.st_ino] = stream.read()

    def _where(self, path: Any, directory: int | None = None) -> str | None:
        """The path, if it is one of ours."""
        if isinstance(path, int):
            text = _path_of(path)
        else:
            text = os.fsdecode(os.fspath(path))
            if not text.startswith("/"):
                base = Path.cwd() if directory is None else _path_of(directory)
                text = f"{base}/{text}"
        is_ours = text.startswith(f"{self.root}/") or text == self.root
        return text if is_ours and not _is_database(Path(self.root), Path(text)) else None

    def _hit(self, what: str, *, changes: bool = True) -> None:
        if self.trouble.only_changes and not changes:
            return
        self.made.append(what)
        number, trouble = len(self.made), self.trouble
        if trouble.error is None:
            if number == trouble.call:
                self._die(self)
        elif trouble.done:
            self._answer_is_lost = number == trouble.call
        elif number == trouble.call or (trouble.lasts and number > trouble.call and changes):
            is_deletion = what.startswith(("unlink", "remove", "rmdir"))
            # A full disk lets you delete.
            if not (trouble.error == errno.ENOSPC and is_deletion):
                raise OSError(trouble.error, os.strerror(trouble.error), what)

    def _answer(self) -> None:
        """What was done is told, or not."""
        if self._answer_is_lost:
            self._answer_is_lost = False
            error = self.trouble.error or 0
            raise OSError(error, os.strerror(error), self.made[-1])

    def _hold(self, path: str) -> None:
        """Keep the inode of a name that goes: another file would get its number."""
        try:
            self._held.append(self._real["open"](path, os.O_PATH | os.O_NOFOLLOW))
        except OSError:
            return

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._lock:
            where = self._where(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC) else None
            if where is not None:
                self._hit(f"open {where}")
            descriptor = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
            self._answer()
            return descriptor

    def _io_open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        with self._lock:
            if not isinstance(file, int) and set(mode) & set("wxa+"):
                where = self._where(file)
                if where is not None:
                    self._hit(f"open {where}")
            stream = self._open(file, mode, *arguments, **named)
            self._answer()
            return stream

    def _fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        with self._lock:
            where = self._where(descriptor)
            if where is None:
                self._real["fsync"](descriptor)
                return
            self._hit(f"fsync {where}", changes=False)
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                self.names[found.st_ino] = _names(where)
            else:
                with self._open(f"/proc/self/fd/{descriptor}", "rb") as stream:
                    self.flushed[found.st_ino] = stream.read()
            self._answer()

    def _sync_file_system(self, folder: Path) -> bool:
        with self._lock:
            self._hit(f"syncfs {folder}", changes=False)
            self._note(Path(self.root))
            self._answer()
        return True

    def _of_two(self, name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            with self._lock:
                where = self._where(target, named.get("dst_dir_fd"))
                if where is not None:
                    self._hit(f"{name} {source} -> {where}")
                    self._hold(where)
                self._real[name](source, target, **named)
                self._answer()

        return call

    def _of_one(self, name: str) -> Callable[..., None]:
        def call(path: Any, *arguments: Any, **named: Any) -> None:
            with self._lock:
                where = self._where(path, named.get("dir_fd"))
                if where is not None:
                    self._hit(f"{name} {where}")
                    if name != "mkdir":
                        self._hold(where)
                self._real[name](path, *arguments, **named)
                self._answer()

        return call

    def _of_descriptor(self, name: str) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            with self._lock:
                where = self._where(descriptor)
                if where is not None:
                    self._hit(f"{name} {where}")
                written = int(self._real[name](descriptor, data))
                self._answer()
                return written

        return call


def _in_child(root: Path, work: Callable[[], object], trouble: Trouble, writer: int) -> None:
    write, end = os.write, os._exit

    def tell(calls: Calls, *, reached: bool, error: BaseException | None) -> None:
        told = (calls.made, reached, error, calls.flushed, calls.names)
        try:
            data = pickle.dumps(told)
        except Exception:  # noqa: BLE001 - an exception that cannot be sent is sent by its words
            data = pickle.dumps((*told[:2], RuntimeError(f"{type(error).__name__}: {error}"), *told[3:]))
        while data:
            data = data[write(writer, data) :]
        end(_DEAD if reached else 0)

    try:
        calls = Calls(root, trouble, lambda calls: tell(calls, reached=True, error=None))
        calls.install()
        problem: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            problem = error
        reached = trouble.error is not None and len(calls.made) >= trouble.call
        tell(calls, reached=reached, error=problem)
    finally:
        end(1)


def _lose(
    root: Path, flushed: dict[int, bytes], names: dict[int, Names], survivors: Survivors, luck: random.Random
) -> None:
    """Make a folder what a power failure leaves of it."""
    names_now = {Path(place).stat().st_ino: _names(place) for place, _, _ in os.walk(root)}
    files = {
        path.lstat().st_ino: path
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and not _is_database(root, path)
    }
    data_now = {inode: path.read_bytes() for inode, path in files.items()}
    times = {inode: path.lstat().st_mtime_ns for inode, path in files.items()}
    links = {path.lstat().st_ino: path.readlink() for path in root.rglob("*") if path.is_symlink()}
    staged = root.with_name(f"{root.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for inode, path in files.items():
        os.link(path, staged / str(inode))
    left_names = {inode: _left_names(names, names_now, inode, survivors, luck) for inode in {*names, *names_now}}
    root_inode = root.stat().st_ino
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not _is_database(root, path):
            path.unlink()

    def build(inode: int, place: Path) -> None:
        for name, (child, is_folder) in sorted(left_names.get(inode, {}).items()):
            path = place / name
            if _is_database(root, path):
                continue
            if is_folder:
                path.mkdir()
                build(child, path)
            elif child in links:
                path.symlink_to(links[child])
            else:
                known = staged / str(child)
                if not known.exists():
                    known.write_bytes(b"")
                os.link(known, path)

    build(root_inode, root)
    for known in staged.iterdir():
        inode = int(known.name)
        data = _left_data(flushed.get(inode), data_now.get(inode), survivors, luck)
        _set_content(known, data, times.get(inode, known.lstat().st_mtime_ns))
    shutil.rmtree(staged)


def _left_names(
    durable: dict[int, Names], now: dict[int, Names], inode: int, survivors: Survivors, luck: random.Random
) -> Names:
    before, after = durable.get(inode, {}), now.get(inode, {})
    if survivors is Survivors.FLUSHED:
        return before
    if survivors is Survivors.NAMES:
        return after if inode in now else before
    left = dict(before)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name) and luck.random() < 0.5:
            if name in after:
                left[name] = after[name]
            else:
                left.pop(name, None)
    return left


def _left_data(durable: bytes | None, now: bytes | None, survivors: Survivors, luck: random.Random) -> bytes:
    if durable is not None and (now is None or now == durable or survivors is not Survivors.SOME):
        return durable
    now = now or b""
    lost = [b"", bytes(len(now))]
    if survivors is Survivors.FLUSHED:
        return b""
    if survivors is Survivors.NAMES:
        return luck.choice(lost)
    return luck.choice([*lost, now[: len(now) // 2], now])


def _set_content(path: Path, content: bytes, modified_ns: int) -> None:
    if path.read_bytes() != content:
        with path.open("r+b") as stream:
            stream.truncate(0)
            stream.write(content)
    os.utime(path, ns=(modified_ns, modified_ns))


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _names(folder: str | Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries}


def _is_database(root: Path, path: Path) -> bool:
    return path.parent == root and path.name.startswith(CATALOG)
