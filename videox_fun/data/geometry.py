"""Sizes: the aspect-ratio tables, and which height, width and frame count a batch gets.

Pure functions. The collate draws among the choices listed here, and the summary before training lists all of them.
Notation as in the flags: ``video_size``, ``image_size`` and ``token_size`` are side lengths of squares; a *table* maps
an aspect ratio (height / width) to a size and is given for squares of 512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = Mapping[str, Sequence[float]]

_RATIO_SIZES = (
    "0.25:256,1024 0.26:256,992 0.27:256,960 0.28:256,928 0.32:288,896 0.33:288,864 0.35:288,832 0.4:320,800 "
    "0.42:320,768 0.48:352,736 0.5:352,704 0.52:352,672 0.57:384,672 0.6:384,640 0.68:416,608 0.72:416,576 "
    "0.78:448,576 0.82:448,544 0.88:480,544 0.94:480,512 1.0:512,512 1.07:512,480 1.13:544,480 1.21:544,448 "
    "1.29:576,448 1.38:576,416 1.46:608,416 1.67:640,384 1.75:672,384 2.0:704,352 2.09:736,352 2.4:768,320 "
    "2.5:800,320 2.89:832,288 3.0:864,288 3.11:896,288 3.62:928,256 3.75:960,256 3.88:992,256 4.0:1024,256"
)
_CROP_KEYS = "0.42 0.5 0.57 0.68 0.78 0.88 0.94 1.0 1.07 1.13 1.29 1.46 1.75 2.0 2.4"
_CROP_WEIGHTS = (1, 2, 4, 4, 4, 4, 8, 8, 8, 4, 4, 4, 4, 2, 1)


def _parse_table(text: str) -> dict[str, list[float]]:
    entries = (entry.split(":") for entry in text.split())
    return {key: [float(side) for side in sides.split(",")] for key, sides in entries}


ASPECT_RATIO_512: dict[str, list[float]] = _parse_table(_RATIO_SIZES)
ASPECT_RATIO_RANDOM_CROP_512: dict[str, list[float]] = {key: ASPECT_RATIO_512[key] for key in _CROP_KEYS.split()}
ASPECT_RATIO_RANDOM_CROP_PROB: list[float] = [weight / sum(_CROP_WEIGHTS) for weight in _CROP_WEIGHTS]


def get_closest_ratio(height: float, width: float, ratios: Table = ASPECT_RATIO_512) -> tuple[Sequence[float], float]:
    """``(size, ratio)`` of the table entry whose key is nearest to ``height / width``; the first wins a tie."""
    aspect = height / width
    key = min(ratios, key=lambda ratio: abs(float(ratio) - aspect))
    return ratios[key], float(key)


def scaled(table: Table, base: float, shrink: float = 1.0) -> dict[str, list[float]]:
    """The table for squares of ``base / shrink``."""
    return {key: [side / 512 * base / shrink for side in size] for key, size in table.items()}


def floor_to(size: Sequence[float], quantum: int) -> tuple[int, int]:
    """Each side rounded down to a multiple of ``quantum``, at least one multiple."""
    height, width = (max(int(side / quantum) * quantum, quantum) for side in size)
    return height, width


def token_sizes(video_size: int, image_size: int) -> list[int]:
    """The square sizes that ``training_with_video_token_length`` chooses from."""
    if image_size <= video_size:
        return [image_size]
    sizes = list(range(video_size, image_size + 1, 128))
    return sizes if image_size in sizes else [*sizes, image_size]


def frames_of_sizes(sizes: Sequence[int], *, token_length: float, n_frames: int, temporal_ratio: int) -> dict[int, Any]:
    """Frames per square size, so that the number of tokens stays the same."""
    return {
        size: min(token_length / size / size, n_frames) // temporal_ratio * temporal_ratio + 1 for size in sizes
    }


def candidate_sizes(sizes: Sequence[int], mean_side: float) -> list[int]:
    """Sizes that do not enlarge a clip of ``mean_side`` by more than a quarter; all of them if none is that small."""
    return [size for size in sizes if size < 1.25 * mean_side] or list(sizes)


def downsample_ratios(size: int, extra: Sequence[float] = ()) -> list[float]:
    """By how much ``random_hw_adapt`` may shrink pictures of ``size``; ``extra`` joins from 512 on."""
    for least, ratios in (
        (1536, [1, 1.25, 1.5, 2, 2.5, 3]),
        (1024, [1, 1.25, 1.5, 2]),
        (768, [1, 1.25, 1.5]),
        (512, [1]),
    ):
        if size >= least:
            return [*ratios, *extra]
    return [1]


def first_heavy(count: int, first: float) -> list[float]:
    """Probabilities that give the first entry ``first`` and share the rest evenly."""
    return [1.0] if count == 1 else [first] + [(1.0 - first) / (count - 1)] * (count - 1)


def nearest_heavy(sizes: Sequence[int], target: int, share: float = 0.5) -> list[float]:
    """Probabilities that give the size nearest to ``target`` the ``share`` and spread the rest evenly."""
    if len(sizes) == 1:
        return [1.0]
    nearest = min(range(len(sizes)), key=lambda index: abs(sizes[index] - target))
    rest = (1.0 - share) / (len(sizes) - 1)
    return [share if index == nearest else rest for index in range(len(sizes))]


def legal_frames(available: float, wanted: float, temporal_ratio: int) -> int:
    """The largest ``k * ratio + 1`` that both allow, at least 1."""
    return max((int(min(available, wanted)) - 1) // temporal_ratio * temporal_ratio + 1, 1)


def cover_size(height: int, width: int, target: Sequence[int]) -> tuple[int, int]:
    """The size to resize to, aspect kept, so that ``target`` can be cut out of the middle."""
    target_height, target_width = int(target[0]), int(target[1])
    if target_height / target_width > height / width:
        return target_height, max(int(width * target_height / height), target_width)
    return max(int(height * target_width / width), target_height), target_width


def sampled_frames(
    length: int, *, n_frames: int, stride: int, start: float = 0.0, end: float = 1.0, upstream_compat: bool = False
) -> int:
    """How many frames of a clip of ``length`` are read at ``stride``; 0 when the clip is too short.

    Upstream divides the length by the stride, which loses the last frame that fits (17 frames at stride 2 hold 9
    samples, it takes 8); ``upstream_compat`` does the same.
    """
    if upstream_compat:
        return min(n_frames, int(length * (end - start) // stride))
    usable = int(end * length) - int(start * length)
    return min(n_frames, (usable - 1) // stride + 1) if usable > 0 else 0


def resampled_length(length: int, *, fps: float, rate: float | None) -> int:
    """Frames of a clip at ``rate`` per second; unchanged without a rate or when the clip's own is unknown."""
    if rate is None or fps <= 0 or length < 1:
        return length
    return int((length - 1) / fps * rate + 1e-6) + 1
