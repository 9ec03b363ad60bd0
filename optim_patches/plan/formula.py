"""A LoRA run of a network whose code is not at hand, by formula.

    weights      2 bytes per parameter, frozen
    adapters     weights, gradients and two moments: 8 bytes per trained parameter
    kept         one input per checkpointed block: blocks x tokens x width x 2
    recomputed   the block that is computed again, with its backward: ``PER_BLOCK`` such tensors

``PER_BLOCK`` is what the traced block of Wan 14B needs at its peak, in tensors of tokens x width: 39. It holds for
blocks with two attentions' worth of projections and a feed-forward of about three to four times the width.
"""

from __future__ import annotations

from dataclasses import dataclass

PER_BLOCK = 39


@dataclass(frozen=True)
class Network:
    """Sizes of a denoiser and of one sample of it."""

    parameters: float
    width: int
    blocks: int
    tokens: int
    rank: int = 0
    adapted: int = 4  # square layers per block with adapters

    @property
    def trained(self) -> int:
        return self.rank * 2 * self.width * self.adapted * self.blocks


def lora_bytes(network: Network) -> int:
    """Allocated bytes of the step at its peak."""
    stream = network.tokens * network.width * 2
    return int(2 * network.parameters + 8 * network.trained + (network.blocks + PER_BLOCK) * stream)
