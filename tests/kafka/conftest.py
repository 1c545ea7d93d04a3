from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka_broker import Kafka, running_broker

from dagster_ckpt.sinks.kafka.executor_write import sessions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/evidence/kafka-reliability.md"
# By the test's id: name of the function, parameters and properties, whether it passed.
Result = tuple[str, dict[str, str], bool]
FEWEST_CASES = 50
_MATRIX = pytest.StashKey[dict[str, Result]]()
_HEAD = """# Reliability of the transactional Kafka sink

Written by `make test-kafka`; a slice of it runs with `make test`. A real broker, a topic with three
partitions, and a consumer with `isolation.level=read_committed` that counts each row. A process is
killed with SIGKILL right before or after one call of the Kafka client; then the stream is started
again. A case holds if every row is there exactly once.
"""
_WHAT = {
    "test_a_process_killed_at_every_step_leaves_each_row_once": "the writer, in a claim or a share",
    "test_two_deaths_in_a_row_leave_each_row_once": "the writer, and its successor after a commit",
    "test_each_row_is_seen_once_after_a_kill_at_each_step": "a query of Spark: all its processes, or one Python worker",
}


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with running_broker(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Close the producers that this process keeps for a next batch, so that none looks for a broker that is stopped."""
    yield
    while sessions:
        sessions.popitem()[1].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and item.get_closest_marker("kafka_matrix") is not None:
        params = dict(getattr(getattr(item, "callspec", None), "params", {}))
        facts = {name: str(value) for name, value in (*params.items(), *report.user_properties)}
        name = getattr(item, "originalname", item.name)
        item.config.stash.setdefault(_MATRIX, {})[item.nodeid] = (name, facts, bool(report.passed))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of kills and results; the matrix may run in pieces, as long as the code stays the same."""
    ran = session.config.stash.get(_MATRIX, {})
    if not ran:
        return
    cache: Any = session.config.cache
    code = _digest()
    kept = cache.get(f"kafka-matrix/{code}", {}) | {test: list(result) for test, result in ran.items()}
    cache.set(f"kafka-matrix/{code}", kept)
    results: list[Result] = [(name, facts, passed) for name, facts, passed in kept.values()]
    # A selection of the cases does not replace the page.
    if len([name for name, _, _ in results if name in _WHAT]) < FEWEST_CASES:
        return
    lines = [_HEAD]
    for test, what in _WHAT.items():
        held, tried = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for name, facts, passed in results:
            if name == test:
                key = (facts.get("call") or facts["step"], facts["when"])
                tried[key] += 1
                held[key] += passed
        if not tried:
            continue
        lines += [f"## Killed: {what}\n", "| call | before it | after it |", "|---|---|---|"]
        for call in dict.fromkeys(call for call, _ in tried):
            cells = [f"{held[call, when]} of {tried[call, when]} hold" for when in ("before", "after")]
            lines.append(f"| `{call}` | {' | '.join(cells)} |")
        lines.append("")
    for _name, facts, passed in results:
        if "soak" in facts:
            lines += ["## Soak\n", f"{facts['soak']}: {'0 lost, 0 twice' if passed else 'FAILED'}.", ""]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def _digest() -> str:
    files = [*(ROOT / "dagster_ckpt/sinks/kafka").glob("*.py"), *Path(__file__).parent.rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]
