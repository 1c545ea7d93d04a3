"""A live directory in the layout of a stopped query, for sizes that Spark would need an hour to make."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

from tests.support.state_bytes import lz4_blocks, table

# Java's writeUTF("v2"), then one chunk each of key and value schema.
SCHEMA_HEAD = b"\x00\x02v2"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def write_batches(root: Path, *, partitions: int, first: int, last: int, changelog_bytes: int, sst_bytes: int) -> None:
    """Write what is there after batch `last` of a query with RocksDB and changelogs, from batch `first` on.

    Each partition has a snapshot of its first version with one SST, and a changelog for every version.

    Args:
        root: The live directory.
        partitions: Partitions of the state.
        first: First batch to write; 0 begins the directory.
        last: Last batch to write.
        changelog_bytes: Bytes of content of each changelog.
        sst_bytes: Bytes of content of each partition's SST.
    """
    for batch in range(first, last + 1):
        _write_logs(root, batch, partitions)
    for partition in range(partitions):
        store = root / f"state/0/{partition}"
        (store / "SSTs").mkdir(parents=True, exist_ok=True)
        for version in range(first + 1, last + 2):
            (store / f"{version}.changelog").write_bytes(lz4_blocks(os.urandom(changelog_bytes)))
        if first == 0:
            _write_snapshot(store, partition, sst_bytes)
    if first == 0:
        _write_operator(root, partitions)


def _write_logs(root: Path, batch: int, partitions: int) -> None:
    for folder in ("offsets", "commits", "sources/0"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "metadata").write_text('{"id":"6f0f4a62-0000-4000-8000-000000000001"}')
    conf = {
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.streaming.stateStore.providerClass": PROVIDER,
    }
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": conf})
    (root / f"offsets/{batch}").write_text(f"v1\n{head}\n{json.dumps({'logOffset': batch})}")
    (root / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    entry = {"path": f"file:///feed/{batch}.json", "timestamp": batch, "batchId": batch}
    (root / f"sources/0/{batch}").write_text(f"v1\n{json.dumps(entry)}")


def _write_snapshot(store: Path, partition: int, sst_bytes: int) -> None:
    name = f"000009-{partition:08x}-0000-4000-8000-000000000000.sst"
    content = table(os.urandom(sst_bytes))
    (store / "SSTs" / name).write_bytes(content)
    listed = {"localFileName": "000009.sst", "dfsSstFileName": name, "sizeBytes": len(content)}
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        archive.writestr("metadata", f"v1\n{json.dumps({'sstFiles': [listed], 'logFiles': [], 'numKeys': 1})}")
        archive.writestr("CURRENT", "MANIFEST-000001\n")
    (store / "1.zip").write_bytes(body.getvalue())


def _write_operator(root: Path, partitions: int) -> None:
    operator = root / "state/0/_metadata"
    operator.mkdir(parents=True, exist_ok=True)
    stores = [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": partitions}]
    described = {"operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"}, "stateStoreInfo": stores}
    (operator / "metadata").write_text(f"v1\n{json.dumps(described)}")
    schema = root / "state/0/0/_metadata"
    schema.mkdir(parents=True, exist_ok=True)
    field = {"name": "k", "type": "string", "nullable": True, "metadata": {}}
    struct = json.dumps({"type": "struct", "fields": [field]}).encode()
    chunk = (1).to_bytes(4, "big") + len(struct).to_bytes(2, "big") + struct
    (schema / "schema").write_bytes(SCHEMA_HEAD + 2 * chunk)
