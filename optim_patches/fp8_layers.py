"""The forwards of ``--fp8`` and ``--fp8_base``.

A cast that is kept must never outlive the weight it was made from. Before every forward of the denoiser a hook compares
each weight's version, storage and device with those of its cast: that is a few numbers per layer, and it happens
outside the compiled blocks. Loading a checkpoint or moving the model therefore needs no notice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


def _torchao() -> tuple[Any, Any, Any, Any]:
    """The layer, configuration, casts and roles. torchao warns of kernels it cannot load; nothing here needs them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import float8_scaling_utils
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.float8_training_tensor import GemmInputRole
    return Float8Linear, Float8LinearConfig, float8_scaling_utils, GemmInputRole


def _settings(module: nn.Linear, *, recipe: str, emulate: bool) -> Any:
    """torchao's twin of ``module``: it has the same parameters and knows how to cast."""
    layer_class, config_class, _, _ = _torchao()
    config = replace(config_class.from_recipe_name(recipe), emulate=emulate)
    return layer_class.from_float(module, config)


class CallCount:
    """Calls of a layer. Inside a compiled graph they are counted once, when it is traced."""

    def __init__(self) -> None:
        self.eager = self.traced = 0

    def add(self) -> None:
        """Count one call."""
        if torch.compiler.is_compiling():
            self._add_traced()
        else:
            self.eager += 1

    @torch.compiler.assume_constant_result
    def _add_traced(self) -> int:
        self.traced += 1
        return 0

    @property
    def total(self) -> int:
        return self.eager + self.traced


class TrainedLayer:
    """A weight that changes at every step: torchao's layer computes, casting the weight each time."""

    frozen = False
    casts = cast_bytes = 0

    def __init__(self, module: nn.Linear, twin: nn.Module) -> None:
        self.module = module
        self.twin = twin
        self.count = CallCount()

    def refresh(self) -> None:
        """Nothing is kept."""

    def __call__(self, x: Tensor) -> Tensor:
        self.count.add()
        return self.twin(_autocast(x))


class FrozenLayer:
    """A weight that does not change: cast once for the forward and, where the recipe differs, once for the backward."""

    frozen = True

    def __init__(self, module: nn.Linear, twin: nn.Module) -> None:
        self.module = module
        self.config, self.products = twin.config, twin.linear_mm_config
        _, _, self.scaling, roles = _torchao()
        self.roles = {name: roles[name] for name in ("INPUT", "WEIGHT", "GRAD_OUTPUT")}
        self.count = CallCount()
        self.casts = self.cast_bytes = 0
        self.state: tuple[Any, ...] = ()
        self.forward_weight: Any = None
        self.backward_weight: Any = None

    def refresh(self) -> None:
        """Cast again if the weight was written to, replaced or moved."""
        weight = self.module.weight
        state = (weight._version, weight.data_ptr(), weight.device, weight.dtype)
        if state == self.state:
            return
        first, second = self.config.cast_config_weight, self.config.cast_config_weight_for_grad_input
        with torch.no_grad():
            self.forward_weight = self._cast_weight(first, axis=0)
            per_tensor = first.scaling_granularity == second.scaling_granularity and _per_tensor(first)
            self.backward_weight = self.forward_weight if per_tensor else self._cast_weight(second, axis=-1)
        kept = {id(cast): cast._data.nbytes for cast in (self.forward_weight, self.backward_weight)}
        self.state, self.cast_bytes = state, sum(kept.values())
        self.casts += 1

    def cast(self, x: Tensor, config: Any, *, role: str, axis: int) -> Any:
        """``x`` in FP8 with its scale, as torchao's products take it."""
        return self.scaling.hp_tensor_to_float8_dynamic(
            x, config.target_dtype, self.products, gemm_input_role=self.roles[role],
            scaling_granularity=config.scaling_granularity,
            axiswise_dim=self.scaling.get_maybe_axiswise_dim(axis, config.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )  # fmt: skip

    def _cast_weight(self, config: Any, *, axis: int) -> Any:
        return self.cast(self.module.weight.t(), config, role="WEIGHT", axis=axis)

    def __call__(self, x: Tensor) -> Tensor:
        self.count.add()
        out = _FrozenProduct.apply(_autocast(x), self)
        bias = self.module.bias
        return out if bias is None else out + bias.to(out.dtype)


def _per_tensor(config: Any) -> bool:
    return config.scaling_granularity.name == "TENSORWISE"


class _FrozenProduct(torch.autograd.Function):
    """``x @ weight.T`` and the gradient of ``x``; the weight has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLayer) -> Tensor:
        ctx.layer, ctx.weight = layer, layer.backward_weight
        narrow = layer.cast(x.flatten(0, -2), layer.config.cast_config_input, role="INPUT", axis=-1)
        return torch.mm(narrow, layer.forward_weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flat = gradient.flatten(0, -2)
        narrow = ctx.layer.cast(flat, ctx.layer.config.cast_config_grad_output, role="GRAD_OUTPUT", axis=-1)
        return torch.mm(narrow, ctx.weight.t()).unflatten(0, gradient.shape[:-1]), None


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def make_layer(module: nn.Linear, *, recipe: str, emulate: bool) -> TrainedLayer | FrozenLayer:
    """The FP8 computation of one linear layer."""
    twin = _settings(module, recipe=recipe, emulate=emulate)
    return (TrainedLayer if module.weight.requires_grad else FrozenLayer)(module, twin)


def attach(layers: Sequence[TrainedLayer | FrozenLayer], models: Sequence[nn.Module]) -> Callable[[], None]:
    """Put the layers in place, behind adapters where there are any; the result takes them out again."""
    for layer in layers:
        layer.module.__dict__[_slot(layer.module)] = layer

    @torch.compiler.disable
    def refresh(module: nn.Module, args: Any) -> None:
        for layer in layers:
            layer.refresh()

    hooks = [model.register_forward_pre_hook(refresh) for model in models]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            _take_out(layer.module, layer)

    return undo


def _slot(module: nn.Module) -> str:
    """An adapted layer's ``forward`` contains the adapter; its base computation has a place of its own."""
    return "_base_forward" if hasattr(type(module), "_base_forward") else "forward"


def _take_out(module: nn.Module, layer: Any) -> None:
    """Remove ``layer``, wherever an adapter that came or went has moved it."""
    for slot in ("forward", "_base_forward"):
        if module.__dict__.get(slot) is layer:
            del module.__dict__[slot]


# ---- storage -------------------------------------------------------------------------------------------------------


class _StoredProduct(torch.autograd.Function):
    """``x @ weight.T`` with a weight that is widened when it is needed and not kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, _wide(weight, scale, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        return gradient @ _wide(weight, scale, gradient.dtype), None, None, None


def _wide(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.view(FP8).float() * scale).to(dtype)


class StoredLayer:
    """Stands in a linear layer's forward and knows how its weight was stored.

    The weight becomes ``uint8`` with ``weight_scale [out, 1]`` beside it. Bytes, because changing the type of a model
    must not touch them and every backend can broadcast them.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.dtype = module.weight.dtype
        self.count = CallCount()
        weight = module.weight.detach().float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LARGEST
        narrow = (weight / scale).clamp_(-_LARGEST, _LARGEST).to(FP8).view(torch.uint8)
        module.weight = nn.Parameter(narrow, requires_grad=False)
        module.register_buffer("weight_scale", scale, persistent=False)

        def wide_in_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            """State dicts hold the widened weight under its usual key."""
            state[prefix + "weight"] = _wide(module.weight, module.weight_scale, self.dtype)

        self.hook = module.register_state_dict_post_hook(wide_in_state)
        module.__dict__[_slot(module)] = self

    def __call__(self, x: Tensor) -> Tensor:
        self.count.add()
        module = self.module
        return _StoredProduct.apply(_autocast(x), module.weight, module.weight_scale, module.bias)

    def widen(self) -> None:
        """Back to a plain weight; what was rounded stays rounded."""
        module = self.module
        self.hook.remove()
        module.weight = nn.Parameter(_wide(module.weight, module.weight_scale, self.dtype), requires_grad=False)
        del module.weight_scale
        _take_out(module, self)
