"""Text to video with Wan."""

from __future__ import annotations

from collections.abc import Callable
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
        attention_kwargs: dict[str, Any] | None = None, callback_on_step_end_tensor_inputs: tuple[str, ...] =
        ("latents",), max_sequence_length: int = 512, comfyui_progressbar: bool = False, shift: float = 5,
    ) -> WanPipelineOutput | Tensor:
        """Sample ``num_frames`` frames of ``height`` x ``width`` pixels. ``shift`` is read by UniPC and DPM++."""
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
        latents = self.denoise(
            latents, timesteps=steps, text=text, negative=negative, inputs={}, guidance_scale=guidance_scale,
            extra_step=self.prepare_extra_step_kwargs(generator, eta), callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
        )
        return self.finish(latents, output_type, return_dict)


WanFunPipeline = WanPipeline
