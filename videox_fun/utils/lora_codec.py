"""One reader and one writer for all LoRA file formats.

A file is decoded into :class:`LoraWeights`: per real module name a pair of matrices and an optional alpha. Every format
is written from there, so a conversion is decode + encode and a round trip changes nothing.

=========== ============================================ ==========================================================
format      keys                                         strength
=========== ============================================ ==========================================================
kohya       ``lora_unet__blocks_0_self_attn_q.lora_down  ``.alpha`` tensor per module
            .weight``
comfyui     as kohya where ComfyUI maps that, otherwise  ``.alpha`` tensor per module
            ``diffusion_model.blocks.0.self_attn.q
            .lora_A.weight``
peft        ``blocks.0.self_attn.q.lora_A.weight``       metadata ``lora_alpha`` and ``rank``
diffusers   ``transformer.blocks.0.attn1.to_q.lora_A     metadata ``lora_adapter_metadata`` (a PEFT config)
            .weight``
=========== ============================================ ==========================================================

The weight change of a module is ``alpha / rank * up @ down``; a file that states no alpha anywhere is read with the
factor 1, which is what every known reader does.

ComfyUI maps the double underscore of ``lora_unet__`` only in files that adapt ``blocks.0.cross_attn.k``; all other
``lora_unet__`` files load nothing there. That is why ``comfyui`` switches to the dotted form without that module.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videox_fun.utils.lora_names import (
    ModuleIndex,
    flatten,
    foreign_kinds,
    split_key,
    strip_infixes,
    to_diffusers_name,
    to_native_name,
)

logger = logging.getLogger(__name__)

FORMATS = ("kohya", "comfyui", "peft", "diffusers")
_COMFY_MARKER = "blocks.0.cross_attn.k"
_SHOWN = 5


@dataclass(frozen=True)
class LoadReport:
    """What a load found.

    Attributes:
        matched: modules (or tensors) of the source that were put into the model.
        missing: names the model has and the source lacks.
        unexpected: names the source has and the model lacks.
        total: modules (or tensors) in the source.
    """

    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        return (f"matched {self.matched} of {self.total}, {len(self.unexpected)} unexpected, "
                f"{len(self.missing)} missing")


@dataclass(frozen=True)
class LoraPair:
    """The adapter of one module; ``alpha`` is ``None`` when the file states none (the factor is then 1)."""

    down: Tensor
    up: Tensor
    alpha: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else float(self.alpha) / self.rank

    def delta(self, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """``up @ down`` in the shape of the adapted weight, without the factor."""
        up, down = self.up.to(device, dtype), self.down.to(device, dtype)
        if down.dim() == 4:
            return (up.flatten(1) @ down.flatten(1))[:, :, None, None]
        return up @ down


@dataclass
class LoraWeights:
    """A decoded file: adapters by real module name."""

    transformer: dict[str, LoraPair]
    text_encoder: dict[str, LoraPair] = field(default_factory=dict)
    format: str = "kohya"
    metadata: dict[str, str] = field(default_factory=dict)
    report: LoadReport | None = None

    @property
    def ranks(self) -> set[int]:
        return {pair.rank for pair in self.transformer.values()}

    @property
    def alphas(self) -> set[float | None]:
        return {None if pair.alpha is None else float(pair.alpha) for pair in self.transformer.values()}


def adaptable_modules(model: nn.Module | None) -> dict[str, nn.Module]:
    """Modules of a model that a LoRA can sit on, by name as it was before wrapping."""
    if model is None:
        return {}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and ".lora_" not in f".{name}":
            found.setdefault(strip_infixes(name + ".").rstrip("."), module)
    return found


def module_index(model: nn.Module, *, text_encoder: nn.Module | None = None) -> ModuleIndex:
    """The name index of a model (and its text encoder)."""
    return ModuleIndex(adaptable_modules(model), text_names=adaptable_modules(text_encoder))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a LoRA file, or of a PEFT adapter folder. Pickles are read without running code."""
    path = Path(path)
    extra: dict[str, str] = {}
    if path.is_dir():
        path = _adapter_file(path)
    if path.name.startswith("adapter_model") and (path.parent / "adapter_config.json").is_file():
        extra["lora_adapter_metadata"] = (path.parent / "adapter_config.json").read_text(encoding="utf-8")
    if not path.is_file():
        raise ValueError(f"LoRA file '{path}' does not exist.")
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}
            return tensors, {**(handle.metadata() or {}), **extra}
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return dict(loaded.get("state_dict", loaded)), extra


def _adapter_file(folder: Path) -> Path:
    names = ("adapter_model.safetensors", "lora_diffusion_pytorch_model.safetensors",
             "pytorch_lora_weights.safetensors", "adapter_model.bin")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"Folder '{folder}' holds no LoRA: none of {', '.join(names)} is there.")


def decode(
    tensors: Mapping[str, Tensor], *, index: ModuleIndex, metadata: Mapping[str, str] | None = None,
    skip_text: bool = False, allow_partial: bool = False, source: str = "LoRA",
) -> LoraWeights:
    """Read a state dict of any format against the real module names of a model.

    Args:
        index: names of the model, see :func:`module_index`.
        metadata: the file's metadata, where PEFT and diffusers files keep alpha.
        skip_text: leave text-encoder adapters aside without counting them.
        allow_partial: warn instead of raising when part of the file does not match. Matching nothing always raises.
        source: what to call the file in messages.
    """
    metadata = dict(metadata or {})
    foreign = foreign_kinds(tensors)
    if foreign:
        kinds = "; ".join(f"{kind} (for example '{key}')" for kind, key in foreign.items())
        raise ValueError(f"{source} is not a plain LoRA but contains {kinds}. Reading only its LoRA part would change "
                         "the result, so it is refused. Merge it into the weights with the tool that made it.")
    stems, unknown = _collect(tensors, source)
    result = LoraWeights({}, metadata=metadata)
    styles: dict[str, int] = {}
    skipped = 0
    for stem, parts in stems.items():
        if skip_text and index.is_text(stem):
            skipped += 1
            continue
        place = index.resolve(stem)
        if place is None:
            unknown.append(stem)
            continue
        pairs = result.transformer if place.component == "transformer" else result.text_encoder
        if place.name in pairs:
            raise ValueError(f"{source} adapts module '{place.name}' twice; the second time as '{stem}'.")
        pairs[place.name] = _make_pair(parts, stem, source)
        styles[place.style] = styles.get(place.style, 0) + 1
    matched = len(result.transformer) + len(result.text_encoder)
    total = matched + len(unknown)
    covered = set(result.transformer)
    result.report = LoadReport(matched, tuple(n for n in index.names if n not in covered), tuple(unknown), total)
    _check_match(result.report, source, index, allow_partial, skipped)
    result.format = max(styles, key=lambda style: styles[style]) if styles else "peft"
    _fill_alpha(result, metadata, source)
    logger.info("%s: %s format, %d of %d modules matched, rank %s", source, result.format, matched, total,
                ", ".join(map(str, sorted(result.ranks))) or "-")
    return result


def _collect(tensors: Mapping[str, Tensor], source: str) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    stems: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        split = split_key(key)
        if split is None:
            unknown.append(key)
            continue
        stem, part = split
        if part in stems.setdefault(stem, {}):
            raise ValueError(f"{source} has two '{part}' tensors for '{stem}'; it seems to hold several adapters. "
                             "Save one adapter per file.")
        stems[stem][part] = tensor
    return stems, unknown


def _make_pair(parts: dict[str, Tensor], stem: str, source: str) -> LoraPair:
    absent = [part for part in ("down", "up") if part not in parts]
    if absent:
        raise ValueError(f"{source} is incomplete: '{stem}' has no {' and no '.join(absent)} matrix.")
    down, up = parts["down"], parts["up"]
    if down.shape[0] != up.shape[1]:
        raise ValueError(f"{source}: the matrices of '{stem}' do not fit together: down {list(down.shape)}, "
                         f"up {list(up.shape)}.")
    return LoraPair(down, up, parts.get("alpha"))


def _check_match(report: LoadReport, source: str, index: ModuleIndex, allow_partial: bool, skipped: int) -> None:
    if report.matched == report.total and (report.matched or skipped):
        return
    shown = ", ".join(report.unexpected[:_SHOWN]) + (" ..." if len(report.unexpected) > _SHOWN else "")
    text = f"{source}: {report.matched} of {report.total} modules match this model"
    if not report.matched:
        names = ", ".join(index.names[:3])
        raise ValueError(f"{text}; loading it would have no effect. Keys: {shown or 'none'}. "
                         f"Modules of the model: {names} ...")
    if not allow_partial:
        raise ValueError(f"{text}; without a counterpart: {shown}. The file belongs to another model or another tool.")
    logger.warning("%s; ignored: %s", text, shown)


def _fill_alpha(weights: LoraWeights, metadata: Mapping[str, str], source: str) -> None:
    """Take alpha from metadata for pairs whose file has no alpha tensors."""
    config = _peft_metadata(metadata)
    if config.get("use_dora"):
        raise ValueError(f"{source} is a DoRA adapter by its metadata, yet carries no magnitudes; it is refused.")
    if not config:
        return
    for name, pair in weights.transformer.items():
        alpha = _pattern(config.get("alpha_pattern"), name, config.get("lora_alpha"))
        if pair.alpha is None and alpha is not None:
            if config.get("use_rslora"):
                alpha *= math.sqrt(pair.rank)
            weights.transformer[name] = LoraPair(pair.down, pair.up, torch.tensor(alpha, dtype=pair.down.dtype))


def _peft_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    if "lora_adapter_metadata" in metadata:
        config = json.loads(metadata["lora_adapter_metadata"])
        return {key.removeprefix("transformer."): value for key, value in config.items()}
    if "lora_alpha" in metadata:
        return {"lora_alpha": float(metadata["lora_alpha"]),
                "alpha_pattern": json.loads(metadata.get("alpha_pattern", "{}"))}
    return {}


def _pattern(pattern: Mapping[str, float] | None, name: str, default: float | None) -> float | None:
    """PEFT's rule: the first key that equals the name or a dotted end of it."""
    for key, value in (pattern or {}).items():
        key = key.lstrip("^")
        for spelling in (name, to_native_name(name), to_diffusers_name(name)):
            if spelling is not None and (spelling == key or spelling.endswith("." + key)):
                return float(value)
    return None if default is None else float(default)


def encode(
    weights: LoraWeights, *, format: str, dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Write adapters in a format. Returns tensors (CPU, contiguous, cast to ``dtype``) and metadata."""
    if format not in FORMATS:
        raise ValueError(f"Unknown LoRA format '{format}'. Known: {', '.join(FORMATS)}.")
    if format == "comfyui":
        native = {to_native_name(name) or name for name in weights.transformer}
        flat = _COMFY_MARKER in native
        tensors = _encode_flat(weights, native=True) if flat else _encode_dotted_alpha(weights)
        metadata = {"format": "pt"}
    elif format == "kohya":
        tensors, metadata = _encode_flat(weights, native=False), {}
    else:
        tensors, metadata = _encode_peft(weights, diffusers=format == "diffusers")
    return {key: _out(tensor, dtype) for key, tensor in tensors.items()}, metadata


def _out(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("cpu", dtype or tensor.dtype).clone().contiguous()


def _encode_flat(weights: LoraWeights, *, native: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for prefix, pairs in (("lora_te_", weights.text_encoder), ("lora_unet__", weights.transformer)):
        for name, pair in pairs.items():
            stem = prefix + flatten((to_native_name(name) or name) if native else name)
            if pair.alpha is not None:
                tensors[f"{stem}.alpha"] = pair.alpha
            tensors[f"{stem}.lora_down.weight"] = pair.down
            tensors[f"{stem}.lora_up.weight"] = pair.up
    return tensors


def _encode_dotted_alpha(weights: LoraWeights) -> dict[str, Tensor]:
    _refuse_text(weights, "comfyui without blocks.0.cross_attn.k")
    tensors: dict[str, Tensor] = {}
    for name, pair in weights.transformer.items():
        stem = f"diffusion_model.{to_native_name(name) or name}"
        tensors[f"{stem}.lora_A.weight"] = pair.down
        tensors[f"{stem}.lora_B.weight"] = pair.up
        if pair.alpha is not None:
            tensors[f"{stem}.alpha"] = pair.alpha
    return tensors


def _encode_peft(weights: LoraWeights, *, diffusers: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    _refuse_text(weights, "diffusers" if diffusers else "peft")
    pairs: dict[str, LoraPair] = {}
    for name, pair in weights.transformer.items():
        target = name
        if diffusers and to_native_name(name) is None:
            target = to_diffusers_name(name)
            if target is None:
                raise ValueError(f"Module '{name}' has no counterpart in diffusers' Wan model; "
                                 "the diffusers format cannot hold it.")
        pairs[target] = pair
    prefix = "transformer." if diffusers else ""
    tensors = {}
    for name, pair in pairs.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = pair.down
        tensors[f"{prefix}{name}.lora_B.weight"] = pair.up
    metadata = {"format": "pt"}
    config = peft_config(pairs)
    if diffusers:
        metadata["lora_adapter_metadata"] = json.dumps({prefix + key: value for key, value in config.items()},
                                                       sort_keys=True)
    elif any(pair.alpha is not None for pair in pairs.values()):
        alpha = config["lora_alpha"]
        metadata |= {"lora_alpha": str(int(alpha) if alpha == int(alpha) else alpha), "rank": str(config["r"])}
        if config["alpha_pattern"]:
            metadata["alpha_pattern"] = json.dumps(config["alpha_pattern"], sort_keys=True)
    return tensors, metadata


def peft_config(pairs: Mapping[str, LoraPair]) -> dict[str, Any]:
    """Keyword arguments of ``peft.LoraConfig`` under which the pairs act with their own strength."""
    ranks = {name: pair.rank for name, pair in pairs.items()}
    alphas = {name: float(pair.rank if pair.alpha is None else pair.alpha) for name, pair in pairs.items()}
    rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
    return {
        "r": rank, "lora_alpha": alpha, "target_modules": sorted(pairs),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }


def _most_common(values: Iterable[Any]) -> Any:
    values = list(values)
    return max(values, key=values.count)


def _refuse_text(weights: LoraWeights, format: str) -> None:
    if weights.text_encoder:
        raise ValueError(f"The {format} format has no place for the {len(weights.text_encoder)} text-encoder adapters "
                         "of this file; convert to kohya instead.")


def read_lora(path: str | Path, *, index: ModuleIndex, skip_text: bool = False,
              allow_partial: bool = False) -> LoraWeights:
    """Read and decode a LoRA file or adapter folder."""
    tensors, metadata = read_tensors(path)
    return decode(tensors, index=index, metadata=metadata, skip_text=skip_text, allow_partial=allow_partial,
                  source=f"LoRA '{Path(path).name}'")
