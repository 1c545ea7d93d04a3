"""A driver without Spark: it takes the lease, answers its start, and ends when it is asked to."""

from __future__ import annotations

import sys
import time
import uuid

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import HANDS_OVER, ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.client.launching import start_order
from dagster_ckpt.stream.lease import has_living_holder
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer

TTL_MS = 600_000
ENDS = {RequestKind.CANCEL: ExecutionStatus.CANCELED, RequestKind.SUSPEND: ExecutionStatus.SUSPENDED}


def main(url: str, stream_id: str) -> None:
    """Live until the catalog asks for an end."""
    catalog = Catalog(url)
    order = start_order(catalog, stream_id, otherwise=StartFrom())
    asked = catalog.requests.find(order.request_id)
    if asked is not None and asked.arguments.get(HANDS_OVER):
        # As `hand_over` does once it has checked the code.
        catalog.requests.submit(stream_id, RequestKind.SUSPEND, origin="the driver")
        while has_living_holder(catalog, stream_id):
            time.sleep(0.05)
    print(f"starting from {order.start_from}", flush=True)
    execution_id = str(uuid.uuid4())
    run_id = order.run_id or "none"
    holder = this_holder(execution_id, run_id, None)
    lease = catalog.leases.acquire(stream_id, holder, TTL_MS)
    as_writer(catalog, stream_id).executions.start(execution_id, run_id=run_id, cause=order.cause, holder=holder)
    as_writer(catalog).executions.running(execution_id, live_directory="file:///live", recovery={})
    if order.request_id is not None:
        as_writer(catalog).requests.resolve(order.request_id, RequestStatus.COMPLETED)
    while True:
        for request in catalog.requests.pending(stream_id):
            if request.kind in ENDS:
                as_writer(catalog).requests.resolve(request.request_id, RequestStatus.COMPLETED)
                catalog.leases.release(lease)
                catalog.executions.settle(execution_id, ENDS[request.kind])
                return
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:3])
