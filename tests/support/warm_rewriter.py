"""One child process for all orders to the other Spark: its start takes longer than what is tested."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.state import rewriter as rewriters
from dagster_ckpt.state.rewriter import Rewriter, end_child, give_order, start_child


@contextmanager
def one_child() -> Iterator[None]:
    children: list[tuple[subprocess.Popen[str], SimpleQueue[Any]]] = []

    @contextmanager
    def child(rewriter: Rewriter, order: object) -> Iterator[tuple[subprocess.Popen[str], SimpleQueue[Any]]]:
        if children and children[0][0].poll() is not None:
            end_child(children.pop()[0])
        if not children:
            children.append(start_child(rewriter))
        give_order(children[0][0], order)
        try:
            yield children[0]
        except StateRewriteError:
            raise
        except BaseException:
            # A canceled order may still be carried out.
            end_child(children.pop()[0])
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriters, "_child", child)
        yield
    for process, _answers in children:
        end_child(process)
