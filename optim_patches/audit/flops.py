"""Floating point operations of a training step, and the rate they are measured against.

How they are counted. The denoiser's class is built once more from its configuration, without weights (on the meta
device), and called once with the shapes of a training call under ``torch.utils.flop_counter``. That gives the forward
of the architecture itself, whatever kernels, compilation or quantization the run uses. Matrix products with weights
(``linear``) and those between tokens (``attention``) are kept apart, since they grow differently: a step with other
shapes counts ``linear`` by its tokens and ``attention`` by its tokens times their number per sample.

    forward   F = linear + attention
    backward  the input's gradient costs another ``linear``; a trained weight's gradient once more, by the share of
              weights that is trained; attention costs twice its forward
    adapters  6 operations per parameter and token (forward and backward)
    model     forward + backward + adapters, per training call of a denoiser (one per micro-step, unless several
              networks are trained; seen in the first steps)              -> MFU
    hardware  model + the share of blocks that was seen recomputing x F  -> HFU

The encoders' work is not counted. Neither are element-wise operations.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optim_patches.audit.text import Text

logger = logging.getLogger(__name__)

#: Dense 16-bit matrix rate with fp32 accumulation in TFLOP/s, from the vendors' data sheets.
PEAKS: tuple[tuple[str, float], ...] = (
    (r"G?B200", 2250.0), (r"GH200|H200", 989.0), (r"\bH20\b", 148.0), (r"H100 (PCIe|NVL)", 756.0),
    (r"H100|H800", 989.0), (r"A100|A800", 312.0), (r"\bA30\b", 165.0), (r"RTX 6000 Ada", 364.0),
    (r"L40S", 362.0), (r"\bL40\b", 181.0), (r"\bL4\b", 121.0), (r"4090", 165.2), (r"A6000", 154.8), (r"\bA40\b", 149.7),
    (r"\bA10G?\b", 125.0), (r"3090", 71.0), (r"V100", 125.0), (r"\bT4\b", 65.0),
)  # fmt: skip
#: TF32 runs at half of the 16-bit rate, where a card has it.
_TF32_SHARE = 0.5
_PROBE_SIZE = 512


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward of the denoiser on ``batch`` samples of ``tokens`` tokens."""

    linear: float
    attention: float
    batch: int
    tokens: int

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def at(self, batch: int, tokens: int) -> ForwardFlops:
        """The same network on another shape."""
        more = batch * tokens / max(self.batch * self.tokens, 1)
        return ForwardFlops(self.linear * more, self.attention * more * tokens / max(self.tokens, 1), batch, tokens)


@dataclass(frozen=True)
class StepFlops:
    """Operations of all micro-steps of a stretch of training."""

    forward: float
    model: float
    hardware: float | None


def shapes_of(value: Any) -> Any:
    """Arguments with every tensor replaced by one without contents."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda v: torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else v, value)


def count_forward(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any], *, latents: tuple[int, ...]
) -> ForwardFlops | None:
    """Count one call of ``model``'s architecture; ``None`` where it cannot be built without weights.

    Args:
        model: the network, patched or not; only its class and configuration are used.
        args, kwargs: of a call, see :func:`shapes_of`.
        latents: shape of the latents of that call.
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.device("meta"):
            skeleton = _architecture(model).from_config(dict(model.config))
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            skeleton(*args, **kwargs)
    except Exception as error:  # a network of another make: the rate is then not claimed
        logger.debug("%s cannot be counted: %s", type(model).__name__, error)
        return None
    linear = attention = 0.0
    for operator, number in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator)
        if "attention" in name or "bmm" in name:
            attention += number
        else:
            linear += number
    batch, tokens = tokens_of(latents)
    return ForwardFlops(linear, attention, batch, tokens) if linear and tokens else None


def _architecture(model: nn.Module) -> type[nn.Module]:
    """The network's own class, below those that FSDP makes of it."""
    inner = getattr(model, "_fsdp_wrapped_module", model)
    return next(kind for kind in type(inner).__mro__ if not kind.__name__.startswith("FSDP"))


def tokens_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Samples and tokens per sample of latents ``[B, C, T, h, w]`` (patches of 1 x 2 x 2)."""
    return shape[0], math.prod(shape[2:]) // 4


def step_flops(
    forward: ForwardFlops, shapes: Mapping[tuple[int, ...], int], *, trained_share: float, adapter_parameters: int,
    recomputed_share: float | None, ranks_per_sample: int = 1, calls: float = 1.0,
) -> StepFlops:
    """Operations of this process for micro-steps of these shapes, each with ``calls`` training calls of a denoiser.

    See the module's text for the rules.
    """
    once = model = again = 0.0
    for shape, number in shapes.items():
        batch, tokens = tokens_of(shape)
        here = forward.at(batch, tokens)
        adapters = 6.0 * adapter_parameters * batch * tokens
        once += number * here.total
        model += number * (here.linear * (2 + trained_share) + 3 * here.attention + adapters)
        again += number * here.total * (recomputed_share or 0.0)
    parts = ranks_per_sample / calls
    return StepFlops(once / parts, model / parts, None if recomputed_share is None else (model + again) / parts)


def device_peak(device: str, dtype: torch.dtype) -> tuple[float, Text] | None:
    """Operations per second that this device can reach, and where the number is from; ``None`` when unknown."""
    if device != "cuda":
        shape = f"{_PROBE_SIZE} x {_PROBE_SIZE}"
        return measured_peak(dtype), Text(f"measured: {shape} matrix product", f"实测：{shape} 矩阵乘")
    name = torch.cuda.get_device_name()
    peak = listed_peak(name)
    if peak is None:
        return None
    if dtype == torch.float32:
        if not torch.backends.cuda.matmul.allow_tf32:
            return None
        return peak * _TF32_SHARE, Text(f"{name}, TF32 by data sheet", f"{name}，手册 TF32")
    return peak, Text(f"{name}, dense 16-bit by data sheet", f"{name}，手册 16 位稠密")


def listed_peak(name: str) -> float | None:
    """The data sheet's rate in operations per second."""
    for pattern, teraflops in PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            return teraflops * 1e12
    return None


def measured_peak(dtype: torch.dtype, *, size: int = _PROBE_SIZE, repeats: int = 3) -> float:
    """The rate of the best matrix product on this CPU, in ``dtype`` or in float32: many CPUs are slower in bfloat16."""
    best = math.inf
    for kind in {dtype, torch.float32}:
        left, right = torch.ones(size, size, dtype=kind), torch.ones(size, size, dtype=kind)
        for _ in range(repeats):
            start = time.perf_counter()
            nn.functional.linear(left, right)
            best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / max(best, 1e-9)
