"""What the parts of a run share: the context of the process, and the networks that are trained."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from optim_patches.base import unwrap
from videox_fun.dist.mesh import Layout

if TYPE_CHECKING:
    from accelerate import Accelerator

    from optim_patches.registry import PatchManager
    from videox_fun.data.cache import EncodingCache
    from videox_fun.dist.shared_work import SharedWork
    from videox_fun.training.ema import EMA
    from videox_fun.training.residency import Residency
    from videox_fun.training.specs import ScriptSpec
    from videox_fun.training.state import RngStreams
    from videox_fun.training.trainable import Trainable


@dataclass
class RunContext:
    """The process-wide facts of a run."""

    spec: ScriptSpec
    args: argparse.Namespace
    accelerator: Accelerator
    weight_dtype: torch.dtype
    config: Any
    rng: RngStreams
    patches: PatchManager
    residency: Residency
    global_step: int = 0
    epoch: int = 0
    autocast_enabled: bool = False
    sequence_size: int = 1
    shared_work: SharedWork | None = None  # of the sequence group
    cache: EncodingCache | None = None
    spared: frozenset[str] = frozenset()

    @property
    def compat(self) -> bool:
        """Whether upstream's behaviour is reproduced bug for bug (``--upstream_compat``)."""
        return bool(self.args.upstream_compat)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def layout(self) -> Layout:
        """Data rank and data world: processes that share the tokens of a sample see the same batch."""
        return Layout(rank=self.rank, world=self.world, sequence=self.sequence_size)

    def autocast(self) -> AbstractContextManager:
        """Autocast for the denoiser, needed only where trainable weights are kept wider than ``weight_dtype``."""
        if not self.autocast_enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.weight_dtype)


@dataclass
class ParamGroup:
    """Parameters that share a learning rate."""

    params: list[nn.Parameter]
    lr: float
    names: list[str]


@dataclass
class Player:
    """One trained network. Most objectives have one; a generator/critic objective has two."""

    name: str
    model: nn.Module
    trainable: Trainable
    groups: list[ParamGroup] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    ema: EMA | None = None

    def unwrapped(self) -> nn.Module:
        """The network itself, without DDP, DeepSpeed or compile wrappers."""
        return unwrap(self.model)

    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, group by group."""
        return [parameter for group in self.groups for parameter in group.params]


@dataclass
class NoiseSchedule:
    """A table of noise levels. Index 0 is pure noise.

    Attributes:
        timesteps: ``[N]`` float32, the value handed to the denoiser.
        sigmas: ``[N]`` float32 share of noise.
        start, stop: half-open range of indices that this run trains on (one expert of two, or everything).
    """

    timesteps: torch.Tensor
    sigmas: torch.Tensor
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = len(self.timesteps)


@dataclass
class Components:
    """The loaded networks of a family. Absent parts are ``None``."""

    denoiser: nn.Module
    schedule: NoiseSchedule
    vae: nn.Module | None = None
    text_encoder: nn.Module | None = None
    tokenizer: Any = None
    image_encoder: nn.Module | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def frozen(self) -> dict[str, nn.Module]:
        """Networks that only encode or decode, by role."""
        roles = {"vae": self.vae, "text_encoder": self.text_encoder, "image_encoder": self.image_encoder}
        return {role: module for role, module in roles.items() if module is not None}


@dataclass
class Conditioning:
    """What one batch gives the denoiser, besides noise.

    Attributes:
        latents: clean sample ``[B, C, T, h, w]`` in ``weight_dtype``.
        text: prompt embeddings, a list of ``[L_i, D]`` or a padded tensor.
        inputs: the family's own forward arguments.
    """

    latents: torch.Tensor
    text: Any
    inputs: dict[str, Any] = field(default_factory=dict)
