"""Writing an image: what an earlier one has is shared, small files go inline, the rest into few large objects."""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from dagster_ckpt.errors import CkptError, ImageAbortedError, IncompleteCutError, StorageAccessError
from dagster_ckpt.image.container import pack_metadata
from dagster_ckpt.image.manifest import FileEntry, ImageHeader, Manifest
from dagster_ckpt.image.reuse import Reusable, object_name, reusable
from dagster_ckpt.image.source import SourceFile
from dagster_ckpt.image.space import ObjectSpace

METADATA_NAME = "_metadata"
PACK_TARGET_BYTES = 64 * 1024 * 1024
# What is inlined is written again with every image: beyond this it is cheaper in an object that images share.
INLINE_LIMIT_BYTES = 1024 * 1024
# Reading and hashing in smaller pieces costs more than it saves; files up to this size are read once, at a go.
CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class WriteOptions:
    """How an image is written.

    Attributes:
        inline_threshold: Files smaller than this many bytes go into the metadata; None puts every file there.
        inline_limit_bytes: All inlined files together; further small files go into a data object.
        pack_target_bytes: A data object of this size takes no further file. A file is never split.
        object_prefix: What goes before the name of a data object, relative to the image's directory.
    """

    inline_threshold: int | None = 20_480
    inline_limit_bytes: int = INLINE_LIMIT_BYTES
    pack_target_bytes: int = PACK_TARGET_BYTES
    object_prefix: str = ""


@dataclass(frozen=True)
class WrittenImage:
    """A written image.

    Attributes:
        manifest: Its manifest.
        incremental_bytes: Bytes that were written for it, metadata included.
        new_objects: Names of the data objects that were made for it, relative to its directory.
    """

    manifest: Manifest
    incremental_bytes: int
    new_objects: tuple[str, ...]


def write_image(
    space: ObjectSpace,
    directory: str,
    header: ImageHeader,
    files: Sequence[SourceFile],
    *,
    options: WriteOptions,
    base: Manifest | None = None,
    should_abort: Callable[[], bool] = lambda: False,
) -> WrittenImage:
    """Write an image: data objects first, `_metadata` last and at once (docs/image-format.md, section 4).

    A crash leaves data objects that nothing refers to, or a whole image. An error removes what was written,
    except where `_metadata` may have become visible: then nothing is removed.

    Args:
        space: Where to.
        directory: The image's directory in the space.
        header: What the image says of itself.
        files: Its files.
        options: How.
        base: An image in a sibling directory whose data objects may be shared.
        should_abort: Asked before each file.

    Raises:
        ImageAbortedError: `should_abort` said so.
        IncompleteCutError: A file vanished, or had another length than was said of it.
        StorageAccessError: The space could not be written, or an image is there already.
    """
    if space.size(posixpath.join(directory, METADATA_NAME)) is not None:
        raise StorageAccessError(
            f"{space.url}/{directory} holds an image already, and an image is never overwritten. Give the new one "
            "another number, or delete that one first."
        )
    known = reusable(space, directory, base, files)
    writer = _Writer(space, directory, header, options, known)
    try:
        for file in files:
            if should_abort():
                raise ImageAbortedError(f"{space.url}/{directory} was given up before it was whole.")
            writer.add(file)
        return writer.finish()
    except BaseException:
        writer.remove()
        raise


class _Writer:
    def __init__(
        self,
        space: ObjectSpace,
        directory: str,
        header: ImageHeader,
        options: WriteOptions,
        known: Reusable,
    ) -> None:
        self._space = space
        self._directory = directory
        self._header = header
        self._options = options
        self._known = known
        self._entries: list[FileEntry] = []
        self._inline = bytearray()
        # An id of its own for each write: a second try of the same image must not touch what a first one wrote.
        self._write_id = uuid.uuid4().hex[:8]
        self._packs: list[str] = []
        self._pack = contextlib.ExitStack()
        self._pack_stream: BinaryIO | None = None
        self._pack_bytes = 0
        self._written = 0
        self._publishing = False

    def add(self, file: SourceFile) -> None:
        known = self._known.by_identity(file)
        if known is not None:
            self._share(file, known)
        elif file.size <= CHUNK_BYTES:
            self._add_small(file)
        else:
            known = self._same_content(file)
            if known is not None:
                self._share(file, known)
            else:
                self._add_large(file)

    def finish(self) -> WrittenImage:
        self._close_pack()
        manifest = Manifest(header=self._header, files=tuple(sorted(self._entries, key=lambda entry: entry.path)))
        metadata = pack_metadata(manifest, bytes(self._inline))
        self._publishing = True
        self._space.publish(posixpath.join(self._directory, METADATA_NAME), metadata)
        return WrittenImage(manifest, self._written + len(metadata), tuple(self._packs))

    def remove(self) -> None:
        with contextlib.suppress(CkptError, OSError):
            self._close_pack()
        if self._may_be_published():
            return
        for name in self._packs:
            # What cannot be removed now is swept later; the error that led here is the one to tell.
            with contextlib.suppress(CkptError, OSError):
                self._space.delete(object_name(self._directory, name))

    def _may_be_published(self) -> bool:
        """A put can fail for us and succeed for the store: then the image is whole and needs its objects."""
        if not self._publishing:
            return False
        try:
            return self._space.size(posixpath.join(self._directory, METADATA_NAME)) is not None
        except (CkptError, OSError):
            return True

    def _share(self, file: SourceFile, known: FileEntry) -> None:
        self._entries.append(known.model_copy(update={"path": file.path, "identity": file.identity}))

    def _same_content(self, file: SourceFile) -> FileEntry | None:
        """An entry with the same content; a large file is read for it only if there is one of its size."""
        if not self._known.is_likely(file.size):
            return None
        digest = blake3()
        for chunk in _chunks(file):
            digest.update(chunk)
        return self._known.by_content(digest.hexdigest(), file.size)

    def _add_small(self, file: SourceFile) -> None:
        data = b"".join(_chunks(file))
        digest = blake3(data).hexdigest()
        known = self._known.by_content(digest, file.size)
        if known is not None:
            self._share(file, known)
        elif self._goes_inline(file.size):
            self._note(file, digest, None, len(self._inline))
            self._inline += data
        else:
            offset = self._room_for(file.size)
            self._write(data)
            self._note(file, digest, self._packs[-1], offset)

    def _add_large(self, file: SourceFile) -> None:
        everything_inline = self._options.inline_threshold is None
        digest = blake3()
        offset = len(self._inline) if everything_inline else self._room_for(file.size)
        for chunk in _chunks(file):
            digest.update(chunk)
            if everything_inline:
                self._inline += chunk
            else:
                self._write(chunk)
        self._note(file, digest.hexdigest(), None if everything_inline else self._packs[-1], offset)

    def _goes_inline(self, size: int) -> bool:
        threshold = self._options.inline_threshold
        # An empty file needs no object, whatever the threshold.
        if threshold is None or size == 0:
            return True
        return size < threshold and len(self._inline) + size <= self._options.inline_limit_bytes

    def _note(self, file: SourceFile, digest: str, reference: str | None, offset: int) -> None:
        entry = FileEntry(
            path=file.path, size=file.size, digest=digest, identity=file.identity, object=reference, offset=offset
        )
        self._entries.append(entry)
        self._known.add(entry)

    def _room_for(self, size: int) -> int:
        """Offset at which a file of this size goes into the open data object, which may be a new one."""
        if self._pack_stream is None or self._pack_bytes + size > self._options.pack_target_bytes:
            self._close_pack()
            name = f"{self._options.object_prefix}{self._header.image_id}-{self._write_id}-{len(self._packs)}.pack"
            # Noted first: an object that could be made only in part has to be removed as well.
            self._packs.append(name)
            self._pack_stream = self._pack.enter_context(self._space.create(object_name(self._directory, name)))
            self._pack_bytes = 0
        return self._pack_bytes

    def _write(self, data: bytes) -> None:
        if self._pack_stream is not None:
            self._pack_stream.write(data)
            self._pack_bytes += len(data)
            self._written += len(data)

    def _close_pack(self) -> None:
        self._pack_stream = None
        self._pack.close()


def _chunks(file: SourceFile) -> Iterator[bytes]:
    left = file.size
    try:
        with file.open() as stream:
            # One byte more than expected, so that a file that has grown is noticed.
            while chunk := stream.read(min(left + 1, CHUNK_BYTES)):
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
    except FileNotFoundError as error:
        raise IncompleteCutError(
            f"{file.path} vanished before it was read, so no image was written. Take the image anew."
        ) from error
    if left:
        raise IncompleteCutError(
            f"{file.path} had {file.size} bytes when it was looked at, and another length when it was read: it "
            "changed meanwhile, so no image was written. Take the image anew."
        )
