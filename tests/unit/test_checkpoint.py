"""Checkpoints: exact continuation, upstream's names, which entry ``latest`` takes, pruning, warm starts, refusals."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.faults.kit import Run, differences, make_args
from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint import CheckpointError
from videox_fun.training.checkpoint_scan import Kind, scan
from videox_fun.training.checkpoint_settings import saved_seed


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def needs(package: str):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# ---- exact continuation

SETUPS = {
    "full": {"kind": "named"},
    "full, EMA": {"kind": "named", "args": {"use_ema": True}},
    "full, bf16": {"kind": "named", "weight_dtype": torch.bfloat16},
    "full, bf16 with fp32 masters": {"kind": "named", "weight_dtype": torch.bfloat16, "trained_dtype": torch.float32,
                                     "args": {"use_ema": True}},
    "LoRA": {"kind": "lora"},
    "LoRA, bf16 with fp32 adapter": {"kind": "lora", "weight_dtype": torch.bfloat16, "trained_dtype": torch.float32},
    "PEFT": {"kind": "peft"},
    "fp16 scaler": {"kind": "named", "fp16_scaler": True},
    "two players": {"kind": "named", "players": 2, "args": {"use_ema": True}},
}
OPTIMIZERS = {"8bit": ("use_8bit_adam", "bitsandbytes"), "CAME": ("use_came", "came_pytorch")}
CASES = [pytest.param(setup, None, step, id=f"{name}-step{step}") for name, setup in SETUPS.items() for step in (2, 5, 6)]
CASES += [pytest.param(SETUPS[name], flag, 5, id=f"{name}-{label}", marks=needs(package))
          for name in ("full", "LoRA, bf16 with fp32 adapter", "full, bf16") for label, (flag, package) in OPTIMIZERS.items()]


def build(output_dir: Path, setup: dict, flag: str | None = None, **more) -> Run:
    extra = {**setup.get("args", {}), **more, **({flag: True} if flag else {})}
    return Run(make_args(output_dir, **extra), **{k: v for k, v in setup.items() if k != "args"})


@pytest.mark.parametrize(("setup", "flag", "step"), CASES)
def test_interrupted_run_equals_unbroken_run(tmp_path, setup, flag, step):
    """Five batches per epoch, accumulation 2: step 2 is inside epoch 0, 5 inside epoch 1, 6 at an epoch's end."""
    unbroken = build(tmp_path / "a", setup, flag)
    unbroken.train(8)
    first = build(tmp_path / "b", setup, flag)
    first.train(step + 1, save_at=(step,))  # goes on past the save, as a crash would find it
    second = build(tmp_path / "b", setup, flag)
    point = second.resume()
    assert (point.step, point.kind, point.notes) == (step, "exact", ())
    second.train(8)
    assert second.steps == unbroken.steps[step:]
    assert second.rows == unbroken.rows[step:]
    assert second.losses == unbroken.losses[step:]
    assert second.rates == unbroken.rates[step:]
    assert differences(unbroken.everything(), second.everything()) == []


def test_two_resumes_in_a_row_count_on(tmp_path):
    unbroken = build(tmp_path / "a", SETUPS["LoRA"])
    unbroken.train(10)
    size = None
    for stop in (3, 6, 9):
        run = build(tmp_path / "b", SETUPS["LoRA"])
        run.resume()
        run.train(stop, save_at=(stop,))
        folder = tmp_path / "b" / f"checkpoint-{stop}"
        assert json.loads((folder / io.MARKER).read_text())["step"] == stop
        grown = (folder / "lora_diffusion_pytorch_model.safetensors").stat().st_size
        assert size in (None, grown)  # no second adapter
        size = grown
    last = build(tmp_path / "b", SETUPS["LoRA"])
    last.resume()
    last.train(10)
    assert last.steps == [10] and differences(unbroken.everything(), last.everything()) == []


def test_resumed_weights_change_on(tmp_path):
    run = build(tmp_path, SETUPS["LoRA"])
    run.train(2, save_at=(2,))
    again = build(tmp_path, SETUPS["LoRA"])
    again.resume()
    before = again.player.model.adapter.weight.clone()
    again.train(4)
    assert not torch.equal(before, again.player.model.adapter.weight)


def test_extra_state_travels(tmp_path):
    class Counter:
        def __init__(self):
            self.value = torch.zeros(2)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    counter = Counter()
    run = Run(make_args(tmp_path), extra_state={"counter": counter})
    counter.value += 5
    run.manager.save(1)
    other = Counter()
    Run(make_args(tmp_path), extra_state={"counter": other}).resume()
    assert torch.equal(other.value, torch.full((2,), 5.0))


# ---- names on disk

OURS = {"videox_state.json", "videox_rank_0.json"}
STATE = {"optimizer.bin", "scheduler.bin", "random_states_0.pkl", "sampler_pos_start.pkl"}


def test_full_state_has_the_recorded_names(tmp_path, goldens):
    run = build(tmp_path, SETUPS["full, EMA"])
    run.train(2, save_at=(2,))
    recorded = json.loads((goldens / "e2e" / "runs" / "f_ema.json").read_text())["files"]
    expected = {name.removeprefix("checkpoint-2/") for name in recorded if name.startswith("checkpoint-2/")}
    assert names(tmp_path / "checkpoint-2") == expected | OURS


def test_lora_state_has_the_recorded_names(tmp_path, goldens):
    run = build(tmp_path, SETUPS["LoRA"])
    run.train(2, save_at=(2,))
    recorded = json.loads((goldens / "e2e" / "runs" / "g_state.json").read_text())["files"]
    expected = {name.removeprefix("checkpoint-2/") for name in recorded if name.startswith("checkpoint-2/")}
    assert names(tmp_path / "checkpoint-2") == expected | OURS
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]  # nothing hidden stays behind


def test_bare_names(tmp_path):
    run = build(tmp_path, SETUPS["PEFT"], save_state=False)
    run.manager.save(4)
    assert names(tmp_path) == {"checkpoint-4.safetensors", "checkpoint-4-compatible_with_comfyui.safetensors"}
    two = Run(make_args(tmp_path / "two", save_state=False), kind="lora", players=2)
    two.manager.save(4)
    assert names(tmp_path / "two") == {"checkpoint-4.safetensors", "checkpoint-4-fake_score.safetensors"}


def test_second_player_lies_in_its_own_folder(tmp_path):
    run = Run(make_args(tmp_path, use_ema=False), players=2)
    run.manager.save(3)
    inner = {"transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "optimizer.bin",
             "scheduler.bin"}
    assert {f"fake_score/{name}" for name in inner} <= names(tmp_path / "checkpoint-3")


def test_upstreams_reader_reads_the_state(tmp_path):
    """accelerate's own loader, which upstream uses, restores optimizer, schedule and global streams from our folder."""
    from accelerate.checkpointing import load_accelerator_state

    run = build(tmp_path, SETUPS["full"])
    run.train(3, save_at=(3,))
    expected = torch.rand(4)
    folder = tmp_path / "checkpoint-3"
    assert pickle.loads((folder / "sampler_pos_start.pkl").read_bytes()) == [0, 1]
    other = build(tmp_path / "other", SETUPS["full"])
    load_accelerator_state(str(folder), [], [other.player.optimizer], [other.player.lr_scheduler], [], 0)
    assert torch.equal(torch.rand(4), expected)
    for key, value in run.player.optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, other.player.optimizer.state_dict()["state"][0][key]), key
    assert other.player.lr_scheduler.last_epoch == 3


def test_written_safetensors_equal_the_librarys(tmp_path):
    tensors = {"b.x": torch.randn(3, 5), "a": torch.randn(7).bfloat16(), "c": torch.tensor(2.0), "d": torch.zeros(0, 4),
               "e": torch.arange(5), "f": torch.tensor([True, False, True]), "g": torch.randn(4, 6).T,
               "h": torch.randn(3).to(torch.float8_e4m3fn)}
    io.write_safetensors(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    loaded = load_file(tmp_path / "ours.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name].view(torch.uint8) if value.dtype == torch.float8_e4m3fn else loaded[name],
                           value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value)
    with safe_open(tmp_path / "ours.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    with pytest.raises(CheckpointError, match="not a single tensor"):
        io.write_safetensors(tmp_path / "empty.safetensors", {})


# ---- finding a state


def state_at(folder: Path, step: int) -> Path:
    run = build(folder, SETUPS["LoRA"])
    run.ctx.global_step = step
    return run.manager.save(step)


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
    (empty_file, "optimizer.bin has 0 bytes"), (cut_file, "optimizer.bin has"), (no_file, "videox_rank_0.json is missing"),
    (torn_marker, "videox_state.json is damaged"),
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


# -------------------------------------------------------------------------------------------------- changed settings


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
    with pytest.raises(ValueError, match="only in the saved state: head.bias, head.weight; only in this run: base.bias"):
        run.resume()


def test_seed_that_was_drawn_is_found_again(tmp_path):
    state_at(tmp_path, 2)
    args = make_args(tmp_path, seed=None, resume_from_checkpoint="latest")
    assert saved_seed(args) == 3
    assert saved_seed(make_args(tmp_path, resume_from_checkpoint="checkpoint-2")) == 3
    assert saved_seed(make_args(tmp_path)) is None
    assert saved_seed(make_args(tmp_path / "none", resume_from_checkpoint="latest")) is None


# ---- pruning


@pytest.mark.parametrize(("kind", "save_state"), [("named", True), ("lora", True), ("lora", False), ("peft", False)])
def test_limit_keeps_the_newest(tmp_path, kind, save_state):
    run = Run(make_args(tmp_path, checkpoints_total_limit=2, save_state=save_state), kind=kind)
    others = ["checkpoint-final", "checkpointing.txt", "checkpoint-1.safetensors.bak"]
    (tmp_path / others[0]).mkdir(parents=True)
    for name in others[1:]:
        (tmp_path / name).write_text("mine")
    for step in (2, 4, 6, 10):
        run.manager.save(step)
    left = {p.name for p in tmp_path.iterdir()} - set(others)
    suffix = "" if save_state else ".safetensors"
    expected = {f"checkpoint-6{suffix}", f"checkpoint-10{suffix}"}
    if kind == "peft":
        expected |= {f"checkpoint-{step}-compatible_with_comfyui.safetensors" for step in (6, 10)}
    assert left == expected and all((tmp_path / name).exists() for name in others)


def test_broken_entries_go_first_and_do_not_count(tmp_path):
    run = build(tmp_path, SETUPS["LoRA"], checkpoints_total_limit=2)
    for step in (2, 4):
        run.manager.save(step)
    (tmp_path / "checkpoint-4" / "optimizer.bin").write_bytes(b"")
    (tmp_path / "checkpoint-7").mkdir()  # no weights inside: not ours to delete
    run.manager.save(6)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-6", "checkpoint-7"}


def test_last_resumable_state_survives_bare_saves(tmp_path):
    state_at(tmp_path, 2)
    run = build(tmp_path, SETUPS["LoRA"], save_state=False, checkpoints_total_limit=1)
    for step in (3, 4, 5):
        run.manager.save(step)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-5.safetensors"}


def test_failed_save_removes_nothing(tmp_path, monkeypatch):
    run = build(tmp_path, SETUPS["LoRA"], checkpoints_total_limit=1)
    run.manager.save(2)

    def fail(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io, "write_torch", fail)
    with pytest.raises(CheckpointError, match="No space left on device.*checkpoint-2 is untouched"):
        run.manager.save(4)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]
    assert build(tmp_path, SETUPS["LoRA"]).manager.find("latest").step == 2


def test_programming_errors_keep_their_type(tmp_path, monkeypatch):
    run = build(tmp_path, SETUPS["LoRA"])
    monkeypatch.setattr(run.player.trainable, "export", lambda *a, **k: [][0])
    with pytest.raises(IndexError):
        run.manager.save(2)
    assert list(tmp_path.iterdir()) == []


# ---- final save


def test_final_save_is_not_repeated(tmp_path):
    run = build(tmp_path, SETUPS["full"])
    run.train(2, save_at=(2,))
    before = (tmp_path / "checkpoint-2" / io.MARKER).stat().st_mtime_ns
    assert run.manager.final(2) == tmp_path / "checkpoint-2"
    assert (tmp_path / "checkpoint-2" / io.MARKER).stat().st_mtime_ns == before
    assert run.manager.final(3) == tmp_path / "checkpoint-3" and (tmp_path / "checkpoint-3").is_dir()


def test_final_save_holds_ema_weights_and_still_resumes_exactly(tmp_path):
    unbroken = build(tmp_path / "a", SETUPS["full, EMA"])
    unbroken.train(6)
    run = build(tmp_path / "b", SETUPS["full, EMA"])
    run.train(4, save_at=(4,))
    raw = run.player.model.head.weight.clone()
    run.manager.final(4)
    folder = tmp_path / "b" / "checkpoint-4"
    saved = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(saved["head.weight"], run.player.ema.shadow["head.weight"])
    assert not torch.equal(saved["head.weight"], raw) and torch.equal(run.player.model.head.weight, raw)
    again = build(tmp_path / "b", SETUPS["full, EMA"])
    again.resume()
    assert torch.equal(again.player.model.head.weight, raw)
    again.train(6)
    assert differences(unbroken.everything(), again.everything()) == []


def test_forced_state_without_save_state(tmp_path):
    run = build(tmp_path, SETUPS["LoRA"], save_state=False)
    run.train(3)
    run.manager.save(3, force_state=True)
    assert build(tmp_path, SETUPS["LoRA"], save_state=False).resume().kind == "exact"


# ----------------------------------------------------------------------------------------- folders of the original trainer


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


# ---- recovery


@pytest.mark.parametrize("with_old", [False, True])
def test_finished_but_unnamed_state_is_recovered(tmp_path, with_old):
    folder = state_at(tmp_path, 6)
    dead = 2**22 + 1  # above the kernel's largest process id
    folder.rename(tmp_path / f".checkpoint-6.tmp-{dead}")
    if with_old:
        state_at(tmp_path, 6).rename(tmp_path / f".checkpoint-6.old-{dead}")
    (tmp_path / f".checkpoint-8.tmp-{dead}").mkdir()
    (tmp_path / f".checkpoint-4.safetensors.tmp-{dead}").write_text("half")
    (tmp_path / f".checkpoint-2.trash-{dead}").mkdir()
    run = build(tmp_path, SETUPS["LoRA"])
    assert run.resume().step == 6
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-6"]


def test_files_of_a_living_process_are_left_alone(tmp_path):
    folder = tmp_path / ".checkpoint-8.tmp-1"
    folder.mkdir()
    build(tmp_path, SETUPS["LoRA"])
    assert folder.exists()


def test_missing_rank_file_is_told_not_guessed(tmp_path):
    Run(make_args(tmp_path), kind="lora").manager.save(2)
    run = Run(make_args(tmp_path, allow_resume_changes=True), kind="lora", rank=1, world=2)
    run.manager._share = lambda value: (scan(tmp_path)[0], None)
    point = run.resume()
    assert point.kind == "partial" and any("no part for rank 1" in note for note in point.notes)
