"""Eight recorded training steps of upstream's LoRA script, replayed: losses, gradient norms and the final file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.unit.lora_toys import context, lora_args
from videox_fun.models.wan_transformer3d import WanTransformer3DModel
from videox_fun.training.context import Player
from videox_fun.training.trainable import NativeLora


def _loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    difference = prediction.float() - target.float()
    return (difference.square() * (difference.abs() <= 50)).mean()


def test_replay_of_the_recorded_lora_run(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "lora" / "replay"
    recorded = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    steps = load_file(folder / "steps.safetensors")
    # The recorded run loaded its base weights through bf16 before it widened them; the copy is kept in bf16.
    model = WanTransformer3DModel.from_config(recorded["config"]).train()
    model.load_state_dict({key: value.float() for key, value in load_file(folder / "base.safetensors").items()})
    args = lora_args(upstream_compat=True)
    trainable, player = NativeLora(args), Player("transformer", model, None)
    player.groups = trainable.attach(context(args), player)
    model.network.load_state_dict({key.removeprefix("lora_init."): value for key, value in steps.items()
                                   if key.startswith("lora_init.")})
    optimizer = torch.optim.AdamW([{"params": group.params, "lr": group.lr} for group in player.groups],
                                  weight_decay=3e-2, eps=1e-10)
    for step, (loss_recorded, norm_recorded) in enumerate(zip(recorded["losses"], recorded["grad_norm"], strict=True)):
        latents = steps[f"s{step}.x"]
        tokens = latents[0, 0].numel() // 4
        prediction = model(latents, steps[f"s{step}.t"], [steps[f"s{step}.context.0"]], tokens)
        loss = _loss(prediction, steps[f"s{step}.target"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.clip_parameters(player), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.item(), loss_recorded, atol=1e-5, rtol=0)
        torch.testing.assert_close(norm.item(), norm_recorded, atol=0, rtol=1e-4)
    file, = trainable.export(player, layout="bare", dtype=torch.float32)
    final = load_file(folder / "final.safetensors")
    assert file.tensors.keys() == final.keys()
    for key, value in final.items():
        torch.testing.assert_close(file.tensors[key], value, atol=2e-5, rtol=0)
    save_file(file.tensors, str(tmp_path / "x.safetensors"), file.metadata)
    assert (tmp_path / "x.safetensors").stat().st_size == recorded["size"]
    assert file.metadata.keys() == recorded["metadata"].keys()
