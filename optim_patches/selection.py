"""Which of a denoiser's blocks a patch takes, when it does not take all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optim_patches.base import Target
from optim_patches.compile import find_blocks

#: Configuration keys that hold the number of blocks.
_COUNT_KEYS = ("num_layers", "num_hidden_layers", "n_layers")


def evenly(count: int, chosen: int) -> tuple[int, ...]:
    """``chosen`` of ``count`` positions, spread as evenly as they go and clear of the ends."""
    if not 0 <= chosen <= count:
        raise ValueError(f"Cannot choose {chosen} of {count} blocks.")
    return tuple((2 * number + 1) * count // (2 * chosen) for number in range(chosen))


def block_count(target: Target) -> int:
    """Blocks of the smallest denoiser, or of the configuration before weights are loaded; 0 when unknown."""
    counts = [len(find_blocks(model)) for model in target.denoisers().values()]
    if counts:
        return min(counts)
    config: Mapping[str, Any] = target.extras.get("denoiser_config") or {}
    return next((int(config[key]) for key in _COUNT_KEYS if config.get(key)), 0)
