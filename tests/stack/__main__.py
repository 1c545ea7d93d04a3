"""`make stack`: start everything, feed orders, show where it is, and stop on Ctrl-C."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.stack.orders import Orders
from tests.stack.running_stack import running_stack


def main() -> None:
    """Run until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make stack", description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="an empty folder for logs and files")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dagster-ckpt-stack-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("Starting PostgreSQL, an object store, Kafka, a Spark cluster and Dagster (a minute) ...", flush=True)
    with running_stack(folder.absolute()) as stack:
        stack.start_streams()
        print(f"Dagster's page     {stack.page}")
        print(f"Spark's master     {stack.cluster.master}")
        print(f"Kafka              {stack.kafka.servers}, topics orders and shop-counts")
        print(f"Catalog            {stack.catalog_url}")
        print(f"Object store       {stack.object_store.url}")
        print(f"Logs and files     {stack.folder}")
        print("Ctrl-C stops everything. A few flights a second arrive in topic orders, by their carrier.", flush=True)
        orders = Orders(stack.kafka.servers)
        try:
            while True:
                orders.sell(5)
                time.sleep(1)
        except KeyboardInterrupt:
            print("Stopping ...", flush=True)


if __name__ == "__main__":
    main()
