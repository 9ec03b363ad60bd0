"""Whole copies of parameters that FSDP or ZeRO-3 have split over the processes.

FSDP2 keeps a ``DTensor``, which knows its whole. A parameter of ZeRO-3 is empty between the steps and has to be gathered
as the parameter that it is: the detached tensors of an ordinary ``state_dict`` have lost their way back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


def full_copies(
    state: Mapping[str, Tensor], dtype: torch.dtype, *, everywhere: bool = True, integers: bool = False
) -> dict[str, Tensor]:
    """Whole, contiguous CPU copies, one tensor after the other. Collective: every process must call it.

    Args:
        state: from :func:`whole_state`.
        dtype: type of the copies of floating-point tensors.
        everywhere: ``False`` leaves the copies to rank 0; the others, which would fill the host's memory once more
            each, get shapes without contents.
        integers: give integers (a LoRA's alpha) that type as well.
    """
    keep = everywhere or not dist.is_initialized() or dist.get_rank() == 0
    return {name: _copy(tensor, dtype if integers or tensor.is_floating_point() else tensor.dtype, keep=keep)
            for name, tensor in state.items()}


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """``state_dict`` with the parameters themselves."""
    return model.state_dict(keep_vars=True)


@torch.no_grad()
def _copy(tensor: Tensor, dtype: torch.dtype, *, keep: bool) -> Tensor:
    if hasattr(tensor, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor]):
            return _on_host(tensor.data, dtype, keep=keep)
    return _on_host(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, dtype, keep=keep)


def _on_host(tensor: Tensor, dtype: torch.dtype, *, keep: bool) -> Tensor:
    if not keep:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
