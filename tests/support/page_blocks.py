"""The code blocks of a page of the documentation, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FILE_NAME = re.compile(r"# (\S+\.(?:py|toml|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        language: As the page names it.
        text: What it shows.
    """

    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that it is, which its first line names."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """The commands that it shows, without the prompt."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, named by its path below docs/."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(found[2], found[3]) for found in _BLOCK.finditer(text)]
