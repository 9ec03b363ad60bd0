"""From a command line to a :class:`RunSpec`.

Networks come from the checkpoint's own files where they are within reach: ``config.json`` of the denoiser and the
shapes in the files of the encoders (headers only). What is missing is taken from the published model that the folder
is named after.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optim_patches.plan.spec import Adapters, Part, RunSpec, Sample

_WAN21, _WAN22 = (f"videox_fun.models.wan_transformer3d:{name}" for name in
                  ("WanTransformer3DModel", "Wan2_2Transformer3DModel"))
_VAE = "videox_fun.models.wan_vae:AutoencoderKLWan"
_TEXT = "videox_fun.models.wan_text_encoder:WanT5EncoderModel"
_IMAGE = "videox_fun.models.wan_image_encoder:CLIPModel"
_UMT5 = {"vocab": 256384, "dim": 4096, "dim_attn": 4096, "dim_ffn": 10240, "num_heads": 64, "num_layers": 24,
         "num_buckets": 32, "shared_pos": False, "dropout": 0.0}  # fmt: skip
#: Sizes of the published models: width, hidden width, heads, blocks.
_SIZES = {"1.3B": (1536, 8960, 12, 30), "14B": (5120, 13824, 40, 40)}
_CLASSES = {"wan2.1": _WAN21, "wan2.1_fun": _WAN21}


@dataclass(frozen=True)
class Machines:
    """How a run is spread."""

    world: int = 1
    local: int = 1
    sharding: str = ""
    stage: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False


def published(name: str, *, conditioned: bool) -> dict[str, Any]:
    """Configuration of the published model whose size a folder's name tells."""
    found = re.search(r"(?<![\d.])(1\.3|14)B", name, re.IGNORECASE)
    if found is None:
        raise ValueError(f"'{name}' has no config.json within reach and its name tells no size (1.3B or 14B), so its "
                         "memory cannot be planned. Give the model's folder.")
    dim, ffn, heads, layers = _SIZES[f"{found.group(1)}B"]
    return {"model_type": "i2v" if conditioned else "t2v", "in_dim": 36 if conditioned else 16, "out_dim": 16,
            "dim": dim, "ffn_dim": ffn, "num_heads": heads, "num_layers": layers, "text_dim": 4096, "text_len": 512,
            "freq_dim": 256, "cross_attn_norm": True}  # fmt: skip


def spec_from_args(
    args: argparse.Namespace, *, script_id: str, config: Mapping[str, Any], device: str, machines: Machines,
    samples: Sequence[Sample] | None = None, denoiser_config: Mapping[str, Any] | None = None,
) -> RunSpec:  # fmt: skip
    """What the planner must know about a parsed command line.

    Args:
        args: of a training script.
        script_id: for example ``wan2.1_fun/train_lora``.
        config: the yaml file as plain values.
        samples: the sizes that will be trained; the nominal one when not given.
    """
    family = script_id.split("/")[0]
    if family not in _CLASSES:
        raise ValueError(f"There is no memory plan for scripts/{script_id}.py yet; there is for "
                         f"{', '.join(sorted(_CLASSES))}.")
    conditioned = args.train_mode != "normal"
    root = Path(args.pretrained_model_name_or_path)
    if not denoiser_config:
        folder = root / config.get("transformer_additional_kwargs", {}).get("transformer_subpath", "transformer")
        file = folder / "config.json"
        denoiser_config = json.loads(file.read_text("utf-8")) if file.is_file() else published(
            root.name, conditioned=conditioned)
    get = _getter(args)
    return RunSpec(
        denoiser=Part(_CLASSES[family], _denoiser_kwargs(_CLASSES[family], denoiser_config, config)),
        samples=tuple(samples) if samples else (nominal(args),),
        vae=_vae(root, config, get("vae_path")), text=_text(root, config),
        image=_image(root, config) if conditioned else None,
        device=device, precision=get("mixed_precision") or "no", conditioned=conditioned,
        adapters=_adapters(args, script_id), text_tokens=get("tokenizer_max_length", 512),
        words=tuple([*(get("trainable_modules") or ()), *(get("trainable_modules_low_learning_rate") or ())]) or (".",),
        master_fp32=bool(get("master_weights_fp32")), ema=bool(get("use_ema")) and not script_id.endswith("_lora"),
        optimizer="adamw8bit" if get("use_8bit_adam") else "came" if get("use_came") else "adamw",
        fused=bool(get("fused_optimizer")), accumulation=get("gradient_accumulation_steps", 1),
        **_memory_flags(get), workers=get("dataloader_num_workers", 0), prefetch=get("prefetch_factor") or 2,
        validation=bool(get("validation_prompts")), sequence_parallel=get("sequence_parallel_size", 1) or 1,
        world=machines.world, local=machines.local, sharding=machines.sharding, stage=machines.stage,
        offload_optimizer=machines.offload_optimizer, offload_weights=machines.offload_weights,
    )  # fmt: skip


def _getter(args: argparse.Namespace) -> Any:
    return lambda name, default=None: getattr(args, name, default)


def _memory_flags(get: Any) -> dict[str, Any]:
    """Flags that change where things are and how long they stay."""
    partial = get("selective_ac", 0) or 0
    on = bool(get("gradient_checkpointing"))
    return {
        "checkpointing": on or partial > 0,
        "recomputed": get("checkpointing_fraction") or 1.0 if on else (partial or 1.0),
        "keep_attention": get("checkpointing_keep") == "attention", "kept_gb": get("checkpointing_budget_gb"),
        "activation_offload": bool(get("activation_offload")), "block_swap": get("block_swap", 0) or 0,
        "block_swap_gb": get("block_swap_gb"), "block_swap_ring": get("block_swap_ring", 2) or 2,
        "low_vram": bool(get("low_vram")), "vae_mini_batch": get("vae_mini_batch", 32) or 32,
        "vae_tile": get("vae_tile_size", 256) if get("vae_tiling") else 0, "vae_overlap": get("vae_tile_overlap", 32),
        "cache_latents": bool(get("cache_latents")), "cache_text": bool(get("cache_text")),
        "compile": bool(get("compile")), "liger": bool(get("liger")), "qlora": bool(get("qlora")),
        "double_quant": bool(get("qlora_double_quant")), "fp8": bool(get("fp8")), "fp8_base": bool(get("fp8_base")),
    }  # fmt: skip


def nominal(args: argparse.Namespace) -> Sample:
    """The size that the flags name: square, or ``--fix_sample_size``; the frames that the VAE can take."""
    height, width = getattr(args, "fix_sample_size", None) or (args.video_sample_size, args.video_sample_size)
    frames = (args.video_sample_n_frames - 1) // 4 * 4 + 1
    return Sample(frames, height // 16 * 16, width // 16 * 16, args.train_batch_size)


def _adapters(args: argparse.Namespace, script_id: str) -> Adapters | None:
    if not script_id.endswith("_lora"):
        return None
    return Adapters(args.rank, args.network_alpha, args.target_name, args.lora_skip_name,
                    bool(getattr(args, "lora_exact_match", False)), bool(args.use_peft_lora),
                    bool(getattr(args, "use_dora", False)))  # fmt: skip


def _denoiser_kwargs(cls: str, stated: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    from optim_patches.plan.denoiser import load_class
    from videox_fun.models.loading import _native_config, constructor_kwargs

    native, _ = _native_config(stated)
    extra = {k: v for k, v in dict(config.get("transformer_additional_kwargs") or {}).items() if k != "dict_mapping"}
    kwargs, _ = constructor_kwargs(load_class(cls), native, additional_kwargs=extra)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kwargs.items()}


def file_shapes(path: Path) -> dict[str, Any] | None:
    """Tensors without contents under the names of a file; ``None`` when the file is not there."""
    import torch

    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        from optim_patches.audit.weights import read_header

        header = read_header(path) or {}
        return {name: torch.empty(entry["shape"], device="meta") for name, entry in header.items()
                if name != "__metadata__"}
    from videox_fun.models.encoder_files import read_tensors

    return {name: torch.empty(value.shape, device="meta") for name, value in read_tensors(path).items()}


def _path(root: Path, config: Mapping[str, Any], group: str, key: str) -> Path:
    return root / (config.get(group, {}) or {}).get(key, key.removesuffix("_subpath"))


def _vae(root: Path, config: Mapping[str, Any], given: str | None) -> Part:
    from videox_fun.models import vae_keys
    from videox_fun.models.encoder_files import strip_prefix

    path = Path(given) if given else _path(root, config, "vae_kwargs", "vae_subpath")
    shapes = file_shapes(path)
    if not shapes:
        return Part(_VAE)
    from videox_fun.models.wan_vae import AutoencoderKLWan

    shapes = strip_prefix(shapes, "model.")
    if not vae_keys.is_diffusers(shapes):
        shapes = {vae_keys.to_diffusers(key): value for key, value in shapes.items()}
    return Part(_VAE, AutoencoderKLWan._sizes(shapes, source=str(path)))


def _text(root: Path, config: Mapping[str, Any]) -> Part:
    stated = {key: value for key, value in dict(config.get("text_encoder_kwargs") or {}).items() if key in _UMT5}
    shapes = file_shapes(_path(root, config, "text_encoder_kwargs", "text_encoder_subpath"))
    if not shapes:
        return Part(_TEXT, {**_UMT5, **stated})
    from videox_fun.models.wan_text_encoder import WanT5EncoderModel

    return Part(_TEXT, {**WanT5EncoderModel._sizes(shapes, source="the text encoder"), **stated})


def _image(root: Path, config: Mapping[str, Any]) -> Part:
    shapes = file_shapes(_path(root, config, "image_encoder_kwargs", "image_encoder_subpath"))
    if not shapes:
        return Part(_IMAGE)
    from videox_fun.models.encoder_files import strip_prefix
    from videox_fun.models.wan_image_encoder import CLIPModel

    return Part(_IMAGE, CLIPModel._sizes(strip_prefix(shapes, "model."), source="the image encoder", heads=None))
