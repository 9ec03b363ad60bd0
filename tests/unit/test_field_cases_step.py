"""Faults that people met in the training step: batches, gradients, precision, attention back ends, schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.unit.data_kit import make_clip, write_rows
from tests.unit.real_runs import (
    LORA,
    RealRun,
    checkpoint,
    command,
    refusal,
    same_tensors,
    set_up,
    train,
)
from videox_fun.models.attention_utils import attention
from videox_fun.training.clipping import NonFiniteError
from videox_fun.training.context import Conditioning
from videox_fun.training.flags import parse_args
from videox_fun.training.residency import Residency
from videox_fun.training.specs import SCRIPTS, get_spec

STILL = {"video_sample_n_frames": 1}  # as fast as it gets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def inpaint_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_inp")


@pytest.fixture(scope="module")
def four_clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four clips of one size, with captions of different lengths."""
    folder = tmp_path_factory.mktemp("clips")
    rows = []
    for number, text in enumerate(("a cat", "a red ball moves slowly over the grass", "", "two dogs run")):
        noise = np.random.default_rng(number).integers(0, 255, (5, 32, 64, 3), dtype=np.uint8)
        make_clip(folder / f"{number}.mp4", noise)
        rows.append({"file_path": f"{number}.mp4", "text": text, "type": "video"})
    return {"train_data_dir": folder, "train_data_meta": write_rows(folder / "m.json", rows), "text_drop_ratio": 0,
            "video_sample_stride": 1}


def sample(conditioning: Conditioning, number: int) -> Conditioning:
    """One sample of a batch."""
    one = slice(number, number + 1)
    return Conditioning(conditioning.latents[one], conditioning.text[one],
                        {name: value[one] for name, value in conditioning.inputs.items()})


def keep_gradients(run: RealRun) -> list[dict[str, torch.Tensor]]:
    """The gradients of every optimizer step, before clipping, by parameter name."""
    kept: list[dict[str, torch.Tensor]] = []
    clipper, player = run.trainer.clippers["transformer"], run.player
    clip = clipper.clip

    def spy(parameters, **kwargs):
        kept.append({name: p.grad.clone() for group in player.groups
                     for name, p in zip(group.names, group.params, strict=True)})
        return clip(parameters, **kwargs)

    clipper.clip = spy
    return kept


# ---- batches


@pytest.mark.parametrize("mode", ["normal", "inpaint"])
def test_case_30_the_loss_of_a_batch_is_the_mean_of_its_samples(mode, model, inpaint_model, four_clips, tmp_path):
    run = set_up(model if mode == "normal" else inpaint_model, tmp_path, train_mode=mode, train_batch_size=4,
                 motion_sub_loss=True, **four_clips)
    batch, _ = next(run.trainer.loader.epoch(0))
    whole = run.trainer.objective.prepare(batch)
    assert whole.latents.shape[0] == 4 and len(whole.text) == 4
    noise = torch.randn(whole.latents.shape, generator=torch.Generator().manual_seed(1))
    indices = torch.tensor([5, 300, 700, 990])
    with torch.no_grad():
        loss = run.trainer.objective.loss(whole, noise=noise, indices=indices, scheme="sigma_sqrt").loss
        each = [run.trainer.objective.loss(sample(whole, n), noise=noise[n:n + 1], indices=indices[n:n + 1],
                                           scheme="sigma_sqrt").loss for n in range(4)]
    assert loss.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    assert len({round(value.item(), 4) for value in each}) == 4


@pytest.mark.parametrize("backend", [None, "FLASH_ATTENTION", "SDPA", "SAGE_ATTENTION"])
def test_case_31_a_batch_of_two_equals_two_batches(backend, inpaint_model, four_clips, tmp_path, monkeypatch):
    """Sage, which cannot train, is chosen after the set-up, as for sampling."""
    run = set_up(inpaint_model, tmp_path, train_mode="inpaint", train_batch_size=4, **four_clips)
    if backend is not None:
        monkeypatch.setenv("VIDEOX_ATTENTION_TYPE", backend)
    trainer = run.trainer
    whole = trainer.objective.prepare(next(trainer.loader.epoch(0))[0])
    timesteps = torch.tensor([900.0, 10.0, 500.0, 2.0])
    with torch.no_grad():
        together = trainer.recipe.predict(trainer.ctx, run.player.model, whole.latents, timesteps, whole)
        for n in range(4):
            alone = trainer.recipe.predict(trainer.ctx, run.player.model, whole.latents[n:n + 1],
                                           timesteps[n:n + 1], sample(whole, n))
            torch.testing.assert_close(together[n:n + 1], alone, rtol=0, atol=2e-5)


def test_case_32_one_batch_of_four_equals_four_accumulated(model, four_clips, tmp_path):
    runs, gradients = [], []
    for batch in (4, 1):
        def fix(run: RealRun) -> None:
            objective = run.trainer.objective
            noise = torch.randn(4, 16, 2, 4, 8, generator=torch.Generator().manual_seed(3))

            def compute(conditioning):
                rows = run.rows[-1]
                indices = torch.tensor(rows) * 200 + 50
                return objective.loss(conditioning, noise=noise[rows], indices=indices, scheme="none")

            objective.compute = compute
            gradients.append(keep_gradients(run))

        runs.append(train(model, tmp_path / str(batch), before=fix, train_batch_size=batch, max_train_steps=1,
                          gradient_accumulation_steps=4 // batch, fix_sample_size=[32, 64], **four_clips))
    assert [sorted(sum(run.rows, [])) for run in runs] == [[0, 1, 2, 3]] * 2
    (large,), (small,) = gradients
    assert large.keys() == small.keys()
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-3, atol=1e-6)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


# ---- gradients and averages


@pytest.mark.parametrize("script", sorted(id for id, spec in SCRIPTS.items() if spec.trainable == "named"))
def test_case_61_the_average_lies_between_start_and_end(script, model, tmp_path):
    """Every script that accepts the flag and does not say that it ignores it."""
    start: dict[str, torch.Tensor] = {}
    run = train(model, tmp_path, script=script, before=lambda run: start.update(run.trained()), use_ema=True,
                max_train_steps=5, learning_rate=1e-2, **STILL)
    end, shadow = run.trained(), run.player.ema.shadow
    assert shadow.keys() == end.keys()
    away = torch.stack([torch.dist(shadow[name], start[name]) for name in end])
    behind = torch.stack([torch.dist(shadow[name], end[name]) for name in end])
    path = torch.stack([torch.dist(end[name], start[name]) for name in end])
    assert bool((away > 0).all()) and bool((behind > 0).all())
    assert away.norm() < path.norm() and behind.norm() < path.norm()


def test_case_61_lora_scripts_say_that_they_ignore_the_flag(model, tmp_path, caplog):
    parse_args(get_spec(LORA), command(LORA, model, tmp_path, use_ema=True))
    assert "no effect" in caplog.text and "--use_ema" in caplog.text


@pytest.mark.parametrize("peft", [False, True])
def test_case_81_checkpointing_leaves_no_adapter_without_gradient(peft, model, tmp_path):
    flags = {"use_peft_lora": peft, "target_name": "q,k,v,ffn.0,ffn.2" + ",o" * peft}  # both: the 20 of the blocks
    kept: dict[bool, list[dict[str, torch.Tensor]]] = {}
    for on in (False, True):
        train(model, tmp_path / str(on), before=lambda run, on=on: kept.setdefault(on, keep_gradients(run)),
              gradient_checkpointing=on, **flags)
    assert len(kept[True]) == 2 and len(kept[True][0]) == 2 * 20
    adapters = {name.replace("lora_down", "*").replace("lora_up", "*").replace("lora_A", "*").replace("lora_B", "*")
                for name in kept[True][0]}
    touched = {name.replace("lora_up", "*").replace("lora_B", "*") for name, value in kept[True][0].items()
               if value.norm() > 0}
    assert adapters == touched  # the up matrices; the down matrices follow in the second step
    assert all(value.norm() > 0 for value in kept[True][1].values())
    for off, on in zip(kept[False], kept[True], strict=True):
        for name, value in off.items():
            torch.testing.assert_close(on[name], value, rtol=1e-5, atol=1e-9)


# ---- numbers that are not finite


def break_weights(run: RealRun) -> None:
    with torch.no_grad():
        run.player.unwrapped().head.head.weight.mul_(1e38)


def test_case_87_a_run_that_overflows_stops_and_saves_nothing_broken(model, tmp_path, caplog):
    with pytest.raises(NonFiniteError, match=r"non-finite 3 optimizer steps in a row, last at step 3, samples \d"):
        train(model, tmp_path, before=break_weights, mixed_precision="bf16", save_state=True, checkpointing_steps=2,
              max_train_steps=8, **STILL)
    assert "at step 1, samples" in caplog.text
    with safe_open(tmp_path / "checkpoint-2" / "lora_diffusion_pytorch_model.safetensors", "pt") as file:
        assert all(file.get_tensor(key).isfinite().all() for key in file.keys())


def test_case_87_one_bad_step_is_left_out(model, tmp_path, caplog):
    """The loss of the second step is not a number; weights and schedule wait for the third."""
    seen: list[dict[str, torch.Tensor]] = []

    def once(run: RealRun) -> None:
        objective, compute = run.trainer.objective, run.trainer.objective.compute

        def spy(conditioning):
            seen.append(run.trained())
            output = compute(conditioning)
            return replace(output, loss=output.loss * float("nan")) if len(seen) == 2 else output

        objective.compute = spy

    run = train(model, tmp_path, before=once, max_train_steps=3, **STILL)
    assert run.code == 0 and same_tensors(seen[1], seen[2]) == [] and same_tensors(seen[0], seen[1]) != []
    assert run.logged[1][1]["skipped"] == 1.0 and "Non-finite loss (nan) at step 2" in caplog.text


def test_case_87_a_prediction_that_overflows_shows_in_the_loss(model, tmp_path):
    """Large errors are left out of the loss; errors without a value are not."""
    from videox_fun.training.objectives.flow_match import thresholded_mse

    target = torch.zeros(4)
    assert thresholded_mse(torch.tensor([1.0, 60.0, 0.0, 0.0]), target, None).item() == 0.25
    for bad in (float("nan"), float("inf")):
        assert not thresholded_mse(torch.tensor([1.0, bad, 0.0, 0.0]), target, None).isfinite()


# ---- types


def test_case_91_stills_train_in_fp16(model, tmp_path):
    run = train(model, tmp_path, mixed_precision="fp16", **stills_flags(tmp_path))
    components = run.trainer.components
    assert next(components.vae.parameters()).dtype == torch.float16  # the run's type, as the README says
    assert {p.dtype for p in run.player.parameters()} == {torch.float32}
    assert all(np.isfinite(loss) for loss in run.losses) and run.pixels[0].shape[1] == 1
    assert run.pixels[0].dtype == torch.float32


def stills_flags(folder: Path) -> dict[str, Any]:
    from tests.unit.data_kit import save_image

    save_image(folder / "a.png", height=64, width=64)
    return {"train_data_dir": folder, "train_data_meta": write_rows(folder / "m.json", [
        {"file_path": "a.png", "text": "x", "type": "image"}])}


@pytest.mark.parametrize("name", [None, "FLASH_ATTENTION", "SDPA"])
def test_case_92_a_run_in_fp32_falls_back_with_one_notice(name, model, tmp_path, monkeypatch, caplog):
    from videox_fun.models.attention_utils import reset_backend_cache

    reset_backend_cache()
    if name is None:
        monkeypatch.delenv("VIDEOX_ATTENTION_TYPE", raising=False)
    else:
        monkeypatch.setenv("VIDEOX_ATTENTION_TYPE", name)
    assert train(model, tmp_path, mixed_precision="no", **STILL).code == 0
    assert caplog.text.count("runs on SDPA") == (1 if name == "FLASH_ATTENTION" else 0)


def test_case_92_an_unknown_backend_is_refused_before_weights_load(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOX_ATTENTION_TYPE", "FLASHY")
    said = refusal(model, tmp_path)
    assert "VIDEOX_ATTENTION_TYPE='FLASHY' is not an attention backend" in said and "SDPA" in said


def test_case_94_a_forward_only_kernel_cannot_train(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VIDEOX_ATTENTION_TYPE", "SAGE_ATTENTION")
    said = refusal(model, tmp_path)
    assert "no backward pass" in said and "it may be set for sampling" in said
    q = torch.randn(1, 4, 2, 8)
    with torch.no_grad():
        assert attention(q, q, q).isfinite().all()


# ---- where things are


def moves(model: Path, output: Path, **flags: Any) -> list[str]:
    """What the frozen parts of a one-step run were moved to, and when something was encoded."""
    events: list[str] = []

    def watch(run: RealRun) -> None:
        trainer = run.trainer
        trainer.ctx.residency.device = torch.device("cpu:0")  # a name of its own beside the host's, "cpu"
        for role, module in trainer.components.frozen().items():
            def spy(*args, role=role, move=module.to, **kwargs):
                events.append(f"{role} to {args[0]}")
                return move(*args, **kwargs)

            module.to = spy
        encode = trainer.recipe._encode
        trainer.recipe._encode = lambda *args, **kwargs: (events.append("encode"), encode(*args, **kwargs))[1]

    assert train(model, output, before=watch, train_mode="inpaint", max_train_steps=1, **STILL, **flags).code == 0
    return events


def test_case_96_with_low_vram_encoders_are_on_the_device_only_while_they_work(inpaint_model, tmp_path):
    assert moves(inpaint_model, tmp_path / "off") == ["encode", "encode"]
    assert moves(inpaint_model, tmp_path / "on", low_vram=True) == [
        "vae to cpu:0", "image_encoder to cpu:0", "encode", "encode", "vae to cpu", "image_encoder to cpu",
        "text_encoder to cpu:0", "text_encoder to cpu"]


def test_case_96_parts_wait_on_the_host(model, tmp_path):
    class Part(nn.Linear):
        def to(self, device):
            self.at = str(device)
            return self

    for low_vram, waits in ((False, "meta"), (True, "cpu")):
        residency, part, pinned = Residency(torch.device("meta"), low_vram=low_vram), Part(1, 1), Part(1, 1)
        residency.keep_on_host(pinned)
        residency.place(part, pinned)
        assert part.at == waits and pinned.at == "cpu"
        with residency.use(part, pinned, None):
            assert part.at == "meta" and pinned.at == "cpu"
        assert part.at == waits
