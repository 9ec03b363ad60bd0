"""What stays in memory from step to step: weights, optimizer state, averages; and who holds which share of it.

Formulas, in bytes, for ``t`` trained and ``f`` frozen numbers, with ``w`` bytes per number of the run's precision and
``W`` bytes per trained number (4 where trained parameters are kept wide, else ``w``):

* NF4 takes 0.5 + 4/64 bytes per weight (0.5 + 0.0159 with quantized scales), scaled FP8 one byte.
* AdamW keeps ``2 W t``; 8-bit Adam two bytes per number and eight for those in tensors below 4096; CAME ``4 t``.
* DeepSpeed keeps float32 weights and moments of what is trained, ``12 t``, divided by the processes from stage 1 on.
  Gradients are divided from stage 2 on, weights from stage 3 on.
* DeepSpeed's stage 3 has at most 1e9 numbers unsharded at a time; FSDP has three blocks and the parts around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from optim_patches.plan.denoiser import Census
from optim_patches.plan.spec import RunSpec

_NF4 = 0.5 + 4 / 64
_NF4_DOUBLE = 0.5 + 1 / 64 + 4 / (64 * 256)
_ADAM8 = 2 * (1 + 4 / 256)
_BUCKET = 500_000_000  # numbers in DeepSpeed's reduce bucket, and as many that are gathered
_LIVE = 1_000_000_000
_FSDP_BLOCKS = 3


@dataclass(frozen=True)
class Static:
    """Bytes on the device and on the host, per process."""

    weights: int
    optimizer: int
    averages: int
    gradients: int  # of all trained numbers together, as this process holds them
    communication: int
    host: int
    trained_width: int


def swapped_blocks(spec: RunSpec, block_bytes: int) -> int:
    """How many blocks' frozen weights stay on the host."""
    if spec.block_swap_gb is None:
        return min(spec.block_swap, spec.blocks)
    for number in range(spec.blocks + 1):
        ring = spec.block_swap_ring if number else 0
        if (spec.blocks - number + ring) * block_bytes <= spec.block_swap_gb * 1e9:
            return number
    return spec.blocks


def frozen_block_bytes(spec: RunSpec, census: Census) -> int:
    """Frozen weights of one block, quantized where the run quantizes."""
    linear = census.block_linear
    per_linear: float = spec.width
    if spec.qlora:
        per_linear = _NF4_DOUBLE if spec.double_quant else _NF4
    elif spec.fp8_base:
        per_linear = 1
    return int((census.block_frozen - linear) * spec.width + linear * per_linear)


def static(spec: RunSpec, census: Census) -> Static:
    """The standing memory of one process."""
    width = 4 if spec.wide_training else spec.width
    block = frozen_block_bytes(spec, census)
    swapped = swapped_blocks(spec, block) if spec.device != "cpu" else 0
    ring = min(spec.block_swap_ring, swapped) * block
    frozen = (spec.blocks - swapped) * block + ring + census.rest_frozen * spec.width
    deepspeed = spec.sharding == "deepspeed" and spec.stage > 0
    weights = frozen + census.trained * (spec.width if deepspeed else width)
    gradients = census.trained * (spec.width if deepspeed else width)
    optimizer = _optimizer_bytes(spec, census, width)
    host, communication = swapped * block, 0
    share = max(spec.world // max(spec.sequence_parallel, 1), 1) if spec.sharding else 1
    if deepspeed:
        optimizer = 12 * census.trained if spec.optimizer == "adamw" else optimizer + 4 * census.trained
        communication = min(gradients, 2 * _BUCKET * spec.width) if spec.world > 1 or spec.stage > 1 else 0
    if spec.stage >= 1:
        optimizer //= share
    if spec.stage >= 2:
        gradients //= share
    if spec.stage >= 3:
        whole, weights = weights, weights // share
        if spec.sharding == "fsdp":
            per_block = (whole - census.rest_frozen * spec.width) // max(spec.blocks, 1)
            gathered = _FSDP_BLOCKS * per_block + census.rest_frozen * spec.width
        else:
            gathered = _LIVE * spec.width
        communication += min(gathered, whole) if share > 1 or spec.offload_weights else 0
    if spec.offload_optimizer:
        host, optimizer = host + optimizer + gradients, 0
    if spec.offload_weights and spec.stage >= 3:
        host, weights = host + weights, 0
    averages = 4 * census.trained if spec.ema else 0
    return Static(int(weights), int(optimizer), averages, int(gradients), int(communication), int(host), width)


def _optimizer_bytes(spec: RunSpec, census: Census, width: int) -> int:
    if spec.optimizer == "adamw8bit":
        return int(_ADAM8 * (census.trained - census.small_trained) + 8 * census.small_trained)
    if spec.optimizer == "came":
        return 4 * census.trained
    return 2 * width * census.trained


def update_workspace(spec: RunSpec, census: Census, *, trained: int, width: int) -> int:
    """Temporary results of the optimizer step, of ``trained`` numbers that this process updates."""
    if spec.offload_optimizer or spec.fused or spec.optimizer == "adamw8bit":
        return 0
    if spec.optimizer == "came":
        return 3 * 4 * census.largest_trained
    if spec.device == "cpu":
        return 2 * width * census.largest_trained
    return width * trained  # the multi-tensor kernels keep one result per parameter
