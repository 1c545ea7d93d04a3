"""Where the streams of these tests have their files and their catalog: on this disk, or wherever else a test says."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

SCHEME: ContextVar[str] = ContextVar("scheme", default="file")
# URL of the catalog; None is a SQLite file beside the stream's files.
CATALOG_URL: ContextVar[str | None] = ContextVar("catalog_url", default=None)
# End of the name of a file that the bucket of these tests has not put whole: a store does not show it.
UNFINISHED = ".put~"


def place(path: Path) -> str:
    """URL of a folder."""
    return f"{SCHEME.get()}://{path}"


def catalog_at(root: Path) -> str:
    """URL of the catalog of the streams in a folder."""
    return CATALOG_URL.get() or f"sqlite:///{root / 'catalog.db'}"


def is_local() -> bool:
    """Whether it is the local disk."""
    return SCHEME.get() == "file"


def has_files(path: Path) -> bool:
    """Whether a folder exists as an object store sees it: with a file in it."""
    return path.is_dir() and any(each.is_file() and not each.name.endswith(UNFINISHED) for each in path.rglob("*"))


def path_of(url: str) -> Path:
    """Where the files of a URL are to be found on this machine, as all of these places lie there."""
    return Path(url.partition("://")[2] if "://" in url else url)
