"""Flow matching: predict the direction from data to noise.

A sample is mixed with noise, ``x_t = (1 - sigma) x_0 + sigma eps``, and the denoiser predicts ``eps - x_0``. Squared
errors above 50 are left out of the sum but not of its denominator. ``--motion_sub_loss`` adds the error of the
differences between neighbouring frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from videox_fun.training.context import Conditioning, Player
from videox_fun.training.objectives.base import LossOutput, Objective, Phase
from videox_fun.training.objectives.timesteps import TimestepSampler, loss_weight

_LARGEST_ERROR = 50.0


def thresholded_mse(prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Mean squared error in float32, errors above 50 counted as zero. Non-finite ones stay, for the loss to show."""
    error = prediction.float() - target.float()
    squared = error.square() * (error.detach().abs() <= _LARGEST_ERROR)
    if weight is not None:
        squared = squared * weight
    return squared.mean()


def motion_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of frame-to-frame differences along the time axis of ``[B, C, T, h, w]``."""
    moved = prediction.float().diff(dim=2) - target.float().diff(dim=2)
    return moved.square().mean()


class FlowMatch(Objective):
    """One denoiser, one loss."""

    def players(self) -> list[Player]:
        from videox_fun.training.trainable import make_trainable

        args = self.ctx.args
        self.timesteps = TimestepSampler(
            args, self.components.schedule, generator=self.ctx.rng.torch, compat=self.ctx.compat,
            sequence=self.ctx.sequence_size,
        )
        schedule = self.components.schedule
        self.table_t = schedule.timesteps.to(self.ctx.device)
        self.table_sigma = schedule.sigmas.to(self.ctx.device)
        trainable = make_trainable(self.ctx.spec, args)
        if trainable.kind == "lora":
            # Its adapters draw initial values first; where it is not loaded, its shape draws the same.
            trainable.text_encoder = self.components.text_encoder or self.components.extras.get("text_encoder_shape")
        self.player = Player("transformer", self.components.denoiser, trainable)
        return [self.player]

    def prepare(self, batch: dict) -> Conditioning:
        return self.recipe.condition(self.ctx, self.components, batch)

    def phases(self, step: int) -> Sequence[Phase]:
        return [Phase(self.player, self.compute)]

    def compute(self, conditioning: Conditioning) -> LossOutput:
        """Loss of one batch. Draw order: noise, then timesteps, then whatever the recipe injects."""
        args, latents = self.ctx.args, conditioning.latents
        noise = torch.randn(
            latents.shape, generator=self.ctx.rng.torch, device=latents.device, dtype=latents.dtype
        )
        indices = self.timesteps(latents.shape[0], latents.device)
        return self.loss(conditioning, noise=noise, indices=indices, scheme=args.weighting_scheme)

    def held_out_loss(self, prepared: Conditioning, *, noise: torch.Tensor, share: float) -> LossOutput:
        schedule = self.components.schedule
        index = schedule.start + int(share * (schedule.stop - schedule.start))
        indices = torch.full((prepared.latents.shape[0],), index, device=prepared.latents.device)
        return self.loss(prepared, noise=noise, indices=indices, scheme="none")

    def loss(self, conditioning: Conditioning, *, noise: torch.Tensor, indices: torch.Tensor,
             scheme: str) -> LossOutput:
        """Loss for given noise and schedule indices ``[B]``."""
        latents = conditioning.latents
        shape = (-1,) + (1,) * (latents.dim() - 1)
        timesteps = self.table_t[indices]
        sigmas = self.table_sigma[indices].to(latents.dtype).view(shape)
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        noisy, timesteps = self.recipe.inject(self.ctx, noisy, timesteps, conditioning)
        prediction = self.recipe.predict(self.ctx, self.player.model, noisy, timesteps, conditioning)
        target = noise - latents
        loss = thresholded_mse(prediction, target, loss_weight(scheme, sigmas))
        metrics = {}
        if self.ctx.args.motion_sub_loss and prediction.shape[2] > 2:
            ratio = self.ctx.args.motion_sub_loss_ratio
            motion = motion_loss(prediction, target)
            metrics["motion_share"] = (ratio * motion).detach()
            loss = (1 - ratio) * loss + ratio * motion
        return LossOutput(loss, metrics, timesteps=self.table_t[indices])
