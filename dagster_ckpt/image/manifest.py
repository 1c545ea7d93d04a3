"""The manifest of an image: what it is, and where each of its bytes lies (docs/image-format.md, section 3)."""

from __future__ import annotations

import posixpath
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1


def _inside(path: str) -> str:
    """Refuse a path that a restore would write outside its directory (section 3.2)."""
    if posixpath.normpath(path) != path or path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(f"{path!r} is not a plain relative path")
    return path


Path = Annotated[str, AfterValidator(_inside)]
Bytes = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Beside the manifest, or in the folder that the checkpoints of a job share: nowhere else (section 3.3).
Reference = Annotated[str, Field(pattern=r"^(\.\./shared/)?[0-9A-Za-z][0-9A-Za-z._-]*$")]


class ImageKind(StrEnum):
    """Who owns an image: the system, or the person who asked for it."""

    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"


class ImageHeader(BaseModel):
    """What an image says of itself.

    Attributes:
        image_id: Unique id.
        job_id: The streaming job it was taken of.
        kind: Checkpoint or savepoint.
        number: Number of the attempt that took it.
        created_at_ms: When it was begun, ms since the epoch.
        batch_id: The batch after which a restored query resumes.
        query_id: Id of the query.
        properties: What those who took it want to find again; nothing here reads them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_id: str
    job_id: str
    kind: ImageKind
    number: int | None
    created_at_ms: int
    batch_id: int
    query_id: str
    properties: dict[str, Any] = Field(default_factory=dict)


class FileEntry(BaseModel):
    """One file of an image.

    Attributes:
        path: Its name.
        size: Its length in bytes.
        digest: BLAKE3 of its content, hexadecimal.
        identity: See `SourceFile.identity`.
        object: The data object it lies in, relative to the image's directory; None: in the metadata itself.
        offset: Where it begins there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    size: Bytes
    digest: Digest
    identity: str | None = None
    object: Reference | None = None
    offset: Bytes


class Manifest(BaseModel):
    """Header and files of an image.

    Attributes:
        format_version: Version of the format; a reader refuses one it does not know.
        header: What the image says of itself.
        files: Its files, by path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    header: ImageHeader
    files: tuple[FileEntry, ...]

    @model_validator(mode="after")
    def _paths_differ(self) -> Self:
        if len({entry.path for entry in self.files}) < len(self.files):
            raise ValueError("two files of the image have the same path")
        return self

    @property
    def objects(self) -> frozenset[str]:
        """The data objects it refers to, relative to its directory."""
        return frozenset(entry.object for entry in self.files if entry.object is not None)

    @property
    def full_bytes(self) -> int:
        """Bytes that a restore writes."""
        return sum(entry.size for entry in self.files)
