"""Video from a control video or a camera path with the Wan Fun control models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from videox_fun.pipeline.wan_base import Generators, WanPipelineOutput
from videox_fun.pipeline.wan_images import ImageConditionedPipeline, fit, per_video, resize_mask
from videox_fun.utils.fm_solvers import retrieve_timesteps

__all__ = ["WanFunControlPipeline", "WanPipelineOutput", "resize_mask", "retrieve_timesteps"]

_SUB_FRAMES = 4  # pixel frames behind one latent frame; the first latent frame stands for one, which is repeated


class WanFunControlPipeline(ImageConditionedPipeline):
    """Samples a video that follows a control video or a camera, with start and reference pictures."""

    def prepare_control_latents(self, control: Tensor, latents: Tensor) -> Tensor:
        """Latents of a control video or picture ``[B, 3, F, H, W]`` in [0, 1], for every video of the batch."""
        return per_video(self.encode_video(control * 2 - 1, latents), latents)

    @torch.no_grad()
    def __call__(
        self, prompt: str | list[str] | None = None, negative_prompt: str | list[str] | None = None,
        height: int = 480, width: int = 720, control_video: Tensor | None = None,
        control_camera_video: Tensor | None = None, start_image: Tensor | None = None,
        ref_image: Tensor | None = None, num_frames: int = 49, num_inference_steps: int = 50,
        timesteps: list[float] | None = None, guidance_scale: float = 6, num_videos_per_prompt: int = 1,
        eta: float = 0.0, generator: Generators = None, latents: Tensor | None = None,
        prompt_embeds: list[Tensor] | Tensor | None = None,
        negative_prompt_embeds: list[Tensor] | Tensor | None = None, output_type: str = "numpy",
        return_dict: bool = True, callback_on_step_end: Callable[..., dict] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), clip_image: Any = None,
        max_sequence_length: int = 512, comfyui_progressbar: bool = False, shift: float = 5,
    ) -> WanPipelineOutput | Tensor:
        """Sample ``num_frames`` frames.

        Args:
            control_video: ``[B, 3, F, H, W]`` in [0, 1].
            control_camera_video: rays ``[B, 6, F, H, W]``, instead of a control video.
            start_image: ``[B, 3, 1, H, W]`` in [0, 1], the first frame.
            ref_image: ``[B, 3, 1, H, W]`` in [0, 1], what is seen, for models with a reference convolution.
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
            conditions=lambda latents: {
                **self._control(control_video, control_camera_video, start_image, latents, height, width),
                **self._reference(ref_image, latents, height, width),
                "clip_fea": self.image_context(clip_image, latents),
            },
        )

    def _control(
        self, video: Tensor | None, camera: Tensor | None, start_image: Tensor | None, latents: Tensor, height: int,
        width: int,
    ) -> dict[str, Tensor]:
        start = torch.zeros_like(latents)
        if start_image is not None and latents.shape[2] > 1:
            start[:, :, :1] = self.prepare_control_latents(fit(start_image, height, width), latents)
        if camera is not None:
            if video is not None:
                raise ValueError("Give either control_video or control_camera_video.")
            rays = pack_camera(fit(camera, height, width)).to(latents.device, latents.dtype)
            return {"y": start, "y_camera": per_video(rays, latents)}
        control = torch.zeros_like(latents)
        if video is not None:
            control = self.prepare_control_latents(fit(video, height, width), latents)
            if control.shape != latents.shape:
                raise ValueError(f"control_video has {video.shape[2]} frames, which do not fit the "
                                 f"{(latents.shape[2] - 1) * self.temporal_ratio + 1} frames that are sampled.")
        return {"y": torch.cat([control, start], dim=1)}

    def _reference(self, ref_image: Tensor | None, latents: Tensor, height: int, width: int) -> dict[str, Tensor]:
        has_convolution = self.transformer.config.add_ref_conv
        if ref_image is not None and not has_convolution:
            raise ValueError("ref_image was given, but this model has no reference convolution (add_ref_conv).")
        if not has_convolution:
            return {}
        if ref_image is None:
            return {"full_ref": torch.zeros_like(latents[:, :, 0])}
        return {"full_ref": self.prepare_control_latents(fit(ref_image, height, width), latents)[:, :, 0]}


def pack_camera(rays: Tensor) -> Tensor:
    """Group rays by latent frames: ``[B, 6, F, H, W]`` to ``[B, 24, T, H, W]``, channel ``6-channel * 4 + frame``."""
    rays = torch.cat([rays[:, :, :1].expand(-1, -1, _SUB_FRAMES, -1, -1), rays[:, :, 1:]], dim=2)
    if rays.shape[2] % _SUB_FRAMES:
        raise ValueError(f"A camera path of {rays.shape[2] - _SUB_FRAMES + 1} frames does not fit the latents: 4k+1 "
                         "frames are needed.")
    return rays.unflatten(2, (-1, _SUB_FRAMES)).transpose(2, 3).flatten(1, 2)
