"""The element-wise sites of a Wan block: layer norm + modulation, RMS norm, rotary embedding, gated residual.

Each site is one small function with three ways to run, chosen by where the tensor lives:

* under ``torch.compile``: the plain formula in float32, which the compiler fuses into its neighbours;
* eager on an accelerator: the library's own fused kernels, a few launches, no float32 copy of the activations;
* eager on a CPU: as few passes over memory as possible. The norms reuse PyTorch's fused layer-norm kernels, and work
  that needs float32 goes through the activations in blocks that stay in the processor's cache.

Two facts about PyTorch's CPU kernels shape the code. The fused layer-norm backward sums the gradients of its weight and
bias in the input's own precision, which in bfloat16 is off by about 5 % over 2,000 rows; so those sums are done here.
And a layer norm whose mean is set to zero is an RMS norm, up to one rank-one term in the backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of float32: a block and its temporary stay in a core's L2 cache


def _on_eager_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _LOW_PRECISION else x


def _rows_per_block(row_elements: int) -> int:
    return max(16, _BLOCK_ELEMENTS // max(1, row_elements))


def _affine_grads(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, *, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Sum of ``grad * normalised(x)`` and of ``grad`` over the rows, in float32, block by block."""
    grad, x, rstd = grad.flatten(0, -2), x.flatten(0, -2), rstd.reshape(-1, 1)
    d_weight = x.new_zeros(x.shape[-1], dtype=torch.float32) if weight else None
    d_bias = torch.zeros_like(d_weight) if bias and weight else None
    if bias and not weight:
        d_bias = x.new_zeros(x.shape[-1], dtype=torch.float32)
    rows = _rows_per_block(x.shape[-1])
    for start in range(0, x.shape[0], rows):
        block = slice(start, start + rows)
        g = grad[block].float()
        if d_bias is not None:
            d_bias += g.sum(0)
        if d_weight is not None:
            if mean is not None:
                normalised = (x[block] - mean.reshape(-1, 1)[block]).mul_(rstd[block])
            else:
                normalised = x[block] * rstd[block]
            d_weight += normalised.mul_(g).sum(0)
    return d_weight, d_bias


class _CpuLayerNorm(torch.autograd.Function):
    """Layer norm of a low-precision tensor with float32 weight and bias; exact sums in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        d_x = None
        if need_x:
            d_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, x.shape[-1:], mean, rstd, weight, None, [True, False, False]
            )[0]
        d_weight, d_bias = None, None
        if need_weight or need_bias:
            d_weight, d_bias = _affine_grads(grad, x, mean, rstd, weight=need_weight, bias=need_bias)
        return d_x, d_weight, d_bias, None


class _CpuRMSNorm(torch.autograd.Function):
    """RMS norm with a weight; saves the input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows_in = x.reshape(-1, width)
        wide = _upcast(weight)
        rstd = rows_in.new_empty((rows_in.shape[0], 1), dtype=wide.dtype)
        out = torch.empty_like(rows_in)
        rows = _rows_per_block(width)
        for start in range(0, rows_in.shape[0], rows):
            block = slice(start, start + rows)
            values = rows_in[block].to(wide.dtype)
            norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            rstd[block] = norm.square_().div_(width).add_(eps).rsqrt_()
            if values.dtype == out.dtype:
                torch.mul(values, rstd[block], out=out[block]).mul_(wide)
            else:
                out[block] = values.mul_(rstd[block]).mul_(wide)
        ctx.save_for_backward(x, weight, rstd)
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        width = x.shape[-1]
        grad, rows_in = grad.reshape(-1, width), x.reshape(-1, width)
        low_precision = x.dtype in _LOW_PRECISION
        d_x, d_weight = None, None
        if need_x or (need_weight and not low_precision):
            d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
                grad, rows_in, [width], torch.zeros_like(rstd), rstd, weight.to(rstd.dtype), None,
                [need_x, need_weight and not low_precision, False],
            )  # fmt: skip
        if need_x:
            # The layer-norm kernel also removes the mean of grad * weight; an RMS norm does not.
            removed = (grad @ weight.to(grad.dtype)).to(rstd.dtype).div_(width).unsqueeze(-1).mul_(rstd)
            d_x = d_x.add_(removed.to(d_x.dtype)).view(x.shape)
        if need_weight and low_precision:
            d_weight = _affine_grads(grad, rows_in, None, rstd, weight=True, bias=False)[0]
        return d_x, d_weight.to(weight.dtype) if d_weight is not None else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, statistics in float32."""
    if torch.compiler.is_compiling():
        wide = _upcast(x)
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normalised * weight).to(x.dtype)
    if x.device.type == "cpu":
        return _CpuRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension; ``weight`` and ``bias`` may be wider than ``x`` or both ``None``."""
    shape = x.shape[-1:]
    if torch.compiler.is_compiling():
        out = F.layer_norm(_upcast(x), shape, None, None, eps)
        if weight is not None:
            out = out * weight + bias
        return out.to(x.dtype)
    if x.device.type == "cpu" and x.dtype in _LOW_PRECISION:
        # Without a float32 weight the CPU kernel keeps its row statistics in x's precision for the backward.
        weight = x.new_ones(shape, dtype=torch.float32) if weight is None else weight.float()
        bias = x.new_zeros(shape, dtype=torch.float32) if bias is None else bias.float()
        return _CpuLayerNorm.apply(x, weight, bias, eps)
    if weight is not None:
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return F.layer_norm(x, shape, weight, bias, eps)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) * (1 + scale) + shift`` for ``x [B, L, D]`` and ``shift, scale [B, 1 or L, D]``."""
    if torch.compiler.is_compiling():
        normalised = F.layer_norm(_upcast(x), x.shape[-1:], None, None, eps)
        return (normalised * (1 + scale) + shift).to(x.dtype)
    if x.device.type == "cpu" and shift.shape[1] == 1:
        # One modulation per sample is the affine part of a layer norm: a single fused pass. A CPU pays nothing for
        # launching it once per sample.
        weights, biases = (1 + scale).flatten(1).unbind(0), shift.flatten(1).unbind(0)
        outs = [layer_norm(*sample, eps) for sample in zip(x.unbind(0), weights, biases, strict=True)]
        return outs[0].unsqueeze(0) if len(outs) == 1 else torch.stack(outs)
    normalised = layer_norm(x, None, None, eps)
    return torch.addcmul(normalised + shift.to(x.dtype), normalised, scale.to(x.dtype))


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """``x + y * gate`` for ``x, y [B, L, D]`` and ``gate [B, 1 or L, D]``."""
    if torch.compiler.is_compiling():
        return (_upcast(x) + _upcast(y) * gate).to(x.dtype)
    return torch.addcmul(x, y, gate.to(x.dtype))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # (1 + tanh(u)) / 2 = sigmoid(2u): compiled code computes an exponential in about half the time of a tanh.
    wide = _upcast(x)
    double_u = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(double_u)).to(x.dtype)


def _rotate(x_BLHE: Tensor, freqs: Tensor) -> Tensor:
    """Multiply the pairs of the last dimension by the complex ``freqs [L, 1, E/2]``; returns a contiguous tensor."""
    out = torch.empty(x_BLHE.shape, dtype=x_BLHE.dtype, device=x_BLHE.device)
    x_pairs, out_pairs = x_BLHE.unflatten(-1, (-1, 2)), out.unflatten(-1, (-1, 2))
    if x_BLHE.dtype not in _LOW_PRECISION:
        torch.mul(torch.view_as_complex(x_pairs), freqs.to(x_BLHE.dtype.to_complex()),
                  out=torch.view_as_complex(out_pairs))  # fmt: skip
        return out
    length = x_BLHE.shape[1]
    rows = length if x_BLHE.device.type != "cpu" else _rows_per_block(x_BLHE[:, :1].numel())
    for start in range(0, length, rows):
        block = slice(start, start + rows)
        turned = torch.view_as_complex(x_pairs[:, block].float()).mul_(freqs[block])
        out_pairs[:, block] = torch.view_as_real(turned)
    return out


class _Rotary(torch.autograd.Function):
    """The rotation as one complex product; nothing of the activations is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return _rotate(x, freqs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (freqs,) = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        return _rotate(grad, freqs.conj().resolve_conj()), None


def apply_rope(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate neighbouring pairs of ``x [B, L, heads, E]`` by ``freqs [L, E/2, 2]`` (cosine, sine)."""
    if not torch.compiler.is_compiling() and x.device.type in ("cpu", "cuda", "meta"):
        return _Rotary.apply(x, torch.view_as_complex(freqs).unsqueeze(1))
    even, odd = _upcast(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs.unsqueeze(1).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
