"""What the row-wise kernels share: one program per group of rows of one sample, a whole row in registers.

The tensors are ``[B, L, D]``. A modulation tensor is ``[B, 1, D]`` (one per sample) or ``[B, L, D]`` (one per token);
a stride of zero along ``L`` makes both the same kernel. Gradients of a per-sample modulation are sums over ``L``: each
program sums its own rows in float32 registers and writes one partial row; the few partial rows are added at the end.
"""

from __future__ import annotations

import torch

#: Beyond this a row no longer fits in the registers of one program.
MAX_DIM = 16384


def rows_BLD(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a contiguous ``[B, L, D]``."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    if x.dim() != 3:
        raise ValueError(f"Expected [B, L, D] or [L, D], got {tuple(x.shape)}.")
    if x.shape[-1] > MAX_DIM:
        raise ValueError(f"Rows of {x.shape[-1]} values are too long for the fused kernels (at most {MAX_DIM}).")
    return x.contiguous()


def modulation_BLD(m: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``m`` expanded over ``[B, L, D]`` without copying; the last dimension is contiguous."""
    if m.dim() == 2:
        m = m.unsqueeze(1)
    if m.stride(-1) != 1:
        m = m.contiguous()
    return m.expand(like.shape)


def is_per_token(m: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether ``m`` has a value of its own for each of the rows of a sample."""
    return m.dim() == 3 and m.shape[1] == rows.shape[1] and rows.shape[1] > 1


def fold(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient ``[B, L or 1, D]`` summed to the shape of the (possibly broadcast) modulation ``like``."""
    shape = like.shape if like.dim() == 3 else (like.shape[0], 1, like.shape[1])
    return total.sum_to_size(shape).to(like.dtype).view(like.shape)


def block_and_warps(dim: int) -> tuple[int, int]:
    """Block size (the next power of two) and number of warps for rows of ``dim`` values."""
    block = 1 << max(dim - 1, 1).bit_length()
    warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    return block, warps


def programs_per_sample(x: torch.Tensor) -> int:
    """How many programs share one sample's rows, so that all multiprocessors are busy and partial sums stay few."""
    batch, length, _ = x.shape
    if not x.is_cuda:
        return min(length, 2)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return max(1, min(length, 4 * processors // max(batch, 1)))
