"""Gated residual: ``x + y * gate`` in one pass.

``x`` is the residual stream, ``y`` a branch's output, ``gate`` is ``[B, 1, D]`` or ``[B, L, D]``. The gradient of
``x`` is the incoming gradient itself and costs nothing; the kernel writes ``dy = grad * gate`` and, when asked for, the
gate's. Arithmetic is float32, the result has the dtype of ``x``.
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


def reference(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch."""
    return (x.float() + y.float() * gate.float()).to(x.dtype)


def gate_residual(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x + y * gate`` for ``x, y [B, L, D]`` and a gate ``[B, 1, D]`` or ``[B, L, D]``."""
    return GateResidual.apply(x, y, gate)


@triton.jit
def _forward(x_ptr, y_ptr, gate_ptr, out_ptr, length, gate_b, gate_l, DIM: tl.constexpr, BLOCK: tl.constexpr):
    sample, token = tl.program_id(0), tl.program_id(1)
    row = (sample * length + token).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    x = tl.load(x_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_b + token * gate_l + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + cols, (x + y * gate).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_ptr, y_ptr, gate_ptr, dy_ptr, dgate_ptr, length, gate_b, gate_l, sum_b, sum_l, programs,
    DIM: tl.constexpr, BLOCK: tl.constexpr, WANT_GATE: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    sample, program = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(program, length, programs):
        row = (sample * length + token).to(tl.int64)
        grad = tl.load(grad_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + sample * gate_b + token * gate_l + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dy_ptr + row * DIM + cols, (grad * gate).to(dy_ptr.dtype.element_ty), mask=mask)
        if WANT_GATE:
            y = tl.load(y_ptr + row * DIM + cols, mask=mask, other=0.0).to(tl.float32)
            if PER_TOKEN:
                at = sample * sum_b + token * sum_l + cols
                tl.store(dgate_ptr + at, (grad * y).to(dgate_ptr.dtype.element_ty), mask=mask)
            else:
                total += grad * y
    if WANT_GATE:
        if not PER_TOKEN:
            tl.store(dgate_ptr + sample * sum_b + program * sum_l + cols, total, mask=mask)


class GateResidual(torch.autograd.Function):
    """Autograd around the two kernels."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x_rows, y_rows = rows_BLD(x), rows_BLD(y)
        batch, length, dim = x_rows.shape
        gate_rows = modulation_BLD(gate, x_rows)
        out = torch.empty_like(x_rows)
        block, warps = block_and_warps(dim)
        _forward[(batch, length)](
            x_rows, y_rows, gate_rows, out, length, gate_rows.stride(0), gate_rows.stride(1),
            DIM=dim, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        # The branch output is needed for the gate's gradient only: frozen gates keep nothing but themselves.
        ctx.save_for_backward(gate, y_rows if ctx.needs_input_grad[2] else None)
        ctx.like = (y.shape, y.dtype, x_rows.shape)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        gate, y_rows = ctx.saved_tensors
        y_shape, y_dtype, shape = ctx.like
        batch, length, dim = shape
        rows = grad.reshape(shape).contiguous()
        gate_rows = modulation_BLD(gate, rows)
        want = y_rows is not None
        per_token = is_per_token(gate, rows)
        programs = programs_per_sample(rows)
        dy = torch.empty(shape, dtype=y_dtype, device=rows.device)
        size = (batch, length if per_token else programs, dim) if want else (1, 1, 1)
        dgate = torch.empty(size, dtype=gate.dtype if per_token else torch.float32, device=rows.device)
        block, warps = block_and_warps(dim)
        _backward[(batch, programs)](
            rows, y_rows if want else rows, gate_rows, dy, dgate, length, gate_rows.stride(0), gate_rows.stride(1),
            dgate.stride(0), dgate.stride(1), programs, DIM=dim, BLOCK=block, WANT_GATE=want, PER_TOKEN=per_token,
            num_warps=warps,
        )  # fmt: skip
        if want:
            total = dgate if per_token else dgate.sum(1, keepdim=True)
            return grad, dy.view(y_shape), fold(total, gate)
        return grad, dy.view(y_shape), None
