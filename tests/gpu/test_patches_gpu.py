"""The patch layer on a GPU: fused kernels against their references at real widths, and patches on a small model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.patches.wan import add_native_lora, make_inputs, make_model, manage, train, twins

pytestmark = pytest.mark.gpu

ROWS = 130
WIDTHS = (1536, 5120, 1000)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    out.backward(draw(*out.shape, seed=99).to(out.dtype))
    return [out.detach(), *(t.grad for t in inputs)]


def compare(fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """The fused kernel in the given types against the plain formula in float32, a few roundings apart."""
    eps = max(torch.finfo(t.dtype).eps for t in inputs)
    ours, exact = gradients(fused, inputs), gradients(plain, [t.float() for t in inputs])
    for mine, theirs in zip(ours, exact, strict=True):
        bound = 4 * eps * max(1.0, float(theirs.abs().max()))
        assert float((mine.float() - theirs).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("per_token", [False, True])
def test_modulation_and_gate(dim: int, per_token: bool, dtype: torch.dtype) -> None:
    from optim_patches.kernels import gate_residual, layernorm_modulate

    x, y = draw(2, ROWS, dim, dtype=dtype), draw(2, ROWS, dim, dtype=dtype, seed=1)
    first, second = (draw(2, ROWS if per_token else 1, dim, dtype=torch.float32, seed=s) for s in (2, 3))
    compare(layernorm_modulate.layernorm_modulate, layernorm_modulate.reference, [x, first, second])
    compare(gate_residual.gate_residual, gate_residual.reference, [x, y, first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "head"), [(1536, 128), (5120, 128), (960, 96)])
def test_rmsnorm_rope_and_gelu(dim: int, head: int, dtype: torch.dtype) -> None:
    from optim_patches.kernels import gelu_tanh, rmsnorm_rope

    angles = draw(ROWS, head // 2, dtype=torch.float32, seed=4)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    x, weight = draw(2, ROWS, dim, dtype=dtype), 1 + 0.1 * draw(dim, dtype=torch.float32, seed=5)
    compare(lambda a, w: rmsnorm_rope.rmsnorm_rope(a, w, table), lambda a, w: rmsnorm_rope.reference(a, w, table),
            [x, weight])  # fmt: skip
    compare(gelu_tanh.gelu_tanh, gelu_tanh.reference, [x])


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in inputs.items()}


@pytest.mark.parametrize("flags", [{"liger": True}, {"compile": True}, {"liger": True, "compile": True}],
                         ids=["liger", "compile", "both"])  # fmt: skip
def test_patches_keep_the_numbers(flags: dict[str, bool]) -> None:
    torch._dynamo.reset()
    exact = make_model(layers=2).cuda()
    plain, patched = twins(make_model(layers=2, dtype=torch.bfloat16).cuda())
    manager, _ = manage(patched, device="cuda", **flags)
    inputs = on_gpu(make_inputs())
    low = {key: value if key == "t" else value.bfloat16() for key, value in inputs.items()}
    truth = exact(**inputs)
    error = float((patched(**low).float() - truth).abs().max().detach())
    eager = float((plain(**low).float() - truth).abs().max().detach())
    assert error <= 1.5 * eager + torch.finfo(torch.bfloat16).eps
    assert all(outcome.state == "exercised" for outcome in manager.outcomes())
    torch._dynamo.reset()


def test_lora_training_with_everything_on() -> None:
    torch._dynamo.reset()
    model = make_model(layers=2)
    add_native_lora(model)
    model.enable_gradient_checkpointing()
    plain, patched = twins(model.cuda())
    manager, _ = manage(patched, device="cuda", liger=True, compile=True)
    expected, losses = train(plain, device="cuda"), train(patched, device="cuda")
    assert losses == pytest.approx(expected, rel=1e-4)
    manager.requested[-1].mark_warm()
    train(patched, steps=6, device="cuda")
    assert manager.outcome("compile").evidence.facts["recompiles_after_warmup"] == 0
    torch._dynamo.reset()
