"""``--checkpointing_*``: what is kept changes, the numbers do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.checkpointing import Plan, Sizes, is_attention, measure
from optim_patches.registry import PatchManager, PatchRefused
from tests.patches.wan import (
    ADAPTERS,
    SHAPES,
    assert_close,
    gradients,
    make_args,
    make_inputs,
    make_model,
    manage,
    train,
    trained,
    twins,
)
from tests.unit.real_runs import same_tensors

LAYERS = 4
KEEP = {"checkpointing_keep": "attention"}
HALF = {"checkpointing_fraction": 0.5}


def prepared(kind: str = "lora", *, layers: int = LAYERS, **dropouts: float) -> nn.Module:
    model = make_model(layers=layers)
    if kind != "full":
        ADAPTERS[kind](model, **dropouts)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_up" in name or "lora_B" in name:
                    parameter.normal_(std=0.1)
    model.enable_gradient_checkpointing()
    return model


def patched(model: nn.Module, **flags: Any) -> PatchManager:
    return manage(model, gradient_checkpointing=True, **flags)[0]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("full", KEEP), ("lora", HALF), ("lora", {**KEEP, **HALF}), ("full", {"checkpointing_budget_gb": 9e-5})],
    ids=["keep", "half", "both", "budget"],
)
def test_numbers_are_those_of_plain_checkpointing(kind, flags):
    plain, other = twins(prepared(kind))
    manager = patched(other, **flags)
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []
    assert train(other, steps=2) == train(plain, steps=2) and same_tensors(trained(other), trained(plain)) == []
    outcome = manager.outcome("checkpointing")
    assert outcome.state == "exercised" and len(outcome.applied.sites) == LAYERS
    manager.undo_all()
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []


def test_drop_outs_draw_the_same_numbers():
    dropouts = {"rank_dropout": 0.3, "module_dropout": 0.2, "dropout": 0.1}
    plain, other = twins(prepared(**dropouts))
    plain.train()
    other.train()
    patched(other, checkpointing_budget_gb=4e-5)
    found = []
    for model in (plain, other):
        torch.manual_seed(5)
        found.append(gradients(model, make_inputs()))
    assert same_tensors(*found) == []


@pytest.mark.parametrize("flags", [KEEP, {"checkpointing_budget_gb": 2e-5}], ids=["keep", "budget"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_under_autocast(flags, forwards):
    """The second forward could use casts of the adapters that the first one made; a recomputation could not."""
    plain, other = twins(prepared(layers=2))
    manager = patched(other, **flags)
    found = []
    for model in (plain, other):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = sum(model(**make_inputs(seed=seed)).float().square().mean() for seed in range(forwards))
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    if forwards == 1:
        assert same_tensors(*found) == []
    else:  # a shared cast adds the two gradients in bfloat16
        assert_close(found[1], found[0], dtype=torch.bfloat16, factor=2)
    assert manager.outcome("checkpointing").evidence.facts["calls_with_kept_attention"] > 0


def test_kept_attention_is_not_computed_again():
    """Counts what the backward runs, below the patch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.attention = self.all = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.all += 1
            self.attention += is_attention(func)
            return func(*args, **(kwargs or {}))

    counts = {}
    for name, flags in {"plain": None, "keep": KEEP, "half": HALF}.items():
        model = prepared("full")
        if flags:
            manager = patched(model, **flags)
        loss = model(**make_inputs()).square().mean()
        with Count() as count:
            loss.backward()
        counts[name] = count
    assert counts["plain"].attention == 2 * LAYERS and counts["keep"].attention == 0
    assert counts["half"].attention == LAYERS and counts["half"].all < counts["plain"].all
    assert manager.outcome("checkpointing").evidence.facts["calls_kept_whole"] == LAYERS // 2


def test_attention_to_the_prompt_is_computed_again():
    """12 tokens ask 8 of the prompt: only self-attention is kept."""
    model = prepared("full", layers=2)
    manager = patched(model, **KEEP)
    gradients(model, make_inputs(SHAPES[2]))
    assert manager.outcome("checkpointing").evidence.facts["kept_results"] == 2
    gradients(model, make_inputs(SHAPES[0]))
    assert manager.outcome("checkpointing").evidence.facts["kept_results"] == 2 + 4


def held(block: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes of storages that a block's graph keeps alive after its forward, weights and inputs aside."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(*inputs)
    for tensor in (*block.parameters(), *(value for value in inputs if value is not None)):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def block_inputs(model: nn.Module) -> tuple[Any, ...]:
    embedded = model.embed(**make_inputs())
    return embedded.tokens, embedded.e0, None, None, embedded.freqs, embedded.context


def test_measured_bytes_are_what_a_block_holds():
    model = prepared("full", layers=1)
    inputs = block_inputs(model)
    sizes = measure(model.blocks[0], inputs)
    assert sizes.whole == held(model.blocks[0], inputs)
    tokens, dim = 8, 24
    assert sizes.attention >= 2 * 2 * tokens * dim * 4  # two attentions (the prompt is as long), batch 2, fp32
    assert sizes.attention < sizes.whole


def test_budget_takes_attention_first_then_whole_blocks():
    plan = Plan(10, make_args(checkpointing_budget_gb=1e-9 * 1000))
    assert plan.fit(Sizes(whole=110, attention=200)) == (5, 0)
    assert plan.fit(Sizes(whole=110, attention=10)) == (10, 9)
    assert plan.fit(Sizes(whole=10, attention=1)) == (10, 10)
    assert plan.fit(Sizes(whole=400, attention=0)) == (0, 2)


def test_each_shape_has_a_plan_of_its_own():
    model = prepared(layers=2)
    manager = patched(model, checkpointing_budget_gb=1e-4)
    train(model, steps=3)
    evidence = manager.outcome("checkpointing").evidence
    assert len(evidence.facts["plans"]) == 2  # three shapes, two numbers of tokens
    assert "input 2x8x24" in evidence.summary


def test_off_changes_nothing():
    model = prepared(layers=2)
    function = model._gradient_checkpointing_func
    manage(model, gradient_checkpointing=True)
    assert model._gradient_checkpointing_func is function


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"gradient_checkpointing": False, **KEEP}, "that flag is missing.*--gradient_checkpointing --checkpointing_k"),
        ({"checkpointing_fraction": 1.5}, "1.5 is no share of the blocks"),
        ({"checkpointing_fraction": 1.0}, "1 is plain --gradient_checkpointing"),
        ({"checkpointing_budget_gb": 1.0, **HALF}, "chooses by itself"),
        ({"checkpointing_budget_gb": -1.0}, "chooses by itself"),
        ({**KEEP, "compile": True, "compile_scope": "whole"}, "--compile_scope regional"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(PatchRefused, match=text):
        manage(prepared(layers=1), **{"gradient_checkpointing": True, **flags})


def test_attention_that_hides_in_a_kernel_is_reported(monkeypatch):
    monkeypatch.setattr("optim_patches.checkpointing._ATTENTION_OPS", ("no_such_kernel",))
    model = prepared(layers=1)
    manager = patched(model, **KEEP)
    gradients(model, make_inputs())
    outcome = manager.outcome("checkpointing")
    assert outcome.state == "inert" and "no operator that can be kept" in outcome.evidence.summary


def test_a_network_without_checkpointing_is_inert():
    manager = patched(nn.Linear(3, 3), **KEEP)
    outcome = manager.outcome("checkpointing")
    assert outcome.state == "inert" and "checkpoints its blocks" in outcome.evidence.summary
