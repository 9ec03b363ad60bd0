"""The load matrix: every LoRA file we write, in every program that is said to read it.

Consumers are the real loaders of diffusers and peft, our own, and ComfyUI's documented key rules (its loader is not
a library). A cell is ``yes`` when the consumer's output equals the training-time output within 1e-5, ``no`` when it
loads nothing or refuses. The table in docs/lora.md is this test's result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.unit.lora_toys import context, lora_args, randomize
from videox_fun.models.wan_transformer3d import WanTransformer3DModel
from videox_fun.training.context import Player
from videox_fun.training.trainable import make_trainable
from videox_fun.utils.lora_codec import encode, module_index, read_lora, read_tensors
from videox_fun.utils.lora_utils import merge_lora

TINY = {"patch_size": (1, 2, 2), "text_len": 12, "in_dim": 16, "dim": 48, "ffn_dim": 96, "freq_dim": 32, "text_dim": 24,
        "out_dim": 16, "num_heads": 2, "num_layers": 2, "in_channels": 16, "hidden_size": 48}
CONSUMERS = ("this project", "peft", "diffusers", "ComfyUI")
# file -> consumers that read it; the rest must refuse it or load nothing.
EXPECTED = {
    "native checkpoint-N.safetensors": {"this project", "ComfyUI"},
    "native, without cross_attn.k": {"this project"},
    "native, converted to comfyui, without cross_attn.k": {"this project", "diffusers", "ComfyUI"},
    "native, converted to diffusers": {"this project", "diffusers"},
    "native, converted to peft": {"this project", "peft"},
    "native, every linear layer, converted to diffusers": {"this project", "diffusers"},
    "PEFT checkpoint-N.safetensors": {"this project", "peft"},
    "PEFT checkpoint-N-compatible_with_comfyui.safetensors": {"this project", "ComfyUI"},
    "PEFT, without cross_attn.k, -compatible_with_comfyui": {"this project", "diffusers", "ComfyUI"},
}
SELF_ONLY = "self_attn.q,self_attn.v"


def _base() -> WanTransformer3DModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WanTransformer3DModel(**TINY)
        nn.init.normal_(model.head.head.weight, std=0.1)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _output(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 3, 4, 6, generator=generator)
    text = torch.randn(1, 12, 24, generator=generator)
    t = torch.tensor([500.0])
    if type(model).__module__.startswith("diffusers."):
        return model(x, t, text, return_dict=False)[0]
    return model(x, t, text)


def _train(folder: Path, *, convert: str | None = None, file: int = 0, **flags: object) -> tuple[Path, Tensor]:
    """A LoRA as a run would leave it, its file, and the output of the model in training."""
    args = lora_args(**flags)
    ctx = context(args)
    trainable, player = make_trainable(ctx.spec, args), Player("transformer", _base(), None)
    trainable.attach(ctx, player)
    randomize(player.model)
    exported = trainable.export(player, layout="bare", dtype=torch.float32)[file]
    path = folder / exported.name.format(stem="checkpoint-4")
    save_file(exported.tensors, str(path), exported.metadata)
    if convert is not None:
        tensors, metadata = encode(read_lora(path, index=module_index(player.model)), format=convert)
        path = folder / f"{convert}.safetensors"
        save_file(tensors, str(path), metadata or None)
    return path, _output(player.model)


def _make(name: str, folder: Path) -> tuple[Path, Tensor]:
    target = {"target_name": SELF_ONLY} if "without cross_attn.k" in name else {}
    if "every linear" in name:
        target = {"target_name": None}
    if name.startswith("PEFT"):
        return _train(folder, file=int("compatible" in name), use_peft_lora=True, **target)
    convert = name.split("converted to ")[1].split(",")[0] if "converted" in name else None
    return _train(folder, convert=convert, **target)


def _ours(path: Path) -> Tensor:
    pipeline = SimpleNamespace(transformer=_base())
    merge_lora(pipeline, path, 1.0)
    return _output(pipeline.transformer)


def _peft(path: Path) -> Tensor:
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    tensors, metadata = read_tensors(path)
    names = sorted({key.split(".lora_A")[0] for key in tensors if ".lora_A" in key})
    model = _base()
    inject_adapter_in_model(LoraConfig(r=int(metadata["rank"]), lora_alpha=float(metadata["lora_alpha"]),
                                       target_modules=names), model)
    result = set_peft_model_state_dict(model, tensors)
    assert not result.unexpected_keys
    return _output(model)


def _diffusers(path: Path) -> Tensor:
    from diffusers import WanPipeline
    from diffusers import WanTransformer3DModel as Theirs
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    model = Theirs(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16,
                   text_dim=24, freq_dim=32, ffn_dim=96, num_layers=2)
    model.load_state_dict(convert_wan_transformer_to_diffusers(dict(_base().state_dict())))
    state, metadata = WanPipeline.lora_state_dict(str(path), return_lora_metadata=True)
    WanPipeline.load_lora_into_transformer(state, transformer=model.eval(), adapter_name="a", metadata=metadata)
    return _output(model)


def _comfyui(path: Path) -> Tensor:
    """ComfyUI's rules: which keys its map holds for a Wan model, when it renames, and how it scales."""
    tensors, _ = read_tensors(path)
    if "lora_unet__blocks_0_cross_attn_k.lora_down.weight" in tensors:
        tensors = {key.replace("lora_unet__", "lora_unet_", 1): value for key, value in tensors.items()}
    model = _base()
    loaded = 0
    for name, module in model.named_modules():
        for stem in (f"diffusion_model.{name}", f"lora_unet_{name.replace('.', '_')}"):
            for up, down in (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight")):
                if f"{stem}.{up}" in tensors:
                    a, b = tensors[f"{stem}.{down}"], tensors[f"{stem}.{up}"]
                    alpha = tensors.get(f"{stem}.alpha")
                    scale = 1.0 if alpha is None else alpha.item() / a.shape[0]
                    module.weight.add_(scale * b @ a)
                    loaded += 1
    if not loaded:
        raise LookupError("no key was mapped")
    return _output(model)


LOADERS: dict[str, Callable[[Path], Tensor]] = {
    "this project": _ours, "peft": _peft, "diffusers": _diffusers, "ComfyUI": _comfyui}


def test_every_file_loads_where_it_should(tmp_path: Path, repo_root: Path) -> None:
    plain = _output(_base())
    table: dict[str, list[str]] = {}
    for name in EXPECTED:
        folder = tmp_path / name.replace(" ", "_").replace(",", "")
        folder.mkdir()
        path, want = _make(name, folder)
        assert (want - plain).abs().max() > 0.01
        table[name] = []
        for consumer in CONSUMERS:
            table[name].append(_cell(consumer, path, want, plain))
    rows = [f"| file | {' | '.join(CONSUMERS)} |", "|---" * (len(CONSUMERS) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(cells)} |" for name, cells in table.items()]
    assert table == {name: ["yes" if consumer in readers else "no" for consumer in CONSUMERS]
                     for name, readers in EXPECTED.items()}
    assert "\n".join(rows) in (repo_root / "docs" / "lora.md").read_text(encoding="utf-8")


def _cell(consumer: str, path: Path, want: Tensor, plain: Tensor) -> str:
    try:
        got = LOADERS[consumer](path)
    except (KeyError, LookupError, ValueError, IndexError):
        return "no"
    if torch.equal(got, plain) or (got - plain).abs().max() < 1e-5:
        return "no"
    assert (got - want).abs().max() < 1e-5, f"{consumer} reads '{path.name}' with another strength"
    return "yes"


@pytest.mark.parametrize("alpha", [2, 8])
@pytest.mark.parametrize("peft", [False, True])
def test_weight_one_is_the_training_strength(tmp_path: Path, peft: bool, alpha: int) -> None:
    """Case 77, for both kinds of file and both readers of alpha."""
    for file in range(1 + peft):
        path, want = _train(tmp_path, file=file, use_peft_lora=peft, network_alpha=alpha)
        torch.testing.assert_close(_ours(path), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
@pytest.mark.parametrize("peft", [False, True])
def test_save_and_reload_per_family(tmp_path: Path, variant: str, peft: bool) -> None:
    """Case 86: the image-to-video layers are named, saved and found again too."""
    model = WanTransformer3DModel(**{**TINY, "model_type": variant})
    args = lora_args(use_peft_lora=peft, target_name="q,k,v,k_img,v_img,ffn.0" if variant == "i2v" else "q,k,v,ffn.0")
    ctx = context(args)
    trainable, player = make_trainable(ctx.spec, args), Player("transformer", model, None)
    trainable.attach(ctx, player)
    randomize(model)
    file = trainable.export(player, layout="bare", dtype=torch.float32)[0]
    save_file(file.tensors, str(tmp_path / "x.safetensors"), file.metadata)
    fresh = SimpleNamespace(transformer=WanTransformer3DModel(**{**TINY, "model_type": variant}))
    read = read_lora(tmp_path / "x.safetensors", index=module_index(fresh.transformer))
    assert read.report.matched == read.report.total == len(trainable._layer_names(player))
    assert ("blocks.1.cross_attn.k_img" in read.transformer) == (variant == "i2v")
    merge_lora(fresh, tmp_path / "x.safetensors", 1.0)
