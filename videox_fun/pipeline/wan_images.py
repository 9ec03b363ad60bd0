"""Pictures and videos as conditions: resizing, encoding, image context."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from videox_fun.models.wan_transformer3d import CLIP_DIM
from videox_fun.pipeline.wan_base import WanPipelineBase
from videox_fun.utils.masks import resize_mask_to

_IMAGE_TOKENS = 257  # a class token and 16 x 16 patches


def resize_mask(mask: Tensor, latent: Tensor, process_first_frame_only: bool = True) -> Tensor:
    """Resize a mask ``[B, C, T, H, W]`` to the size of ``latent``.

    Args:
        mask: to be resized.
        latent: gives ``(T, h, w)``.
        process_first_frame_only: resize the first frame by itself and the others together.
    """
    size = tuple(latent.shape[2:])
    if process_first_frame_only:
        return resize_mask_to(mask, size=size)
    return F.interpolate(mask, size=size, mode="trilinear", align_corners=False)


def fit(video: Tensor, height: int, width: int, *, mode: str = "bilinear") -> Tensor:
    """Frames ``[B, C, F, H, W]`` resized to the output size, in float32."""
    video = video.float()
    if video.shape[-2:] == (height, width):
        return video
    frames = video.transpose(1, 2).flatten(0, 1)
    smooth = {} if mode == "nearest" else {"align_corners": False}
    resized = F.interpolate(frames, size=(height, width), mode=mode, **smooth)
    return resized.unflatten(0, (video.shape[0], -1)).transpose(1, 2)


def per_video(condition: Tensor, latents: Tensor) -> Tensor:
    """A condition for every video of the batch: given once for all, or once per prompt."""
    count, given = latents.shape[0], condition.shape[0]
    if count % given:
        raise ValueError(f"A condition was given for {given} videos, but {count} are sampled.")
    return condition.repeat_interleave(count // given, dim=0) if given != count else condition


class ImageConditionedPipeline(WanPipelineBase):
    """What the Wan pipelines that see pictures share."""

    model_cpu_offload_seq = "text_encoder->clip_image_encoder->transformer->vae"

    def __init__(
        self, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, clip_image_encoder: Any, scheduler: Any
    ) -> None:
        super().__init__()
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer,
                              clip_image_encoder=clip_image_encoder, scheduler=scheduler)

    def encode_video(self, video: Tensor, latents: Tensor) -> Tensor:
        """Latents of ``[B, 3, F, H, W]`` in [-1, 1] (the mean of the posterior), in the type of ``latents``."""
        device = self.onload(self.vae)
        encoded = self.vae.encode(video.to(device, self.vae.dtype))[0].mode()
        return encoded.to(latents.device, latents.dtype)

    def image_context(self, clip_image: Any, latents: Tensor) -> Tensor:
        """Image features ``[B, 257, 1280]`` of a picture; zeros where there is none."""
        if clip_image is None:
            return latents.new_zeros(latents.shape[0], _IMAGE_TOKENS, CLIP_DIM)
        if self.clip_image_encoder is None:
            raise ValueError("clip_image was given, but the pipeline has no clip_image_encoder.")
        device = self.onload(self.clip_image_encoder)
        picture = _picture(clip_image).to(device, self.clip_image_encoder.dtype)
        features = self.clip_image_encoder([picture[:, None]]).to(latents.device, latents.dtype)
        return per_video(features, latents)


def _picture(image: Any) -> Tensor:
    """``[3, H, W]`` in [-1, 1] from a PIL picture; tensors pass."""
    if isinstance(image, Tensor):
        return image
    array = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return array.float() / 255 * 2 - 1
