"""The documentation site: built strictly and without network; each link, anchor and picture of it exists."""

from __future__ import annotations

import logging
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
# What a browser would fetch to show a page; a link to another site is only followed by a click.
FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}


class PageOfSite(HTMLParser):
    """The names that a page defines, and what it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[tuple[str, str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.anchors.add(value)
            if name in {"href", "src"} and value:
                self.references.append((tag, name, value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, by name of page."""
    folder = tmp_path_factory.mktemp("site")

    def refused(*_: object) -> NoReturn:
        raise AssertionError("the build of the site uses the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refused)
        patch.setattr(socket, "getaddrinfo", refused)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        problems = Problems(logging.WARNING)
        logging.getLogger("mkdocs").addHandler(problems)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
        logging.getLogger("mkdocs").removeHandler(problems)
    assert problems.messages == []
    return folder


class Problems(logging.Handler):
    """What `mkdocs build --strict` would refuse."""

    messages: list[str]

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageOfSite]:
    return {path: PageOfSite(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_each_link_anchor_and_picture_exists(site: Path, pages: dict[Path, PageOfSite]) -> None:
    broken = []
    for path, page in pages.items():
        for _, _, reference in page.references:
            to = urlsplit(reference)
            # The page for what is not found is served from anywhere, so its links are absolute.
            if to.scheme or to.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(to.fragment)
            is_known = not fragment or target not in pages or fragment in pages[target].anchors
            if not target.exists() or not is_known:
                broken.append(f"{path.relative_to(site)}: {reference}")
    assert broken == []
    assert len(pages) > 40


def test_a_page_fetches_nothing_from_another_host(site: Path, pages: dict[Path, PageOfSite]) -> None:
    fetched = [
        f"{path.relative_to(site)}: {reference}"
        for path, page in pages.items()
        for tag, name, reference in page.references
        if (tag, name) in FETCHED and urlsplit(reference).netloc
    ]
    styles = [path for path in site.rglob("*.css") if re.search(r"url\([\"']?https?:", path.read_text("utf-8"))]
    assert (fetched, styles) == ([], [])


def test_the_classes_that_users_import_are_documented(pages: dict[Path, PageOfSite]) -> None:
    import dagster_ckpt
    from dagster_ckpt import flink

    anchors = {anchor.rpartition(".")[2] for page in pages.values() for anchor in page.anchors}
    assert {*dagster_ckpt.__all__, *flink.__all__} - anchors == set()


def test_links_of_the_pages_outside_of_the_site_exist() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            path, _, anchor = target.partition("#")
            if urlsplit(target).scheme:
                continue
            found = page.parent / path if path else page
            if not found.exists() or (anchor and anchor not in headings(found)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """The anchors of a page as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_make_docs_is_strict() -> None:
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text("utf-8")
    validation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["validation"]
    assert {level for kinds in validation.values() for level in kinds.values()} == {"warn"}
