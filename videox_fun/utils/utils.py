"""Pictures and videos at the borders of a pipeline: files in, tensors out, and back.

Videos are ``[batch, channels, frames, height, width]`` with values from 0 to 1, masks have one channel with 0 for kept
and 255 for generated pixels. Sizes are ``(height, width)`` unless a name says otherwise.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from videox_fun.utils.color import color_transfer

__all__ = ["calculate_dimensions", "color_transfer", "filter_kwargs", "get_autocast_dtype", "get_image",
           "get_image_latent", "get_image_to_video_latent", "get_video_to_video_latent",
           "get_width_and_height_from_image_and_base_resolution", "padding_image", "read_video", "save_videos_grid"]

logger = logging.getLogger(__name__)

ImageLike = str | Path | Image.Image | np.ndarray
_MASK_THRESHOLD = 240


def filter_kwargs(cls: type, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``kwargs`` that the constructor of ``cls`` accepts."""
    accepted = set(inspect.signature(cls.__init__).parameters) - {"self", "cls"}
    return {name: value for name, value in kwargs.items() if name in accepted}


def get_autocast_dtype() -> torch.dtype:
    """bfloat16 where the device computes in it, else float16."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return torch.float16
    return torch.bfloat16


def calculate_dimensions(target_area: float, ratio: float) -> tuple[int, int]:
    """Width and height of about ``target_area`` pixels with ``width / height`` near ``ratio``, in multiples of 32."""
    width = math.sqrt(target_area * ratio)
    return round(width / 32) * 32, round(width / ratio / 32) * 32


def get_width_and_height_from_image_and_base_resolution(image: str | Path, base_resolution: int) -> tuple[int, int]:
    """Height and width, in this order, that keep the picture's aspect at about ``base_resolution`` squared pixels."""
    with Image.open(image) as picture:
        width, height = picture.size
    scale = math.sqrt(base_resolution**2 / (width * height))
    return round(height * scale), round(width * scale)


def get_image(ref_image: ImageLike | None = None) -> Image.Image | None:
    """The picture in RGB, whether it comes as a path, an array or a PIL image."""
    if ref_image is None:
        return None
    if isinstance(ref_image, str | Path):
        with Image.open(ref_image) as picture:
            return picture.convert("RGB")
    if isinstance(ref_image, np.ndarray):
        ref_image = Image.fromarray(ref_image)
    return ref_image.convert("RGB")


def padding_image(images: Image.Image, new_width: int, new_height: int) -> Image.Image:
    """The picture scaled to fit and centred on white."""
    scale = min(new_width / images.width, new_height / images.height)
    size = max(1, int(images.width * scale)), max(1, int(images.height * scale))
    canvas = Image.new("RGB", (new_width, new_height), (255, 255, 255))
    canvas.paste(images.resize(size), ((new_width - size[0]) // 2, (new_height - size[1]) // 2))
    return canvas


def _pixels(picture: Image.Image, sample_size: Sequence[int] | None) -> Tensor:
    if sample_size is not None:
        picture = picture.resize((int(sample_size[1]), int(sample_size[0])))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def get_image_latent(ref_image: ImageLike | None = None, sample_size: Sequence[int] | None = None,
                     padding: bool = False) -> Tensor | None:
    """One picture as ``[1, 3, 1, H, W]`` from 0 to 1, stretched to the size or, with ``padding``, on white."""
    picture = get_image(ref_image)
    if picture is None:
        return None
    if padding and sample_size is not None:
        picture = padding_image(picture, int(sample_size[1]), int(sample_size[0]))
    return _pixels(picture, sample_size)[None, :, None]


def _frames(pictures: ImageLike | Sequence[ImageLike], sample_size: Sequence[int]) -> Tensor:
    many = pictures if isinstance(pictures, list | tuple) else [pictures]
    stills = [picture for picture in map(get_image, many) if picture is not None]
    return torch.stack([_pixels(picture, sample_size) for picture in stills], dim=1)[None]


def get_image_to_video_latent(
    validation_image_start: ImageLike | Sequence[ImageLike] | None,
    validation_image_end: ImageLike | Sequence[ImageLike] | None,
    video_length: int,
    sample_size: Sequence[int],
) -> tuple[Tensor, Tensor, Image.Image | None]:
    """Condition a video on its first and, if given, last pictures.

    Returns:
        The video with the pictures in place (the start picture fills the frames between), the mask that keeps them,
        and the first picture for the image encoder.
    """
    shape = (1, 3, video_length, int(sample_size[0]), int(sample_size[1]))
    mask = torch.full((1, 1, *shape[2:]), 255.0)
    if validation_image_start is None:
        if validation_image_end is not None:
            raise ValueError("An end picture needs a start picture: pass validation_image_start as well.")
        return torch.zeros(shape), mask, None
    start = _frames(validation_image_start, sample_size)[:, :, :video_length]
    video = start[:, :, :1].expand(shape).clone()
    video[:, :, : start.shape[2]] = start
    mask[:, :, : start.shape[2]] = 0
    if validation_image_end is not None:
        end = _frames(validation_image_end, sample_size)[:, :, -video_length:]
        video[:, :, video_length - end.shape[2]:] = end
        mask[:, :, video_length - end.shape[2]:] = 0
    first = validation_image_start
    return video, mask, get_image(first[0] if isinstance(first, list | tuple) else first)


def read_video(path: str | Path, *, fps: float | None = None, limit: int | None = None) -> np.ndarray:
    """Decoded frames ``[F, H, W, 3]``; with ``fps`` only as many per second as that rate needs."""
    import av

    frames: list[np.ndarray] = []
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream.")
        stream = container.streams.video[0]
        own_rate = float(stream.average_rate or 0)
        step = max(1, int(own_rate // fps)) if fps and own_rate else 1
        for index, frame in enumerate(container.decode(stream)):
            if index % step == 0:
                frames.append(frame.to_ndarray(format="rgb24"))
            if limit is not None and len(frames) >= limit:
                break
    if not frames:
        raise ValueError(f"{path} has no frame that can be decoded.")
    return np.stack(frames)


def _resized(frames: np.ndarray | Sequence[np.ndarray], sample_size: Sequence[int]) -> Tensor:
    video = torch.from_numpy(np.stack(list(frames))).permute(0, 3, 1, 2).float()
    video = functional.interpolate(video, size=(int(sample_size[0]), int(sample_size[1])), mode="bilinear",
                                   align_corners=False)
    return (video.round().clamp(0, 255) / 255).permute(1, 0, 2, 3)[None]


def get_video_to_video_latent(
    input_video_path: str | Path | Sequence[np.ndarray] | np.ndarray | None,
    video_length: int,
    sample_size: Sequence[int],
    fps: float | None = None,
    validation_video_mask: ImageLike | None = None,
    ref_image: ImageLike | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Image.Image | None]:
    """Condition a video on another one.

    Returns:
        The video, its mask (all 255, or the mask picture binarised), the reference picture as ``[1, 3, 1, H, W]`` and
        the reference picture for the image encoder. Parts that were not asked for are None.
    """
    video = mask = None
    if input_video_path is not None:
        if isinstance(input_video_path, str | Path):
            frames: Any = read_video(input_video_path, fps=fps, limit=video_length)
        else:
            frames = input_video_path
        video = _resized(frames, sample_size)[:, :, :video_length]
        mask = torch.full_like(video[:, :1], 255.0)
        if validation_video_mask is not None:
            picture = get_image(validation_video_mask)
            assert picture is not None
            grey = _pixels(picture, sample_size)[:1] * 255
            mask[:] = torch.where(grey < _MASK_THRESHOLD, 0.0, 255.0)[None, :, None]
    return video, mask, get_image_latent(ref_image, sample_size), get_image(ref_image)


def _grid(frame: Tensor, n_rows: int, padding: int = 2) -> Tensor:
    """``[B, C, H, W]`` side by side, ``n_rows`` in a row, on black lines; a single picture stays as it is."""
    if frame.shape[1] == 1:
        frame = frame.expand(-1, 3, -1, -1)
    if frame.shape[0] == 1:
        return frame[0]
    count, channels, height, width = frame.shape
    columns = min(n_rows, count)
    rows = math.ceil(count / columns)
    canvas = frame.new_zeros(channels, rows * (height + padding) + padding, columns * (width + padding) + padding)
    for index, picture in enumerate(frame):
        top = index // columns * (height + padding) + padding
        left = index % columns * (width + padding) + padding
        canvas[:, top : top + height, left : left + width] = picture
    return canvas


def _write_mp4(frames: Sequence[np.ndarray], path: Path, fps: float) -> None:
    import av

    height, width = frames[0].shape[:2]
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        # The 4:2:0 layout that players expect has half-size colour planes, so both sides must be even.
        stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
        for pixels in frames:
            even = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))
        container.mux(stream.encode())


def save_videos_grid(
    videos: Tensor,
    path: str | Path,
    rescale: bool = False,
    n_rows: int = 6,
    fps: float = 12,
    imageio_backend: bool = True,
    color_transfer_post_process: bool = False,
) -> None:
    """Write a batch of videos ``[B, C, F, H, W]`` side by side to one file.

    Args:
        videos: values from 0 to 1, or from -1 to 1 with ``rescale``.
        path: ``.mp4`` or a picture format with frames (gif, webp); its folder is made.
        rescale: map -1..1 to 0..1 first.
        n_rows: videos in one row.
        fps: frames per second.
        imageio_backend: False writes a gif with ten frames per second whatever ``fps`` says.
        color_transfer_post_process: give every frame the colour statistics of the first.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    values = videos.detach().float().cpu()
    if rescale:
        values = (values + 1) / 2
    frames = [(_grid(frame, n_rows).permute(1, 2, 0) * 255).clamp(0, 255).to(torch.uint8).numpy()
              for frame in values.unbind(2)]
    if color_transfer_post_process:
        frames = [frames[0], *(color_transfer(frame, frames[0]) for frame in frames[1:])]
    if imageio_backend and target.suffix == ".mp4":
        _write_mp4(frames, target, fps)
    else:
        target = target if imageio_backend else target.with_suffix(".gif")
        first, *rest = [Image.fromarray(frame) for frame in frames]
        first.save(target, save_all=True, append_images=rest, loop=0,
                   duration=1000 / fps if imageio_backend else 100)
    logger.info("Wrote %s", target)
