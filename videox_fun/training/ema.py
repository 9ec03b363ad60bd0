"""Exponential moving average of the trained weights.

After optimizer step k the average becomes ``s - (1 - d) * (s - p)`` with ``d = 0`` for k = 1 and
``d = min(decay, k / (9 + k))`` afterwards, so the first step copies the weights and the average lengthens with the
run; this is the rule of diffusers' ``EMAModel`` with its defaults. Shadows start from the live weights, are held for
trained parameters only (frozen ones equal their own average), under the parameters' names, and in fp32: with decay
0.9999 an update is far below the resolution of bf16, so a bf16 shadow would stand still.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from videox_fun.training.optimizers import name_difference

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_NUMBERS = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that compile and checkpoint wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class EMA:
    """Named shadows of a set of parameters.

    Make it when the parameters are the final objects (after DDP wrapping is fine, before FSDP is not).

    Args:
        named_parameters: names and live parameters; those that do not require gradients are left out.
        decay: upper bound of the decay.
        min_decay: lower bound of the decay once averaging has begun.
        update_after_step: number of steps during which the weights are only copied.
        dtype: precision of the shadows; ``None`` keeps each parameter's own (as upstream does).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self._live = {clean_name(name): p for name, p in named_parameters if p.requires_grad}
        if not self._live:
            raise ValueError("--use_ema has nothing to average: no parameter is trainable.")
        if any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in self._live.values()):
            raise ValueError("--use_ema cannot average weights that are sharded over ranks (ZeRO-3, FSDP); "
                             "use ZeRO-2 or DDP, or leave the flag out.")
        self.decay = decay
        self.min_decay = min_decay
        self.update_after_step = update_after_step
        self.optimization_step = 0
        self.current_decay: float | None = None
        self._dtype = dtype
        self._stored: dict[str, torch.Tensor] | None = None
        self.shadow: dict[str, torch.Tensor] = {}
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the live weights."""
        self.optimization_step = 0
        self.shadow = {name: p.detach().to(self._dtype or p.dtype, copy=True) for name, p in self._live.items()}

    @property
    def names(self) -> list[str]:
        return list(self.shadow)

    def decay_at(self, optimization_step: int) -> float:
        """Decay used by the given step, counted from 1."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        return max(min((1 + step) / (10 + step), self.decay), self.min_decay)

    @torch.no_grad()
    def step(self) -> None:
        """Take the weights of one optimizer step into the average."""
        self.optimization_step += 1
        self.current_decay = self.decay_at(self.optimization_step)
        weight = 1 - self.current_decay
        for name in self.shadow:
            live = self._live[name].detach()
            if self.shadow[name].device != live.device:  # the model moved after the shadows were made
                self.shadow[name] = self.shadow[name].to(live.device)
            shadow = self.shadow[name]
            shadow.sub_((shadow - live).mul_(weight))

    # --------------------------------------------------------------------------------- using the average for a while

    @torch.no_grad()
    def store(self) -> dict[str, torch.Tensor]:
        """Put the live weights aside (in main memory) and return them."""
        self._stored = {name: p.detach().to("cpu", copy=True) for name, p in self._live.items()}
        return self._stored

    @torch.no_grad()
    def copy_to(self) -> None:
        """Write the average into the model."""
        for name, p in self._live.items():
            p.data.copy_(self.shadow[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Write the weights of :meth:`store` back."""
        if self._stored is None:
            raise RuntimeError("EMA.restore() without a preceding store().")
        for name, p in self._live.items():
            p.data.copy_(self._stored[name])
        self._stored = None

    # ------------------------------------------------------------------------------------------------------- on disk

    def config(self) -> dict[str, Any]:
        """The numbers that upstream's ``transformer_ema/config.json`` carries besides the model's configuration."""
        return {
            "decay": self.decay, "min_decay": self.min_decay, "optimization_step": self.optimization_step,
            "update_after_step": self.update_after_step, "use_ema_warmup": False, "inv_gamma": 1.0, "power": 2 / 3,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.config(), "shadow": dict(self.shadow)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore numbers and shadows; names must agree.

        Raises:
            ValueError: the saved average covers other parameters, named in the text.
        """
        saved: Mapping[str, torch.Tensor] = state["shadow"]
        difference = name_difference(list(saved), self.names)
        if difference:
            raise ValueError(f"The saved EMA covers other parameters than this run trains: {difference}. Use the same "
                             "--trainable_modules, or leave out --use_ema.")
        for name, value in saved.items():
            if value.shape != self.shadow[name].shape:
                raise ValueError(f"The saved EMA of '{name}' has shape {tuple(value.shape)}, the parameter "
                                 f"{tuple(self.shadow[name].shape)}.")
        if state.get("use_ema_warmup"):
            raise ValueError("The saved EMA was made with use_ema_warmup, which this trainer does not continue.")
        self.decay = float(state.get("decay", self.decay))
        self.min_decay = float(state.get("min_decay", self.min_decay))
        self.update_after_step = int(state.get("update_after_step", self.update_after_step))
        self.optimization_step = int(state["optimization_step"])
        for name, value in saved.items():
            self.shadow[name].copy_(value)

    def folder_content(
        self, exported: Mapping[str, torch.Tensor] | None = None, config: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and ``config.json`` of a ``<player>_ema`` folder.

        Args:
            exported: the full model as it is saved; its trained tensors are replaced by their averages. Without it
                (LoRA) the folder holds the averages alone.
            config: the model's configuration.
        """
        if exported is None:
            return dict(self.shadow), {**(config or {}), **self.config()}
        lost = [name for name in self.shadow if name not in exported]
        if lost:
            raise ValueError(f"EMA has no place in the saved model for '{lost[0]}' ({len(lost)} in all).")
        tensors = {name: self.shadow.get(name, value) for name, value in exported.items()}
        return tensors, {**(config or {}), **self.config()}

    def load_folder(self, folder: Path, *, saved_names: Iterable[str] | None = None) -> None:
        """Read a ``<player>_ema`` folder, ours or upstream's.

        Args:
            folder: holds ``config.json`` and the weights.
            saved_names: names that were averaged when the folder was written, if known.
        """
        from safetensors.torch import load_file

        numbers = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(path))
        names = list(saved_names) if saved_names is not None else [n for n in self.names if n in tensors]
        shadow = {name: tensors[name] for name in names if name in tensors}
        self.load_state_dict({**{k: numbers[k] for k in _NUMBERS if k in numbers}, "shadow": shadow})
        logger.info("EMA restored at step %d (%d tensors).", self.optimization_step, len(shadow))
