"""A tiny Wan transformer for the patch tests: inputs, adapters and a short training run."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from optim_patches.base import Target
from optim_patches.registry import PatchManager, all_flags
from videox_fun.models.wan_transformer3d import WanTransformer3DModel

SHAPES = ((2, 4, 4), (1, 4, 8), (3, 4, 4))


def make_model(*, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """Width 24, two heads; the head's zero weights are filled, so that gradients reach every block."""
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        model_type="t2v", in_dim=4, out_dim=4, dim=24, ffn_dim=48, freq_dim=32, text_dim=16, text_len=8, num_heads=2,
        num_layers=layers, cross_attn_norm=True,
    )  # fmt: skip
    with torch.no_grad():
        nn.init.normal_(model.head.head.weight, std=0.1)
    return model.to(dtype)


def make_inputs(
    shape: Sequence[int] = SHAPES[0], *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 4, *shape, generator=generator).to(dtype),
        "t": torch.rand(batch, generator=generator) * 1000,
        "context": torch.randn(batch, 6, 16, generator=generator).to(dtype),
    }


def add_native_lora(model: nn.Module, **dropouts: float) -> None:
    from videox_fun.utils.lora_utils import create_network

    torch.manual_seed(1)
    network = create_network(1.0, 4, 4, None, model, target_name="q,k,v,ffn.0,ffn.2", **dropouts)
    model.requires_grad_(False)
    network.apply_to(None, model, False, True)
    network.requires_grad_(True)
    model.network = network


def add_peft_lora(model: nn.Module, **_: float) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(1)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=["q", "k", "v", "ffn.0", "ffn.2"]), model)


ADAPTERS: dict[str, Callable[..., None]] = {"lora": add_native_lora, "peft": add_peft_lora}


def make_args(**values: Any) -> argparse.Namespace:
    """The patches' flags at their defaults, except for ``values``, which count as given."""
    args = argparse.Namespace(**{flag.dest: flag.default for flag in all_flags()})
    for key, value in values.items():
        setattr(args, key, value)
    args.explicit = frozenset(values)
    return args


def manage(model: nn.Module, *, device: str = "cpu", **flags: Any) -> tuple[PatchManager, Target]:
    """Preflight and all stages on one model, as the trainer does."""
    from optim_patches.base import Stage

    args = make_args(**flags)
    target = Target(args, device=device)
    manager = PatchManager(args)
    manager.preflight(target)
    target.models["transformer"] = model
    for stage in Stage:
        manager.run_stage(stage, target)
    return manager, target


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of every trainable tensor for one batch."""
    model.zero_grad(set_to_none=True)
    model(**inputs).float().pow(2).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module, *, steps: int = 20, accumulate: int = 1, batch: int = 2, shapes: Sequence[Sequence[int]] = SHAPES,
    lr: float = 1e-3, device: str = "cpu",
) -> list[float]:  # fmt: skip
    """SGD with momentum on reproducible batches of changing shape; returns the losses.

    Not Adam: dividing by the root of tiny second moments would magnify rounding differences without bound.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            number = step * accumulate + micro
            inputs = make_inputs(shapes[number % len(shapes)], seed=number, batch=batch, dtype=dtype)
            inputs = {key: value.to(device) for key, value in inputs.items()}
            loss = (model(**inputs).float() - 1).pow(2).mean() / accumulate
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and an equal copy."""
    return model, copy.deepcopy(model)


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, dtype: torch.dtype, factor: float
) -> None:
    """Each tensor within ``factor`` roundings of its own largest value."""
    assert actual.keys() == expected.keys() and actual
    eps = torch.finfo(dtype).eps
    for name, value in expected.items():
        bound = factor * eps * max(float(value.abs().max()), 1e-3)
        error = float((actual[name].float() - value.float()).abs().max())
        assert error <= bound, f"{name}: off by {error:.3g}, allowed {bound:.3g}"
