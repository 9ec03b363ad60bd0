"""``--fp8`` and ``--fp8_base``: gradients within the rounding of their types, casts made once, nothing hidden."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.registry import PatchRefused
from tests.patches.wan import ADAPTERS, add_native_lora, gradients, make_inputs, manage, trained, twins
from tests.patches.wan import train as steps
from tests.unit.real_runs import FULL, checkpoint, refusal, same_tensors, train
from videox_fun.models.wan_transformer3d import WanTransformer3DModel

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
EMULATED: dict[str, Any] = {"fp8": True, "fp8_emulate": True, "fp8_min_dim": 16}
#: e4m3 has 3 bits behind the point: a rounding is off by 2^-4 at most and by 2^-4/sqrt(3) on average. A gradient
#: has gone through 2 blocks x 6 products, forward and backward, 2 operands each: 48 roundings in random directions.
TOLERANCE = 2**-4 / 3**0.5 * 48**0.5


def make_model(*, layers: int = 2) -> WanTransformer3DModel:
    """All sides multiples of 16, which FP8 products need."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        model_type="t2v", in_dim=4, out_dim=4, dim=32, ffn_dim=64, freq_dim=32, text_dim=16, text_len=8, num_heads=2,
        num_layers=layers, cross_attn_norm=True,
    )  # fmt: skip
    with torch.no_grad():
        nn.init.normal_(model.head.head.weight, std=0.1)
    return model


def with_adapters(kind: str = "lora") -> WanTransformer3DModel:
    model = make_model()
    ADAPTERS[kind](model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # zero up-projections would hide the gradient of the others
            if "lora_up" in name or "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys() and actual
    whole = sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5 / len(expected) ** 0.5
    return max(float((actual[n] - g).norm() / max(float(g.norm()), 0.1 * whole)) for n, g in expected.items())


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("kind", ["full", "lora", "peft"])
def test_gradients_of_every_trained_tensor(kind, recipe):
    model, inputs = (make_model() if kind == "full" else with_adapters(kind)), make_inputs()
    expected = gradients(model, inputs)
    plain = model(**inputs)
    manager, _ = manage(model, **EMULATED, fp8_recipe=recipe)
    found = gradients(model, inputs)
    error = worst(found, expected)
    assert 1e-4 < error < TOLERANCE  # and it did round
    outcome = manager.outcomes()[0]
    assert outcome.state == "exercised" and outcome.evidence.facts["layers"] == 20
    assert outcome.evidence.facts["frozen"] == (0 if kind == "full" else 20)
    manager.undo_all()
    assert torch.equal(model(**inputs), plain)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_kept_cast_computes_what_torchao_computes(recipe):
    """The same layer once trained (torchao casts each time) and once frozen (our cast is kept): equal bit for bit."""
    from optim_patches.fp8_layers import make_layer

    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    x = torch.randn(2, 5, 32)
    results = []
    for frozen in (False, True):
        layer.requires_grad_(not frozen)
        computed = make_layer(layer, recipe=recipe, emulate=True)
        assert computed.frozen is frozen
        computed.refresh()
        inputs = x.clone().requires_grad_()
        out = computed(inputs)
        out.square().sum().backward()
        results.append((out.detach(), inputs.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@needs_torchao
def test_frozen_weights_are_cast_once_and_again_when_written():
    model = with_adapters()
    manager, _ = manage(model, **EMULATED)
    steps(model, steps=3)

    def casts() -> int:
        return manager.outcome("fp8").evidence.facts["weight_casts_of_frozen"]

    assert casts() == 20
    before = model(**make_inputs())
    with torch.no_grad():
        model.blocks[0].ffn[0].weight.mul_(0.5)
    assert not torch.equal(model(**make_inputs()), before)
    assert casts() == 21


@needs_torchao
def test_twenty_steps_stay_close():
    plain, fast = twins(with_adapters())
    manage(fast, **EMULATED)
    expected, found = steps(plain), steps(fast)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert worst(trained(fast), trained(plain)) < TOLERANCE


@needs_torchao
def test_compiled_blocks_use_the_kept_casts():
    model = make_model(layers=1).requires_grad_(False)
    model.blocks[0].modulation.requires_grad_(True)  # few trained tensors: tracing is what takes the time here
    expected = gradients(copy.deepcopy(model), make_inputs())
    manager, _ = manage(model, **EMULATED, compile=True, compile_backend="aot_eager")
    assert worst(gradients(model, make_inputs()), expected) < TOLERANCE
    states = {outcome.patch.name: outcome.state for outcome in manager.outcomes()}
    assert states == {"fp8": "exercised", "compile": "exercised"}
    assert manager.outcome("compile").evidence.facts["graph_breaks"] == 0
    assert manager.outcome("fp8").evidence.facts["weight_casts_of_frozen"] == 10


@needs_torchao
def test_filter_says_why():
    model = with_adapters()
    manager, _ = manage(model, **{**EMULATED, "fp8_min_dim": 1024})
    outcome = manager.outcomes()[0]
    assert outcome.state == "inert"
    assert "20 smaller than 1024" in outcome.applied.detail and "outside the blocks" in outcome.applied.detail


@needs_torchao
def test_cpu_is_refused():
    with pytest.raises(PatchRefused, match="FP8 matrix units.*on cpu.*--fp8_emulate.*--fp8_base"):
        manage(make_model(), fp8=True)


def test_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PatchRefused, match="--fp8 needs the torchao package. Use instead: pip install torchao"):
        manage(make_model(), fp8=True)


def test_both_is_refused_and_sharding_too(monkeypatch):
    with pytest.raises(PatchRefused, match="--fp8_base and --fp8 cannot run together"):
        manage(make_model(), fp8=True, fp8_base=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PatchRefused, match="cannot shard"):
        manage(make_model(), fp8_base=True)


def test_off_changes_nothing():
    model, inputs = with_adapters(), make_inputs()
    expected = gradients(model, inputs)
    manage(model)
    assert same_tensors(gradients(model, inputs), expected) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_weights(dtype):
    """The adapter comes after the storage, as in a run; gradients equal those of a model with the rounded weights."""
    model = make_model().to(dtype)
    weight = model.blocks[0].ffn[0].weight.detach().float()
    manager, _ = manage(model, fp8_base=True)
    wide = {name: value for name, value in model.state_dict().items()}
    kept = wide["blocks.0.ffn.0.weight"]
    assert kept.dtype == dtype and not [name for name in wide if "scale" in name]
    step = weight.abs().amax(dim=1, keepdim=True) * 2**-4
    assert bool(((kept.float() - weight).abs() <= step).all()) and not torch.equal(kept.float(), weight)
    twin = make_model().to(dtype)
    twin.load_state_dict(wide)
    inputs = make_inputs(dtype=dtype)
    for each in (model, twin):
        add_native_lora(each)
    found, expected = gradients(model, inputs), gradients(twin, inputs)
    assert same_tensors(found, expected) == []
    evidence = manager.outcomes()[0].evidence
    assert evidence.exercised and evidence.facts["stored"] == 20
    assert evidence.facts["bytes_after"] < evidence.facts["bytes_before"] * (0.4 if dtype == torch.float32 else 0.7)
    model.network.remove()
    manager.undo_all()
    assert type(model.blocks[0].ffn[0]) is nn.Linear and torch.equal(model.blocks[0].ffn[0].weight, kept)


def test_run_with_stored_weights(tmp_path, tmp_path_factory):
    """Through the trainer with native LoRA and checkpointing: the losses follow those of the wide weights."""
    model = checkpoint(tmp_path_factory)
    plain = train(model, tmp_path / "plain", gradient_checkpointing=True)
    stored = train(model, tmp_path / "stored", gradient_checkpointing=True, fp8_base=True)
    assert stored.trainer.ctx.patches.outcome("fp8_base").state == "exercised"
    assert stored.losses == pytest.approx(plain.losses, rel=TOLERANCE) and stored.losses != plain.losses
    text = refusal(model, tmp_path / "full", script=FULL, fp8_base=True, audit="default")
    assert "full fine-tuning trains and saves all of them" in text


@needs_torchao
def test_run_with_fp8_products(tmp_path, tmp_path_factory):
    model = checkpoint(tmp_path_factory)
    run = train(model, tmp_path / "fp8", **EMULATED)
    outcome = run.trainer.ctx.patches.outcome("fp8")
    assert outcome.state == "exercised" and outcome.evidence.facts["weight_casts_of_frozen"] == 20
    assert run.code == 0 and all(torch.isfinite(torch.tensor(run.losses)))
