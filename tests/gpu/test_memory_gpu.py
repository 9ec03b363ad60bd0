"""Streams, events, page-locked memory and CUDA graphs for real: numbers equal, memory falls, copies run beside work.

Attention runs as plain matrix products, so that two runs of the same work agree bit for bit. Each test prints what it
measured; run with ``-s`` to see it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.registry import PatchManager
from tests.patches.wan import ADAPTERS, add_native_lora, manage, twins
from videox_fun.models.wan_transformer3d import WanTransformer3DModel

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LAYERS, DIM = 8, 1024
SHAPE = (4, 48, 64)  # 3072 tokens
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    gc.collect()
    torch.cuda.empty_cache()
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch._dynamo.reset()


def make(kind: str = "lora", *, layers: int = LAYERS, dim: int = DIM, checkpointing: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        model_type="t2v", in_dim=4, out_dim=4, dim=dim, ffn_dim=4 * dim, freq_dim=32, text_dim=16, text_len=32,
        num_heads=dim // 64, num_layers=layers, cross_attn_norm=True,
    ).to(DTYPE)  # fmt: skip
    with torch.no_grad():
        nn.init.normal_(model.head.head.weight, std=0.1)
    ADAPTERS[kind](model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_up" in name or "lora_B" in name:
                parameter.normal_(std=0.1)
    model.to(DTYPE)
    if checkpointing:
        model.enable_gradient_checkpointing()
    return model.train()


def inputs(shape: tuple[int, ...] = SHAPE, *, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "x": torch.randn(1, 4, *shape, generator=generator).to(DTYPE),
        "t": torch.rand(1, generator=generator) * 1000,
        "context": torch.randn(1, 32, 16, generator=generator).to(DTYPE),
    }
    return {key: value.to(DEVICE) for key, value in values.items()}


def gradients(model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**inputs(**kwargs)).float().pow(2).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, share: float = 0.05) -> None:
    """For kernels that add in no fixed order, or that a library may choose anew."""
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= share * float(value.abs().max()) + 1e-8, name


def peak(model: nn.Module) -> tuple[int, float]:
    """Peak bytes and seconds of a step, after two that warm up."""
    for seed in range(2):
        gradients(model, seed=seed)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    gradients(model)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), time.perf_counter() - start


def prepared(kind: str = "lora", **flags: Any) -> tuple[PatchManager, nn.Module]:
    """As a run does it: patched on the host, then moved."""
    model = make(kind, checkpointing=flags.pop("checkpointing", True))
    manager, _ = manage(model, device=DEVICE, gradient_checkpointing=model.gradient_checkpointing, **flags)
    return manager, model.to(DEVICE)


def report(name: str, **values: Any) -> None:
    print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in values.items()))


def reference(kind: str = "lora") -> tuple[dict[str, torch.Tensor], int, float]:
    model = make(kind).to(DEVICE)
    expected = gradients(model)
    bytes_, seconds = peak(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return {name: value.cpu() for name, value in expected.items()}, bytes_, seconds


def on_host(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("kind", ["lora", "peft"])
def test_block_swap(kind: str) -> None:
    expected, before, plain_s = reference(kind)
    manager, model = prepared(kind, block_swap=6)
    assert_same(on_host(gradients(model)), expected)
    after, seconds = peak(model)
    facts = manager.outcome("block_swap").evidence.facts
    saved = facts["host_bytes"] - facts["device_bytes"]
    report("block swap", peak_MB=f"{before >> 20} -> {after >> 20}", ms=f"{plain_s * 1e3:.1f} -> {seconds * 1e3:.1f}",
           **facts)  # fmt: skip
    assert before - after > 0.8 * saved and facts["late_copies"] == 1
    manager.undo_all()
    assert_same(on_host(gradients(model)), expected)


def test_block_swap_compiled() -> None:
    manager, model = prepared(block_swap=6, compile=True)
    plain = make().to(DEVICE)
    manage(plain, device=DEVICE, compile=True)
    assert_same(gradients(model), gradients(plain))
    assert {outcome.state for outcome in manager.outcomes()} == {"exercised"}


def test_block_swap_with_fp8_storage() -> None:
    found = []
    for number in (0, 6):
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            model_type="t2v", in_dim=4, out_dim=4, dim=512, ffn_dim=2048, freq_dim=32, text_dim=16, text_len=32,
            num_heads=8, num_layers=LAYERS, cross_attn_norm=True,
        ).to(DTYPE)  # fmt: skip
        with torch.no_grad():
            nn.init.normal_(model.head.head.weight, std=0.1)
        manager, target = manage(model, device=DEVICE, fp8_base=True)
        add_native_lora(model)
        model.enable_gradient_checkpointing()
        if number:
            manage(model, device=DEVICE, gradient_checkpointing=True, block_swap=number)
        model.to(DEVICE).network.to(DTYPE)
        found.append(gradients(model))
    assert_same(*found)


def test_activation_offload() -> None:
    expected, before, plain_s = reference()
    manager, model = prepared(activation_offload=True)
    assert_same(on_host(gradients(model)), expected)
    after, seconds = peak(model)
    facts = manager.outcome("activation_offload").evidence.facts
    report("activation offload", peak_MB=f"{before >> 20} -> {after >> 20}",
           ms=f"{plain_s * 1e3:.1f} -> {seconds * 1e3:.1f}", **facts)  # fmt: skip
    tokens = SHAPE[0] * SHAPE[1] * SHAPE[2] // 4
    assert before - after > (LAYERS - 5) * tokens * DIM * DTYPE.itemsize and facts["ahead"] > 3 * facts["late"]
    manager.undo_all()
    assert_same(on_host(gradients(model)), expected)


@pytest.mark.parametrize("flags", [{"checkpointing_keep": "attention"}, {"checkpointing_fraction": 0.5},
                                   {"checkpointing_budget_gb": 1.0}], ids=["keep", "half", "budget"])  # fmt: skip
def test_checkpointing(flags: dict[str, Any]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        plain = make().to(DEVICE)
        expected = gradients(plain)
        before, plain_s = peak(plain)
        del plain
        manager, model = prepared(**flags)
        found = gradients(model)
        after, seconds = peak(model)
    assert_near(found, expected)
    outcome = manager.outcome("checkpointing")
    report(str(flags), peak_MB=f"{before >> 20} -> {after >> 20}", ms=f"{plain_s * 1e3:.1f} -> {seconds * 1e3:.1f}",
           evidence=outcome.evidence.summary)  # fmt: skip
    assert outcome.state == "exercised" and after > before


SMALL = (2, 16, 16)  # 128 tokens: launches dominate


def step_ms(model: nn.Module, **kwargs: Any) -> float:
    for _ in range(3):
        gradients(model, **kwargs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        gradients(model, **kwargs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 200


def test_cuda_graph() -> None:
    plain, model = twins(make(checkpointing=False).to(DEVICE))
    manager, _ = manage(model, device=DEVICE, cuda_graph=True)
    shapes = (SMALL, (2, 16, 24), SMALL)
    grown = []
    for number, shape in enumerate(shapes):
        reserved = torch.cuda.memory_reserved()
        assert_near(gradients(model, shape=shape, seed=number), gradients(plain, shape=shape, seed=number))
        grown.append((torch.cuda.memory_reserved() - reserved) >> 20)
    report("cuda graph", ms=f"{step_ms(plain, shape=SMALL):.2f} -> {step_ms(model, shape=SMALL):.2f}",
           reserved_MB_per_shape=grown, evidence=manager.outcome("cuda_graph").evidence.summary)  # fmt: skip
    facts = manager.outcome("cuda_graph").evidence.facts
    assert facts["captures"] == 2 and facts["replays"] == len(shapes) + 8 and not facts["without_graph"]
    manager.undo_all()
    assert_near(gradients(model, shape=SMALL), gradients(plain, shape=SMALL))


def test_cuda_graph_with_drop_outs_and_autocast() -> None:
    model = make(checkpointing=False).to(DEVICE)
    manager, _ = manage(model, device=DEVICE, cuda_graph=True)
    model.network.float()
    for lora in model.network.unet_loras:
        lora.dropout, lora.module_dropout = 0.3, 0.2
    found = []
    with torch.autocast(DEVICE, dtype=DTYPE):
        for _ in range(3):
            found.append(gradients(model, shape=SMALL))
    assert manager.outcome("cuda_graph").evidence.facts["replays"] == 3
    differs = [name for name in found[1] if not torch.equal(found[1][name], found[2][name])]
    assert differs, "the same drop-outs were replayed"


def test_cuda_graph_of_the_compiler() -> None:
    plain, model = twins(make(checkpointing=False).to(DEVICE))
    manager, _ = manage(model, device=DEVICE, cuda_graph=True, compile=True)
    for number in range(4):
        found, expected = gradients(model, shape=SMALL, seed=number), gradients(plain, shape=SMALL, seed=number)
    assert_near(found, expected, share=0.1)
    report("cuda graph of the compiler", ms=f"{step_ms(plain, shape=SMALL):.2f} -> {step_ms(model, shape=SMALL):.2f}",
           evidence=manager.outcome("cuda_graph").evidence.summary)  # fmt: skip
    assert {outcome.state for outcome in manager.outcomes()} == {"exercised"}
