"""Text to video with Wan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from videox_fun.pipeline.wan_base import Generators, WanPipelineBase, WanPipelineOutput
from videox_fun.utils.fm_solvers import retrieve_timesteps

__all__ = ["WanFunPipeline", "WanPipeline", "WanPipelineOutput", "retrieve_timesteps"]


class WanPipeline(WanPipelineBase):
    """Samples a video from a prompt."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer,
                              scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self, prompt: str | list[str] | None = None, negative_prompt: str | list[str] | None = None,
        height: int = 480, width: int = 720, num_frames: int = 49, num_inference_steps: int = 50,
        timesteps: list[float] | None = None, guidance_scale: float = 6, num_videos_per_prompt: int = 1,
        eta: float = 0.0, generator: Generators = None, latents: Tensor | None = None,
        prompt_embeds: list[Tensor] | Tensor | None = None,
        negative_prompt_embeds: list[Tensor] | Tensor | None = None, output_type: str = "numpy",
        return_dict: bool = True, callback_on_step_end: Callable[..., dict] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = 512,
        comfyui_progressbar: bool = False, shift: float = 5,
    ) -> WanPipelineOutput | Tensor:
        """Sample ``num_frames`` frames of ``height`` x ``width`` pixels. ``shift`` is read by UniPC and DPM++."""
        return self.sample(
            prompt=prompt, negative_prompt=negative_prompt, height=height, width=width, num_frames=num_frames,
            num_inference_steps=num_inference_steps, timesteps=timesteps, guidance_scale=guidance_scale,
            num_videos_per_prompt=num_videos_per_prompt, eta=eta, generator=generator, latents=latents,
            prompt_embeds=prompt_embeds, negative_prompt_embeds=negative_prompt_embeds, output_type=output_type,
            return_dict=return_dict, callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length, shift=shift,
        )


WanFunPipeline = WanPipeline
