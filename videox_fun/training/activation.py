"""Activation checkpointing, as the flags ask for it."""

from __future__ import annotations

import argparse

from torch import nn


def enable(model: nn.Module, args: argparse.Namespace) -> None:
    """Turn on full (``--gradient_checkpointing``) or fractional (``--selective_ac``) recomputation."""
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    elif getattr(args, "selective_ac", 0):
        from videox_fun.utils.ac_handle import apply_checkpointing

        apply_checkpointing(model, repeated_block(model), args.selective_ac)


def repeated_block(model: nn.Module) -> type[nn.Module]:
    """Class of the blocks that make up the network: the most frequent entry of its longest module list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks to checkpoint; leave out --selective_ac.")
    return type(max(lists, key=len)[0])
