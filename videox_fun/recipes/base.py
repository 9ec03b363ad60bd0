"""The interface between the engine and a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from videox_fun.data.loader import TrainLoader
    from videox_fun.data.module import DataModule
    from videox_fun.training.context import Components, Conditioning, RunContext


class Recipe(ABC):
    """What one family adds to the loop."""

    @abstractmethod
    def check(self, ctx: RunContext) -> None:
        """Refuse what cannot work, from configuration files alone, before any weight is read."""

    def denoiser_config(self, ctx: RunContext) -> dict[str, Any]:
        """The denoiser's configuration file, for what is decided before weights load; empty when it has none."""
        return {}

    @abstractmethod
    def data(self, ctx: RunContext) -> DataModule | None:
        """The dataset with its sampler and collate; ``None`` for objectives that need no data."""

    @abstractmethod
    def load(self, ctx: RunContext) -> Components:
        """Build the networks, frozen and in ``ctx.weight_dtype``, on the host."""

    def encoders(self, ctx: RunContext, *, skip: frozenset[str] = frozenset()) -> Components:
        """The frozen networks alone, for filling a cache; ``skip`` names roles to leave out."""
        raise ValueError(f"{ctx.spec.path} cannot fill a cache beforehand.")

    def fill(self, ctx: RunContext, components: Components, batch: dict) -> None:
        """Put the encodings of a batch (of its clips, its captions, or both) into the cache."""
        raise ValueError(f"{ctx.spec.path} cannot fill a cache beforehand.")

    @abstractmethod
    def condition(self, ctx: RunContext, components: Components, batch: dict) -> Conditioning:
        """Encode a batch. Runs without gradients."""

    def inject(
        self, ctx: RunContext, noisy: torch.Tensor, timesteps: torch.Tensor, conditioning: Conditioning
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put clean frames into the noisy latents and give tokens their own timestep; nothing by default."""
        return noisy, timesteps

    @abstractmethod
    def predict(
        self, ctx: RunContext, model: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor,
        conditioning: Conditioning,
    ) -> torch.Tensor:
        """Call the denoiser; the result has the shape of ``noisy``."""

    def loader(self, ctx: RunContext, components: Components, data: DataModule) -> TrainLoader:
        """The loader of this process."""
        from videox_fun.data.loader import TrainLoader

        return TrainLoader(
            data, rank=ctx.layout.data_rank, world=ctx.layout.data_world, device=ctx.device, seed=ctx.args.seed,
            snapshot_rng=ctx.rng.snapshot, restore_rng=ctx.rng.restore,
            prefetch_factor=getattr(ctx.args, "prefetch_factor", None), pin_memory=ctx.device.type == "cuda",
        )

    def validate(
        self, ctx: RunContext, components: Components, model: nn.Module, save: Callable[..., None]
    ) -> None:
        """Sample with the weights in training and hand each clip to ``save(name, video, caption)``.

        Nothing by default. ``video`` is ``[1, 3, F, H, W]`` in [0, 1].
        """
