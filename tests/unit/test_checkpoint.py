"""Checkpoints: exact continuation, upstream's names, pruning, the final save, recovery."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.faults.kit import SETUPS, Run, build, differences, make_args, state_at
from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint import CheckpointError
from videox_fun.training.checkpoint_scan import scan


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def needs(package: str):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# ---- exact continuation

OPTIMIZERS = {"8bit": ("use_8bit_adam", "bitsandbytes"), "CAME": ("use_came", "came_pytorch")}
CASES = [pytest.param(setup, None, step, id=f"{name}-step{step}")
         for name, setup in SETUPS.items() for step in (2, 5, 6)]
CASES += [pytest.param(SETUPS[name], flag, 5, id=f"{name}-{label}", marks=needs(package))
          for name in ("full", "LoRA, bf16 with fp32 adapter", "full, bf16")
          for label, (flag, package) in OPTIMIZERS.items()]


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


@pytest.mark.parametrize("kind", ["named", "lora"])
def test_sharded_state_goes_through_accelerate(tmp_path, kind):
    """DeepSpeed and FSDP write shards of their own; schedule, streams, loader and the export come from here."""
    unbroken = Run(make_args(tmp_path / "a", save_state=False), kind=kind, sharded=True)
    unbroken.train(8)
    run = Run(make_args(tmp_path / "b", save_state=False), kind=kind, sharded=True)
    run.train(5, save_at=(5,))
    found = names(tmp_path / "b" / "checkpoint-5")
    assert {"pytorch_model_fsdp_0/shard.pt", "scheduler.bin", "sampler_pos_start.pkl"} < found
    assert "optimizer.bin" not in found and any(name.endswith("diffusion_pytorch_model.safetensors") for name in found)
    again = Run(make_args(tmp_path / "b", save_state=False), kind=kind, sharded=True)
    assert again.resume().kind == "exact"
    again.train(8)
    assert differences(unbroken.everything(), again.everything()) == []


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


@pytest.fixture
def process_state():
    """accelerate's logger wants its process state; leave none behind that was not there."""
    from accelerate import PartialState

    fresh = not PartialState._shared_state
    PartialState(cpu=True)
    yield
    if fresh:
        PartialState._reset_state()


def test_upstreams_reader_reads_the_state(tmp_path, process_state):
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


# ---- the real trainables


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.k(torch.tanh(self.q(x)))


REAL = {
    "named": ("named", {"trainable_modules": ["k"], "trainable_modules_low_learning_rate": ["q"]}),
    "native": ("lora", {"use_peft_lora": False}),
    "peft": ("lora", {"use_peft_lora": True}),
}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_real_trainables_come_back_bit_for_bit(tmp_path, name, masters):
    """bf16 runs, with the trained parameters in bf16 or in fp32: weights and Adam moments after a resume."""
    from types import SimpleNamespace

    from videox_fun.training.checkpoint import CheckpointManager
    from videox_fun.training.checkpoint_parts import live_parameters
    from videox_fun.training.context import Player
    from videox_fun.training.optimizers import build_optimizer
    from videox_fun.training.trainable import make_trainable

    kind, flags = REAL[name]
    args = make_args(tmp_path, lora_skip_name=None, lora_exact_match=False, lora_plus_ratio=None, use_dora=False,
                     train_text_encoder=False, master_weights_fp32=masters,
                     training_with_video_token_length=False, **flags)

    def make(seed: int):
        shell = Run(make_args(tmp_path, seed=3))
        shell.ctx.args, shell.ctx.weight_dtype = args, torch.bfloat16
        shell.ctx.spec = SimpleNamespace(id="tiny/train", trainable=kind, options={})
        torch.manual_seed(5)
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([Block()])}).bfloat16()
        player = Player("transformer", model, make_trainable(shell.ctx.spec, args))
        torch.manual_seed(seed)
        player.groups = player.trainable.attach(shell.ctx, player)
        player.optimizer = build_optimizer(args, player.groups)
        return player, CheckpointManager(shell.ctx, players=[player])

    player, manager = make(1)
    for _ in range(3):
        for p in live_parameters(player).values():
            p.grad = torch.randn_like(p)
        player.optimizer.step()
    manager.save(3)
    assert (tmp_path / "checkpoint-3" / "trainable_parameters.safetensors").exists() == masters
    other, again = make(2)
    assert again.resume("latest").kind == "exact"
    mine, theirs = live_parameters(player), live_parameters(other)
    assert mine.keys() == theirs.keys() and len(mine) == 4
    for key, value in mine.items():
        assert value.dtype == (torch.float32 if masters else torch.bfloat16)
        assert torch.equal(value, theirs[key]), key
        assert torch.equal(player.optimizer.state[value]["exp_avg"], other.optimizer.state[theirs[key]]["exp_avg"])
