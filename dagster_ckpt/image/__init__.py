"""The image format: a manifest, small files inside it, and large data objects that images share.

Nothing here knows Spark or a job's life: named byte streams in, named byte streams out, over an `ObjectSpace`. Only
`flushing.py` knows this machine's disks. Start with docs/image-format.md, then `manifest.py`, `writer.py` and
`reader.py`.
"""

from dagster_ckpt.image.container import Metadata, pack_metadata, unpack_metadata
from dagster_ckpt.image.entries import FileEntry
from dagster_ckpt.image.flushing import flush, flush_tree, make_folder
from dagster_ckpt.image.manifest import ImageHeader, ImageKind, Manifest, object_name
from dagster_ckpt.image.packs import (
    Checks,
    Create,
    PackRunner,
    PackTask,
    Threads,
    pack_names,
    write_packs,
)
from dagster_ckpt.image.parallel import GoOn, begin, in_threads
from dagster_ckpt.image.reader import WriteEntry, extract, read_metadata, read_references, verify_image
from dagster_ckpt.image.reuse import Base
from dagster_ckpt.image.source import Source, SourceFile
from dagster_ckpt.image.space import ObjectSpace, nothing
from dagster_ckpt.image.writer import METADATA_NAME, PACK_TARGET_BYTES, Hold, WriteOptions, WrittenImage, write_image

__all__ = [
    "METADATA_NAME",
    "PACK_TARGET_BYTES",
    "Base",
    "Checks",
    "Create",
    "FileEntry",
    "GoOn",
    "Hold",
    "ImageHeader",
    "ImageKind",
    "Manifest",
    "Metadata",
    "ObjectSpace",
    "PackRunner",
    "PackTask",
    "Source",
    "SourceFile",
    "Threads",
    "WriteEntry",
    "WriteOptions",
    "WrittenImage",
    "begin",
    "extract",
    "flush",
    "flush_tree",
    "in_threads",
    "make_folder",
    "nothing",
    "object_name",
    "pack_metadata",
    "pack_names",
    "read_metadata",
    "read_references",
    "unpack_metadata",
    "verify_image",
    "write_image",
    "write_packs",
]
