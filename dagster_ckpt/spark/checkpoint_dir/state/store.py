"""The directory of one state store, listed once."""

from __future__ import annotations

from collections.abc import Set
from functools import cached_property

from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.foreign import number_in
from dagster_ckpt.io.file_io import FileIO, Listing
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile, read_needed

_COUNTED_DOWN = 10_000


class StoreDirectory:
    """One state store of one partition of one operator."""

    def __init__(self, folder: FileIO, path: str) -> None:
        self.folder = folder
        self.path = path

    @property
    def is_first_partition(self) -> bool:
        """Whether it belongs to partition 0."""
        return self.path.split("/")[2] == "0"

    @property
    def names(self) -> Set[str]:
        """Names in the directory, as of the first access."""
        return self._listing.names

    def newest(self, suffix: str, at_most: int) -> int:
        """Newest version up to `at_most` that has a file `<version><suffix>`; 0 if there is none."""
        names = self.names
        # Spark writes one every few versions, so counting down is faster than checking every name.
        near = range(at_most, max(at_most - _COUNTED_DOWN, 0), -1)
        found = next((version for version in near if f"{version}{suffix}" in names), None)
        if found is not None or at_most <= _COUNTED_DOWN:
            return found or 0
        numbers = (number_in(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
        return max((number for number in numbers if number is not None and number <= at_most), default=0)

    def need(self, name: str, why: str, *, identity: str | None = None) -> NeededFile:
        """A file that must exist.

        Raises:
            IncompleteCutError: It does not exist.
        """
        try:
            size, token = self._listing.version(name)
        except FileNotFoundError as error:
            if name in self.names:
                # It was purged after the directory was listed: the next attempt lists it again.
                raise
            raise self.incomplete(name, why) from error
        path = f"{self.path}/{name}"
        return NeededFile(self.folder, path, path, size, token, identity, stable=True)

    def need_read(self, name: str, why: str) -> NeededFile:
        """A small file that must exist, with its content.

        Raises:
            IncompleteCutError: It does not exist.
        """
        if name not in self.names:
            raise self.incomplete(name, why)
        file = read_needed(self.folder, f"{self.path}/{name}")
        file.stable = True
        return file

    def incomplete(self, name: str, why: str) -> IncompleteCutError:
        """The error that reports what is missing and why it is needed."""
        return IncompleteCutError(
            f"{self.folder.url}/{self.path}/{name} is missing: {why}. If the query runs, the next attempt reads a "
            "newer commit. Where it stays missing, the live directory is damaged: restore a snapshot."
        )

    @cached_property
    def _listing(self) -> Listing:
        return self.folder.listing(self.path)
