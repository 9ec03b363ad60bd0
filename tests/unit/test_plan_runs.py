"""The planner from the command line: --plan, a refused run, --auto_fit, --optimize, and the tables of the document."""

from __future__ import annotations

import json

import pytest

from benchmarks import planner_tables as tables
from optim_patches.plan.flags import PLAN_FLAGS
from optim_patches.plan.phases import make_plan
from optim_patches.plan.traces import Traces
from tests.unit.audit_kit import make_facts
from tests.unit.real_runs import CLIPS, COMMON, LORA, OF_SCRIPT, checkpoint, words
from videox_fun.recipes.wan import WanRecipe
from videox_fun.training import entry, optimize, planning
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec


@pytest.fixture
def line(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(WanRecipe, "load", loaded)
    folder = checkpoint(tmp_path_factory)

    def make(**flags) -> list[str]:
        base = {"pretrained_model_name_or_path": folder, "config_path": folder / "wan.yaml", "output_dir": tmp_path}
        fixed = {"fix_sample_size": [64, 64], "video_sample_n_frames": 5}
        return words({**COMMON, **OF_SCRIPT["train_lora"], **base, **fixed, "train_data_dir": CLIPS, **flags})

    return make


def test_plan_prints_and_ends_before_weights_load(line, tmp_path, capsys) -> None:
    png = tmp_path / "plan.png"
    assert entry.main(LORA, line(plan=True, plan_gpu_gb=24, plan_png=png)) == 0
    shown = capsys.readouterr().out
    assert "denoiser" in shown and "fits into 24 GB" in shown
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["device_peak_bytes"] > 0 and data["run"]["adapters"]["rank"] == 4
    assert png.stat().st_size > 5000


def test_a_run_that_cannot_fit_is_refused_with_what_would_help(line, capsys) -> None:
    assert entry.main(LORA, line(plan_policy="refuse", plan_gpu_gb=0.2)) == 2
    said = capsys.readouterr().err
    assert "predicted to need" in said and "--low_vram" in said and "--plan_policy warn" in said


def test_without_flags_a_cpu_run_is_not_planned(line) -> None:
    with pytest.raises(AssertionError, match="weights were loaded"):
        entry.main(LORA, line())


def test_auto_fit_sets_flags_as_if_they_were_given(line) -> None:
    spec = get_spec(LORA)
    args = parse_args(spec, line())
    needed = make_plan(planning.describe(spec, args, device="cuda"), Traces(planning.adapt)).device_bytes
    args = parse_args(spec, line(auto_fit=(needed - 1) / 1e9))
    given = args.explicit
    planning.change_flags(spec, args)
    added = args.explicit - given
    assert added and all(getattr(args, name) for name in added)
    changed = make_plan(planning.describe(spec, args, device="cuda"), Traces(planning.adapt))
    assert changed.device_bytes <= args.auto_fit * 1e9
    args = parse_args(spec, line(auto_fit=24))
    before = dict(vars(args))
    planning.change_flags(spec, args)
    assert vars(args) == before, "what fits is not changed"


def test_optimize_sets_what_the_audit_recommends_and_nothing_that_was_given(line, caplog) -> None:
    caplog.set_level("INFO")
    spec = get_spec(LORA)
    args = parse_args(spec, line(optimize="auto", mixed_precision="bf16", dataloader_num_workers=0))
    facts = make_facts("--mixed_precision=bf16 --video_sample_n_frames=81", gpu="A100 80GB", model="Wan2.1-14B-InP")
    applied = {edit.name for edit in optimize.apply_advice(spec, args, facts=facts)}
    assert "gradient_checkpointing" in applied and args.gradient_checkpointing
    assert applied <= optimize.SPEED | optimize.MEMORY
    assert "dataloader_num_workers" not in applied and args.dataloader_num_workers == 0
    assert "--optimize auto: --gradient_checkpointing (B1:" in caplog.text


def test_the_flags_are_off_by_default() -> None:
    defaults = {flag.name: flag.default for flag in PLAN_FLAGS}
    assert defaults == {"--plan": False, "--plan_png": None, "--plan_policy": "auto", "--plan_gpu_gb": None,
                        "--auto_fit": None, "--optimize": None}


def test_the_tables_in_the_document_are_current(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))
    text = tables.DOCUMENT.read_text(encoding="utf-8")
    written = text.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert "\n".join(tables.cog_rows()) in written
    column = tables.predicted("1.3B", Traces(planning.adapt))
    for name, cell in zip(tables.variants("1.3B"), column, strict=True):
        row = next(line for line in written.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {cell} |" in row, "run python benchmarks/planner_tables.py --write"
