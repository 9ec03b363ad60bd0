"""Reading clips and pictures.

``VideoReader`` numbers frames in presentation order, as the packets of the file give them (the count in the container
header is not used). A read seeks to the key frame before the first wanted frame and decodes up to the last one; only
wanted frames are converted to RGB, and a per-frame transform (the resize) runs at once, so that full-size frames never
pile up. The frame table comes from the index of the file when frames are stored in display order, else from one pass
over the packets. Rotation metadata is applied and transparency composited over white. Everything is closed on success
and on error, and one clip may take at most ``VIDEO_READER_TIMEOUT`` seconds.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from videox_fun.data.storage import fs_path, is_plain_file, open_media

VIDEO_READER_TIMEOUT = 20

VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".m2ts", ".3gp", ".ogv"}
)
IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".jfif", ".ppm"}
)
#: Transparent parts of a picture show this colour.
IMAGE_BACKGROUND = (255, 255, 255)
#: Transparent parts of a control picture mean "no control".
CONTROL_BACKGROUND = (0, 0, 0)


class DecodeError(ValueError):
    """A file that cannot be read; the text names the file."""


def media_kind(path: str | Path) -> str | None:
    """``"video"`` or ``"image"`` by the extension, ``None`` when it says neither."""
    suffix = os.path.splitext(str(path))[1].lower()
    if suffix in VIDEO_EXTENSIONS:
        return "video"
    return "image" if suffix in IMAGE_EXTENSIONS else None


class VideoReader(AbstractContextManager):
    """Random access to the frames of one clip. Use it as a context manager."""

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int = 2,
        timeout: float = VIDEO_READER_TIMEOUT,
        apply_rotation: bool = True,
    ) -> None:
        self.path = str(path)
        self.timeout = timeout
        self._apply_rotation = apply_rotation
        self._rotation = 0
        self._size: tuple[int, int] | None = None
        self._container: Any = None
        self._start_clock()
        # The handle gives a plain OSError for a missing file, and carries names that FFmpeg could not be told.
        self._handle = open_media(path)
        try:
            self._open(num_threads)
        except BaseException:
            self.close()
            raise

    def _open(self, num_threads: int) -> None:
        import av

        try:
            by_name = is_plain_file(self.path) and isinstance(fs_path(self.path), str)
            source = self.path if by_name else self._handle
            self._container = av.open(source, metadata_errors="ignore")
            if not self._container.streams.video:
                raise DecodeError(f"{self.path}: no video stream in this file")
            self._stream = self._container.streams.video[0]
            self._stream.thread_type = "AUTO"
            self._stream.codec_context.thread_count = num_threads
            self._table = self._table_from_index() or self._table_from_packets()
        except (av.error.FFmpegError, OSError) as error:
            raise DecodeError(f"{self.path}: cannot be opened as a video ({_reason(error)})") from error
        if not self._table.stamps:
            raise DecodeError(f"{self.path}: the video stream has no frames")

    # -- table of frames ---------------------------------------------------------------------------------------------
    def _table_from_index(self) -> FrameTable | None:
        """The container's own index, when it lists every frame in display order."""
        index = getattr(self._stream, "index_entries", ())  # PyAV 16 and later
        entries = [entry for entry in index if not entry.is_discard] if self._is_mp4 else []
        if not entries:
            return None
        self._check_cut_off(max(entry.pos + entry.size for entry in entries))
        if self._stream.codec_context.has_b_frames:
            return None  # the index holds decoding times, which are not display times here
        keys = [(entry.timestamp, entry.timestamp) for entry in entries if entry.is_keyframe]
        return FrameTable([entry.timestamp for entry in entries], keys, from_index=True)

    @property
    def _is_mp4(self) -> bool:
        return "mp4" in self._container.format.name.split(",")

    def _check_cut_off(self, end: int) -> None:
        at = self._handle.tell()
        size = self._handle.seek(0, os.SEEK_END)
        self._handle.seek(at)
        if end > size:
            raise DecodeError(f"{self.path}: the file is cut off ({size} bytes, its index reaches to {end})")

    def _table_from_packets(self) -> FrameTable:
        """One pass over the packets, without decoding."""
        stamps: list[int | None] = []
        keys: list[tuple[int, int]] = []
        for packet in self._container.demux(self._stream):
            self._check_time()
            if not packet.size or packet.is_discard:
                continue
            if packet.is_corrupt and self._is_mp4:
                raise DecodeError(f"{self.path}: the file is cut off (a frame is incomplete)")
            stamps.append(packet.pts)
            if packet.is_keyframe and packet.pts is not None:
                keys.append((packet.pts, packet.dts if packet.dts is not None else packet.pts))
        if any(stamp is None for stamp in stamps) or len(set(stamps)) != len(stamps):
            return FrameTable([None] * len(stamps), [])  # no usable stamps: frames are counted from the start
        return FrameTable(sorted(stamps), sorted(keys))

    # -- facts -------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._table.stamps)

    @property
    def header_frames(self) -> int:
        """The count that the container header claims (0 when it claims none). Not trusted."""
        return self._stream.frames

    @property
    def fps(self) -> float:
        rate = self._stream.average_rate or self._stream.guessed_rate
        return float(rate) if rate else 0.0

    def get_avg_fps(self) -> float:
        return self.fps

    @property
    def times(self) -> list[float] | None:
        """Seconds at which each frame is shown; ``None`` when the file has no stamps."""
        if not self._table.stamped:
            return None
        return [float(stamp * self._stream.time_base) for stamp in self._table.stamps]

    @property
    def size(self) -> tuple[int, int]:
        """``(height, width)`` as decoded and rotated (decodes the first frame when nothing was read yet)."""
        if self._size is None:
            self.read([0])
        assert self._size is not None
        return self._size

    @property
    def rotation(self) -> int:
        """Degrees counter-clockwise that the file asks for, in quarter turns."""
        return self._rotation if self.size else 0

    # -- frames ------------------------------------------------------------------------------------------------------
    def read(
        self, indices: Sequence[int], *, transform: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> np.ndarray:
        """Frames ``indices`` as ``[n, H, W, 3]`` uint8 RGB, each passed through ``transform``."""
        import av

        if self._container is None:
            raise DecodeError(f"{self.path}: the reader is closed")
        self._start_clock()
        wanted = [int(index) for index in indices]
        outside = [index for index in wanted if not 0 <= index < len(self)]
        if outside:
            raise DecodeError(f"{self.path}: frames {outside} are out of bounds, the clip has {len(self)} frames")
        found: dict[int, np.ndarray] = {}
        try:
            self._decode(set(wanted), found, transform, from_start=False)
            if len(found) < len(set(wanted)):  # stamps or key frames that do not keep their word
                if self._table.from_index:
                    self._table = self._table_from_packets()
                self._decode(set(wanted), found, transform, from_start=True)
        except av.error.FFmpegError as error:
            raise DecodeError(f"{self.path}: decoding failed ({_reason(error)})") from error
        missing = sorted(set(wanted) - found.keys())
        if missing:
            raise DecodeError(f"{self.path}: frames {missing[:8]} of {len(self)} cannot be decoded (damaged file)")
        return np.stack([found[index] for index in wanted])

    def _decode(
        self, wanted: set[int], found: dict[int, np.ndarray], transform: Callable | None, *, from_start: bool
    ) -> None:
        table, last = self._table, max(wanted)
        target = table.first_stamp() if from_start else table.key_before(min(wanted))
        self._container.seek(target, stream=self._stream, backward=True)
        for counted, frame in enumerate(self._container.decode(self._stream)):
            self._check_time()
            number = table.number_of(frame.pts) if table.stamped else counted
            if number in wanted and number not in found:
                image = self._to_rgb(frame)
                found[number] = transform(image) if transform is not None else image
            if len(found) == len(wanted) or number > last:
                break

    def _to_rgb(self, frame: Any) -> np.ndarray:
        seen_through = self._apply_rotation and any(part.is_alpha for part in frame.format.components)
        image = _over_background(frame.to_ndarray(format="rgba")) if seen_through else frame.to_ndarray(format="rgb24")
        self._rotation = int(round(frame.rotation / 90.0)) * 90 if self._apply_rotation else 0
        if self._rotation:
            image = np.ascontiguousarray(np.rot90(image, k=self._rotation // 90))
        self._size = image.shape[:2]
        return image

    def frames(self) -> Iterator[np.ndarray]:
        """All frames in order, one at a time."""
        self._start_clock()
        self._container.seek(self._table.first_stamp(), stream=self._stream, backward=True)
        for frame in self._container.decode(self._stream):
            self._check_time()
            yield self._to_rgb(frame)

    def decodable(self) -> Iterator[int]:
        """Decode everything from the start and count: yields the number of each frame that really comes out."""
        self._start_clock()
        self._container.seek(self._table.first_stamp(), stream=self._stream, backward=True)
        for number, _ in enumerate(self._container.decode(self._stream)):
            yield number

    def get_batch(self, indices: Sequence[int]) -> Frames:
        """Frames behind ``asnumpy()``, the way decord hands them out."""
        return Frames(self.read(indices))

    def _start_clock(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{self.path}: reading took longer than {self.timeout:g} s")

    def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            container.close()
        self._handle.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class FrameTable:
    """Display stamps of all frames in order, and ``(display, decoding)`` stamps of the key frames."""

    stamps: list[int | None]
    keys: list[tuple[int, int]]
    from_index: bool = False
    _numbers: dict[int, int] | None = None

    @property
    def stamped(self) -> bool:
        return self.stamps[0] is not None

    def number_of(self, stamp: int | None) -> int:
        if self._numbers is None:
            self._numbers = {stamp: number for number, stamp in enumerate(self.stamps)}
        return self._numbers.get(stamp, -1)

    def first_stamp(self) -> int:
        return min(0, self.stamps[0]) if self.stamped else 0

    def key_before(self, number: int) -> int:
        """Where to seek for frame ``number``: the last key frame *shown* at or before it, by its decoding stamp.

        A later key frame may be decoded before the frame without helping it (open groups of pictures).
        """
        if not self.stamped:
            return 0
        place = bisect.bisect_right(self.keys, (self.stamps[number], float("inf"))) - 1
        return self.keys[place][1] if place >= 0 else self.first_stamp()


class Frames:
    """An array behind decord's accessor."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def asnumpy(self) -> np.ndarray:
        return self._array


def _over_background(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(np.uint16)
    mixed = rgba[..., :3] * alpha + np.array(IMAGE_BACKGROUND, np.uint16) * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def load_image(
    path: str | Path, *, upstream_compat: bool = False, background: tuple[int, int, int] = IMAGE_BACKGROUND
) -> Image.Image:
    """A picture as RGB: orientation tag applied, transparency composited over ``background``, 16 bits scaled to 8.

    With ``upstream_compat`` only ``convert("RGB")`` is done.
    """
    with open_media(path) as handle, Image.open(handle) as opened:
        if upstream_compat:
            return opened.convert("RGB")
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            canvas = Image.new("RGBA", image.size, (*background, 255))
            return Image.alpha_composite(canvas, image).convert("RGB")
        return image.convert("RGB")


def image_size(path: str | Path, *, upstream_compat: bool = False) -> tuple[int, int]:
    """``(height, width)`` of a picture from its header, after the orientation tag."""
    with open_media(path) as handle, Image.open(handle) as image:
        width, height = image.size
        turned = not upstream_compat and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (width, height) if turned else (height, width)
