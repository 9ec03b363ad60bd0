"""Clips, pictures and annotation files made on the spot, and a loader with its random streams."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from videox_fun.data.loader import TrainLoader
from videox_fun.data.module import DataModule, DataOptions, build_data

GREY_STEP = 4


def grey_frames(count: int, *, height: int = 32, width: int = 64, start: int = 0) -> np.ndarray:
    """Flat frames whose brightness tells their number: frame ``i`` is ``16 + 4 * (start + i)`` (modulo 224)."""
    levels = 16 + (GREY_STEP * (start + np.arange(count))) % 224
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).astype(np.uint8)


def number_of(frame: np.ndarray) -> int:
    """The number that ``grey_frames`` wrote into a frame."""
    return round((float(frame.mean()) - 16) / GREY_STEP)


def make_clip(
    path: Path,
    frames: np.ndarray | int,
    *,
    fps: int = 24,
    codec: str = "mpeg4",
    rotation: int | None = None,
    stamps: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    pictures = grey_frames(frames) if isinstance(frames, int) else frames
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle, av.open(handle, "w", format=path.suffix[1:].replace("mkv", "matroska")) as out:
        stream = out.add_stream(codec, rate=fps)
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        stream.options = options or {}
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = stamps[number] if stamps else number
            frame.time_base = Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def save_image(path: Path, *, height: int, width: int, level: int = 100) -> Path:
    Image.fromarray(np.full((height, width, 3), level, np.uint8)).save(path)
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def clip_rows(folder: Path, lengths: Sequence[int], **clip: Any) -> Path:
    """``metadata.json`` with one clip per length; captions are "clip 0", "clip 1", ..."""
    rows = []
    for number, length in enumerate(lengths):
        make_clip(folder / f"{number}.mp4", length, **clip)
        rows.append({"file_path": f"{number}.mp4", "text": f"clip {number}", "type": "video"})
    return write_rows(folder / "metadata.json", rows)


def seed_streams(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Streams:
    """The random streams of a process, as the loader needs them."""

    def __init__(self, seed: int) -> None:
        seed_streams(seed)
        self.numpy = np.random.Generator(np.random.PCG64(seed))

    def snapshot(self) -> tuple:
        return random.getstate(), np.random.get_state(), torch.get_rng_state(), self.numpy.bit_generator.state

    def restore(self, state: tuple) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        self.numpy.bit_generator.state = state[3]


def open_loader(
    options: DataOptions, *, rank: int = 0, world: int = 1, streams: Streams | None = None
) -> tuple[TrainLoader, DataModule, Streams]:
    streams = streams or Streams(options.seed + rank)
    module = build_data(options, rank=rank, world=world, rng=streams.numpy)
    loader = TrainLoader(
        module,
        rank=rank,
        world=world,
        device="cpu",
        seed=options.seed,
        snapshot_rng=streams.snapshot,
        restore_rng=streams.restore,
    )
    return loader, module, streams
