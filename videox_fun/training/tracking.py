"""What a run tells the world: trackers, ``events.jsonl``, the progress bar and a picture at the end.

Trackers go through accelerate under upstream's names (``train_loss``). Beside them every optimizer step is one JSON
line in ``<output_dir>/events.jsonl``, flushed at once, so that a run can be followed and drawn without any tracker and
loses nothing when it dies. A tracker is a convenience: whatever one of them dislikes is turned into text or left out,
and a tracker that cannot start is named and training goes on. (A tracker that is asked for and not installed is an
error before anything is loaded: ``check_report_to``.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from videox_fun.training.curves import plot_curves

if TYPE_CHECKING:
    from videox_fun.training.clipping import ClipResult
    from videox_fun.training.context import RunContext

logger = logging.getLogger(__name__)

EVENTS_NAME = "events.jsonl"
CURVES_NAME = "training_curves.png"
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "comet_ml": ("comet_ml",), "aim": ("aim",),
    "mlflow": ("mlflow",), "clearml": ("clearml",), "dvclive": ("dvclive",), "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}
_SECRETS = ("hub_token",)
_NOT_LOGGED = (*_SECRETS, "explicit")
_UPSTREAM_PREFIXES = ("train_", "validation_", "gradients/", "total_norm")


def check_report_to(args: argparse.Namespace) -> None:
    """Refuse a tracker that is unknown or not installed, with the command that installs it."""
    name = args.report_to
    if name in (None, "none", "all"):
        return
    if name not in _PACKAGES:
        raise ValueError(f"--report_to {name} is not known; choose one of {', '.join(_PACKAGES)}, all, none.")
    if any(importlib.util.find_spec(package) is not None for package in _PACKAGES[name]):
        return
    text = f"--report_to {name} needs the package {_PACKAGES[name][0]}: pip install {_PACKAGES[name][0]}."
    if "report_to" in getattr(args, "explicit", ()):
        raise ValueError(f"{text} (--report_to none logs to {EVENTS_NAME} only.)")
    logger.warning("%s Logging to %s only.", text, EVENTS_NAME)


def tracker_config(values: Mapping[str, Any]) -> dict[str, int | float | str | bool]:
    """Settings in types that every tracker takes: lists as text, ``None`` left out, secrets left out."""
    config: dict[str, int | float | str | bool] = {}
    for name, value in values.items():
        if value is None or name in _NOT_LOGGED:
            continue
        if isinstance(value, bool | int | float | str):
            config[name] = value
        elif isinstance(value, list | tuple | set | frozenset | dict):
            items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
            config[name] = json.dumps(items, ensure_ascii=False, default=str)
        else:
            config[name] = str(value)
    return config


def own_command(script_id: str, argv: Sequence[str], *, processes: int = 1) -> str | None:
    """This process's command line without secrets, or ``None`` where another program runs the training."""
    if not argv or not Path(argv[0]).with_suffix("").as_posix().endswith(script_id):
        return None
    words = ["accelerate", "launch", *(["--num_processes", str(processes)] if processes > 1 else [])]
    words.append(f"scripts/{script_id}.py")
    hidden = False
    for word in argv[1:]:
        name = word.partition("=")[0].removeprefix("--")
        secret = word.startswith("--") and name in _SECRETS
        if not secret and not hidden:
            words.append(word)
        hidden = secret and "=" not in word
    return shlex.join(words)


def memory_gib(device: torch.device) -> float | None:
    """Peak device memory, or this process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def _jsonable(value: Any) -> Any:
    """A JSON value; non-finite numbers become text, since JSON has none."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _open_events(path: Path) -> TextIO:
    """Open for appending, past a last line that a crash cut off."""
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    handle = open(path, "a", encoding="utf-8")
    if torn:
        handle.write("\n")
    return handle


def _shown(value: Any) -> str:
    value = _jsonable(value)
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


class RunLogger:
    """Logs one run.

    Args:
        ctx: the run.
        total_steps: optimizer steps of the whole run.
        start_step: steps made before this process started.
        warm: the start is from bare weights, so the bar counts only what this process does.
    """

    def __init__(self, ctx: RunContext, *, total_steps: int, start_step: int = 0, warm: bool = False) -> None:
        self.ctx = ctx
        self.total_steps = total_steps
        self.start_step = start_step
        self.warm = warm
        self.output_dir = Path(ctx.args.output_dir)
        self.bar: Any = None
        self._events: TextIO | None = None
        self._last: float | None = None
        self._tracking = False

    @property
    def events_path(self) -> Path:
        return self.output_dir / EVENTS_NAME

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file, the trackers and the bar. Call on every rank."""
        self._start_trackers(config)
        if self.ctx.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._events = _open_events(self.events_path)
            facts = {"total_steps": self.total_steps, "script": self.ctx.spec.id}
            command = own_command(self.ctx.spec.id, sys.argv, processes=self.ctx.world)
            self._write("start", self.start_step, facts | ({"command": command} if command else {}))
        from tqdm.auto import tqdm

        from videox_fun.utils.console import bar_interval

        remaining = max(self.total_steps - self.start_step, 0)
        self.bar = tqdm(
            total=remaining if self.warm else self.total_steps,
            initial=0 if self.warm else min(self.start_step, self.total_steps),
            desc="Steps", dynamic_ncols=True, mininterval=bar_interval(),
            disable=not self.ctx.accelerator.is_local_main_process,
        )
        self._last = time.perf_counter()

    def _start_trackers(self, config: Mapping[str, Any]) -> None:
        args, accelerator = self.ctx.args, self.ctx.accelerator
        if args.report_to in (None, "none"):
            return
        folder = self.output_dir / args.logging_dir
        if self.ctx.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        extra = {"wandb": {"dir": str(folder)}}
        settings = tracker_config(config)
        for attempt in ("as configured", "offline"):
            try:
                accelerator.init_trackers(args.tracker_project_name, config=settings, init_kwargs=extra)
            except Exception as error:
                if args.report_to == "wandb" and attempt == "as configured":
                    logger.warning("W&B did not start (%s); logging offline. 'wandb sync' uploads it later.", error)
                    os.environ["WANDB_MODE"] = "offline"
                    continue
                logger.error("--report_to %s did not start (%s); training goes on with %s only.", args.report_to,
                             error, EVENTS_NAME)
                return
            self._tracking = True
            return

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._events is None:
            return
        row = {"event": event, "step": step, "time": round(time.time(), 3)}
        row.update({key: _jsonable(value) for key, value in values.items()})
        self._events.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._events.flush()

    def _track(self, values: Mapping[str, Any], step: int) -> None:
        if not self._tracking:
            return
        numbers = {key: _jsonable(value) for key, value in values.items()}
        if self.ctx.compat:
            numbers = {key: value for key, value in numbers.items() if key.startswith(_UPSTREAM_PREFIXES)}
        numbers = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
        if not numbers:
            return
        try:
            self.ctx.accelerator.log(numbers, step=step)
        except Exception as error:
            logger.error("The tracker failed at step %d (%s); training goes on with %s only.", step, error, EVENTS_NAME)
            self._tracking = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log one optimizer step.

        Args:
            values: numbers by name. ``train_loss`` also appears as ``loss`` in the event file; ``lr`` and ``step_loss``
                (else the loss) are shown on the bar. ``step_time`` and ``memory_gib`` are added when absent.
            step: the step after it was counted.
        """
        now = time.perf_counter()
        row = dict(values)
        if "loss" not in row and "train_loss" in row:
            row["loss"] = row["train_loss"]
        if self._last is not None:
            row.setdefault("step_time", round(now - self._last, 6))
        self._last = now
        if self.ctx.is_main:
            memory = memory_gib(self.ctx.device)
            if memory is not None:
                row.setdefault("memory_gib", round(memory, 3))
            self._write("step", step, {key: value for key, value in row.items() if key != "train_loss"})
        self._track({key: value for key, value in row.items() if key != "loss" or "train_loss" not in row}, step)
        if self.bar is not None:
            shown = {"step_loss": row.get("step_loss", row.get("loss")), "lr": row.get("lr")}
            self.bar.set_postfix({key: _shown(value) for key, value in shown.items() if value is not None},
                                 refresh=False)
            self.bar.update(1)

    def note(self, event: str, step: int, **values: Any) -> None:
        """Record something that is not a step (a save, a validation, a skipped step)."""
        self._write(event, step, values)

    def track(self, values: Mapping[str, Any], step: int) -> None:
        """Give numbers that belong to no single step (the audit's) to the trackers only."""
        self._track(values, step)

    def log_validation(self, values: Mapping[str, float], step: int) -> None:
        """Log held-out numbers, for example ``validation_loss``, of the weights after ``step``."""
        if self.ctx.is_main:
            self._write("step", step, values)
        self._track(values, step)

    def log_model_info(self, result: ClipResult, step: int) -> None:
        """The gradient scalars of ``--report_model_info``."""
        values = {f"gradients/before_clip_norm/{name}": norm for name, norm in result.parameter_norms.items()}
        values["gradients/norm_sum"] = result.norm
        values["gradients/actual_max_grad_norm"] = result.limit
        self._track(values, step)

    def finish(self) -> list[Path]:
        """Close everything, draw the curves and return the files written; never raises for the picture."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self._events is None:
            return []
        self._events.close()
        self._events = None
        written = [self.events_path]
        try:
            picture = plot_curves(self.events_path, self.output_dir / CURVES_NAME, title=self.ctx.spec.id)
        except ImportError:
            logger.warning("No picture of the curves was drawn; it needs matplotlib: pip install matplotlib.")
        except Exception as error:
            logger.warning("The curves could not be drawn (%s); the numbers are in %s.", error, self.events_path)
        else:
            written += [picture] if picture is not None else []
        return written
