"""The peer Flink: run by the Python of an environment with apache-flink, which has nothing of this project.

A MiniCluster with RocksDB and incremental checkpoints keeps `GROUP BY k` of a million keys, then a random updater
changes some of them between checkpoints. Durations are Flink's own, as its REST interface reports them; the result is
one line of JSON.
"""

import json
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from pyflink.common import Configuration
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.table import StreamTableEnvironment

LOAD_ROWS_PER_SECOND = 200_000
CHECKPOINT_INTERVAL_MS = 5000
DEADLINE_S = 240


class Stream:
    """The query on a MiniCluster of its own.

    Attributes:
        client: PyFlink's client of it.
    """

    def __init__(self, folder: Path, keys: int, changed: int, parallelism: int, savepoint: str | None = None) -> None:
        self._port = free_port()
        conf = {
            "rest.bind-port": str(self._port),
            "rest.port": str(self._port),
            "parallelism.default": str(parallelism),
            "taskmanager.numberOfTaskSlots": str(parallelism),
            "taskmanager.memory.managed.size": "512mb",
            "taskmanager.memory.network.max": "128mb",
            "state.backend.type": "rocksdb",
            "execution.checkpointing.incremental": "true",
            "execution.checkpointing.interval": f"{CHECKPOINT_INTERVAL_MS} ms",
            "execution.checkpointing.dir": f"file://{folder}/checkpoints",
            "web.checkpoints.history": "100",
        }
        if savepoint is not None:
            conf |= {"execution.state-recovery.path": savepoint, "execution.state-recovery.claim-mode": "NO_CLAIM"}
        configuration = Configuration()
        for key, value in conf.items():
            configuration.set_string(key, value)
        tables = StreamTableEnvironment.create(StreamExecutionEnvironment.get_execution_environment(configuration))
        a_batch = changed * 1000 // CHECKPOINT_INTERVAL_MS
        tables.execute_sql(
            "CREATE TABLE loaded (k BIGINT, p STRING) WITH ('connector'='datagen', "
            f"'rows-per-second'='{LOAD_ROWS_PER_SECOND}', 'fields.p.length'='100', 'fields.k.kind'='sequence', "
            f"'fields.k.start'='0', 'fields.k.end'='{keys - 1}')"
        )
        tables.execute_sql(
            f"CREATE TABLE updates (k BIGINT, p STRING) WITH ('connector'='datagen', 'rows-per-second'='{a_batch}', "
            f"'fields.p.length'='100', 'fields.k.min'='0', 'fields.k.max'='{keys - 1}')"
        )
        tables.execute_sql("CREATE TABLE nowhere (k BIGINT, n BIGINT, p STRING) WITH ('connector'='blackhole')")
        self.client = tables.execute_sql(
            "INSERT INTO nowhere SELECT k, COUNT(*), MAX(p) "
            "FROM (SELECT * FROM loaded UNION ALL SELECT * FROM updates) GROUP BY k"
        ).get_job_client()
        self._path = f"/jobs/{self.client.get_job_id()}"

    def get(self, path: str) -> Any:
        """Ask the REST interface about the stream."""
        return self._call(f"{self._path}{path}", None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Tell it something."""
        return self._call(f"{self._path}{path}", body)

    def wait_until_loaded(self) -> None:
        """Wait until the source of the load has ended, and one checkpoint more is complete."""
        until(lambda: any(vertex["status"] == "FINISHED" for vertex in self.get("")["vertices"]))
        done = self.get("/checkpoints")["counts"]["completed"]
        until(lambda: self.get("/checkpoints")["counts"]["completed"] > done + 1)

    def wait_until_running(self) -> None:
        """Wait until every task runs."""
        until(lambda: all(vertex["status"] in ("RUNNING", "FINISHED") for vertex in self.get("")["vertices"]))

    def savepoint(self, folder: Path) -> str:
        """Take a native savepoint."""
        body = {"target-directory": f"file://{folder}/savepoints", "formatType": "NATIVE"}
        trigger = self.post("/savepoints", body)["request-id"]
        answer: list[Any] = [None]

        def is_done() -> bool:
            answer[0] = self.get(f"/savepoints/{trigger}")
            return bool(answer[0]["status"]["id"] == "COMPLETED")

        until(is_done)
        return str(answer[0]["operation"]["location"])

    def history(self) -> list[dict[str, Any]]:
        """Completed checkpoints and savepoints, oldest first."""
        return [entry for entry in reversed(self.get("/checkpoints")["history"]) if entry["status"] == "COMPLETED"]

    def initializing_ms(self) -> float:
        """How long the slowest task took to open its state."""
        longest = 0.0
        for vertex in self.get("")["vertices"]:
            for task in self.get(f"/vertices/{vertex['id']}/subtasktimes")["subtasks"]:
                times = task["timestamps"]
                if times.get("RUNNING", 0) > 0 and times.get("INITIALIZING", 0) > 0:
                    longest = max(longest, times["RUNNING"] - times["INITIALIZING"])
        return longest

    def cancel(self) -> None:
        """End it."""
        self.client.cancel().result()
        time.sleep(1)

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def until(is_so: Any) -> None:
    """Wait for something.

    Raises:
        TimeoutError: It does not happen.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Flink did not get there in {DEADLINE_S} s.")
        time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main(folder: Path, keys: int, changed: int, parallelism: int, times: int) -> dict[str, Any]:
    """Measure savepoints, incremental checkpoints and restores.

    Args:
        folder: Where checkpoints and savepoints go.
        keys: Keys of the state.
        changed: Keys that change between two checkpoints, about.
        parallelism: Subtasks.
        times: How often each is measured.
    """
    stream = Stream(folder, keys, changed, parallelism)
    stream.wait_until_loaded()
    before = len(stream.history())
    # Some will be those after a compaction, which write much more.
    until(lambda: len(stream.history()) >= before + 2 * times)
    checkpoints = stream.history()[before:]
    savepoints = [stream.savepoint(folder) for _ in range(times)]
    taken: list[dict[str, Any]] = []

    def are_listed() -> bool:
        # The REST interface answers from a cache of some seconds.
        taken[:] = [entry for entry in stream.history() if entry["is_savepoint"]]
        return len(taken) >= times

    until(are_listed)
    stream.cancel()
    restores = []
    for savepoint in savepoints:
        stream = Stream(folder, keys, changed, parallelism, savepoint)
        stream.wait_until_running()
        restores.append(stream.initializing_ms())
        stream.cancel()
    return {
        "checkpoint_ms": [entry["end_to_end_duration"] for entry in checkpoints],
        "checkpoint_bytes": [entry["checkpointed_size"] for entry in checkpoints],
        "savepoint_ms": [entry["end_to_end_duration"] for entry in taken],
        "savepoint_bytes": [entry["state_size"] for entry in taken],
        "restore_ms": restores,
    }


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[2:]]
    print(json.dumps(main(Path(sys.argv[1]), *numbers)))
