"""An interrupted run equals an unbroken one, bit for bit: the real trainer, a tiny checkpoint, real clips.

A run is killed right after the save of a step and continued by another run with ``--resume_from_checkpoint latest``;
what is left after its last step must be the very bytes that an unbroken run leaves. The rows below are the table of
``docs/resume.md``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
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

from tests.parity.test_runs import load_record
from tests.unit.real_runs import (
    CLIPS,
    FULL,
    LORA,
    RealRun,
    checkpoint,
    command,
    optimizer_state,
    refusal,
    same_tensors,
    train,
)
from videox_fun.training.entry import build_trainer
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec

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


_unbroken: dict[tuple[str, str, str], RealRun] = {}


def unbroken(row: Row, model: Path, factory: pytest.TempPathFactory, **flags: Any) -> RealRun:
    """The run without interruption, made once for rows that differ in the interruptions only."""
    key = (row.method, row.optimizer, row.run)
    if key not in _unbroken:
        _unbroken[key] = train(model, factory.mktemp("unbroken"), script=row.script, **flags)
    return _unbroken[key]


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
def test_interrupted_equals_unbroken(row: Row, model, meta: Path, tmp_path: Path,
                                    tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = {"train_data_meta": meta, "max_train_steps": STEPS, "checkpointing_steps": 1, **row.flags}
    whole = unbroken(row, model(row.model), tmp_path_factory, **flags)
    last = interrupted(row, model(row.model), tmp_path / "broken", **flags)
    assert whole.steps == list(range(1, STEPS + 1))
    assert last.steps == whole.steps[row.cuts[-1]:]
    assert last.losses == whole.losses[row.cuts[-1]:]
    assert last.logs("lr") == whole.logs("lr")[row.cuts[-1]:]
    micro = len(last.rows)
    assert last.rows == whole.rows[-micro:] and last.timesteps == whole.timesteps[-micro:]
    assert same_tensors(whole.trained(), last.trained()) == []
    assert same_tensors(optimizer_state(whole), optimizer_state(last)) == []
    assert differing(whole.output / f"checkpoint-{STEPS}", tmp_path / "broken" / f"checkpoint-{STEPS}") == []
    assert len(set(whole.losses)) == STEPS  # the comparison would notice a repeated step


# ---- stopped from outside


def start_script(words: list[str], repo_root: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, f"scripts/{LORA}.py", *words], cwd=repo_root, stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, text=True, env={**os.environ, **environment})


def wait_for_step(events: Path, step: int, *, process: subprocess.Popen, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not (events.is_file() and f'"event": "step", "step": {step},' in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, "the script did not get to its first step"
        time.sleep(0.01)


def test_a_signal_saves_a_state_that_continues_exactly(model, tmp_path: Path, repo_root: Path) -> None:
    """Without ``--save_state``, in a process of its own; exit code 85 says that the run is not finished."""
    steps = 12
    whole = train(model("ckpt_t2v"), tmp_path / "whole", max_train_steps=steps)
    words = command(LORA, model("ckpt_t2v"), tmp_path / "broken", max_train_steps=steps)
    process = start_script(words, repo_root)
    try:
        wait_for_step(tmp_path / "broken" / "events.jsonl", 1, process=process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 85, log[-2000:]
    folder, = (tmp_path / "broken").glob("checkpoint-*")
    stopped = int(folder.name.rpartition("-")[2])
    assert folder.is_dir() and 1 <= stopped < steps
    last = train(model("ckpt_t2v"), tmp_path / "broken", max_train_steps=steps, resume_from_checkpoint="latest")
    assert last.steps == whole.steps[stopped:] and last.losses == whole.losses[stopped:]
    name = f"checkpoint-{steps}.safetensors"
    assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_saving_does_not_change_the_run(model, meta: Path, tmp_path: Path) -> None:
    flags = {"train_data_meta": meta, "max_train_steps": 3, **SIZES}
    without = train(model("ckpt_t2v"), tmp_path / "a", **flags)
    saving = train(model("ckpt_t2v"), tmp_path / "b", save_state=True, checkpointing_steps=1, **flags)
    assert saving.losses == without.losses and same_tensors(saving.trained(), without.trained()) == []


# ---- the recorded runs


def recorded_pair(first: str, second: str, *, goldens: Path, root: Path, output: Path, compat: bool,
                  prepare: Callable[[Path], None] = lambda folder: None) -> tuple[dict, RealRun, RealRun]:
    """Repeat a recorded run and the recorded run that resumed from its state."""
    runs = []
    for tag in (first, second):
        record = load_record(goldens, tag)
        text = record["args"].replace(f"$E2E/out_{tag}", str(output)).replace("$E2E/data", str(CLIPS))
        text = text.replace("$E2E/wan_tiny.yaml", "$E2E/ckpt_t2v/wan.yaml").replace("$E2E", str(root))
        spec = get_spec("wan2.1_fun/" + record["script"].removesuffix(".py"))
        words = [*shlex.split(text), "--audit", "off", "--report_to", "none", *(["--upstream_compat"] * compat)]
        trainer = build_trainer(spec, parse_args(spec, words))
        trainer.setup()
        run = RealRun(trainer)
        run.record()
        runs.append(run.go())
        if tag == first:
            prepare(output)
    return record, *runs


def only_step_2(folder: Path) -> None:
    for path in folder.glob("checkpoint-*"):
        if path.name != "checkpoint-2":
            shutil.rmtree(path)


def timesteps_of(record: dict) -> list[list[float]]:
    return [call[2]["t_values"] for call in record["calls"] if call[1] == "transformer"]


PAIRS = [("g_state", "g_resume"), ("f_state", "f_resume"), ("g_state", "x_resume_mixed")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_recorded_resumes_under_compat(first: str, second: str, model, goldens: Path, tmp_path: Path) -> None:
    """LoRA repeats epoch 0 with the same noise; full fine-tuning goes on in the data, but not in the noise."""
    record, whole, resumed = recorded_pair(first, second, goldens=goldens, root=model("ckpt_t2v").parent,
                                           output=tmp_path, compat=True, prepare=only_step_2)
    assert resumed.steps == [step for step, _ in record["logged"]]
    for mine, theirs in zip(resumed.timesteps, timesteps_of(record), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    if first == "g_state":
        assert resumed.rows == whole.rows[:4] and resumed.timesteps == whole.timesteps[:4]
        assert resumed.losses == pytest.approx(whole.losses[:4], abs=5e-3)
        assert resumed.losses != whole.losses[:4]
    else:
        assert resumed.rows == whole.rows[2:5] and resumed.timesteps != whole.timesteps[2:5]
    assert resumed.losses == pytest.approx(record["losses"], rel=0.1)
    assert {name.split("/")[0] for name in record["files"]} >= {path.name for path in tmp_path.glob("checkpoint-*")}


@pytest.mark.parametrize(("first", "second"), [*PAIRS, ("g_peft_state", "x_resume_peft")])
def test_recorded_resumes_by_default(first: str, second: str, model, goldens: Path, tmp_path: Path) -> None:
    """Every one goes on where it stopped; PEFT, which crashed, does so too."""
    _, whole, resumed = recorded_pair(first, second, goldens=goldens, root=model("ckpt_t2v").parent, output=tmp_path,
                                      compat=False, prepare=only_step_2)
    assert resumed.steps[0] == 3
    if len(whole.steps) > 2:
        assert resumed.rows == whole.rows[2:] and resumed.timesteps == whole.timesteps[2:]
        assert resumed.losses == whole.losses[2:]
        assert same_tensors(whole.trained(), resumed.trained()) == []
    else:
        assert resumed.rows[:1] != whole.rows[:1] and len(resumed.steps) == 4


def test_recorded_resume_from_a_bare_file_only(model, tmp_path: Path, goldens: Path) -> None:
    """Upstream crashed on the name; here the text says what there is, and what would make a state."""
    record = load_record(goldens, "x_resume_file")
    assert "invalid literal for int()" in record["error"]
    train(model("ckpt_t2v"), tmp_path, max_train_steps=1)
    (tmp_path / "checkpoint-1.safetensors").rename(tmp_path / "checkpoint-8.safetensors")
    said = refusal(model("ckpt_t2v"), tmp_path, resume_from_checkpoint="latest")
    assert "checkpoint-8.safetensors (LoRA file)" in said and "--save_state" in said
    fresh = train(model("ckpt_t2v"), tmp_path, resume_from_checkpoint="latest", upstream_compat=True)
    assert fresh.steps == [1, 2]


# ---- the document


def table() -> list[str]:
    lines = ["| method | optimizer | run | interrupted after step | epoch |", "|---|---|---|---|---|"]
    for row in ROWS:
        per_epoch = -(-BATCHES // row.flags.get("gradient_accumulation_steps", 1))
        epochs = " and ".join(str((cut - 1) // per_epoch) for cut in row.cuts)
        lines.append(f"| {row.method} | {row.optimizer} | {row.run} | {' and '.join(map(str, row.cuts))} | {epochs} |")
    return lines


def test_the_table_in_the_document_is_this_matrix(repo_root: Path) -> None:
    text = (repo_root / "docs" / "resume.md").read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.startswith("|")]
    start = written.index(table()[0])
    assert written[start:start + len(table())] == table()
    assert f"{len(ROWS)} rows" in text
