"""Faults that people met around a run: schedule, seeds, trackers, workers, network, flags, models that do not fit."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.data_kit import make_clip, write_rows
from tests.unit.real_runs import FULL, LORA, RealRun, checkpoint, command, refusal, set_up, train
from videox_fun.recipes.wan import WanRecipe
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec

STILL = {"video_sample_n_frames": 1}  # as fast as it gets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def inpaint_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_inp")


def parse_error(capsys: pytest.CaptureFixture[str], words: list[str], script: str = LORA) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_args(get_spec(script), words)
    assert caught.value.code == 2
    return capsys.readouterr().err


# ---- flags and schedule


def test_case_100_two_optimizers_are_refused_by_name(model: Path, tmp_path: Path, capsys) -> None:
    said = parse_error(capsys, command(LORA, model, tmp_path, use_8bit_adam=True, use_came=True))
    assert "--use_8bit_adam" in said and "--use_came" in said


@pytest.mark.parametrize(("given", "meant"), [("validation_pathes", "--validation_paths"),
                                              ("gradient_checkpoint_ing", "--gradient_checkpointing")])
def test_case_120_an_unknown_flag_is_refused_with_the_nearest(given, meant, model, tmp_path, capsys) -> None:
    said = parse_error(capsys, command(LORA, model, tmp_path, **{given: "x"}))
    assert f"unknown flag --{given}; did you mean {meant}?" in said


def test_case_102_the_schedule_counts_optimizer_steps(model: Path, tmp_path: Path) -> None:
    """Six rows: each epoch has a step of four micro-steps and one of the two that are left."""
    run = train(model, tmp_path, gradient_accumulation_steps=4, max_train_steps=8, lr_scheduler="linear",
                lr_warmup_steps=2, **STILL)
    rates = run.logs("lr")  # the rate of the next step
    assert run.steps == list(range(1, 9)) and len(run.rows) == 24
    assert max(range(8), key=rates.__getitem__) == 1 and rates[1] == pytest.approx(1e-3)
    assert rates[0] == pytest.approx(5e-4) and rates[7] == pytest.approx(0, abs=1e-9)
    assert rates[2:] == pytest.approx([1e-3 * left / 6 for left in range(5, -1, -1)])


# ---- seeds


def test_case_104_without_a_seed_one_is_drawn_logged_and_repeats_the_run(model: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        run = train(model, tmp_path / "a", seed=None, validation_steps=1, validation_prompts="a",
                    dataloader_num_workers=1, **STILL)
    drawn = run.trainer.args.seed
    assert run.code == 0 and isinstance(drawn, int) and f"drew --seed {drawn}" in caplog.text
    assert run.trainer.validator.failures == 0 and len(list((tmp_path / "a" / "sample").glob("*.mp4"))) == 2
    again = train(model, tmp_path / "b", seed=drawn, dataloader_num_workers=1, **STILL)
    assert again.losses == run.losses and again.rows == run.rows
    other = set_up(model, tmp_path / "c", seed=None, **STILL)
    assert other.trainer.args.seed != drawn


# ---- trackers


def tensorboard_text(folder: Path) -> dict[str, Any]:
    import yaml

    hparams, = folder.rglob("hparams.yml")
    return yaml.safe_load(hparams.read_text())


def test_case_106_lists_do_not_stop_the_tracker(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = train(model, tmp_path, script=FULL, report_to="tensorboard", validation_prompts=["a", "b"],
                trainable_modules=".", fix_sample_size=[64, 64], max_train_steps=1, **STILL)
    assert run.code == 0 and run.trainer.run_logger._tracking
    config = tensorboard_text(tmp_path / "logs")
    assert config["validation_prompts"] == '["a", "b"]' and config["fix_sample_size"] == "[64, 64]"
    assert config["trainable_modules"] == '["."]' and "transformer_path" not in config


def test_case_119_a_run_without_validation_ends_cleanly(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = train(model, tmp_path, report_to="tensorboard", max_train_steps=1, **STILL)
    assert run.code == 0 and (tmp_path / "checkpoint-1.safetensors").is_file()
    assert list((tmp_path / "logs").rglob("events.out.tfevents*"))


# ---- processes and network


def test_case_107_an_encoder_in_the_workers_stays_on_the_host(model: Path, tmp_path: Path) -> None:
    """Two workers encode the prompts; the losses are those of a run that encodes in the step."""
    flags = {"dataloader_num_workers": 2, "max_train_steps": 3, **STILL}
    inside = train(model, tmp_path / "a", enable_text_encoder_in_dataloader=True, **flags)
    assert multiprocessing.active_children() == []  # no worker outlives the run
    encoder = inside.trainer.components.text_encoder
    assert id(encoder) in inside.trainer.ctx.residency.pinned_to_host
    assert inside.losses == pytest.approx(train(model, tmp_path / "b", **flags).losses, abs=2e-5)
    with mock.patch.object(torch.nn.Module, "to", autospec=True) as move:
        inside.trainer.ctx.residency.device = torch.device("cuda")
        inside.trainer.ctx.residency.place(encoder)
        with inside.trainer.ctx.residency.use(encoder):
            pass
    assert {str(call.args[1]) for call in move.call_args_list} == {"cpu"}


def test_case_110_a_run_touches_no_network(model: Path, tmp_path: Path, monkeypatch) -> None:
    """With and without the hub's offline switches: nobody even looks up a name."""
    asked: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    assert train(model, tmp_path, **STILL).code == 0
    assert asked == []


# ---- conditions


@pytest.mark.parametrize("script", ["wan2.1/train_lora", LORA])
def test_case_121_unknown_pixels_are_grey_in_training_as_in_sampling(script, inpaint_model, tmp_path) -> None:
    """The tensor that the pipeline builds from the same clip and mask, encoded by the same VAE."""
    from videox_fun.pipeline import WanFunInpaintPipeline

    run = set_up(inpaint_model, tmp_path, script=script, train_mode="inpaint", fix_sample_size=[64, 64])
    trainer, parts = run.trainer, run.trainer.components
    batch = next(batch for epoch in range(4) for batch, _ in trainer.loader.epoch(epoch)
                 if 0 < batch["mask"].float().mean() < 1)
    clip, mask, masked = (batch[key] for key in ("pixel_values", "mask", "mask_pixel_values"))
    unknown = mask.bool().expand_as(masked)
    assert bool((masked[unknown] == 0).all()) and torch.equal(masked[~unknown], clip[~unknown])
    pipeline = WanFunInpaintPipeline(tokenizer=None, text_encoder=None, vae=parts.vae, scheduler=None,
                                     transformer=parts.denoiser, clip_image_encoder=None)
    seen: list[torch.Tensor] = []
    latents = torch.zeros(1, 16, 2, 8, 8)
    with mock.patch.object(pipeline, "encode_video", side_effect=lambda video, _: seen.append(video) or latents):
        sampled = pipeline.prepare_mask_latents(clip.transpose(1, 2) / 2 + 0.5, mask.transpose(1, 2) * 255, latents)
    torch.testing.assert_close(seen[0], masked.transpose(1, 2), rtol=0, atol=1e-6)
    with mock.patch.object(trainer.recipe, "_encode", return_value=latents):
        trained = trainer.recipe.condition(trainer.ctx, parts, batch).inputs["y"]
    torch.testing.assert_close(trained, sampled)


def test_case_123_the_picture_reaches_the_condition(inpaint_model: Path, tmp_path: Path) -> None:
    run = set_up(inpaint_model, tmp_path, train_mode="i2v", script="wan2.1/train_lora")
    trainer = run.trainer
    batch = next(batch for epoch in range(4) for batch, _ in trainer.loader.epoch(epoch) if not batch["mask"].all())
    other = {**batch, "mask_pixel_values": -batch["mask_pixel_values"],
             "clip_pixel_values": 255 - batch["clip_pixel_values"]}
    state, found = trainer.ctx.rng.snapshot(), []
    for given in (batch, batch, other):
        trainer.ctx.rng.restore(state)
        found.append(trainer.recipe.condition(trainer.ctx, trainer.components, given).inputs)
    for name in ("y", "clip_fea"):
        assert torch.equal(found[0][name], found[1][name])
        assert (found[0][name] - found[2][name]).abs().max() > 0.01
    assert torch.equal(found[0]["y"][:, :4], found[2]["y"][:, :4])  # the mask channels


# ---- models that do not fit


def variant(model: Path, folder: Path, *, config: dict[str, Any] | None = None, drop: str = "") -> Path:
    """A copy of a checkpoint with other config entries, or without the weights whose name holds ``drop``."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    if drop:
        weights = folder / "diffusion_pytorch_model.safetensors"
        save_file({name: value for name, value in load_file(weights).items() if drop not in name}, weights)
    return folder


def test_case_124_a_text_model_in_an_image_run_is_refused_before_the_data(model, inpaint_model, tmp_path) -> None:
    with mock.patch.object(WanRecipe, "data", side_effect=AssertionError("the data was read")):
        shutil.copytree(inpaint_model, tmp_path / "mixed")
        shutil.copy(model / "config.json", tmp_path / "mixed" / "config.json")
        for mode in ("i2v", "inpaint"):
            said = refusal(tmp_path / "mixed", tmp_path / "out", train_mode=mode)
            assert f"takes 16 input channels, but --train_mode {mode} feeds 36" in said
            assert "--train_mode normal" in said
        said = refusal(inpaint_model, tmp_path / "out")
        assert "takes 36 input channels, but --train_mode normal feeds 16" in said


def test_case_125_unknown_config_keys_stop_training(model: Path, tmp_path: Path) -> None:
    said = refusal(variant(model, tmp_path / "new", config={"patch_size_t": 2}), tmp_path / "out")
    assert "keys that WanTransformer3DModel does not know: patch_size_t" in said


def test_case_127_missing_image_weights_stop_training(inpaint_model: Path, tmp_path: Path, caplog) -> None:
    folder = variant(inpaint_model, tmp_path / "lacking", drop="img")
    said = refusal(folder, tmp_path / "out", train_mode="inpaint")
    assert "not in the file" in said and "img_emb" in said and "--allow_partial_load" in said
    run = train(folder, tmp_path / "out", train_mode="inpaint", allow_partial_load=True, max_train_steps=1, **STILL)
    assert run.code == 0 and "not in the file" in caplog.text


def test_case_127_weights_left_over_stop_training(model: Path, tmp_path: Path) -> None:
    folder = variant(model, tmp_path / "more")
    weights = folder / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(weights), "img_emb.proj.1.weight": torch.zeros(4, 4)}, weights)
    assert "1 in the file but not in the model: img_emb.proj.1.weight" in refusal(folder, tmp_path / "out")
    assert refusal(model, tmp_path / "out", transformer_path=weights).count("img_emb.proj.1.weight") == 1


# ---- the end of a run


def test_case_44_needed_parts_are_looked_for_at_the_start(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "no_tokenizer", ignore=shutil.ignore_patterns("google"))
    with mock.patch.object(WanRecipe, "load", side_effect=AssertionError("weights were read")):
        said = refusal(tmp_path / "no_tokenizer", tmp_path / "out")
    assert "text_encoder_kwargs.tokenizer_subpath" in said and "umt5-xxl" in said


def test_case_44_what_fails_after_the_last_save_loses_nothing(model: Path, tmp_path: Path, caplog) -> None:
    def sabotage(run: RealRun) -> None:
        accelerator = run.trainer.ctx.accelerator
        accelerator.end_training = mock.Mock(side_effect=RuntimeError("the tracker is gone"))

    with mock.patch("videox_fun.training.tracking.plot_curves", side_effect=RuntimeError("no font")):
        run = set_up(model, tmp_path, **STILL)
        sabotage(run)
        assert run.trainer.run() == 0
    assert (tmp_path / "checkpoint-2.safetensors").stat().st_size > 0
    assert "The curves could not be drawn (no font)" in caplog.text and "the tracker is gone" in caplog.text


def test_case_84_an_image_run_on_stills_only_is_warned_about(inpaint_model: Path, tmp_path: Path, caplog) -> None:
    make_clip(tmp_path / "one.mp4", 1)
    rows = write_rows(tmp_path / "m.json", [{"file_path": "one.mp4", "text": "x"}])
    with caplog.at_level(logging.INFO):
        set_up(inpaint_model, tmp_path / "out", train_mode="i2v", train_data_meta=rows, train_data_dir=tmp_path)
    assert "every row has one frame" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        set_up(inpaint_model, tmp_path / "out", train_mode="i2v")
    assert "every row has one frame" not in caplog.text
