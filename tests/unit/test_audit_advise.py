"""The decision tree's branches, the templates, and what a finished run answers by itself."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from optim_patches.audit import cli
from optim_patches.audit.advise import edits_of, main, read_run, walk
from optim_patches.audit.cli import audit
from optim_patches.audit.edits import apply_edits
from optim_patches.audit.facts import Surroundings, facts_from_launch
from optim_patches.audit.hardware import parse_gpu
from optim_patches.audit.launch import find_launches
from optim_patches.audit.project import Project, load_project
from optim_patches.audit.templates import SCENARIOS, get_scenario, render
from optim_patches.audit.tree import Measured
from tests.unit.audit_kit import FSDP, OFFLOAD, PACKAGES, ZERO3, command, make_facts, write
from tests.unit.test_audit_report import HOSTILE

FULL = "wan2.1_fun/train"
BIG = "Wan2.1-Fun-14B-InP"
LEAN = "--gradient_checkpointing --low_vram --use_8bit_adam --vae_mini_batch=8 --cache_text --mixed_precision=bf16"


@pytest.fixture(autouse=True)
def no_local_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "detect_gpus", lambda: [])


def changes(
    trouble: str, flags: str = "", *, again: int = 0, measured: Measured | None = None, **kwargs: Any
) -> set[str]:
    """Names of the flags, commands and keys that the advice changes; removals with a minus."""
    facts = make_facts(flags, **kwargs)
    steps = list(walk(facts, [trouble], again=again, measured=measured))
    for _, step in steps:
        assert step.question.en and step.question.zh and step.answer.en and step.answer.zh
    return {("-" if edit.remove else "") + edit.name for edit in edits_of(steps, facts)}


def test_out_of_memory_full_becomes_lora() -> None:
    got = changes("oom", "--trainable_modules . --use_ema --learning_rate=1e-5", script=FULL)
    assert got == {"train_lora.py", "rank", "network_alpha", "learning_rate", "-trainable_modules", "-use_ema"}
    facts = make_facts("--trainable_modules .", script=FULL)
    text = apply_edits(facts.launch.text, [(facts.launch, edits_of(list(walk(facts, ["oom"])), facts))]).text
    launch = find_launches(text)[0][0]
    assert launch.script == "scripts/wan2.1_fun/train_lora.py" and launch.options.integer("rank") == 64
    assert all(option.known for option in launch.options.items)


def test_out_of_memory_full_again() -> None:
    first = changes("oom", "--trainable_modules .", script=FULL, again=1, gpu="RTX 4090", gpus=2, model=BIG)
    assert {"gradient_checkpointing", "low_vram", "use_8bit_adam", "vae_mini_batch"} <= first
    assert "deepspeed_config_file" not in first
    second = changes("oom", "--trainable_modules . --video_sample_n_frames=81", script=FULL, again=2, gpu="RTX 4090",
                     gpus=2, model=BIG)  # fmt: skip
    assert {"video_sample_size", "video_sample_n_frames", "deepspeed_config_file", "zero_stage"} <= second
    assert "gradient_checkpointing" in changes("oom", script="wan2.1_vace/train", without="train_mode")
    on = changes("oom", "--trainable_modules .", script=FULL, again=3, gpus=2, model=BIG, launcher=OFFLOAD)
    assert "video_sample_size" in on and "deepspeed_config_file" not in on


def test_out_of_memory_lora_takes_what_is_left() -> None:
    assert changes("oom", "--train_batch_size=4", without="train_batch_size") == {
        "gradient_checkpointing", "cache_text", "low_vram", "use_8bit_adam", "vae_mini_batch", "train_batch_size",
        "gradient_accumulation_steps",
    }  # fmt: skip
    assert "qlora" in changes("oom", LEAN, model=BIG, gpu="RTX 4090")
    assert "vae_tiling" in changes("oom", LEAN + " --video_sample_size=768")
    assert "deepspeed_config_file" in changes("oom", LEAN, model=BIG, gpus=8)
    assert "-fused_optimizer" in changes("oom", "--fused_optimizer")


def test_out_of_memory_lora_ends_in_smaller_clips() -> None:
    assert changes("oom", LEAN + " --video_sample_n_frames=81 --video_sample_size=640") == {
        "video_sample_size", "video_sample_n_frames"
    }  # fmt: skip
    small = LEAN + " --video_sample_n_frames=17 --video_sample_size=256"
    assert changes("oom", small) == set()


def test_slow() -> None:
    assert changes("slow", packages="triton") >= {"pip install flash-attn --no-build-isolation"}
    got = changes("slow")
    assert {"mixed_precision", "dataloader_num_workers", "cache_latents", "cache_text", "compile", "liger"} <= got
    assert "fused_optimizer" in got and "pip install flash-attn --no-build-isolation" not in got
    assert changes("slow", gpu="V100") >= {"mixed_precision"}
    assert "deepspeed_config_file" in changes("slow", LEAN, gpus=8, model=BIG)
    sharded = changes("slow", "--trainable_modules .", gpus=8, model=BIG, script=FULL)
    assert "fsdp_transformer_layer_cls_to_wrap" in sharded
    prefetch = FSDP.replace("BACKWARD_PRE", "NO_PREFETCH")
    assert "fsdp_backward_prefetch" in changes("slow", "--trainable_modules .", gpus=8, script=FULL, launcher=prefetch)
    nodes = changes("slow", "--random_hw_adapt", gpus=8, script=FULL, launcher=f"{ZERO3} --num_machines 2")
    assert {"uniform_sampling", "keep_all_node_same_token_length", "zero_optimization.zero_quantized_weights"} <= nodes
    assert "auto_tile_batch_size" in changes("slow", data={"rows": 9, "images": 4, "videos": 5})
    assert not {"compile", "liger", "fused_optimizer"} & changes("slow", gpu="cpu")


def test_slow_with_measurements() -> None:
    busy = "--dataloader_num_workers=4 --cache_latents --cache_text"
    assert "dataloader_num_workers" not in changes("slow", busy)
    assert "dataloader_num_workers" in changes("slow", busy, measured=Measured(data_wait=0.4))
    assert "dataloader_num_workers" not in changes("slow", busy, measured=Measured(data_wait=0.02))


def test_quality() -> None:
    assert changes("quality", "--rank=64") == {
        "motion_sub_loss", "motion_sub_loss_ratio", "abnormal_norm_clip_start", "rank", "network_alpha",
        "rank_drop_out", "lr_scheduler",
    }  # fmt: skip
    assert "rank" not in changes("quality", "--rank=128")
    assert "rank_drop_out" not in changes("quality", script=FULL)
    assert "abnormal_norm_clip_start" not in changes("quality", measured=Measured(spikes=0, steps=100))
    assert "learning_rate" in changes("quality", measured=Measured(bad_losses=2, steps=100))
    assert "motion_sub_loss" not in changes("quality", script="flux/train_lora")


@pytest.mark.parametrize("trouble", ["oom", "slow", "quality"])
def test_advice_taken_is_not_given_again(trouble: str) -> None:
    facts = make_facts("--rank=64", model=BIG, gpus=8)
    project = Project()
    for _ in range(6):
        edits = [e for e in edits_of(list(walk(facts, [trouble])), facts) if e.where in ("script", "launcher")]
        text = apply_edits(facts.launch.text, [(facts.launch, edits)]).text
        if text == facts.launch.text:
            break
        around = Surroundings(facts.gpu, facts.gpu_count, facts.packages)
        facts = facts_from_launch(find_launches(text)[0][0], project, around)
    else:
        pytest.fail("the advice never ends")
    assert all(option.known for option in facts.options.items)


# -- runs -----------------------------------------------------------------------------------------------------------
def run_folder(tmp_path: Path, *, wait: float = 0.6, spike: bool = False, loss: Any = 0.5) -> Path:
    rows = [{"event": "start", "step": 0, "script": "wan2.1_fun/train_lora"}]
    for step in range(1, 31):
        norm = 50.0 if spike and step == 20 else 1.0
        rows.append({"event": "step", "step": step, "loss": loss, "grad_norm": norm, "step_time": 1.0,
                     "data_wait": wait, "memory_gib": 10.0 + step / 10})  # fmt: skip
    text = "\n".join(json.dumps(row) for row in rows) + '\n[1]\n{"torn'
    write(tmp_path / "run/events.jsonl", text)
    return tmp_path / "run"


def test_a_run_answers_by_itself(tmp_path: Path) -> None:
    measured = read_run(run_folder(tmp_path))
    assert measured == Measured(data_wait=0.6, spikes=0, steps=30, peak_gib=13.0)
    rows = [{"id": "G1", "state": "enabled", "facts": {"share": 0.25}}, {"id": "I2", "state": "inert"}, 7]
    write(tmp_path / "run/audit.json", json.dumps({"rows": rows}))
    measured = read_run(tmp_path / "run")
    assert measured.data_wait == 0.25 and measured.inert == ["I2"]
    write(tmp_path / "run/audit.json", "{broken")
    assert read_run(tmp_path / "run").data_wait == 0.6
    assert read_run(tmp_path / "nowhere") == Measured()
    assert read_run(run_folder(tmp_path, spike=True)).spikes == 1
    assert read_run(run_folder(tmp_path, loss="nan")).bad_losses == 30


def test_commands(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.sh", command("--rank=64 --dataloader_num_workers=2") + "\n")
    folder = run_folder(tmp_path)
    assert main(["run.sh", str(folder), "--gpu", "A100"]) == 0  # waiting for data: the slow branch
    out = capsys.readouterr().out
    assert "Training slow?" in out and "60 %" in out and "+  --dataloader_num_workers=8" in out
    assert main(["run.sh", "--oom", "--quality", "--gpu", "RTX 4090", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {step["trouble"] for step in data["steps"]} == {"oom", "quality"}
    assert "+  --gradient_checkpointing" in data["diff"] and data["notes"] == []
    assert main(["run.sh", "--oom", "--gpu", "RTX 4090", "--lang", "zh", "--write", "new.sh"]) == 0
    assert "显存不足（OOM）？" in capsys.readouterr().out
    assert "--gradient_checkpointing" in (tmp_path / "new.sh").read_text(encoding="utf-8")
    assert main(["run.sh", "--oom", "--gpu", "RTX 4090", "--write", "new.sh"]) == 2
    assert "exists and is left as it is" in capsys.readouterr().err
    assert main(["missing.sh", "--oom"]) == 2
    assert "missing.sh: does not exist" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["run.sh"]) == 2
    assert "--oom, --slow or --quality" in capsys.readouterr().err


def test_questions_on_a_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = write(tmp_path / "run.sh", command() + "\n")
    monkeypatch.setattr(sys, "stdin", Terminal("n\nn\ny\n"))
    assert main([str(path), "--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    assert out.count("[y/N]") == 3 and "+  --motion_sub_loss" in out
    folder = run_folder(tmp_path)
    start = {"event": "start", "step": 0, "command": command()}
    write(folder / "events.jsonl", json.dumps(start) + "\n")
    for answer in (str(path), command(), str(folder)):  # nothing on the command line: the launch is asked for first
        monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\nn\nn\ny\n"))
        assert main(["--gpu", "A100"]) == 0, answer
        out = capsys.readouterr().out
        assert out.startswith("Launch script, command, or folder") and "+  --motion_sub_loss" in out
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert main([]) == 2


def test_a_runs_folder_is_enough(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path)
    assert main([str(folder), "--slow", "--gpu", "A100"]) == 2  # an old run, without its command
    text = (folder / "events.jsonl").read_text(encoding="utf-8")
    start = {"event": "start", "step": 0, "command": command("--rank=64 --dataloader_num_workers=2")}
    write(folder / "events.jsonl", json.dumps(start) + "\n" + text)
    look = {"shares": {"data": 0.3, "vae": 0.4, "forward": 0.3}, "mfu": 0.12, "idle": 0.3, "recompiles": 9}
    write(folder / "audit.json", json.dumps({"rows": [{"id": "C1", "state": "inert"}], "look": look}))
    assert main([str(folder), "--gpu", "A100"]) == 0  # waiting for data: the slow branch
    out = capsys.readouterr().out
    assert out.startswith("The run: 30 steps, peak memory 13.0 GiB, waiting for data 30 %, VAE 40 %, text encoder 0 %, "
                          "device idle 30 %, MFU 12 %\nasked for without effect (see its audit.md): C1\n")
    assert "clips encoded anew in every step? 40 %" in out and "recompilations after warm-up? 9" in out
    assert "--compile_dynamic" in out and "+  --dataloader_num_workers=8" in out.replace("+ --", "+  --")
    assert main([str(folder), "--quality", "--gpu", "A100", "--lang", "zh"]) == 0
    assert capsys.readouterr().out.startswith("本次训练：30 步")


@pytest.mark.parametrize("content", ['{"look": 3}', '{"look": {"shares": [1]}}', '{"look": {"shares": {}}}', "[]"])
def test_a_look_of_another_make_says_nothing(content: str, tmp_path: Path) -> None:
    write(tmp_path / "audit.json", content)
    assert read_run(tmp_path) == Measured()


def test_nothing_left_says_so(capsys) -> None:
    small = LEAN + " --video_sample_n_frames=17 --video_sample_size=256"
    assert main(["--command", command(small), "--oom", "--gpu", "A100"]) == 0
    assert "taken already" in capsys.readouterr().out


# -- templates ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: str(s.number))
def test_templates_are_sound_launches(scenario, tmp_path: Path) -> None:
    model = "/data/my models/Wan2.1-Fun-14B-InP"
    text = render(scenario, model=model, data_dir="d i r/", meta="m$(x).json", output_dir="out")
    path = write(tmp_path / "t.sh", text)
    project = load_project([str(path)])
    around = Surroundings(parse_gpu(scenario.gpu), scenario.gpus, frozenset(PACKAGES.split()))
    (report,) = audit(project, around)
    assert not project.problems
    assert [f.text.en for f in report.findings if f.severity != "info"] == []
    options = report.launch.options
    assert options.text("pretrained_model_name_or_path") == model
    assert options.text("train_data_meta") == "m$(x).json" and options.text("output_dir") == "out"
    assert report.total[0] >= 12


def test_templates_match_the_recorded_scenarios(data_dir: Path) -> None:
    """Same flags as the scenario scripts, plus what those lack to run."""
    added = {1: set(), 2: set(), 3: {"train_mode"}, 4: {"train_mode", "train_data_dir", "train_data_meta"},
             5: {"train_mode"}}  # fmt: skip
    removed = {4: {"use_8bit_adam"}, 5: {"config_path"}}
    for scenario in SCENARIOS:
        recorded = find_launches((data_dir / f"audit/scenario_{scenario.number}.sh").read_text(encoding="utf-8"))[0][0]
        ours = find_launches(render(scenario))[0][0]
        theirs = {option.name for option in recorded.options.items} - removed.get(scenario.number, set())
        wanted = theirs | added[scenario.number] | {"output_dir", "seed"}
        assert {option.name for option in ours.options.items} == wanted
        names = {option.name for option in recorded.launcher_options.items}
        assert {option.name for option in ours.launcher_options.items} - {"fsdp_cpu_ram_efficient_loading"} == names


def test_template_command_line(tmp_path: Path, capsys) -> None:
    assert main(["--template", "1", "--model", "/m", "--lang", "zh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n# Wan2.1-Fun 1.3B LoRA") and 'MODEL_NAME="/m"' in out
    target = tmp_path / "t.sh"
    assert main(["--template", "2", "--write", str(target)]) == 0
    assert main(["--template", "2", "--write", str(target)]) == 2
    with pytest.raises(ValueError, match="1 to 5"):
        get_scenario(9)


# -- hostile inputs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_files_get_a_sentence_or_advice(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, HOSTILE[name][0])
    status = main([name, "--oom", "--slow", "--quality", "--gpu", "A100"])
    out, err = capsys.readouterr()
    assert status == (0 if "Out of memory?" in out else 2) and (out or err)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_that_is_none(tmp_path: Path, capsys) -> None:
    for content in (b"\x00\xff" * 100, b"[" * 100_000, b'{"rows": [{"id": 3, "facts": 7}], "look": {"shares": 1}}'):
        write(tmp_path / "r/audit.json", content)
        write(tmp_path / "r/events.jsonl", content)
        assert main(["--command", command(), "--slow", "--run", str(tmp_path / "r"), "--gpu", "A100"]) == 0
    assert main(["--command", command(), "--slow", "--run", str(tmp_path / "gone"), "--gpu", "A100"]) == 0
    assert "Training slow?" in capsys.readouterr().out
    evil = {"event": "start", "command": "touch pwned; $(touch pwned) accelerate launch scripts/wan2.1/train.py"}
    write(tmp_path / "r/events.jsonl", json.dumps(evil) + "\n")
    main([str(tmp_path / "r"), "--slow", "--gpu", "A100"])
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()
