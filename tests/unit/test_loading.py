"""Checkpoint formats, strictness, key maps, and the lazy package of models."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from videox_fun.models import keymaps, loading
from videox_fun.models.wan_transformer3d import Wan2_2Transformer3DModel, WanTransformer3DModel

SIZES = {
    "in_dim": 4, "out_dim": 4, "dim": 24, "ffn_dim": 48, "freq_dim": 32, "text_dim": 16, "text_len": 8, "num_heads": 2,
    "num_layers": 2,
}  # fmt: skip


def randomised(cls: type = WanTransformer3DModel, **changes: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = cls(**{**SIZES, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return randomised()


def write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None, *,
          name: str = "diffusion_pytorch_model.safetensors") -> Path:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    native = {"_class_name": "WanModel", "_diffusers_version": "0.30.0", "model_type": "t2v", "eps": 1e-6, **SIZES}
    (folder / "config.json").write_text(json.dumps(native if config is None else config))
    state = {key: value.contiguous() for key, value in state.items()}
    save_file(state, folder / name) if name.endswith("safetensors") else torch.save(state, folder / name)
    return folder


def load(path: Path, cls: type = WanTransformer3DModel, **kwargs: Any) -> WanTransformer3DModel:
    return cls.from_pretrained(str(path), **{"torch_dtype": torch.float32, "strict": True, **kwargs})


def assert_same(loaded: nn.Module, state: dict[str, torch.Tensor]) -> None:
    own = loaded.state_dict()
    assert own.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(own[key], value), key


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin",
                                  "diffusion_pytorch_model.pth", "wan_t2v.safetensors"])  # fmt: skip
def test_one_file(model: WanTransformer3DModel, tmp_path: Path, name: str) -> None:
    loaded = load(write(tmp_path, model.state_dict(), name=name))
    assert_same(loaded, model.state_dict())
    assert loaded.load_report.complete and loaded.load_report.files == [name]
    assert loaded.load_report.loaded == len(model.state_dict())
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert load(tmp_path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert_same(load(tmp_path / name), model.state_dict())  # the file itself, with its config beside it


def test_save_pretrained_and_subfolder(model: WanTransformer3DModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "transformer")
    assert_same(load(tmp_path, subfolder="transformer"), model.state_dict())


def test_default_type_is_bfloat16_and_gradients_reach_loaded_weights(
    model: WanTransformer3DModel, tmp_path: Path
) -> None:
    write(tmp_path, model.state_dict())
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    out = loaded(torch.zeros(1, 4, 1, 4, 4), torch.tensor([5.0]), torch.zeros(1, 3, 16))
    out.float().sum().backward()
    assert loaded.blocks[0].self_attn.v.weight.grad is not None


@pytest.mark.parametrize("indexed", [True, False])
def test_shards(model: WanTransformer3DModel, tmp_path: Path, indexed: bool) -> None:
    state = model.state_dict()
    keys = sorted(state)
    shards = {"diffusion_pytorch_model-00001-of-00002.safetensors": keys[::2],
              "diffusion_pytorch_model-00002-of-00002.safetensors": keys[1::2]}  # fmt: skip
    for name, part in shards.items():
        write(tmp_path, {key: state[key] for key in part}, name=name)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    if indexed:
        weight_map = {key: name for name, part in shards.items() for key in part}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        save_file({"stray": torch.zeros(1)}, tmp_path / "lora.safetensors")
    assert_same(load(tmp_path), state)
    if indexed:
        (tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match="00002-of-00002.*incomplete"):
            load(tmp_path)


def test_wrapped_and_prefixed_states(model: WanTransformer3DModel, tmp_path: Path) -> None:
    prefixed = {f"model.diffusion_model.{key}": value for key, value in model.state_dict().items()}
    assert_same(load(write(tmp_path / "a", prefixed)), model.state_dict())
    write(tmp_path / "b", model.state_dict())
    (tmp_path / "b" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"state_dict": model.state_dict(), "step": 3}, tmp_path / "b" / "diffusion_pytorch_model.bin")
    assert_same(load(tmp_path / "b"), model.state_dict())


def test_code_in_a_pickle_is_not_run(model: WanTransformer3DModel, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    write(tmp_path, model.state_dict())
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"a": Evil()}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", ["t2v", "i2v", "wan22"])
def test_diffusers_folder(tmp_path: Path, case: str) -> None:
    from diffusers import WanTransformer3DModel as Theirs

    torch.manual_seed(0)
    image = {"image_dim": 1280, "added_kv_proj_dim": 24} if case == "i2v" else {}
    theirs = Theirs(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                    freq_dim=32, ffn_dim=48, num_layers=2, **image)  # fmt: skip
    theirs.save_pretrained(tmp_path)
    cls = Wan2_2Transformer3DModel if case == "wan22" else WanTransformer3DModel
    mapping = {"dict_mapping": {"in_dim": "in_channels", "dim": "hidden_size"}, "transformer_subpath": "./"}
    ours = load(tmp_path, cls, transformer_additional_kwargs=mapping)
    assert ours.load_report.layout == "diffusers" and ours.load_report.complete
    assert (ours.config.in_channels, ours.config.hidden_size, ours.config.text_len) == (4, 24, 512)
    x, text = torch.randn(1, 4, 2, 4, 4), torch.randn(1, 512, 16)
    inputs: dict[str, Any] = {"clip_fea": torch.randn(1, 257, 1280)} if image else {}
    with torch.no_grad():
        expected = theirs(x, torch.tensor([300.0]), text, inputs.get("clip_fea"), return_dict=False)[0]
        torch.testing.assert_close(ours(x, torch.tensor([300.0]), text, **inputs), expected, atol=1e-5, rtol=1e-4)
    back = keymaps.to_diffusers_state(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    assert keymaps.to_native_state(back).keys() == ours.state_dict().keys()


def test_diffusers_configs_that_cannot_be_had() -> None:
    base = {"num_attention_heads": 2, "attention_head_dim": 12}
    for key, value in (("pos_embed_seq_len", 514), ("qk_norm", "layer_norm"), ("rope_max_seq_len", 2048)):
        with pytest.raises(ValueError, match=key):
            keymaps.diffusers_config_to_native({**base, key: value})
    assert keymaps.diffusers_config_to_native({**base, "qk_norm": None})["qk_norm"] is False
    assert keymaps.native_to_diffusers("blocks.7.cross_attn.o") == "blocks.7.attn2.to_out.0"
    assert keymaps.diffusers_to_native("scale_shift_table") == "head.modulation"
    assert keymaps.native_to_diffusers("ref_conv.weight") == "ref_conv.weight"


def test_diffsynth_config(model: WanTransformer3DModel, tmp_path: Path) -> None:
    config = {key: value for key, value in SIZES.items() if key != "text_len"}
    config |= {"has_image_input": False, "has_ref_conv": True, "has_image_pos_emb": False, "eps": 1e-6,
               "patch_size": [1, 2, 2], "seperated_timestep": True}  # fmt: skip
    reference = randomised(add_ref_conv=True, in_dim_ref_conv=16)
    loaded = load(write(tmp_path, reference.state_dict(), config))
    assert_same(loaded, reference.state_dict())
    kept = ("model_type", "cross_attn_type", "text_len", "in_channels", "hidden_size", "add_ref_conv", "qk_norm")
    assert [loaded.config[key] for key in kept] == ["t2v", "cross_attn", 512, 4, 24, True, True]
    with pytest.raises(ValueError, match="has_image_pos_emb"):
        keymaps.diffsynth_config_to_native({**config, "has_image_pos_emb": True})


# ---- strictness ------------------------------------------------------------------------------------------------------


def test_unknown_config_keys(model: WanTransformer3DModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"model_type": "t2v", **SIZES, "patch_size_t": 2, "ofs_embed_dim": 512}
    write(tmp_path, model.state_dict(), config)
    with pytest.raises(ValueError, match="ofs_embed_dim, patch_size_t"):
        load(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, strict=False)
    assert loaded.load_report.ignored_config == ["ofs_embed_dim", "patch_size_t"]
    assert "patch_size_t" in caplog.text and "patch_size_t" not in loaded.config
    with pytest.raises(ValueError, match="in_chanels"):
        load(write(tmp_path, model.state_dict()), transformer_additional_kwargs={"in_chanels": 4})


def test_wan22_ignores_only_its_own_cross_attention(tmp_path: Path) -> None:
    reference = randomised(Wan2_2Transformer3DModel)
    reference.save_pretrained(tmp_path)
    assert_same(load(tmp_path, Wan2_2Transformer3DModel), reference.state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "cross_attn_type": "i2v_cross_attn"}))
    with pytest.raises(ValueError, match="cross_attn_type"):
        load(tmp_path, Wan2_2Transformer3DModel)


def test_image_weights_missing_or_left_over(model: WanTransformer3DModel, tmp_path: Path) -> None:
    """Text weights in an image model and the other way round stop a run, with the names."""
    image = randomised(model_type="i2v")
    config = {"model_type": "i2v", **SIZES}
    write(tmp_path / "a", model.state_dict(), config)
    with pytest.raises(ValueError, match=r"not in the file: .*k_img.weight \(x2\).*--allow_partial_load"):
        load(tmp_path / "a")
    loaded = load(tmp_path / "a", allow_partial=True)
    missing = image.state_dict().keys() - model.state_dict().keys()
    assert set(loaded.load_report.missing) == missing
    assert loaded.blocks[0].cross_attn.norm_k_img.weight.eq(1).all()
    assert loaded.img_emb.proj[1].bias.eq(0).all() and loaded.img_emb.proj[1].weight.std() > 0.01
    with pytest.raises(ValueError, match="img_emb"):
        load(write(tmp_path / "b", image.state_dict()))
    assert load(tmp_path / "b", strict=False).load_report.unexpected == sorted(missing)


def test_shape_mismatch_is_named(model: WanTransformer3DModel, tmp_path: Path) -> None:
    state = {**model.state_dict(), "head.head.weight": torch.zeros(32, 24)}
    write(tmp_path, state)
    with pytest.raises(ValueError, match=r"head.head.weight \(file \[32, 24\], model \[16, 24\]\)"):
        load(tmp_path)
    assert load(tmp_path, allow_partial=True).head.head.weight.shape == (16, 24)


@pytest.mark.parametrize("channels", [9, 2])
def test_patch_embedding_rule(model: WanTransformer3DModel, tmp_path: Path, channels: int) -> None:
    write(tmp_path, model.state_dict())
    loaded = load(tmp_path, transformer_additional_kwargs={"in_dim": channels})
    common = min(channels, 4)
    own, original = loaded.patch_embedding.weight, model.patch_embedding.weight
    assert own.shape[1] == channels and torch.equal(own[:, :common], original[:, :common])
    assert own[:, common:].eq(0).all()
    assert len(loaded.load_report.adapted) == 1 and loaded.load_report.complete


def test_rule_for_missing_weights_by_name(model: WanTransformer3DModel, tmp_path: Path) -> None:
    gone = ("modulation", "norm_q.weight", "head.head.weight", "ffn.0", "text_embedding.0.weight")
    write(tmp_path, {key: value for key, value in model.state_dict().items() if not any(part in key for part in gone)})
    loaded = load(tmp_path, strict=False, low_cpu_mem_usage=True)
    block = loaded.blocks[1]
    assert block.modulation.eq(0).all() and block.self_attn.norm_q.weight.eq(1).all()
    assert loaded.head.head.weight.eq(0).all() and block.ffn[0].bias.eq(0).all()
    assert 0.005 < loaded.text_embedding[0].weight.std() < 0.05
    assert block.ffn[0].weight.std() > 0.05


def test_mistakes_are_named(model: WanTransformer3DModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path / "nowhere")
    write(tmp_path, model.state_dict())
    with pytest.raises(ValueError, match="no 'width'"):
        load(tmp_path, transformer_additional_kwargs={"dict_mapping": {"width": "dim"}})
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match="no transformer weights"):
        load(tmp_path)


def test_override_of_a_live_model(model: WanTransformer3DModel, tmp_path: Path) -> None:
    other = randomised()
    with torch.no_grad():
        other.head.head.bias.fill_(7)
    save_file(keymaps.to_diffusers_state(other.state_dict()), tmp_path / "other.safetensors")
    live = randomised().bfloat16()
    parameter = live.head.head.bias
    report = loading.load_weights(live, tmp_path / "other.safetensors", strict=True)
    assert report.complete and live.head.head.bias is parameter and parameter.eq(7).all()
    assert live.dtype == torch.bfloat16
    save_file({"head.head.bias": torch.ones(16), "extra": torch.ones(1)}, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match="extra"):
        loading.load_weights(live, tmp_path / "part.safetensors", strict=True)
    assert parameter.eq(7).all()  # nothing was copied
    loading.load_weights(live, tmp_path / "part.safetensors", strict=True, allow_partial=True)
    assert parameter.eq(1).all()
    save_file({"x": torch.ones(1)}, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="none of its 1 tensors"):
        loading.load_weights(live, tmp_path / "none.safetensors")


def test_tiny_golden_checkpoint(golden_checkpoints: Path) -> None:
    folder = golden_checkpoints / "ckpt_inp"
    yaml = {"transformer_subpath": "./", "dict_mapping": {"in_dim": "in_channels", "dim": "hidden_size"}}
    loaded = load(folder, transformer_additional_kwargs=yaml)
    assert_same(loaded, load_file(folder / "diffusion_pytorch_model.safetensors"))
    assert (loaded.config.in_channels, loaded.config.hidden_size) == (36, 48)


# ---- the package -----------------------------------------------------------------------------------------------------


def test_importing_the_package_is_light() -> None:
    code = ("import sys, videox_fun.models; "
            "print(sorted(m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules))")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_available_name_resolves() -> None:
    import videox_fun.models as models

    names = models.available_names()
    assert {"WanTransformer3DModel", "Wan2_2Transformer3DModel", "WanRMSNorm", "WanSelfAttention"} <= set(names)
    for name in names:
        assert getattr(models, name).__name__ == name
        assert name in dir(models)
    assert models.wan_transformer3d.WanTransformer3DModel is models.WanTransformer3DModel
    assert models.AutoTokenizer.__module__.startswith("transformers")


def test_names_that_are_not_there_yet_say_so() -> None:
    import videox_fun.models as models

    absent = sorted(set(models.__all__) - set(models.available_names()) - set(models._LIBRARY_OF) - models._OPTIONAL)
    for name in absent:
        with pytest.raises(ImportError, match=f"{name} is a name of VideoX-Fun .* does not implement yet"):
            getattr(models, name)
    with pytest.raises(AttributeError, match="WanTransformer4D"):
        models.WanTransformer4D  # noqa: B018
