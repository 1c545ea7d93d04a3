"""A process says which code it runs, as far as its environment or git knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dagster_ckpt.runtime.execution import _COMMITS, _IMAGES, running_program


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*_IMAGES, *_COMMITS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    running_program.cache_clear()


def test_it_says_nothing_where_nothing_is_known() -> None:
    assert running_program() == {}


def test_it_takes_what_a_deployment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "orders:42")
    monkeypatch.setenv("GITHUB_SHA", "0a1b2c")
    assert running_program() == {"image": "orders:42", "commit": "0a1b2c"}


def test_it_asks_git_for_the_commit(tmp_path: Path) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *command], check=True, cwd=tmp_path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert running_program() == {"commit": head.stdout.strip()}


def test_it_does_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert running_program() == {}
