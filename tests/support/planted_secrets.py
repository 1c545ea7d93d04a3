"""Secrets that a test plants, each another one, and a look for them in whatever comes out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Planted:
    """The secrets that were planted."""

    secrets: list[str] = field(default_factory=list)

    def plant(self, name: str) -> str:
        """A secret that stands nowhere else; it is of letters and digits, so that no encoding changes it."""
        self.secrets.append(f"S3CR3T{len(self.secrets)}{name}")
        return self.secrets[-1]

    def assert_in_none(self, outputs: dict[str, str | bytes]) -> None:
        """See to it that no output has one; all that do are named."""
        found = [
            f"{secret} in {where}"
            for where, content in outputs.items()
            for secret in self.secrets
            if secret.encode() in (content.encode() if isinstance(content, str) else content)
        ]
        assert not found, found


def files_below(folder: Path) -> dict[str, str | bytes]:
    """The content of each file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def raised_by(call: Callable[[], object]) -> str:
    """What a call raises, with its whole chain as Python, and Dagster, print it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        # Without the lines of code: those of the test name the secret.
        return "".join(
            f"{part}\n"
            for part in traceback.format_exception(error)
            if not part.lstrip().startswith(("File ", "Traceback"))
        )
    raise AssertionError("nothing was raised")
