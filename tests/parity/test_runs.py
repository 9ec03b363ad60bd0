"""Whole runs of the scripts against the recorded runs.

A free run cannot give the recorded losses: model construction draws from the same global stream as the VAE posterior.
What the seed does fix is compared exactly (clips, sizes, captions, noise levels, learning rates, file names, keys), and
the losses loosely, since noise and data agree and only the posterior and the adapters' initial values differ.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from videox_fun.training.context import Conditioning
from videox_fun.training.entry import build_trainer
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec

LORA_RUNS = (
    "g_normal", "g_inpaint", "g_normal_mixed256", "g_nobucket", "i_nobucket", "g_broken", "g_frame_crop",
    "g_keep_token", "g_fix", "g_autotile", "g_logit", "g_peft", "g_notarget", "g_inp_vtl_b2", "g_lowvram_gc", "g_te",
    "g_tedl", "g_bf16", "g_workers",
)
FULL_RUNS = ("f_normal", "f_ema")


class Recorder:
    """What the networks were called with, in the shape of the recorded ``calls``."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.pixels: list[torch.Tensor] = []
        self.calls: list[dict] = []
        self.inputs: list[Conditioning] = []
        self.losses: list[float] = []
        self._wrap(trainer)

    def _wrap(self, trainer) -> None:
        encode, recipe = trainer.recipe._encode, trainer.recipe
        predict, log = recipe.predict, trainer.run_logger.log

        def spy_encode(ctx, components, batch, pixels, *, ready):
            self.pixels.append(batch[pixels].detach())
            return encode(ctx, components, batch, pixels, ready=ready)

        def spy_predict(ctx, model, noisy, timesteps, conditioning):
            text = conditioning.text
            self.inputs.append(conditioning)
            self.calls.append({
                "x": list(noisy.shape), "t": timesteps.tolist(),
                "context": list(text.shape) if torch.is_tensor(text) else [list(row.shape) for row in text],
                "y": list(conditioning.inputs["y"].shape) if "y" in conditioning.inputs else None,
            })
            return predict(ctx, model, noisy, timesteps, conditioning)

        def spy_log(values, step):
            self.losses.append(values["train_loss"])
            return log(values, step)

        recipe._encode, recipe.predict, trainer.run_logger.log = spy_encode, spy_predict, spy_log


def run_recorded(record: dict, *, goldens: Path, checkpoints: Path, output: Path, extra: str = "") -> Recorder:
    """Repeat a recorded run with our trainer."""
    text = record["args"].replace("$E2E/ckpt", f"{checkpoints}/ckpt").replace("$E2E/data", f"{goldens}/e2e/data")
    text = text.replace("$E2E/wan", f"{goldens}/e2e/wan").replace("$E2E/out", f"{output}/out")
    script = "wan2.1_fun/" + record["script"].removesuffix(".py")
    argv = [*shlex.split(text), "--upstream_compat", "--audit", "off", "--report_to", "none", *shlex.split(extra)]
    spec = get_spec(script)
    trainer = build_trainer(spec, parse_args(spec, argv))
    trainer.setup()
    recorder = Recorder(trainer)
    assert trainer.run() == 0
    return recorder


def recorded_calls(record: dict, name: str) -> list:
    return [call for call in record["calls"] if call[1] == name]


def compare_calls(record: dict, recorder: Recorder) -> None:
    """Everything that the seed determines."""
    for theirs, ours in zip(recorded_calls(record, "transformer"), recorder.calls, strict=True):
        kwargs = theirs[2]
        assert ours["x"] == kwargs["x"]
        assert ours["y"] == kwargs["y"]
        assert ours["context"] == kwargs["context"]
        if "--uniform_sampling" in record["args"]:  # otherwise noise levels come from the global stream
            torch.testing.assert_close(torch.tensor(ours["t"]), torch.tensor(kwargs["t_values"]), rtol=1e-6, atol=1e-4)
    encoded = list(zip(recorded_calls(record, "vae.encode"), recorder.pixels, strict=True))
    step = 2 if "inpaint" in record["args"] else 1  # every second encoding is masked, with masks of the global stream
    for theirs, pixels in encoded[::step]:
        batch, frames, channels, height, width = pixels.shape
        assert [batch, channels, frames, height, width] == theirs[2]
        assert pixels.mean().item() == pytest.approx(theirs[3], abs=2e-3)


def saved_keys(folder: Path) -> dict[str, dict[str, list[int]]]:
    files = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            files[str(path.relative_to(folder))] = {k: handle.get_slice(k).get_shape() for k in handle.keys()}
    return files


def load_record(goldens: Path, tag: str) -> dict:
    return json.loads((goldens / "e2e" / "runs" / f"{tag}.json").read_text())


@pytest.mark.parametrize("tag", [*LORA_RUNS, *FULL_RUNS])
def test_free_run_repeats_what_the_seed_fixes(tag, goldens, golden_checkpoints, tmp_path):
    record = load_record(goldens, tag)
    recorder = run_recorded(record, goldens=goldens, checkpoints=golden_checkpoints, output=tmp_path)
    compare_calls(record, recorder)
    assert len(recorder.losses) == len(record["losses"])
    assert recorder.losses == pytest.approx(record["losses"], rel=0.1)
    expected = {name for name in record["files"] if name.endswith(".safetensors")}
    output = tmp_path / f"out_{tag}"
    saved = saved_keys(output)
    assert {name for name in saved if not name.endswith("trainable_parameters.safetensors")} == expected
    for name, facts in record["files"].items():
        if name.endswith(".safetensors"):
            assert len(saved[name]) == facts["n_keys"]


def without_adapters(model: torch.nn.Module) -> None:
    if hasattr(model, "network"):
        model.network.set_multiplier(0.0)
    for module in model.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(False)


@pytest.mark.parametrize("tag", ["g_normal", "g_peft", "g_inpaint"])
def test_first_prediction_is_the_recorded_one(tag, goldens, golden_checkpoints, tmp_path):
    """Recorded noisy latents through our own text and image encoders and denoiser; adapters start at zero."""
    record = load_record(goldens, tag)
    recorded = load_file(goldens / "e2e" / "runs" / f"{tag}.tensors.safetensors")
    recorder = run_recorded(record, goldens=goldens, checkpoints=golden_checkpoints, output=tmp_path,
                            extra="--max_train_steps 1")
    inputs = dict(recorder.inputs[0].inputs)
    if "s0.y" in recorded:
        torch.testing.assert_close(inputs["clip_fea"][:, :4], recorded["s0.clip_fea[:, :4]"], rtol=0, atol=2e-5)
        inputs["y"] = recorded["s0.y"]
    model = recorder.trainer.players[0].unwrapped()
    without_adapters(model)
    with torch.no_grad():
        out = model(x=recorded["s0.x"], t=recorded["s0.t"], context=recorder.inputs[0].text,
                    seq_len=recorded_calls(record, "transformer")[0][2]["seq_len"], **inputs)
    torch.testing.assert_close(out, recorded["s0.noise_pred"], rtol=0, atol=2e-5)


def test_scenario_1_trains_on_the_tiny_checkpoint(golden_checkpoints, goldens, tmp_path):
    """The audit document's command for one 24 GB card, with sizes and length scaled down."""
    data = goldens / "e2e" / "data"
    argv = shlex.split(
        f"--config_path {goldens}/e2e/wan_tiny.yaml --pretrained_model_name_or_path {golden_checkpoints}/ckpt_inp "
        f"--train_data_dir {data} --train_data_meta {data}/metadata_video.json --image_sample_size=64 "
        "--video_sample_size=64 --token_sample_size=64 --video_sample_n_frames=9 --train_batch_size=1 "
        "--gradient_accumulation_steps=2 --dataloader_num_workers=2 --num_train_epochs=100 --learning_rate=1e-4 "
        "--rank=8 --network_alpha=4 --train_mode=inpaint --target_name=q,k,v,ffn.0,ffn.2 --mixed_precision=bf16 "
        "--allow_tf32 --gradient_checkpointing --low_vram --enable_bucket --use_8bit_adam "
        "--lr_scheduler=cosine_with_restarts --lr_warmup_steps=1 --max_train_steps=2 --seed=1 --video_sample_stride=2 "
        f"--report_to none --output_dir {tmp_path}/out"
    )
    pytest.importorskip("bitsandbytes")
    spec = get_spec("wan2.1_fun/train_lora")
    trainer = build_trainer(spec, parse_args(spec, argv))
    trainer.setup()
    recorder = Recorder(trainer)
    assert trainer.run() == 0
    assert len(recorder.losses) == 2 and all(0 < loss < 10 for loss in recorder.losses)
    assert len(recorder.calls) == 4
    tensors = load_file(tmp_path / "out" / "checkpoint-2.safetensors")
    assert any(value.abs().max() > 0 for key, value in tensors.items() if "lora_up" in key)
    rows = {row["id"]: row for row in json.loads((tmp_path / "out" / "audit.json").read_text())["rows"]}
    assert rows["A1"]["state"] == "enabled" and rows["B1"]["state"] == "enabled"
