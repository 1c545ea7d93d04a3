"""Servers that the tests of several packages share: each is started once, by the first test that asks for it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import thorough
from tests.support.jvm_stacks import stacks_of_own_jvms
from tests.support.local_files import use_local_files
from tests.support.memory_files import use_memory_for_files
from tests.support.needs import is_without_core, select
from tests.support.postgres_server import started_server
from tests.support.warm_rewriter import one_child

# Many containers set it. Each process that the tests start compiles Dagster and PySpark again,
# which is most of what it does until it is up.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A rewriter that the user has installed must not decide which tests run, and no test installs one into the home.
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir()) / "dagster-ckpt-tests-install-nothing")
# How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile(
    "dagster_ckpt", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("dagster_ckpt")

# A shell has what it starts in the background ignore Ctrl-C, and `nohup` the end of the terminal, and so would every
# process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Every JVM of the tests, also those of programs that they start: in so short a life, quick to compile counts more than
# fast in the end.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_configure(config: pytest.Config) -> None:
    use_memory_for_files(os.environ)
    thorough.configure(config)
    # Workers inherit the environment; `make mutants` has neither cache nor Spark.
    if not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("cacheprovider"):
        use_local_files(config.cache.mkdir("local-files"), os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # What pytest-timeout shows ends at the socket on which Python waits for the JVM.
    if call.excinfo is not None and str(call.excinfo.value).startswith("Timeout (>"):
        report.sections.append(("Stacks of the JVMs", stacks_of_own_jvms()))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, each with its Spark session, to run beside each other."""
    from xdist.scheduler import LoadFileScheduling

    class OneDagsterAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # Each `dagster dev` has a dozen processes; one broker of Kafka is enough.
            for folder in ("tests/e2e/", "tests/kafka/"):
                if nodeid.startswith(folder):
                    return folder
            scope: str = super()._split_scope(nodeid)
            return scope

    return OneDagsterAtATime(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spark-core", action="store_true", help="only the tests that each version of Spark must pass")
    thorough.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--spark-core") and is_without_core(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest: of files that run beside each other, a long one at the end would run alone."""
    thorough.leave_out(config, items)
    select(config, items)
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("dagster_dev"):
        return 0
    return 1 if item.get_closest_marker("spark") else 2


@pytest.fixture(scope="module")
def warm_rewriter() -> Iterator[None]:
    """Where another Spark rewrites state, one process does it for all tests of a file."""
    with one_child():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with started_server() as url:
        yield url


@pytest.fixture(scope="session")
def far_stores() -> Iterator[Any]:
    from tests.support.far_stores import FarStores

    with FarStores() as stores:
        yield stores


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
    }
    server.stop()
