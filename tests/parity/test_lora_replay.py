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


def test_replay_of_the_recorded_lora_run(goldens: Path, golden_checkpoints: Path, tmp_path: Path) -> None:
    runs = goldens / "e2e" / "runs"
    recorded = json.loads((runs / "g_normal.json").read_text(encoding="utf-8"))
    replay = load_file(runs / "g_normal.replay.safetensors")
    # The recorded run loaded its base weights through bf16 before widening them.
    model = WanTransformer3DModel.from_pretrained(
        golden_checkpoints / "ckpt_t2v", transformer_additional_kwargs={"dict_mapping": {}},
        torch_dtype=torch.bfloat16).float().train()
    args = lora_args(upstream_compat=True)
    trainable, player = NativeLora(args), Player("transformer", model, None)
    player.groups = trainable.attach(context(args), player)
    initial = {key.removeprefix("lora_init."): value for key, value in replay.items() if key.startswith("lora_init.")}
    model.network.load_state_dict(initial)
    optimizer = torch.optim.AdamW([{"params": group.params, "lr": group.lr} for group in player.groups],
                                  weight_decay=3e-2, eps=1e-10)
    for step, (loss_recorded, norm_recorded) in enumerate(zip(recorded["losses"], recorded["grad_norm"], strict=True)):
        latents, t = replay[f"s{step}.x"], replay[f"s{step}.t"]
        tokens = latents.shape[2] * latents.shape[3] * latents.shape[4] // 4
        loss = _loss(model(latents, t, [replay[f"s{step}.context.0"]], tokens), replay[f"s{step}.target"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.clip_parameters(player), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.item(), loss_recorded, atol=1e-5, rtol=0)
        torch.testing.assert_close(norm.item(), norm_recorded, atol=0, rtol=1e-4)
    file, = trainable.export(player, layout="bare", dtype=torch.float32)
    final = load_file(runs / "g_normal.checkpoint-8.safetensors")
    assert file.tensors.keys() == final.keys()
    for key, value in final.items():
        torch.testing.assert_close(file.tensors[key], value, atol=2e-5, rtol=0)
    save_file(file.tensors, str(tmp_path / "x.safetensors"), file.metadata)
    facts = recorded["files"]["checkpoint-8.safetensors"]
    assert (tmp_path / "x.safetensors").stat().st_size == facts["size"]
    assert file.metadata.keys() == facts["metadata"].keys()
