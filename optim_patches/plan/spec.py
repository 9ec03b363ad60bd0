"""What the planner must know about a run: plain values, so that a plan can be kept and changed.

A change that might make a run fit is another :class:`RunSpec` (``dataclasses.replace``), and its plan is made the same
way as the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "no": 4}


@dataclass(frozen=True)
class Sample:
    """One size that is trained: pixels, and samples per step and process."""

    frames: int
    height: int
    width: int
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.frames}" + (f" x{self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Part:
    """A network: its class as ``module:Class`` and the arguments it is built with."""

    cls: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters: what ``--rank``, ``--target_name`` and their relatives say."""

    rank: int
    alpha: float
    targets: str | None = None
    skips: str | None = None
    exact: bool = False
    peft: bool = False
    dora: bool = False


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides how much memory a run takes.

    Attributes:
        denoiser, vae, text, image: the networks; ``None`` where the run loads none.
        samples: the sizes that are trained.
        device: ``cuda`` or ``cpu``.
        precision: ``bf16``, ``fp16`` or ``no``.
        words: full fine-tuning: parts of the names of trained parameters.
        conditioned: whether the denoiser is shown a mask, a masked video and an image.
        recomputed: share of the blocks that is checkpointed when ``checkpointing`` is on.
        world, local: processes of the run and of one machine.
        stage: 0, or the ZeRO stage that DeepSpeed or FSDP corresponds to (``sharding`` names which).
    """

    denoiser: Part
    samples: tuple[Sample, ...]
    vae: Part | None = None
    text: Part | None = None
    image: Part | None = None
    device: str = "cuda"
    precision: str = "bf16"
    adapters: Adapters | None = None
    words: tuple[str, ...] = (".",)
    conditioned: bool = False
    text_tokens: int = 512
    master_fp32: bool = False
    ema: bool = False
    optimizer: str = "adamw"
    fused: bool = False
    accumulation: int = 1
    checkpointing: bool = False
    recomputed: float = 1.0
    keep_attention: bool = False
    kept_gb: float | None = None
    activation_offload: bool = False
    block_swap: int = 0
    block_swap_gb: float | None = None
    block_swap_ring: int = 2
    low_vram: bool = False
    vae_mini_batch: int = 32
    vae_tile: int = 0
    vae_overlap: int = 32
    cache_latents: bool = False
    cache_text: bool = False
    compile: bool = False
    liger: bool = False
    qlora: bool = False
    double_quant: bool = False
    fp8: bool = False
    fp8_base: bool = False
    sequence_parallel: int = 1
    world: int = 1
    local: int = 1
    sharding: str = ""
    stage: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False
    workers: int = 0
    prefetch: int = 2
    validation: bool = False
    spatial: int = 8  # pixels per latent

    @property
    def width(self) -> int:
        """Bytes of a number in the run's precision."""
        return DTYPE_BYTES[self.precision]

    @property
    def wide_training(self) -> bool:
        """Whether trained parameters are float32 in a run of half precision."""
        return self.width == 2 and (self.master_fp32 or self.precision == "fp16" or self.sharding == "fsdp")

    @property
    def blocks(self) -> int:
        return int(self.denoiser.kwargs["num_layers"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
