"""LoRA under upstream's public names: networks, file hashes, key conversion, and merging files into weights.

The adapters themselves are in :mod:`lora_network`, the file formats in :mod:`lora_codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videox_fun.utils.lora_codec import LoraPair, adaptable_modules, decode, module_index, read_tensors
from videox_fun.utils.lora_names import flatten, foreign_kinds, split_key
from videox_fun.utils.lora_network import (
    UNET_PREFIX,
    LoRAModule,
    LoRANetwork,
    addnet_hash_legacy,
    addnet_hash_safetensors,
    create_network,
    precalculate_safetensors_hashes,
)

__all__ = [
    "LoRAModule",
    "LoRANetwork",
    "addnet_hash_legacy",
    "addnet_hash_safetensors",
    "convert_peft_lora_to_kohya_lora",
    "create_network",
    "merge_lora",
    "precalculate_safetensors_hashes",
    "unmerge_lora",
]


def convert_peft_lora_to_kohya_lora(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename PEFT keys to upstream's ComfyUI keys. Alpha is not added; :mod:`lora_codec` writes files that carry it."""
    foreign = foreign_kinds(state_dict)
    if foreign:
        raise ValueError(f"Cannot convert {', '.join(foreign)} to a Kohya file (key '{next(iter(foreign.values()))}').")
    converted = {}
    for key, tensor in state_dict.items():
        split = split_key(key)
        if split is None:
            raise ValueError(f"'{key}' is not a PEFT LoRA key.")
        stem, part = split
        stem = flatten(stem.removeprefix("diffusion_model."))
        stem = stem if stem.startswith(f"{UNET_PREFIX}__") else f"{UNET_PREFIX}__{stem}"
        converted[f"{stem}.alpha" if part == "alpha" else f"{stem}.lora_{part}.weight"] = tensor
    return converted


def merge_lora(
    pipeline: Any, lora_path: str | Path | Sequence[str | Path] | None, multiplier: float | Sequence[float],
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    state_dict: Mapping[str, Tensor] | None = None, transformer_only: bool = False,
    sub_transformer_name: str = "transformer", *, strict: bool = True,
) -> Any:
    """Add LoRA files (any format) to the weights of a pipeline and return it.

    ``W += multiplier * alpha / rank * up @ down``, computed in ``dtype`` on ``device`` and cast back. Lists of paths
    and multipliers are merged one after the other. Without a path and a state dict the pipeline is returned as it is.

    Args:
        state_dict: the adapter itself, instead of a file.
        transformer_only: leave text-encoder adapters aside.
        sub_transformer_name: attribute of the pipeline that holds the denoiser.
        strict: raise when part of a file matches nothing.
    """
    for tensors, metadata, factor, source in _sources(lora_path, multiplier, state_dict):
        _merge_one(pipeline, tensors, metadata, factor, source, device=device, dtype=dtype, strict=strict,
                   transformer_only=transformer_only, name=sub_transformer_name)
    return pipeline


def unmerge_lora(
    pipeline: Any, lora_path: str | Path | Sequence[str | Path] | None, multiplier: float | Sequence[float] = 1,
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, sub_transformer_name: str = "transformer",
    *, state_dict: Mapping[str, Tensor] | None = None, transformer_only: bool = False, strict: bool = True,
) -> Any:
    """Subtract what :func:`merge_lora` added (exact up to rounding)."""
    factors = [-f for f in multiplier] if isinstance(multiplier, (list, tuple)) else -multiplier
    return merge_lora(pipeline, lora_path, factors, device, dtype, state_dict, transformer_only, sub_transformer_name,
                      strict=strict)


def _sources(
    lora_path: Any, multiplier: Any, state_dict: Mapping[str, Tensor] | None,
) -> list[tuple[Mapping[str, Tensor], Mapping[str, str], float, str]]:
    if state_dict is not None:
        return [(state_dict, {}, float(multiplier), "LoRA state dict")]
    if lora_path is None:
        return []
    paths = list(lora_path) if isinstance(lora_path, (list, tuple)) else [lora_path]
    factors = list(multiplier) if isinstance(multiplier, (list, tuple)) else [multiplier] * len(paths)
    if len(factors) != len(paths):
        raise ValueError(f"{len(paths)} LoRA files but {len(factors)} multipliers; give one each.")
    return [(*read_tensors(path), float(factor), f"LoRA '{Path(path).name}'")
            for path, factor in zip(paths, factors, strict=True)]


def _merge_one(
    pipeline: Any, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], multiplier: float, source: str, *,
    device: torch.device | str, dtype: torch.dtype, strict: bool, transformer_only: bool, name: str,
) -> None:
    transformer = getattr(pipeline, name, None)
    if transformer is None:
        raise ValueError(f"The pipeline has no '{name}' to merge {source} into.")
    encoder = None if transformer_only else getattr(pipeline, "text_encoder", None)
    weights = decode(tensors, index=module_index(transformer, text_encoder=encoder), metadata=metadata,
                     skip_text=transformer_only, allow_partial=not strict, source=source)
    places = [(layers[path], pair, path)
              for model, pairs in ((transformer, weights.transformer), (encoder, weights.text_encoder)) if pairs
              for layers in (adaptable_modules(model),) for path, pair in pairs.items()]
    for layer, pair, path in places:
        _check_fit(layer, pair, path, source)
    for layer, pair, _ in places:
        with torch.no_grad():
            delta = pair.delta(dtype=dtype, device=device)
            merged = layer.weight.to(device, dtype) + multiplier * pair.scale * delta
            layer.weight.copy_(merged.to(layer.weight.dtype))


def _check_fit(layer: nn.Module, pair: LoraPair, path: str, source: str) -> None:
    """Raise before anything is changed, so that a refused file leaves the weights as they were."""
    sizes = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else (
        layer.out_channels, layer.in_channels)
    if tuple(layer.weight.shape[:2]) != sizes or not layer.weight.is_floating_point():
        raise ValueError(f"{source} cannot be merged into '{path}': its weight is quantized. Merge into the original "
                         "weights, or keep the LoRA as an adapter.")
    if (pair.up.shape[0], pair.down.shape[1]) != sizes:
        raise ValueError(f"{source} cannot be merged into '{path}': it changes a {pair.up.shape[0]} x "
                         f"{pair.down.shape[1]} weight, the layer has {sizes[0]} x {sizes[1]}. It belongs to another "
                         "model size.")
