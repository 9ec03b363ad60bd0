"""LoRA+, DoRA and a start from a LoRA file, by the flags of the real script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.real_runs import LORA, checkpoint, command, set_up, train
from videox_fun.training import entry
from videox_fun.utils.lora_cli import main as videox_lora

PEFT = {"use_peft_lora": True, "target_name": "q,k,v"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    train(model, output)
    return output / "checkpoint-2.safetensors"


def test_a_run_starts_from_a_lora_file(model: Path, trained: Path, tmp_path: Path) -> None:
    run = set_up(model, tmp_path / "native", init_lora_path=trained)
    assert run.trainer.ctx.global_step == 0
    run.player.trainable.load(run.player, trained)  # once more: nothing may change
    saved = load_file(trained)
    ups = {name: value for name, value in run.trained().items() if name.endswith("lora_up.weight")}
    assert ups and all(value.abs().sum() > 0 for value in ups.values())
    for name, value in ups.items():
        assert torch.equal(value, saved[name.removeprefix("network.")]), name


def test_a_file_of_another_format_is_a_start_too(model: Path, trained: Path, tmp_path: Path) -> None:
    assert videox_lora(["convert", str(trained), str(tmp_path / "peft.safetensors"), "--to", "peft",
                        "--base", str(model)]) == 0
    one = set_up(model, tmp_path / "one", init_lora_path=trained).trained()
    other = set_up(model, tmp_path / "other", init_lora_path=tmp_path / "peft.safetensors").trained()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_of_another_rank_is_refused(model: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank"):
        set_up(model, tmp_path / "out", init_lora_path=trained, rank=8)


@pytest.mark.parametrize("kind", [{}, PEFT])
def test_a_file_of_another_model_size_is_refused(kind: dict, model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "own", max_train_steps=1, **kind)
    tensors = load_file(tmp_path / "own/checkpoint-1.safetensors")
    wide = {name: value.repeat_interleave(2, 0) if "up" in name or "lora_B" in name
            else value.repeat_interleave(2, 1) if value.dim() == 2 else value for name, value in tensors.items()}
    with safe_open(tmp_path / "own/checkpoint-1.safetensors", framework="pt") as file:
        save_file({name: value.contiguous() for name, value in wide.items()}, tmp_path / "wide.safetensors",
                  metadata=file.metadata())
    with pytest.raises(ValueError, match="It belongs to another model size"):
        run.player.trainable.load(run.player, tmp_path / "wide.safetensors")


@pytest.mark.parametrize("kind", [{}, PEFT])
def test_lora_plus(kind: dict, model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "out", lora_plus_ratio=16, max_train_steps=1, **kind)
    down, up = run.player.groups
    assert (down.lr, up.lr) == (1e-3, 1.6e-2)
    assert all("down" in name or "lora_A" in name for name in down.names)
    assert all("up" in name or "lora_B" in name for name in up.names)
    # AdamW's first step is the learning rate, whatever the gradient: up matrices start at zero.
    assert max(p.detach().abs().max().item() for p in up.params) == pytest.approx(1.6e-2, rel=1e-3)


def test_dora_trains_saves_and_resumes(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "out", use_dora=True, save_state=True, checkpointing_steps=1, max_train_steps=1,
                **PEFT)
    magnitudes = [name for name in run.trained() if "lora_magnitude" in name]
    assert len(magnitudes) == len(run.trained()) // 3 > 0
    saved = load_file(tmp_path / "out/checkpoint-1/lora_diffusion_pytorch_model.safetensors")
    assert sum("magnitude" in name for name in saved) == len(magnitudes)
    unbroken = train(model, tmp_path / "whole", use_dora=True, max_train_steps=2, **PEFT).trained()
    resumed = train(model, tmp_path / "out", use_dora=True, max_train_steps=2, resume_from_checkpoint="latest", **PEFT)
    assert all(torch.equal(value, unbroken[name]) for name, value in resumed.trained().items())


@pytest.mark.parametrize(("flags", "text"), [
    ({"use_dora": True}, "--use_dora is PEFT's; add --use_peft_lora"),
    ({"lora_plus_ratio": -1}, "--lora_plus_ratio -1.0"),
    ({"init_lora_path": "nowhere.safetensors"}, "--init_lora_path"),
])
def test_refusals(flags: dict, text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        entry.main(LORA, command(LORA, model, tmp_path / "out", **flags))
    assert text in capsys.readouterr().err
