"""The audit's look back at a whole run: where the time went, how fast it was, what memory it took.

Times come from the phase clock: on CUDA the device's own (where waiting for data counts only as far as the device was
idle), else the host's. Speed is that of the steps after the start-up audit, when there are as many of them as before,
so that compilation and first allocations do not count. Everything is read once, after the last step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optim_patches.audit import flops
from optim_patches.audit.clock import BETWEEN_STEPS, DATA, PHASES
from optim_patches.audit.live_view import View
from optim_patches.audit.text import Text, join, same, size

PLAN_NAME = "plan.json"
_PLAN_KEYS = {"device": ("device_peak_bytes", "peak_bytes"), "process": ("host_peak_bytes", "peak_bytes")}
_SHOWN = 0.0005  # shares that round to 0.0 % are in the file only
NAMES = {
    "data": Text("waiting for data", "等待数据"), "vae": Text("VAE", "VAE"), "text": Text("text encoder", "文本编码器"),
    "image": Text("image encoder", "图像编码器"), "prepare": Text("other encoding", "其他编码"),
    "forward": Text("denoiser forward", "去噪前向"), "backward": Text("backward", "反向"),
    "optimizer": Text("optimizer", "优化器"), "saving": Text("saving", "保存"),
    "validation": Text("sampling", "采样验证"),
    "audit": Text("audit", "审计"), "other": Text("other", "其他"),
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """Totals at one moment of the run."""

    steps: int
    micro_steps: int
    tokens: int
    shapes: Mapping[tuple[int, ...], int]
    host: Mapping[str, float]
    device: Mapping[str, float]

    @classmethod
    def of(cls, view: View) -> Mark:
        f = view.facts
        return cls(f.steps, f.micro_steps, f.tokens, dict(f.shapes), dict(f.phases.get("host", {})),
                   dict(f.phases.get("device", {})))  # fmt: skip

    def since(self, earlier: Mark) -> Mark:
        """What came after an earlier moment."""
        def less(now: Mapping, then: Mapping) -> dict:
            return {key: value - then.get(key, 0) for key, value in now.items() if value - then.get(key, 0) > 0}

        return Mark(self.steps - earlier.steps, self.micro_steps - earlier.micro_steps, self.tokens - earlier.tokens,
                    less(self.shapes, earlier.shapes), less(self.host, earlier.host),
                    less(self.device, earlier.device))  # fmt: skip

    @property
    def step_seconds(self) -> float:
        """Host seconds of training, without saving and sampling between steps."""
        return sum(value for phase, value in self.host.items() if phase not in BETWEEN_STEPS)


@dataclass(frozen=True)
class SecondLook:
    """What is said at the end of a run. ``None``: could not be read.

    Attributes:
        steps, seconds: of the whole loop.
        clock: ``device`` or ``host``, whose time ``shares`` is of.
        shares: part of the loop's time per phase; they add up to one.
        steady_steps: steps that speed was taken from.
        peak_bytes: largest memory of ``peak_of`` (``device`` or ``process``), and what the plan said.
        idle: part of the time the device had nothing to do; ``idle_source`` says how that is known.
        mfu, hfu: model and hardware operations per second over ``peak_flops``.
    """

    steps: int
    seconds: float
    clock: str
    shares: dict[str, float]
    steady_steps: int
    step_s: float
    tokens_per_s: float
    peak_bytes: int | None
    peak_of: str
    planned_bytes: int | None = None
    recompiles: int | None = None
    idle: float | None = None
    idle_source: Text | None = None
    step_flops: float | None = None
    peak_flops: float | None = None
    peak_source: Text | None = None
    mfu: float | None = None
    hfu: float | None = None

    def scalars(self) -> dict[str, float]:
        """Numbers for the tracker."""
        values: dict[str, float | None] = {f"audit/share_{name}": share for name, share in self.shares.items()}
        values |= {"audit/step_s": self.step_s, "audit/tokens_per_s": self.tokens_per_s, "audit/mfu": self.mfu,
                   "audit/hfu": self.hfu, "audit/device_idle": self.idle, "audit/recompiles": self.recompiles}
        values["audit/peak_gib"] = None if self.peak_bytes is None else self.peak_bytes / 2**30
        return {name: float(value) for name, value in values.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``audit.json``."""
        return {name: value.as_dict() if isinstance(value, Text) else value for name, value in vars(self).items()}

    def lines(self) -> list[Text]:
        """The look as a few lines of text."""
        steady = Text(f"{self.step_s:.3g} s per step, {self.tokens_per_s:.0f} tokens/s",
                      f"每步 {self.step_s:.3g} 秒，{self.tokens_per_s:.0f} tokens/s")  # fmt: skip
        whole = Text(f"{self.steps} steps in {self.seconds:.1f} s; ", f"{self.steps} 步共 {self.seconds:.1f} 秒；")
        lines = [whole + steady]
        order = sorted((n for n, share in self.shares.items() if share >= _SHOWN), key=lambda n: -self.shares[n])
        parts = [NAMES[name] + same(f" {100 * self.shares[name]:.1f} %") for name in order]
        whose = Text("device", "设备") if self.clock == "device" else Text("host", "主机")
        lines.append(Text("time ({}): ", "时间（{}）：").format(whose) + join(parts))
        lines.append(self._speed())
        lines.append(self._memory())
        if self.recompiles is not None:
            lines.append(Text(f"recompilations after warm-up: {self.recompiles}",
                              f"预热后重新编译：{self.recompiles} 次"))  # fmt: skip
        if self.idle is not None:
            idle = same(f"{100 * self.idle:.1f} %")
            lines.append(Text("device idle: {} ({})", "设备空闲：{}（{}）").format(idle, self.idle_source))
        return lines

    def _speed(self) -> Text:
        if self.step_flops is None:
            return Text("MFU: this network's operations are not counted", "MFU：未统计该网络的运算量")
        done = Text(f"{self.step_flops / 1e12:.3g} TFLOP per step and process",
                    f"每进程每步 {self.step_flops / 1e12:.3g} TFLOP")  # fmt: skip
        if self.mfu is None:
            return done + Text("; the peak of this device is not listed", "；该设备峰值未收录")
        hardware = "" if self.hfu is None else f", HFU {100 * self.hfu:.1f} %"
        rate, peak = f"MFU {100 * self.mfu:.1f} %{hardware}", f"{self.peak_flops / 1e12:.4g} TFLOP/s"
        return Text("{} of {} ({}); ", "{}，峰值 {}（{}）；").format(rate, peak, self.peak_source) + done

    def _memory(self) -> Text:
        if self.peak_bytes is None:
            return Text("peak memory: not readable", "峰值显存：无法读取")
        whose = Text("device", "设备") if self.peak_of == "device" else Text("process", "进程")
        text = Text("peak memory ({}): ", "峰值内存（{}）：").format(whose) + same(size(self.peak_bytes))
        if self.planned_bytes:
            off = 100 * (self.peak_bytes / self.planned_bytes - 1)
            text += Text(f", planned {size(self.planned_bytes)} ({off:+.0f} %)",
                         f"，计划 {size(self.planned_bytes)}（{off:+.0f} %）")  # fmt: skip
        return text


def look_back(
    view: View, *, folder: Path, warm: Mark | None = None, recompiles: int | None = None, idle: float | None = None
) -> SecondLook:
    """Evaluate a finished run.

    Args:
        view: the run, with the facts of all its steps.
        folder: where a plan may lie.
        warm: the moment of the start-up audit.
        recompiles: compilations after it, where something is compiled.
        idle: sampled share of idle time, see :class:`~optim_patches.audit.device_use.DeviceUse`.
    """
    whole = Mark.of(view)
    steady = whole.since(warm) if warm is not None and whole.steps >= 2 * warm.steps else whole
    clock = "device" if whole.device else "host"
    times = whole.device or whole.host
    total = sum(times.values())
    shares = {name: times[name] / total for name in PHASES if times.get(name)} if total else {}
    seconds = steady.step_seconds
    source = Text("utilization samples", "利用率采样")
    if idle is None and clock == "device":
        idle, source = shares.get(DATA, 0.0), Text("waiting for data only", "仅计等待数据")
    peak, whose = peak_memory(view.device)
    return SecondLook(
        steps=whole.steps, seconds=sum(whole.host.values()), clock=clock, shares=shares, steady_steps=steady.steps,
        step_s=seconds / max(steady.steps, 1), tokens_per_s=steady.tokens / seconds if seconds else 0.0,
        peak_bytes=peak, peak_of=whose, planned_bytes=planned_peak(folder, whose), recompiles=recompiles,
        idle=idle, idle_source=source if idle is not None else None,
        **_rates(view, steady, seconds, calls=_calls(view, warm or whole)),
    )  # fmt: skip


def _calls(view: View, watched: Mark) -> float:
    """Training calls of denoisers per micro-step, while they were counted."""
    return view.counts.denoiser_calls / watched.micro_steps if watched.micro_steps else 1.0


def _rates(view: View, steady: Mark, seconds: float, *, calls: float) -> dict[str, Any]:
    """Operations per step, and their rate over the device's."""
    call, model = view.counts.first_call, view.denoiser
    if call is None or model is None or not view.facts.shapes or not steady.steps or not calls:
        return {}
    forward = flops.count_forward(model, *call, latents=next(iter(view.facts.shapes)))
    if forward is None:
        return {}
    facts, counts = view.trainable(), view.counts
    trained, total = facts.get("trainable_parameters", 0), max(facts.get("total_parameters", 1), 1)
    adapters = trained if facts.get("kind") in ("lora", "peft") else 0
    recomputed = len(counts.recomputed_blocks) / counts.blocks if counts.blocks else None
    step = flops.step_flops(
        forward, steady.shapes, trained_share=0.0 if adapters else trained / total, adapter_parameters=adapters,
        recomputed_share=recomputed, ranks_per_sample=int(view.value("sequence_parallel_size", 1) or 1), calls=calls,
    )  # fmt: skip
    found: dict[str, Any] = {"step_flops": step.model / steady.steps}
    peak = flops.device_peak(view.device, view.compute_dtype())
    if peak is not None and seconds:
        rate = peak[0] * seconds
        found |= {"peak_flops": peak[0], "peak_source": peak[1], "mfu": step.model / rate,
                  "hfu": None if step.hardware is None else step.hardware / rate}
    return found


def peak_memory(device: str) -> tuple[int | None, str]:
    """Largest allocation on the device, or the largest resident set of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), "device"
    try:
        import resource
    except ImportError:
        return None, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def planned_peak(folder: Path, whose: str) -> int | None:
    """The peak of ``device`` or ``process`` that a plan in the run's folder predicted; what cannot be read is no plan.

    A plan counts the host by machine: it is that of the process where there is one.
    """
    try:
        data = json.loads((folder / PLAN_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    for section in (data, data.get("plan")) if isinstance(data, dict) else ():
        for key in _PLAN_KEYS[whose]:
            value = section.get(key) if isinstance(section, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return int(value)
    return None
