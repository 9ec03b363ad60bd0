"""The tokens of one sample over the processes of a sequence group (Ulysses).

Every process holds one slice of the tokens and all heads; attention needs all tokens and can do with some of the heads.
:meth:`SequenceGroup.to_heads` changes from the first to the second with one all-to-all, and :meth:`to_tokens` back.
Both are their own transpose, so the backward is the same exchange in the other direction.

**Gradients.** All processes of a group compute the same loss from the same prediction, which :meth:`gather` puts
together from their slices. The loss is wanted once, not once per process, so the backward of ``gather`` hands each
process only its own slice of the gradient. What a process then has for a parameter is its slice's part of the gradient,
and the parts have to be *summed* over the group but *averaged* over different batches. DDP, FSDP and ZeRO average over
all processes, hence ``gather`` multiplies by the size of the group:

    mean over (data x group) of (group size * part)  =  mean over data of (sum of the parts)

This holds for every parameter, before the split, in the blocks and behind them, as long as nothing behind ``gather`` is
trained. No other communication is needed: a tensor that all processes compute (text, time) gets its gradient through
the parts as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor


@dataclass
class ExchangeCounts:
    """Calls since the start. Those of a compiled graph are counted once, when it is traced."""

    all_to_all: int = 0
    all_to_all_traced: int = 0
    gather: int = 0
    tokens: dict[int, int] = field(default_factory=dict)  # tokens of a sample -> forwards


class SequenceGroup:
    """The exchanges of one group of processes.

    Args:
        group: its process group.
        size, rank: of the group and of this process in it.
    """

    def __init__(self, group: dist.ProcessGroup, *, size: int, rank: int) -> None:
        self.group = group
        self.size = size
        self.rank = rank
        self.counts = ExchangeCounts()

    def local_length(self, length: int) -> int:
        """Tokens per process when ``length`` tokens are padded to a multiple of the group's size."""
        return -(-length // self.size)

    def split(self, x: Tensor, *, dim: int, fill: float = 0.0) -> Tensor:
        """This process's slice of ``x``. What is missing to a multiple is padded with ``fill``, on the last process."""
        length = x.shape[dim]
        local = self.local_length(length)
        start = min(self.rank * local, length)
        part = x.narrow(dim, start, min(local, length - start))
        missing = local - part.shape[dim]
        if missing:
            padding = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
            part = F.pad(part, padding, value=fill)
        return part.contiguous()

    def to_heads(self, x: Tensor) -> Tensor:
        """``[n, B, L/size, heads, E]`` of this process's tokens to ``[n, B, L, heads/size, E]`` of its heads."""
        parts, batch, local, heads, width = x.shape
        x = x.unflatten(3, (self.size, heads // self.size)).movedim(3, 0)
        x = self._exchange(x)
        return x.permute(1, 2, 0, 3, 4, 5).reshape(parts, batch, self.size * local, heads // self.size, width)

    def to_tokens(self, x: Tensor) -> Tensor:
        """``[B, L, heads/size, E]`` of this process's heads to ``[B, L/size, heads, E]`` of its tokens."""
        batch, length, heads, width = x.shape
        x = x.unflatten(1, (self.size, length // self.size)).movedim(1, 0)
        x = self._exchange(x)
        return x.permute(1, 2, 0, 3, 4).reshape(batch, length // self.size, self.size * heads, width)

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """The slices of all processes side by side. See the module's text for its backward."""
        self.counts.gather += 1
        return _Gather.apply(x, self, dim)

    def _exchange(self, x: Tensor) -> Tensor:
        """Entry ``i`` of dimension 0 goes to process ``i``; entry ``i`` of the result came from process ``i``."""
        if torch.compiler.is_compiling():
            self._count_traced()
        else:
            self.counts.all_to_all += 1
        shape = x.shape
        flat = x.reshape(self.size, -1)
        return collectives.all_to_all_single_autograd(flat, None, None, self.group).view(shape)

    @torch.compiler.assume_constant_result
    def _count_traced(self) -> int:
        self.counts.all_to_all_traced += 1
        return 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, dim: int) -> Tensor:
        ctx.sequence, ctx.dim, ctx.length = group, dim, x.shape[dim]
        out = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size, group.group.group_name)
        out = torch.ops._c10d_functional.wait_tensor(out)
        return torch.cat(out.chunk(group.size, dim=0), dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.sequence
        part = gradient.narrow(ctx.dim, group.rank * ctx.length, ctx.length)
        return part * group.size, None, None
