"""What a live check may look at, and what it answers.

``RunFacts`` are numbers that only the engine knows. ``View`` joins them with the live objects and the probe's counts.
A check is a function from a view to a :class:`LiveRow`, registered under the id it shares with the static audit.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from optim_patches.audit.live_probe import Probe, short
from optim_patches.audit.text import Text, same
from optim_patches.base import Target

ENABLED, DISABLED, RECOMMENDED, NOT_APPLICABLE = "enabled", "disabled", "recommended", "not applicable"
INERT, REFUSED = "inert", "refused"
NOBODY = same("")
STATES = {
    ENABLED: Text("enabled", "已启用"),
    DISABLED: Text("disabled", "未启用"),
    RECOMMENDED: Text("recommended", "建议启用"),
    NOT_APPLICABLE: Text("not applicable", "不适用"),
    INERT: Text("INERT", "无效"),
    REFUSED: Text("REFUSED", "已拒绝"),
}


@dataclass
class RunFacts:
    """Numbers of the engine, all optional: what is missing is not claimed.

    Attributes:
        steps: optimizer steps of this process.
        micro_steps: forward/backward passes of this process.
        total_steps: optimizer steps of the whole run.
        seconds: wall time of those steps.
        data_wait_s: part of ``seconds`` spent waiting for the loader.
        tokens: denoiser tokens processed.
        shapes: ``{(B, C, T, h, w): micro-steps}`` of the latents.
        world: number of processes.
        distributed: accelerate's distributed type, for example ``NO``, ``MULTI_GPU``, ``DEEPSPEED``, ``FSDP``.
        deepspeed: the DeepSpeed configuration in effect.
        fsdp: ``strategy``, ``prefetch``, ``version`` of the FSDP plugin in effect.
        clip: per trained network, counts with the attributes ``steps, clipped, abnormal, skipped, average_norm``.
        trainable: per trained network, its kind and sizes (``kind, layers, rank, alpha, trainable_parameters ...``).
        groups: ``(tensors, parameters, learning rate)`` of each optimizer group.
        lr: learning rates now; ``lr_curve``: those at 0, 25, 50, 75, 100 % of the run; ``lr_lambda``: schedule class.
        ema: the EMA object, or ``None``.
        loss_scale: value of the fp16 loss scale.
        timesteps: timesteps drawn so far.
        motion_share: share of the motion loss in the loss.
        texts, text_dropped: prompts seen, and how many of them were empty.
        tiling: factors by which batches were repeated (``--auto_tile_batch_size``).
        loader_workers: workers alive, where the loader is not torch's.
        cache: ``hits`` and ``misses`` of the cache of encodings, each by kind; empty without one.
        vae_streams: CUDA streams used for encoding.
        reward, reward_steps: mean reward of the last step, and steps that had one.
        phases: seconds per phase of the loop, by ``host`` and ``device`` clock.
    """

    steps: int = 0
    micro_steps: int = 0
    total_steps: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    tokens: int = 0
    shapes: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    world: int = 1
    distributed: str = "NO"
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    clip: Mapping[str, Any] = field(default_factory=dict)
    trainable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: list[tuple[int, int, float]] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    lr_curve: list[float] = field(default_factory=list)
    lr_lambda: str = ""
    ema: Any = None
    loss_scale: float | None = None
    timesteps: list[float] = field(default_factory=list)
    motion_share: float | None = None
    texts: int = 0
    text_dropped: int = 0
    tiling: list[int] = field(default_factory=list)
    loader_workers: int | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    vae_streams: int = 0
    reward: float | None = None
    reward_steps: int = 0
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: RunFacts | Mapping[str, Any]) -> RunFacts:
        """From a mapping; ``ValueError`` names a key that no check reads."""
        if isinstance(values, RunFacts):
            return values
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"No live check reads {', '.join(unknown)}; the facts are {', '.join(sorted(known))}.")
        return cls(**values)


@dataclass(frozen=True)
class LiveRow:
    """One line of the live audit.

    Attributes:
        requested: the flag and whether it was given or is a default.
        sites: number of places that were changed, ``None`` where the word has no meaning.
        exercised: whether it took part in a real step, ``None`` where unknown.
    """

    id: str
    state: str
    evidence: Text
    requested: Text = NOBODY
    sites: int | None = None
    exercised: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, title: Text) -> dict[str, Any]:
        values = asdict(self)
        values["title"] = title.as_dict()
        return values


Check = Callable[["View"], LiveRow]
CHECKS: dict[str, Check] = {}


def check(row_id: str) -> Callable[[Check], Check]:
    """Register a live check under its audit id."""

    def add(function: Check) -> Check:
        if row_id in CHECKS:
            raise ValueError(f"Two live checks are registered for {row_id}.")
        CHECKS[row_id] = function
        return function

    return add


class View:
    """The run, as a check sees it."""

    def __init__(
        self, *, args: argparse.Namespace, explicit: frozenset[str], target: Target, facts: RunFacts, probe: Probe
    ) -> None:
        self.args = args
        self.explicit = explicit
        self.target = target
        self.facts = facts
        self.probe = probe
        self.counts = probe.counts
        self.device = target.device
        self.cuda = target.device == "cuda"

    def value(self, dest: str, default: Any = None) -> Any:
        return getattr(self.args, dest, default)

    def has(self, dest: str) -> bool:
        """Whether the script has the flag at all."""
        return hasattr(self.args, dest)

    def given(self, dest: str) -> bool:
        return dest in self.explicit

    def asked(self, *dests: str) -> Text:
        """The flags with their values and whether they were given or are defaults."""
        parts = []
        for dest in dests:
            if not self.has(dest):
                continue
            value = getattr(self.args, dest)
            if value is False and dest not in self.explicit:
                continue
            text = f"--{dest}" if value is True else f"--{dest} {value}"
            parts.append(Text(f"{text} ({'given' if self.given(dest) else 'default'})",
                              f"{text}（{'给出' if self.given(dest) else '默认'}）"))  # fmt: skip
        return Text(", ".join(p.en for p in parts), "、".join(p.zh for p in parts))

    @property
    def denoiser(self) -> nn.Module | None:
        """The first trained network."""
        models = self.target.denoisers()
        return models.get("transformer") or next(iter(models.values()), None)

    def base_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of the denoiser that are not adapters."""
        if self.denoiser is None:
            return []
        adapter = ("network.", "lora_")
        return [(n, p) for n, p in self.denoiser.named_parameters() if not any(mark in n for mark in adapter)]

    def dtype_counts(self) -> Counter[str]:
        """Parameters of the base network by dtype, counted in tensors."""
        return Counter(short(p.dtype) for _, p in self.base_parameters())

    def compute_dtype(self) -> torch.dtype:
        """What the blocks compute in: autocast where it was on, else the type of their inputs."""
        cast = Counter({name: number for name, number in self.counts.autocast.items() if name != "off"})
        for seen in (cast, self.counts.input_dtypes, self.dtype_counts()):
            if seen:
                return getattr(torch, seen.most_common(1)[0][0])
        return torch.float32

    def parameter_count(self) -> int:
        return sum(p.numel() for _, p in self.base_parameters())

    def optimizers(self) -> list[Any]:
        """The optimizers without the wrappers of accelerate and DeepSpeed."""
        found = list(self.target.optimizers)
        while any(hasattr(each, "optimizer") for each in found):
            found = [getattr(each, "optimizer", each) for each in found]
        return found

    def adapters(self) -> dict[str, nn.Module]:
        """Adapted layers by name: native adapters or PEFT's layers."""
        model = self.denoiser
        if model is None:
            return {}
        native = getattr(getattr(model, "network", None), "unet_modules", None)
        if native:
            return dict(native)
        return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}

    def trainable(self) -> Mapping[str, Any]:
        """Facts about what the first network trains."""
        return next(iter(self.facts.trainable.values()), {})

    def frames(self) -> list[int]:
        """Latent frame counts drawn."""
        return sorted({shape[2] for shape in self.facts.shapes if len(shape) == 5})

    def sizes(self) -> list[tuple[int, int]]:
        """Latent heights and widths drawn."""
        return sorted({(shape[3], shape[4]) for shape in self.facts.shapes if len(shape) == 5})

    def tokens(self) -> list[int]:
        """Denoiser tokens of one sample, per shape drawn (patches of 1 x 2 x 2)."""
        return sorted({math.prod(shape[2:]) // 4 for shape in self.facts.shapes if len(shape) == 5})

    def device_memory(self) -> int | None:
        """Bytes of the device, ``None`` on a CPU."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if self.cuda else None

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability() if self.cuda else (0, 0)


def row(row_id: str, state: str, evidence: Text, requested: Text = NOBODY, **rest: Any) -> LiveRow:
    """A :class:`LiveRow`; extra keywords that are no field become facts."""
    own = {key: rest.pop(key) for key in ("sites", "exercised") if key in rest}
    return LiveRow(row_id, state, evidence, requested, facts=rest, **own)


def counted(counts: Mapping[Any, int]) -> str:
    """``{"bfloat16": 8, "float32": 2}`` as ``8 bfloat16, 2 float32``."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items(), key=lambda item: str(item[0])))
