"""The traces that a plan is made of, each asked for once and kept on disk.

What a trace depends on is less than the run: sharding, offloading or another optimizer change sums, not shapes. So the
variants of a run that are tried for a fit share their traces.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from optim_patches.plan.denoiser import Adapt, Census, StepTrace, trace_step
from optim_patches.plan.encoders import CallTrace, tile_size, trace_image, trace_sampling, trace_text, trace_vae
from optim_patches.plan.ledger import Segment
from optim_patches.plan.spec import RunSpec, Sample
from optim_patches.plan.store import remembered


class Traces:
    """Asks for traces of a run and of its variants."""

    def __init__(self, adapt: Adapt | None = None) -> None:
        self.adapt = adapt
        self._known: dict[Any, Any] = {}

    def step(self, spec: RunSpec, sample: Sample, *, checkpointing: bool | None = None) -> StepTrace:
        """The denoiser's step; ``checkpointing`` overrides the run's."""
        on = spec.checkpointing if checkpointing is None else checkpointing
        asked = replace(spec, checkpointing=on)
        question = [asdict(spec.denoiser), asdict(sample), spec.device, spec.precision, on, spec.text_tokens,
                    spec.spatial, None if spec.adapters is None else asdict(spec.adapters), list(spec.words),
                    spec.adapters is not None and spec.wide_training]  # fmt: skip
        answer = self._ask("step", question, lambda: asdict(trace_step(asked, sample, adapt=self.adapt)))
        segments = {name: Segment(**segment) for name, segment in answer["segments"].items()}
        return StepTrace(**{**answer, "segments": segments, "census": Census(**answer["census"])})

    def vae(self, spec: RunSpec, sample: Sample, *, decode: bool = False) -> CallTrace:
        question = [spec.vae and asdict(spec.vae), asdict(sample), tile_size(spec, sample), spec.device, spec.precision,
                    spec.conditioned, decode]  # fmt: skip
        return CallTrace(**self._ask("vae", question, lambda: asdict(trace_vae(spec, sample, decode=decode))))

    def text(self, spec: RunSpec, *, batch: int = 1) -> CallTrace:
        question = [spec.text and asdict(spec.text), batch, spec.text_tokens, spec.device, spec.precision]
        return CallTrace(**self._ask("text", question, lambda: asdict(trace_text(spec, batch=batch))))

    def image(self, spec: RunSpec) -> CallTrace:
        question = [spec.image and asdict(spec.image), spec.device, spec.precision]
        return CallTrace(**self._ask("image", question, lambda: asdict(trace_image(spec))))

    def sampling(self, spec: RunSpec, sample: Sample) -> int:
        question = [asdict(spec.denoiser), asdict(sample), spec.device, spec.precision, spec.text_tokens, spec.spatial]
        return int(self._ask("sampling", question, lambda: {"bytes": trace_sampling(spec, sample)})["bytes"])

    def _ask(self, what: str, question: Any, compute: Any) -> dict[str, Any]:
        key = (what, repr(question))
        if key not in self._known:
            self._known[key] = remembered(what, question, compute)
        return self._known[key]
