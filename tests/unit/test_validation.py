"""Clips and held-out loss during training: when, of which weights, and that training does not notice."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.dist.test_two_ranks_train import launch
from tests.unit import real_runs
from tests.unit.real_runs import (
    CLIPS,
    FULL,
    checkpoint,
    command,
    optimizer_state,
    refusal,
    same_tensors,
    set_up,
    train,
)
from videox_fun.pipeline import WanFunInpaintPipeline, WanPipeline
from videox_fun.pipeline.loading import NEGATIVE_PROMPT, load_wan_pipeline
from videox_fun.recipes.wan_sampling import plan_shot
from videox_fun.training import launch as launching
from videox_fun.training import media
from videox_fun.training.held_out import spread
from videox_fun.utils.lora_utils import merge_lora
from videox_fun.utils.utils import read_video

SHORT: dict[str, Any] = {"validation_inference_steps": 2, "video_sample_size": 32, "validation_steps": 1}


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_t2v")


@pytest.fixture(scope="module")
def inp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_inp")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "start.png")
    return tmp_path / "start.png"


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def held_out(output: Path) -> dict[int, float]:
    return {row["step"]: row["validation_loss"] for row in events(output, "step") if "validation_loss" in row}


def digest(path: Path) -> str:
    return hashlib.sha256(read_video(path).tobytes()).hexdigest()


# ---- training does not notice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "family", "extra"), [
    (real_runs.LORA, "inp", {"train_mode": "inpaint", "low_vram": True, "neuron_drop_out": 0.1}),
    (FULL, "t2v", {"use_ema": True, "weighting_scheme": "logit_normal", "uniform_sampling": False}),
])
def test_training_is_bit_equal_with_and_without(request, tmp_path, picture, script, family, extra) -> None:
    model = request.getfixturevalue(family)
    steps = {"script": script, "max_train_steps": 2, "video_sample_size": 32, **extra}
    plain = train(model, tmp_path / "plain", **steps)
    paths = [picture, picture] if family == "inp" else None
    watched = train(model, tmp_path / "watched", **steps, validation_prompts=["a cat", "a dog"],
                    validation_paths=paths, validation_steps=1, validation_inference_steps=1, validation_epochs=1,
                    validation_data_meta=CLIPS / "metadata_video.json", validation_loss_samples=1,
                    validation_loss_levels=2)
    assert watched.trainer.validator.failures == 0
    assert watched.losses == plain.losses
    assert not same_tensors(plain.trained(), watched.trained())
    assert not same_tensors(optimizer_state(plain), optimizer_state(watched))
    assert plain.trainer.ctx.rng.snapshot() == watched.trainer.ctx.rng.snapshot()
    if "use_ema" in extra:
        assert not same_tensors(plain.player.ema.shadow, watched.player.ema.shadow)
    assert {row["step"] for row in events(tmp_path / "watched", "validation")} == {1, 2}
    assert sorted(held_out(tmp_path / "watched")) == [0, 1, 2]


# ---- clips ----------------------------------------------------------------------------------------------------------


def test_case_116_clips_show_the_weights_of_their_step_and_equal_the_saved_lora(t2v, tmp_path, monkeypatch) -> None:
    """The clips change with the weights, and inference from the file gives the same clip."""
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr("videox_fun.training.validation.send_clip", lambda *args, **kw: drawn.append(args[2]))
    run = train(t2v, tmp_path / "out", **SHORT, max_train_steps=2, learning_rate=1.0, checkpointing_steps=2,
                validation_prompts=["a red ball", "a dog runs: over/under?"])
    files = sorted((tmp_path / "out/sample").iterdir())
    assert [path.name for path in files] == [
        f"sample-{step}-rank0-image-{index}.mp4" for step in (1, 2) for index in (0, 1)]
    assert read_video(files[0]).shape == (5, 32, 32, 3)
    assert len({digest(path) for path in files}) == 4
    pipeline = load_wan_pipeline(t2v, dtype=torch.float32)
    merge_lora(pipeline, tmp_path / "out/checkpoint-2.safetensors", 1.0)
    video = pipeline(prompt="a red ball", negative_prompt=NEGATIVE_PROMPT, height=32, width=32, num_frames=5,
                     num_inference_steps=2, guidance_scale=4.5, generator=torch.Generator().manual_seed(42)).videos
    assert run.code == 0 and len(drawn) == 4 and video.std() > 0.01
    torch.testing.assert_close(drawn[2], video, atol=1e-4, rtol=0)


def test_ema_weights_are_sampled_and_live_weights_come_back(t2v, tmp_path) -> None:
    seen: list[torch.Tensor] = []

    def spy(run) -> None:
        def validate(ctx, components, model, save) -> None:
            seen.append(model.blocks[0].self_attn.q.weight.detach().clone())
            assert not model.training and not torch.is_grad_enabled()

        run.trainer.recipe.validate = validate

    run = train(t2v, tmp_path / "out", script=FULL, use_ema=True, max_train_steps=3, validation_steps=3,
                validation_prompts=["a"], before=spy, **{"video_sample_size": 32})
    name = "blocks.0.self_attn.q.weight"
    assert torch.equal(seen[0], run.player.ema.shadow[name])
    live = run.player.unwrapped().blocks[0].self_attn.q.weight
    assert not torch.equal(seen[0], live) and run.player.unwrapped().training


def test_schedule_has_no_double_work(t2v, tmp_path) -> None:
    """Steps, and epochs from the first on; a step that both name is drawn once."""
    drawn: list[int] = []

    def spy(run) -> None:
        run.trainer.recipe.validate = lambda ctx, *rest: drawn.append(ctx.global_step)

    run = train(t2v, tmp_path / "out", max_train_steps=13, video_sample_size=32, validation_prompts=["a"],
                validation_steps=6, validation_epochs=2, before=spy)
    assert run.trainer.loader.steps_per_epoch == 6
    assert drawn == [6, 12]


def test_case_117_failure_is_logged_and_survived(inp, tmp_path, caplog) -> None:
    """Here with a start image that cannot be read."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    run = train(inp, tmp_path / "out", train_mode="inpaint", **SHORT, validation_prompts=["a"],
                validation_paths=[broken])
    assert run.code == 0 and run.steps == [1, 2] and run.trainer.validator.failures == 2
    assert "Sampling at step 1 failed on rank 0; training goes on." in caplog.text
    assert "broken.png" in caplog.text
    assert all(math.isfinite(loss) for loss in run.losses)


def test_case_104_no_seed_given(t2v, tmp_path) -> None:
    run = train(t2v, tmp_path / "out", **SHORT, seed=None, max_train_steps=1, validation_prompts=["a"])
    assert run.trainer.validator.failures == 0 and len(list((tmp_path / "out/sample").iterdir())) == 1


def test_case_119_no_validation_leaves_nothing_behind(t2v, tmp_path) -> None:
    run = train(t2v, tmp_path / "out", max_train_steps=1, video_sample_size=32, report_to="tensorboard")
    assert run.code == 0 and not (tmp_path / "out/sample").exists()
    assert not events(tmp_path / "out", "validation")


def test_case_115_parts_are_moved_for_use_and_back(inp, picture, tmp_path, monkeypatch) -> None:
    """Each part is on the device exactly while it works (being on the device is played by a set of names)."""
    run = set_up(inp, tmp_path / "out", train_mode="inpaint", low_vram=True, validation_prompts=["a"],
                 validation_paths=[picture], validation_clip_image=True, **SHORT)
    components, ctx = run.trainer.components, run.trainer.ctx
    present: set[str] = set()
    names = {id(part): name for name, part in components.frozen().items()}

    class Residency(type(ctx.residency)):
        def use(self, *modules):
            from contextlib import contextmanager

            @contextmanager
            def here():
                mine = {names[id(module)] for module in modules if module is not None}
                present.update(mine)
                yield
                present.difference_update(mine)

            return here()

    ctx.residency.__class__ = Residency
    calls: list[str] = []

    def watched(name: str, call: Any) -> Any:
        def spy(*args, **kwargs):
            calls.append(name)
            assert name in present, f"{name} worked while it was away"
            return call(*args, **kwargs)

        return spy

    for name, part, method in (("text_encoder", components.text_encoder, "forward"),
                               ("vae", components.vae, "encode"), ("vae", components.vae, "decode"),
                               ("image_encoder", components.image_encoder, "forward")):
        monkeypatch.setattr(part, method, watched(name, getattr(part, method)))
    assert len(run.trainer.validator.run()) == 1 and run.trainer.validator.failures == 0
    assert calls == ["text_encoder", "vae", "image_encoder", "vae"] and not present


@pytest.mark.slow
def test_case_108_ranks_sample_measure_and_meet(t2v, tmp_path, repo_root) -> None:
    """Each draws its own clip, the held-out loss is that of one process, and a long wait is no error."""
    flags = {**SHORT, "max_train_steps": 1, "validation_prompts": ["a"], "validation_loss_samples": 3,
             "validation_data_meta": CLIPS / "metadata_video.json"}
    words = command(real_runs.LORA, t2v, tmp_path / "two", **flags)
    ranks = launch(words, tmp_path / "notes", repo_root)
    assert ranks.both("code") == [0, 0] and ranks.notes[0]["trained"] == ranks.notes[1]["trained"]
    clips = sorted((tmp_path / "two/sample").iterdir())
    assert [path.name for path in clips] == [f"sample-1-rank{rank}-image-0.mp4" for rank in (0, 1)]
    assert digest(clips[0]) != digest(clips[1])
    alone = set_up(t2v, tmp_path / "one", **flags)
    assert held_out(tmp_path / "two")[0] == pytest.approx(alone.trainer.validator.measure()["validation_loss"],
                                                          rel=1e-5)
    assert launching._COLLECTIVE_TIMEOUT.total_seconds() >= 3600


def test_sizes_and_conditions_of_an_image_shot(picture) -> None:
    args = SimpleNamespace(video_sample_n_frames=10, video_sample_size=50, image_sample_size=64,
                           validation_clip_image=False)
    square = plan_shot(args, start_image=None, temporal_ratio=4, size_step=16)
    assert (square.height, square.width, square.frames, square.inputs) == (48, 48, 9, {})
    shot = plan_shot(args, start_image=str(picture), temporal_ratio=4, size_step=16)
    assert (shot.height, shot.width, shot.frames) == (32, 96, 9)
    assert set(shot.inputs) == {"video", "mask_video"}
    video, mask = shot.inputs["video"], shot.inputs["mask_video"]
    assert video.shape == (1, 3, 9, 32, 96) and torch.equal(video[:, :, 0], video[:, :, 8])
    assert mask[:, :, 0].max() == 0 and mask[:, :, 1:].min() == 255
    args.video_sample_n_frames, args.validation_clip_image = 1, True
    single = plan_shot(args, start_image=str(picture), temporal_ratio=4, size_step=16)
    assert single.frames == 1 and single.inputs["clip_image"].size == (80, 40)


def test_images_without_paths_are_drawn_from_the_prompt_alone(inp, tmp_path) -> None:
    run = set_up(inp, tmp_path / "out", train_mode="inpaint", validation_prompts=["a"], **SHORT)
    (path,) = run.trainer.validator.run()
    assert read_video(path).shape == (5, 32, 32, 3)


def test_upstreams_numbers_are_the_defaults(inp, picture, tmp_path, monkeypatch) -> None:
    """25 steps, guidance 4.5, the fixed negative prompt, no image context."""
    seen: dict[str, Any] = {}

    def call(self, **kwargs):
        seen.update(kwargs)
        return SimpleNamespace(videos=torch.zeros(1, 3, 5, 32, 96))

    run = set_up(inp, tmp_path / "out", train_mode="inpaint", validation_prompts=["a"], validation_paths=[picture])
    monkeypatch.setattr(WanFunInpaintPipeline, "__call__", call)
    run.trainer.validator.run()
    assert (seen["num_inference_steps"], seen["guidance_scale"]) == (25, 4.5)
    assert "clip_image" not in seen and len(NEGATIVE_PROMPT) == 137
    tokens = run.trainer.components.tokenizer(NEGATIVE_PROMPT).input_ids
    assert seen["negative_prompt_embeds"][0].shape[0] == len(tokens)
    assert seen["generator"].initial_seed() == 42


def test_case_123_a_start_image_changes_the_clip(inp, picture, tmp_path) -> None:
    """At inference too the picture reaches the denoiser."""
    other = tmp_path / "other.png"
    Image.new("RGB", (80, 40), (250, 10, 10)).save(other)
    run = set_up(inp, tmp_path / "out", train_mode="inpaint", validation_prompts=["a", "a"],
                 validation_paths=[picture, other], **SHORT)
    conditions: list[torch.Tensor] = []
    forward = run.trainer.components.denoiser.forward
    run.trainer.components.denoiser.forward = lambda **kw: (conditions.append(kw["y"]), forward(**kw))[1]
    run.trainer.validator.run()
    assert not torch.equal(conditions[0], conditions[-1])
    assert conditions[0][:, :4, 0].min() == 1 and conditions[0][:, :4, 1:].max() == 0


# ---- held-out loss --------------------------------------------------------------------------------------------------


def test_held_out_loss_repeats_and_follows_the_weights(t2v, tmp_path) -> None:
    flags = {"max_train_steps": 4, "video_sample_size": 32, "validation_loss_steps": 2, "validation_loss_samples": 3,
             "validation_data_meta": CLIPS / "metadata_video.json", "learning_rate": 1e-2}
    run = train(t2v, tmp_path / "a", **flags)
    first = held_out(tmp_path / "a")
    assert sorted(first) == [0, 2, 4] and first[4] < first[0]
    reseeded = set_up(t2v, tmp_path / "b", **{**flags, "seed": 7})
    assert reseeded.trainer.validator.measure()["validation_loss"] == first[0]  # the measurement has its own draws
    row = next(row for row in events(tmp_path / "a", "step") if row["step"] == 0)
    parts = {key: value for key, value in row.items() if key.startswith("validation_loss_t")}
    assert len(parts) == 4 and sum(parts.values()) / 4 == pytest.approx(first[0])
    # The middles of four equal shares of the shifted table.
    shares = [(level + 0.5) / 4 for level in range(4)]
    expected = [1000 * 5 * s / (1 + 4 * s) for s in (1 - share for share in shares)]
    assert sorted((int(key.removeprefix("validation_loss_t")) for key in parts), reverse=True) == pytest.approx(
        expected, abs=2)
    assert run.trainer.validator.failures == 0
    assert reseeded.trainer.held_out.indices == [0, 2, 4]


def test_held_out_clips_are_encoded_once(t2v, tmp_path, monkeypatch) -> None:
    run = set_up(t2v, tmp_path / "out", video_sample_size=32, validation_loss_samples=2,
                 validation_data_meta=CLIPS / "metadata_video.json")
    encoded: list[int] = []
    encode = run.trainer.recipe._encode
    monkeypatch.setattr(run.trainer.recipe, "_encode", lambda *a, **k: (encoded.append(1), encode(*a, **k))[1])
    validator = run.trainer.validator
    first = validator.measure()
    assert validator.measure() == {}  # this step is done
    run.trainer.ctx.global_step = 1
    assert validator.measure() == first and len(encoded) == 2


def test_held_out_loss_is_the_training_loss_of_that_noise(t2v, tmp_path) -> None:
    run = set_up(t2v, tmp_path / "out", video_sample_size=32, validation_loss_samples=1, validation_loss_levels=1,
                 validation_data_meta=CLIPS / "metadata_video.json")
    trainer = run.trainer
    values = trainer.validator.measure()
    conditioning, noise = trainer.held_out._prepared[0]
    trainer.players[0].model.eval()
    sigma = trainer.components.schedule.sigmas[500]
    noisy = (1 - sigma) * conditioning.latents + sigma * noise
    with torch.no_grad():
        prediction = trainer.recipe.predict(trainer.ctx, trainer.players[0].model, noisy, sigma[None] * 1000,
                                            conditioning)
    expected = (prediction - (noise - conditioning.latents)).square().mean().item()
    assert values["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_held_out_data_is_refused_before_weights_load(t2v, tmp_path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps([{"file_path": "missing.mp4", "text": "x", "type": "video"}]))
    assert "missing.mp4" in refusal(t2v, tmp_path / "out", validation_data_meta=empty)
    with pytest.raises(SystemExit):
        set_up(t2v, tmp_path / "out", validation_data_meta=tmp_path / "nothing.json")


def test_held_out_failure_is_survived(t2v, tmp_path, caplog) -> None:
    def spy(run) -> None:
        run.trainer.objective.held_out_loss = lambda *a, **k: 1 / 0

    run = train(t2v, tmp_path / "out", video_sample_size=32, before=spy, max_train_steps=1,
                validation_data_meta=CLIPS / "metadata_video.json")
    assert run.code == 0 and run.trainer.validator.failures == 2 and not held_out(tmp_path / "out")
    assert "The held-out loss at step 0 failed" in caplog.text


def test_spread_takes_ends_evenly() -> None:
    assert spread(3, 16) == [0, 1, 2]
    assert spread(100, 4) == [0, 25, 50, 75]


# ---- trackers -------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_clips(t2v, tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(t2v, tmp_path / "out", **SHORT, max_train_steps=1, report_to="tensorboard",
          validation_prompts=["a red ball"], validation_data_meta=CLIPS / "metadata_video.json",
          validation_loss_samples=1)
    folder = next(path.parent for path in (tmp_path / "out/logs").rglob("events.out*"))
    logged = EventAccumulator(str(folder)).Reload()
    (image,) = logged.Images("validation/image-0")
    assert image.step == 1 and (image.width, image.height) == (5 * 32, 32)
    assert "validation/image-0/prompt/text_summary" in logged.Tags()["tensors"]
    assert [event.step for event in logged.Scalars("validation_loss")] == [0, 1]


def test_trackers_without_pictures_and_failing_ones_are_survived(caplog) -> None:
    got: list[Any] = []
    plain = SimpleNamespace(name="dvclive")
    failing = SimpleNamespace(name="clearml", log_images=lambda *a, **k: 1 / 0)
    other = SimpleNamespace(name="swanlab", log_images=lambda values, step: got.append((values, step)))
    accelerator = SimpleNamespace(trackers=[plain, failing, other])
    media.send_clip(accelerator, "validation/x", torch.rand(1, 3, 9, 4, 6), Path("x.mp4"), caption="c", step=3)
    assert "clearml did not take validation/x" in caplog.text
    ((values, step),) = got
    assert step == 3 and values["validation/x"][0].shape == (4, 8 * 6, 3)


def test_wandb_gets_the_file(monkeypatch) -> None:
    import sys

    got: list[Any] = []
    video = SimpleNamespace(Video=lambda path, caption, format: (path, caption, format))
    monkeypatch.setitem(sys.modules, "wandb", video)
    tracker = SimpleNamespace(name="wandb", log=lambda values, step: got.append((values, step)))
    media.send_clip(SimpleNamespace(trackers=[tracker]), "validation/x", torch.rand(1, 3, 1, 4, 6), Path("x.mp4"),
                    caption="c", step=3)
    assert got == [({"validation/x": ("x.mp4", "c", "mp4")}, 3)]


def test_pipeline_follows_the_input_channels(t2v, inp) -> None:
    assert type(load_wan_pipeline(t2v, dtype=torch.float32)) is WanPipeline
    assert type(load_wan_pipeline(inp, dtype=torch.float32)) is WanFunInpaintPipeline
