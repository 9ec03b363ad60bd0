"""The native adapter: what it computes, how it sits in a model, and how it composes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.unit.lora_toys import TARGETS, ToyWan, randomize, toy, toy_inputs
from videox_fun.utils.lora_codec import encode
from videox_fun.utils.lora_utils import LoRAModule, LoRANetwork, create_network, merge_lora, unmerge_lora


def _adapted(model: nn.Module, *, target: str | None = TARGETS, **options: float) -> LoRANetwork:
    model.requires_grad_(False)
    network = create_network(1.0, 4, 2, None, model, target_name=target, **options)
    network.apply_to(None, model, False, True)
    randomize(network)
    model.network = network
    return network


def _gradients(model: ToyWan, network: nn.Module) -> list[Tensor]:
    network.zero_grad()
    model(*toy_inputs()).square().mean().backward()
    return [parameter.grad.clone() for parameter in network.parameters()]


def test_forward_is_base_plus_scaled_product() -> None:
    layer = nn.Linear(6, 5)
    lora = LoRAModule("x", layer, multiplier=0.7, lora_dim=4, alpha=2)
    nn.init.normal_(lora.lora_up.weight)
    x = torch.randn(3, 2, 6)
    base = F.linear(x, layer.weight, layer.bias)
    expected = base + F.linear(F.linear(x, lora.lora_down.weight), lora.lora_up.weight) * 0.7 * 0.5
    torch.testing.assert_close(lora(x), expected)
    lora.apply_to()
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(lora(x), expected)


def test_fresh_adapter_changes_nothing_and_zero_alpha_means_rank() -> None:
    model, inputs = toy(), toy_inputs()
    before = model(*inputs)
    network = create_network(1.0, None, None, None, model, target_name=TARGETS, unknown_keyword=3)
    network.apply_to(None, model)
    assert torch.equal(model(*inputs), before)
    assert (network.lora_dim, network.unet_loras[0].scale) == (4, 0.25)
    assert LoRAModule("x", nn.Linear(4, 4), lora_dim=8, alpha=0).scale == 1.0


def test_one_by_one_convolution_is_adapted_and_merged() -> None:
    model = nn.ModuleDict({"point": nn.Conv2d(3, 5, 1, stride=2), "wide": nn.Conv2d(3, 5, 2), "line": nn.Linear(3, 3)})
    network = _adapted(model, target=None)
    assert list(network.unet_modules) == ["point", "line"]
    x = torch.randn(2, 3, 6, 6)
    want = model["point"](x)
    pipeline = SimpleNamespace(transformer=copy.deepcopy(model))
    pipeline.transformer.network.remove()
    del pipeline.transformer.network
    merge_lora(pipeline, None, 1.0, state_dict=encode(network.weights(), format="kohya")[0])
    torch.testing.assert_close(pipeline.transformer["point"](x), want)


def test_base_keys_and_types_are_unchanged() -> None:
    model = toy()
    keys, layer_type = list(model.state_dict()), type(model.blocks[0].self_attn.q)
    network = _adapted(model)
    assert [key for key in model.state_dict() if not key.startswith("network.")] == keys
    assert isinstance(model.blocks[0].self_attn.q, nn.Linear)
    assert {key.split(".")[1] for key in model.state_dict() if key.startswith("network.")} == {
        lora.lora_name for lora in network.unet_loras}
    network.remove()
    assert type(model.blocks[0].self_attn.q) is layer_type
    assert "_lora" not in vars(model.blocks[0].self_attn.q)


def test_remove_restores_the_output() -> None:
    model, inputs = toy(), toy_inputs()
    before = model(*inputs)
    network = _adapted(model)
    assert not torch.allclose(model(*inputs), before, atol=1e-3)
    network.remove()
    assert torch.equal(model(*inputs), before)


def test_multiplier() -> None:
    model, inputs = toy(), toy_inputs()
    before = model(*inputs)
    network = _adapted(model)
    network.set_multiplier(0.0)
    torch.testing.assert_close(model(*inputs), before)
    network.set_multiplier(-1.0)
    assert {lora.multiplier for lora in network.unet_loras} == {-1.0}


def test_linear_subclass_keeps_its_own_forward() -> None:
    """A quantized layer is a subclass whose forward does the work; the adapter must call it."""

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    model = nn.ModuleDict({"q": Halved(4, 4), "k": nn.Linear(4, 4)})
    network = _adapted(model, target=None)
    x = torch.randn(2, 4)
    q, lora = model["q"], network.unet_modules["q"]
    want = F.linear(x, q.weight, q.bias) / 2 + F.linear(F.linear(x, lora.lora_down.weight), lora.lora_up.weight) / 2
    torch.testing.assert_close(q(x), want)
    assert isinstance(q, Halved)
    assert type(q) is not type(model["k"])


def test_forward_replaced_on_the_layer_is_kept() -> None:
    layer = nn.Linear(4, 4)
    own = layer.forward
    layer.forward = lambda x: own(x) + 10
    x = torch.randn(2, 4)
    replaced = layer(x)
    lora = LoRAModule("x", layer)
    lora.apply_to()
    torch.testing.assert_close(layer(x), replaced)
    nn.init.normal_(lora.lora_up.weight)
    assert not torch.allclose(layer(x), replaced)
    lora.remove()
    assert torch.equal(layer(x), replaced)
    assert "forward" in vars(layer)


def test_second_adapter_on_a_layer_is_refused() -> None:
    """Case 51."""
    model = toy()
    _adapted(model)
    second = create_network(1.0, 4, 2, None, model, target_name="self_attn.q")
    with pytest.raises(ValueError, match="already carries a LoRA"):
        second.apply_to(None, model)


def test_two_layers_with_one_file_name_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"b_c": nn.Linear(2, 2)}), "a_b": nn.ModuleDict({"c": nn.Linear(2, 2)})})
    with pytest.raises(ValueError, match="lora_unet__a_b_c"):
        create_network(1.0, 4, 2, None, model)


def test_deepcopy_is_independent() -> None:
    model, inputs = toy(), toy_inputs()
    _adapted(model)
    twin = copy.deepcopy(model)
    layer = twin.blocks[0].self_attn.q
    assert layer._lora is twin.network.lora_unet__blocks_0_self_attn_q
    before = model(*inputs)
    with torch.no_grad():
        for parameter in twin.network.parameters():
            parameter.zero_()
    assert torch.equal(model(*inputs), before)
    assert not torch.allclose(twin(*inputs), before, atol=1e-3)


def test_moving_a_block_leaves_its_adapters() -> None:
    model = toy()
    network = _adapted(model)
    model.blocks[0].to(torch.float64)
    assert {p.dtype for p in network.parameters()} == {torch.float32}


def test_checkpointing_gives_the_same_gradients() -> None:
    """Case 81: every adapter has a gradient, the same as without recomputation."""
    model = toy()
    network = _adapted(model)
    plain = _gradients(model, network)
    model.gradient_checkpointing = True
    recomputed = _gradients(model, network)
    assert all(gradient.norm() > 0 for gradient in recomputed)
    for a, b in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_with_drop_outs_recomputes_the_same_masks() -> None:
    model = toy()
    network = _adapted(model, neuron_dropout=0.1, rank_dropout=0.3, module_dropout=0.3)
    results = []
    for recompute in (False, True):
        model.gradient_checkpointing = recompute
        torch.manual_seed(3)
        results.append(_gradients(model, network))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("drop", ["neuron_dropout", "rank_dropout", "module_dropout"])
def test_drop_outs_act_in_training_only(drop: str) -> None:
    model, inputs = toy(), toy_inputs()
    want = copy.deepcopy(model)
    _adapted(want)
    _adapted(model, **{drop: 0.5})
    model.eval()
    torch.testing.assert_close(model(*inputs), want(*inputs))
    model.train()
    torch.manual_seed(0)
    first, second = model(*inputs), model(*inputs)
    assert not torch.allclose(first, second)


def _single(**drop: float) -> LoRAModule:
    torch.manual_seed(0)
    lora = LoRAModule("x", nn.Linear(6, 5, bias=False), lora_dim=8, alpha=8, **drop)
    nn.init.zeros_(lora.org_module.weight)
    nn.init.normal_(lora.lora_up.weight)
    return lora


def test_rank_drop_out_zeroes_ranks_and_keeps_the_mean() -> None:
    lora = _single(rank_dropout=0.25)
    lora.lora_up.weight.data = torch.eye(5, 8)  # the output shows the first five ranks
    x = torch.randn(2000, 1, 6)[:1].expand(2000, 3, 6)
    with torch.no_grad():
        out = lora(x)
    plain = F.linear(x, lora.lora_down.weight)[..., :5]
    dropped = out == 0
    assert torch.equal(dropped[:, 0], dropped[:, 1])  # one mask per sample, shared by its tokens
    assert dropped[:, 0].float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(out[~dropped], (plain / 0.75)[~dropped])


def test_module_drop_out_leaves_the_whole_adapter_out() -> None:
    lora = _single(module_dropout=0.4)
    x = torch.randn(4, 6)
    with torch.no_grad():
        outputs = torch.stack([lora(x) for _ in range(500)])
        lora.eval()
        full = lora(x)
    silent = (outputs == 0).all(dim=(1, 2))
    assert silent.float().mean().item() == pytest.approx(0.4, abs=0.07)
    torch.testing.assert_close(outputs[~silent][0], full)


def test_neuron_drop_out_acts_on_the_output() -> None:
    lora = _single(dropout=0.5)
    x = torch.randn(400, 6)
    with torch.no_grad():
        out = lora(x)
        lora.eval()
        full = lora(x)
    zero = out == 0
    assert zero.float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(out[~zero], 2 * full[~zero])


def test_wide_adapters_under_a_narrow_base() -> None:
    model = toy().to(torch.bfloat16)
    network = _adapted(model)
    network.float()
    inputs = tuple(value.to(torch.bfloat16) for value in toy_inputs())
    out = model(*inputs)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}


def test_autocast_computes_adapters_narrow() -> None:
    model = toy()
    network = _adapted(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.blocks[0].self_attn.q(toy_inputs()[0])
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert network.unet_loras[0].lora_up.weight.grad.dtype == torch.float32


def test_compiled_blocks_have_no_breaks_and_share_graphs() -> None:
    from torch._dynamo.utils import counters

    model = toy(layers=6)
    network = _adapted(model)
    plain = _gradients(model, network)
    want = model(*toy_inputs())
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    got = _gradients(model, network)
    for a, b in zip(plain, got, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(model(*toy_inputs()), want)
    # The first block's input needs no gradient, the others' does: two graphs for six blocks.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_compiles_with_drop_outs() -> None:
    from torch._dynamo.utils import counters

    model = toy(layers=1)
    _adapted(model, neuron_dropout=0.1, rank_dropout=0.1, module_dropout=0.5)
    torch._dynamo.reset()
    counters.clear()
    model.blocks[0].compile(fullgraph=True, backend="aot_eager")
    outputs = [model(*toy_inputs()) for _ in range(4)]
    assert any(not torch.equal(outputs[0], other) for other in outputs[1:])
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_save_and_load_any_format(tmp_path: Path) -> None:
    model = toy()
    network = _adapted(model)
    want = model(*toy_inputs())
    network.save_weights(tmp_path / "own.safetensors", None, {"ss_note": "x"})
    for format in ("peft", "diffusers", "comfyui"):
        tensors, metadata = encode(network.weights(), format=format)
        save_file(tensors, str(tmp_path / f"{format}.safetensors"), metadata)
    for name in ("own", "peft", "diffusers", "comfyui"):
        other = toy()
        loaded = _adapted(other)
        loaded.load_state_dict({key: torch.zeros_like(value) if value.dim() else value
                                for key, value in loaded.state_dict().items()})
        report = loaded.load_weights(tmp_path / f"{name}.safetensors")
        assert (report.matched, report.total) == (20, 20)
        assert torch.equal(other(*toy_inputs()), want)


def test_load_reports_rank_and_alpha_side_by_side(tmp_path: Path) -> None:
    """Case 80."""
    source = _adapted(toy())
    source.save_weights(tmp_path / "x.safetensors", torch.bfloat16, None)
    for rank, alpha, text in ((8, 4, "saved rank 4, asked --rank 8; saved alpha 2, asked --network_alpha 4"),
                              (4, 8, "saved rank 4, asked --rank 4; saved alpha 2, asked --network_alpha 8")):
        model = toy()
        network = create_network(1.0, rank, alpha, None, model, target_name=TARGETS)
        network.apply_to(None, model)
        with pytest.raises(ValueError, match=text):
            network.load_weights(tmp_path / "x.safetensors")


def test_load_of_fewer_layers_is_an_error(tmp_path: Path) -> None:
    model = toy()
    few = create_network(1.0, 4, 2, None, model, target_name="self_attn.q")
    few.apply_to(None, model)
    few.save_weights(tmp_path / "few.safetensors", None, None)
    network = _adapted(toy())
    with pytest.raises(ValueError, match="18 layers are adapted here but not in the file"):
        network.load_weights(tmp_path / "few.safetensors")
    report = network.load_weights(tmp_path / "few.safetensors", allow_partial=True)
    assert (report.matched, len(report.missing)) == (2, 18)


def test_save_refuses_other_suffixes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=".safetensors"):
        _adapted(toy()).save_weights(tmp_path / "x.ckpt", None, None)


def test_optimizer_groups_put_text_encoders_first() -> None:
    class T5SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4)})

    encoder = nn.ModuleDict({"blocks": nn.ModuleList([T5SelfAttention()])})
    model = toy()
    network = create_network(1.0, 4, 2, encoder, model, target_name="q")
    assert [lora.lora_name for lora in network.text_encoder_loras] == ["lora_te_blocks_0_attn_q"]
    network.apply_to(encoder, model, True, True)
    groups = network.prepare_optimizer_params(5e-5, 1e-4, 1e-3)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 5e-5), (8, 1e-4)]
    assert [name for name, _ in network.named_parameters()][0].startswith("lora_te_")
    assert "lr" not in network.prepare_optimizer_params(None, None, None)[0]


def test_merge_lists_state_dicts_and_unmerge(tmp_path: Path) -> None:
    inputs, before = toy_inputs(), toy()(*toy_inputs())
    adapted = toy()
    network = _adapted(adapted)
    want = adapted(*inputs)
    path = tmp_path / "x.safetensors"
    network.save_weights(path, None, None)
    pipeline = SimpleNamespace(transformer=toy())
    assert merge_lora(pipeline, None, 1.0) is pipeline
    assert torch.equal(pipeline.transformer(*inputs), before)
    merge_lora(pipeline, [path, path], [0.75, 0.25])
    torch.testing.assert_close(pipeline.transformer(*inputs), want, atol=1e-5, rtol=0)
    unmerge_lora(pipeline, [path, path], [0.75, 0.25])
    torch.testing.assert_close(pipeline.transformer(*inputs), before, atol=1e-5, rtol=0)
    merge_lora(pipeline, None, 1.0, state_dict=load_file(path))
    torch.testing.assert_close(pipeline.transformer(*inputs), want, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="2 LoRA files but 1 multipliers"):
        merge_lora(pipeline, [path, path], [1.0])


def test_merge_into_a_named_part_and_errors(tmp_path: Path) -> None:
    network = _adapted(toy())
    path = tmp_path / "x.safetensors"
    network.save_weights(path, None, None)
    pipeline = SimpleNamespace(transformer=toy(), transformer_2=toy())
    merge_lora(pipeline, path, 1.0, sub_transformer_name="transformer_2")
    assert torch.equal(pipeline.transformer.blocks[0].self_attn.q.weight, toy().blocks[0].self_attn.q.weight)
    assert not torch.equal(pipeline.transformer_2.blocks[0].self_attn.q.weight, toy().blocks[0].self_attn.q.weight)
    with pytest.raises(ValueError, match="no 'transformer_3'"):
        merge_lora(pipeline, path, 1.0, sub_transformer_name="transformer_3")
    other = SimpleNamespace(transformer=toy(ffn=64))
    with pytest.raises(ValueError, match="another model size"):
        merge_lora(other, path, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(other.transformer.parameters(), toy(ffn=64).parameters(),
                                                 strict=True))
    packed = SimpleNamespace(transformer=toy())
    packed.transformer.blocks[1].ffn[2].weight = nn.Parameter(torch.zeros(256, 1, dtype=torch.uint8), False)
    with pytest.raises(ValueError, match="blocks.1.ffn.2.*quantized"):
        merge_lora(packed, path, 1.0)
    with pytest.raises(ValueError, match="10 of 20 modules match"):
        merge_lora(SimpleNamespace(transformer=toy(layers=1)), path, 1.0)
    merge_lora(SimpleNamespace(transformer=toy(layers=1)), path, 1.0, strict=False)
