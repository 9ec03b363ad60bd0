"""Cheap measures of a clip, from a few small grey frames.

``motion``: mean change between frames half a second apart, in grey levels (0 is a still). ``sharpness``: variance of
the Laplacian (a blurred clip has little). ``brightness``: mean level. ``black``: largest share of dark pixels in any
frame (letter boxes and fades). ``text_area``: share of blocks packed with strong upright edges, as letters are; it
finds subtitles and title cards, and now and then a picket fence: look before you filter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.decode import VideoReader, load_image, media_kind
from videox_fun.data.prepare.jsonl import Row, run_each
from videox_fun.data.resize import resize_frame

_SIDE = 240
_FRAMES = 8
_DARK, _EDGE, _BLOCK, _PACKED = 16, 48, 12, 0.2


def measure_rows(
    rows: Iterable[Row], target: str | Path, *, folder: str | None = None, workers: int = 1
) -> tuple[int, int]:
    """Append rows with their measures to ``target``; returns ``(measured, unreadable)``."""
    return run_each(rows, target, lambda row: {**row, "measures": measure(resolve(row["file_path"], folder))},
                    workers=workers)  # fmt: skip


def measure(path: str | Path) -> dict[str, float]:
    """The measures of one clip or picture."""
    if media_kind(path) != "video":
        return _of_frames(_grey(np.asarray(load_image(path)))[None], None, seconds=0.0)
    with VideoReader(path) as reader:
        fps = reader.fps or 24.0
        count = len(reader)
        starts = np.unique(np.linspace(0, count - 1, min(_FRAMES, count)).astype(int))
        later = np.minimum(starts + max(round(fps / 2), 1), count - 1)
        frames = reader.read([*starts, *later], transform=lambda frame: _grey(frame)[..., None])[..., 0]
    first, second = frames[: len(starts)], frames[len(starts) :]
    moved = later > starts
    return _of_frames(first, second[moved] - first[moved] if moved.any() else None, seconds=count / fps)


def _grey(frame: np.ndarray) -> np.ndarray:
    small = resize_frame(frame, _SIDE).astype(np.float32)
    return small @ np.array([0.299, 0.587, 0.114], np.float32)


def _of_frames(grey: np.ndarray, change: np.ndarray | None, *, seconds: float) -> dict[str, float]:
    laplace = (grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
               - 4 * grey[:, 1:-1, 1:-1])  # fmt: skip
    return {
        "motion": round(float(np.abs(change).mean()), 3) if change is not None else 0.0,
        "sharpness": round(float(laplace.var(axis=(1, 2)).mean()), 2),
        "brightness": round(float(grey.mean()), 2),
        "black": round(float((grey < _DARK).mean(axis=(1, 2)).max()), 4),
        "text_area": round(float(np.median([_text_area(frame) for frame in grey])), 4),
        "seconds": round(seconds, 3),
    }


def _text_area(grey: np.ndarray) -> float:
    edges = np.abs(np.diff(grey, axis=1)) > _EDGE
    height, width = (side // _BLOCK * _BLOCK for side in edges.shape)
    if height == 0 or width == 0:
        return 0.0
    blocks = edges[:height, :width].reshape(height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK)
    packed = blocks.mean(axis=(1, 3)) > _PACKED
    beside = np.zeros_like(packed)  # a letter has neighbours in its line
    beside[:, 1:] |= packed[:, :-1]
    beside[:, :-1] |= packed[:, 1:]
    return float((packed & beside).mean())


def keep(rows: Iterable[Row], limits: Mapping[str, float | None]) -> tuple[list[Row], Counter[str]]:
    """Rows within ``limits`` (``min_motion``, ``max_black``, ...), and how many failed each of them.

    A row without a measure fails the limits on it.
    """
    kept: list[Row] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        reason = next((f"--{name} {limit:g}" for name, limit in limits.items()
                       if limit is not None and not _within(row, name, limit)), None)  # fmt: skip
        if reason is None:
            kept.append({key: value for key, value in row.items() if key != "measures"})
        else:
            dropped[reason] += 1
    return kept, dropped


def _within(row: Mapping[str, Any], name: str, limit: float) -> bool:
    which, _, measure_name = name.partition("_")
    value = row.get("measures", {}).get(measure_name)
    return value is not None and (value >= limit if which == "min" else value <= limit)
