"""The plan: peaks per phase and size, on the device and on the host, by component."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optim_patches.plan import ledger
from optim_patches.plan.denoiser import StepTrace
from optim_patches.plan.encoders import CallTrace
from optim_patches.plan.spec import RunSpec, Sample
from optim_patches.plan.static import Static, frozen_block_bytes, static, update_workspace
from optim_patches.plan.traces import Traces

GIB = 2**30
PHASES = ("load", "vae", "text", "denoiser", "optimizer", "validation")
#: Components in the order of a stacked bar.
COMPONENTS = ("process", "weights", "encoders", "optimizer", "averages", "gradients", "communication", "inputs",
              "activations", "recomputed", "workspace", "loader", "margin")  # fmt: skip
#: Space between what is allocated and what the device must have: holes between blocks, and the CUDA context.
FRAGMENTATION, CONTEXT = 0.05, 600 << 20
_PROCESS, _WORKER = 2 << 30, 500 << 20
_ON_ITS_WAY = 3  # blocks whose inputs are on the device although they are offloaded
#: How many blocks' activations are alive at the moments of a step: a share of all, and a difference.
_ALIVE = {"forward/before": (0, 0), "forward/first": (0, 0), "forward/second": (0, 1), "forward/next to last": (1, -2),
          "forward/last": (1, -1), "forward/after": (1, 0), "turn": (1, 0), "backward/last": (1, -1),
          "backward/next to last": (1, -2), "backward/second": (0, 1), "backward/first": (0, 0), "update": (0, 0)}


@dataclass(frozen=True)
class Peak:
    """The peak of one phase at one size, in one place (``device`` or ``host``), by component."""

    phase: str
    place: str
    size: str
    parts: Mapping[str, int]
    moment: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Without margin: what the device's allocator says."""
        return self.total - self.parts.get("margin", 0)


@dataclass
class Plan:
    """All peaks of a run. Bytes of the host are those of one machine with all its processes."""

    spec: RunSpec
    peaks: list[Peak] = field(default_factory=list)
    trained: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def peak(self, place: str) -> Peak:
        """The largest peak of a place."""
        return max((peak for peak in self.peaks if peak.place == place), key=lambda peak: peak.total)

    @property
    def device_bytes(self) -> int:
        return 0 if self.spec.device == "cpu" else self.peak("device").total

    @property
    def host_bytes(self) -> int:
        return self.peak("host").total

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``plan.json``."""
        place = "host" if self.spec.device == "cpu" else "device"
        rows = [{"phase": p.phase, "place": p.place, "size": p.size, "moment": p.moment, "total": p.total,
                 "parts": dict(p.parts)} for p in self.peaks]  # fmt: skip
        return {"version": 1, "device_peak_bytes": self.peak(place).allocated, "host_peak_bytes": self.host_bytes,
                "needed_bytes": self.device_bytes, "trained_parameters": self.trained, "peaks": rows,
                "notes": self.notes, "run": self.spec.as_dict()}  # fmt: skip


def make_plan(spec: RunSpec, traces: Traces) -> Plan:
    """Plan a run."""
    started = time.monotonic()
    plan = Plan(spec, notes=_notes(spec))
    for sample in spec.samples:
        _Sized(spec, sample, traces).add_to(plan)
    plan.seconds = time.monotonic() - started
    return plan


def _notes(spec: RunSpec) -> list[str]:
    notes = []
    if spec.compile:
        notes.append("--compile: counted as uncompiled code, which is an upper bound.")
    if spec.device == "cuda" and spec.vae is not None:
        notes.append("The VAE's convolutions are given a workspace as large as their largest result; cuDNN decides.")
    return notes


class _Sized:
    """One size of a run."""

    def __init__(self, spec: RunSpec, sample: Sample, traces: Traces) -> None:
        self.spec, self.sample, self.traces = spec, sample, traces
        self.step = traces.step(spec, sample)
        self.static: Static = static(spec, self.step.census)
        self.vae, self.text, self.image = traces.vae(spec, sample), traces.text(spec, batch=sample.batch), None
        self.image = traces.image(spec)
        self.cuda = spec.device != "cpu"

    def add_to(self, plan: Plan) -> None:
        plan.trained = self.step.census.trained
        device = [self._vae(), self._text(), *self._denoiser(), self._update(), *self._validation()]
        device = [peak for peak in device if peak is not None]
        if self.cuda:
            plan.peaks += [self._with_margin(peak) for peak in device]
        host = self._host_parts()
        plan.peaks.append(Peak("load", "host", str(self.sample), self._load_parts(host)))
        for peak in device:
            here = host if self.cuda else {**host, **peak.parts}
            plan.peaks.append(Peak(peak.phase, "host", peak.size, self._on_machine(here), peak.moment))

    # ---- device ---------------------------------------------------------------------------------------------------

    def _standing(self, *, gradients: bool) -> dict[str, int]:
        """What is there in every phase. Between micro-steps gradients wait too."""
        s = self.static
        parts = {"weights": s.weights, "optimizer": s.optimizer, "averages": s.averages,
                 "communication": s.communication, "encoders": self._resident(), "inputs": self._batch()}  # fmt: skip
        if gradients and self.spec.accumulation > 1:
            parts["gradients"] = s.gradients
        return parts

    def _resident(self) -> int:
        """Encoders that stay on the device."""
        if self.spec.low_vram and self.cuda:
            return 0
        return self.vae.weights + self.text.weights + self.image.weights

    def _batch(self) -> int:
        """Pixels of a batch as the loader gives them: float32; conditioned runs have the masked clip too."""
        sample = self.sample
        pixels = sample.batch * sample.frames * sample.height * sample.width
        return pixels * 4 * (6 if self.spec.conditioned else 3)

    def _call(self, phase: str, trace: CallTrace, *, loaded: int) -> Peak | None:
        if not trace.weights:
            return None
        parts = self._standing(gradients=True)
        if self.spec.low_vram and self.cuda:
            parts["encoders"] = loaded
        parts["inputs"] += max(trace.inputs - self._batch(), 0)
        parts["workspace"] = trace.workspace + trace.largest_convolution
        return self._peak(phase, parts)

    def _vae(self) -> Peak | None:
        if self.spec.cache_latents:
            return None
        return self._call("vae", self.vae, loaded=self.vae.weights + self.image.weights)

    def _text(self) -> Peak | None:
        return None if self.spec.cache_text else self._call("text", self.text, loaded=self.text.weights)

    def _denoiser(self) -> list[Peak]:
        """The moment of the step with the largest sum."""
        extra = self._extra_activations()
        peaks = []
        for moment, segment in self.step.segments.items():
            if moment not in _ALIVE:
                continue
            parts = self._standing(gradients=False)
            dynamic = {name: value for name, value in segment.parts.items() if name != ledger.WEIGHTS}
            parts["inputs"] += dynamic.pop(ledger.INPUTS, 0)
            parts |= self._scaled(dynamic, moment, extra)
            peaks.append(self._peak("denoiser", parts, moment))
        return [max(peaks, key=lambda peak: peak.total)]

    def _scaled(self, dynamic: dict[str, int], moment: str, extra: float) -> dict[str, int]:
        """A moment's parts under what the run does to them."""
        spec, s, step = self.spec, self.static, self.step
        parts = dict(dynamic)
        share, difference = _ALIVE[moment]
        alive = max(share * spec.blocks + difference, 0)
        kept = parts.get(ledger.ACTIVATIONS, 0) + extra * alive
        if spec.activation_offload and spec.checkpointing and self.cuda:
            kept -= max(alive - _ON_ITS_WAY, 0) * step.block_input
        again = parts.get(ledger.RECOMPUTED, 0)
        if spec.liger and self.cuda:
            if spec.checkpointing:
                again = max(again - 2 * step.block_input, 0)
            else:
                kept -= 2 * alive * step.block_input
        work = parts.get(ledger.WORKSPACE, 0)
        divide = max(spec.sequence_parallel, 1)
        work = work // divide + self._quantized_workspace()
        if divide > 1:
            work += 4 * step.block_input // divide
        if spec.wide_training and spec.adapters is None and spec.sharding != "fsdp":
            work += step.census.trained * spec.width  # autocast keeps its narrow copies for the length of a forward
        gradients = parts.get(ledger.GRADIENTS, 0) * s.trained_width // spec.width
        if spec.stage >= 2:
            gradients = min(gradients, s.gradients + 2 * step.census.block_trained * s.trained_width)
        if spec.accumulation > 1:
            gradients = s.gradients + step.census.largest_trained * s.trained_width
        return {**parts, ledger.ACTIVATIONS: int(max(kept, 0) // divide), ledger.RECOMPUTED: int(again // divide),
                ledger.WORKSPACE: int(work), ledger.GRADIENTS: int(gradients)}  # fmt: skip

    def _quantized_workspace(self) -> int:
        census, spec = self.step.census, self.spec
        if spec.qlora or spec.fp8_base:
            return census.largest_linear * spec.width
        return census.largest_linear + self.step.block_input if spec.fp8 else 0

    def _extra_activations(self) -> float:
        """Bytes per block that a run with partial checkpointing keeps beside the blocks' inputs."""
        spec = self.spec
        if not spec.checkpointing or (spec.recomputed == 1 and not spec.keep_attention and spec.kept_gb is None):
            return 0.0
        attention = self.step.attention_out
        whole = kept_per_block(self.traces.step(spec, self.sample, checkpointing=False)) - self.step.block_input
        if spec.kept_gb is not None:
            return min(spec.kept_gb * 1e9 / spec.blocks, whole)
        number = spec.blocks - round(spec.recomputed * spec.blocks)
        return (number * whole + (spec.blocks - number) * attention * spec.keep_attention) / spec.blocks

    def _update(self) -> Peak:
        parts = self._standing(gradients=False)
        spec, s = self.spec, self.static
        parts["gradients"] = s.gradients
        trained = s.gradients // s.trained_width
        parts["workspace"] = update_workspace(spec, self.step.census, trained=trained, width=s.trained_width)
        left = self.step.segments["update"].parts
        parts["inputs"] += left.get(ledger.INPUTS, 0)
        return self._peak("optimizer", parts)

    def _validation(self) -> list[Peak]:
        if not self.spec.validation:
            return []
        parts = self._standing(gradients=False)
        one = replace(self.sample, batch=1)
        sampling = self._peak("validation", {**parts, "workspace": self.traces.sampling(self.spec, one)}, "sampling")
        decode = self.traces.vae(replace(self.spec, conditioned=False), one, decode=True)
        peak = self._call("validation", decode, loaded=decode.weights)
        return [max((p for p in (sampling, peak) if p is not None), key=lambda p: p.total)]

    def _peak(self, phase: str, parts: dict[str, int], moment: str = "") -> Peak:
        return Peak(phase, "device", str(self.sample), _ordered(parts), moment)

    def _with_margin(self, peak: Peak) -> Peak:
        moving = sum(peak.parts.get(name, 0) for name in ("activations", "recomputed", "workspace", "gradients"))
        return replace(peak, parts={**peak.parts, "margin": int(FRAGMENTATION * moving) + CONTEXT})

    # ---- host -----------------------------------------------------------------------------------------------------

    def _host_parts(self) -> dict[str, int]:
        """One process between steps."""
        spec = self.spec
        parts = {"process": _PROCESS, "loader": spec.workers * (_WORKER + spec.prefetch * self._batch())}
        if self.cuda:
            parts["weights"] = self.static.host
            if spec.low_vram:
                parts["encoders"] = self.vae.weights + self.text.weights + self.image.weights
            if spec.activation_offload:
                parts["activations"] = spec.blocks * self.step.block_input
        return parts

    def _load_parts(self, host: dict[str, int]) -> dict[str, int]:
        """Every process reads all weights before they are moved, wrapped or divided."""
        census, spec = self.step.census, self.spec
        denoiser = spec.blocks * frozen_block_bytes(spec, census) + census.rest_frozen * spec.width
        denoiser += census.trained * spec.width if spec.adapters is None else 0
        encoders = self.vae.weights + self.text.weights + self.image.weights
        return self._on_machine({"process": host["process"], "weights": denoiser, "encoders": encoders})

    def _on_machine(self, parts: dict[str, int]) -> dict[str, int]:
        return _ordered({name: value * self.spec.local for name, value in parts.items()})


def kept_per_block(step: StepTrace) -> int:
    """Bytes that one block keeps for its backward."""
    first, second = (step.segments[name].parts.get(ledger.ACTIVATIONS, 0) for name in ("forward/first",
                                                                                      "forward/second"))
    return second - first


def _ordered(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: int(parts[name]) for name in COMPONENTS if parts.get(name, 0) > 0}
