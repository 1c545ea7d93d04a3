"""What can be wrong with a live directory, done to a copy of a real one, and what the doctor must say of it."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from doctor_patients import Patient
from live_files import changelog

from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.doctor.finding import Code, Severity
from dagster_ckpt.spark.versions import Feature


@dataclass(frozen=True)
class Case:
    """A damage, and what the doctor must say of it. Good back to: batches before the newest one, None: nowhere.

    `needed` is what Spark must have for the damage to be possible.
    """

    query: str
    damage: Callable[[Patient], object]
    code: Code
    path: str
    severity: Severity = Severity.ERROR
    back: int | None = 0
    needed: tuple[Feature, ...] = ()


STATE = "state/0/1"
NOTE, WARNING = Severity.NOTE, Severity.WARNING
CASES = {
    "metadata is missing": Case("heap", lambda p: p.remove("metadata"), Code.METADATA_MISSING, "metadata", back=None),
    "metadata is empty": Case(
        "heap", lambda p: p.write("metadata", b""), Code.METADATA_UNREADABLE, "metadata", back=None
    ),
    "another query's id": Case("heap", lambda p: p.set_query_id("another"), Code.QUERY_ID_DIFFERS, "metadata"),
    "a gap in offsets": Case("heap", lambda p: p.remove("offsets/2"), Code.OFFSETS_GAP, "offsets/2", WARNING),
    "a gap in commits": Case("heap", lambda p: p.remove("commits/2"), Code.COMMITS_GAP, "commits/2", WARNING),
    "an empty old offset": Case(
        "heap", lambda p: p.write("offsets/1", b""), Code.OFFSET_UNREADABLE, "offsets/1", WARNING
    ),
    "an empty offset": Case(
        "heap", lambda p: p.write("offsets/{N}", b""), Code.OFFSET_UNREADABLE, "offsets/{N}", back=2
    ),
    "a truncated offset": Case(
        "heap", lambda p: p.truncate("offsets/{N}"), Code.OFFSET_UNREADABLE, "offsets/{N}", back=2
    ),
    "an empty planned offset": Case(
        "heap",
        lambda p: (p.root / "offsets" / str(p.newest + 1)).write_bytes(b""),
        Code.OFFSET_UNREADABLE,
        r"offsets/{V}",
    ),
    "an empty commit": Case(
        "heap", lambda p: p.write("commits/{N}", b""), Code.COMMIT_UNREADABLE, "commits/{N}", back=1
    ),
    "a truncated commit": Case(
        "rocksdb", lambda p: p.truncate("commits/{N}", 0.7), Code.COMMIT_UNREADABLE, "commits/{N}", back=1
    ),
    "a commit without its offset": Case(
        "heap", lambda p: p.remove("offsets/{N}"), Code.COMMIT_WITHOUT_OFFSET, "offsets/{N}", back=1
    ),
    "the offset before is missing": Case(
        "heap", lambda p: p.remove("offsets/{N1}"), Code.PREVIOUS_OFFSET_MISSING, "offsets/{N1}", back=2
    ),
    "offsets two ahead, with state": Case(
        "rocksdb", lambda p: (p.remove("commits/{N}"), p.remove("commits/{N}")), Code.OFFSETS_AHEAD, r"offsets/\d+"
    ),
    "offsets two ahead, without state": Case(
        "stateless",
        lambda p: p.copy_entry("offsets", p.newest, p.newest + 2),
        Code.OFFSETS_AHEAD,
        r"offsets/\d+",
        WARNING,
    ),
    "a hole in the offsets, without state": Case(
        "stateless",
        lambda p: p.copy_entry("offsets", p.newest, p.newest + 2),
        Code.PREVIOUS_OFFSET_MISSING,
        "offsets/{V}",
    ),
    "the state is emptied": Case(
        "heap",
        lambda p: (shutil.rmtree(p.root / "state"), (p.root / "state").mkdir()),
        Code.STATE_MISSING,
        "state/0",
        back=None,
    ),
    "state that the commit names is gone": Case(
        "format-v2", lambda p: shutil.rmtree(p.root / "state"), Code.STATE_MISSING, "state/0", back=None
    ),
    "all commits are gone": Case(
        "heap", lambda p: shutil.rmtree(p.root / "commits"), Code.COMMIT_LOG_LOST, "commits", back=None
    ),
    "both logs are gone": Case(
        "heap",
        lambda p: (shutil.rmtree(p.root / "commits"), shutil.rmtree(p.root / "offsets")),
        Code.STATE_WITHOUT_BATCHES,
        "state/.*",
        back=None,
    ),
    "an unfinished repartition": Case(
        "rocksdb",
        lambda p: p.copy_entry(
            "offsets", p.newest, p.newest + 1, replace=('shuffle.partitions":"2"', 'shuffle.partitions":"3"')
        ),
        Code.REPARTITION_UNFINISHED,
        "offsets/{V}",
    ),
    "a newer offset log": Case(
        "heap",
        lambda p: p.write("offsets/{N}", b"v9\n{}\n"),
        Code.UNKNOWN_VERSION,
        "offsets/{N}",
        back=2,
    ),
    "a newer commit log": Case(
        "heap", lambda p: p.write("commits/{N}", b"v4\n{}"), Code.UNKNOWN_VERSION, "commits/{N}", back=1
    ),
    "a newer changelog": Case(
        "format-v2",
        lambda p: p.write(STATE + "/{V}_*.changelog", changelog({}, version="v9")),
        Code.UNKNOWN_VERSION,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "newer operator metadata": Case(
        "heap",
        lambda p: p.write("state/0/_metadata/metadata", b"v3\n{}"),
        Code.UNKNOWN_VERSION,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "a newer source log": Case(
        "heap", lambda p: p.write("sources/0/3.compact", b"v2\n{}"), Code.UNKNOWN_VERSION, "sources/0/3.compact", back=5
    ),
    "a source entry is missing": Case(
        "heap", lambda p: p.remove("sources/0/5"), Code.SOURCE_LOG_MISSING, "sources/0/5", back=3
    ),
    "a compact source entry is missing": Case(
        "stateless", lambda p: p.remove("sources/0/3.compact"), Code.SOURCE_LOG_MISSING, "sources/0/3", back=4
    ),
    "a truncated source entry": Case(
        "heap", lambda p: p.truncate("sources/0/3.compact"), Code.SOURCE_LOG_UNREADABLE, "sources/0/3.compact", back=5
    ),
    "an empty source entry": Case(
        "stateless", lambda p: p.write("sources/0/5", b""), Code.SOURCE_LOG_UNREADABLE, "sources/0/5", back=2
    ),
    "operator metadata is missing": Case(
        "rocksdb",
        lambda p: p.remove("state/0/_metadata/metadata"),
        Code.OPERATOR_METADATA_MISSING,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "operator metadata is cut off": Case(
        "rocksdb",
        lambda p: p.truncate("state/0/_metadata/metadata"),
        Code.OPERATOR_METADATA_UNREADABLE,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "a schema is missing": Case(
        "heap",
        lambda p: p.remove("state/0/0/_metadata/schema"),
        Code.SCHEMA_MISSING,
        "state/0/0/_metadata/schema",
        back=None,
    ),
    "a schema of format 3 is missing": Case(
        "join-v3",
        lambda p: p.remove("state/0/_stateSchema/*/*"),
        Code.SCHEMA_MISSING,
        "state/0/_stateSchema/.*",
        back=None,
    ),
    "a schema is damaged": Case(
        "heap",
        lambda p: p.write("state/0/0/_metadata/schema", b"\0"),
        Code.SCHEMA_UNREADABLE,
        "state/0/0/_metadata/schema",
        back=None,
    ),
    "a copied directory names schemas elsewhere": Case(
        "join-v3", lambda p: None, Code.SCHEMA_PATH_ELSEWHERE, r"state/0/_metadata/v2/\d+"
    ),
    "a delta is missing": Case(
        "heap", lambda p: p.remove(STATE + "/{V}.delta"), Code.STATE_FILE_MISSING, STATE + "/{V}.delta", back=1
    ),
    "a delta is cut off": Case(
        "heap", lambda p: p.truncate(STATE + "/{V}.delta"), Code.STATE_FILE_DAMAGED, STATE + "/{V}.delta", back=1
    ),
    "a delta is empty": Case(
        "heap", lambda p: p.write(STATE + "/{V}.delta", b""), Code.STATE_FILE_DAMAGED, STATE + "/{V}.delta", back=1
    ),
    "a store of a join misses a delta": Case(
        "join",
        lambda p: p.remove(STATE + "/right-keyWithIndexToValue/{V}.delta"),
        Code.STATE_FILE_MISSING,
        STATE + "/right-keyWithIndexToValue/{V}.delta",
        back=1,
    ),
    "a zip is missing": Case(
        "rocksdb", lambda p: p.remove(STATE + "/{V}.zip"), Code.STATE_FILE_MISSING, STATE + r"/\d+.changelog", back=1
    ),
    "a zip cannot be read": Case(
        "rocksdb", lambda p: p.truncate(STATE + "/{V}.zip"), Code.SNAPSHOT_UNREADABLE, STATE + "/{V}.zip", back=1
    ),
    "a changelog is missing": Case(
        "changelog",
        lambda p: p.remove(STATE + "/{V}.changelog"),
        Code.STATE_FILE_MISSING,
        STATE + "/{V}.changelog",
        back=1,
    ),
    "a changelog is cut off": Case(
        "changelog",
        lambda p: p.truncate(STATE + "/{V}.changelog"),
        Code.STATE_FILE_DAMAGED,
        STATE + "/{V}.changelog",
        back=1,
    ),
    "a changelog of format 2 is missing": Case(
        "format-v2",
        lambda p: p.remove(STATE + "/{V}_*.changelog"),
        Code.STATE_FILE_MISSING,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "a changelog of format 2 is altered": Case(
        "format-v2",
        lambda p: p.flip(STATE + "/{V}_*.changelog"),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog",
        back=1,
        needed=(Feature.STATE_CHECKSUMS,),
    ),
    "Spark's checksum is of another length": Case(
        "format-v2",
        lambda p: p.write(
            STATE + "/{V}_*.changelog.crc", b'{"algorithm":"CRC32C","value":1,"mainFileSize":7,"timestampMs":0}'
        ),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog",
        back=1,
        needed=(Feature.STATE_CHECKSUMS,),
    ),
    "Spark's checksum cannot be read": Case(
        "format-v2",
        lambda p: p.write(STATE + "/{V}_*.changelog.crc", b"{"),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog.crc",
        back=1,
        needed=(Feature.STATE_CHECKSUMS,),
    ),
    "unfinished files": Case(
        "heap",
        lambda p: (p.root / "offsets" / ".3.5b7c.tmp").write_bytes(b""),
        Code.LEFTOVER_TEMPORARY_FILES,
        "offsets/.3.5b7c.tmp",
        NOTE,
    ),
    "a checksum of Hadoop that is stale, on a zip": Case(
        "rocksdb",
        lambda p: (p.root / "state/0/1" / f".{p.newest + 1}.zip.crc").write_bytes(b"crc\0\0\0\2\0" + bytes(8)),
        Code.HADOOP_CHECKSUM_STALE,
        STATE + "/{V}.zip",
    ),
    "a checksum of Hadoop that is stale, on a delta": Case(
        "heap",
        lambda p: (p.root / "state/0/1" / f".{p.newest + 1}.delta.crc").write_bytes(b"crc\0\0\0\2\0" + bytes(8)),
        Code.HADOOP_CHECKSUM_STALE,
        STATE + "/{V}.delta",
        NOTE,
    ),
    "leftovers of a rewind by hand": Case(
        "heap",
        lambda p: [p.remove(f"{log}/{p.newest}") for _ in range(3) for log in ("offsets", "commits")],
        Code.STATE_AHEAD,
        STATE.replace("1", r"\d"),
        WARNING,
    ),
    "the sink is ahead": Case(
        "stateless",
        lambda p: [p.remove("offsets/{N}"), p.root.joinpath("commits", str(p.newest)).unlink()],
        Code.SINK_LOG_AHEAD,
        ".*output/_spark_metadata",
    ),
    "the sink is behind": Case(
        "stateless",
        lambda p: [path.unlink() for path in (p.sink / "_spark_metadata").glob(f"{p.newest}*")],
        Code.SINK_LOG_BEHIND,
        ".*output/_spark_metadata",
        WARNING,
        back=1,
    ),
    "the sink's log has a gap": Case(
        "stateless",
        lambda p: (p.sink / "_spark_metadata" / "4").unlink(),
        Code.SINK_LOG_GAP,
        ".*/_spark_metadata/4",
        back=2,
    ),
    "the compact entry of the sink's log is gone": Case(
        "stateless",
        lambda p: [
            path.unlink()
            for path in (p.sink / "_spark_metadata").iterdir()
            if path.name in {"0", "1", "2"} or path.name.endswith(".compact")
        ],
        Code.SINK_LOG_GAP,
        r".*/_spark_metadata/\d+(\.compact)?",
        back=None,
    ),
    "the sink was copied": Case(
        "stateless",
        lambda p: [
            path.write_text(path.read_text().replace("/output/", "/old/"))
            for path in (p.sink / "_spark_metadata").iterdir()
        ],
        Code.SINK_LOG_ELSEWHERE,
        ".*/_spark_metadata",
    ),
    "the sink's log is cut off": Case(
        "stateless",
        lambda p: (p.sink / "_spark_metadata" / str(p.newest)).write_bytes(b"v1\n{"),
        Code.SINK_LOG_UNREADABLE,
        r".*/_spark_metadata/\d+",
        back=1,
    ),
}


def ssts_of(snapshot: Path) -> list[Path]:
    with zipfile.ZipFile(snapshot) as archive:
        metadata = json.loads(archive.read("metadata").decode().partition("\n")[2])
    return [snapshot.parent / "SSTs" / item["dfsSstFileName"] for item in metadata["sstFiles"]]


def needed_snapshot(patient: Patient) -> Path:
    """The snapshot that the newest version of one store begins with."""
    needed = {file.path for file in cut(patient.live, carry_in_flight=False).needed}
    return patient.root / next(path for path in sorted(needed) if path.endswith(".zip"))


def an_sst_is_missing(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.unlink()
    return sst


def an_sst_is_short(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.write_bytes(sst.read_bytes()[:-1])
    return sst


def an_sst_never_reached_the_disk(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.write_bytes(sst.read_bytes()[:-64] + bytes(64))
    sst.with_name(f".{sst.name}.crc").unlink(missing_ok=True)
    return sst


def an_sst_was_altered(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    data = bytearray(sst.read_bytes())
    data[9] ^= 1
    sst.write_bytes(data)
    return sst
