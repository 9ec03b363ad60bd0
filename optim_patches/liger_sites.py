"""The forwards that ``--liger`` puts in place of the modules' own, and the counters of their use.

Each is bound to one module instance, so that parameters, keys and classes stay as they are. Eager calls are counted as
they happen; calls inside a compiled graph are counted once, when the graph is traced.
"""

from __future__ import annotations

from collections import Counter
from types import MethodType

import torch
from torch import Tensor, nn

EAGER: Counter[str] = Counter()
TRACED: Counter[str] = Counter()


def reset_counts() -> None:
    """Start counting anew."""
    EAGER.clear()
    TRACED.clear()


@torch.compiler.assume_constant_result
def _count_traced(kernel: str) -> int:
    TRACED[kernel] += 1
    return 0


def _count(kernel: str) -> None:
    if torch.compiler.is_compiling():
        _count_traced(kernel)
    else:
        EAGER[kernel] += 1


def rms_norm(self: nn.Module, x: Tensor) -> Tensor:
    """Liger's RMSNorm with all arithmetic in float32. The gradient buffer is not reused: others may read it."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    _count("rms_norm")
    return LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "gemma", False)


def layer_norm(self: nn.LayerNorm, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Liger's LayerNorm, for norms with weight and bias."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    if shift is not None or scale is not None:
        return type(self).forward(self, x, shift, scale)
    _count("layer_norm")
    return LigerLayerNormFunction.apply(x, self.weight, self.bias, self.eps)


def modulate(self: nn.LayerNorm, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Fused layer norm and modulation, for norms without parameters."""
    from optim_patches.kernels.layernorm_modulate import layernorm_modulate

    if shift is None or scale is None:
        return type(self).forward(self, x, shift, scale)
    _count("modulate")
    return layernorm_modulate(x, shift, scale, self.eps)


def gate(self: nn.Module, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Fused gated residual."""
    from optim_patches.kernels.gate_residual import gate_residual

    _count("gate")
    return gate_residual(x, y, gate)


def rms_rope(self: nn.Module, x: Tensor, freqs: Tensor, grid_sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    """Queries and keys normed and rotated in one kernel each; a complex table means one grid per sample, left alone."""
    from optim_patches.kernels.rmsnorm_rope import rmsnorm_rope

    if freqs.is_complex():
        return type(self).project_qkv(self, x, freqs, grid_sizes)
    _count("rms_rope")
    q = rmsnorm_rope(self.q(x), self.norm_q.weight, freqs, self.norm_q.eps)
    k = rmsnorm_rope(self.k(x), self.norm_k.weight, freqs, self.norm_k.eps)
    return self.heads(q), self.heads(k), self.heads(self.v(x))


def gelu(self: nn.GELU, x: Tensor) -> Tensor:
    """Fused GELU (tanh form)."""
    from optim_patches.kernels.gelu_tanh import gelu_tanh

    _count("gelu")
    return gelu_tanh(x)


REPLACEMENTS = {
    "rms_norm": ("forward", rms_norm),
    "layer_norm": ("forward", layer_norm),
    "modulate": ("forward", modulate),
    "gate": ("forward", gate),
    "rms_rope": ("project_qkv", rms_rope),
    "gelu": ("forward", gelu),
}


def replace(module: nn.Module, kernel: str) -> None:
    """Bind a kernel's forward to ``module``."""
    attribute, function = REPLACEMENTS[kernel]
    module.__dict__[attribute] = MethodType(function, module)


def restore(module: nn.Module, kernel: str) -> None:
    """Give ``module`` its class's own forward again."""
    module.__dict__.pop(REPLACEMENTS[kernel][0], None)


def kernel_of(name: str, module: nn.Module) -> str | None:
    """Which kernel fits a module, or ``None``. ``name`` is not looked at beyond telling a module from its model."""
    kind = type(module).__name__
    if isinstance(module, nn.LayerNorm):
        if module.weight is None:
            return "modulate" if kind == "WanLayerNorm" else None
        return "layer_norm" if module.bias is not None and len(module.normalized_shape) == 1 else None
    if kind == "WanRMSNorm":
        return "rms_norm"
    if kind == "GatedResidual":
        return "gate"
    if kind == "WanSelfAttention" and hasattr(module, "project_qkv") and hasattr(module.norm_q, "weight"):
        return "rms_rope"
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu"
    return None
