"""RMSNorm over the whole width, then rotary embedding per head, for queries and keys.

``x`` is ``[B, L, D]`` with ``D = heads * head_dim``. ``freqs [L, head_dim / 2, 2]`` (or with a leading ``B``) holds
cosine and sine, and neighbouring pairs turn: ``(a, b) -> (a cos - b sin, a sin + b cos)``. Each program holds one row
as its even and its odd values. Backward turns the gradient back, then applies the backward of the norm. Arithmetic is
float32, the result has the dtype of ``x``.
"""

from __future__ import annotations

import torch

from optim_patches.kernels import load_triton
from optim_patches.kernels.rowwise import block_and_warps, programs_per_sample, rows_BLD

triton, tl = load_triton()


def reference(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The same in plain PyTorch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    even, odd = normed.unflatten(-1, (-1, freqs.shape[-2], 2)).unbind(-1)
    cos, sin = freqs.float().unsqueeze(-3).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-3).to(x.dtype)


def rmsnorm_rope(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``rope(rms_norm(x) * weight)`` for ``x [B, L, D]``."""
    return RMSNormRope.apply(x, weight, freqs, eps)


@triton.jit
def _forward(
    x_ptr, weight_ptr, freqs_ptr, y_ptr, rstd_ptr, length, table_b, table_l, eps,
    DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, token = tl.program_id(0), tl.program_id(1)
    row = (sample * length + token).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < DIM // 2
    base = x_ptr + row * DIM + 2 * pair
    even = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(base + 1, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt((tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0)) / DIM + eps)
    even = even * rstd * tl.load(weight_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    odd = odd * rstd * tl.load(weight_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    turn = freqs_ptr + sample * table_b + token * table_l + 2 * (pair % PAIRS)
    cos = tl.load(turn, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(turn + 1, mask=mask, other=0.0).to(tl.float32)
    out = y_ptr + row * DIM + 2 * pair
    tl.store(out, (even * cos - odd * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(out + 1, (even * sin + odd * cos).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(
    dy_ptr, x_ptr, weight_ptr, freqs_ptr, rstd_ptr, dx_ptr, dweight_ptr, length, table_b, table_l, programs,
    DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, WANT_WEIGHT: tl.constexpr,
):  # fmt: skip
    sample, program = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    mask = pair < DIM // 2
    w_even = tl.load(weight_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    w_odd = tl.load(weight_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    sum_even = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_odd = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(program, length, programs):
        row = (sample * length + token).to(tl.int64)
        turn = freqs_ptr + sample * table_b + token * table_l + 2 * (pair % PAIRS)
        cos = tl.load(turn, mask=mask, other=1.0).to(tl.float32)
        sin = tl.load(turn + 1, mask=mask, other=0.0).to(tl.float32)
        base = row * DIM + 2 * pair
        dy_even = tl.load(dy_ptr + base, mask=mask, other=0.0).to(tl.float32)
        dy_odd = tl.load(dy_ptr + base + 1, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        x_even = tl.load(x_ptr + base, mask=mask, other=0.0).to(tl.float32) * rstd
        x_odd = tl.load(x_ptr + base + 1, mask=mask, other=0.0).to(tl.float32) * rstd
        g_even = dy_even * cos + dy_odd * sin
        g_odd = dy_odd * cos - dy_even * sin
        if WANT_WEIGHT:
            sum_even += g_even * x_even
            sum_odd += g_odd * x_odd
        g_even = g_even * w_even
        g_odd = g_odd * w_odd
        along = (tl.sum(g_even * x_even, axis=0) + tl.sum(g_odd * x_odd, axis=0)) / DIM
        tl.store(dx_ptr + base, (rstd * (g_even - x_even * along)).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + base + 1, (rstd * (g_odd - x_odd * along)).to(dx_ptr.dtype.element_ty), mask=mask)
    if WANT_WEIGHT:
        at = dweight_ptr + (sample * programs + program) * DIM + 2 * pair
        tl.store(at, sum_even, mask=mask)
        tl.store(at + 1, sum_odd, mask=mask)


class RMSNormRope(torch.autograd.Function):
    """Autograd around the two kernels. The table is a constant."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
        rows = rows_BLD(x)
        batch, length, dim = rows.shape
        _check_table(rows, freqs)
        table = freqs.contiguous()
        table_b = table.stride(0) if table.dim() == 4 and table.shape[0] > 1 else 0
        y = torch.empty_like(rows)
        rstd = torch.empty(batch, length, dtype=torch.float32, device=x.device)
        block, warps = block_and_warps(dim // 2)
        pairs = table.shape[-2]
        _forward[(batch, length)](
            rows, weight, table, y, rstd, length, table_b, 2 * pairs, eps,
            DIM=dim, PAIRS=pairs, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, table, rstd)
        ctx.table_b, ctx.x_shape = table_b, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        rows, weight, table, rstd = ctx.saved_tensors
        batch, length, dim = rows.shape
        dy_rows = dy.reshape(rows.shape).contiguous()
        want = ctx.needs_input_grad[1]
        programs = programs_per_sample(rows)
        dx = torch.empty_like(rows)
        dweight = torch.empty((batch, programs, dim) if want else (1,), dtype=torch.float32, device=rows.device)
        block, warps = block_and_warps(dim // 2)
        pairs = table.shape[-2]
        _backward[(batch, programs)](
            dy_rows, rows, weight, table, rstd, dx, dweight, length, ctx.table_b, 2 * pairs, programs,
            DIM=dim, PAIRS=pairs, BLOCK=block, WANT_WEIGHT=want, num_warps=warps,
        )  # fmt: skip
        total = dweight.sum((0, 1)).to(weight.dtype) if want else None
        return dx.view(ctx.x_shape), total, None, None


def _check_table(rows_BLD: torch.Tensor, freqs: torch.Tensor) -> None:
    batch, length, dim = rows_BLD.shape
    fits = freqs.dim() in (3, 4) and freqs.shape[-1] == 2 and freqs.shape[-3] == length
    if not fits or dim % (2 * freqs.shape[-2]) or (freqs.dim() == 4 and freqs.shape[0] not in (1, batch)):
        raise ValueError(f"A RoPE table {tuple(freqs.shape)} does not fit rows {tuple(rows_BLD.shape)}.")
