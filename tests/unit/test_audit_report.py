"""Reports end to end: the five scenarios, every family, projects, hostile inputs, both languages, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optim_patches.audit import cli
from optim_patches.audit.checks import CATEGORIES, DENOMINATORS, State
from optim_patches.audit.cli import audit, main
from optim_patches.audit.facts import Surroundings, facts_from_namespace
from optim_patches.audit.families import FAMILIES, block_classes
from optim_patches.audit.flagtable import script_ids, upstream_flags
from optim_patches.audit.hardware import gpu_argument, parse_gpu, parse_smi
from optim_patches.audit.project import Project, load_project
from optim_patches.audit.report import make_report, to_json, to_markdown
from optim_patches.audit.terminal import to_terminal
from tests.unit.audit_kit import PACKAGES, command, make_facts, write

MACHINES = {1: ("RTX 4090", 1), 2: ("A100 80GB", 8), 3: ("A100 80GB", 8), 4: ("RTX 4090", 2), 5: ("A100 80GB", 1)}
HEADINGS_ZH = (
    "# VideoX-Fun 训练优化审计报告", "## 基本信息", "## 审计结果总览", "## 优先优化建议（按影响排序）",
    "### P0 - 立即执行（显著收益，零风险）", "### P1 - 强烈推荐（明显收益，低风险）",
    "### P2 - 建议尝试（中等收益，需测试）", "## 推荐配置修改",
)  # fmt: skip
DEEPSPEED = {
    "config/zero_stage2_config.json": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "config/zero_stage3_config_cpu_offload.json": {
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        },
    },
}  # fmt: skip


def around(gpu: str | None = None, gpus: int | None = None, **kwargs) -> Surroundings:
    packages = kwargs.pop("packages", PACKAGES)
    return Surroundings(parse_gpu(gpu) if gpu else None, gpus, frozenset(packages.split()), **kwargs)


@pytest.fixture
def folder(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the scenario scripts and the DeepSpeed files they name."""
    for name, data in DEEPSPEED.items():
        write(tmp_path / name, json.dumps(data))
    for number in MACHINES:
        name = f"scenario_{number}.sh"
        write(tmp_path / name, (data_dir / "audit" / name).read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "detect_gpus", lambda: [])
    return tmp_path


def scenario(number: int, **kwargs):
    gpu, gpus = MACHINES[number]
    (report,) = audit(load_project([f"scenario_{number}.sh"]), around(gpu, gpus, **kwargs))
    return report


# -- the five scenarios ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", MACHINES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_scenario_report_is_the_recorded_one(folder: Path, data_dir: Path, number: int, lang: str) -> None:
    text = to_markdown([scenario(number)], lang)
    recorded = data_dir / f"audit/scenario_{number}.{lang}.md"
    if os.environ.get("VIDEOX_RECORD_REPORTS"):
        recorded.write_text(text, encoding="utf-8")
    assert text == recorded.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", MACHINES)
def test_scenario_report_has_the_headings_and_denominators(folder: Path, number: int) -> None:
    text = to_markdown([scenario(number)], "zh")
    positions = [text.index(heading + "\n") for heading in HEADINGS_ZH]
    assert positions == sorted(positions)
    assert "| 类别 | 得分 | 已启用 | 建议启用 |" in text
    scores = re.findall(r"^\| ([A-I])\. [^|]+ \| (\d+)/(\d+) \|", text, re.MULTILINE)
    assert [int(total) for _, _, total in scores] == [6, 3, 3, 5, 5, 6, 11, 10, 13]
    assert [letter for letter, _, _ in scores] == list("ABCDEFGHI")
    total = sum(int(got) for _, got, _ in scores)
    assert f"| **总计** | **{total}/62** | | |" in text
    for label in ("模型：", "模型系列：", "训练模式：", "微调方式：", "硬件：", "视频参数："):
        assert f"- {label}" in text
    assert "```diff" in text


def test_scenario_contents(folder: Path) -> None:
    reports = {number: scenario(number) for number in MACHINES}
    first, facts = reports[1], reports[1].facts
    assert (facts.family.name, facts.params, facts.mode, facts.lora) == ("Wan2.1-Fun", 1.3, "inpaint", True)
    assert [row.id for row in first.advice if row.priority == "P0"] == ["G10", "I6"]
    rows = {number: {row.id: row for row in report.rows} for number, report in reports.items()}
    assert rows[2]["D1"].state is State.ENABLED and rows[2]["H4"].state is State.ENABLED
    assert "gradient_clipping" in rows[2]["H3"].reason.en  # the stage 2 file clips nothing
    assert rows[3]["D4"].state is rows[3]["D5"].state is State.ENABLED
    assert rows[4]["D2"].state is rows[4]["D3"].state is State.ENABLED
    assert "offload-optimizer" in {finding.rule.id for finding in reports[4].findings}
    assert reports[5].facts.family.name == "CogVideoX-Fun"
    assert "unknown-flag" in {finding.rule.id for finding in reports[5].findings}  # that script has no --config_path


@pytest.mark.parametrize("number", MACHINES)
def test_the_fixed_command_needs_no_further_change(folder: Path, number: int) -> None:
    report = scenario(number)
    write(folder / f"scenario_{number}.sh", report.fixed)
    after = scenario(number)
    assert after.diff == ""
    left = [row for row in after.advice if row.priority in ("P0", "P1")]
    assert not [row.id for row in left if any(edit.where == "script" for edit in row.edits)]
    assert not [f for f in after.findings if f.severity == "error" and f.edits]


# -- every family ---------------------------------------------------------------------------------------------------
def family_command(script_id: str) -> str:
    """A launch in VideoX-Fun's style, from the flags of that script."""
    flags = upstream_flags(script_id)
    values = {
        "config_path": "config/x.yaml", "pretrained_model_name_or_path": "models/x", "train_data_meta": "m.json",
        "train_data_dir": "d", "image_sample_size": "640", "video_sample_size": "640", "token_sample_size": "640",
        "video_sample_n_frames": "81", "train_batch_size": "1", "gradient_accumulation_steps": "1",
        "dataloader_num_workers": "8", "num_train_epochs": "100", "checkpointing_steps": "50",
        "learning_rate": "2e-05", "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": "100", "seed": "42",
        "output_dir": "output_dir", "gradient_checkpointing": None, "mixed_precision": "bf16",
        "adam_weight_decay": "3e-2", "adam_epsilon": "1e-10", "max_grad_norm": "0.05", "enable_bucket": None,
        "uniform_sampling": None, "low_vram": None, "rank": "64", "network_alpha": "32", "prompt_path": "p.txt",
        "reward_fn": "HPSReward", "backprop": None,
    }  # fmt: skip
    parts = [f"--{n}" if v is None else f'--{n}="{v}"' for n, v in values.items() if n in flags]
    if "trainable_modules" in flags:
        parts.append('--trainable_modules "."')
    return 'accelerate launch --mixed_precision="bf16" ' + " \\\n  ".join([f"scripts/{script_id}.py", *parts]) + "\n"


@pytest.mark.parametrize("script_id", script_ids())
def test_launch_of_every_script(script_id: str) -> None:
    project = load_project([], commands=[family_command(script_id)])
    report = make_report(facts := _facts(project), project)
    family = FAMILIES[script_id.split("/")[0]]
    assert facts.family is family and facts.training and not facts.launch.strays
    assert facts.lora == script_id.endswith("_lora")
    assert not [f for f in report.findings if f.severity == "error"], [f.text.en for f in report.findings]
    assert report.total[1] == 62 and report.total[0] >= 5
    assert all(row.reason.en and row.reason.zh for row in report.rows)
    assert block_classes(script_id, family) and all(name[0].isupper() for name in block_classes(script_id, family))
    fixed = load_project([], commands=[report.fixed])
    again = make_report(_facts(fixed), fixed)
    assert not [f for f in again.findings if f.severity == "error"], [f.text.en for f in again.findings]
    assert again.diff == ""


def _facts(project, **kwargs):
    from optim_patches.audit.facts import facts_from_launch

    return facts_from_launch(project.launches[0], project, around("A100 80GB", 8, **kwargs))


@pytest.mark.parametrize("script_id", script_ids())
def test_upstream_reports_only_use_flags_that_script_has(script_id: str) -> None:
    project = load_project([], commands=[family_command(script_id)])
    report = make_report(_facts(project, target="upstream"), project, include=("P0", "P1", "P2"))
    fixed = load_project([], commands=[report.fixed]).launches[0]
    assert {option.name for option in fixed.options.items} <= set(upstream_flags(script_id))


def test_family_names_modes_and_methods() -> None:
    def basics(script: str, flags: str = "", **kwargs) -> list[str]:
        report = make_report(make_facts(flags, script=script, **kwargs), load_project([]))
        return [value for _, value in ((entry["label"]["en"], entry["value"]["en"]) for entry in
                to_json([report])["reports"][0]["basic"])]  # fmt: skip

    speech = basics("wan2.2/train_s2v_lora", without="train_mode")
    assert speech[2:4] == ["normal (speech to video)", "speech to video LoRA"]
    assert basics("wan2.2_fun/train_control", "--train_mode=control_ref")[2] == "control_ref (control)"
    assert basics("flux/train_lora", without="train_mode")[5] == "512 pixels, still images"
    assert basics("wan2.1/train_distill")[3] == "distillation full fine-tuning"
    assert basics("wan2.1_fun/train_reward_lora")[3] == "reward LoRA"
    assert basics("wan2.2_vace_fun/train", model="Wan2.2-VACE-Fun-A14B")[0] == "w/Wan2.2-VACE-Fun-A14B (14B)"


# -- inputs ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def upstream_project(tmp_path: Path) -> Path:
    root = tmp_path / "fork"
    for name in ("models", "pipeline", "data"):
        write(root / f"videox_fun/{name}/__init__.py", "")
    write(root / "config/wan2.1/wan_civitai.yaml", "format: civitai\ntransformer_additional_kwargs: {}\n")
    write(root / "config/zero_stage2_config.json", json.dumps(DEEPSPEED["config/zero_stage2_config.json"]))
    write(root / "requirements.txt", "torch\nflash-attn>=2\n")
    write(root / ".git/config", '[remote "origin"]\n\turl = https://example.com/me/VideoX-Fun.git\n')
    write(root / "scripts/wan2.1_fun/train_lora.py", "from videox_fun.models import X\nimport torch\n"
          "m = torch.compile(X())\n# apply_checkpointing(m)\n")  # fmt: skip
    sharded = "--use_deepspeed --deepspeed_config_file config/zero_stage2_config.json"
    launch = command("--rank=64 --mixed_precision=bf16", launcher=sharded)
    write(root / "scripts/wan2.1_fun/train_lora.sh", launch + "\n")
    write(root / "models/huge.sh", "accelerate launch scripts/wan2.1/train.py --seed 1\n")
    return root


def test_project_folder(upstream_project: Path) -> None:
    project = load_project([str(upstream_project)])
    (report,) = audit(project, around("A100 80GB", 8))
    assert report.facts.target == "upstream" and report.facts.zero == 2
    triggers = " / ".join(trigger.en for trigger in project.triggers)
    for part in ("videox_fun/ with models", "config/wan2.1/wan_civitai.yaml", "git remote", "imports videox_fun",
                 "launches scripts/wan2.1_fun/", "--pretrained_model_name_or_path + --train_mode"):  # fmt: skip
        assert part in triggers
    rows = {row.id: row for row in report.rows}
    assert rows["I1"].state is State.ENABLED and "torch.compile" in rows["I1"].reason.en
    assert rows["B2"].state is State.NOT_APPLICABLE  # the call stands in a comment
    assert rows["F1"].state is State.ENABLED  # required by requirements.txt
    write(upstream_project / "optim_patches/__init__.py", "")
    assert audit(load_project([str(upstream_project)]), around())[0].facts.target == "own"


def test_a_folder_without_launches(tmp_path: Path, capsys) -> None:
    write(tmp_path / "p/a.py", "x = 1\n")
    assert main([str(tmp_path / "p"), "--gpu", "cpu"]) == 2
    assert "holds no launch of a training script" in capsys.readouterr().out.replace("\n", " ")
    write(tmp_path / "p/config/ds.json", json.dumps({"zero_optimization": {"stage": 2}}))
    assert main([str(tmp_path / "p"), "--gpu", "cpu", "--format", "md"]) == 0
    assert "| D. Distributed memory | 1/5 | DeepSpeed ZeRO-2 |" in capsys.readouterr().out


def test_own_checkout(repo_root: Path) -> None:
    project = load_project([str(repo_root)])
    assert project.own and project.triggers


HOSTILE = {
    "binary.sh": (b"\x7fELF\x00\x01" * 100, "binary file"),
    "big.sh": (b"a" * (10 << 20), "10.0 MB is too large"),
    "quotes.sh": (b'accelerate launch scripts/wan2.1/train.py --seed 1 --output_dir="x\n', "never closed"),
    "windows.sh": (b"accelerate launch scripts/wan2.1/train.py --seed 1\r\n", "CRLF"),
    "cycle.sh": (b"A=$B\nB=$A\naccelerate launch scripts/wan2.1/train.py --seed $A\n", "$B is never set"),
    "nothing.sh": (b"echo hello\n", "no launch"),
    "empty.sh": (b"", "no launch"),
    "utf16.sh": ("accelerate launch scripts/wan2.1/train.py --rank 1".encode("utf-16"), ""),
    "latin.sh": (b"accelerate launch scripts/wan2.1/train.py --output_dir \xe9\n", ""),
    "deep.json": (b"[" * 100_000, "nested too deeply"),
    "deep.yaml": (b"[" * 3000, ""),
    "bomb.yaml": (b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\nzero_optimization: {stage: 2}\n", ""),
    "bomb2.yaml": (b"b0: &b0 [x,x]\n" + b"".join(b"b%d: &b%d [*b%d,*b%d,*b%d]\n" % (n, n, n - 1, n - 1, n - 1)
                                                for n in range(1, 40))
                   + b"distributed_type: FSDP\nnum_processes: *b39\nmixed_precision: *b39\nfsdp_config: "
                   b"{fsdp_transformer_layer_cls_to_wrap: *b39, fsdp_version: *b39}\n", ""),
    "long.yaml": (b"a: 1\n" * 30_000, "too large for a configuration"),
    "tag.yaml": (b"a: !!python/object/apply:os.system ['touch pwned']\n", "cannot be parsed"),
    "broken.json": (b'{"a": ', "cannot be parsed"),
    "list.json": (b"[1, 2]", "no mapping"),
    "other.json": (b'{"a": 1}', "no accelerate, DeepSpeed"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_files_give_a_sentence(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    content, expect = HOSTILE[name]
    write(tmp_path / name, content)
    for lang in ("en", "zh"):
        status = main([name, "--gpu", "A100", "--format", "json", "--lang", lang])
        data = json.loads(capsys.readouterr().out)
        assert status == (0 if data["reports"] else 2)
        assert expect in " ".join(problem["text"]["en"] for problem in data["problems"])
    assert sorted(os.listdir(tmp_path)) == [name]


def test_nothing_is_executed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep").mkdir()
    evil = "touch a; $(touch b) `touch c` accelerate launch scripts/wan2.1/train.py --seed $(touch d) --x `touch e`\n"
    write(tmp_path / "x.sh", evil + "rm -rf keep\n")
    assert main(["x.sh", "$(touch f) accelerate launch scripts/wan2.1/train.py --seed 1", "--gpu", "cpu"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["keep", "x.sh"]
    assert "Traceback" not in capsys.readouterr().out


def test_missing_file_names_its_neighbour(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.sh", "x")
    assert main(["trian.sh", "--gpu", "cpu", "--format", "md"]) == 2
    assert "does not exist; there is train.sh" in capsys.readouterr().out


def test_markdown_with_a_launch_inside(tmp_path: Path) -> None:
    text = "# How\n\naccelerate launch not here\n```bash\naccelerate launch scripts/wan2.1/train.py --seed 1\n```\n"
    path = write(tmp_path / "README.md", text)
    (report,) = audit(load_project([str(path)]), around("A100", 1))
    assert report.launch.line == 5
    assert report.fixed.startswith("# How\n\naccelerate launch not here\n```bash\n")
    assert report.fixed.endswith("\n```\n") and "--compile" in report.fixed


def test_several_launches_in_one_file_are_fixed_together(folder: Path) -> None:
    two = command("--rank=8") + "\n" + command("--rank=16", script="wan2.1/train_lora") + "\n"
    write(folder / "two.sh", two)
    assert main(["two.sh", "--gpu", "A100", "--fix", "--format", "json", "--output", "r.json"]) == 0
    text = (folder / "two.improved.sh").read_text(encoding="utf-8")
    assert text.count("--compile") == 2 and text.count("\n") == two.count("\n")
    assert len(json.loads((folder / "r.json").read_text(encoding="utf-8"))["reports"]) == 2


# -- the command line -----------------------------------------------------------------------------------------------
def test_exit_codes(folder: Path, capsys) -> None:
    args = ["scenario_1.sh", "--gpu", "RTX 4090", "--packages", "flash_attn", "--format", "md"]
    assert main(args) == 0
    assert main([*args, "--fail-on", "P0"]) == 1
    assert main([*args, "--fail-on", "error"]) == 0
    assert main(["scenario_5.sh", "--gpu", "A100", "--fail-on", "error"]) == 1
    assert main([]) == 2
    assert "Name a launch script" in capsys.readouterr().err
    assert main([*args, "--include", "P9"]) == 2
    good = folder / "good.sh"
    main([*args, "--fix", str(good), "--include", "P0,P1,P2"])
    assert main([str(good), "--gpu", "RTX 4090", "--packages", "flash_attn", "--fail-on", "P1"]) == 0


def test_fix_never_touches_an_existing_file(folder: Path, capsys) -> None:
    before = (folder / "scenario_1.sh").read_bytes()
    assert main(["scenario_1.sh", "--gpu", "RTX 4090", "--fix"]) == 0
    improved = folder / "scenario_1.improved.sh"
    first = improved.read_bytes()
    assert b"--cache_latents" in first and (folder / "scenario_1.sh").read_bytes() == before
    assert main(["scenario_1.sh", "--gpu", "RTX 4090", "--fix"]) == 2
    assert "exists and is left as it is" in capsys.readouterr().err
    assert main(["scenario_1.sh", "--gpu", "RTX 4090", "--fix", "scenario_1.sh"]) == 2
    assert main(["scenario_1.sh", "--gpu", "RTX 4090", "--output", "scenario_1.sh"]) == 2
    assert (folder / "scenario_1.sh").read_bytes() == before and improved.read_bytes() == first
    assert main(["scenario_1.sh", "scenario_2.sh", "--gpu", "cpu", "--fix", "one.sh"]) == 2
    assert main(["scenario_1.sh", "--gpu", "cpu", "--fix", "no/such/folder/x.sh"]) == 2


def test_formats_agree(folder: Path, capsys) -> None:
    args = ["scenario_2.sh", "--gpu", "A100 80GB", "--gpus", "8", "--packages", "flash_attn"]
    main([*args, "--format", "json"])
    data = json.loads(capsys.readouterr().out)["reports"][0]
    assert data["score"]["total"][1] == 62 and len(data["rows"]) == 62
    assert data["score"]["categories"] == {
        letter: [sum(r["state"] == "enabled" and r["id"][0] == letter for r in data["rows"]), DENOMINATORS[letter]]
        for letter in CATEGORIES
    }
    main([*args, "--format", "md", "--lang", "zh"])
    markdown = capsys.readouterr().out
    main([*args, "--lang", "zh"])
    terminal = capsys.readouterr().out
    assert "\x1b[" not in terminal  # plain where there is no terminal
    for row in data["rows"]:
        if row["state"] == "recommended" and row["id"] != "G2":
            assert row["reason"]["zh"] in markdown
            assert row["reason"]["zh"][:12] in terminal.replace("\n", "")
    for line in data["diff"].splitlines():
        assert line in markdown
    main([*args, "--output", "r.md"])
    assert (folder / "r.md").read_text(encoding="utf-8").startswith("# VideoX-Fun Training Optimization Audit Report")
    main([*args, "--output", "r.txt"])
    assert "Audit overview" in (folder / "r.txt").read_text(encoding="utf-8")


def test_english_reports_hold_no_chinese_and_chinese_ones_are_complete(folder: Path) -> None:
    reports = [scenario(number) for number in MACHINES]
    reports += [make_report(_facts(p), p) for s in script_ids()[::4]
                for p in [load_project([], commands=[family_command(s)])]]  # fmt: skip
    english = to_markdown(reports, "en")
    assert not re.search(r"[\u4e00-\u9fff]", english)
    for report in reports:
        for text in [row.reason for row in report.rows] + [finding.text for finding in report.findings]:
            assert re.search(r"[\u4e00-\u9fff]", text.zh) or text.en == text.zh, text


def test_colour_on_a_terminal(folder: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    plain = to_terminal([scenario(1)], stream=stream, width=110)
    assert "\x1b[" in stream.getvalue() and "\x1b[" not in plain


def test_without_rich_the_terminal_gets_markdown(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = io.StringIO()
    text = to_terminal([scenario(1)], stream=stream)
    assert text.startswith("# VideoX-Fun") and stream.getvalue() == text


def test_command_from_standard_input(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(command("--rank=8")))
    assert main(["-", "--gpu", "A100", "--format", "md"]) == 0
    out = capsys.readouterr().out
    assert "\n+  --compile" in out  # one flag per line, so that the diff can be read


def test_as_a_module_without_torch(folder: Path, repo_root: Path) -> None:
    code = "import sys; from optim_patches.audit.cli import main; s = main(sys.argv[1:]); " \
           "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(s)"  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    for args in (["-c", code], ["-m", "optim_patches.audit"]):
        done = subprocess.run([sys.executable, *args, "scenario_1.sh", "--gpu", "RTX 4090", "--format", "json"],
                              capture_output=True, text=True, env=env, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["reports"][0]["score"]["total"][1] == 62


# -- the machine ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "memory", "capability"),
    [("NVIDIA A100-SXM4-80GB", 80, (8, 0)), ("RTX 4090", 24, (8, 9)), ("V100 16GB", 16, (7, 0)), ("T4", 16, (7, 5)),
     ("H20", 96, (9, 0)), ("L40S", 48, (8, 9)), ("B200", 192, (10, 0)), ("A10", 24, (8, 6)),
     ("Unheard 48GB", 48, None)],
)  # fmt: skip
def test_cards(name: str, memory: float, capability: tuple[int, int] | None) -> None:
    card = parse_gpu(name)
    assert (card.memory, card.capability) == (memory, capability)


def test_detected_cards(monkeypatch, folder: Path, capsys) -> None:
    cards = parse_smi("NVIDIA H100 80GB HBM3, 81559, 9.0\nNVIDIA H100 80GB HBM3, 81559, 9.0\nbroken line\n")
    assert len(cards) == 2 and cards[0].memory == 80 and cards[0].capability == (9, 0)
    monkeypatch.setattr(cli, "detect_gpus", lambda: cards)
    main(["scenario_1.sh", "--format", "json"])
    basic = json.loads(capsys.readouterr().out)["reports"][0]["basic"]
    assert basic[4]["value"]["en"] == "NVIDIA H100 80GB HBM3 x 2 (80 GB)"


def test_facts_of_a_running_script() -> None:
    """What the live audit uses: states from parsed arguments."""
    import argparse

    from optim_patches.audit.checks import evaluate

    args = argparse.Namespace(use_8bit_adam=True, rank=64, network_alpha=32, dataloader_num_workers=4, low_vram=False,
                              mixed_precision="bf16", train_batch_size=1, validation_prompts=["a", "b"],
                              pretrained_model_name_or_path="w/Wan2.1-1.3B")  # fmt: skip
    script = "wan2.1_fun/train_lora"
    facts = facts_from_namespace(args, script_id=script, gpu=parse_gpu("A100"), explicit=set(vars(args)))
    rows = {row.id: row for row in evaluate(facts)}
    assert rows["A1"].state is rows["A5"].state is rows["G1"].state is State.ENABLED
    assert rows["C1"].state is State.DISABLED and rows["D1"].state is State.NOT_APPLICABLE


def test_edits_that_pull_in_two_directions_end_in_one_precision_and_a_misspelt_flag_is_respelt() -> None:
    flags = "--mixed_precision=fp16 --enable_bukket"
    facts = make_facts(flags, launcher="--mixed_precision=bf16", gpu="RTX 4090")
    report = make_report(facts, Project())
    (fixed,) = load_project([], commands=[report.fixed]).launches
    assert fixed.options.text("mixed_precision") == fixed.launcher_options.text("mixed_precision") == "bf16"
    assert "bukket" not in report.fixed and report.fixed.count("--enable_bucket") == 1


@pytest.mark.parametrize("name", ["RTX 4090", "Foo 48GB", "cpu"])
def test_cards_with_a_memory_are_taken(name: str) -> None:
    assert gpu_argument(name) == name


def test_an_unknown_card_without_memory_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'RTX 9999' is not a known card; .*'RTX 9999 24GB'"):
        gpu_argument("RTX 9999")
