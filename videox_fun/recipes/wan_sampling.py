"""Clips drawn during training with the weights in training, for the Wan 2.1 recipes.

One generator serves all prompts, so a step's clips depend on the seed, the rank and the weights alone. Each network is
on the device only while it is needed when ``--low_vram`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from videox_fun.pipeline.loading import NEGATIVE_PROMPT, assemble, make_scheduler
from videox_fun.pipeline.wan_base import WanPipelineBase, nearest_size
from videox_fun.training.context import Components, RunContext
from videox_fun.utils.utils import calculate_dimensions, get_image, get_image_to_video_latent


@dataclass(frozen=True)
class Shot:
    """One clip to draw: its size and what the pipeline is given besides prompt and noise."""

    height: int
    width: int
    frames: int
    inputs: dict[str, Any]


def plan_shot(args: Any, *, start_image: str | None, temporal_ratio: int, size_step: int) -> Shot:
    """Size and conditions: of the start image's shape where there is one, else a square of ``--video_sample_size``."""
    frames = (args.video_sample_n_frames - 1) // temporal_ratio * temporal_ratio + 1
    if start_image is None:
        side = nearest_size(args.video_sample_size, size_step)
        return Shot(side, side, frames, {})
    picture = get_image(start_image)
    width, height = calculate_dimensions(args.image_sample_size**2, picture.width / picture.height)
    width, height = max(width, 32), max(height, 32)
    video, mask, first = get_image_to_video_latent(picture, None, frames, (height, width))
    shown = {"clip_image": first} if args.validation_clip_image else {}
    return Shot(height, width, frames, {"video": video, "mask_video": mask, **shown})


def sample_prompts(
    ctx: RunContext, components: Components, model: nn.Module, save: Callable[..., None], *, conditioned: bool
) -> None:
    """Draw a clip for each of ``--validation_prompts`` and hand it to ``save(name, video, caption)``."""
    args = ctx.args
    pipeline = assemble(
        transformer=model, vae=components.vae, text_encoder=components.text_encoder, tokenizer=components.tokenizer,
        image_encoder=components.image_encoder, scheduler=make_scheduler(ctx.config),
    )
    pipeline.set_progress_bar_config(disable=not ctx.is_main, desc="Sampling", leave=False)
    prompts, negative = _embeddings(ctx, pipeline)
    generator = torch.Generator(ctx.device).manual_seed(args.seed + ctx.rank)
    for index, (caption, prompt, avoided) in enumerate(zip(args.validation_prompts, prompts, negative, strict=True)):
        image = args.validation_paths[index] if conditioned and args.validation_paths else None
        shot = plan_shot(args, start_image=image, temporal_ratio=pipeline.temporal_ratio,
                         size_step=pipeline.size_step)
        with ctx.residency.use(components.vae, components.image_encoder if "clip_image" in shot.inputs else None):
            video = pipeline(
                prompt_embeds=[prompt], negative_prompt_embeds=[avoided], height=shot.height, width=shot.width,
                num_frames=shot.frames, num_inference_steps=args.validation_inference_steps,
                guidance_scale=args.validation_guidance_scale, generator=generator, **shot.inputs,
            ).videos
        save(f"image-{index}", video, caption)


def _embeddings(ctx: RunContext, pipeline: WanPipelineBase) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the prompts and of the negative prompt, which is encoded once."""
    args = ctx.args
    negative = NEGATIVE_PROMPT if args.validation_negative_prompt is None else args.validation_negative_prompt
    with ctx.residency.use(pipeline.text_encoder):
        rows, _ = pipeline.encode_prompt(
            [*args.validation_prompts, negative], do_classifier_free_guidance=False,
            max_sequence_length=args.tokenizer_max_length, device=ctx.device, dtype=pipeline.noise_dtype,
        )
    return rows[:-1], [rows[-1]] * (len(rows) - 1)
