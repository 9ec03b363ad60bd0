"""Patches in whole runs of the training script: the real parser, trainer, loader, checkpoints and audit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optim_patches.qlora import dequantize
from optim_patches.qlora_layers import is_quantized
from tests.unit.real_runs import FULL, checkpoint, file_differences, refusal, set_up, train
from videox_fun.models.loading import load_transformer
from videox_fun.models.wan_transformer3d import WanTransformer3DModel

pytest.importorskip("bitsandbytes")

BOTH = {"qlora": True, "vae_tiling": True, "vae_tile_size": 32, "vae_tile_overlap": 16, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


def rows(output: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in json.loads((output / "audit.json").read_text())["rows"]}


@pytest.mark.parametrize("adapter", [{}, {"use_peft_lora": True}], ids=["native", "peft"])
def test_qlora_and_vae_tiling_with_checkpointing(adapter, model, tmp_path):
    run = train(model, tmp_path / "out", audit="strict", qlora_double_quant=True, **BOTH, **adapter)
    assert run.code == 0 and all(math.isfinite(loss) for loss in run.losses)
    found = rows(tmp_path / "out")
    assert found["I4"]["exercised"] is True and found["I5"]["exercised"] is True
    outcomes = {outcome.patch.name: outcome for outcome in run.trainer.ctx.patches.outcomes()}
    facts = outcomes["qlora"].evidence.facts
    assert facts["layers"] == facts["layers_that_ran"] and facts["bytes_after"] < facts["bytes_before"] / 4
    assert "quantized while loading" in facts["how"] and "after loading" not in facts["how"]
    assert outcomes["vae_tiling"].evidence.facts["encode_tiles"] > outcomes["vae_tiling"].evidence.facts["encode_calls"]
    saved = load_file(tmp_path / "out" / "checkpoint-2.safetensors")
    plain = train(model, tmp_path / "plain", **adapter)
    reference = load_file(plain.output / "checkpoint-2.safetensors")
    assert {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in reference.items()}
    ups = [key for key in saved if "lora_up" in key or "lora_B" in key]
    assert ups and all(float(saved[key].abs().max()) > 0 for key in ups)


def test_losses_are_those_of_a_run_on_the_dequantized_weights(model, tmp_path):
    """The 4-bit run against an ordinary one whose checkpoint holds what the 4-bit layers compute with."""
    run = train(model, tmp_path / "out", max_train_steps=4, qlora=True, gradient_checkpointing=True)
    transformer = run.player.unwrapped()
    dequantize(transformer)
    folder = shutil.copytree(model, tmp_path / "dequantized")
    reference = load_transformer(WanTransformer3DModel, folder, torch_dtype=torch.float32)
    reference.load_state_dict({key: transformer.state_dict()[key] for key in reference.state_dict()})
    for file in folder.glob("diffusion_pytorch_model*"):
        file.unlink()
    reference.save_pretrained(folder)
    plain = train(folder, tmp_path / "plain", max_train_steps=4, gradient_checkpointing=True)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    names = run.trained()
    rate = run.player.groups[0].lr
    for name, value in plain.trained().items():
        # Adam divides by the root of the second moment: where a gradient is all rounding, a step may differ entirely.
        apart = (names[name] - value).abs()
        assert float(apart.mean()) <= 1e-3 * rate and float(apart.max()) <= rate, name


def test_resume_repeats_the_unbroken_run(model, tmp_path):
    flags = {"qlora": True, "max_train_steps": 3, "checkpointing_steps": 1, "save_state": True}
    train(model, tmp_path / "whole", **flags)
    train(model, tmp_path / "cut", **{**flags, "max_train_steps": 2})
    resumed = train(model, tmp_path / "cut", resume_from_checkpoint="latest", **flags)
    assert resumed.steps == [3]
    name = "checkpoint-3/lora_diffusion_pytorch_model.safetensors"
    assert not file_differences(tmp_path / "whole" / name, tmp_path / "cut" / name)


def test_validation_samples_through_both_and_training_goes_on(model, tmp_path):
    run = train(model, tmp_path / "out", audit="log", **BOTH, validation_prompts=["a rabbit"], validation_steps=1,
                max_train_steps=3)
    assert run.code == 0 and run.trainer.validator.failures == 0
    assert list((tmp_path / "out" / "sample").glob("*.mp4"))
    facts = next(o for o in run.trainer.ctx.patches.outcomes() if o.patch.name == "vae_tiling").evidence.facts
    assert facts["decode_calls"] > 0


def test_full_fine_tuning_is_refused_before_weights_load(model, tmp_path, monkeypatch):
    monkeypatch.setattr("videox_fun.recipes.wan.WanRecipe.load", lambda *_: pytest.fail("weights were loaded"))
    text = refusal(model, tmp_path / "out", script=FULL, qlora=True, audit="default")
    assert "four bits" in text and "LoRA script" in text


def test_without_the_flags_no_layer_changes(model, tmp_path):
    run = set_up(model, tmp_path / "out")
    assert not any(is_quantized(module) for module in run.player.unwrapped().modules())
    assert "encode_moments" not in run.trainer.components.vae.__dict__


def test_weights_that_do_not_fit_are_named_and_nothing_is_left_behind(model, tmp_path):
    """``--transformer_path`` goes through the same sink; after a refusal the next run loads as always."""
    from safetensors.torch import save_file

    bias = torch.zeros_like(load_transformer(WanTransformer3DModel, model).time_embedding[0].bias)
    tensors = {"blocks.0.self_attn.q.weight": torch.zeros(3, 3), "time_embedding.0.bias": bias}
    save_file(tensors, tmp_path / "other.safetensors")
    text = refusal(model, tmp_path / "out", qlora=True, transformer_path=tmp_path / "other.safetensors")
    assert "q.weight" in text
    test_without_the_flags_no_layer_changes(model, tmp_path / "next")


def test_compile_with_checkpointing(model, tmp_path):
    plain = train(model, tmp_path / "plain", gradient_checkpointing=True)
    run = train(model, tmp_path / "out", audit="strict", gradient_checkpointing=True, compile=True,
                compile_backend="aot_eager", compile_fullgraph=True)
    facts = run.trainer.ctx.patches.outcome("compile").evidence.facts
    assert facts["graph_breaks"] == 0 and facts["graph_launches"] == facts["block_calls"] > 0
    assert rows(tmp_path / "out")["I1"]["exercised"] is True
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    saved = load_file(tmp_path / "out" / "checkpoint-2.safetensors")
    assert saved.keys() == load_file(tmp_path / "plain" / "checkpoint-2.safetensors").keys()
