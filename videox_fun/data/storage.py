"""Where the bytes of a clip come from: a file, or a part of a tar shard, on this machine or behind a URL.

A name such as ``shards/00.tar::1536+20480::cat.mp4`` is the member ``cat.mp4`` of a shard: 20480 bytes from byte 1536.
The place may be left out (``00.tar::cat.mp4``); the shard's table of contents is read then. Members are never
unpacked: a reader sees a window of the shard, so only the bytes it asks for are read, and the shards may lie where no
disk of this machine could hold them (``https://``, ``s3://`` and whatever else fsspec opens).
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

TAR_MARK = ".tar::"

#: What an annotation may be, see ``data.formats``.
DATA_FORMATS = ("auto", "videox", "cogvideo", "folder", "webdataset")


def fs_path(path: str | Path) -> str | bytes:
    """The path as the operating system takes it: bytes where the locale cannot express the name."""
    text = str(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def in_shard(path: str | Path) -> bool:
    """Whether a name means a member of a tar shard."""
    return TAR_MARK in str(path)


def is_plain_file(path: str | Path) -> bool:
    """Whether the operating system opens this name by itself."""
    return not in_shard(path) and not is_url(path)


def open_media(path: str | Path) -> BinaryIO:
    """The bytes of a clip or picture, open for reading. Raises ``OSError`` with the name."""
    if not in_shard(path):
        return _open_whole(str(path))
    shard, offset, size, _ = locate(str(path))
    return io.BufferedReader(_Window(_open_whole(shard), offset, size))


def media_stat(path: str | Path) -> tuple[int, int]:
    """``(bytes, modification time in ns)``; a member has its shard's time, what is behind a URL has none."""
    if is_plain_file(path):
        status = os.stat(fs_path(path))
        return status.st_size, status.st_mtime_ns
    if in_shard(path):
        shard, offset, size, _ = locate(str(path))
        return size, offset if is_url(shard) else os.stat(fs_path(shard)).st_mtime_ns
    with _open_whole(str(path)) as handle:
        return handle.seek(0, os.SEEK_END), 0


def locate(path: str) -> tuple[str, int, int, str]:
    """``(shard, offset, size, member)`` of a member's name."""
    start, _, rest = path.partition(TAR_MARK)
    shard = start + ".tar"
    place, separator, member = rest.partition("::")
    offset, plus, size = place.partition("+")
    if separator and plus and offset.isdigit() and size.isdigit():
        return shard, int(offset), int(size), member
    contents = _contents(shard, media_stat(shard))
    if rest not in contents:
        raise FileNotFoundError(f"{shard}: no member {rest!r} in this shard")
    return shard, *contents[rest], rest


def member_name(shard: str, offset: int, size: int, member: str) -> str:
    """The full name of a member. ``shard`` ends with ``.tar``."""
    return f"{shard}::{offset}+{size}::{member}"


def members(shard: str) -> Iterator[tuple[str, int, int]]:
    """``(name, offset, size)`` of the files of a shard, from its headers. Raises ``ValueError`` for a damaged one."""
    try:
        with _open_whole(shard) as handle, tarfile.open(fileobj=handle, mode="r:") as archive:
            for entry in archive:
                if entry.isfile():
                    yield entry.name, entry.offset_data, entry.size
    except tarfile.TarError as error:
        raise ValueError(f"{shard}: not a plain tar file ({error}); compressed shards are not read") from None


@lru_cache(maxsize=64)
def _contents(shard: str, _stamp: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {name: (offset, size) for name, offset, size in members(shard)}


def _open_whole(path: str) -> BinaryIO:
    if not is_url(path):
        return open(fs_path(path), "rb")
    import fsspec

    return fsspec.open(path, "rb").open()


class _Window(io.RawIOBase):
    """``size`` bytes of a file from ``start``; closing it closes the file."""

    def __init__(self, handle: BinaryIO, start: int, size: int) -> None:
        self._handle, self._start, self._size = handle, start, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        want = min(len(buffer), max(self._size - self._at, 0))
        self._handle.seek(self._start + self._at)
        data = self._handle.read(want)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._handle.close()
        super().close()
