"""The loss on clips that are not trained on.

A training loss falls and rises with the noise levels and clips that a step happens to draw. Here everything a draw
decides is fixed: each clip is cut, masked and encoded once, gets one noise tensor, and is evaluated at the same noise
levels, the middles of equal shares of the schedule. What is left to change the number are the weights. It is the
training loss without weighting over noise levels; values of different runs compare as long as data flags agree.

The encoded clips stay in main memory, so a later evaluation only runs the denoiser. Ranks share the clips; all of them
make the same number of calls, as sharded weights need.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.data.loader import BatchDataset, Request
from videox_fun.training.state import RngStreams

if TYPE_CHECKING:
    from videox_fun.recipes.base import Recipe
    from videox_fun.training.context import Components, Conditioning, RunContext
    from videox_fun.training.objectives import Objective

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_SEED = 20240607  # of every draw; not the run's seed, so that runs with different seeds are measured alike


def build_held_out(ctx: RunContext, recipe: Recipe) -> HeldOutLoss | None:
    """The measurement that ``--validation_data_meta`` asks for, or ``None``. Reads the annotation, no weights."""
    if not ctx.args.validation_data_meta:
        return None
    changes = {
        "train_data_meta": ctx.args.validation_data_meta,
        "train_data_dir": ctx.args.validation_data_dir or ctx.args.train_data_dir,
        "train_batch_size": 1, "dataloader_num_workers": 0, "text_drop_ratio": 0.0, "video_repeat": 0,
        "data_format": "auto",
        "enable_text_encoder_in_dataloader": False, "cache_latents": False, "cache_text": False,
    }
    own = dataclasses.replace(
        ctx, args=argparse.Namespace(**{**vars(ctx.args), **changes}), cache=None, spared=frozenset(),
        rng=RngStreams(_SEED, device=ctx.device),
    )
    streams = ctx.rng.snapshot()
    try:
        held_out = HeldOutLoss(ctx, own, recipe)
    finally:
        ctx.rng.restore(streams)
    if ctx.is_main:
        logger.info("Held-out loss: %d of the %d clips of %s, at %d noise levels.", len(held_out.indices),
                    held_out.available, ctx.args.validation_data_meta, ctx.args.validation_loss_levels)
    return held_out


class HeldOutLoss:
    """Measures the loss on held-out clips.

    Args:
        ctx: the run, whose weights are measured.
        own: the same run with the flags and streams of the held-out data.
        recipe: reads and encodes.
    """

    def __init__(self, ctx: RunContext, own: RunContext, recipe: Recipe) -> None:
        self.ctx = ctx
        self.own = own
        self.recipe = recipe
        data = recipe.data(own)
        if data is None:
            raise ValueError("--validation_data_meta: this script reads no clips.")
        data.summary(probe_seconds=_PROBE_SECONDS)  # raises when nothing is usable
        self.available = len(data.dataset)
        self.batches = BatchDataset(data)
        self.indices = spread(self.available, ctx.args.validation_loss_samples)
        self._prepared: list[tuple[Conditioning, torch.Tensor]] | None = None

    def measure(self, objective: Objective, components: Components) -> dict[str, float]:
        """``validation_loss`` and its parts by noise level, equal on all ranks.

        Draws from the global streams; the caller restores them.
        """
        if self._prepared is None:
            self._prepared = [self._encode(index, components) for index in self._share()]
        levels, layout = self.ctx.args.validation_loss_levels, self.ctx.layout
        counted = len(range(layout.data_rank, len(self.indices), layout.data_world))
        sums, names = torch.zeros(levels, device=self.ctx.device), [""] * levels
        for number, prepared in enumerate(self._prepared):
            conditioning, noise = _moved(prepared, self._to_device)
            for level in range(levels):
                output = objective.held_out_loss(conditioning, noise=noise, share=(level + 0.5) / levels)
                names[level] = f"validation_loss_t{round(output.timesteps[0].item())}"
                if number < counted:
                    sums[level] += output.loss
        sums = self.ctx.accelerator.reduce(sums, reduction="sum") / layout.sequence
        means = (sums / len(self.indices)).tolist()
        return {"validation_loss": sum(means) / levels, **dict(zip(names, means, strict=True))}

    def _share(self) -> list[int]:
        """Clips of this rank; the last round is filled up with the first clips, which then do not count."""
        layout, count = self.ctx.layout, len(self.indices)
        rounds = -(-count // layout.data_world)
        return [self.indices[(layout.data_rank + turn * layout.data_world) % count] for turn in range(rounds)]

    def _encode(self, index: int, components: Components) -> tuple[Conditioning, torch.Tensor]:
        """Conditioning and noise of one clip, in main memory. Every stream is seeded by the clip's position."""
        batch = self.batches[Request(index, (index,), (_SEED, index))]
        self.own.rng.torch.manual_seed(_SEED + index)
        self.own.rng.numpy.bit_generator.state = RngStreams(_SEED + index).numpy.bit_generator.state
        batch = {key: _moved(value, self._to_device) for key, value in batch.items()}
        conditioning = self.recipe.condition(self.own, components, batch)
        noise = torch.randn(conditioning.latents.shape, generator=torch.Generator().manual_seed(_SEED + index))
        return _moved((conditioning, noise.to(conditioning.latents.dtype)), lambda tensor: tensor.cpu())

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.ctx.device)


def spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``count`` positions, evenly spread."""
    if count <= limit:
        return list(range(count))
    return [position * count // limit for position in range(limit)]


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it moved."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, move) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, move) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _moved(getattr(value, field.name), move) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
