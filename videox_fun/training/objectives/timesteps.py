"""How noise levels are drawn and weighted."""

from __future__ import annotations

import argparse
import math

import torch

from videox_fun.training.context import NoiseSchedule
from videox_fun.utils.discrete_sampler import DiscreteSampling


def density(scheme: str, count: int, *, logit_mean: float, logit_std: float, mode_scale: float) -> torch.Tensor:
    """``[count]`` values in [0, 1], drawn from torch's global generator on the host."""
    if scheme == "logit_normal":
        return torch.sigmoid(torch.normal(mean=logit_mean, std=logit_std, size=(count,)))
    uniform = torch.rand(count)
    if scheme == "mode":
        bend = torch.cos(math.pi * uniform / 2) ** 2 - 1 + uniform
        return 1 - uniform - mode_scale * bend
    return uniform


def loss_weight(scheme: str, sigmas: torch.Tensor) -> torch.Tensor | None:
    """Weight of each sample, same shape as ``sigmas``; ``None`` where all weights are one."""
    if scheme == "sigma_sqrt":
        return sigmas.float() ** -2
    if scheme == "cosmap":
        values = sigmas.float()
        return 2 / (math.pi * (1 - 2 * values + 2 * values**2))
    return None


class TimestepSampler:
    """Draws indices into the noise schedule.

    ``--uniform_sampling`` draws from the per-rank generator, each rank in its own interval. Otherwise a density over
    [0, 1] is drawn from the global generator and spread over the schedule's trained range; upstream spreads it over
    all levels even where one of two experts is trained, which ``compat`` reproduces. ``sequence`` processes share a
    sample and therefore an interval.
    """

    def __init__(
        self, args: argparse.Namespace, schedule: NoiseSchedule, *, generator: torch.Generator, compat: bool,
        sequence: int = 1,
    ) -> None:
        self.args = args
        self.schedule = schedule
        self.generator = generator
        stop = min(schedule.stop, args.train_sampling_steps) if args.uniform_sampling else schedule.stop
        self.start, self.count = schedule.start, stop - schedule.start
        if compat and not args.uniform_sampling:
            self.start, self.count = 0, len(schedule.timesteps)
        self.uniform = DiscreteSampling(
            self.count, args.uniform_sampling, start_num_idx=self.start, sp_size=sequence
        )

    def __call__(self, count: int, device: torch.device) -> torch.Tensor:
        """``[count]`` int64 indices on ``device``."""
        if self.args.uniform_sampling:
            return self.uniform(count, generator=self.generator, device=device)
        values = density(
            self.args.weighting_scheme, count, logit_mean=self.args.logit_mean, logit_std=self.args.logit_std,
            mode_scale=self.args.mode_scale,
        )
        indices = (values * self.count).long().clamp_(0, self.count - 1) + self.start
        return indices.to(device, non_blocking=True)
