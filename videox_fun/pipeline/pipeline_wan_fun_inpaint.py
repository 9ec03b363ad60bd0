"""Image to video and inpainting with the Wan models that take a mask and a masked video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from videox_fun.pipeline.wan_base import Generators, WanPipelineBase, WanPipelineOutput
from videox_fun.utils.fm_solvers import retrieve_timesteps
from videox_fun.utils.masks import pack_mask, resize_mask_to

__all__ = ["WanFunInpaintPipeline", "WanI2VPipeline", "WanPipelineOutput", "resize_mask", "retrieve_timesteps"]

_BLACK_IMAGE = 512  # size of the picture that stands for "no image"; its features are zeroed


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


class WanFunInpaintPipeline(WanPipelineBase):
    """Samples a video around given frames: ``video`` where ``mask_video`` is 0, new where it is 255."""

    model_cpu_offload_seq = "text_encoder->clip_image_encoder->transformer->vae"

    def __init__(
        self, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, clip_image_encoder: Any, scheduler: Any
    ) -> None:
        super().__init__()
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer,
                              clip_image_encoder=clip_image_encoder, scheduler=scheduler)

    def prepare_mask_latents(
        self, video: Tensor, mask: Tensor, latents: Tensor
    ) -> Tensor:
        """Mask and masked-video channels ``[B, 4 + C, T, h, w]``.

        Args:
            video: ``[B, 3, F, H, W]`` in [0, 1].
            mask: ``[B, 1, F, H, W]``, 255 = to be generated.
            latents: start noise, for size and type. Where nothing is known the channels are zero.
        """
        if bool((mask == 255).all()):
            channels = 4 + latents.shape[1]
            return latents.new_zeros(latents.shape[0], channels, *latents.shape[2:])
        unknown = (mask.float() / 255 >= 0.5).to(latents.dtype)
        pixels = (video * 2 - 1).to(latents.dtype) * (1 - unknown)
        encoded = self.vae.encode(pixels.to(self.vae.dtype))[0].mode().to(latents.dtype)
        packed = pack_mask(unknown.transpose(1, 2))
        return torch.cat([resize_mask(1 - packed, latents), encoded], dim=1).expand(latents.shape[0], -1, -1, -1, -1)

    def image_context(self, clip_image: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        """CLIP features ``[1, 257, D]`` of a picture; zeros where there is none."""
        from PIL import Image

        picture = clip_image if clip_image is not None else Image.new("RGB", (_BLACK_IMAGE, _BLACK_IMAGE))
        features = self.clip_image_encoder([_picture(picture).to(device, dtype)[:, None]])
        return features if clip_image is not None else torch.zeros_like(features)

    @torch.no_grad()
    def __call__(
        self, prompt: str | list[str] | None = None, negative_prompt: str | list[str] | None = None,
        height: int = 480, width: int = 720, video: Tensor | None = None, mask_video: Tensor | None = None,
        num_frames: int = 49, num_inference_steps: int = 50, timesteps: list[float] | None = None,
        guidance_scale: float = 6, num_videos_per_prompt: int = 1, eta: float = 0.0, generator: Generators = None,
        latents: Tensor | None = None, prompt_embeds: list[Tensor] | Tensor | None = None,
        negative_prompt_embeds: list[Tensor] | Tensor | None = None, output_type: str = "numpy",
        return_dict: bool = True, callback_on_step_end: Callable[..., dict] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] = ("latents",), clip_image: Any = None,
        max_sequence_length: int = 512, comfyui_progressbar: bool = False, shift: float = 5,
    ) -> WanPipelineOutput | Tensor:
        """Sample ``num_frames`` frames. Without ``video`` nothing is known and the prompt alone decides.

        Args:
            video: ``[B, 3, F, H, W]`` in [0, 1], resized to ``height`` x ``width``.
            mask_video: ``[B, 1, F, H, W]``, 0 = keep, 255 = generate.
            clip_image: picture for the image context, PIL or ``[3, H, W]`` in [-1, 1].
        """
        self.check_inputs(prompt, height, width, negative_prompt, callback_on_step_end_tensor_inputs, prompt_embeds,
                          negative_prompt_embeds)
        self._guidance_scale = guidance_scale
        device, dtype = self._execution_device, self.transformer.dtype
        text, negative = self.encode_prompt(
            prompt, negative_prompt, guidance_scale > 1, num_videos_per_prompt, prompt_embeds,
            negative_prompt_embeds, max_sequence_length, device, dtype,
        )
        steps = self.set_timesteps(num_inference_steps, device, timesteps, shift)
        latents = self.prepare_latents(len(text), self.vae.config.latent_channels, num_frames, height, width, dtype,
                                       device, generator, latents)
        inputs = self._conditions(video, mask_video, latents, clip_image, height, width)
        latents = self.denoise(
            latents, timesteps=steps, text=text, negative=negative, inputs=inputs, guidance_scale=guidance_scale,
            extra_step=self.prepare_extra_step_kwargs(generator, eta), callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
        )
        return self.finish(latents, output_type, return_dict)

    def _conditions(
        self, video: Tensor | None, mask_video: Tensor | None, latents: Tensor, clip_image: Any, height: int,
        width: int,
    ) -> dict[str, Any]:
        device, dtype = latents.device, latents.dtype
        if (video is None) != (mask_video is None):
            raise ValueError("video and mask_video belong together: give both or neither.")
        if video is None:
            y = latents.new_zeros(latents.shape[0], 4 + latents.shape[1], *latents.shape[2:])
        else:
            video, mask = (_fit(tensor.to(device), height, width) for tensor in (video, mask_video))
            y = self.prepare_mask_latents(video, mask, latents)
        context = self.image_context(clip_image, device, dtype)
        return {"y": y, "clip_fea": context.expand(latents.shape[0], -1, -1).to(dtype)}


def _fit(video: Tensor, height: int, width: int) -> Tensor:
    """Frames resized to the output size, in float32."""
    video = video.float()
    if video.shape[-2:] == (height, width):
        return video
    frames = video.transpose(1, 2).flatten(0, 1)
    resized = F.interpolate(frames, size=(height, width), mode="bilinear", align_corners=False)
    return resized.unflatten(0, (video.shape[0], -1)).transpose(1, 2)


def _picture(image: Any) -> Tensor:
    """``[3, H, W]`` in [-1, 1] from a PIL picture; tensors pass."""
    if isinstance(image, Tensor):
        return image
    import numpy as np

    array = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return array.float() / 255 * 2 - 1


WanI2VPipeline = WanFunInpaintPipeline
