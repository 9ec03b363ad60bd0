"""Our Triton kernels against their references, in Triton's interpreter: values and every gradient, odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from optim_patches.kernels import gate_residual, gelu_tanh, layernorm_modulate, rmsnorm_rope

SIZES = ((2, 3, 48), (1, 5, 30), (2, 1, 130))
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(
    fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: list[torch.Tensor], trained: int
) -> None:
    """Equal results and gradients of the first ``trained`` inputs, within a few roundings of the coarsest dtype."""
    ours = [t.clone().requires_grad_(i < trained) for i, t in enumerate(inputs)]
    wide = [t.float().clone().requires_grad_(i < trained) for i, t in enumerate(inputs)]
    out, expected = fused(*ours), plain(*wide)
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape
    weight = draw(*out.shape, seed=9).to(out.dtype)
    out.backward(weight)
    expected.backward(weight.float())
    eps = max(torch.finfo(t.dtype).eps for t in inputs)
    check(out, expected, eps)
    for mine, theirs in zip(ours[:trained], wide[:trained], strict=True):
        assert mine.grad.dtype == mine.dtype
        check(mine.grad, theirs.grad, eps)
    assert all(t.grad is None for t in ours[trained:])


def check(actual: torch.Tensor, expected: torch.Tensor, eps: float) -> None:
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((actual.detach().float() - expected.detach()).abs().max()) <= 8 * eps * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["sample", "token", "shared"])
def test_layernorm_modulate(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    batch, length, dim = size
    shape = {"sample": (batch, 1, dim), "token": (batch, length, dim), "shared": (1, 1, dim)}[kind]
    inputs = [draw(*size, dtype=dtype), draw(*shape, seed=1), draw(*shape, seed=2)]
    compare(layernorm_modulate.layernorm_modulate, layernorm_modulate.reference, inputs, 3)


def test_frozen_modulation_gets_no_gradient() -> None:
    inputs = [draw(2, 3, 48), draw(2, 1, 48, seed=1), draw(2, 1, 48, seed=2)]
    compare(layernorm_modulate.layernorm_modulate, layernorm_modulate.reference, inputs, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["sample", "token", "shared"])
def test_gate_residual(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    batch, length, dim = size
    shape = {"sample": (batch, 1, dim), "token": (batch, length, dim), "shared": (1, 1, dim)}[kind]
    inputs = [draw(*size, dtype=dtype), draw(*size, dtype=dtype, seed=1), draw(*shape, seed=2)]
    compare(gate_residual.gate_residual, gate_residual.reference, inputs, 3)


def test_frozen_gate_keeps_no_branch_output() -> None:
    x, y = draw(1, 2, 32).requires_grad_(), draw(1, 2, 32, seed=1).requires_grad_()
    out = gate_residual.gate_residual(x, y, draw(1, 1, 32, seed=2))
    kept = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert [tuple(t.shape) for t in kept] == [(1, 1, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(2, 3, 48, 12), (1, 5, 30, 10), (1, 2, 132, 44)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rmsnorm_rope(size: tuple[int, int, int, int], per_sample: bool, dtype: torch.dtype) -> None:
    batch, length, dim, head = size
    shape = (batch, length, head // 2) if per_sample else (length, head // 2)
    angles = draw(*shape, seed=1)
    freqs = torch.stack([angles.cos(), angles.sin()], dim=-1)
    inputs = [draw(batch, length, dim, dtype=dtype), 1 + 0.1 * draw(dim, seed=2), freqs]
    compare(rmsnorm_rope.rmsnorm_rope, rmsnorm_rope.reference, inputs, 2)


def test_a_table_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"RoPE table \(4, 6, 2\) does not fit rows \(1, 3, 24\)"):
        rmsnorm_rope.rmsnorm_rope(draw(1, 3, 24), torch.ones(24), torch.ones(4, 6, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 7), (2, 3, 700)])
def test_gelu_tanh(size: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(gelu_tanh.gelu_tanh, gelu_tanh.reference, [3 * draw(*size, dtype=dtype)], 1)


def test_rows_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        gate_residual.gate_residual(*(torch.zeros(1, 1, 20000) for _ in range(3)))


def test_a_non_contiguous_input_is_read_right() -> None:
    x = draw(2, 48, 3).transpose(1, 2)
    shift = draw(2, 6, 48, seed=1)[:, 2:3]
    expected = layernorm_modulate.reference(x, shift, shift)
    assert torch.allclose(layernorm_modulate.layernorm_modulate(x, shift, shift), expected, atol=1e-5)
