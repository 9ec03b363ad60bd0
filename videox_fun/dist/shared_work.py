"""Work that all processes of a sequence group need and one of them can do: encoding clips and prompts.

The processes of a group see the same batch. Instead of each encoding all of it, job ``i`` of a list is done by process
``i mod size``, and its tensor is sent to the others. Every process of the group has to bring the same list of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Job = Callable[[], Tensor]


class SharedWork:
    """The exchanges of one group.

    Args:
        group: its process group.
        device: where results are wanted.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.done = self.received = 0

    def run(self, jobs: Sequence[Job]) -> list[Tensor]:
        """The results of all jobs, equal on every process of the group."""
        own = {number: job().to(self.device).contiguous() for number, job in enumerate(jobs) if self._mine(number)}
        self.done += len(own)
        self.received += len(jobs) - len(own)
        shapes = self._shapes({number: (tuple(tensor.shape), tensor.dtype) for number, tensor in own.items()})
        results = []
        for number in range(len(jobs)):
            shape, dtype = shapes[number]
            tensor = own[number] if number in own else torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, number % self.size), group=self.group)
            results.append(tensor)
        return results

    def _mine(self, number: int) -> bool:
        return number % self.size == self.rank

    def _shapes(self, own: dict[int, tuple[Any, torch.dtype]]) -> dict[int, tuple[Any, torch.dtype]]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return {number: facts for part in everyone for number, facts in part.items()}
