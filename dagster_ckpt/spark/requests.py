"""What a query of Spark asks of the object store that holds its checkpoint directory: counted, kept here as data.

Counted with Spark 4.1.4 and Hadoop 3.4.2 (tests/object_storage/test_live_in_s3.py counts again). Hadoop's S3A has no
rename: Spark's file manager writes each file under another name, copies and deletes it, and looks for folders before
and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum


@dataclass(frozen=True)
class Requests:
    """Requests by kind, as S3 charges for them; a part of an upload is a `put`, a deletion costs nothing."""

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


# In one batch, once older batches are purged (one a batch, by a look and a listing each).
OF_A_BATCH: Mapping[Part, Requests] = {
    Part.OFFSETS: Requests(put=1, copy=1, list=10, head=13, delete=2),
    Part.COMMITS: Requests(put=1, copy=1, list=10, head=13, delete=2),
    Part.SOURCES: Requests(put=1, copy=1, list=10, get=2, head=16, delete=1),
    Part.SINKS: Requests(put=1, copy=1, list=11, get=1, head=14, delete=1),
}
# In one batch, of one state store in one partition. Since Spark 4.1 each file of state has another one with its
# checksum (`spark.sql.streaming.checkpoint.fileChecksum.enabled`), which costs the same again.
OF_A_STORE: Mapping[StateFiles, Requests] = {
    StateFiles.CHANGELOGS: Requests(put=2, copy=2, list=17, head=23, delete=2),
    StateFiles.ROCKSDB: Requests(put=3, copy=2, list=25, head=30, delete=5),
    StateFiles.HEAP: Requests(put=2, copy=2, list=18, head=24, delete=4),
}
CHECKSUMS_SINCE = (4, 1)
# Each time that a store's state is uploaded as a whole: after `stateStore.minDeltasForSnapshot` batches.
OF_A_STATE_SNAPSHOT: Mapping[StateFiles, Requests] = {
    StateFiles.CHANGELOGS: Requests(put=3, copy=2, list=18, head=24, delete=2),
    StateFiles.ROCKSDB: Requests(),
    StateFiles.HEAP: Requests(put=2, copy=2, list=17, head=23, delete=2),
}
DELTAS_BETWEEN_SNAPSHOTS = 10
# Each time that Spark maintains a store (`spark.sql.streaming.stateStore.maintenanceInterval`).
OF_A_MAINTENANCE = Requests(list=1)
MAINTENANCE_MS = 60_000
DAY_MS = 86_400_000


@dataclass(frozen=True)
class QueryShape:
    """What the requests of a query depend on; `stores` are state stores times their partitions."""

    batches_a_day: float
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
        files = OF_A_STORE[self.state] * self.batches_a_day + OF_A_STATE_SNAPSHOT[self.state] * snapshots
        found["Spark: state"] = files * (self.stores * (1 if self.has_checksums else 0.5))
        found["Spark: maintenance of state"] = OF_A_MAINTENANCE * (maintenances * self.stores)
        return {what: requests for what, requests in found.items() if requests.total}
