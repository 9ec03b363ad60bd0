"""``--block_swap`` on a device of ordinary memory that spoils what is read too early: numbers equal, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.base import Stage, Target
from optim_patches.block_ring import BlockRing, HostBlock, frozen_bytes
from optim_patches.compile import find_blocks
from optim_patches.registry import PatchManager, PatchRefused
from optim_patches.selection import evenly
from tests.patches import fake_device
from tests.patches.fake_device import FakeTransfers
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
from tests.unit import real_runs
from tests.unit.real_runs import same_tensors
from videox_fun.utils.tiny import make_tiny_checkpoint

LAYERS = 6


@pytest.fixture(autouse=True)
def devices(monkeypatch) -> list[FakeTransfers]:
    return fake_device.install(monkeypatch)


def with_adapters(kind: str = "lora", **sizes: Any) -> nn.Module:
    model = make_model(layers=LAYERS, **sizes)
    ADAPTERS[kind](model)
    fill(model)
    model.enable_gradient_checkpointing()
    return model


def fill(model: nn.Module) -> None:
    """Zero up-projections would hide the gradient of the others."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_up" in name or "lora_B" in name:
                parameter.normal_(std=0.1)


def swap(model: nn.Module, **flags: Any) -> PatchManager:
    return manage(model, **{"block_swap": 4, "gradient_checkpointing": True, **flags})[0]


@pytest.mark.parametrize(("kind", "ring"), [("lora", 3), ("peft", 2)])
def test_losses_gradients_and_weights_are_those_without_it(kind, ring, devices):
    plain, swapped = twins(with_adapters(kind))
    manager = swap(swapped, block_swap_ring=ring)
    assert same_tensors(gradients(swapped, make_inputs()), gradients(plain, make_inputs())) == []
    assert train(swapped, steps=3) == train(plain, steps=3)
    assert same_tensors(trained(swapped), trained(plain)) == []
    with torch.no_grad():
        assert torch.equal(swapped(**make_inputs()), plain(**make_inputs()))
    outcome = manager.outcome("block_swap")
    facts = outcome.evidence.facts
    assert outcome.state == "exercised" and len(outcome.applied.sites) == facts["blocks"] == 4
    assert facts["late_copies"] == 1 and facts["copies"] > 4 * 2  # only the very first block had to be waited for
    assert facts["device_bytes"] == ring * facts["host_bytes"] // 4
    (device,) = devices
    hosts = {buffer.data_ptr() for buffer in device.host_buffers}
    assert all(copy.source.data_ptr() in hosts for copy in device.copies), "copied back"


def test_undo_restores_and_state_dicts_hold_the_weights(devices):
    model = with_adapters()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = gradients(model, make_inputs())
    manager = swap(model)
    assert torch.isnan(model.blocks[2].ffn[0].weight).all()  # away, and visibly so
    assert same_tensors(model.state_dict(), before) == []
    gradients(model, make_inputs())
    assert same_tensors(model.state_dict(), before) == []
    manager.undo_all()
    assert devices[0].released == 4 and not manager.outcome("block_swap").patch.ring.slots
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert same_tensors(model.state_dict(), before) == []
    assert same_tensors(gradients(model, make_inputs()), expected) == []


def test_off_changes_nothing(devices):
    model = with_adapters()
    expected = gradients(model, make_inputs())
    manage(model, gradient_checkpointing=True)
    assert not devices and same_tensors(gradients(model, make_inputs()), expected) == []


def test_what_an_earlier_forward_saved_of_a_block_that_left_is_not_used():
    """Without recomputation the backward would read another block's weights: autograd must refuse."""
    model = with_adapters()
    swap(model)
    model.gradient_checkpointing = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, make_inputs())


@pytest.mark.parametrize("base", ["fp8_base", "qlora"])
def test_stored_and_quantized_weights_stream_too(base):
    if base == "qlora":
        pytest.importorskip("bitsandbytes")
    results = []
    for number in (0, 4):
        args = make_args(gradient_checkpointing=True, block_swap=number, **{base: True})
        target, model = Target(args), make_model(layers=LAYERS)
        manager = PatchManager(args)
        manager.preflight(target)
        target.models["transformer"] = model
        for stage in Stage:
            if stage == Stage.POST_ADAPTER:
                ADAPTERS["lora"](model)
                fill(model)
                model.enable_gradient_checkpointing()
            manager.run_stage(stage, target)
        results.append(gradients(model, make_inputs()))
        assert {outcome.state for outcome in manager.outcomes()} == {"exercised"}
    assert same_tensors(*results) == []


def test_compiled_blocks_stream_and_keep_attention():
    torch._dynamo.reset()
    model = make_model(layers=LAYERS).requires_grad_(False)
    for block in model.blocks:
        block.modulation.requires_grad_(True)  # few trained tensors: tracing is what takes the time here
    model.enable_gradient_checkpointing()
    expected = gradients(model, make_inputs(SHAPES[2]))
    manager = swap(model, compile=True, compile_backend="eager", checkpointing_keep="attention")
    assert_close(gradients(model, make_inputs(SHAPES[2])), expected, dtype=torch.float32, factor=64)
    assert [(outcome.patch.name, outcome.state) for outcome in manager.outcomes()] == [
        ("compile", "exercised"), ("checkpointing", "exercised"), ("block_swap", "exercised")]
    assert manager.outcome("compile").evidence.facts["graph_breaks"] == 0
    assert manager.outcome("checkpointing").evidence.facts["kept_results"] == LAYERS


def test_ddp_leaves_absent_weights_alone(tmp_path):
    import torch.distributed as dist

    plain, swapped = twins(with_adapters())
    swap(swapped)
    ignored = set(swapped._ddp_params_and_buffers_to_ignore)
    assert "blocks.2.ffn.0.weight" in ignored and not any("network" in name for name in ignored)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(swapped)
        found = gradients(wrapped, make_inputs())
    finally:
        dist.destroy_process_group()
    expected = {f"module.{name}": value for name, value in gradients(plain, make_inputs()).items()}
    assert same_tensors(found, expected) == []


def linear_blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4).requires_grad_(False) for _ in range(count)]


def test_order_of_copies():
    device = FakeTransfers()
    hosted = [HostBlock(block, transfers=device, device=torch.device("cpu")) for block in linear_blocks(5)]
    ring = BlockRing(hosted, ends=[4], transfers=device, slots=2)

    def copied() -> list[int]:
        order = [next(i for i, block in enumerate(hosted) if block.host is copy.source) for copy in device.copies]
        device.copies.clear()
        return order

    for number in range(5):
        ring.enter(number, backward=False)
    assert copied() == [0, 1, 2, 3, 4]
    for number in reversed(range(5)):
        ring.enter(number, backward=True)
        ring.enter(number, backward=True)  # the hook, and the recomputation
    assert copied() == [2, 1, 0]  # 4 and 3 were still there
    for number in range(5):
        ring.enter(number, backward=False, again=True)
    assert copied() == [2, 3, 4, 0]  # 0 and 1 were still there; the next sampling step begins with 0
    assert ring.counts.late == 1


def test_two_experts_stream_through_one_ring():
    """The two denoisers of a model with two experts, called one after the other as sampling and training do."""
    models = {"transformer": with_adapters(), "transformer_2": make_model(layers=LAYERS, seed=3).requires_grad_(False)}
    expected = {role: model(**make_inputs()).detach() for role, model in models.items()}
    gradient = gradients(models["transformer"], make_inputs())
    args = make_args(block_swap=4, gradient_checkpointing=True)
    target, manager = Target(args, models=models), PatchManager(args)
    manager.preflight(target)
    manager.run_stage(Stage.PRE_SHARD, target)
    for role in ("transformer", "transformer_2", "transformer"):
        with torch.no_grad():
            assert torch.equal(models[role](**make_inputs()), expected[role])
        assert same_tensors(gradients(models["transformer"], make_inputs()), gradient) == []
    outcome = manager.outcome("block_swap")
    assert outcome.evidence.facts["blocks"] == 8 and outcome.state == "exercised"


def test_two_networks_share_a_ring():
    device = FakeTransfers()
    blocks = linear_blocks(6)
    wanted = [block.weight.clone() for block in blocks]
    hosted = [HostBlock(block, transfers=device, device=torch.device("cpu")) for block in blocks]
    ring = BlockRing(hosted, ends=[2, 5], transfers=device, slots=2)
    for number in (3, 4, 5, 5, 4, 3, 0, 1, 2, 2, 1, 0):
        ring.enter(number, backward=False)
        assert torch.equal(blocks[number].weight, wanted[number])
    assert not any(copy.source is hosted[0].host for copy in device.copies[:3])  # not the other network's first


def test_budget_decides_how_many():
    model = with_adapters()
    size = frozen_bytes(model.blocks[0])
    manager = swap(model, block_swap=0, block_swap_gb=4.5 * size / 1e9)
    assert len(manager.outcome("block_swap").applied.sites) == 4  # 2 resident and 2 buffers make 4


def test_blocks_are_spread():
    assert evenly(6, 3) == (1, 3, 5) and evenly(40, 40) == tuple(range(40)) and evenly(5, 0) == ()
    assert len(set(evenly(30, 17))) == 17
    with pytest.raises(ValueError, match="Cannot choose 3 of 2"):
        evenly(2, 3)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"trainable_modules": ["."]}, "full fine-tuning changes them each step.*ZeRO-3"),
        ({"gradient_checkpointing": False}, "recompute each block.*--gradient_checkpointing --block_swap"),
        ({"block_swap": 2}, "saves nothing: the ring of 2 buffers.*--block_swap 3 or more"),
        ({"block_swap": 7}, "the denoiser has 6 blocks.*1 to 6"),
        ({"block_swap_ring": 1}, "one buffer computes while another fills"),
        ({"block_swap_gb": 1.0}, "both say how many"),
        ({"block_swap": 0, "block_swap_gb": 1e-6}, "less than the ring of buffers"),
        ({"block_swap": 0, "block_swap_gb": 10.0}, "all blocks fit"),
        ({"compile": True, "compile_scope": "whole"}, "leaves no between"),
        ({"compile": True, "compile_mode": "reduce-overhead"}, "read weights at fixed places"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(PatchRefused, match=text):
        swap(with_adapters(), **flags)


def test_a_cpu_has_nothing_to_free(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(PatchRefused, match="frees the memory of a GPU, and this run is on cpu.*the run without it"):
        swap(with_adapters())


def test_sharding_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PatchRefused, match="FSDP and DeepSpeed split or move"):
        swap(with_adapters())


def test_blocks_that_are_not_called_are_inert():
    model = with_adapters()
    manager = swap(model)
    for _, block in find_blocks(model):
        block._compiled_call_impl = None  # somebody else took the place
    assert torch.isnan(model(**make_inputs())).any()
    outcome = manager.outcome("block_swap")
    assert outcome.state == "inert" and "no block on the host was called" in outcome.evidence.summary


def test_with_the_main_command(tmp_path: Path):
    model = tmp_path / "model"
    make_tiny_checkpoint(model, family="wan2.1_t2v", num_layers=4)
    flags = {"gradient_checkpointing": True, "audit": "strict", "block_swap": 3, "activation_offload": True,
             "activation_offload_min_mb": 1e-4, "checkpointing_keep": "attention"}
    run = real_runs.train(model, tmp_path / "plain", gradient_checkpointing=True)
    swapped = real_runs.train(model, tmp_path / "out", **flags)
    assert swapped.losses == run.losses and same_tensors(swapped.trained(), run.trained()) == []
    outcomes = {outcome.patch.name: outcome for outcome in swapped.trainer.ctx.patches.outcomes()}
    assert outcomes.keys() == {"block_swap", "activation_offload", "checkpointing"}
    assert {outcome.state for outcome in outcomes.values()} == {"exercised"}
    assert outcomes["block_swap"].evidence.facts["blocks"] == 3
    rows = {row["id"]: row["state"] for row in json.loads((tmp_path / "out" / "audit.json").read_text())["rows"]}
    assert rows["B2"] == rows["block_swap"] == rows["activation_offload"] == "enabled"
