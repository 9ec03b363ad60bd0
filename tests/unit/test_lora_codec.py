"""LoRA file formats: names are looked up, nothing is dropped silently, a round trip changes nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.unit.lora_toys import toy
from videox_fun.utils.lora_codec import (
    FORMATS,
    LoraPair,
    LoraWeights,
    decode,
    encode,
    module_index,
    read_lora,
    read_tensors,
)
from videox_fun.utils.lora_names import (
    ModuleIndex,
    foreign_kinds,
    split_key,
    to_diffusers_name,
    to_native_name,
    wan_module_names,
)

INDEX = module_index(toy())
AWKWARD = ModuleIndex(["blocks.0.attn.to_out.0", "blocks.0.img_mlp.fc1", "img_in", "blocks.0.cross_attn.k_img"])


def _pair(rank: int = 4, alpha: float | None = 2.0, size: int = 16) -> LoraPair:
    return LoraPair(torch.randn(rank, size), torch.randn(size, rank), None if alpha is None else torch.tensor(alpha))


def _weights(names: tuple[str, ...] = ("blocks.0.self_attn.q", "blocks.1.ffn.0"), **pair: float | None) -> LoraWeights:
    return LoraWeights({name: _pair(**pair) for name in names})


def _same(left: LoraWeights, right: LoraWeights) -> bool:
    return left.transformer.keys() == right.transformer.keys() and all(
        torch.equal(a.down, b.down) and torch.equal(a.up, b.up) and a.scale == b.scale
        for a, b in ((left.transformer[name], right.transformer[name]) for name in left.transformer))


@pytest.mark.parametrize(
    ("stem", "style"),
    [
        ("blocks.0.self_attn.q", "peft"),
        ("module.blocks.0.self_attn.q", "peft"),
        ("pipe.dit.blocks.0.self_attn.q", "peft"),
        ("base_model.model.blocks.0.self_attn.q", "peft"),
        ("base_model.model.module.blocks.0._orig_mod.self_attn.q", "peft"),
        ("diffusion_model.blocks.0.self_attn.q", "comfyui"),
        ("transformer.blocks.0.attn1.to_q", "diffusers"),
        ("lora_unet__blocks_0_self_attn_q", "kohya"),
        ("lora_unet_blocks_0_self_attn_q", "kohya"),
        ("lora_transformer_blocks_0_attn1_to_q", "kohya"),
    ],
)
def test_every_spelling_finds_the_module(stem: str, style: str) -> None:
    found = INDEX.resolve(stem)
    assert found is not None
    assert (found.name, found.component, found.style) == ("blocks.0.self_attn.q", "transformer", style)


@pytest.mark.parametrize("stem", ["lora_unet__blocks_0_self_attn_zz", "blocks.7.self_attn.q", "lora_te_x", "q", ""])
def test_unknown_spellings_find_nothing(stem: str) -> None:
    assert INDEX.resolve(stem) is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a.b.lora_A.weight", ("a.b", "down")),
        ("a.b.lora_A.default.weight", ("a.b", "down")),
        ("a.b.lora_B.my_adapter.weight", ("a.b", "up")),
        ("a.b.lora_up.weight", ("a.b", "up")),
        ("a.b.lora_A", ("a.b", "down")),
        ("a.b.lora.down.weight", ("a.b", "down")),
        ("a.b_lora.up.weight", ("a.b", "up")),
        ("lora_unet__a.alpha", ("lora_unet__a", "alpha")),
        ("a.b.weight", None),
    ],
)
def test_split_key(key: str, expected: tuple[str, str] | None) -> None:
    assert split_key(key) == expected


def test_names_with_underscores_are_looked_up_not_guessed() -> None:
    """Case 73: ``to_out.0`` and ``img_mlp.fc1`` survive, and kohya -> diffusers-like -> kohya is the identity."""
    assert AWKWARD.resolve("lora_unet_blocks_0_attn_to_out_0").name == "blocks.0.attn.to_out.0"
    assert AWKWARD.resolve("lora_unet_blocks_0_img_mlp_fc1").name == "blocks.0.img_mlp.fc1"
    assert AWKWARD.resolve("lora_unet_img_in").name == "img_in"
    assert AWKWARD.resolve("lora_unet__blocks_0_cross_attn_k_img").name == "blocks.0.cross_attn.k_img"
    weights = LoraWeights({name: _pair() for name in AWKWARD.names})
    first, _ = encode(weights, format="kohya")
    middle, metadata = encode(decode(first, index=AWKWARD), format="peft")
    last, _ = encode(decode(middle, index=AWKWARD, metadata=metadata), format="kohya")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_ambiguous_underscore_name_is_an_error() -> None:
    index = ModuleIndex(["a.b_c", "a_b.c"])
    with pytest.raises(ValueError, match="ambiguous"):
        index.resolve("lora_unet__a_b_c")
    assert index.resolve("a.b_c").name == "a.b_c"


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMATS, 2)))
def test_round_trip_through_any_two_formats(first: str, second: str) -> None:
    torch.manual_seed(0)
    weights = _weights()
    weights.transformer["text_embedding.0"] = _pair(rank=2, alpha=3.0)  # another rank and alpha than the rest
    tensors, metadata = encode(weights, format=first)
    read = decode(tensors, index=INDEX, metadata=metadata)
    again, metadata_again = encode(read, format=second)
    back = decode(again, index=INDEX, metadata=metadata_again)
    assert _same(weights, read)
    assert _same(weights, back)
    final, _ = encode(back, format=first)
    assert final.keys() == tensors.keys()
    assert all(torch.equal(final[key], tensors[key]) for key in final)


@pytest.mark.parametrize("format", FORMATS)
def test_detected_format(format: str) -> None:
    tensors, metadata = encode(_weights(), format=format)
    read = decode(tensors, index=INDEX, metadata=metadata)
    assert read.format == format
    assert (read.report.matched, read.report.total) == (2, 2)


def test_file_without_alpha_keeps_factor_one() -> None:
    weights = _weights(alpha=None)
    for format in FORMATS:
        tensors, metadata = encode(weights, format=format)
        read = decode(tensors, index=INDEX, metadata=metadata)
        assert {pair.scale for pair in read.transformer.values()} == {1.0}
    assert not any(key.endswith(".alpha") for key in encode(weights, format="kohya")[0])


def test_metadata_strength_of_peft_files() -> None:
    """Plain keys, PEFT's own configuration with patterns, and rank-stabilised scaling."""
    tensors, _ = encode(_weights(alpha=None), format="peft")
    plain = decode(tensors, index=INDEX, metadata={"lora_alpha": "2", "rank": "4"})
    assert {pair.scale for pair in plain.transformer.values()} == {0.5}
    config = {"r": 4, "lora_alpha": 2, "alpha_pattern": {"ffn.0": 8}}
    patterned = decode(tensors, index=INDEX, metadata={"lora_adapter_metadata": json.dumps(config)})
    assert patterned.transformer["blocks.0.self_attn.q"].scale == 0.5
    assert patterned.transformer["blocks.1.ffn.0"].scale == 2.0
    rslora = decode(tensors, index=INDEX,
                    metadata={"lora_adapter_metadata": json.dumps({"lora_alpha": 2, "use_rslora": True})})
    assert rslora.transformer["blocks.1.ffn.0"].scale == pytest.approx(2 / 4**0.5)


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("dora_scale", "DoRA"),
        ("lora_magnitude_vector.default", "DoRA"),
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("lora_mid.weight", "LoCon"),
        ("lora_B.bias", "bias"),
        ("diff_b", "difference"),
    ],
)
def test_other_adapter_kinds_are_refused_by_name(suffix: str, kind: str) -> None:
    """Case 74."""
    tensors, _ = encode(_weights(), format="peft")
    tensors[f"blocks.0.self_attn.q.{suffix}"] = torch.ones(1)
    with pytest.raises(ValueError, match=kind) as error:
        decode(tensors, index=INDEX, source="x.safetensors")
    assert f"blocks.0.self_attn.q.{suffix}" in str(error.value)
    assert foreign_kinds(tensors)


def test_dora_named_only_in_the_metadata_is_refused() -> None:
    tensors, _ = encode(_weights(), format="peft")
    with pytest.raises(ValueError, match="DoRA"):
        decode(tensors, index=INDEX, metadata={"lora_adapter_metadata": json.dumps({"use_dora": True})})


def test_default_adapter_infix_is_read() -> None:
    """Case 75."""
    tensors, _ = encode(_weights(), format="peft")
    infixed = {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}
    assert _same(decode(tensors, index=INDEX), decode(infixed, index=INDEX))


def test_no_match_and_partial_match_raise_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Cases 75 and 79."""
    with pytest.raises(ValueError, match="0 of 2 modules match.*no effect"):
        decode(encode(_weights(("other.a", "other.b")), format="peft")[0], index=INDEX)
    mixed = encode(_weights(("blocks.0.self_attn.q", "conv.patch")), format="peft")[0]
    with pytest.raises(ValueError, match="1 of 2 modules match.*conv.patch"):
        decode(mixed, index=INDEX)
    with caplog.at_level("WARNING"):
        assert decode(mixed, index=INDEX, allow_partial=True).report.unexpected == ("conv.patch",)
    assert "conv.patch" in caplog.text
    with pytest.raises(ValueError, match="0 of 0"):
        decode({}, index=INDEX)


def test_unrecognised_keys_count_as_unmatched() -> None:
    tensors, _ = encode(_weights(), format="peft")
    with pytest.raises(ValueError, match="2 of 3 modules match.*blocks.0.strange"):
        decode({**tensors, "blocks.0.strange": torch.ones(1)}, index=INDEX)


@pytest.mark.parametrize("drop", ["lora_A", "lora_B"])
def test_half_a_pair_is_an_error(drop: str) -> None:
    tensors = {key: value for key, value in encode(_weights(), format="peft")[0].items()
               if not (drop in key and "ffn" in key)}
    with pytest.raises(ValueError, match="incomplete.*blocks.1.ffn.0"):
        decode(tensors, index=INDEX)


def test_two_adapters_and_misfitting_matrices_are_errors() -> None:
    tensors, _ = encode(_weights(), format="peft")
    twice = {**tensors, "blocks.0.self_attn.q.lora_A.second.weight": torch.ones(4, 16)}
    with pytest.raises(ValueError, match="several adapters"):
        decode(twice, index=INDEX)
    with pytest.raises(ValueError, match="adapts module 'blocks.0.self_attn.q' twice"):
        decode({**tensors, **encode(_weights(("blocks.0.self_attn.q",)), format="kohya")[0]}, index=INDEX)
    with pytest.raises(ValueError, match="do not fit together"):
        decode({**tensors, "blocks.1.ffn.0.lora_A.weight": torch.ones(5, 16)}, index=INDEX)


def test_text_encoder_part() -> None:
    encoder = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"q": nn.Linear(4, 4)})})])})
    index = module_index(toy(), text_encoder=encoder)
    weights = LoraWeights({"blocks.0.self_attn.q": _pair()}, {"blocks.0.attn.q": _pair(size=4)})
    tensors, _ = encode(weights, format="kohya")
    assert "lora_te_blocks_0_attn_q.lora_down.weight" in tensors
    assert list(decode(tensors, index=index).text_encoder) == ["blocks.0.attn.q"]
    assert not decode(tensors, index=index, skip_text=True).text_encoder
    with pytest.raises(ValueError, match="1 of 2"):
        decode(tensors, index=INDEX)
    for format in ("peft", "diffusers"):
        with pytest.raises(ValueError, match="text-encoder"):
            encode(weights, format=format)


def test_comfyui_form_depends_on_the_layer_it_looks_for() -> None:
    """ComfyUI maps the double underscore only in files that adapt the first cross attention's ``k``."""
    flat, _ = encode(_weights(("blocks.0.cross_attn.k", "blocks.0.self_attn.q")), format="comfyui")
    assert "lora_unet__blocks_0_self_attn_q.alpha" in flat
    dotted, _ = encode(_weights(("blocks.0.self_attn.q",)), format="comfyui")
    assert set(dotted) == {f"diffusion_model.blocks.0.self_attn.q.{part}"
                           for part in ("lora_A.weight", "lora_B.weight", "alpha")}


def test_diffusers_format_refuses_layers_without_a_counterpart() -> None:
    with pytest.raises(ValueError, match="control_adapter.conv"):
        encode(_weights(("control_adapter.conv",)), format="diffusers")
    with pytest.raises(ValueError, match="Unknown LoRA format"):
        encode(_weights(), format="lycoris")


def test_native_and_diffusers_names_are_inverse() -> None:
    names = wan_module_names()
    renamed = [to_diffusers_name(name) for name in names]
    assert None not in renamed
    assert [to_native_name(name) for name in renamed] == names
    assert len(set(renamed)) == len(names)
    assert to_diffusers_name("blocks.3.cross_attn.k_img") == "blocks.3.attn2.add_k_proj"


def test_reads_diffusers_names_into_a_native_model_and_back() -> None:
    native, diffusers = _weights(), ModuleIndex(["blocks.0.attn1.to_q", "blocks.1.ffn.net.0.proj"])
    tensors, metadata = encode(native, format="kohya")
    read = decode(tensors, index=diffusers, metadata=metadata)
    assert set(read.transformer) == {"blocks.0.attn1.to_q", "blocks.1.ffn.net.0.proj"}
    again, metadata = encode(read, format="diffusers")
    assert _same(native, decode(again, index=INDEX, metadata=metadata))
    comfy, _ = encode(read, format="comfyui")
    assert _same(native, decode(comfy, index=INDEX))


def test_adapter_folder_of_peft(tmp_path: Path) -> None:
    tensors, _ = encode(_weights(), format="peft")
    save_file({f"base_model.model.{key}": value for key, value in tensors.items()},
              str(tmp_path / "adapter_model.safetensors"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}), encoding="utf-8")
    read = read_lora(tmp_path, index=INDEX)
    assert {pair.scale for pair in read.transformer.values()} == {2.0}
    with pytest.raises(ValueError, match="holds no LoRA"):
        read_lora(tmp_path.parent / tmp_path.name / "..", index=INDEX)


def test_torch_files_are_read_without_running_code(tmp_path: Path) -> None:
    tensors, _ = encode(_weights(), format="kohya")
    torch.save({"state_dict": tensors}, tmp_path / "lora.pt")
    assert read_lora(tmp_path / "lora.pt", index=INDEX).report.matched == 2
    marker = tmp_path / "ran"
    torch.save(_Evil(str(marker)), tmp_path / "evil.pt")
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        read_tensors(tmp_path / "evil.pt")
    assert not marker.exists()
    with pytest.raises(ValueError, match="does not exist"):
        read_tensors(tmp_path / "none.safetensors")


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["native_trained_fp32", "peft", "peft_kohya"])
def test_recorded_files_round_trip(data_dir: Path, name: str) -> None:
    names = json.loads((data_dir / "lora" / "index.json").read_text(encoding="utf-8"))["parameters"]["wan21_t2v"]
    index = ModuleIndex(key.removesuffix(".weight") for key in names if key.endswith(".weight"))
    path = data_dir / "lora" / f"{name}.safetensors"
    saved: dict[str, Tensor] = load_file(path)
    read = read_lora(path, index=index)
    same = encode(read, format="peft" if name == "peft" else "kohya")[0]
    assert same.keys() == saved.keys()
    assert all(torch.equal(same[key], saved[key]) and same[key].dtype == saved[key].dtype for key in saved)
