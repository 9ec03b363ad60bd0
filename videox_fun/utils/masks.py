"""Masks in the layout of video latents.

Four mask channels hold the four pixel frames behind one latent frame; the first latent frame stands for one pixel
frame, whose mask is repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FRAMES_PER_LATENT = 4


def pack_mask(mask_BFCHW: torch.Tensor) -> torch.Tensor:
    """Group a pixel mask by latent frames: ``[B, F, 1, H, W]`` to ``[B, 4, T, H, W]``.

    Raises:
        ValueError: ``F`` is not ``4 k + 1``.
    """
    mask_BCFHW = mask_BFCHW.transpose(1, 2)
    first = mask_BCFHW[:, :, :1].repeat_interleave(FRAMES_PER_LATENT, dim=2)
    grouped = torch.cat([first, mask_BCFHW[:, :, 1:]], dim=2)
    batch, _, frames, height, width = grouped.shape
    if frames % FRAMES_PER_LATENT:
        raise ValueError(f"A mask of {mask_BFCHW.shape[1]} frames does not fit the latents: 4k+1 frames are needed.")
    return grouped.view(batch, frames // FRAMES_PER_LATENT, FRAMES_PER_LATENT, height, width).transpose(1, 2)


def resize_mask_to(mask_BCTHW: torch.Tensor, *, size: tuple[int, int, int]) -> torch.Tensor:
    """Resize to latent size ``(T, h, w)``; the first frame is resized by itself, as the VAE encodes it by itself."""
    frames, height, width = size
    first = F.interpolate(mask_BCTHW[:, :, :1], size=(1, height, width), mode="trilinear", align_corners=False)
    if frames == 1:
        return first
    rest = F.interpolate(mask_BCTHW[:, :, 1:], size=(frames - 1, height, width), mode="trilinear",
                         align_corners=False)
    return torch.cat([first, rest], dim=2)
