"""Writes batches in transactions, as the driver and the executors of a query do, and kills itself where it is told.

The "commit" of a batch by Spark is a line in a file. Run: python share_program.py <JSON of a Life>.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.executor_write import sessions, write_share
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.transaction import Record

ROWS = 6


@dataclass
class Life:
    """One life of the program.

    Attributes:
        servers: The broker.
        topic: The topic.
        ledger: The file of committed batches.
        batches: Number of batches in all.
        writers: Number of writers.
        owner: Which start it is.
        token: Token of its live directory.
        call: Call of the client that it meets its end at; empty for none.
        when: "before" or "after" the call has been made.
        nth: Which of these calls.
        how: KILL, or STOP to be continued by a SIGCONT.
    """

    servers: str
    topic: str
    ledger: str
    batches: int = 3
    writers: int = 2
    owner: str = "first"
    token: int = 1
    call: str = ""
    when: str = "before"
    nth: int = 1
    how: str = "KILL"

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def transactions(life: Life, **more: Any) -> Transactions:
    known: dict[str, Any] = {
        "client": {"bootstrap.servers": life.servers},
        "topic": life.topic,
        "prefix": life.topic,
        "writers": life.writers,
        "deployment": "tests",
        "stream": "orders",
        "query_id": "query-1",
        "epoch": Epoch(life.token, 1),
        "owner": life.owner,
    }
    return Transactions(**known | more)


def share(batch: int, writer: int, writers: int) -> Iterator[Record]:
    """The rows of a batch that a writer gets: those whose number says so."""
    for number in range(batch * ROWS, (batch + 1) * ROWS):
        if number % writers == writer:
            yield Record(f"row-{number}".encode(), key=str(number).encode(), headers=[("batch", b"%d" % batch)])


def all_rows(batches: int) -> dict[str, int]:
    return {f"row-{number}": 1 for number in range(batches * ROWS)}


def meets_its_end(life: Life) -> Callable[..., Any]:
    """A producer or consumer class whose `nth` call ends the process."""
    from confluent_kafka import Producer

    class Mortal(Producer):
        calls = 0

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name != life.call:
                return found

            def called(*args: Any, **kwargs: Any) -> Any:
                Mortal.calls += 1
                its_end = Mortal.calls == life.nth
                if its_end and life.when == "before":
                    os.kill(os.getpid(), getattr(signal, f"SIG{life.how}"))
                result = found(*args, **kwargs)
                if its_end and life.when == "after":
                    os.kill(os.getpid(), getattr(signal, f"SIG{life.how}"))
                return result

            return called

    return Mortal


def main(life: Life) -> None:
    if life.call:
        import confluent_kafka

        confluent_kafka.Producer = meets_its_end(life)  # type: ignore[misc, assignment]
    target = transactions(life)
    ledger = Path(life.ledger)
    first = len(ledger.read_text().splitlines()) if ledger.exists() else 0
    claim(target, first)
    for batch in range(first, life.batches):
        for writer in range(life.writers):
            write_share(target, writer, batch, share(batch, writer, life.writers))
        with ledger.open("a") as file:
            print(batch, file=file)
    for session in sessions.values():
        session.close()


if __name__ == "__main__":
    main(Life(**json.loads(sys.argv[1])))
