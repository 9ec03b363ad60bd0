"""Helpers of the data package under their public names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from videox_fun.data.camera import (
    Camera,
    custom_meshgrid,
    get_relative_pose,
    process_pose_file,
    process_pose_params,
    ray_condition,
)
from videox_fun.data.decode import VIDEO_READER_TIMEOUT, VideoReader
from videox_fun.data.masks import get_random_mask
from videox_fun.data.resize import resize_frame

__all__ = [
    "VIDEO_READER_TIMEOUT",
    "Camera",
    "VideoReader_contextmanager",
    "custom_meshgrid",
    "get_random_mask",
    "get_relative_pose",
    "get_video_reader_batch",
    "padding_image",
    "process_pose_file",
    "process_pose_params",
    "ray_condition",
    "resize_frame",
    "resize_image_with_target_area",
]


@contextmanager
def VideoReader_contextmanager(*args: Any, **kwargs: Any) -> Iterator[VideoReader]:
    """A ``VideoReader`` that is closed on the way out, also on an error."""
    with VideoReader(*args, **kwargs) as reader:
        yield reader


def get_video_reader_batch(video_reader: VideoReader, batch_index: Sequence[int]) -> np.ndarray:
    """Frames ``[n, H, W, 3]`` uint8 of an open reader."""
    return video_reader.get_batch(batch_index).asnumpy()


def padding_image(images: Image.Image, new_width: int, new_height: int) -> Image.Image:
    """Fit a picture into ``new_width x new_height``: aspect kept, centred on white."""
    width, height = images.size
    if width / height > new_width / new_height:
        size = (new_width, int(height * new_width / width))
    else:
        size = (int(width * new_height / height), new_height)
    canvas = Image.new("RGB", (new_width, new_height), (255, 255, 255))
    fitted = images.resize((max(size[0], 1), max(size[1], 1)))
    canvas.paste(fitted, ((new_width - size[0]) // 2, (new_height - size[1]) // 2))
    return canvas


def resize_image_with_target_area(img: Image.Image, target_area: int = 1024 * 1024) -> Image.Image:
    """Resize to about ``target_area`` pixels, aspect kept, sides rounded to multiples of 32."""
    ratio = img.width / img.height
    width = math.sqrt(target_area * ratio)
    sides = [max(round(side / 32) * 32, 32) for side in (width, width / ratio)]
    return img.resize((sides[0], sides[1]), Image.Resampling.LANCZOS)
