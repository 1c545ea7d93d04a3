"""How long do images of a large live directory take, beside copying it with `cp -a` and `tar`?

The live directory is written by this script in the layout of a stopped query with RocksDB and changelogs: for each
partition a snapshot, its SSTs and one changelog a batch. Each figure is the median of interleaved repetitions.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dagster_ckpt.image import ImageHeader, ImageKind
from dagster_ckpt.options import FileSystemCheckpointStorage
from dagster_ckpt.spark import LiveDirectory, materialize, staged_cut
from dagster_ckpt.storage import open_store

# Java's writeUTF("v2"), then one chunk each of key and value schema.
SCHEMA_HEAD = b"\x00\x02v2"


def write_batches(root: Path, *, partitions: int, first: int, last: int, sst_bytes: int) -> None:
    """Write what Spark has on disk after batch `last`, from batch `first` on."""
    conf = {
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    for folder in ("offsets", "commits", "sources/0"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "metadata").write_text('{"id":"6f0f4a62-0000-4000-8000-000000000001"}')
    for batch in range(first, last + 1):
        head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": conf})
        (root / f"offsets/{batch}").write_text(f"v1\n{head}\n{json.dumps({'logOffset': batch})}")
        (root / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')
        entry = {"path": f"file:///feed/{batch}.json", "timestamp": batch, "batchId": batch}
        (root / f"sources/0/{batch}").write_text(f"v1\n{json.dumps(entry)}")
    operator = root / "state/0/_metadata"
    operator.mkdir(parents=True, exist_ok=True)
    stores = [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": partitions}]
    described = {"operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"}, "stateStoreInfo": stores}
    (operator / "metadata").write_text(f"v1\n{json.dumps(described)}")
    schema = root / "state/0/0/_metadata"
    schema.mkdir(parents=True, exist_ok=True)
    field = {"name": "k", "type": "string", "nullable": True, "metadata": {}}
    struct = json.dumps({"type": "struct", "fields": [field]}).encode()
    (schema / "schema").write_bytes(
        SCHEMA_HEAD + 2 * ((1).to_bytes(4, "big") + len(struct).to_bytes(2, "big") + struct)
    )
    for partition in range(partitions):
        store = root / f"state/0/{partition}"
        (store / "SSTs").mkdir(parents=True, exist_ok=True)
        for version in range(first + 1, last + 2):
            (store / f"{version}.changelog").write_bytes(os.urandom(20_000))
        if first == 0:
            name = f"000009-{partition:08x}-0000-4000-8000-000000000000.sst"
            (store / "SSTs" / name).write_bytes(os.urandom(sst_bytes))
            listed = {"localFileName": "000009.sst", "dfsSstFileName": name, "sizeBytes": sst_bytes}
            body = io.BytesIO()
            with zipfile.ZipFile(body, "w") as archive:
                archive.writestr("metadata", f"v1\n{json.dumps({'sstFiles': [listed], 'logFiles': [], 'numKeys': 1})}")
                archive.writestr("CURRENT", "MANIFEST-000001\n")
            (store / "1.zip").write_bytes(body.getvalue())


def timed(work: Callable[[], object]) -> float:
    """Seconds of wall time."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(*command: str) -> None:
    """Run a peer."""
    subprocess.run(command, check=True)


@click.command()
@click.option("--partitions", default=200, show_default=True)
@click.option("--sst-bytes", default=1_000_000, show_default=True, help="State of one partition.")
@click.option("--repeat", default=3, show_default=True)
def main(partitions: int, sst_bytes: int, repeat: int) -> None:
    """Measure and print."""
    figures: dict[str, list[float]] = {}
    for _ in range(repeat):
        root = Path(tempfile.mkdtemp(prefix="dagster-ckpt-benchmark-"))
        try:
            for name, seconds in measure(root, partitions=partitions, sst_bytes=sst_bytes).items():
                figures.setdefault(name, []).append(seconds)
        finally:
            shutil.rmtree(root)
    table = Table(title=f"{partitions} partitions, {partitions * sst_bytes / 1e6:.0f} MB of SSTs; median of {repeat}")
    for heading in ("what", "seconds", "as a share of cp -a", "as a share of tar"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    medians = {name: statistics.median(seconds) for name, seconds in figures.items()}
    for name, seconds in medians.items():
        verb = name.rsplit(" ", 1)[-1]
        peers = [medians.get(f"{peer} {verb}") for peer in ("cp -a", "tar")]
        table.add_row(name, f"{seconds:.3f}", *(f"{seconds / peer:.2f}" if peer else "" for peer in peers))
    Console().print(table)


def measure(root: Path, *, partitions: int, sst_bytes: int) -> dict[str, float]:
    """One repetition; what is compared carries the same last word."""
    live = root / "live"
    write_batches(live, partitions=partitions, first=0, last=9, sst_bytes=sst_bytes)
    store = open_store(FileSystemCheckpointStorage(f"file://{root}/images"), "benchmark")
    directory = LiveDirectory(str(live))

    def image(number: int, base: str | None) -> str:
        with staged_cut(directory, carry_in_flight=False) as staged:
            header = ImageHeader(
                image_id=f"0000000{number}",
                job_id="benchmark",
                kind=ImageKind.CHECKPOINT,
                number=number,
                created_at_ms=0,
                batch_id=staged.cut.batch_id,
                query_id=staged.cut.query_id,
            )
            return store.write_checkpoint(header, staged.files, base=base).location

    seconds: dict[str, float] = {}
    locations: list[str] = []
    seconds["image full"] = timed(lambda: locations.append(image(1, None)))
    seconds["cp -a full"] = timed(lambda: run("cp", "-a", str(live), str(root / "copy-1")))
    seconds["tar full"] = timed(lambda: run("tar", "-cf", str(root / "1.tar"), "-C", str(root), "live"))
    write_batches(live, partitions=partitions, first=10, last=10, sst_bytes=sst_bytes)
    seconds["image incremental"] = timed(lambda: locations.append(image(2, locations[0])))
    seconds["cp -a incremental"] = timed(lambda: run("cp", "-a", str(live), str(root / "copy-2")))
    seconds["tar incremental"] = timed(lambda: run("tar", "-cf", str(root / "2.tar"), "-C", str(root), "live"))
    restored = LiveDirectory(str(root / "restored"))
    seconds["image restore"] = timed(
        lambda: materialize(
            restored, lambda write: store.extract(locations[1], lambda entry, chunks: write(entry.path, chunks))
        )
    )
    seconds["cp -a restore"] = timed(lambda: run("cp", "-a", str(root / "copy-2"), str(root / "copied")))
    (root / "untarred").mkdir()
    seconds["tar restore"] = timed(lambda: run("tar", "-xf", str(root / "2.tar"), "-C", str(root / "untarred")))
    return seconds


if __name__ == "__main__":
    main()
