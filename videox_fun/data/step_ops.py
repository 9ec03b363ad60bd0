"""Changes to a whole batch at the start of a step: tiling, and cutting clips shorter.

Upstream computes how many *latent* frames to keep and then keeps that many *pixel* frames (17 frames become 5), so a
flag that should vary the length trains on a quarter of it. Here the drawn number of pixel frames is kept;
``upstream_compat`` keeps upstream's count. The draws are the same in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Batch = dict[str, Any]

#: Tensors ``[B, F, ...]`` of the target clip and of what accompanies it frame by frame.
_CLIP_KEYS = (
    "pixel_values",
    "control_pixel_values",
    "mask",
    "mask_pixel_values",
    "face_pixel_values",
    "background_pixel_values",
)


def auto_tile_batch(batch: Batch, *, n_frames: int, token_sample_size: int) -> Batch:
    """Repeat a small batch 2 or 4 times, so that short or small clips fill the token budget."""
    pixels = batch["pixel_values"]
    volume = pixels.shape[1] * pixels.shape[3] * pixels.shape[4]
    budget = n_frames * token_sample_size**2
    times = 4 if budget // 16 >= volume else 2 if budget // 4 >= volume else 1
    if times == 1:
        return batch
    return {key: _tile(value, times, size=len(pixels)) for key, value in batch.items()}


def _tile(value: Any, times: int, *, size: int) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == size:
        return value.repeat(times, *[1] * (value.ndim - 1))
    if isinstance(value, list) and len(value) == size:
        return value * times
    return value


def random_frame_crop(
    batch: Batch, *, rng: np.random.Generator, n_frames: int, temporal_ratio: int = 4, upstream_compat: bool = False
) -> Batch:
    """Keep a drawn number of frames: usually the most that is legal, sometimes fewer."""
    candidates = list(range(temporal_ratio + 1, n_frames + temporal_ratio, temporal_ratio))
    frames = 1
    if candidates:
        others = len(candidates) - 1
        weights = [0.1 / others] * others + [0.9] if others else [1.0]
        frames = int(rng.choice(candidates, p=weights))
    return _keep_frames(batch, frames, temporal_ratio, upstream_compat)


def keep_all_node_same_token_length(
    batch: Batch,
    *,
    index_rng: np.random.Generator,
    n_frames: int,
    token_sample_size: int,
    temporal_ratio: int = 4,
    upstream_compat: bool = False,
) -> Batch:
    """Cut clips so that all ranks train on about the same number of tokens. ``index_rng`` is the same on all ranks."""
    sizes = [256]
    if token_sample_size > 256:
        sizes = list(range(256, token_sample_size + 1, 128))
        if sizes[-1] != token_sample_size:
            sizes.append(token_sample_size)
    length = float(index_rng.choice([size**2 * n_frames for size in sizes]))
    height, width = batch["pixel_values"].shape[-2:]
    frames = int((min(length / width / height, n_frames) - 1) // temporal_ratio * temporal_ratio + 1)
    return _keep_frames(batch, max(frames, 1), temporal_ratio, upstream_compat)


def _keep_frames(batch: Batch, frames: int, temporal_ratio: int, upstream_compat: bool) -> Batch:
    keys = _CLIP_KEYS
    if upstream_compat:
        frames = (frames - 1) // temporal_ratio + 1
    else:
        keys = (*_CLIP_KEYS, "control_camera_values")  # else the camera path no longer fits the clip
    return {key: value[:, :frames] if key in keys else value for key, value in batch.items()}
