"""The cheapest set of changes with which a run fits.

Every change says by how much it slows a step down; the factors are estimates for long clips, from what is computed or
moved anew, and are multiplied. All combinations of the changes that apply are tried in the order of that product, each
with a plan of its own, so what is returned has been shown to fit. Changes that make it another run (a smaller size, a
LoRA in place of full fine-tuning) are not tried; they are named when nothing else is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optim_patches.plan.phases import Plan, make_plan
from optim_patches.plan.spec import RunSpec
from optim_patches.plan.traces import Traces

GB = 1e9


@dataclass(frozen=True)
class Change:
    """One change of the command line.

    Attributes:
        flags: names and values of the script's flags.
        slowdown: factor of the time of a step.
        spec: fields of the run that change.
        why: what is gained, in a few words.
    """

    name: str
    flags: Mapping[str, Any]
    slowdown: float
    spec: Mapping[str, Any]
    why: str
    needs: str = ""  # another change without which this one is refused
    excludes: tuple[str, ...] = ()

    def text(self) -> str:
        return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in self.flags.items())


@dataclass
class Fit:
    """A set of changes and the plan of the changed run."""

    changes: tuple[Change, ...]
    plan: Plan
    slowdown: float
    tried: int = 0
    hints: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return not self.hints


def candidates(spec: RunSpec, *, packages: frozenset[str] | None = None) -> list[Change]:
    """Changes that apply to a run and that it does not have yet."""
    lora, cuda = spec.adapters is not None, spec.device != "cpu"
    has: Callable[[str], bool] = lambda name: packages is None or name in packages  # noqa: E731
    frozen = lora and not (spec.qlora or spec.fp8_base or spec.fp8)
    rows = [
        (cuda and not spec.low_vram, Change("low_vram", {"low_vram": True}, 1.02, {"low_vram": True},
                                            "encoders wait on the host")),
        (spec.optimizer == "adamw" and not spec.fused and not spec.offload_optimizer and cuda,
         Change("fused_optimizer", {"fused_optimizer": True}, 1.0, {"fused": True},
                "no temporary copy of what is trained")),
        (spec.optimizer == "adamw" and has("bitsandbytes") and not spec.sharding,
         Change("use_8bit_adam", {"use_8bit_adam": True}, 1.01, {"optimizer": "adamw8bit"},
                "optimizer state in 8 bits", excludes=("fused_optimizer",))),
        (not spec.vae_tile and spec.vae is not None and not spec.cache_latents,
         Change("vae_tiling", {"vae_tiling": True}, 1.03, {"vae_tile": 256}, "the VAE works on tiles")),
        (not spec.checkpointing, Change("gradient_checkpointing", {"gradient_checkpointing": True}, 1.33,
                                        {"checkpointing": True, "recomputed": 1.0},
                                        "blocks are computed again in the backward")),
        (cuda and not spec.activation_offload,
         Change("activation_offload", {"activation_offload": True}, 1.04, {"activation_offload": True},
                "inputs of blocks wait on the host", needs="gradient_checkpointing")),
        (frozen and cuda, Change("fp8_base", {"fp8_base": True}, 1.08, {"fp8_base": True}, "frozen weights in FP8",
                                 excludes=("qlora",))),
        (frozen and cuda and has("bitsandbytes"),
         Change("qlora", {"qlora": True}, 1.15, {"qlora": True}, "frozen weights in 4 bits")),
        *_batches(spec), *_swaps(spec),
    ]  # fmt: skip
    return [change for applies, change in rows if applies]


def _batches(spec: RunSpec) -> list[tuple[bool, Change]]:
    batch = max(sample.batch for sample in spec.samples)
    one = tuple(replace(sample, batch=1) for sample in spec.samples)
    flags = {"train_batch_size": 1, "gradient_accumulation_steps": spec.accumulation * batch}
    change = Change("train_batch_size", flags, 1.05, {"samples": one, "accumulation": spec.accumulation * batch},
                    "fewer clips at a time, as many per optimizer step")  # fmt: skip
    return [(batch > 1, change)]


def _swaps(spec: RunSpec) -> list[tuple[bool, Change]]:
    applies = (spec.adapters is not None and spec.device != "cpu" and not spec.sharding and not spec.block_swap
               and spec.block_swap_gb is None and spec.recomputed == 1 and spec.kept_gb is None and not spec.fp8)
    steps = sorted({max(spec.blocks * part // 8, spec.block_swap_ring + 1) for part in range(1, 9)})
    names = tuple(f"block_swap {number}" for number in steps)
    return [(applies and number <= spec.blocks,
             Change(f"block_swap {number}", {"block_swap": number}, 1.02 + 0.08 * number / spec.blocks,
                    {"block_swap": number}, "frozen weights stream from the host", needs="gradient_checkpointing",
                    excludes=tuple(name for name in names if name != f"block_swap {number}")))
            for number in steps]  # fmt: skip


def combinations(changes: Sequence[Change], spec: RunSpec) -> list[tuple[Change, ...]]:
    """Sets of changes that go together, the cheapest first."""
    swaps = [change for change in changes if change.name.startswith("block_swap")]
    others = [change for change in changes if change not in swaps]
    found = []
    for size in range(len(others) + 1):
        for some in itertools.combinations(others, size):
            for swap in [(), *((change,) for change in swaps)]:
                chosen = (*some, *swap)
                if _together(chosen, spec):
                    found.append(chosen)
    return sorted(found, key=lambda chosen: (slowdown(chosen), len(chosen)))


def _together(chosen: Sequence[Change], spec: RunSpec) -> bool:
    names = {change.name for change in chosen}
    for change in chosen:
        if names & set(change.excludes):
            return False
        if change.needs and change.needs not in names and not (spec.checkpointing and spec.recomputed == 1):
            return False
    return True


def slowdown(chosen: Sequence[Change]) -> float:
    return math.prod(change.slowdown for change in chosen)


def fit(
    spec: RunSpec, traces: Traces, *, device_gb: float, host_gb: float | None = None,
    packages: frozenset[str] | None = None,
) -> Fit:
    """The cheapest set of changes that fits into ``device_gb`` (of 1e9 bytes), or the one that comes closest."""
    best: Fit | None = None
    tried = 0
    for chosen in combinations(candidates(spec, packages=packages), spec):
        tried += 1
        changed = replace(spec, **{name: value for change in chosen for name, value in change.spec.items()})
        plan = make_plan(changed, traces)
        if fits(plan, device_gb=device_gb, host_gb=host_gb):
            return Fit(chosen, plan, slowdown(chosen), tried)
        if best is None or plan.device_bytes < best.plan.device_bytes:
            best = Fit(chosen, plan, slowdown(chosen), tried)
    assert best is not None
    return replace(best, tried=tried, hints=tuple(_further(spec)))


def fits(plan: Plan, *, device_gb: float | None, host_gb: float | None = None) -> bool:
    """Whether a plan is within what there is."""
    if host_gb is not None and plan.host_bytes > host_gb * GB:
        return False
    return device_gb is None or plan.spec.device == "cpu" or plan.device_bytes <= device_gb * GB


def _further(spec: RunSpec) -> Iterator[str]:
    """Changes that make it another run."""
    sample = spec.samples[0]
    if spec.adapters is None:
        yield "train a LoRA (train_lora.py) instead of all weights"
        if spec.stage < 3:
            yield "start with DeepSpeed ZeRO-3 and CPU offload (config/zero_stage3_config_cpu_offload.json)"
    if sample.frames > 17:
        yield f"fewer frames than {sample.frames} (--video_sample_n_frames)"
    yield f"smaller clips than {sample.height}x{sample.width} (--video_sample_size)"
    if spec.sequence_parallel == 1 and spec.world > 1:
        yield "share the tokens of a clip between processes (--sequence_parallel_size)"
