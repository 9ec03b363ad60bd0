"""Image to video and inpainting with the Wan models that take a mask and a masked video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from videox_fun.pipeline.wan_base import Generators, WanPipelineOutput
from videox_fun.pipeline.wan_images import ImageConditionedPipeline, fit, per_video, resize_mask
from videox_fun.utils.fm_solvers import retrieve_timesteps
from videox_fun.utils.masks import pack_mask

__all__ = ["WanFunInpaintPipeline", "WanI2VPipeline", "WanPipelineOutput", "resize_mask", "retrieve_timesteps"]


class WanFunInpaintPipeline(ImageConditionedPipeline):
    """Samples a video around given frames: ``video`` where ``mask_video`` is 0, new where it is 255."""

    def prepare_mask_latents(self, video: Tensor, mask: Tensor, latents: Tensor) -> Tensor:
        """Mask and masked-video channels ``[B, 4 + C, T, h, w]``; unknown pixels are mid grey, as in training.

        Args:
            video: ``[B, 3, F, H, W]`` in [0, 1].
            mask: ``[B, 1, F, H, W]``, 255 = to be generated.
            latents: start noise, for size and type. Where nothing is known the channels are zero.
        """
        if bool((mask == 255).all()):
            return _nothing_known(latents)
        unknown = (mask >= 0.5).float()
        encoded = self.encode_video((video * 2 - 1) * (1 - unknown), latents)
        known = resize_mask(1 - pack_mask(unknown.transpose(1, 2)), latents).to(latents.dtype)
        return torch.cat([per_video(known, latents), per_video(encoded, latents)], dim=1)

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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), clip_image: Any = None,
        max_sequence_length: int = 512, comfyui_progressbar: bool = False, shift: float = 5,
    ) -> WanPipelineOutput | Tensor:
        """Sample ``num_frames`` frames. Without ``video`` nothing is known and the prompt alone decides.

        Args:
            video: ``[B, 3, F, H, W]`` in [0, 1], resized to ``height`` x ``width``.
            mask_video: ``[B, 1, F, H, W]``, 0 = keep, 255 = generate.
            clip_image: picture for the image context, PIL or ``[3, H, W]`` in [-1, 1].
        """
        return self.sample(
            prompt=prompt, negative_prompt=negative_prompt, height=height, width=width, num_frames=num_frames,
            num_inference_steps=num_inference_steps, timesteps=timesteps, guidance_scale=guidance_scale,
            num_videos_per_prompt=num_videos_per_prompt, eta=eta, generator=generator, latents=latents,
            prompt_embeds=prompt_embeds, negative_prompt_embeds=negative_prompt_embeds, output_type=output_type,
            return_dict=return_dict, callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length, shift=shift,
            conditions=lambda latents: self._conditions(video, mask_video, latents, clip_image, height, width),
        )

    def _conditions(
        self, video: Tensor | None, mask_video: Tensor | None, latents: Tensor, clip_image: Any, height: int,
        width: int,
    ) -> dict[str, Any]:
        if (video is None) != (mask_video is None):
            raise ValueError("video and mask_video belong together: give both or neither.")
        if video is None:
            y = _nothing_known(latents)
        else:
            self._check_length(video, mask_video, latents)
            y = self.prepare_mask_latents(fit(video, height, width), fit(mask_video, height, width, mode="nearest"),
                                          latents)
        return {"y": y, "clip_fea": self.image_context(clip_image, latents)}

    def _check_length(self, video: Tensor, mask: Tensor, latents: Tensor) -> None:
        frames = (latents.shape[2] - 1) * self.temporal_ratio + 1
        if video.shape[2] != frames or mask.shape[2] != frames:
            raise ValueError(f"video has {video.shape[2]} and mask_video {mask.shape[2]} frames, but {frames} are "
                             "sampled; the three must be equal.")


def _nothing_known(latents: Tensor) -> Tensor:
    batch, channels, *size = latents.shape
    return latents.new_zeros(batch, 4 + channels, *size)


WanI2VPipeline = WanFunInpaintPipeline
