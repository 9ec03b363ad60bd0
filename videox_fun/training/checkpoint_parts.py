"""Pieces of a state that saving and resuming must agree on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from videox_fun.training.ema import clean_name

if TYPE_CHECKING:
    from videox_fun.training.context import Player

EMA_FOLDER = "transformer_ema"
MASTER_FILE = "trainable_parameters.safetensors"


def is_sharded(accelerator: Any) -> bool:
    """Whether DeepSpeed or FSDP owns weights and optimizer."""
    return getattr(getattr(accelerator, "distributed_type", None), "value", "") in ("DEEPSPEED", "FSDP")


def group_names(player: Player) -> list[list[str]]:
    """Names of the trained parameters, one list per optimizer group."""
    return [[clean_name(name) for name in group.names] for group in player.groups]


def live_parameters(player: Player) -> dict[str, torch.nn.Parameter]:
    """Trained parameters by name."""
    return {clean_name(n): p for g in player.groups for n, p in zip(g.names, g.params, strict=True)}


def accelerate_rng_state() -> dict[str, Any]:
    """The process's global streams in the form accelerate keeps them; saves happen between accumulations."""
    state: dict[str, Any] = {
        "step": 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return state


def restore_accelerate_rng(state: Mapping[str, Any]) -> None:
    """Set the global streams from accelerate's form."""
    random.setstate(state["random_state"])
    np.random.set_state(state["numpy_random_seed"])
    torch.set_rng_state(state["torch_manual_seed"])
    if "torch_cuda_manual_seed" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["torch_cuda_manual_seed"])


def scheduler_for_upstream(state: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    """Upstream's schedule counts one step per process."""
    return {**state, "last_epoch": state["last_epoch"] * world, "_step_count": (state["_step_count"] - 1) * world + 1}


def scheduler_from_upstream(state: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    """Back to one count per optimizer step."""
    return {**state, "last_epoch": state["last_epoch"] // world,
            "_step_count": (state["_step_count"] - 1) // world + 1}
