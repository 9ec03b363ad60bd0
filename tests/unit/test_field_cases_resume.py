"""Faults that people met when they stopped and continued, given to the training script itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.data_kit import save_image, write_rows
from tests.unit.real_runs import (
    FULL,
    RealRun,
    checkpoint,
    file_differences,
    refusal,
    same_tensors,
    set_up,
    train,
)
from videox_fun.training import checkpoint_io
from videox_fun.training.checkpoint import CheckpointError

STILL = {"video_sample_n_frames": 1}  # as fast as it gets
STATE = {"save_state": True, **STILL}
LATEST = {"resume_from_checkpoint": "latest"}
LORA_FILE = "lora_diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of two steps, saved after each."""
    folder = tmp_path_factory.mktemp("saved")
    train(model, folder, checkpointing_steps=1, **STATE)
    return folder


@pytest.fixture
def output(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved`` to work on."""
    return Path(shutil.copytree(saved, tmp_path / "out"))


def marker(folder: Path) -> dict[str, Any]:
    return json.loads((folder / checkpoint_io.MARKER).read_text())


def keys_and_size(path: Path) -> tuple[list[str], int]:
    with safe_open(path, "pt") as file:
        return sorted(file.keys()), path.stat().st_size


def test_case_40_latest_compares_numbers_and_skips_other_names(model: Path, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "whole", max_train_steps=11, **STATE)
    out = tmp_path / "out"
    train(model, out, max_train_steps=10, checkpointing_steps=1, checkpoints_total_limit=2, **STATE)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-9"]
    shutil.copy(out / "checkpoint-10" / LORA_FILE, out / "checkpoint-10.safetensors")
    for name in ("checkpoint-final", "checkpoint-11.tmp"):
        shutil.copytree(out / "checkpoint-9", out / name)
    run = train(model, out, max_train_steps=11, **LATEST, **STATE)
    assert run.steps == [11] and run.losses == whole.losses[10:]


@pytest.mark.parametrize("peft", [False, True])
def test_case_41_the_state_holds_all_that_the_resume_wants(peft: bool, model: Path, tmp_path: Path) -> None:
    flags = {"use_peft_lora": peft, "max_train_steps": 4, **STATE}
    whole = train(model, tmp_path / "whole", checkpointing_steps=2, **flags)
    part = train(model, tmp_path / "part", resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2", **flags)
    assert part.steps == [3, 4] and part.losses == whole.losses[2:]
    for folder in ("whole", "part"):
        assert (tmp_path / folder / "checkpoint-4" / LORA_FILE).is_file()
    assert file_differences(*(tmp_path / name / "checkpoint-4" / LORA_FILE for name in ("whole", "part"))) == []


def test_case_42_a_folder_with_only_the_lora_starts_warm_or_says_what_is_missing(model, output, caplog) -> None:
    shutil.rmtree(output / "checkpoint-1")
    for path in (output / "checkpoint-2").iterdir():
        if path.name != LORA_FILE:
            path.unlink()
    said = refusal(model, output, max_train_steps=4, **LATEST, **STATE)
    assert "checkpoint-2 (weights: no optimizer.bin and no scheduler.bin)" in said
    assert "--resume_from_checkpoint checkpoint-2 starts from those weights with a new optimizer" in said
    tensors = load_file(output / "checkpoint-2" / LORA_FILE)
    run = set_up(model, output, max_train_steps=4, resume_from_checkpoint="checkpoint-2", **STATE)
    held = {name.removeprefix("network."): value for name, value in run.trained().items()}
    assert same_tensors(held, {key: value for key, value in tensors.items() if not key.endswith("alpha")}) == []
    assert run.go().steps == [3, 4] and "counted as step 2" in caplog.text


def test_case_45_step_and_schedule_go_on(model: Path, tmp_path: Path) -> None:
    flags = {"max_train_steps": 10, "lr_scheduler": "cosine", "gradient_accumulation_steps": 2,
             "checkpointing_steps": 5, **STATE}
    whole = train(model, tmp_path / "whole", **flags)
    part = train(model, tmp_path / "part", resume_from_checkpoint=tmp_path / "whole" / "checkpoint-5", **flags)
    assert part.steps == [6, 7, 8, 9, 10] and part.trainer.total_steps == 10
    assert part.logs("lr") == whole.logs("lr")[5:] and len(part.rows) == 10
    assert part.logs("lr")[-1] == pytest.approx(0, abs=1e-9)


def test_case_46_counters_grow_over_several_resumes(model: Path, tmp_path: Path) -> None:
    counters, steps, rows = [], [], []
    for stop in (4, 8, 12):
        run = train(model, tmp_path, max_train_steps=stop, **STATE, **(LATEST if stop > 4 else {}))
        steps += run.steps
        rows += run.rows
        counters.append((marker(tmp_path / f"checkpoint-{stop}")["step"], run.trainer.ctx.epoch))
    assert steps == list(range(1, 13)) and [step for step, _ in counters] == [4, 8, 12]
    assert [epoch for _, epoch in counters] == [0, 1, 1]
    assert sorted(sum(rows[:6], [])) == sorted(sum(rows[6:], [])) == list(range(6))


def test_case_48_the_order_of_the_second_epoch_is_kept(model: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", height=64, width=64)
    meta = write_rows(tmp_path / "m.json", [{"file_path": "a.png", "text": f"{n}", "type": "image"} for n in range(10)])
    flags = {"train_data_dir": tmp_path, "train_data_meta": meta, "train_batch_size": 2, **STATE}
    whole = train(model, tmp_path / "whole", max_train_steps=10, checkpointing_steps=8, **flags)
    part = train(model, tmp_path / "part", max_train_steps=10,
                 resume_from_checkpoint=tmp_path / "whole" / "checkpoint-8", **flags)
    assert marker(tmp_path / "whole" / "checkpoint-8")["epoch"] == 1
    assert part.rows == whole.rows[8:]
    assert sorted(sum(whole.rows[5:8] + part.rows, [])) == list(range(10))


def test_case_50_a_resumed_adapter_goes_on_learning(model: Path, output: Path) -> None:
    before = load_file(output / "checkpoint-2" / LORA_FILE)
    run = set_up(model, output, max_train_steps=4, **LATEST, **STATE)
    held = {id(p) for group in run.player.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in run.player.unwrapped().parameters() if p.requires_grad}
    run.go()
    after = load_file(output / "checkpoint-4" / LORA_FILE)
    assert set(same_tensors(before, after)) == {key for key in after if not key.endswith("alpha")}


@pytest.mark.parametrize("peft", [False, True])
def test_case_51_the_file_stays_the_same_size(peft: bool, model: Path, tmp_path: Path) -> None:
    facts = []
    for stop in (1, 2, 3):
        train(model, tmp_path, max_train_steps=stop, use_peft_lora=peft, **STATE, **(LATEST if stop > 1 else {}))
        facts.append(keys_and_size(tmp_path / f"checkpoint-{stop}" / LORA_FILE))
    assert facts[0] == facts[1] == facts[2]


def test_case_55_the_only_good_save_survives_a_failed_one(model: Path, tmp_path: Path, monkeypatch) -> None:
    original = checkpoint_io.write_torch

    def full(path: Path, value: Any) -> None:
        if "checkpoint-2" in str(path):
            raise OSError(28, "No space left on device")
        original(path, value)

    monkeypatch.setattr(checkpoint_io, "write_torch", full)
    flags = {"max_train_steps": 3, "checkpointing_steps": 1, "checkpoints_total_limit": 1, **STATE}
    with pytest.raises(CheckpointError, match="checkpoint-1 is untouched"):
        train(model, tmp_path, **flags)
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-1"]
    monkeypatch.undo()
    run = train(model, tmp_path, **flags, **LATEST)
    assert run.steps == [2, 3] and [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_case_56_empty_files_are_passed_over(model: Path, output: Path, caplog) -> None:
    for path in (output / "checkpoint-2").iterdir():
        path.write_bytes(b"")
    run = set_up(model, output, max_train_steps=3, **LATEST, **STATE)
    assert run.trainer.ctx.global_step == 1
    assert "checkpoint-2 is not usable" in caplog.text


def test_case_58_exports_are_no_states(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, max_train_steps=2, checkpointing_steps=1, **STILL)
    said = refusal(model, tmp_path, **LATEST, **STILL)
    for part in ("checkpoint-1.safetensors (LoRA file)", "checkpoint-2.safetensors (LoRA file)", "--save_state",
                 "no resumable state"):
        assert part in said


def test_case_59_another_set_of_averaged_weights_is_named(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, script=FULL, use_ema=True, trainable_modules="ffn", max_train_steps=1, **STILL)
    said = refusal(model, tmp_path, script=FULL, use_ema=True, trainable_modules="attn", **LATEST, **STILL)
    assert "--trainable_modules: saved ['ffn'], asked ['attn']" in said
    path = tmp_path / "checkpoint-1" / checkpoint_io.MARKER
    stored = json.loads(path.read_text())
    del stored["settings"]["--trainable_modules"]
    path.write_text(json.dumps(stored))
    said = refusal(model, tmp_path, script=FULL, use_ema=True, trainable_modules="attn", **LATEST, **STILL)
    assert "only in the saved state: blocks.0.ffn.0.bias" in said and "only in this run: blocks.0.cross_attn" in said


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("save_state", [True, False])
def test_case_80_another_rank_or_alpha_is_refused(peft: bool, save_state: bool, model: Path, tmp_path: Path) -> None:
    """From a state as from a bare file: saved and asked values side by side."""
    flags = {"use_peft_lora": peft, "save_state": save_state, **STILL}
    train(model, tmp_path, rank=8, network_alpha=4, max_train_steps=1, **flags)
    asked = {"resume_from_checkpoint": "checkpoint-1" if save_state else "checkpoint-1.safetensors"}
    for change, saved, given in (({"rank": 16, "network_alpha": 4}, "8", "16"),
                                 ({"rank": 8, "network_alpha": 8}, "4", "8")):
        said = refusal(model, tmp_path, **change, **asked, **flags)
        assert saved in said and given in said and ("rank" in said if given == "16" else "alpha" in said), said


def test_case_98_the_bar_of_a_warm_start_counts_what_is_left(model: Path, output: Path, tmp_path: Path) -> None:
    totals: list[tuple[int, int]] = []

    def watch(run: RealRun) -> None:
        log = run.trainer.run_logger.log

        def spy(values, step):
            bar = run.trainer.run_logger.bar
            totals.append((bar.n, bar.total))
            return log(values, step)

        run.trainer.run_logger.log = spy

    warm = tmp_path / "warm"
    warm.mkdir()
    shutil.copy(output / "checkpoint-2" / LORA_FILE, warm / "checkpoint-2.safetensors")
    train(model, warm, before=watch, max_train_steps=5, resume_from_checkpoint="checkpoint-2.safetensors", **STILL)
    assert totals == [(0, 3), (1, 3), (2, 3)]


def test_case_98_a_file_without_a_step_in_its_name_starts_at_zero(model: Path, output: Path, tmp_path: Path) -> None:
    path = tmp_path / "my_style.safetensors"
    shutil.copy(output / "checkpoint-2" / LORA_FILE, path)
    run = train(model, tmp_path / "out2", max_train_steps=2, resume_from_checkpoint=path, **STILL)
    assert run.steps == [1, 2]
    again = train(model, tmp_path / "out3", max_train_steps=2, **STILL)
    assert run.losses[0] != again.losses[0]  # it did start from the file


def test_case_53_the_limit_keeps_the_newest(model: Path, tmp_path: Path) -> None:
    """One process; two of them in tests/dist and tests/faults/test_two_ranks.py."""
    for name, flags in (("states", STATE), ("files", STILL)):
        train(model, tmp_path / name, max_train_steps=6, checkpointing_steps=2, checkpoints_total_limit=2, **flags)
        left = sorted(path.name.removesuffix(".safetensors") for path in (tmp_path / name).glob("checkpoint-*"))
        assert left == ["checkpoint-4", "checkpoint-6"]


def test_case_104_a_drawn_seed_is_part_of_the_run_that_is_continued(model: Path, output: Path) -> None:
    run = set_up(model, output, max_train_steps=4, seed=None, **LATEST, **STATE)
    assert run.trainer.args.seed == 42


def test_a_signal_saves_and_leaves_without_sampling(model: Path, tmp_path: Path) -> None:
    sampled: list[int] = []

    def stop(run: RealRun) -> None:
        trainer = run.trainer
        trainer.validator.after_step = sampled.append
        compute = trainer.objective.compute
        trainer.objective.compute = lambda given: (setattr(trainer.signals, "received", "SIGTERM"), compute(given))[1]

    run = train(model, tmp_path, before=stop, max_train_steps=5, **STILL)
    assert run.code == 85 and run.steps == [1] and sampled == []
    assert (tmp_path / "checkpoint-1" / checkpoint_io.MARKER).is_file()
    assert train(model, tmp_path, max_train_steps=2, **LATEST, **STILL).steps == [2]
