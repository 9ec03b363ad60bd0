"""``--activation_offload`` on a device of ordinary memory: what comes back is what left, and it did leave."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.offload_store import OffloadStore
from optim_patches.registry import PatchManager, PatchRefused
from tests.patches import fake_device
from tests.patches.fake_device import FakeTransfers
from tests.patches.wan import ADAPTERS, gradients, make_inputs, make_model, manage, train, trained, twins
from tests.unit.real_runs import same_tensors

LAYERS = 4
TINY = {"activation_offload": True, "activation_offload_min_mb": 1e-4}


@pytest.fixture(autouse=True)
def devices(monkeypatch) -> list[FakeTransfers]:
    return fake_device.install(monkeypatch)


def prepared(kind: str = "lora", *, layers: int = LAYERS) -> nn.Module:
    model = make_model(layers=layers)
    if kind != "full":
        ADAPTERS[kind](model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_up" in name or "lora_B" in name:
                    parameter.normal_(std=0.1)
    model.enable_gradient_checkpointing()
    return model


def offload(model: nn.Module, **flags: Any) -> PatchManager:
    return manage(model, **{"gradient_checkpointing": True, **TINY, **flags})[0]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_numbers_are_those_without_it(kind, devices):
    plain, other = twins(prepared(kind))
    manager = offload(other)
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []
    assert train(other, steps=4) == train(plain, steps=4) and same_tensors(trained(other), trained(plain)) == []
    outcome = manager.outcome("activation_offload")
    facts = outcome.evidence.facts
    assert outcome.state == "exercised" and len(outcome.applied.sites) == LAYERS
    assert facts["ahead"] > 2 * facts["late"]  # late in the first step, when nobody knows yet what blocks share
    assert facts["tensors"] >= 5 * LAYERS and facts["bytes_back"] < facts["bytes_out"]
    buffers = [buffer for device in devices for buffer in device.host_buffers]
    assert len(outcome.patch.store._buffers) <= LAYERS + 5  # used again in the next steps, also for other shapes
    manager.undo_all()
    assert sum(device.released for device in devices) == len(buffers)
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []


def outputs_alive(model: nn.Module) -> int:
    """Block outputs that are in memory between the forward and the backward."""
    seen: list[weakref.ref] = []
    handles = [block.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out))) for block in model.blocks]
    loss = model(**make_inputs()).square().mean()
    alive = sum(reference() is not None for reference in seen)
    for handle in handles:
        handle.remove()
    loss.backward()
    return alive


def test_inputs_leave_the_device():
    plain, other = twins(prepared(layers=LAYERS + 2))
    assert outputs_alive(plain) == LAYERS + 2
    offload(other)
    assert outputs_alive(other) <= 3  # two on their way, and the last


def test_blocks_that_keep_everything_are_left_alone():
    plain, other = twins(prepared())
    manager = offload(other, checkpointing_fraction=0.5)
    assert train(other, steps=3) == train(plain, steps=3)
    evidence = manager.outcome("activation_offload").evidence
    assert evidence.exercised and evidence.facts["tensors"] <= 3 * (LAYERS // 2 + 2) + 4


def test_off_changes_nothing(devices):
    model = prepared()
    function = model._gradient_checkpointing_func
    manage(model, gradient_checkpointing=True)
    assert not devices and model._gradient_checkpointing_func is function


def store(smallest: int = 1) -> OffloadStore:
    return OffloadStore(outward=FakeTransfers(), inward=FakeTransfers(), smallest=smallest)


def test_store_gives_back_what_it_took_and_reuses_host_memory():
    held = store()
    for round_ in range(3):
        values = [torch.full((4 + round_,), float(k)) for k in range(5)]
        with held.saving(values):
            packed = [held.pack(value) for value in values]
        for k in (4, 3, 2, 1, 0):
            assert torch.equal(held.unpack(packed[k]), torch.full((4 + round_,), float(k)))
        del packed
    assert held.counts.not_left == 3 * 2 and held.counts.ahead == 3 * 3 and held.counts.late == 0
    assert len(held._buffers) == 5  # grown with the shapes, not added to
    held.close()
    assert held.host_bytes == 0


def test_only_what_was_named_leaves():
    held = store(smallest=32)
    small, named, other = torch.ones(2), torch.ones(16), torch.ones(16)
    transposed = torch.ones(8, 4).t()
    with held.saving([small, named, transposed]):
        assert held.pack(small) is small and held.pack(other) is other and held.pack(transposed) is transposed
        assert held.pack(named) is not named
    assert held.pack(named) is named


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"gradient_checkpointing": False}, "no block is recomputed.*--gradient_checkpointing --activation_offload"),
        ({"compile": True, "compile_scope": "whole"}, "leaves no between"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(PatchRefused, match=text):
        offload(prepared(), **flags)


def test_a_cpu_has_nothing_to_free(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(PatchRefused, match="frees the memory of a GPU, and this run is on cpu"):
        offload(prepared())


def test_tensors_that_are_too_small_are_reported():
    model = prepared()
    manager = offload(model, activation_offload_min_mb=1.0)
    gradients(model, make_inputs())
    outcome = manager.outcome("activation_offload")
    assert outcome.state == "inert" and "at least 1 MB" in outcome.evidence.summary


def test_a_network_without_checkpointing_is_inert():
    outcome = offload(nn.Linear(3, 3)).outcome("activation_offload")
    assert outcome.state == "inert" and "checkpoints its blocks" in outcome.evidence.summary
