"""Resuming: which entry is taken, warm starts, changed settings, folders of the original trainer."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.kit import SETUPS, Run, build, differences, make_args, state_at
from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint_scan import Kind, scan
from videox_fun.training.checkpoint_settings import saved_seed

# ---- finding a state


def test_latest_compares_integers_and_skips_other_names(tmp_path):
    for step in (9, 10):
        state_at(tmp_path, step)
    save_file({"x": torch.zeros(1)}, tmp_path / "checkpoint-10.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "checkpoint-12.safetensors")
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / "checkpoint-final")
    shutil.copytree(tmp_path / "checkpoint-9", tmp_path / "checkpoint-11.tmp")
    entry = build(tmp_path, SETUPS["LoRA"]).manager.find("latest")
    assert entry.path == tmp_path / "checkpoint-10" and entry.step == 10


def empty_file(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(b"")


def cut_file(folder: Path) -> None:
    path = folder / "optimizer.bin"
    path.write_bytes(path.read_bytes()[:-20])


def no_file(folder: Path) -> None:
    (folder / "videox_rank_0.json").unlink()


def torn_marker(folder: Path) -> None:
    (folder / io.MARKER).write_text((folder / io.MARKER).read_text()[:40])


@pytest.mark.parametrize(("damage", "says"), [
    (empty_file, "optimizer.bin has 0 bytes"), (cut_file, "optimizer.bin has"),
    (no_file, "videox_rank_0.json is missing"), (torn_marker, "videox_state.json is damaged"),
])
def test_latest_falls_back_and_says_so(tmp_path, caplog, damage, says):
    state_at(tmp_path, 18)
    damage(state_at(tmp_path, 20))
    run = build(tmp_path, SETUPS["LoRA"])
    assert run.resume().step == 18
    assert "checkpoint-20 is not usable" in caplog.text and says in caplog.text
    with pytest.raises(ValueError, match="checkpoint-20 cannot be used"):
        run.manager.find("checkpoint-20")


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_unmarked_folder_with_damaged_weights_is_skipped(tmp_path, caplog, cut):
    for step in (18, 20):
        (state_at(tmp_path, step) / io.MARKER).unlink()
    path = tmp_path / "checkpoint-20" / "lora_diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert build(tmp_path, SETUPS["LoRA"]).manager.find("latest").step == 18
    assert "checkpoint-20 is not usable" in caplog.text


def test_nothing_there_starts_from_the_beginning(tmp_path, caplog):
    assert build(tmp_path / "new", SETUPS["LoRA"]).resume() is None
    assert "holds no checkpoint yet" in caplog.text


def test_exports_only_are_no_state(tmp_path, caplog):
    run = build(tmp_path, SETUPS["LoRA"], save_state=False)
    run.manager.save(4)
    (tmp_path / "checkpoint-final").mkdir()
    with pytest.raises(ValueError) as caught:
        run.resume()
    text = str(caught.value)
    assert "checkpoint-4.safetensors (LoRA file)" in text and "checkpoint-final (not a checkpoint name)" in text
    assert "--save_state" in text and "--resume_from_checkpoint checkpoint-4.safetensors" in text
    compat = build(tmp_path, SETUPS["LoRA"], save_state=False, upstream_compat=True)
    assert compat.resume() is None and "Starting from the beginning" in caplog.text


def test_name_that_is_not_there_is_an_error(tmp_path):
    state_at(tmp_path, 2)
    with pytest.raises(ValueError, match=r"no resumable state.*checkpoint-2 \(state\)"):
        build(tmp_path, SETUPS["LoRA"]).resume("checkpoint-3")


def test_path_of_another_run(tmp_path):
    state_at(tmp_path / "old", 2)
    run = build(tmp_path / "new", SETUPS["LoRA"])
    assert run.resume(str(tmp_path / "old" / "checkpoint-2")).step == 2
    assert run.manager.last_saved is None


# ---- warm start


def test_bare_lora_file_is_a_warm_start_at_its_step(tmp_path, caplog):
    run = build(tmp_path, SETUPS["LoRA"], save_state=False)
    run.train(4, save_at=(4,))
    again = build(tmp_path, SETUPS["LoRA"], save_state=False)
    point = again.resume("checkpoint-4.safetensors")
    assert (point.kind, point.step) == ("warm", 4) and "counted as step 4" in caplog.text
    assert torch.equal(again.player.model.adapter.weight, run.player.model.adapter.weight)
    assert not again.player.optimizer.state
    assert again.player.optimizer.param_groups[0]["lr"] == run.player.optimizer.param_groups[0]["lr"]
    assert point.epoch == 4 * 2 // 5


def test_folder_with_only_the_weights_is_a_warm_start(tmp_path):
    folder = state_at(tmp_path, 6)
    for path in folder.iterdir():
        if path.name != "lora_diffusion_pytorch_model.safetensors":
            path.unlink()
    run = build(tmp_path, SETUPS["LoRA"])
    assert [entry.kind for entry in scan(tmp_path)] == [Kind.WEIGHTS]
    assert run.resume("checkpoint-6").kind == "warm"
    with pytest.raises(ValueError, match="no optimizer.bin and no scheduler.bin"):
        run.resume("latest")


# ---- changed settings


@pytest.mark.parametrize(("change", "says"), [
    ({"rank": 8}, "--rank: saved 4, asked 8"),
    ({"network_alpha": 8}, "--network_alpha: saved 2, asked 8"),
    ({"target_name": "q"}, "--target_name: saved q,k, asked q"),
    ({"train_batch_size": 1}, "--train_batch_size: saved 2, asked 1"),
    ({"gradient_accumulation_steps": 1}, "--gradient_accumulation_steps: saved 2, asked 1"),
    ({"seed": 4}, "--seed: saved 3, asked 4"),
    ({"learning_rate": 0.1}, "--learning_rate: saved 0.05, asked 0.1"),
    ({"max_train_steps": 20}, "--max_train_steps: saved 10, asked 20"),
    ({"dataloader_num_workers": 2}, r"--dataloader_num_workers \(any\): saved False, asked True"),
])
def test_changed_settings_are_named_and_refused(tmp_path, change, says):
    state_at(tmp_path, 2)
    with pytest.raises(ValueError, match=says):
        build(tmp_path, SETUPS["LoRA"], **change).resume()
    point = build(tmp_path, SETUPS["LoRA"], allow_resume_changes=True, **change).resume()
    assert point.kind == "partial" and any(says.split(":")[0].replace("\\", "") in note for note in point.notes)


def test_changed_data_is_noticed_by_content(tmp_path):
    meta = tmp_path / "metadata.json"
    meta.write_text("[1]")
    run = build(tmp_path / "out", SETUPS["LoRA"], train_data_meta=str(meta))
    run.manager.save(2)
    moved = tmp_path / "moved.json"
    moved.write_text("[1]")
    assert build(tmp_path / "out", SETUPS["LoRA"], train_data_meta=str(moved)).resume().kind == "exact"
    moved.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"--train_data_meta \(content\)"):
        build(tmp_path / "out", SETUPS["LoRA"], train_data_meta=str(moved)).resume()


def test_longer_constant_run_is_no_change(tmp_path):
    build(tmp_path, SETUPS["LoRA"], lr_scheduler="constant").manager.save(2)
    assert build(tmp_path, SETUPS["LoRA"], lr_scheduler="constant", max_train_steps=50).resume().kind == "exact"


def test_allowed_learning_rate_is_used(tmp_path):
    run = build(tmp_path, SETUPS["LoRA"], lr_scheduler="constant")
    run.train(2, save_at=(2,))
    again = build(tmp_path, SETUPS["LoRA"], lr_scheduler="constant", learning_rate=0.2, adam_beta1=0.5,
                  allow_resume_changes=True)
    again.resume()
    again.train(3)
    assert again.rates == [0.2] and again.player.optimizer.param_groups[0]["betas"][0] == 0.5


def test_other_trained_parameters_are_named(tmp_path):
    build(tmp_path, SETUPS["full, EMA"]).manager.save(2)
    run = Run(make_args(tmp_path, use_ema=True, trainable_modules=["base"], allow_resume_changes=False))
    run.player.groups[0].names = ["base.weight", "base.bias"]
    with pytest.raises(ValueError, match="--trainable_modules: saved .'head'., asked .'base'."):
        run.resume()
    run.args.trainable_modules = ["head"]
    with pytest.raises(ValueError, match="only in the saved state: head.bias, head.weight; only in this run: "):
        run.resume()


def test_seed_that_was_drawn_is_found_again(tmp_path):
    state_at(tmp_path, 2)
    args = make_args(tmp_path, seed=None, resume_from_checkpoint="latest")
    assert saved_seed(args) == 3
    assert saved_seed(make_args(tmp_path, resume_from_checkpoint="checkpoint-2")) == 3
    assert saved_seed(make_args(tmp_path)) is None
    assert saved_seed(make_args(tmp_path / "none", resume_from_checkpoint="latest")) is None


# ---- folders of the original trainer


OURS = ("videox_state.json", "videox_rank_0.json")


def as_upstream(folder: Path, *, position: int = 2, epoch: int = 1) -> None:
    """What the original trainer would have left: none of our files."""
    for name in OURS:
        (folder / name).unlink()
    (folder / "sampler_pos_start.pkl").write_bytes(pickle.dumps([position, epoch]))


@pytest.mark.parametrize("setup", ["full", "LoRA"])
def test_upstream_folder_is_read_as_far_as_it_goes(tmp_path, caplog, setup):
    run = build(tmp_path, SETUPS[setup])
    run.train(4, save_at=(4,))
    expected = torch.rand(3)
    as_upstream(tmp_path / "checkpoint-4")
    again = build(tmp_path, SETUPS[setup])
    point = again.resume()
    assert (point.kind, point.step, point.epoch) == ("upstream", 4, 1) and "noise" in caplog.text
    assert again.loader.started == (1, 2)
    assert torch.equal(torch.rand(3), expected)
    left = differences(run.everything(), again.everything())
    assert left == ["rng", "step"] or left == ["rng"]


def test_upstream_folder_of_two_processes(tmp_path):
    """Its schedule had counted two steps per optimizer step, and two worker queues of rows were fetched ahead."""
    run = build(tmp_path, SETUPS["full"])
    run.train(4, save_at=(4,))
    folder = tmp_path / "checkpoint-4"
    as_upstream(folder, position=9)
    shutil.copy(folder / "random_states_0.pkl", folder / "random_states_1.pkl")
    state = torch.load(folder / "scheduler.bin", weights_only=True)
    torch.save({**state, "last_epoch": 8, "_step_count": 9}, folder / "scheduler.bin")
    again = build(tmp_path, SETUPS["full"], dataloader_num_workers=2)
    again.resume()
    assert again.player.lr_scheduler.last_epoch == 4
    assert again.loader.started == (1, 9 - 4)


def test_compat_restores_what_upstream_restores(tmp_path):
    """LoRA: weights, optimizer, schedule and epoch, but neither order nor streams. Full: weights through bf16."""
    run = build(tmp_path / "lora", SETUPS["LoRA"], upstream_compat=True)
    run.train(4, save_at=(4,))
    assert pickle.loads((tmp_path / "lora" / "checkpoint-4" / "sampler_pos_start.pkl").read_bytes())[1] == 0
    again = build(tmp_path / "lora", SETUPS["LoRA"], upstream_compat=True)
    fresh = again.rng.snapshot()
    point = again.resume()
    assert (point.step, point.epoch) == (4, 0) and again.loader.started is None and again.rng.snapshot() == fresh
    assert torch.equal(again.player.model.adapter.weight, run.player.model.adapter.weight)

    full = build(tmp_path / "full", SETUPS["full"], upstream_compat=True)
    full.train(4, save_at=(4,))
    other = build(tmp_path / "full", SETUPS["full"], upstream_compat=True)
    other.resume()
    assert torch.equal(other.player.model.head.weight, full.player.model.head.weight.bfloat16().float())
    assert other.loader.started[0] == 0
