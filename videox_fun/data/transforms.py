"""Pixels from uint8 frames to what the VAE takes: scale, resize, centre crop, map to [-1, 1].

The semantics are torchvision's for tensors (bilinear, antialiased, on floats in 0..1; a crop offset rounds half to
even), done in blocks of frames so that the float copy of the large picture never exists for a whole clip.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

_BLOCK = 16  # frames


def resize_frames(frames_FCHW: torch.Tensor, *, height: int, width: int) -> torch.Tensor:
    """Antialiased bilinear resize of float frames."""
    if tuple(frames_FCHW.shape[-2:]) == (height, width):
        return frames_FCHW
    return F.interpolate(frames_FCHW, size=(height, width), mode="bilinear", align_corners=False, antialias=True)


def center_crop(frames: torch.Tensor, *, height: int, width: int) -> torch.Tensor:
    """The middle of the last two axes; a picture that is too small is padded with zeros."""
    in_height, in_width = frames.shape[-2:]
    if in_height < height or in_width < width:
        left, top = max((width - in_width) // 2, 0), max((height - in_height) // 2, 0)
        right, bottom = max((width - in_width + 1) // 2, 0), max((height - in_height + 1) // 2, 0)
        frames = F.pad(frames, (left, right, top, bottom))
        in_height, in_width = frames.shape[-2:]
    top, left = round((in_height - height) / 2.0), round((in_width - width) / 2.0)
    return frames[..., top : top + height, left : left + width]


def normalize(frames: torch.Tensor) -> torch.Tensor:
    return (frames - 0.5) / 0.5


def prepare_frames(
    frames_FHWC: np.ndarray, *, resize_to: tuple[int, int], crop_to: tuple[int, int]
) -> torch.Tensor:
    """``[F, H, W, 3]`` uint8 to ``[F, 3, h, w]`` float in [-1, 1]."""
    blocks = []
    for start in range(0, len(frames_FHWC), _BLOCK):
        block = torch.from_numpy(np.ascontiguousarray(frames_FHWC[start : start + _BLOCK]))
        block = block.permute(0, 3, 1, 2).contiguous() / 255.0
        block = resize_frames(block, height=resize_to[0], width=resize_to[1])
        blocks.append(normalize(center_crop(block, height=crop_to[0], width=crop_to[1])))
    return torch.cat(blocks)


def short_side_resize(height: int, width: int, size: int) -> tuple[int, int]:
    """Both sides scaled so that the short one is ``size`` (pictures are also enlarged)."""
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def square_frames(frames_FHWC: np.ndarray, *, size: int) -> torch.Tensor:
    """A clip as a square of ``size``: short side resized, middle cut out."""
    height, width = frames_FHWC.shape[1:3]
    return prepare_frames(frames_FHWC, resize_to=short_side_resize(height, width, size), crop_to=(size, size))


def square_image(image: Image.Image, *, size: int) -> torch.Tensor:
    """A picture as ``[1, 3, size, size]``, resized by PIL."""
    height, width = short_side_resize(image.height, image.width, size)
    array = np.array(image.resize((width, height), Image.Resampling.BILINEAR))
    return prepare_frames(array[None], resize_to=(height, width), crop_to=(size, size))


def first_frame_as_image(pixels_FCHW: torch.Tensor, frame: int = 0) -> torch.Tensor:
    """A frame as ``[H, W, 3]`` in 0..255, the way the CLIP image encoder is fed."""
    return (pixels_FCHW[frame].permute(1, 2, 0).contiguous() * 0.5 + 0.5) * 255
