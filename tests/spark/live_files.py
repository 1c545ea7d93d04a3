"""Live directories written by hand."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from tests.support.state_bytes import lz4_blocks

HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class LiveFiles:
    """Writes what Spark writes, a file at a time."""

    def __init__(self, root: Path, *, pins_encoding: bool = True) -> None:
        self.root = root
        # Every Spark since 4.0 does.
        self.pins_encoding = pins_encoding
        self.live = LiveDirectory(str(root))

    def put(self, path: str, data: bytes | str = b"x") -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def query_id(self, query_id: str = "11111111-2222") -> None:
        self.put("metadata", json.dumps({"id": query_id}))

    def offsets(self, batch: int, *sources: str, provider: str = HDFS, partitions: int = 1) -> None:
        conf = {
            "spark.sql.shuffle.partitions": str(partitions),
            "spark.sql.streaming.stateStore.providerClass": provider,
        }
        if self.pins_encoding:
            conf["spark.sql.streaming.stateStore.encodingFormat"] = "unsaferow"
        metadata = json.dumps({"batchWatermarkMs": batch * 10, "batchTimestampMs": 0, "conf": conf})
        self.put(f"offsets/{batch}", "\n".join(["v1", metadata, *sources]))

    def commit(self, batch: int, state_ids: dict[str, list[list[str]]] | None = None) -> None:
        body: dict[str, object] = {"nextBatchWatermarkMs": batch * 10 + 5}
        if state_ids is not None:
            body["stateUniqueIds"] = state_ids
        self.put(f"commits/{batch}", f"v{1 if state_ids is None else 2}\n{json.dumps(body)}")

    def source_entry(self, name: str, source: str = "0") -> None:
        number = int(name.removesuffix(".compact"))
        line = json.dumps({"path": f"file:///in/{number}.json", "timestamp": 1, "batchId": number})
        self.put(f"sources/{source}/{name}", f"v1\n{line}")

    def operator(
        self, number: int = 0, *, name: str = "stateStoreSave", stores: tuple[str, ...] = ("default",), key: bool = True
    ) -> None:
        info = [{"storeName": store, "numColsPrefixKey": 0, "numPartitions": 2} for store in stores]
        metadata = {"operatorInfo": {"operatorId": number, "operatorName": name}, "stateStoreInfo": info}
        self.put(f"state/{number}/_metadata/metadata", f"v1\n{json.dumps(metadata)}")
        for store in stores:
            below = "" if store == "default" else f"{store}/"
            self.put(f"state/{number}/0/{below}_metadata/schema", schema(has_key=key))

    def batches(self, last: int, *, provider: str = HDFS, partitions: int = 1) -> None:
        """A query over a file source that has committed batches up to `last`, without its state."""
        self.query_id()
        for batch in range(last + 1):
            self.source_entry(str(batch))
            self.offsets(batch, f'{{"logOffset":{batch}}}', provider=provider, partitions=partitions)
            self.commit(batch)


def schema(*, has_key: bool, version: str = "v2", key_type: str = "long") -> bytes:
    fields = [{"name": "k", "type": key_type, "nullable": True, "metadata": {}}] if has_key else []
    key = json.dumps({"type": "struct", "fields": fields}).encode()
    value = b'{"type":"struct","fields":[]}'
    chunk = struct.Struct(">iH")
    return struct.pack(">H", 2) + version.encode() + chunk.pack(1, len(key)) + key + chunk.pack(1, len(value)) + value


def snapshot_zip(*ssts: tuple[str, int], version: str = "v1") -> bytes:
    files = [{"localFileName": name[:6], "dfsSstFileName": name, "sizeBytes": size} for name, size in ssts]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("CURRENT", "MANIFEST-000001")
        archive.writestr("metadata", f"{version}\n" + json.dumps({"sstFiles": files, "numKeys": 1}))
    return stream.getvalue()


def changelog(lineage: dict[int, str], *, version: str = "v3") -> bytes:
    """A changelog whose head is one uncompressed LZ4 block."""
    items = json.dumps([{"version": number, "checkpointUniqueId": uid} for number, uid in lineage.items()])
    return lz4_blocks(b"".join(struct.pack(">H", len(text)) + text.encode() for text in (version, items)) + b"\0\0\0\0")


def version_1_changelog(version: str) -> bytes:
    """A changelog of state checkpoint format v1, with a version at its head or without."""
    head = struct.pack(">H", len(version)) + version.encode() if version else b""
    return lz4_blocks(head + struct.pack(">i", 8) + b"12345678" + struct.pack(">i", -1))
