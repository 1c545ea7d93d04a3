"""The directory of one state store, listed once."""

from __future__ import annotations

from functools import cached_property

from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.spark.folder import Entry, Folder
from dagster_ckpt.spark.needed import NeededFile, read_needed


class StoreDirectory:
    """One state store of one partition of one operator."""

    def __init__(self, folder: Folder, path: str) -> None:
        self.folder = folder
        self.path = path

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Names in the directory, as they were at the first look."""
        return self.folder.list(self.path)

    def versions(self, suffix: str, at_most: int) -> list[int]:
        """Versions up to `at_most` that have a file `<version><suffix>`, ascending."""
        numbers = (name.removesuffix(suffix) for name in self.entries if name.endswith(suffix))
        return sorted(int(number) for number in numbers if number.isdecimal() and int(number) <= at_most)

    def need(self, name: str, why: str, *, identity: str | None = None) -> NeededFile:
        """A file that must be there.

        Raises:
            IncompleteCutError: It is not.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise self.incomplete(name, why)
        path = f"{self.path}/{name}"
        return NeededFile(self.folder, path, path, entry.version(), identity=identity)

    def need_read(self, name: str, why: str) -> NeededFile:
        """A small file that must be there, with its content.

        Raises:
            IncompleteCutError: It is not there.
        """
        if name not in self.entries:
            raise self.incomplete(name, why)
        return read_needed(self.folder, f"{self.path}/{name}")

    def incomplete(self, name: str, why: str) -> IncompleteCutError:
        """The error that says what is missing, and why it is needed."""
        return IncompleteCutError(
            f"{self.folder.url}/{self.path}/{name} is missing: {why}. If the query runs, the next attempt "
            "reads a "
            "newer commit. Where it stays missing, the live directory is damaged: restore an image."
        )
