"""Image and inpaint conditions of the Wan families.

The denoiser sees, on its channels after the noisy latents, a four-channel mask (1 = known, see ``utils/masks.py``) and
the latents of the video with the unknown pixels set to mid grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from videox_fun.utils.masks import pack_mask, resize_mask_to


def drop_fully_masked(mask: torch.Tensor, *, drop: float = 0.9) -> list[float]:
    """Per sample 1.0, or 0.0 for most samples that have nothing known: those train plain text-to-video.

    ``mask`` lies on the host. Draws from numpy's global generator, once for each fully masked sample.
    """
    fully_masked = mask.flatten(1).ne(0).all(dim=1).tolist()
    return [0.0 if full and np.random.rand() < drop else 1.0 for full in fully_masked]


def inpaint_channels(
    mask: torch.Tensor, keep: list[float], *, latents: torch.Tensor, encode: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The channels after the noisy latents: ``[B, 4 + C, T, h, w]``.

    Args:
        mask: ``[B, F, 1, H, W]``, 1 = to be generated.
        keep: factor per sample from :func:`drop_fully_masked`.
        latents: clean latents, for size and type.
        encode: gives the latents of the masked clip, whose unknown pixels are 0.
    """
    mask = mask.to(latents.device, non_blocking=True).to(latents.dtype)
    known = resize_mask_to(1.0 - pack_mask(mask), size=tuple(latents.shape[2:]))
    channels = torch.cat([known, encode()], dim=1)
    factors = torch.tensor(keep, dtype=latents.dtype).to(latents.device, non_blocking=True)
    return channels * factors.view(-1, 1, 1, 1, 1)


@torch.no_grad()
def picture_features(image_HWC: torch.Tensor, *, encoder: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """CLIP features of a picture, ``[1, 257, D]``. Pixels pass through 8 bits, as those given at inference do."""
    pixels = image_HWC.to(torch.uint8).permute(2, 0, 1).to(torch.float32).div_(255).sub_(0.5).div_(0.5)
    return encoder([pixels[:, None].to(dtype)])


def clip_context(features: Sequence[torch.Tensor], *, drop: float, rng: np.random.Generator) -> torch.Tensor:
    """Features of the condition frames, ``[B, 257, D]``; each sample's are zeroed with probability ``drop``.

    With ``drop`` 0 nothing is drawn.
    """
    return torch.cat([torch.zeros_like(own) if drop and rng.choice([True, False], p=[drop, 1.0 - drop]) else own
                      for own in features])
