"""Timestep indices spread over the ranks.

Each rank draws from its own interval of the noise schedule, so that one global batch covers all noise levels. The
number of intervals is the largest divisor of the world size that also divides the number of timesteps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class DiscreteSampling:
    """Uniform integer sampler over ``[start_num_idx, start_num_idx + num_idx)``.

    Args:
        num_idx: how many indices there are.
        uniform_sampling: give every group of ranks its own interval.
        start_num_idx: first index.
        sp_size: ranks of one sequence-parallel group; they share an interval.
    """

    def __init__(
        self, num_idx: int, uniform_sampling: bool = False, start_num_idx: int = 0, sp_size: int = 1
    ) -> None:
        self.num_idx = num_idx
        self.sp_size = sp_size
        self.start_num_idx = start_num_idx
        self.uniform_sampling = uniform_sampling
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.low, self.high = start_num_idx, start_num_idx + num_idx
        if uniform_sampling and self.is_distributed:
            self.low, self.high = self.interval(dist.get_rank(), dist.get_world_size())

    def interval(self, rank: int, world: int) -> tuple[int, int]:
        """Half-open interval of ``rank`` among ``world`` ranks."""
        widths = range(self.sp_size, world + 1, self.sp_size)  # an interval never cuts a sequence group in two
        width = next(w for w in widths if world % w == 0 and self.num_idx % (world // w) == 0)
        size = self.num_idx // (world // width)
        low = self.start_num_idx + (rank // width) * size
        return low, low + size

    def __call__(
        self, n_samples: int, generator: torch.Generator | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Draw ``[n_samples]`` indices as int64."""
        return torch.randint(self.low, self.high, (n_samples,), generator=generator, device=device)
