"""FSDP2 and DeepSpeed give the losses, norms and files of plain data parallelism, on two gloo processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.real_runs import COMMON, FULL, LORA, checkpoint, command

LORA_FILE = "lora_diffusion_pytorch_model.safetensors"
MODEL_FILE = "transformer/diffusion_pytorch_model.safetensors"
#: Clipping is always at work, and every step adds up two micro-steps.
FLAGS: dict[str, Any] = {
    "max_train_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.01, "gradient_checkpointing": True,
    "save_state": True, "checkpointing_steps": 1, "mixed_precision": "no", "audit": "log",
}  # fmt: skip
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="not installed: deepspeed")


class Launcher:
    """Runs scripts on two ranks, each kind and set of flags once."""

    def __init__(self, factory: pytest.TempPathFactory, root: Path) -> None:
        self.factory, self.root, self.done = factory, root, {}

    def run(self, kind: str, script: str = LORA, **changes: Any) -> Path:
        key = (kind, script, json.dumps(changes, sort_keys=True, default=str))
        if key not in self.done:
            self.done[key] = self._run(kind, script, {**FLAGS, **changes})
        return self.done[key]

    def _run(self, kind: str, script: str, flags: dict[str, Any]) -> Path:
        folder = self.factory.mktemp("sharded")
        if kind.startswith("zero"):
            kind = str(deepspeed_file(folder, stage=int(kind[-1]), bf16=flags["mixed_precision"] == "bf16"))
        words = [kind, script, *command(script, checkpoint(self.factory), folder / "out", **flags)]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*start, "-m", "tests.dist.sharded_ranks", *words], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[:4000] + done.stderr[-4000:]
        return folder / "out"


def deepspeed_file(folder: Path, *, stage: int, bf16: bool) -> Path:
    """A configuration that leaves the script's numbers open and splits even the smallest parameter."""
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    file = folder / "deepspeed.json"
    file.write_text(json.dumps({
        "bf16": {"enabled": bf16}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": zero,
    }))  # fmt: skip
    return file


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Launcher:
    return Launcher(tmp_path_factory, repo_root)


def steps(output: Path) -> dict[str, list[float]]:
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    return {name: [event[name] for event in events if event["event"] == "step"] for name in ("loss", "grad_norm")}


def distance(a: Path, b: Path) -> float:
    """Largest mean difference of a tensor between two files, in learning rates."""
    first, second = load_file(a), load_file(b)
    assert {name: value.shape for name, value in first.items()} == {n: value.shape for n, value in second.items()}
    assert all(value.numel() for value in first.values())
    apart = max(float((first[name].float() - value.float()).abs().mean()) for name, value in second.items())
    return apart / COMMON["learning_rate"]


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero2", marks=needs_deepspeed)])
def test_lora_equals_data_parallel(launcher: Launcher, kind: str, split: int) -> None:
    """Also when the two processes share the tokens of a sample, which is then one batch instead of two."""
    outputs = [launcher.run(each, sequence_parallel_size=split) for each in ("ddp", kind)]
    expected, found = map(steps, outputs)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert min(found["grad_norm"]) > FLAGS["max_grad_norm"]
    assert distance(*(output / "checkpoint-3" / LORA_FILE for output in outputs)) < 0.02


@pytest.mark.parametrize("kind", ["fsdp1", pytest.param("zero3", marks=needs_deepspeed)])
def test_full_fine_tuning_writes_whole_weights(launcher: Launcher, kind: str) -> None:
    """``fsdp1``: a launch that asks for the first version."""
    outputs = [launcher.run(each, FULL, max_train_steps=1, save_state=None) for each in ("ddp", kind)]
    expected, found = map(steps, outputs)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert distance(*(output / "checkpoint-1" / MODEL_FILE for output in outputs)) < 0.1


def test_fsdp_in_bf16_keeps_timesteps_and_rotary_table_in_fp32(launcher: Launcher) -> None:
    """FSDP's own casting of inputs would round them, and a rotary table in bf16 is an error."""
    found, expected = steps(launcher.run("fsdp", mixed_precision="bf16")), steps(launcher.run("ddp"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero2", marks=needs_deepspeed)])
def test_a_resume_is_exact(launcher: Launcher, kind: str) -> None:
    whole = launcher.run(kind, sequence_parallel_size=1)
    resumed = launcher.run(kind, resume_from_checkpoint=whole / "checkpoint-2")
    files = [load_file(output / "checkpoint-3" / LORA_FILE) for output in (whole, resumed)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    assert steps(resumed)["loss"] == steps(whole)["loss"][2:]
