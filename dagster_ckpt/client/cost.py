"""What a stream asks of an object store, and what that costs.

The requests of a Spark query to the store of its checkpoint directory were counted with Spark 4.1.4 and Hadoop 3.4.2
(tests/object_storage/test_live_in_s3.py). As Hadoop's S3A has no rename, Spark writes each file under another name,
copies and deletes it, and looks for folders before and after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus
from dagster_ckpt.errors import NothingCommittedError, OptionError
from dagster_ckpt.policies.retention import bytes_of
from dagster_ckpt.snapshot.manifest import Manifest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import retained
from dagster_ckpt.values.durations import size, utc_time
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.storage_path import local_path


@dataclass(frozen=True)
class Requests:
    """Requests by kind, as S3 charges for them. A part of an upload is a `put`; a deletion is free."""

    put: float = 0
    copy: float = 0
    list: float = 0
    get: float = 0
    head: float = 0
    delete: float = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: float) -> Requests:
        return Requests(*(getattr(self, each.name) * times for each in fields(self)))

    @property
    def total(self) -> float:
        return self.put + self.copy + self.list + self.get + self.head + self.delete


class StateFiles(StrEnum):
    CHANGELOGS = "RocksDB with changelogs"
    ROCKSDB = "RocksDB without changelogs"
    HEAP = "heap"


class Part(StrEnum):
    OFFSETS = "offset log"
    COMMITS = "commit log"
    SOURCES = "log of a file source"
    SINKS = "log of a file sink"


# Per batch, including the purge of one older batch, by a look and a listing.
OF_A_BATCH: Mapping[Part, Requests] = {
    Part.OFFSETS: Requests(put=1, copy=1, list=10, head=13, delete=2),
    Part.COMMITS: Requests(put=1, copy=1, list=10, head=13, delete=2),
    Part.SOURCES: Requests(put=1, copy=1, list=10, get=2, head=16, delete=1),
    Part.SINKS: Requests(put=1, copy=1, list=11, get=1, head=14, delete=1),
}
# Per batch, state store and partition. Since Spark 4.1 each file of state has a checksum file
# (`spark.sql.streaming.checkpoint.fileChecksum.enabled`), which costs the same again.
OF_A_STORE: Mapping[StateFiles, Requests] = {
    StateFiles.CHANGELOGS: Requests(put=2, copy=2, list=17, head=23, delete=2),
    StateFiles.ROCKSDB: Requests(put=3, copy=2, list=19, head=24, delete=2),
    StateFiles.HEAP: Requests(put=2, copy=2, list=18, head=24, delete=4),
}
# Per version that maintenance purges, in the long run one a batch; other state needs few.
OF_A_PURGE: Mapping[StateFiles, Requests] = {
    StateFiles.CHANGELOGS: Requests(),
    StateFiles.ROCKSDB: Requests(list=6, head=6, delete=3),
    StateFiles.HEAP: Requests(),
}
CHECKSUMS_SINCE = (4, 1)
# Per upload of a store's whole state, after `stateStore.minDeltasForSnapshot` batches.
OF_A_STATE_SNAPSHOT: Mapping[StateFiles, Requests] = {
    StateFiles.CHANGELOGS: Requests(put=3, copy=2, list=18, head=24, delete=2),
    StateFiles.ROCKSDB: Requests(),
    StateFiles.HEAP: Requests(put=2, copy=2, list=17, head=23, delete=2),
}
DELTAS_BETWEEN_SNAPSHOTS = 10
# Per maintenance of a store (`spark.sql.streaming.stateStore.maintenanceInterval`).
OF_A_MAINTENANCE = Requests(list=1)
MAINTENANCE_MS = 60_000
DAY_MS = 86_400_000


@dataclass(frozen=True)
class QueryShape:
    batches_a_day: float
    # One per state store and partition.
    stores: float
    state: StateFiles
    source_logs: int
    sink_logs: int
    has_checksums: bool

    def a_day(self) -> Mapping[str, Requests]:
        logs = {
            Part.OFFSETS: 1,
            Part.COMMITS: 1,
            Part.SOURCES: self.source_logs,
            Part.SINKS: self.sink_logs,
        }
        found = {f"Spark: {part}": OF_A_BATCH[part] * (self.batches_a_day * times) for part, times in logs.items()}
        maintenances = DAY_MS / MAINTENANCE_MS
        snapshots = min(self.batches_a_day / DELTAS_BETWEEN_SNAPSHOTS, maintenances)
        of_a_batch = OF_A_STORE[self.state] + OF_A_PURGE[self.state]
        files = of_a_batch * self.batches_a_day + OF_A_STATE_SNAPSHOT[self.state] * snapshots
        found["Spark: state"] = files * (self.stores * (1 if self.has_checksums else 0.5))
        found["Spark: maintenance of state"] = OF_A_MAINTENANCE * (maintenances * self.stores)
        return {what: requests for what, requests in found.items() if requests.total}


_DAYS_IN_A_MONTH = 30
_WINDOW_MS = DAY_MS
_TAKEN = (SnapshotStatus.COMPLETED, SnapshotStatus.DELETING, SnapshotStatus.DELETED)

# Per checkpoint, and per deletion of an older one, with more for each other one in the folder
# (tests/storage/test_requests.py).
OF_A_CHECKPOINT = Requests(put=2, list=1)
OF_A_DELETION = Requests(put=1, list=2, get=2, delete=3)
OF_A_DELETION_EACH_OTHER = Requests(get=1)
# Per checkpoint and per new file in a live directory in the store, and per look at the logs after each batch.
OF_A_LISTING = Requests(list=8, get=12, head=4)
OF_A_NEW_FILE = Requests(get=1, head=3)
OF_A_LOOK = Requests(list=2)


@dataclass(frozen=True)
class Prices:
    """Prices in USD for 1,000 requests, and for a GB stored for a month.

    The defaults are the list price of S3 Standard in us-east-1 on 2026-11-27. Traffic within a region is free.

    Attributes:
        put: PUT, COPY, POST, LIST.
        get: GET, HEAD.
    """

    put: float = 0.005
    get: float = 0.0004
    storage: float = 0.023

    @staticmethod
    def of(given: Mapping[str, float]) -> Prices:
        names = [each.name for each in fields(Prices)]
        for name, price in given.items():
            if name not in names or not price >= 0:
                raise OptionError(f"The price {name}={price:g} is not valid. Give {', '.join(names)}, at least 0.")
        return replace(Prices(), **given)

    def of_requests(self, requests: Requests) -> float:
        paid_as_put = requests.put + requests.copy + requests.list
        return (paid_as_put * self.put + (requests.get + requests.head) * self.get) / 1000


@dataclass(frozen=True)
class BillLine:
    what: str
    requests: Requests
    usd: float


@dataclass(frozen=True)
class Saving:
    setting: str
    requests: float
    usd: float


@dataclass(frozen=True)
class RequestBill:
    """Result of `Client.cost`: estimates for a day, of which `usd` includes storage.

    Attributes:
        is_live_directory_local: If so, the total leaves out its lines, which say what it would cost in S3.
    """

    stream_id: str
    since_ms: int
    until_ms: int
    batches: float
    checkpoints: float
    is_live_directory_local: bool
    are_snapshots_local: bool
    written_bytes: float
    stored_bytes: int
    prices: Prices
    lines: tuple[BillLine, ...]
    usd: float
    savings: tuple[Saving, ...]

    def messages(self) -> list[str]:
        on_disk = [
            "The live directory lies on a disk: its lines say what it would cost in S3; the total leaves them out."
        ] * self.is_live_directory_local
        on_disk += ["The snapshots lie on a disk: the total leaves them out."] * self.are_snapshots_local
        return [
            f"From {utc_time(self.since_ms)} to {utc_time(self.until_ms)}, extrapolated to a day: "
            f"{self.batches:,.0f} batches, {self.checkpoints:,.0f} checkpoints, {size(round(self.written_bytes))} "
            f"written by them; {size(self.stored_bytes)} stored.",
            *on_disk,
        ]


def request_bill(stream: StreamHandle, prices: Prices) -> RequestBill:
    taken = _recent(stream)
    newest, oldest = taken[0], taken[-1]
    until_ms, since_ms = newest.completed_at_ms or 0, oldest.completed_at_ms or 0
    scale = DAY_MS / (until_ms - since_ms)
    location = newest.location or ""
    batches = ((newest.batch_id or 0) - (oldest.batch_id or 0)) * scale
    existing = stream.catalog.snapshots.completed(stream.stream_id)
    live = stream.catalog.streams.get(stream.stream_id).live_directory or stream.live_root
    usage = _Usage(
        query_shape(newest.properties, stream.store.manifest(location), batches),
        checkpoints=(len(taken) - 1) * scale,
        others=max(0, len(existing) - 1),
        is_live_directory_local=local_path(live) is not None,
        are_snapshots_local=local_path(location) is not None,
    )
    queue = [retained(each) for each in sorted(existing, key=attrgetter("place"))]
    stored = bytes_of(queue, queue)
    stored_usd = 0 if usage.are_snapshots_local else stored / 1e9 * prices.storage / _DAYS_IN_A_MONTH
    return RequestBill(
        stream_id=stream.stream_id,
        since_ms=since_ms,
        until_ms=until_ms,
        batches=batches,
        checkpoints=usage.checkpoints,
        is_live_directory_local=usage.is_live_directory_local,
        are_snapshots_local=usage.are_snapshots_local,
        written_bytes=sum(each.incremental_bytes or 0 for each in taken[:-1]) * scale,
        stored_bytes=stored,
        prices=prices,
        lines=tuple(BillLine(what, each, prices.of_requests(each)) for what, each in usage.lines().items()),
        usd=prices.of_requests(usage.paid()) + stored_usd,
        savings=tuple(_savings(usage, prices)),
    )


@dataclass(frozen=True)
class _Usage:
    query: QueryShape
    checkpoints: float
    others: int
    is_live_directory_local: bool
    are_snapshots_local: bool

    def of_live_directory(self) -> Mapping[str, Requests]:
        batches = self.query.batches_a_day
        new_files = batches * self.query.stores
        reading = OF_A_LISTING * self.checkpoints + OF_A_NEW_FILE * new_files + OF_A_LOOK * batches
        return {**self.query.a_day(), "dagster-ckpt: live directory read": reading}

    def of_snapshots(self) -> Mapping[str, Requests]:
        deletion = OF_A_DELETION + OF_A_DELETION_EACH_OTHER * self.others
        return {
            "dagster-ckpt: checkpoints written": OF_A_CHECKPOINT * self.checkpoints,
            "dagster-ckpt: checkpoints deleted": deletion * self.checkpoints,
        }

    def lines(self) -> Mapping[str, Requests]:
        return {**self.of_live_directory(), **self.of_snapshots()}

    def paid(self) -> Requests:
        live = [] if self.is_live_directory_local else list(self.of_live_directory().values())
        snapshots = [] if self.are_snapshots_local else list(self.of_snapshots().values())
        return sum([*live, *snapshots], Requests())


def _savings(usage: _Usage, prices: Prices) -> Iterator[Saving]:
    query = usage.query
    variants = {
        "live directory on a disk of the driver and the executors": replace(usage, is_live_directory_local=True),
        "trigger twice as long": replace(usage, query=replace(query, batches_a_day=query.batches_a_day / 2)),
        "half the partitions of the state (--state-partitions)": replace(
            usage, query=replace(query, stores=query.stores / 2)
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled=true": replace(
            usage,
            query=replace(query, state=StateFiles.CHANGELOGS if query.state is StateFiles.ROCKSDB else query.state),
        ),
        "spark.sql.streaming.checkpoint.fileChecksum.enabled=false": replace(
            usage, query=replace(query, has_checksums=False)
        ),
        "checkpoint interval twice as long": replace(usage, checkpoints=usage.checkpoints / 2),
    }
    now = usage.paid()
    found = [
        Saving(setting, now.total - less.total, prices.of_requests(now) - prices.of_requests(less))
        for setting, less in ((setting, variant.paid()) for setting, variant in variants.items())
    ]
    yield from sorted((each for each in found if each.usd > 0), key=lambda each: -each.usd)


def query_shape(properties: Mapping[str, Any], manifest: Manifest, batches_a_day: float) -> QueryShape:
    paths = [entry.path for entry in manifest.files]
    provider = str(properties.get("state_store_provider") or "")
    if "RocksDB" not in provider:
        state = StateFiles.HEAP
    elif any(path.endswith(".changelog") for path in paths):
        state = StateFiles.CHANGELOGS
    else:
        state = StateFiles.ROCKSDB
    operators = properties.get("state_operators") or []
    version = re.match(r"(\d+)\.(\d+)", str(properties.get("spark_version") or properties.get("pyspark_of_reader")))
    return QueryShape(
        batches_a_day=batches_a_day,
        stores=sum(len(each["stores"]) * int(each["partitions"] or 0) for each in operators),
        state=state,
        source_logs=len({path.split("/")[1] for path in paths if path.startswith("sources/")}),
        sink_logs=sum(local_path(str(each.get("path") or "/")) is None for each in properties.get("sinks") or []),
        has_checksums=version is None or tuple(map(int, version.groups())) >= CHECKSUMS_SINCE,
    )


def _recent(stream: StreamHandle) -> Sequence[SnapshotRecord]:
    listed = stream.catalog.snapshots.of_stream(stream.stream_id, kind=SnapshotKind.CHECKPOINT, status=None)
    taken = [each for each in listed if each.status in _TAKEN and each.completed_at_ms and each.batch_id is not None]
    taken = sorted(taken, key=lambda each: each.completed_at_ms or 0, reverse=True)
    recent = [
        each
        for each in taken
        if each.timeline == taken[0].timeline
        and (taken[0].completed_at_ms or 0) - (each.completed_at_ms or 0) <= _WINDOW_MS
    ]
    exists = recent and recent[0].status is SnapshotStatus.COMPLETED
    if not exists or len(recent) < 2 or recent[0].completed_at_ms == recent[-1].completed_at_ms:
        raise NothingCommittedError(
            f"Stream {stream.stream_id!r} has not taken two checkpoints on its newest timeline within a day, so its "
            "batches and bytes a day are unknown. Let it run for a while first."
        )
    return recent
