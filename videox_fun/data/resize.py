"""Frame resizing with OpenCV's default rule, without OpenCV.

Frames are shrunk while they are decoded, so the rule decides the numbers a run trains on. OpenCV's bilinear resize of
8-bit images samples at half-pixel centres with weights in units of 1/2048 and keeps 4 guard bits between the two
passes; the same integer steps are done here (NumPy, blocks of rows small enough for the cache), so the result is equal
bit for bit. Library interpolations on uint8 round each pass and are off by up to 0.36 levels on average.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

_ONE = 2048  # weight 1.0
_ROWS = 32  # output rows per block


@lru_cache(maxsize=256)
def _taps(out_size: int, in_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left tap, right tap and weight of the right tap (in 1/2048) for each output position."""
    position = ((np.arange(out_size) + 0.5) * (in_size / out_size) - 0.5).astype(np.float32)
    left = np.floor(position).astype(np.int64)
    fraction = position - left.astype(np.float32)
    fraction[(left < 0) | (left >= in_size - 1)] = 0.0
    left = np.clip(left, 0, in_size - 1)
    weight = np.rint(fraction * np.float32(_ONE)).astype(np.int32)
    return left, np.minimum(left + 1, in_size - 1), weight


@lru_cache(maxsize=64)
def _columns(out_width: int, in_width: int, channels: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """The horizontal taps expanded to interleaved channels."""
    left, right, weight = _taps(out_width, in_width)
    offset = np.arange(channels)
    expand = [torch.from_numpy((tap[:, None] * channels + offset).ravel()) for tap in (left, right)]
    return expand[0], expand[1], np.repeat(weight, channels)


def resize_bilinear(image: np.ndarray, *, height: int, width: int) -> np.ndarray:
    """Resize a ``[H, W, C]`` uint8 image like ``cv2.resize(image, (width, height))``."""
    in_height, in_width, channels = image.shape
    if (in_height, in_width) == (height, width):
        return image
    left, right, x_weight = _columns(width, in_width, channels)
    top, bottom, y_weight = _taps(height, in_height)
    flat = torch.from_numpy(np.ascontiguousarray(image)).view(in_height, in_width * channels)
    out = np.empty((height, width * channels), np.uint8)
    for start in range(0, height, _ROWS):
        stop = min(start + _ROWS, height)
        rows, inverse = np.unique(np.concatenate([top[start:stop], bottom[start:stop]]), return_inverse=True)
        block = flat[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] < len(rows) else flat[torch.from_numpy(rows)]
        line = torch.gather(block, 1, left.expand(len(block), -1)).numpy().astype(np.int32)
        delta = np.subtract(torch.gather(block, 1, right.expand(len(block), -1)).numpy(), line, dtype=np.int32)
        delta *= x_weight
        delta >>= 4
        line <<= 7  # x 2048, then the 4 guard bits dropped
        line += delta
        upper, lower = line[inverse[: stop - start]], line[inverse[stop - start :]]
        weight = y_weight[start:stop, None]
        upper *= _ONE - weight
        upper >>= 16
        lower *= weight
        lower >>= 16
        upper += lower
        upper += 2
        upper >>= 2
        out[start:stop] = upper
    return out.reshape(height, width, channels)


def short_side_size(height: int, width: int, target: int) -> tuple[int, int]:
    """Size with the short side reduced to ``target``; smaller pictures keep their size."""
    short, long = min(height, width), max(height, width)
    if target >= short:
        return height, width
    other = int(target * long / short)
    return (target, other) if height <= width else (other, target)


def resize_frame(frame: np.ndarray, target_short_side: int) -> np.ndarray:
    """Shrink a frame so that its short side is ``target_short_side``; never enlarges."""
    height, width = short_side_size(frame.shape[0], frame.shape[1], int(target_short_side))
    return resize_bilinear(frame, height=height, width=width)
