"""Imported by each Python process that has this folder on its path: kills it at one call of the Kafka client.

`DIE_AT` is "<process>:<call>:<when>:<nth>:<file>": `worker` kills the Python worker, `executor` its JVM too, `node`
also the worker of the cluster, which has started that JVM, and `all` the process group of the driver. The calls are
counted in the file, across processes; the one that matches is the last counted.
"""

import os


def _die_at(program: str) -> None:
    import fcntl
    import signal

    import confluent_kafka

    process, call, when, nth, path = program.split(":", 4)

    def counted() -> int:
        with open(path, "a+") as file:  # noqa: PTH123 - nothing more is imported in every Python process
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("x")
            file.flush()
            return file.tell()

    def parent(pid: int) -> int:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - see above
            return int(stat.read().rpartition(")")[2].split()[1])

    def die() -> None:
        if process == "all":
            os.killpg(os.getpgid(int(os.environ["MORTAL_GROUP"])), signal.SIGKILL)
        if process in ("executor", "node"):
            # PySpark's daemon is between the two.
            executor = parent(os.getppid())
            if process == "node":
                os.kill(parent(executor), signal.SIGKILL)
            os.kill(executor, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    class Mortal(confluent_kafka.Producer):
        def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
            found = super().__getattribute__(name)
            if name != call:
                return found

            def called(*args: object, **kwargs: object) -> object:
                its_end = counted() == int(nth)
                if its_end and when == "before":
                    die()
                result = found(*args, **kwargs)
                if its_end and when == "after":
                    die()
                return result

            return called

    confluent_kafka.Producer = Mortal  # type: ignore[misc]


if os.environ.get("DIE_AT"):
    _die_at(os.environ["DIE_AT"])
