"""Faults that people met with LoRA files: made by the training script, and given to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.real_runs import RealRun, checkpoint, refusal, same_tensors, set_up, train
from videox_fun.models.wan_transformer3d import WanTransformer3DModel
from videox_fun.utils.lora_cli import main as videox_lora
from videox_fun.utils.lora_utils import merge_lora

STILL = {"video_sample_n_frames": 1}  # as fast as it gets
FAST = {**STILL, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def base(model: Path) -> Callable[[], WanTransformer3DModel]:
    mapping = {"dict_mapping": {"in_dim": "in_channels", "dim": "hidden_size"}}
    return lambda: WanTransformer3DModel.from_pretrained(
        str(model), torch_dtype=torch.float32, transformer_additional_kwargs=mapping)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native file of two steps."""
    folder = tmp_path_factory.mktemp("native")
    train(model, folder, **FAST)
    return folder / "checkpoint-2.safetensors"


@torch.no_grad()
def output(network: torch.nn.Module) -> Tensor:
    x = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    text = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    return network.eval()(x=x, context=[text], t=torch.tensor([500.0]), seq_len=16)


def merged(network: WanTransformer3DModel, file: Path, weight: float = 1.0) -> Tensor:
    class Pipeline:
        transformer = network

    merge_lora(Pipeline(), str(file), weight)
    return output(network)


def rewritten(file: Path, target: Path, rename: Callable[[str], str], **extra: Tensor) -> Path:
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    save_file({**{rename(key): value for key, value in load_file(file).items()}, **extra}, target, metadata)
    return target


def started_from(model: Path, folder: Path, file: Path, **flags: Any) -> RealRun:
    return set_up(model, folder, resume_from_checkpoint=file, **STILL, **flags)


def test_case_73_kohya_names_go_round(model: Path, native: Path, tmp_path: Path, base, capsys) -> None:
    """Single underscores, as sd-scripts writes them: found by looking real module names up, and back again."""
    single = rewritten(native, tmp_path / "single.safetensors", lambda key: key.replace("lora_unet__", "lora_unet_"))
    run, plain = (started_from(model, tmp_path / name, file) for name, file in (("a", single), ("b", native)))
    assert same_tensors(run.trained(), plain.trained()) == []
    assert torch.equal(merged(base(), single), merged(base(), native))
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert videox_lora(["convert", str(native), str(there), "--to", "diffusers", "--base", str(model)]) == 0
    assert videox_lora(["convert", str(there), str(back), "--to", "kohya", "--base", str(model)]) == 0
    capsys.readouterr()
    assert same_tensors(load_file(back), load_file(native)) == []


@pytest.mark.parametrize(("key", "kind"), [("dora_scale", "DoRA"), ("lora_mid.weight", "LoCon"),
                                           ("hada_w1_a", "LoHa")])
def test_case_74_no_part_of_an_adapter_is_dropped(key, kind, model, native, tmp_path, base) -> None:
    stem = "lora_unet__blocks_0_self_attn_q"
    file = rewritten(native, tmp_path / "x.safetensors", lambda name: name, **{f"{stem}.{key}": torch.ones(48, 1)})
    said = refusal(model, tmp_path / "out", resume_from_checkpoint=file, **STILL)
    assert kind in said
    with pytest.raises(ValueError, match=kind):
        merged(base(), file)


def test_case_75_the_default_infix_is_read_and_no_match_is_an_error(model, tmp_path, base) -> None:
    train(model, tmp_path / "peft", use_peft_lora=True, **FAST)
    file = tmp_path / "peft" / "checkpoint-2.safetensors"
    infix = rewritten(file, tmp_path / "infix.safetensors", lambda key: key.replace(".weight", ".default.weight"))
    assert torch.equal(merged(base(), infix), merged(base(), file))
    assert (merged(base(), infix) - output(base())).abs().max() > 1e-3
    run = started_from(model, tmp_path / "out", infix, use_peft_lora=True)
    plain = started_from(model, tmp_path / "out2", file, use_peft_lora=True)
    assert same_tensors(run.trained(), plain.trained()) == []
    nothing = rewritten(file, tmp_path / "nothing.safetensors", lambda key: f"other.{key}")
    said = refusal(model, tmp_path / "out3", resume_from_checkpoint=nothing, use_peft_lora=True, **STILL)
    assert "0 of 16 modules match this model" in said


@pytest.mark.parametrize("alpha", [2, 8])
@pytest.mark.parametrize("peft", [False, True])
def test_case_77_weight_one_is_the_training_time_output(peft: bool, alpha: int, model, tmp_path, base) -> None:
    run = train(model, tmp_path, use_peft_lora=peft, network_alpha=alpha, **FAST)
    wanted = output(run.player.unwrapped())
    assert (wanted - output(base())).abs().max() > 1e-3
    for file in tmp_path.glob("checkpoint-2*.safetensors"):
        torch.testing.assert_close(merged(base(), file), wanted, rtol=0, atol=2e-5)


def test_case_79_layers_outside_attention_come_back(model: Path, tmp_path: Path, base) -> None:
    """Every linear layer: blocks, embeddings, head."""
    run = train(model, tmp_path / "out", target_name=None, **FAST)
    wanted, file = output(run.player.unwrapped()), tmp_path / "out" / "checkpoint-2.safetensors"
    stems = {key.split(".")[0] for key in load_file(file)}
    assert {"lora_unet__head_head", "lora_unet__text_embedding_0", "lora_unet__time_embedding_2"} <= stems
    torch.testing.assert_close(merged(base(), file), wanted, rtol=0, atol=2e-5)
    again = started_from(model, tmp_path / "again", file, target_name=None)
    assert torch.equal(output(again.player.unwrapped()), wanted)
    part = {key: value for key, value in load_file(file).items() if "head_head" not in key}
    save_file(part, tmp_path / "part.safetensors")
    said = refusal(model, tmp_path / "x", resume_from_checkpoint=tmp_path / "part.safetensors", target_name=None,
                   **STILL)
    assert "head.head" in said


def test_case_85_targets_that_match_nothing_and_that_match_embedders(model: Path, tmp_path: Path, caplog) -> None:
    said = refusal(model, tmp_path / "a", target_name="q,kk", **STILL)
    assert "no linear layer of the model matches 'kk'" in said
    with caplog.at_level("INFO"):
        run = train(model, tmp_path / "b", target_name="text_embedding,self_attn.q", max_train_steps=1, **STILL)
    assert "layers: self_attn.q, text_embedding.0, text_embedding.2" in caplog.text
    assert len(load_file(run.output / "checkpoint-1.safetensors")) == 3 * 4


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("name", ["ckpt_t2v", "ckpt_inp"])
def test_case_86_every_family_loads_what_it_saved(name, peft, tmp_path, tmp_path_factory) -> None:
    model = checkpoint(tmp_path_factory, name)
    images = name == "ckpt_inp"
    flags = {"use_peft_lora": peft, "train_mode": "inpaint" if images else "normal",
             "target_name": "q,k,v,ffn.0,ffn.2" + ",k_img,v_img" * images}
    run = train(model, tmp_path / "a", **flags, **FAST)
    again = started_from(model, tmp_path / "b", tmp_path / "a" / "checkpoint-2.safetensors", **flags)
    assert same_tensors(run.trained(), again.trained()) == []
    for part in ("ffn", *(["k_img"] if images else [])):
        assert any(part in key for key in run.trained())
