"""The start-up audit: evidence comes from the running objects, and what has no effect says why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from optim_patches.audit.live import AuditFailed
from optim_patches.audit.live_view import CHECKS, RunFacts
from optim_patches.base import Target
from tests.patches.live_kit import Run
from tests.patches.wan import make_model


@pytest.fixture(autouse=True)
def no_group_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "VIDEOX_ATTENTION_TYPE"):
        monkeypatch.delenv(name, raising=False)
    yield


def test_every_upstream_check_has_a_row_and_both_languages(tmp_path: Path) -> None:
    report = Run(tmp_path).report()
    ids = [row.id for row in report.rows]
    assert ids == sorted(CHECKS, key=lambda i: (i[0], int(i[1:]))) and len(ids) == len(set(ids))
    groups = {letter: sum(i.startswith(letter) for i in ids) for letter in "ABCDEFGHI"}
    assert groups == {"A": 6, "B": 3, "C": 3, "D": 5, "E": 5, "F": 6, "G": 11, "H": 10, "I": 13}
    assert all(row.evidence.en and row.evidence.zh for row in report.rows)


def test_recomputation_is_counted_not_believed(tmp_path: Path) -> None:
    row = Run(tmp_path, gradient_checkpointing=True).report().row("B1")
    assert row.state == "enabled" and row.sites == 2 and row.facts["recomputations"] == 6 and row.exercised
    broken = Run(tmp_path, model=make_model(layers=1))
    broken.args.gradient_checkpointing = True
    row = broken.report().row("B1")
    assert row.state == "inert" and row.evidence.en == "0 of 1 blocks recomputed; 0 recomputations"


def test_recomputation_is_seen_through_compiled_blocks(tmp_path: Path) -> None:
    run = Run(tmp_path, gradient_checkpointing=True, compile=True, compile_backend="eager")
    report = run.report()
    assert report.row("B1").facts["recomputations"] == 6
    compiled = report.row("I1")
    assert compiled.state == "enabled" and compiled.sites == 2 and compiled.facts["graph_launches"] == 12
    assert compiled.requested.en == "--compile --compile_backend eager (given)"
    run.steps(4)
    final = run.audit.finish(run.target, run.facts)
    assert final.final and final.step == 7
    assert final.row("I1").facts["recompiles_after_warmup"] == 0
    assert final.row("I1").facts["graph_launches"] == 28
    torch._dynamo.reset()


def test_adapters_and_their_drop_outs(tmp_path: Path) -> None:
    report = Run(tmp_path).report()
    native = report.row("E2")
    assert native.state == "enabled" and native.sites == 20 and native.exercised
    assert report.row("E1").state == "disabled" and report.row("E4").state == "disabled"
    assert report.row("E3").facts["matched"]["ffn.0"] == 2
    asked = Run(tmp_path, rank_drop_out=0.1).report().row("E4")
    assert asked.state == "inert" and asked.sites == 0
    assert Run(tmp_path, lora="peft").report().row("E1").sites == 2 * 8
    assert Run(tmp_path, lora=None).report().row("E2").state == "not applicable"


def test_what_cannot_work_on_this_machine_is_inert(tmp_path: Path) -> None:
    flags = {"low_vram": True, "allow_tf32": True, "multi_stream": True, "use_fsdp": True, "use_8bit_adam": True}
    report = Run(tmp_path, lr_warmup_steps=10, **flags).report()
    assert {row.id for row in report.in_state("inert")} == {"A3", "A5", "C1", "C3", "D4", "H2"}
    assert "AdamW: state" in report.row("A5").evidence.en
    assert "nothing to move" in report.row("C1").evidence.en
    assert "no warm-up" in report.row("H2").evidence.en


def test_precision_is_read_off_weights_and_inputs(tmp_path: Path) -> None:
    run = Run(tmp_path, model=make_model(layers=1), mixed_precision="bf16")
    assert run.report().row("A1").state == "inert"
    with torch.autocast("cpu", torch.bfloat16):
        cast = Run(tmp_path, model=make_model(layers=1), mixed_precision="bf16")
    row = cast.report().row("A1")
    assert row.state == "enabled" and row.exercised and "autocast 3 bfloat16" in row.evidence.en
    assert cast.report().row("A2").state == "not applicable"


@pytest.mark.parametrize(("dtype", "state"), [(torch.uint8, "enabled"), (torch.float32, "inert")])
def test_8bit_adam_with_small_tensors_only_is_inert(tmp_path: Path, dtype: torch.dtype, state: str) -> None:
    run = Run(tmp_path, use_8bit_adam=True)
    run.optimizer.__class__ = type("AdamW8bit", (type(run.optimizer),), {})
    for values in run.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].to(dtype)
    row = run.report().row("A5")
    assert row.state == state and ("under 4096 values" in row.evidence.en) == (state == "inert")


def test_accumulation_vae_and_encoders(tmp_path: Path) -> None:
    report = Run(tmp_path, gradient_accumulation_steps=2).report()
    assert report.row("B3").facts["micro_per_step"] == 2 and report.row("B3").state == "enabled"
    assert report.row("C2").facts["largest_batch"] == 2
    assert report.row("G10").state == "recommended" and report.row("G10").facts["per_step"] == {
        "text_encoder": 1.0, "vae": 1.0}  # fmt: skip
    small = Run(tmp_path, vae_mini_batch=1).report().row("C2")
    assert small.state == "inert" and "largest batch the VAE saw: 2" in small.evidence.en


def test_attention_calls_are_counted_by_backend(tmp_path: Path) -> None:
    report = Run(tmp_path).report()
    assert report.row("F5").state == "enabled" and report.row("F5").evidence.en.startswith("12 calls")
    assert report.row("F1").state == "not applicable" and report.row("F4").state == "not applicable"


def test_objectives_and_schedules(tmp_path: Path) -> None:
    run = Run(tmp_path, motion_sub_loss=True, use_ema=True, lr_scheduler="cosine", lr_warmup_steps=5)
    run.facts.shapes = {(1, 4, 1, 4, 4): 3}
    run.facts.clip = {"transformer": SimpleNamespace(steps=3, clipped=1, abnormal=0, skipped=0, average_norm=0.5)}
    report = run.report()
    assert report.row("H7").state == "inert" and "more than 2 latent frames" in report.row("H7").evidence.en
    assert report.row("H5").state == "inert"
    assert "more than 20 % of the run" in report.row("H2").evidence.en
    assert report.row("H3").evidence.en.startswith("1 of 3 steps clipped")
    counts = [int(part.rsplit(": ", 1)[1]) for part in report.row("H8").evidence.en.split(", ")]
    assert sum(counts) == 6


def test_strict_stops_on_inert_and_default_is_loud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, low_vram=True).report()
    assert "audit: C1 --low_vram (given) is inert" in caplog.text
    with pytest.raises(AuditFailed, match=r"C1 --low_vram \(given\): everything is on the CPU"):
        Run(tmp_path / "strict", low_vram=True, mode="strict").report()
    assert (tmp_path / "strict" / "audit.json").is_file()


def test_a_refused_patch_is_a_row_that_says_what_it_would_replace(tmp_path: Path) -> None:
    row = Run(tmp_path, mode="log", liger=True).report().row("I2")
    assert row.state == "refused" and row.sites == 0 and row.exercised is False
    assert "this run is on cpu" in row.evidence.en and "--compile" in row.evidence.en
    assert "It would replace 4 GatedResidual, 7 WanLayerNorm, 8 WanRMSNorm" in row.evidence.en


def test_files_and_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Run(tmp_path, mode="log", liger=True, low_vram=True, lang="zh").report()
    screen = capsys.readouterr().out
    assert "第 3 步后的优化审计" in screen and "已拒绝" in screen and "不适用: " in screen
    assert not any("\x1b[" in line for line in screen.splitlines())
    saved = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert saved["step"] == 3 and saved["mode"] == "log" and saved["totals"]["refused"] == 1
    assert {row["id"]: row["state"] for row in saved["rows"]} == {row.id: row.state for row in report.rows}
    titles = {row["id"]: row["title"] for row in saved["rows"]}
    assert titles["B1"]["en"] and titles["B1"]["zh"] and titles["B1"]["en"] != titles["B1"]["zh"]
    table = (tmp_path / "audit.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == len(report.rows) + 2 and "C1" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.json", "audit.md"]


def test_the_counters_go_away_and_cost_little(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert "encode" in run.vae.__dict__ and run.model.blocks[0]._compiled_call_impl is not None
    run.report()
    assert "encode" not in run.vae.__dict__ and not run.text._forward_pre_hooks
    assert all(module._compiled_call_impl is None for module in run.model.modules())
    watched = Run(tmp_path, model=nn.Sequential(nn.Identity(), nn.Identity()), lora=None, steps=0)
    plain, inputs = nn.Identity(), torch.zeros(1)
    calls = 2000
    costs = {}
    for name, module in (("plain", plain), ("watched", watched.model)):
        best = min(_seconds(module, inputs, calls) for _ in range(5))
        costs[name] = best / calls
    assert costs["watched"] - costs["plain"] < 100e-6


def _seconds(module: nn.Module, inputs: torch.Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        module(inputs)
    return time.perf_counter() - start


def test_a_misspelt_fact_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No live check reads stepz"):
        RunFacts.of({"stepz": 3})
    assert RunFacts.of({"steps": 3}).steps == 3


def test_a_check_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(view: object) -> None:
        raise KeyError("gone")

    monkeypatch.setitem(CHECKS, "H3", broken)
    row = Run(tmp_path, steps=1).report().row("H3")
    assert row.state == "disabled" and row.evidence.en == "could not be read: KeyError: 'gone'"


def test_whole_network_compilation_hides_the_blocks(tmp_path: Path) -> None:
    run = Run(tmp_path, model=make_model(layers=1), lora=None, steps=1, compile=True, compile_scope="whole",
              compile_backend="eager")  # fmt: skip
    row = run.report().row("I1")
    assert row.state == "enabled" and row.facts["graph_launches"] >= 1
    assert run.model._compiled_call_impl is not None
    torch._dynamo.reset()


def test_the_target_reaches_wrapped_models() -> None:
    wrapped = nn.Module()
    wrapped.module = nn.Linear(1, 1)
    wrapped.__class__ = type("DistributedDataParallel", (nn.Module,), {})
    target = Target(SimpleNamespace(), models={"transformer": wrapped, "vae": nn.Linear(1, 1)})
    assert target.denoisers() == {"transformer": wrapped.module}
