"""Random inpainting masks: which pixels of a clip the model has to make up.

Ten kinds, drawn with fixed probabilities: boxes, all frames, a beginning or both ends kept, noise, frame-wise boxes,
ellipses. The kind and frame counts come from NumPy's global stream, coordinates from torch's global stream, and the
frame-wise boxes from Python's; the order of the draws is fixed, because runs are compared draw by draw.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

_VIDEO_KINDS = {0: 0.05, 1: 0.2, 2: 0.2, 3: 0.2, 4: 0.05, 5: 0.05, 6: 0.05, 7: 0.1, 8: 0.05, 9: 0.05}
_IMAGE_KINDS = {0: 0.2, 1: 0.7, 7: 0.05, 8: 0.05}


def get_random_mask(shape: Sequence[int], image_start_only: bool = False) -> torch.Tensor:
    """A uint8 mask ``[F, 1, H, W]`` for a clip of ``shape`` ``(F, C, H, W)``; 1 marks what is to be generated.

    ``image_start_only`` keeps the first frame and asks for all others (for one frame: asks for everything).
    """
    frames, _, height, width = shape
    mask = torch.zeros((frames, 1, height, width), dtype=torch.uint8)
    if image_start_only:
        mask[1 if frames != 1 else 0 :] = 1
        return mask
    kinds = _VIDEO_KINDS if frames != 1 else _IMAGE_KINDS
    kind = int(np.random.choice(list(kinds), p=list(kinds.values())))
    _PAINTERS[kind](mask)
    return mask


def stated_mask(name: str, number: int, shape: Sequence[int], *, image_start_only: bool = False) -> torch.Tensor:
    """Mask ``number`` of the clip ``name`` at this shape: always the same one. No random stream moves."""
    frames, _, height, width = shape
    text = f"{name}|{number}|{frames}|{height}|{width}"
    seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:4], "big")
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        return get_random_mask(shape, image_start_only=image_start_only)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _randint(low: int, high: int) -> int:
    return int(torch.randint(low, high, (1,)).item())


def _box(mask: torch.Tensor) -> tuple[slice, slice]:
    height, width = mask.shape[-2:]
    center_x, center_y = _randint(0, width), _randint(0, height)
    size_x = _randint(width // 4, width // 4 * 3)
    size_y = _randint(height // 4, height // 4 * 3)
    rows = slice(max(center_y - size_y // 2, 0), min(center_y + size_y // 2, height))
    columns = slice(max(center_x - size_x // 2, 0), min(center_x + size_x // 2, width))
    return rows, columns


def _paint_box(mask: torch.Tensor) -> None:
    rows, columns = _box(mask)
    mask[:, :, rows, columns] = 1


def _paint_everything(mask: torch.Tensor) -> None:
    mask[:] = 1


def _paint_after_start(mask: torch.Tensor) -> None:
    mask[np.random.randint(1, 5) :] = 1


def _paint_middle(mask: torch.Tensor) -> None:
    kept = np.random.randint(1, 5)
    mask[kept:-kept] = 1


def _paint_box_in_range(mask: torch.Tensor) -> None:
    rows, columns = _box(mask)
    half = len(mask) // 2
    first, last = np.random.randint(0, half), np.random.randint(half, len(mask))
    mask[first:last, :, rows, columns] = 1


def _paint_noise(mask: torch.Tensor) -> None:
    mask[:] = torch.randint(0, 2, mask.shape, dtype=torch.uint8)


def _paint_frame_boxes(mask: torch.Tensor) -> None:
    frames, _, height, width = mask.shape
    chosen = random.sample(range(frames), random.randint(1, max(frames // 2, 1)))
    for frame in chosen:
        box_height, box_width = random.randint(1, height // 4), random.randint(1, width // 4)
        top, left = random.randint(0, height - box_height), random.randint(0, width - box_width)
        mask[frame, :, top : top + box_height, left : left + box_width] = 1


def _inside(mask: torch.Tensor, *, circle: bool) -> torch.Tensor:
    height, width = mask.shape[-2:]
    center_x, center_y = _randint(0, width), _randint(0, height)
    low, high = min(width, height) // 8, min(width, height) // 4
    radius_x = _randint(low, high)
    radius_y = radius_x if circle else _randint(low, high)
    rows = torch.arange(height)[:, None] - center_y
    columns = torch.arange(width)[None] - center_x
    if circle:
        return rows**2 + columns**2 < radius_x**2
    return rows**2 / radius_y**2 + columns**2 / radius_x**2 < 1


def _paint_ellipse(mask: torch.Tensor) -> None:
    mask[0, :, _inside(mask, circle=False)] = 1


def _paint_circle(mask: torch.Tensor) -> None:
    mask[0, :, _inside(mask, circle=True)] = 1


def _paint_some_frames(mask: torch.Tensor) -> None:
    for frame in range(len(mask)):
        if np.random.rand() > 0.5:
            mask[frame] = 1


_PAINTERS: dict[int, Callable[[torch.Tensor], None]] = {
    0: _paint_box,
    1: _paint_everything,
    2: _paint_after_start,
    3: _paint_middle,
    4: _paint_box_in_range,
    5: _paint_noise,
    6: _paint_frame_boxes,
    7: _paint_ellipse,
    8: _paint_circle,
    9: _paint_some_frames,
}
