"""LayerNorm without parameters, followed by modulation: ``norm(x) * (1 + scale) + shift``, in one pass over memory.

Eager PyTorch reads and writes the activations four times for this. The kernel reads ``x`` once and writes the result
once. Backward reads ``x`` and the incoming gradient, recomputes the normalized row from the saved mean and inverse
deviation, and writes the gradient of ``x``; gradients of ``shift`` and ``scale`` are made only when asked for.
All arithmetic is float32; the result has the dtype of ``x``.
"""

from __future__ import annotations

import torch

from optim_patches.kernels import load_triton
from optim_patches.kernels.rowwise import (
    block_and_warps,
    fold,
    is_per_token,
    modulation_BLD,
    programs_per_sample,
    rows_BLD,
)

triton, tl = load_triton()


def reference(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The same in plain PyTorch."""
    normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


def layernorm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``layer_norm(x) * (1 + scale) + shift`` for ``x [B, L, D]`` and modulation ``[B, 1, D]`` or ``[B, L, D]``."""
    return LayerNormModulate.apply(x, shift, scale, eps)


@triton.jit
def _forward(
    x_ptr, shift_ptr, scale_ptr, y_ptr, mean_ptr, rstd_ptr, length, shift_b, shift_l, scale_b, scale_l, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, token = tl.program_id(0), tl.program_id(1)
    row = (sample * length + token).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    x = tl.load(x_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / DIM + eps)
    shift = tl.load(shift_ptr + sample * shift_b + token * shift_l + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + sample * scale_b + token * scale_l + cols, mask=mask, other=0.0).to(tl.float32)
    y = centred * rstd * (1.0 + scale) + shift
    tl.store(y_ptr + row * DIM + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, dscale_ptr,
    length, scale_b, scale_l, grad_b, grad_l, programs,
    DIM: tl.constexpr, BLOCK: tl.constexpr, WANT_SCALE: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    sample, program = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    sum_shift = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_scale = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(program, length, programs):
        row = (sample * length + token).to(tl.int64)
        x = tl.load(x_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + sample * scale_b + token * scale_l + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        g = dy * (1.0 + scale)
        along = tl.sum(g * normed, axis=0) / DIM
        dx = rstd * (g - tl.sum(g, axis=0) / DIM - normed * along)
        tl.store(dx_ptr + row * DIM + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANT_SCALE:
            if PER_TOKEN:
                at = sample * grad_b + token * grad_l + cols
                tl.store(dscale_ptr + at, (dy * normed).to(dscale_ptr.dtype.element_ty), mask=mask)
            else:
                sum_shift += dy
                sum_scale += dy * normed
    if WANT_SCALE:
        if not PER_TOKEN:
            at = sample * grad_b + program * grad_l + cols
            tl.store(dshift_ptr + at, sum_shift, mask=mask)
            tl.store(dscale_ptr + at, sum_scale, mask=mask)


class LayerNormModulate(torch.autograd.Function):
    """Autograd around the two kernels."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        rows = rows_BLD(x)
        batch, length, dim = rows.shape
        shift_rows, scale_rows = modulation_BLD(shift, rows), modulation_BLD(scale, rows)
        y = torch.empty_like(rows)
        mean = torch.empty(batch, length, dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
        block, warps = block_and_warps(dim)
        _forward[(batch, length)](
            rows, shift_rows, scale_rows, y, mean, rstd, length, shift_rows.stride(0), shift_rows.stride(1),
            scale_rows.stride(0), scale_rows.stride(1), eps, DIM=dim, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(rows, shift, scale, mean, rstd)
        ctx.x_shape = x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        rows, shift, scale, mean, rstd = ctx.saved_tensors
        x_shape = ctx.x_shape
        batch, length, dim = rows.shape
        dy_rows = dy.reshape(rows.shape).contiguous()
        scale_rows = modulation_BLD(scale, rows)
        want = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        per_token = is_per_token(scale, rows)
        programs = programs_per_sample(rows)
        dx = torch.empty_like(rows)
        size = (batch, length if per_token else programs, dim) if want else (1, 1, 1)
        dscale = torch.empty(size, dtype=scale.dtype if per_token else torch.float32, device=rows.device)
        dshift = torch.empty_like(dscale) if want and not per_token else dscale
        block, warps = block_and_warps(dim)
        _backward[(batch, programs)](
            dy_rows, rows, scale_rows, mean, rstd, dx, dshift, dscale, length, scale_rows.stride(0),
            scale_rows.stride(1), dscale.stride(0), dscale.stride(1), programs, DIM=dim, BLOCK=block,
            WANT_SCALE=want, PER_TOKEN=per_token, num_warps=warps,
        )  # fmt: skip
        if not want:
            return dx.view(x_shape), None, None, None
        total_shift = dy_rows if per_token else dshift.sum(1, keepdim=True)
        total_scale = dscale if per_token else dscale.sum(1, keepdim=True)
        return dx.view(x_shape), fold(total_shift, shift), fold(total_scale, scale), None
