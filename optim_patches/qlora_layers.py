"""Linear layers whose weight is four bits wide, on top of bitsandbytes.

A layer is changed in place: it keeps its identity, name, bias and hooks; only its class and its weight change. So an
adapter that sits on it already stays where it is, and one that comes later finds an ordinary ``nn.Linear`` subclass.

The forward is our own. The library's would repack the weight for inference at the first call in evaluation mode on a
CPU, after which nothing flows back through the layer, and it would cast the bias for good.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from optim_patches.qlora import BLOCK, NESTED_BLOCK

PIECE = 1 << 18  # weights rounded at a time; a multiple of BLOCK
_OWN_ATTRIBUTES = ("compute_dtype", "compute_type_is_set", "quant_state", "quant_storage", "forwards", "full_bytes")

#: Calls inside compiled graphs, counted once per graph, when it is traced.
TRACED: dict[str, int] = {"calls": 0}


@torch.compiler.assume_constant_result
def _count_traced() -> int:
    TRACED["calls"] += 1
    return 0


def _forward(self: Any, x: Tensor) -> Tensor:
    import bitsandbytes as bnb

    if torch.compiler.is_compiling():
        _count_traced()
    else:
        self.forwards += 1
    bias = None if self.bias is None else self.bias.to(self.compute_dtype)
    autocast = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
        out = bnb.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.weight.quant_state)
    return out if autocast else out.to(x.dtype)


@cache
def linear_class() -> type[nn.Linear]:
    """``Linear4bit`` of bitsandbytes with the forward above."""
    import bitsandbytes as bnb

    return type("QuantizedLinear", (bnb.nn.Linear4bit,), {"forward": _forward, "__module__": __name__})


@cache
def _swapped(cls: type, old: type, new: type) -> type:
    if cls is old:
        return new
    bases = tuple(new if base is old else base for base in cls.__bases__)
    return type(cls.__name__.replace(old.__name__, new.__name__), bases, {"__module__": cls.__module__})


def can_quantize(layer: nn.Module) -> bool:
    """Whether a layer is a plain ``nn.Linear``, bare or with a native adapter, whose forward nobody replaced."""
    plain = type(layer) is nn.Linear or nn.Linear in type(layer).__bases__ and "_lora" in layer.__dict__
    own = not {"forward", "_base_forward"} & layer.__dict__.keys()
    return plain and own and layer.weight.is_floating_point()


def is_quantized(layer: nn.Module) -> bool:
    """Whether :func:`quantize` was applied to a layer."""
    return isinstance(layer, nn.Linear) and isinstance(layer, linear_class())


def quantize(
    layer: nn.Module, weight: Tensor, *, double: bool, compute_dtype: torch.dtype, device: torch.device | str
) -> None:
    """Make ``weight``, rounded to NF4 on ``device``, the weight of a layer."""
    packed, state = round_to_nf4(weight.detach(), double=double, device=device)
    # The type that the backward widens to; the forward widens to that of its input. Both must round alike.
    state.dtype = compute_dtype
    if not is_quantized(layer):
        layer.__class__ = _swapped(type(layer), nn.Linear, linear_class())
    layer.weight = _parameter(packed, state)
    values = (compute_dtype, True, state, torch.uint8, 0, weight.numel() * weight.element_size())
    for name, value in zip(_OWN_ATTRIBUTES, values, strict=True):
        object.__setattr__(layer, name, value)


def round_to_nf4(weight: Tensor, *, double: bool, device: torch.device | str) -> tuple[Tensor, Any]:
    """What ``quantize_4bit`` of bitsandbytes gives, with a piece at a time on the device.

    On a CPU that function needs about twenty bytes for each weight it is given.
    """
    from bitsandbytes import functional

    flat = weight.reshape(-1)
    packed = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8, device=device)
    absmax = torch.empty(-(-len(flat) // BLOCK), dtype=torch.float32, device=device)
    for start in range(0, len(flat), PIECE):
        piece = flat[start:start + PIECE].to(device)
        values, state = functional.quantize_4bit(piece, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
        packed[start // 2:start // 2 + len(values)] = values
        absmax[start // BLOCK:start // BLOCK + len(state.absmax)] = state.absmax
    nested: dict[str, Any] = {}
    if double:
        nested["offset"] = absmax.mean()
        absmax, nested["state2"] = functional.quantize_blockwise(absmax - nested["offset"], blocksize=NESTED_BLOCK)
    state = functional.QuantState(
        absmax=absmax, shape=weight.shape, dtype=weight.dtype, blocksize=BLOCK, code=state.code, quant_type="nf4",
        **nested,
    )  # fmt: skip
    return packed, state


def _parameter(packed: Tensor, state: Any) -> nn.Parameter:
    import bitsandbytes as bnb

    return bnb.nn.Params4bit(
        packed, requires_grad=False, quant_state=state, blocksize=BLOCK, compress_statistics=state.nested,
        quant_type="nf4", quant_storage=torch.uint8, bnb_quantized=True,
    )  # fmt: skip


def dequantized(layer: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that a 4-bit layer computes with."""
    import bitsandbytes as bnb

    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.to(dtype) if dtype is not None else weight


def restore(layer: nn.Module, weight: nn.Parameter | None, *, dtype: torch.dtype | None = None) -> None:
    """Make a layer a plain one, with ``weight`` or else the weight that it computed with."""
    if weight is None:
        weight = nn.Parameter(dequantized(layer, dtype), requires_grad=False)
    layer.__class__ = _swapped(type(layer), linear_class(), nn.Linear)
    for name in _OWN_ATTRIBUTES:
        layer.__dict__.pop(name, None)
    layer.weight = weight


def stored_bytes(layer: nn.Module) -> int:
    """Bytes of a 4-bit weight with its scales."""
    state = layer.weight.quant_state
    tensors = [layer.weight, state.absmax]
    if state.nested:
        tensors += [state.state2.absmax, state.offset]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
