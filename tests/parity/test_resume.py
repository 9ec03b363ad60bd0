"""An interrupted run equals an unbroken one, bit for bit: the real trainer, a tiny checkpoint, real clips.

A run is killed right after the save of a step and continued by another run with ``--resume_from_checkpoint latest``;
what is left after its last step must be the very bytes that an unbroken run leaves. The rows below are the table of
``docs/resume.md``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.real_runs import CLIPS, FULL, LORA, RealRun, checkpoint, command, optimizer_state, same_tensors, train

STEPS, BATCHES = 5, 3  # with three rows and batch 1, step 1 lies inside epoch 0 and step 4 inside epoch 1


@dataclass(frozen=True)
class Row:
    """One line of the table: a run, and the optimizer steps after which it is interrupted."""

    method: str
    optimizer: str
    run: str
    cuts: tuple[int, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    script: str = LORA
    model: str = "ckpt_t2v"
    needs: str | None = None

    @property
    def name(self) -> str:
        return f"{self.method}, {self.optimizer}, {self.run}, after {' and '.join(map(str, self.cuts))}"


STATE = {"save_state": True}
PEFT = {"save_state": True, "use_peft_lora": True}
LARGE = {"rank": 128, "network_alpha": 64}  # bitsandbytes quantizes tensors of 4,096 values and more
EMA = {"use_ema": True, "trainable_modules": ["ffn"], "trainable_modules_low_learning_rate": ["attn.q"]}
EIGHT_BIT = {"use_8bit_adam": True}
ACCUMULATION = {"gradient_accumulation_steps": 2}
WORKERS = {"dataloader_num_workers": 2}
SIZES = {"random_hw_adapt": True, "training_with_video_token_length": True}
INPAINT = {"train_mode": "inpaint"}
COSINE = {"lr_scheduler": "cosine", "lr_warmup_steps": 1}
BF16 = {"mixed_precision": "bf16", "master_weights_fp32": True}

ROWS = [
    Row("LoRA", "AdamW", "random sizes", (1,), {**STATE, **SIZES}),
    Row("LoRA", "AdamW", "random sizes", (4,), {**STATE, **SIZES}),
    Row("LoRA", "AdamW", "random sizes", (1, 4), {**STATE, **SIZES}),
    Row("LoRA", "AdamW", "accumulation 2, cosine", (1, 3), {**STATE, **ACCUMULATION, **COSINE}),
    Row("LoRA", "AdamW", "2 workers", (1, 4), {**STATE, **WORKERS, **SIZES}),
    Row("LoRA", "AdamW", "batch 2, buckets partly filled", (1, 4), {**STATE, "train_batch_size": 2}),
    Row("LoRA", "AdamW", "inpaint, drop-outs", (1, 4),
        {**STATE, **INPAINT, "rank_drop_out": 0.5, "neuron_drop_out": 0.1}, model="ckpt_inp"),
    Row("LoRA", "AdamW", "bf16, fp32 masters, densities", (1, 4),
        {**STATE, **BF16, "uniform_sampling": False, "weighting_scheme": "logit_normal"}),
    Row("LoRA", "8-bit AdamW", "plain", (1, 4), {**STATE, **LARGE, **EIGHT_BIT}, needs="bitsandbytes"),
    Row("LoRA", "CAME", "plain", (1, 4), {**STATE, "use_came": True}, needs="came_pytorch"),
    Row("PEFT LoRA", "AdamW", "plain", (1, 4), PEFT),
    Row("PEFT LoRA", "8-bit AdamW", "accumulation 2", (1, 3), {**PEFT, **LARGE, **EIGHT_BIT, **ACCUMULATION},
        needs="bitsandbytes"),
    Row("full, EMA", "AdamW", "random sizes, cosine", (1, 4), {**EMA, **SIZES, **COSINE}, script=FULL),
    Row("full, EMA", "AdamW", "accumulation 2, 2 workers", (1, 3), {**EMA, **ACCUMULATION, **WORKERS}, script=FULL),
    Row("full, EMA", "8-bit AdamW", "plain", (1, 4), {**EMA, **EIGHT_BIT}, script=FULL, needs="bitsandbytes"),
    Row("full", "AdamW", "fp16, loss scaling", (1, 4), {"mixed_precision": "fp16"}, script=FULL),
]


class Killed(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: checkpoint(tmp_path_factory, name)


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of the clips."""
    path = tmp_path_factory.mktemp("rows") / "metadata.json"
    path.write_text(json.dumps(json.loads((CLIPS / "metadata_video.json").read_text())[:BATCHES]))
    return path


def kill_after(step: int) -> Callable[[RealRun], None]:
    """Let the run die right after it has saved ``step``."""

    def install(run: RealRun) -> None:
        def die(reached: int) -> None:
            if reached == step:
                raise Killed

        run.trainer.validator.after_step = die

    return install


def interrupted(row: Row, model: Path, output: Path, **flags: Any) -> RealRun:
    """The row's run with its interruptions; returns the last stretch."""
    resume: dict[str, Any] = {}
    for cut in row.cuts:
        with pytest.raises(Killed):
            train(model, output, script=row.script, before=kill_after(cut), **flags, **resume)
        resume = {"resume_from_checkpoint": "latest"}
    return train(model, output, script=row.script, **flags, **resume)


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".bin", ".pt"):
        return torch.load(path, weights_only=True)
    return path.read_bytes()


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{where}.{number}")
    else:
        yield where, value


def differing(a: Path, b: Path) -> list[str]:
    """Names of files, and of the values inside them, that are not bit-equal in two state folders."""
    ours, theirs = files_of(a), files_of(b)
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        one, two = dict(leaves(content(ours[name]))), dict(leaves(content(theirs[name])))
        for key in sorted({*one, *two}):
            x, y = one.get(key), two.get(key)
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                equal = x.dtype == y.dtype and torch.equal(x, y)
            else:
                equal = type(x) is type(y) and x == y
            if not equal:
                wrong.append(f"{name}{key}")
    return wrong


def needs(row: Row) -> list[Any]:
    missing = row.needs is not None and importlib.util.find_spec(row.needs) is None
    return [pytest.mark.skip(reason=f"{row.needs} is not installed")] if missing else []


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=needs(row)) for row in ROWS])
def test_interrupted_equals_unbroken(row: Row, model, meta: Path, tmp_path: Path) -> None:
    flags = {"train_data_meta": meta, "max_train_steps": STEPS, "checkpointing_steps": 1, **row.flags}
    whole = train(model(row.model), tmp_path / "whole", script=row.script, **flags)
    last = interrupted(row, model(row.model), tmp_path / "broken", **flags)
    assert whole.steps == list(range(1, STEPS + 1))
    assert last.steps == whole.steps[row.cuts[-1]:]
    assert last.losses == whole.losses[row.cuts[-1]:]
    assert last.logs("lr") == whole.logs("lr")[row.cuts[-1]:]
    micro = len(last.rows)
    assert last.rows == whole.rows[-micro:] and last.timesteps == whole.timesteps[-micro:]
    assert same_tensors(whole.trained(), last.trained()) == []
    assert same_tensors(optimizer_state(whole), optimizer_state(last)) == []
    assert differing(tmp_path / "whole" / f"checkpoint-{STEPS}", tmp_path / "broken" / f"checkpoint-{STEPS}") == []
    assert len(set(whole.losses)) == STEPS  # the comparison would notice a repeated step
