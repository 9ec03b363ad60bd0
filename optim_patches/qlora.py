"""``--qlora``: the denoiser's frozen linear layers in NF4, four bits a weight, with LoRA on top.

Weights are quantized while they are loaded: the reader hands over one tensor at a time, which goes to the training
device, is rounded there, and is dropped. Neither the host nor the device ever holds the model in 16 bits. A denoiser
that was in memory already is quantized in place before the adapters come.

The base is widened in the forward and again in the backward; the adapters train as always. The quantized weights cannot
train, so full fine-tuning is refused.

After training, the adapter can be used on the original weights, or merged into the very weights it was trained on:
:func:`dequantize` turns the 4-bit layers into plain ones, which ``videox_fun.utils.lora_utils.merge_lora`` accepts.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

COMPUTE_TYPES = {"auto": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Small layers whose rounding costs most: embeddings of time, text and image, their projections, and the head.
KEPT = "embedding,embedder,embed,emb,time,timestep,text,head,proj_out,norm"
BLOCK = 64  # weights that share a scale
NESTED_BLOCK = 256  # scales that share a scale, with double quantization
#: Linear layers that belong to an adapter: the native network beside the model, and PEFT's inside its layers.
_ADAPTER = re.compile(r"^network\.|\.lora_[A-Za-z_]+(\.|$)")


class QLoraPatch(PatchBase):
    """Row I4 of the audit."""

    name = "qlora"
    row = "I4"
    stage = Stage.PRE_ADAPTER
    conflicts = frozenset({"fp8", "fp8_base"})
    flags = (
        PatchFlag("--qlora", "Keep frozen linear layers in NF4 (bitsandbytes).", action="store_true", default=False),
        PatchFlag(
            "--qlora_double_quant", "Quantize the scales too: 0.37 bits less per weight.", action="store_true",
            default=False,
        ),
        PatchFlag(
            "--qlora_compute_dtype", "Type that the products are computed in; auto: that of the activations.", type=str,
            default="auto", choices=tuple(COMPUTE_TYPES),
        ),
        PatchFlag(
            "--qlora_skip",
            "Comma list of layers to keep: whole words of their names (time, ffn.2, blocks.0); replaces the default.",
            type=str, default=KEPT,
        ),
    )  # fmt: skip

    def __init__(self) -> None:
        self.layers: dict[str, Any] = {}

    def check(self, target: Target) -> Verdict:
        args = target.args
        if getattr(args, "trainable_modules", None) or getattr(args, "trainable_modules_low_learning_rate", None):
            reason = "--qlora rounds the weights to four bits, and full fine-tuning trains and saves them."
            return Verdict(False, reason, "a LoRA script with --qlora, or full fine-tuning without it")
        if importlib.util.find_spec("bitsandbytes") is None:
            return Verdict(False, "--qlora needs the bitsandbytes package.", "pip install bitsandbytes")
        if target.device not in ("cpu", "cuda", "xpu"):
            return Verdict(False, f"bitsandbytes has no 4-bit layers for {target.device}.", "LoRA without --qlora")
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" or target.extras.get("sharding") == 3:
            reason = "--qlora keeps weights as bytes with scales beside them, which FSDP and ZeRO-3 cannot shard."
            return Verdict(False, reason, "DDP or ZeRO-2 with --qlora, or sharding without it")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        quantizer = Quantizer(target)
        return tuple(f"{role}.{name}" for role, model in target.denoisers().items() for name in quantizer.layers(model))

    def while_loading(self, target: Target) -> AbstractContextManager[None]:
        from videox_fun.models.loading import tensors_go_to

        return tensors_go_to(Quantizer(target))

    def apply(self, target: Target) -> Applied:
        from optim_patches import qlora_layers

        quantizer, originals = Quantizer(target), {}
        qlora_layers.TRACED["calls"] = 0
        self.layers = {}
        for role, model in target.denoisers().items():
            for name, layer in quantizer.layers(model).items():
                site = f"{role}.{name}"
                self.layers[site] = layer
                if not qlora_layers.is_quantized(layer):
                    originals[site] = layer.weight
                    quantizer.store(model, f"{name}.weight", layer.weight.data)
                layer.forwards = 0

        def undo() -> None:
            for site, layer in self.layers.items():
                qlora_layers.restore(layer, originals.get(site))

        loaded = len(self.layers) - len(originals)
        kept = f"{len(originals)} after loading (the originals stay in memory for undo)" if originals else ""
        parts = [text for text in (f"{loaded} quantized while loading" if loaded else "", kept) if text]
        detail = f"{len(self.layers)} layers, {' and '.join(parts)}" if parts else "no linear layer is left to quantize"
        return Applied(tuple(self.layers), undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        from optim_patches import qlora_layers

        layers = [layer for layer in self.layers.values() if qlora_layers.is_quantized(layer)]
        traced = qlora_layers.TRACED["calls"]
        facts = {
            "layers": len(layers), "layers_that_ran": sum(layer.forwards > 0 for layer in layers),
            "forwards": sum(layer.forwards for layer in layers), "calls_in_compiled_graphs": traced,
            "bytes_before": sum(layer.full_bytes for layer in layers),
            "bytes_after": sum(qlora_layers.stored_bytes(layer) for layer in layers), "how": applied.detail,
        }  # fmt: skip
        if len(layers) < len(self.layers):
            lost = len(self.layers) - len(layers)
            return Evidence(False, f"{lost} of {len(self.layers)} layers are not in four bits any more", facts)
        sizes = f"{facts['bytes_before'] / 2**20:.1f} -> {facts['bytes_after'] / 2**20:.1f} MiB"
        if not facts["forwards"] and not traced:
            return Evidence(False, f"no 4-bit layer ran ({applied.detail}; {sizes})", facts)
        compiled = f" and {traced} in compiled graphs" if traced else ""
        return Evidence(True, f"{facts['forwards']} forwards{compiled} through {applied.detail}; {sizes}", facts)


class Quantizer:
    """Chooses the layers of a network, and quantizes the weights it is handed (a ``TensorSink`` of the loader)."""

    def __init__(self, target: Target) -> None:
        import torch

        args = target.args
        self.device = target.device
        self.double = bool(_option(args, "qlora_double_quant"))
        name = COMPUTE_TYPES[_option(args, "qlora_compute_dtype")]
        self.compute_dtype = getattr(torch, name) if name else target.extras.get("weight_dtype")
        self.skips = [term.strip() for term in _option(args, "qlora_skip").split(",") if term.strip()]
        self.chosen_by_user = "qlora_skip" in getattr(args, "explicit", ())

    def layers(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The layers of a network that are, or are to be, in four bits."""
        from optim_patches.qlora_layers import can_quantize, is_quantized

        linear = {name: module for name, module in model.named_modules()
                  if (can_quantize(module) or is_quantized(module)) and not _ADAPTER.search(name)}
        if self.chosen_by_user:
            idle = [term for term in self.skips if not any(_has_word(name, term) for name in linear)]
            if idle:
                last = next(reversed(linear), "none")
                raise ValueError(f"--qlora_skip: no linear layer's name contains {', '.join(map(repr, idle))} as a "
                                 f"whole word. Layers are named like '{last}'.")
        return {name: module for name, module in linear.items()
                if not any(_has_word(name, term) for term in self.skips)}

    def wants(self, model: nn.Module) -> Mapping[str, torch.Size]:
        from torch import Size

        return {f"{name}.weight": Size((layer.out_features, layer.in_features))
                for name, layer in self.layers(model).items()}

    def store(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        from optim_patches.qlora_layers import quantize

        layer = model.get_submodule(name.removesuffix(".weight"))
        quantize(layer, tensor, double=self.double, compute_dtype=self.compute_dtype or tensor.dtype,
                 device=self.device)


def dequantize(model: nn.Module, *, dtype: torch.dtype | None = None) -> int:
    """Turn the 4-bit layers of a network into plain ones with the weights they computed with; returns how many.

    Adapters stay on their layers. A model that is to be merged and written out is brought to one type that way::

        dequantize(transformer, dtype=torch.bfloat16)
        merge_lora(pipeline, "checkpoint-1000.safetensors", 1.0)
        transformer.save_pretrained("merged")
    """
    from optim_patches.qlora_layers import is_quantized, restore

    layers = [module for module in model.modules() if is_quantized(module)]
    for layer in layers:
        restore(layer, None, dtype=dtype)
    return len(layers)


def nf4_bytes(weights: int, *, double_quant: bool) -> int:
    """Bytes of that many weights of one layer in NF4, with their scales."""
    scales = -(-weights // BLOCK)
    if not double_quant:
        return -(-weights // 2) + 4 * scales
    return -(-weights // 2) + scales + 4 * -(-scales // NESTED_BLOCK) + 4


def _has_word(name: str, term: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(term)}(?![A-Za-z0-9])", name) is not None


def _option(args: Any, dest: str) -> Any:
    default = next(flag.default for flag in QLoraPatch.flags if flag.dest == dest)
    return getattr(args, dest, default)
