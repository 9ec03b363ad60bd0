"""Facts about a media file without loading it: size as shown, frame count, frame rate.

A clip is opened, its packets are counted and one frame is decoded. A clip whose header contradicts its packets is
suspect: it is decoded completely once in a process of its own, where a native crash of the decoder hurts nobody, and
the decoded count is what holds. Results are kept per process under path, size and modification time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from videox_fun.data.decode import DecodeError, VideoReader, image_size
from videox_fun.data.storage import fs_path, media_stat

_CHILD = """
import sys
from videox_fun.data.decode import VideoReader
with VideoReader(sys.argv[1]) as reader:
    print(sum(1 for _ in reader.decodable()))
"""


@dataclass(frozen=True)
class MediaInfo:
    """What a file holds: ``height`` and ``width`` as shown, ``frames`` as decoded (1 for a picture)."""

    kind: str
    height: int
    width: int
    frames: int = 1
    fps: float = 0.0
    suspect: bool = False


def probe_media(path: str | Path, *, kind: str, upstream_compat: bool = False) -> MediaInfo:
    """Probe ``path`` as ``kind`` ("video" or "image"). Raises ``DecodeError`` or ``OSError`` with the file's name."""
    return _probe(str(path), kind, upstream_compat, *media_stat(path))


@lru_cache(maxsize=65536)
def _probe(path: str, kind: str, upstream_compat: bool, size: int, _mtime: int) -> MediaInfo:
    if size == 0:
        raise DecodeError(f"{path}: the file is empty (0 bytes)")
    if kind != "video":
        height, width = image_size(path, upstream_compat=upstream_compat)
        return MediaInfo("image", height, width)
    with VideoReader(path, apply_rotation=not upstream_compat) as reader:
        frames, suspect = len(reader), is_suspect(reader)
        if suspect and not upstream_compat:
            frames = decode_in_own_process(path)
        height, width = reader.size
        return MediaInfo("video", height, width, frames, reader.fps, suspect)


def frames_at_rate(path: str | Path, rate: float) -> np.ndarray:
    """The frame nearest in time to each tick of ``rate`` per second, from the first frame to the last."""
    return _frames_at_rate(str(path), rate, *media_stat(path))


@lru_cache(maxsize=4096)
def _frames_at_rate(path: str, rate: float, _size: int, _mtime: int) -> np.ndarray:
    with VideoReader(path) as reader:
        if reader.times is not None:
            times = np.asarray(reader.times) - reader.times[0]
        elif reader.fps > 0:
            times = np.arange(len(reader)) / reader.fps
        else:
            raise DecodeError(f"{path}: has neither time stamps nor a frame rate, so --video_sample_fps cannot be met")
    ticks = np.arange(int(times[-1] * rate + 1e-6) + 1) / rate
    after = np.searchsorted(times, ticks - 1e-6).clip(0, len(times) - 1)
    before = (after - 1).clip(0)
    return np.where(ticks - times[before] <= times[after] - ticks, before, after)


def is_suspect(reader: VideoReader) -> bool:
    """Whether the header of the clip contradicts its packets."""
    return reader.header_frames not in (0, len(reader))


def decode_in_own_process(path: str | Path, *, timeout: float = 120.0) -> int:
    """Decode the whole clip in a child process and return the number of frames. Raises ``DecodeError``."""
    return _decode_apart(str(path), *media_stat(path), timeout)


@lru_cache(maxsize=4096)
def _decode_apart(path: str, _size: int, _mtime: int, timeout: float) -> int:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    command = [sys.executable, "-c", _CHILD, fs_path(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, env=env, check=False)
    except subprocess.TimeoutExpired as error:
        raise DecodeError(f"{path}: decoding this damaged clip takes longer than {timeout:g} s") from error
    if done.returncode < 0:
        raise DecodeError(f"{path}: the decoder crashes on this file (signal {-done.returncode})")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DecodeError(f"{path}: cannot be decoded ({lines[-1] if lines else 'no reason given'})")
    count = int(done.stdout.split()[-1])
    if count == 0:
        raise DecodeError(f"{path}: no frame of this clip can be decoded")
    return count
