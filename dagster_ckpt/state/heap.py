"""Heap state (`HDFSBackedStateStoreProvider`) as rows of bytes: read and written by Spark's executors.

A file is a compressed stream of records: length of the key, key, length of the value, value, with -1 for the value of a
deleted key and -1 instead of a key at the end (`writeUpdateToDeltaFile`). Keys and values are bytes of an `UnsafeRow`,
as in RocksDB. Executors need this package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.checksums import (
    LARGEST_BLOCK,
    Pieces,
    fits_hadoop,
    read_blocks,
    varint,
    write_blocks,
)
from dagster_ckpt.spark.checkpoint_dir.layout import store_directory
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import StoreDirectory, heap_files
from dagster_ckpt.values.safe_parsing import reading

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# The only codec whose files contain checksums.
HEAP_CODEC = "lz4"
_WORD = 8
_LENGTH = struct.Struct(">i")
_SNAPPY_HEADER = 16
_CHUNK = 1 << 20
_ROWS_A_BATCH = 4_096
_END = _LENGTH.pack(-1)


@dataclass(frozen=True)
class HeapStore:
    folder: FileIO
    operator: int
    store: str
    version: int
    codec: str = HEAP_CODEC

    def rows(self, session: SparkSession, partitions: int) -> DataFrame:
        """Read each row in its partition of the state."""
        numbers = session.range(0, partitions, 1, partitions)
        return numbers.mapInArrow(partial(_read_partitions, self), "key_bytes binary, value_bytes binary")

    def write(self, rows: DataFrame) -> int:
        """Write a snapshot of each partition."""
        written = rows.select("key_bytes", "value_bytes").mapInArrow(partial(_write_partition, self), "rows long")
        return sum(row.rows for row in written.collect())

    def read(self, partition: int) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        path = store_directory(self.operator, partition, self.store)
        for file in heap_files(StoreDirectory(self.folder, path), self.version):
            refuse = partial(_refuse, f"{self.folder.url}/{file.source}")
            with reading(refuse):
                data = self.folder.read(file.source)
                if self.codec != HEAP_CODEC and fits_hadoop(self.folder, file.source, data) is False:
                    raise ValueError("it does not have the checksum that Hadoop wrote beside it")
                for key, value in _records(Pieces(_plain(data, self.codec))):
                    if value is None:
                        state.pop(key, None)
                    else:
                        state[key] = value
        return state


def _refuse(where: str, why: str) -> LiveDirectoryError:
    return LiveDirectoryError(f"{where} is not a readable file of heap state: {why}. Restore a snapshot.")


def heap_snapshot(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for key, value in rows:
        yield b"".join((_LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value))
    yield _END


def _read_partitions(store: HeapStore, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for partition in batch.column(0).to_pylist():
            rows = iter(store.read(partition).items())
            while some := list(islice(rows, _ROWS_A_BATCH)):
                columns = [pa.array([row[at] for row in some], pa.binary()) for at in (0, 1)]
                yield pa.RecordBatch.from_arrays(columns, names=["key_bytes", "value_bytes"])


def _write_partition(store: HeapStore, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    count = 0

    def rows() -> Iterator[tuple[bytes, bytes]]:
        nonlocal count
        for batch in batches:
            for key, value in zip(batch.column(0), batch.column(1), strict=True):
                count += 1
                yield key.as_py(), value.as_py()

    path = f"{store_directory(store.operator, context.partitionId(), store.store)}/{store.version}.snapshot"
    # A second attempt of the task writes the same bytes.
    store.folder.write(path, write_blocks(heap_snapshot(rows())))
    yield pa.RecordBatch.from_arrays([pa.array([count], pa.int64())], names=["rows"])


def _plain(data: bytes, codec: str) -> Iterator[bytes]:
    import pyarrow as pa

    if codec == "zstd":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as plain:
            while piece := plain.read(_CHUNK):
                yield bytes(piece)
    elif codec == "snappy":
        yield from _snappy(BytesIO(data), pa.Codec("snappy"))
    else:
        yield from read_blocks(BytesIO(data))


def _snappy(stream: BinaryIO, codec: pa.Codec) -> Iterator[bytes]:
    if not _exactly(stream, _SNAPPY_HEADER).startswith(b"\x82SNAPPY\x00"):
        raise ValueError("it has no header of Snappy")
    while head := stream.read(_LENGTH.size):
        data = _exactly(stream, _LENGTH.unpack(head)[0])
        length, _ = varint(data, 0)
        if length > LARGEST_BLOCK:
            raise ValueError("it has a block of Snappy that is too long")
        yield bytes(codec.decompress(data, length))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count) if 0 <= count <= LARGEST_BLOCK else b""
    if len(data) != count:
        raise EOFError("it ends within a block")
    return data


def _records(plain: Pieces) -> Iterator[tuple[bytes, bytes | None]]:
    while True:
        (length,) = _LENGTH.unpack(plain.take(4))
        if length < 0:
            return
        key = plain.take(length)
        (length,) = _LENGTH.unpack(plain.take(4))
        if length < 0:
            yield key, None
        elif length % _WORD:
            raise ValueError("its rows have checksums (spark.sql.streaming.stateStore.rowChecksum.enabled)")
        else:
            yield key, plain.take(length)
