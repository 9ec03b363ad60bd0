"""LoRA against the recorded reference: selection, initial values, files, outputs and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from videox_fun.models.wan_text_encoder import WanT5EncoderModel
from videox_fun.models.wan_transformer3d import WanAttentionBlock, WanTransformer3DModel
from videox_fun.utils.lora_codec import encode, module_index, read_lora
from videox_fun.utils.lora_utils import (
    LoRANetwork,
    convert_peft_lora_to_kohya_lora,
    create_network,
    merge_lora,
    unmerge_lora,
)

TARGETS = "q,k,v,ffn.0,ffn.2"
TINY: dict[str, Any] = {
    "patch_size": (1, 2, 2), "text_len": 12, "in_dim": 16, "dim": 48, "ffn_dim": 96, "freq_dim": 32, "text_dim": 24,
    "out_dim": 16, "num_heads": 2, "num_layers": 2, "in_channels": 16, "hidden_size": 48,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "wan21_t2v": {"model_type": "t2v"},
    "wan21_fun_inp": {"model_type": "i2v", "in_dim": 36},
    "wan21_fun_control_ref": {"model_type": "i2v", "in_dim": 52, "add_ref_conv": True},
    "wan21_fun_camera": {"model_type": "i2v", "in_dim": 36, "add_control_adapter": True},
}
T5 = {"vocab": 64, "dim": 32, "dim_attn": 48, "dim_ffn": 64, "num_heads": 4, "num_layers": 2, "num_buckets": 32,
      "shared_pos": False, "dropout": 0.0}


@pytest.fixture(scope="module")
def facts(data_dir: Path) -> dict[str, Any]:
    return json.loads((data_dir / "lora" / "index.json").read_text(encoding="utf-8"))


def _wan(variant: str = "wan21_t2v") -> WanTransformer3DModel:
    return WanTransformer3DModel(**{**TINY, **VARIANTS[variant]})


def _network(model: nn.Module, encoder: nn.Module | None = None, **options: Any) -> LoRANetwork:
    network = create_network(1.0, 4, 2, encoder, model, target_name=TARGETS, **options)
    network.apply_to(encoder, model, False, True)
    model.network = network
    return network


def _list(names: str) -> str | None:
    return None if names == "None" else names


@pytest.mark.parametrize("target", [TARGETS, "None", "self_attn.q, cross_attn.v"])
@pytest.mark.parametrize("skip", ["None", "ffn"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_selection_and_order(facts: dict[str, Any], variant: str, target: str, skip: str) -> None:
    expected = facts["selections"][f"{variant}|target={target}|skip={skip}"]
    network = create_network(1.0, 4, 2, WanT5EncoderModel(**T5), _wan(variant), target_name=_list(target),
                             skip_name=_list(skip))
    assert [lora.lora_name for lora in network.unet_loras] == expected["unet"]
    text = [lora.lora_name for lora in network.text_encoder_loras]
    assert (text if isinstance(expected["te"], list) else len(text)) == expected["te"]


def test_initial_values_at_seed_42(facts: dict[str, Any], data_dir: Path) -> None:
    encoder, model = WanT5EncoderModel(**T5), _wan()
    torch.manual_seed(42)
    network = _network(model, encoder)
    recorded = load_file(data_dir / "lora" / "native_init_seed42_rank4_alpha2.safetensors")
    state = network.state_dict()
    assert list(state) == facts["state_dict"]
    assert all(torch.equal(state[key], value) and state[key].dtype == value.dtype for key, value in recorded.items())


@pytest.mark.parametrize(("dtype", "key"), [(torch.float32, "metadata_fp32"), (torch.bfloat16, "metadata_bf16")])
def test_saved_file_is_the_recorded_one(facts: dict[str, Any], data_dir: Path, tmp_path: Path, dtype: torch.dtype,
                                        key: str) -> None:
    network = _network(_wan())
    recorded = data_dir / "lora" / "native_trained_fp32.safetensors"
    assert network.load_weights(recorded).matched == 20
    network.save_weights(tmp_path / "x.safetensors", dtype, None)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == facts[key]
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}
    if dtype == torch.float32:
        assert (tmp_path / "x.safetensors").stat().st_size == recorded.stat().st_size


def test_peft_to_kohya_keys(data_dir: Path) -> None:
    converted = convert_peft_lora_to_kohya_lora(load_file(data_dir / "lora" / "peft.safetensors"))
    recorded = load_file(data_dir / "lora" / "peft_kohya.safetensors")
    assert converted.keys() == recorded.keys()
    assert all(torch.equal(converted[key], recorded[key]) for key in recorded)
    prefixed = {f"diffusion_model.{key.replace('.weight', '.default.weight')}": value
                for key, value in load_file(data_dir / "lora" / "peft.safetensors").items()}
    assert convert_peft_lora_to_kohya_lora(prefixed).keys() == recorded.keys()
    with pytest.raises(ValueError, match="DoRA"):
        convert_peft_lora_to_kohya_lora({"a.dora_scale": torch.ones(1)})
    with pytest.raises(ValueError, match="not a PEFT LoRA key"):
        convert_peft_lora_to_kohya_lora({"a.weight": torch.ones(1)})


@pytest.mark.parametrize("peft", [False, True])
def test_block_with_adapters_compiles_whole(peft: bool) -> None:
    block = WanAttentionBlock("t2v_cross_attn", 48, 96, 2, cross_attn_norm=True).requires_grad_(False)
    if peft:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=2, target_modules=["q", "k", "v", "ffn.0"]), block)
    else:
        _network(block)
    for name, parameter in block.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    generator = torch.Generator().manual_seed(0)
    x, e, context = (torch.randn(shape, generator=generator) for shape in ((1, 24, 48), (1, 6, 48), (1, 12, 48)))
    freqs = _wan().rope.grid((2, 3, 4), torch.device("cpu"))
    results = []
    torch._dynamo.reset()
    for module in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        block.zero_grad()
        out = module(x, e, None, None, freqs, context)
        out.square().mean().backward()
        results.append([out, *(p.grad for p in block.parameters() if p.requires_grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    torch._dynamo.reset()


# ---- with the recorded base weights


@pytest.fixture(scope="module")
def recorded_base(goldens: Path, golden_utils: ModuleType) -> dict[str, Tensor]:
    return golden_utils.load_weights(goldens / "wan" / "wan21_t2v.weights.safetensors")


@pytest.fixture(scope="module")
def case(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "lora" / "native_merge_0.7.safetensors")


def _based(weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    model = _wan().to(dtype)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def _run(model: nn.Module, case: dict[str, Tensor]) -> Tensor:
    return model(case["x"], case["t"], [case["ctx.0"], case["ctx.1"]], 36)


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def _trained(goldens: Path, name: str = "native_trained_fp32") -> Path:
    return goldens / "lora" / f"{name}.safetensors"


def test_forward_with_adapters(goldens: Path, recorded_base: dict[str, Tensor], case: dict[str, Tensor]) -> None:
    model = _based(recorded_base)
    network = _network(model)
    network.load_weights(_trained(goldens))
    _close(_run(model, case), case["out_lora_mult1"])
    network.set_multiplier(0.7)
    _close(_run(model, case), case["out_lora_mult0.7"])


def test_merge_and_unmerge(goldens: Path, recorded_base: dict[str, Tensor], case: dict[str, Tensor],
                           facts: dict[str, Any]) -> None:
    pipeline = SimpleNamespace(transformer=_based(recorded_base))
    merge_lora(pipeline, _trained(goldens), 0.7)
    state = pipeline.transformer.state_dict()
    for key, value in case.items():
        if key.startswith("merged."):
            assert torch.equal(state[key.removeprefix("merged.")], value)
    changed = sorted(key for key, value in recorded_base.items() if not torch.equal(state[key], value))
    assert changed == sorted(facts["merged_layers"])
    _close(_run(pipeline.transformer, case), case["out_merged_mult0.7"])
    unmerge_lora(pipeline, _trained(goldens), 0.7)
    for key, value in recorded_base.items():
        torch.testing.assert_close(pipeline.transformer.state_dict()[key], value, atol=1e-7, rtol=0)


def test_merge_into_bf16_weights(goldens: Path, recorded_base: dict[str, Tensor]) -> None:
    pipeline = SimpleNamespace(transformer=_based(recorded_base, torch.bfloat16))
    merge_lora(pipeline, _trained(goldens), 0.7)
    recorded = load_file(goldens / "lora" / "native_merge_bf16model_block1_self_attn_q.safetensors")["w"]
    assert torch.equal(pipeline.transformer.blocks[1].self_attn.q.weight, recorded)


@pytest.mark.parametrize(("name", "output"), [("peft", "out_merged_peft"), ("peft_kohya", "out_merged_peft_kohya")])
def test_merge_of_files_without_alpha(goldens: Path, recorded_base: dict[str, Tensor], case: dict[str, Tensor],
                                      facts: dict[str, Any], name: str, output: str) -> None:
    """Upstream's PEFT files state no alpha: read with the factor 1, as every reader does."""
    pipeline = SimpleNamespace(transformer=_based(recorded_base))
    merge_lora(pipeline, _trained(goldens, name), 1.0)
    state = pipeline.transformer.state_dict()
    changed = sorted(key for key, value in recorded_base.items() if not torch.equal(state[key], value))
    assert changed == sorted(facts["peft_merged_layers"])
    _close(_run(pipeline.transformer, case), load_file(goldens / "lora" / "peft_outputs.safetensors")[output])


def test_weight_one_reproduces_training_in_both_kinds(goldens: Path, recorded_base: dict[str, Tensor],
                                                      case: dict[str, Tensor]) -> None:
    """Case 77: with alpha beside the tensors, a PEFT file at weight 1.0 gives the recorded training-time output."""
    read = read_lora(_trained(goldens, "peft"), index=module_index(_wan()))
    recorded = load_file(goldens / "lora" / "peft_outputs.safetensors")["out_peft_forward"]
    for name, pair in read.transformer.items():
        read.transformer[name] = type(pair)(pair.down, pair.up, torch.tensor(2.0))
    for format in ("comfyui", "kohya"):
        pipeline = SimpleNamespace(transformer=_based(recorded_base))
        merge_lora(pipeline, None, 1.0, state_dict=encode(read, format=format)[0])
        _close(_run(pipeline.transformer, case), recorded)
    pipeline = SimpleNamespace(transformer=_based(recorded_base))
    merge_lora(pipeline, _trained(goldens), 1.0)
    _close(_run(pipeline.transformer, case), case["out_lora_mult1"])


def test_accepted_spellings(facts: dict[str, Any]) -> None:
    """Every spelling upstream merges is merged; the two it skips without a word are an error or read as well."""
    down, up = torch.ones(4, 48), torch.ones(48, 4)
    spellings = {
        "kohya": ("lora_unet__blocks_0_self_attn_q.lora_down.weight", "lora_unet__blocks_0_self_attn_q.lora_up.weight"),
        "diffusion_model": ("diffusion_model.blocks.0.self_attn.q.lora_A.weight",
                            "diffusion_model.blocks.0.self_attn.q.lora_B.weight"),
        "peft_default": ("blocks.0.self_attn.q.lora_A.default.weight", "blocks.0.self_attn.q.lora_B.default.weight"),
        "plain_up_down": ("blocks.0.self_attn.q.lora_down.weight", "blocks.0.self_attn.q.lora_up.weight"),
        "lora_transformer_prefix": ("lora_transformer_blocks_0_self_attn_q.lora_down.weight",
                                    "lora_transformer_blocks_0_self_attn_q.lora_up.weight"),
    }
    for name, keys in spellings.items():
        pipeline = SimpleNamespace(transformer=_wan())
        before = {key: value.clone() for key, value in pipeline.transformer.state_dict().items()}
        merge_lora(pipeline, None, 1.0, state_dict=dict(zip(keys, (down, up), strict=True)))
        after = pipeline.transformer.state_dict()
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        assert changed == (facts["spellings"][name] or ["blocks.0.self_attn.q.weight"])
    with pytest.raises(ValueError, match="0 of 1 modules match"):
        merge_lora(pipeline, None, 1.0, state_dict={"lora_unet__blocks_9_self_attn_q.lora_down.weight": down,
                                                    "lora_unet__blocks_9_self_attn_q.lora_up.weight": up})
