"""Activation checkpointing of a fraction of a model's blocks.

The blocks are counted in module order from 1; the k-th is wrapped when ``k * p`` has reached a threshold that starts at
1/2 and grows by one with each wrapped block, which spreads the wrapped blocks evenly: 1/2 gives blocks 1, 3, 5, ... and
1/3 gives 2, 5, 8, ...
"""

from __future__ import annotations

from fractions import Fraction

from torch import nn


def parse_fraction(value: str | float | Fraction) -> float:
    """A share between 0 and 1 from a number, ``"0.5"`` or ``"1/3"``."""
    try:
        share = float(Fraction(value.replace(" ", "")) if isinstance(value, str) else value)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{value!r} is not a share of the blocks; write a number (0.5) or a fraction (1/3)") from error
    if not 0 <= share <= 1:
        raise ValueError(f"the share of checkpointed blocks must be between 0 and 1, got {value}")
    return share


def selected_blocks(count: int, p: str | float | Fraction) -> list[int]:
    """Numbers (from 1) of the blocks that are checkpointed out of ``count``."""
    share, threshold, chosen = parse_fraction(p), 0.5, []
    for number in range(1, count + 1):
        if number * share >= threshold:
            threshold += 1
            chosen.append(number)
    return chosen


def apply_checkpointing(model: nn.Module, block: type[nn.Module], p: str | float | Fraction) -> int:
    """Wrap a share ``p`` of the ``block`` modules of ``model``, non-reentrant; returns how many were wrapped."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    sites = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, block)
    ]
    chosen = selected_blocks(len(sites), p)
    for number in chosen:
        parent, name = sites[number - 1]
        wrapped = checkpoint_wrapper(getattr(parent, name), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        setattr(parent, name, wrapped)
    return len(chosen)
