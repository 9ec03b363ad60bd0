"""Key names of the Wan VAEs: the published files against the class of diffusers.

Wan 2.1 numbers all layers of a side in one list (``encoder.downsamples.7``); the decoder has four per level, of which
the fourth resamples. Wan 2.2 nests them (``encoder.downsamples.1.downsamples.0``), and the resampling layer comes last.
diffusers keeps the flat list on the encoder side of 2.1 and groups everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Layers in a level of the Wan 2.1 decoder: three residual blocks and one resampling layer.
_LEVEL = 4

_LEAVES = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
           "shortcut": "conv_shortcut"}
_PARTS = {"middle.0": "mid_block.resnets.0", "middle.1": "mid_block.attentions.0", "middle.2": "mid_block.resnets.1",
          "head.0": "norm_out", "head.2": "conv_out", "conv1": "conv_in"}
_TOP = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
_RESAMPLING = ("resample", "time_conv")


def _replace_start(text: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        if text.startswith(old + "."):
            return new + text[len(old):]
    return text


def _flipped(table: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def to_diffusers(key: str) -> str:
    """Name in diffusers of a key of the published files."""
    side, _, rest = key.partition(".")
    if side not in ("encoder", "decoder"):
        return _replace_start(key, _TOP)
    nested = re.fullmatch(r"(?:down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)", rest)
    flat = re.fullmatch(r"(?:down|up)samples\.(\d+)\.(.+)", rest)
    if nested:
        level, layer, leaf = nested.groups()
        resampling = leaf.startswith(_RESAMPLING)
        where = ("downsampler" if side == "encoder" else "upsampler") if resampling else f"resnets.{layer}"
        blocks = "down_blocks" if side == "encoder" else "up_blocks"
        return f"{side}.{blocks}.{level}.{where}.{_replace_start(leaf, _LEAVES)}"
    if flat:
        index, leaf = int(flat[1]), _replace_start(flat[2], _LEAVES)
        if side == "encoder":
            return f"encoder.down_blocks.{index}.{leaf}"
        where = "upsamplers.0" if leaf.startswith(_RESAMPLING) else f"resnets.{index % _LEVEL}"
        return f"decoder.up_blocks.{index // _LEVEL}.{where}.{leaf}"
    part = _replace_start(rest, _PARTS)
    prefix, _, leaf = part.partition(".resnets.")
    if leaf:
        layer, _, leaf = leaf.partition(".")
        part = f"{prefix}.resnets.{layer}.{_replace_start(leaf, _LEAVES)}"
    return f"{side}.{part}"


def to_native(key: str, *, nested: bool, residual_blocks: int = 2) -> str:
    """Name in the published files (``nested``: those of Wan 2.2) of a key of diffusers."""
    side, _, rest = key.partition(".")
    if side not in ("encoder", "decoder"):
        return _replace_start(key, _flipped(_TOP))
    leaves = _flipped(_LEAVES)
    block = re.fullmatch(r"(?:down|up)_blocks\.(\d+)\.(.+)", rest)
    if not block:
        middle = re.fullmatch(r"(mid_block\.resnets\.\d+)\.(.+)", rest)
        if middle:
            return f"{side}.{_flipped(_PARTS)[middle[1]]}.{_replace_start(middle[2], leaves)}"
        return f"{side}.{_replace_start(rest, _flipped(_PARTS))}"
    level, inner = int(block[1]), block[2]
    group = "downsamples" if side == "encoder" else "upsamples"
    resnet = re.fullmatch(r"resnets\.(\d+)\.(.+)", inner)
    if nested:
        last = residual_blocks + (side == "decoder")
        layer, leaf = (resnet[1], resnet[2]) if resnet else (last, inner.partition(".")[2])
        return f"{side}.{group}.{level}.{group}.{layer}.{_replace_start(leaf, leaves)}"
    if side == "encoder":
        return f"encoder.downsamples.{level}.{_replace_start(inner, leaves)}"
    layer, leaf = (int(resnet[1]), resnet[2]) if resnet else (_LEVEL - 1, inner.removeprefix("upsamplers.0."))
    return f"decoder.upsamples.{level * _LEVEL + layer}.{_replace_start(leaf, leaves)}"


def is_diffusers(keys: Iterable[str]) -> bool:
    """Whether the keys are already those of diffusers."""
    return any(key.startswith(("encoder.conv_in.", "decoder.conv_in.", "encoder.down_blocks.")) for key in keys)


def is_nested(keys: Iterable[str]) -> bool:
    """Whether diffusers keys belong to the Wan 2.2 layout."""
    return any(key.startswith("encoder.down_blocks.0.resnets.") for key in keys)
