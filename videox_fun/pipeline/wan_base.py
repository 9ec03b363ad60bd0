"""What the Wan pipelines share: text, noise, one denoising loop, decoding.

A pipeline adds only its conditions, as keyword arguments of the denoiser made once before the loop. With guidance the
batch is ``[negative, prompt]`` and the prediction ``u + s (c - u)``; where the denoiser was told to skip guidance for
the last part of the steps (``enable_cfg_skip``), only the prompt half is computed there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from videox_fun.utils.fm_solvers import FlowDPMSolverMultistepScheduler, get_sampling_sigmas, retrieve_timesteps
from videox_fun.utils.fm_solvers_unipc import FlowUniPCMultistepScheduler

Generators = torch.Generator | list[torch.Generator] | None


@dataclass
class WanPipelineOutput(BaseOutput):
    """Result of a Wan pipeline: ``videos [B, 3, F, H, W]`` in [0, 1], or latents with ``output_type="latent"``."""

    videos: Tensor


class WanPipelineBase(DiffusionPipeline):
    """Base of the Wan pipelines."""

    _optional_components: list[str] = []
    _callback_tensor_inputs = ["latents", "prompt_embeds", "negative_prompt_embeds"]

    @property
    def temporal_ratio(self) -> int:
        return self.vae.config.temporal_compression_ratio

    @property
    def spatial_ratio(self) -> int:
        return self.vae.config.spatial_compression_ratio

    @property
    def size_step(self) -> int:
        """Height and width are multiples of it: pixels of one patch of latents."""
        return self.spatial_ratio * max(self.transformer.config.patch_size[1:])

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @property
    def _execution_device(self) -> torch.device:
        """Where the denoiser computes. Without offload hooks other parts may wait, and work, on another device."""
        hooked = any(hasattr(part, "_hf_hook") for part in self.components.values())
        return super()._execution_device if hooked else self.transformer.device

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def check_inputs(
        self, prompt: Any, height: int, width: int, negative_prompt: Any, callback_on_step_end_tensor_inputs: Any,
        prompt_embeds: Any = None, negative_prompt_embeds: Any = None,
    ) -> None:
        """Refuse sizes and prompts that cannot work."""
        step = self.size_step
        if height < step or width < step or height % step or width % step:
            raise ValueError(f"Height and width must be multiples of {step}, not {height}x{width}. Nearest: "
                             f"{nearest_size(height, step)}x{nearest_size(width, step)}.")
        unknown = [n for n in callback_on_step_end_tensor_inputs or () if n not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(f"The callback can get {', '.join(self._callback_tensor_inputs)}, not {unknown}.")
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("Give either prompt or prompt_embeds.")
        if prompt is not None and not isinstance(prompt, str | list):
            raise ValueError(f"prompt must be a text or a list of texts, not {type(prompt).__name__}.")
        if negative_prompt is not None and negative_prompt_embeds is not None:
            raise ValueError("Give either negative_prompt or negative_prompt_embeds.")

    def _embed(self, prompts: Sequence[str], max_length: int) -> list[Tensor]:
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=max_length, truncation=True, add_special_tokens=True,
            return_tensors="pt",
        )
        lengths = tokens.attention_mask.sum(dim=1).tolist()
        device = self.device_of(self.text_encoder)
        embeddings = self.text_encoder(tokens.input_ids.to(device), attention_mask=tokens.attention_mask.to(device))[0]
        return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]

    def encode_prompt(
        self, prompt: str | list[str] | None, negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True, num_videos_per_prompt: int = 1,
        prompt_embeds: list[Tensor] | Tensor | None = None,
        negative_prompt_embeds: list[Tensor] | Tensor | None = None, max_sequence_length: int = 512,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Embeddings of prompts and negative prompts: two lists of ``[L_i, D]``, the second empty without guidance."""
        device = device or self._execution_device
        prompts = [prompt] if isinstance(prompt, str) else prompt
        positive = list(prompt_embeds) if prompt_embeds is not None else self._embed(prompts, max_sequence_length)
        negative: list[Tensor] = []
        if do_classifier_free_guidance:
            if negative_prompt_embeds is not None:
                negative = list(negative_prompt_embeds)
            else:
                texts = negative_prompt or ""
                texts = [texts] * len(positive) if isinstance(texts, str) else texts
                negative = self._embed(texts, max_sequence_length)
            if len(negative) != len(positive):
                raise ValueError(f"{len(negative)} negative prompts were given for {len(positive)} prompts.")
        repeat = num_videos_per_prompt
        rows = [[row.to(device, dtype) for row in half for _ in range(repeat)] for half in (positive, negative)]
        return rows[0], rows[1]

    def prepare_latents(
        self, batch_size: int, num_channels_latents: int, num_frames: int, height: int, width: int,
        dtype: torch.dtype, device: torch.device, generator: Generators, latents: Tensor | None = None,
        num_length_latents: int | None = None,
    ) -> Tensor:
        """Start noise ``[B, C, T, h, w]``, or the given latents scaled for the sampler."""
        if isinstance(generator, list) and len(generator) != batch_size:
            raise ValueError(f"{len(generator)} generators were given for {batch_size} videos.")
        frames = num_length_latents or (num_frames - 1) // self.temporal_ratio + 1
        shape = (batch_size, num_channels_latents, frames, height // self.spatial_ratio, width // self.spatial_ratio)
        latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype) if latents is None else (
            latents.to(device))
        return latents * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def prepare_extra_step_kwargs(self, generator: Generators, eta: float) -> dict[str, Any]:
        """``eta`` and ``generator`` for samplers that take them."""
        accepted = inspect.signature(self.scheduler.step).parameters
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}

    def set_timesteps(self, steps: int, device: torch.device, timesteps: Any, shift: float) -> Tensor:
        """Noise levels of the run, in the way each sampler wants them."""
        scheduler = self.scheduler
        shifted = isinstance(scheduler, FlowUniPCMultistepScheduler | FlowDPMSolverMultistepScheduler)
        if shifted and timesteps is not None:
            raise ValueError(f"{type(scheduler).__name__} takes no timesteps; give num_inference_steps and shift.")
        if isinstance(scheduler, FlowUniPCMultistepScheduler):
            scheduler.set_timesteps(steps, device=device, shift=shift)
            return scheduler.timesteps
        if isinstance(scheduler, FlowDPMSolverMultistepScheduler):
            return retrieve_timesteps(scheduler, device=device, sigmas=get_sampling_sigmas(steps, shift))[0]
        extra = {"mu": 1.0} if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else {}
        return retrieve_timesteps(scheduler, steps, device, timesteps, **extra)[0]

    # ---- one call -------------------------------------------------------------------------------------------------

    def sample(
        self, *, prompt: str | list[str] | None, negative_prompt: str | list[str] | None, height: int, width: int,
        num_frames: int, num_inference_steps: int, timesteps: Any, guidance_scale: float, num_videos_per_prompt: int,
        eta: float, generator: Generators, latents: Tensor | None, prompt_embeds: list[Tensor] | Tensor | None,
        negative_prompt_embeds: list[Tensor] | Tensor | None, output_type: str, return_dict: bool,
        callback_on_step_end: Callable[..., dict] | None, callback_on_step_end_tensor_inputs: Sequence[str],
        max_sequence_length: int, shift: float,
        conditions: Callable[[Tensor], dict[str, Any]] = lambda latents: {},
    ) -> WanPipelineOutput | Tensor:
        """A whole call. ``conditions`` makes the denoiser's further arguments once the latents are known."""
        self.check_inputs(prompt, height, width, negative_prompt, callback_on_step_end_tensor_inputs, prompt_embeds,
                          negative_prompt_embeds)
        self._guidance_scale = guidance_scale
        device, dtype = self._execution_device, self.noise_dtype
        text, negative = self.encode_prompt(
            prompt, negative_prompt, guidance_scale > 1, num_videos_per_prompt, prompt_embeds,
            negative_prompt_embeds, max_sequence_length, device, dtype,
        )
        steps = self.set_timesteps(num_inference_steps, device, timesteps, shift)
        latents = self.prepare_latents(len(text), self.vae.config.latent_channels, num_frames, height, width, dtype,
                                       device, generator, latents)
        latents = self.denoise(
            latents, timesteps=steps, text=text, negative=negative, inputs=conditions(latents),
            guidance_scale=guidance_scale, extra_step=self.prepare_extra_step_kwargs(generator, eta),
            callback=callback_on_step_end, callback_inputs=callback_on_step_end_tensor_inputs,
        )
        video = latents if output_type == "latent" else self.decode_latents(latents)
        self.maybe_free_model_hooks()
        return WanPipelineOutput(videos=video) if return_dict else video

    @property
    def noise_dtype(self) -> torch.dtype:
        """Type the start noise is drawn in: the text encoder's, as it decides the numbers a seed gives."""
        return (self.text_encoder if self.text_encoder is not None else self.transformer).dtype

    # ---- the loop -------------------------------------------------------------------------------------------------

    def denoise(
        self, latents: Tensor, *, timesteps: Tensor, text: list[Tensor], negative: list[Tensor],
        inputs: dict[str, Any], guidance_scale: float, extra_step: dict[str, Any],
        callback: Callable[..., dict] | None = None, callback_inputs: Sequence[str] = ("latents",),
    ) -> Tensor:
        """Integrate from noise to a sample.

        Args:
            latents: start noise.
            timesteps: noise levels, from high to low.
            text, negative: prompt embeddings; ``negative`` empty without guidance.
            inputs: condition tensors of one half of the batch, by the denoiser's argument names.
            guidance_scale: strength of guidance.
            extra_step: arguments for the sampler's step.
            callback: called after each step with ``(pipeline, index, timestep, tensors)``; may return new latents.
            callback_inputs: names of the tensors it gets.
        """
        guided = bool(negative)
        _, _, frames, height, width = latents.shape
        patch = self.transformer.config.patch_size
        seq_len = -(-frames * height * width // (patch[1] * patch[2]))
        self._num_timesteps, self._interrupt = len(timesteps), False
        self.transformer.start_sampling()
        with self.progress_bar(total=len(timesteps)) as bar:
            for index, timestep in enumerate(timesteps):
                if self._interrupt:
                    break
                self.transformer.current_steps = index
                prediction = self._predict(latents, timestep, text, negative, inputs, guidance_scale, seq_len)
                latents = self.scheduler.step(prediction, timestep, latents, **extra_step, return_dict=False)[0]
                if callback is not None:
                    local = {"latents": latents, "prompt_embeds": text, "negative_prompt_embeds": negative}
                    changed = callback(self, index, timestep, {name: local[name] for name in callback_inputs}) or {}
                    latents = changed.get("latents", latents)
                    text = changed.get("prompt_embeds", text)
                    negative = changed.get("negative_prompt_embeds", negative) if guided else negative
                bar.update()
        return latents

    def _predict(
        self, latents: Tensor, timestep: Tensor, text: list[Tensor], negative: list[Tensor],
        inputs: dict[str, Any], scale: float, seq_len: int,
    ) -> Tensor:
        """The guided velocity. The halves run one after the other: half the memory, and each can be skipped."""
        scaled = latents
        if hasattr(self.scheduler, "scale_model_input"):
            scaled = self.scheduler.scale_model_input(latents, timestep)
        t = timestep.expand(latents.shape[0])

        def half(context: list[Tensor], flag: bool) -> Tensor:
            return self.transformer(x=scaled, context=context, t=t, seq_len=seq_len, cond_flag=flag, **inputs)

        prompted = half(text, True)
        if not negative or self.transformer.skips_guidance():
            return prompted
        plain = half(negative, False)
        return plain + scale * (prompted - plain)

    def device_of(self, part: nn.Module) -> torch.device:
        """Where a part works: under offloading not where its weights wait."""
        return self._execution_device if hasattr(part, "_hf_hook") else part.device

    def onload(self, part: nn.Module) -> torch.device:
        """Fetch a part that is not used through ``forward``, where the offload hooks sit; the device it works on."""
        if hasattr(part, "_hf_hook"):
            part._hf_hook.pre_forward(part)
        return self.device_of(part)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Video ``[B, 3, F, H, W]`` in [0, 1], float32 on the host."""
        frames = self.vae.decode(latents.to(self.onload(self.vae), self.vae.dtype)).sample
        return (frames / 2 + 0.5).clamp(0, 1).float().cpu()


def nearest_size(size: int, step: int) -> int:
    """The multiple of ``step`` nearest to ``size``, at least one."""
    return max(step, round(size / step) * step)
