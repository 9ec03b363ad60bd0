"""Whole runs of the training scripts in this process, on a tiny checkpoint and six real clips.

``train`` goes the way a command line goes: the script's own parser, trainer and loader. Nothing is replaced but what
would take most of the time: drawing the curves, and waiting for the disk to have written. What the run saw is recorded
as it passes by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from videox_fun.training.entry import build_trainer
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec
from videox_fun.utils.tiny import make_reference_checkpoint

DATA = Path(__file__).resolve().parents[1] / "data"
CLIPS = DATA / "e2e_data"
LORA, FULL = "wan2.1_fun/train_lora", "wan2.1_fun/train"

COMMON: dict[str, Any] = {
    "train_data_dir": CLIPS, "train_data_meta": CLIPS / "metadata_video.json", "image_sample_size": 64,
    "video_sample_size": 64, "token_sample_size": 64, "video_sample_stride": 2, "video_sample_n_frames": 5,
    "train_batch_size": 1, "learning_rate": 1e-3, "lr_warmup_steps": 0, "seed": 42, "enable_bucket": True,
    "uniform_sampling": True, "checkpointing_steps": 1000, "max_train_steps": 2, "report_to": "none", "audit": "off",
}
OF_SCRIPT: dict[str, dict[str, Any]] = {
    "train_lora": {"rank": 4, "network_alpha": 2, "target_name": "q,k,v,ffn.0,ffn.2"},
    "train": {"trainable_modules": ["attn"]},
}
_built: dict[str, Path] = {}


def checkpoint(factory: pytest.TempPathFactory, name: str = "ckpt_t2v") -> Path:
    """A tiny checkpoint, built once per session beside the others; ``wan.yaml`` in it is its ``--config_path``."""
    if name not in _built:
        root = next((path.parent for path in _built.values()), None) or factory.mktemp("checkpoints")
        folder = root / name
        make_reference_checkpoint(folder, name=name, tokenizer=DATA / "umt5-xxl")
        _built[name] = folder
    return _built[name]


def words(flags: Mapping[str, Any]) -> list[str]:
    """A command line; ``None`` and ``False`` leave a flag out, ``True`` is a switch, a list gives several values."""
    line: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        line.append(f"--{name}")
        if value is not True:
            line += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return line


def command(script: str, model: Path, output: Path, **changes: Any) -> list[str]:
    """The words of a run that trains for two steps, with ``changes``."""
    own = {"pretrained_model_name_or_path": model, "config_path": model / "wan.yaml", "output_dir": output}
    return words({**COMMON, **OF_SCRIPT[script.rpartition("/")[2]], **own, **changes})


@dataclass
class RealRun:
    """A run and what it saw, one entry per micro-step or, for ``logged``, per optimizer step."""

    trainer: Any
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    pixels: list[torch.Tensor] = field(default_factory=list)
    timesteps: list[list[float]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None

    @property
    def losses(self) -> list[float]:
        return [values["train_loss"] for _, values in self.logged]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.logged]

    def logs(self, name: str) -> list[float]:
        return [values[name] for _, values in self.logged]

    @property
    def output(self) -> Path:
        return Path(self.trainer.args.output_dir)

    @property
    def player(self) -> Any:
        return self.trainer.players[0]

    def trained(self) -> dict[str, torch.Tensor]:
        """Copies of the trained parameters."""
        return {name: p.detach().clone() for g in self.player.groups for name, p in zip(g.names, g.params, strict=True)}

    def record(self) -> None:
        """Take notes of batches, noise levels and logged values from now on."""
        trainer, recipe = self.trainer, self.trainer.recipe
        prepare, predict, log = trainer.objective.prepare, recipe.predict, trainer.run_logger.log

        def spy_prepare(batch):
            self.rows.append(list(batch["idx"]))
            self.texts.append(list(batch["text"]))
            self.pixels.append(batch["pixel_values"].clone())
            return prepare(batch)

        def spy_predict(ctx, model, noisy, timesteps, conditioning):
            self.timesteps.append(timesteps.tolist())
            self.inputs.append(dict(conditioning.inputs))
            return predict(ctx, model, noisy, timesteps, conditioning)

        def spy_log(values, step):
            self.logged.append((step, dict(values)))
            return log(values, step)

        trainer.objective.prepare, recipe.predict, trainer.run_logger.log = spy_prepare, spy_predict, spy_log

    def go(self) -> RealRun:
        with mock.patch("videox_fun.training.tracking.plot_curves", return_value=None), mock.patch.object(os, "fsync"):
            self.code = self.trainer.run()
        return self


def set_up(model: Path, output: Path, *, script: str = LORA, **changes: Any) -> RealRun:
    """Everything up to the first step."""
    spec = get_spec(script)
    trainer = build_trainer(spec, parse_args(spec, command(script, model, output, **changes)))
    trainer.setup()
    run = RealRun(trainer)
    run.record()
    return run


def train(model: Path, output: Path, *, script: str = LORA, before: Callable[[RealRun], None] | None = None,
          **changes: Any) -> RealRun:
    """A whole run; ``before`` may look at it, or interfere, between set-up and the first step."""
    run = set_up(model, output, script=script, **changes)
    if before is not None:
        before(run)
    return run.go()


def refusal(model: Path, output: Path, *, script: str = LORA, **changes: Any) -> str:
    """The text of a refusal during set-up, from the script's ``main``'s point of view."""
    with pytest.raises(ValueError) as caught:
        set_up(model, output, script=script, **changes)
    return str(caught.value)


def same_tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not bit-equal in both."""
    return [key for key in sorted({*a, *b}) if key not in a or key not in b or not torch.equal(a[key], b[key])]


def file_differences(a: Path, b: Path) -> list[str]:
    """Names of tensors that differ between two safetensors files."""
    return same_tensors(load_file(a), load_file(b))


def optimizer_state(run: RealRun) -> dict[str, torch.Tensor]:
    """All tensors of the optimizer's state, by parameter number and key."""
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value.clone()

    walk("state", run.player.optimizer.state_dict()["state"])
    return flat
