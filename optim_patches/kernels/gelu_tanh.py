"""GELU with the tanh approximation, keeping only its input for backward.

Forward and backward are one pass each, all arithmetic is float32, the results have the dtype of the input.
"""

from __future__ import annotations

import torch

from optim_patches.kernels import load_triton

triton, tl = load_triton()

BLOCK = 1024


def reference(x: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU (tanh form) of a tensor of any shape."""
    return GeluTanh.apply(x)


@triton.jit
def _tanh(z):
    return 2.0 * tl.sigmoid(2.0 * z) - 1.0


@triton.jit
def _forward(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    dx = dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class GeluTanh(torch.autograd.Function):
    """Autograd around the two kernels."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous()
        y = torch.empty_like(flat)
        _forward[(triton.cdiv(flat.numel(), BLOCK),)](flat, y, flat.numel(), BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(flat)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        _backward[(triton.cdiv(x.numel(), BLOCK),)](dy, x, dx, x.numel(), BLOCK=BLOCK, num_warps=4)
        return dx
