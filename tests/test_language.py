"""One word for one thing: pages, docstrings and comments use the terms of docs/glossary.md, no retired ones."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RETIRED = yaml.safe_load((ROOT / "tests/retired_words.yaml").read_text(encoding="utf-8"))
PAGES = ["*.md", "docs/**/*.md", "deploy/*.md", "examples/**/*.md"]
PROGRAMS = ["*.py", "dagster_ckpt/**/*.py", "examples/**/*.py", "docs/*.py", "benchmarks/**/*.py", "tests/**/*.py"]
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
CODE = re.compile(r"``?[^`]*``?")
LINK_TARGET = re.compile(r"\]\([^)]*\)")


@dataclass(frozen=True)
class Prose:
    """A piece of text that people read, and where it begins."""

    file: str
    line: int
    text: str


def without(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with code and link targets blanked out; every line keeps its number."""
    for pattern in patterns:
        text = pattern.sub(lambda found: "\n" * found.group().count("\n") or " ", text)
    return text


def of_page(file: Path) -> Iterator[Prose]:
    text = without(file.read_text(encoding="utf-8"), CODE_BLOCK, CODE, LINK_TARGET)
    yield Prose(str(file.relative_to(ROOT)), 1, text)


def of_program(file: Path) -> Iterator[Prose]:
    name, text = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                yield Prose(name, node.body[0].lineno, without(docstring, CODE_BLOCK, CODE))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(name, token.start[0], without(token.string, CODE))


def files(patterns: list[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in ROOT.glob(pattern)})


@cache
def prose() -> tuple[Prose, ...]:
    return (
        *(text for file in files(PAGES) for text in of_page(file)),
        *(text for file in files(PROGRAMS) for text in of_program(file)),
    )


def retired(word: dict[str, Any]) -> re.Pattern[str]:
    before = "".join(rf"(?<!\b{earlier}\s)" for earlier in word.get("but_not_after", ()))
    case = re.NOFLAG if any(letter.isupper() for letter in word["word"]) else re.IGNORECASE
    spaced = word["word"].replace(" ", r"\s+")
    return re.compile(rf"{before}\b(?:{spaced})\b", case)


def uses(word: dict[str, Any], texts: tuple[Prose, ...]) -> list[str]:
    pattern = retired(word)
    return [
        f"{text.file}:{text.line + text.text[: found.start()].count(chr(10))}: {found.group()}"
        for text in texts
        if text.file.partition("/")[0] not in word.get("not_yet_in", ())
        for found in pattern.finditer(text.text)
    ]


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word["word"])
def test_a_retired_word_is_not_used(word: dict[str, Any]) -> None:
    assert uses(word, prose()) == [], f"write instead: {word['instead']}"


def test_all_that_people_read_is_searched_but_no_code() -> None:
    page = "An\nimage, `an image`, ![a plot](docs/images/plot.png), a container image.\n```\nimage\n```\n"
    text = (Prose("page.md", 1, without(page, CODE_BLOCK, CODE, LINK_TARGET)),)
    image = next(word for word in RETIRED if word["word"] == "images?")

    assert uses(image, text) == ["page.md:2: image"]
    assert {text.file for text in prose()} >= {"README.md", "docs/glossary.md", "dagster_ckpt/__init__.py"}


def test_the_glossary_explains_what_is_written_instead() -> None:
    terms = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")

    assert [
        term for term in ("snapshot", "stream", "stream id", "event", "stall") if f"\n| {term} |" not in terms
    ] == []
