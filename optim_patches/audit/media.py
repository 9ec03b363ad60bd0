"""Size, frames and rate of video files from their headers alone.

Enough of the MP4 box structure to answer without a decoder: the movie's track boxes give width, height, frame count and
duration, and a box that reaches beyond the end of the file means the file was cut. Other containers and images are only
told apart by their first bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif"})
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_MAX_MOOV = 64 << 20
_CONTAINERS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl"})
_SIGNATURES = (b"\x1a\x45\xdf\xa3", b"RIFF", b"GIF8", b"\x89PNG", b"\xff\xd8\xff", b"BM", b"\x00\x00\x01\xba")


@dataclass(frozen=True)
class MediaInfo:
    """What a header says; ``problem`` is empty, ``empty``, ``truncated``, ``no_video`` or ``not_media``."""

    width: int = 0
    height: int = 0
    frames: int = 0
    fps: float = 0.0
    problem: str = ""


def probe(path: Path) -> MediaInfo:
    """Header facts of one file. Never raises for what the file holds; an unreadable file raises ``OSError``."""
    size = path.stat().st_size
    if size == 0:
        return MediaInfo(problem="empty")
    with path.open("rb") as file:
        head = file.read(16)
        if head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
            return _probe_mp4(file, size)
    known = any(head.startswith(signature) for signature in _SIGNATURES)
    return MediaInfo() if known else MediaInfo(problem="not_media")


def _probe_mp4(file: BinaryIO, size: int) -> MediaInfo:
    at, moov = 0, b""
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        if length == 1 and len(head) == 16:
            length = struct.unpack(">Q", head[8:16])[0]
        elif length == 0:
            length = size - at
        if length < 8 or at + length > size:
            return MediaInfo(problem="truncated")
        if kind == b"moov":
            file.seek(at)
            moov = file.read(min(length, _MAX_MOOV))
        at += length
    if not moov:
        return MediaInfo(problem="truncated")
    track = _video_track(moov)
    return track if track is not None else MediaInfo(problem="no_video")


def _video_track(moov: bytes) -> MediaInfo | None:
    """Facts of the first track whose handler is video."""
    for kind, start, end in _boxes(moov, 8, len(moov)):
        if kind != b"trak":
            continue
        boxes = {name: moov[first:last] for name, first, last in _walk(moov, start, end)}
        if boxes.get(b"hdlr", b"")[8:12] != b"vide":
            continue
        header = boxes.get(b"tkhd", b"")
        width, height = (value >> 16 for value in struct.unpack(">II", header[-8:])) if len(header) >= 8 else (0, 0)
        frames, ticks = _sample_counts(boxes.get(b"stts", b""))
        scale = _timescale(boxes.get(b"mdhd", b""))
        fps = frames * scale / ticks if ticks else 0.0
        return MediaInfo(width, height, frames, round(fps, 3))
    return None


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    at = start
    while at + 8 <= end:
        length, kind = struct.unpack_from(">I4s", data, at)
        if length < 8 or at + length > end:
            return
        yield kind, at + 8, at + length
        at += length


def _walk(data: bytes, start: int, end: int, depth: int = 0) -> Iterator[tuple[bytes, int, int]]:
    for kind, first, last in _boxes(data, start, end):
        yield kind, first, last
        if kind in _CONTAINERS and depth < 6:
            yield from _walk(data, first, last, depth + 1)


def _sample_counts(stts: bytes) -> tuple[int, int]:
    """Frames and total duration in ticks from the time-to-sample table."""
    if len(stts) < 8:
        return 0, 0
    entries = min(struct.unpack_from(">I", stts, 4)[0], (len(stts) - 8) // 8)
    frames = ticks = 0
    for number in range(entries):
        count, delta = struct.unpack_from(">II", stts, 8 + 8 * number)
        frames += count
        ticks += count * delta
    return frames, ticks


def _timescale(mdhd: bytes) -> int:
    if not mdhd:
        return 0
    offset = 20 if mdhd[0] == 1 else 12
    return struct.unpack_from(">I", mdhd, offset)[0] if len(mdhd) >= offset + 4 else 0
