"""Tiny Wan checkpoints in the on-disk layout of the published ones.

A folder holds the denoiser (``config.json`` and ``diffusion_pytorch_model.safetensors``, for the two-expert models in
``low_noise_model`` and ``high_noise_model``), the VAE, the text encoder, the image encoder where the family has one,
the tokenizer folder, and ``wan.yaml``: the file to pass as ``--config_path``. Everything but the sizes is as published,
so what loads and trains here takes the same path with real weights. Runs offline.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videox_fun.utils import tiny_shapes
from videox_fun.utils.latent_statistics import WAN21_MEAN, WAN21_STD, WAN22_MEAN, WAN22_STD

if TYPE_CHECKING:
    import torch

VAE21_FILE = "Wan2.1_VAE.pth"
VAE22_FILE = "Wan2.2_VAE.pth"
TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
IMAGE_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
TOKENIZER_FOLDER = "google/umt5-xxl"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
CONFIG_FILE = "wan.yaml"

_LOW, _HIGH = "low_noise_model", "high_noise_model"
_BUCKETS = 32
_WORDS = (
    "a an the of in on at to from with and or by for is are was it this that one two three man woman person people "
    "child dog cat bird car bike bikes street road city tree trees forest water river sea sky sun light dark night day "
    "red green blue white black yellow ball square video camera clip scene shot view close wide slow fast moves moving "
    "runs running walks walking rides riding talks talking looks looking sits standing face head hand hands shirt "
    "window wall house animal rabbit butterfly flower grass field left right up down near far while then"
).split()
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_/&%+#*@=<>[]"


@dataclass(frozen=True)
class Family:
    """What distinguishes the denoisers on disk."""

    model_type: str
    in_dim: int
    out_dim: int = 16
    clip: bool = False
    ref_conv: bool = False
    camera: bool = False
    two_experts: bool = False
    vae22: bool = False
    shift: float = 5.0
    boundary: float = 0.9

    @property
    def vae_file(self) -> str:
        return VAE22_FILE if self.vae22 else VAE21_FILE

    @property
    def folders(self) -> tuple[str, ...]:
        """Where the denoisers lie below the root."""
        return (_LOW, _HIGH) if self.two_experts else ("",)


FAMILIES = {
    "wan2.1_t2v": Family("t2v", 16),
    "wan2.1_fun_inp": Family("i2v", 36, clip=True),
    "wan2.1_fun_control": Family("i2v", 48, clip=True, ref_conv=True),
    "wan2.1_fun_camera": Family("i2v", 32, clip=True, camera=True),
    "wan2.2_t2v_a14b": Family("t2v", 16, two_experts=True, shift=12.0, boundary=0.875),
    "wan2.2_i2v_a14b": Family("i2v", 36, two_experts=True),
    "wan2.2_ti2v_5b": Family("ti2v", 48, 48, vae22=True),
}


@dataclass(frozen=True)
class TinySizes:
    """Sizes of a tiny checkpoint.

    Attributes:
        dim, num_heads, num_layers, ffn_dim: the denoiser.
        text_dim, text_heads, text_layers: the text encoder; the denoiser takes ``text_dim`` as its text width.
        vae_dim: width of the VAE's first level.
        clip_layers, clip_mlp_dim: the image encoder; its width of 1280 is fixed by the denoiser's image branch, and its
            last block does not run.
    """

    dim: int = 96
    num_heads: int = 4
    num_layers: int = 2
    ffn_dim: int = 192
    text_dim: int = 32
    text_heads: int = 4
    text_layers: int = 2
    vae_dim: int = 4
    clip_layers: int = 2
    clip_mlp_dim: int = 128

    def __post_init__(self) -> None:
        too_small = [field.name for field in fields(self) if getattr(self, field.name) < 1]
        if too_small:
            raise ValueError(f"{', '.join(too_small)} must be at least 1.")
        if self.dim % (2 * self.num_heads):
            raise ValueError(f"--dim {self.dim} must be a multiple of 2 x --num_heads ({2 * self.num_heads}), since "
                             "rotary positions turn pairs of values in each head.")
        if self.text_dim % self.text_heads:
            raise ValueError(f"--text_dim {self.text_dim} must be a multiple of --text_heads ({self.text_heads}).")


@dataclass(frozen=True)
class TinyCheckpoint:
    """Where a tiny checkpoint lies: ``--pretrained_model_name_or_path`` and ``--config_path``."""

    folder: Path
    config_path: Path


def make_tiny_checkpoint(
    output: str | os.PathLike, *, family: str, seed: int = 0, dtype: torch.dtype | None = None, **sizes: int
) -> TinyCheckpoint:
    """Write a checkpoint that is made to be trained.

    Args:
        output: folder, made if absent; files of the same names are replaced.
        family: a key of ``FAMILIES``.
        seed: of the random weights.
        dtype: of the weights on disk, by default float32.
        sizes: fields of :class:`TinySizes` that differ from their defaults.
    """
    import torch

    from videox_fun.utils import tiny_weights

    kind, size = _family(family), TinySizes(**sizes)
    folder = Path(output)
    words = write_tokenizer(folder / TOKENIZER_FOLDER)

    def save(path: Path, weights: dict[str, torch.Tensor]) -> None:
        _save(path, tiny_weights.cast(weights, dtype or torch.float32))

    for index, subfolder in enumerate(kind.folders):
        params = _transformer_params(kind, size)
        save(folder / subfolder / WEIGHTS_FILE, tiny_weights.demo_transformer(params, seed=seed + index))
        _write_json(folder / subfolder / "config.json", transformer_config(kind, size))
    mean, std = (WAN22_MEAN, WAN22_STD) if kind.vae22 else (WAN21_MEAN, WAN21_STD)
    save(folder / kind.vae_file, tiny_weights.demo_vae(_vae_params(kind, size), seed=seed + 10, mean=mean, std=std))
    text = tiny_weights.demo_text_encoder(_text_params(size, words), seed=seed + 11, num_heads=size.text_heads)
    save(folder / TEXT_FILE, text)
    if kind.clip:
        save(folder / IMAGE_FILE, tiny_weights.demo_image_encoder(_image_params(size), seed=seed + 12))
    _write_yaml(folder / CONFIG_FILE, pipeline_config(kind, size, vocab=words))
    return TinyCheckpoint(folder, folder / CONFIG_FILE)


def _family(name: str) -> Family:
    key = name.replace("-", "_")
    if key not in FAMILIES:
        raise ValueError(f"Unknown --family '{name}'. Known: {', '.join(FAMILIES)}.")
    return FAMILIES[key]


# ------------------------------------------------------------------------------------------- recorded reference runs

_REFERENCE_SIZES = TinySizes(dim=48, num_heads=2, num_layers=2, ffn_dim=96, text_dim=32, text_heads=4)
_REFERENCE_VOCAB = 96
_REFERENCE_SEEDS = {VAE21_FILE: 102, TEXT_FILE: 103, IMAGE_FILE: 104, VAE22_FILE: 118}
# Family and one seed per denoiser folder.
REFERENCE_CHECKPOINTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "ckpt_t2v": ("wan2.1_t2v", (101,)),
    "ckpt_inp": ("wan2.1_fun_inp", (101,)),
    "ckpt_ctl": ("wan2.1_fun_control", (111,)),
    "ckpt_cam": ("wan2.1_fun_camera", (112,)),
    "ckpt_a14b": ("wan2.2_t2v_a14b", (113, 114)),
    "ckpt_a14b_inp": ("wan2.2_i2v_a14b", (115, 116)),
    "ckpt_5b": ("wan2.2_ti2v_5b", (117,)),
}


def make_reference_checkpoint(
    output: str | os.PathLike, *, name: str, tokenizer: str | os.PathLike
) -> TinyCheckpoint:
    """Rebuild, bit for bit, a checkpoint of the recorded reference runs.

    Args:
        output: folder, made if absent.
        name: a key of ``REFERENCE_CHECKPOINTS``.
        tokenizer: the tokenizer folder of those runs, which is copied.
    """
    from videox_fun.utils.tiny_weights import reference_weights

    family, seeds = REFERENCE_CHECKPOINTS[name]
    kind, size, folder = FAMILIES[family], _REFERENCE_SIZES, Path(output)
    shutil.copytree(tokenizer, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
    identity = ("img_emb.proj.1.weight",) if kind.clip else ()
    for subfolder, seed in zip(kind.folders, seeds, strict=True):
        params = _transformer_params(kind, size)
        _save(folder / subfolder / WEIGHTS_FILE, reference_weights(params, seed=seed, identity=identity))
        _write_json(folder / subfolder / "config.json", transformer_config(kind, size))
    parts = {kind.vae_file: _vae_params(kind, size), TEXT_FILE: _text_params(size, _REFERENCE_VOCAB)}
    if kind.clip:
        parts[IMAGE_FILE] = _image_params(size)
    for file, params in parts.items():
        _save(folder / file, reference_weights(params, seed=_REFERENCE_SEEDS[file]))
    _write_yaml(folder / CONFIG_FILE, pipeline_config(kind, size, vocab=_REFERENCE_VOCAB))
    return TinyCheckpoint(folder, folder / CONFIG_FILE)


# ------------------------------------------------------------------------------------------------------------ shapes


def _transformer_params(kind: Family, size: TinySizes) -> tiny_shapes.Params:
    return tiny_shapes.transformer(
        dim=size.dim, ffn_dim=size.ffn_dim, num_layers=size.num_layers, in_dim=kind.in_dim, out_dim=kind.out_dim,
        text_dim=size.text_dim, clip=kind.clip, ref_conv=kind.ref_conv, camera=kind.camera,
    )


def _vae_params(kind: Family, size: TinySizes) -> tiny_shapes.Params:
    if kind.vae22:
        return tiny_shapes.vae22(dim=size.vae_dim, dec_dim=size.vae_dim)
    return tiny_shapes.vae21(dim=size.vae_dim)


def _text_sizes(size: TinySizes, vocab: int) -> dict[str, int]:
    return {"vocab": vocab, "dim": size.text_dim, "dim_attn": size.text_dim, "dim_ffn": size.text_dim,
            "num_heads": size.text_heads, "num_layers": size.text_layers, "num_buckets": _BUCKETS}


def _text_params(size: TinySizes, vocab: int) -> tiny_shapes.Params:
    return tiny_shapes.text_encoder(**_text_sizes(size, vocab))


def _image_params(size: TinySizes) -> tiny_shapes.Params:
    return tiny_shapes.image_encoder(vision_layers=size.clip_layers, vision_mlp_dim=size.clip_mlp_dim)


# ------------------------------------------------------------------------------------------------------------- files


def transformer_config(kind: Family, size: TinySizes) -> dict[str, Any]:
    """``config.json`` of a denoiser."""
    config: dict[str, Any] = {
        "_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": size.dim, "eps": 1e-06,
        "ffn_dim": size.ffn_dim, "freq_dim": 256, "in_dim": kind.in_dim, "model_type": kind.model_type,
        "num_heads": size.num_heads, "num_layers": size.num_layers, "out_dim": kind.out_dim, "text_len": 512,
        "text_dim": size.text_dim,
    }
    if kind.ref_conv:
        config |= {"add_ref_conv": True, "in_dim_ref_conv": 16}
    if kind.camera:
        config |= {"add_control_adapter": True, "in_dim_control_adapter": 24, "downscale_factor_control_adapter": 8}
    return config


def pipeline_config(kind: Family, size: TinySizes, *, vocab: int) -> dict[str, Any]:
    """Content of the file for ``--config_path``."""
    mapping = {"dict_mapping": {"in_dim": "in_channels", "dim": "hidden_size"}}
    if kind.two_experts:
        transformer = {"transformer_low_noise_model_subpath": f"./{_LOW}",
                       "transformer_high_noise_model_subpath": f"./{_HIGH}",
                       "transformer_combination_type": "moe", "boundary": kind.boundary}
    elif kind.vae22:
        transformer = {"transformer_low_noise_model_subpath": "./", "transformer_combination_type": "single"}
    else:
        transformer = {"transformer_subpath": "./"}
    vae_type = {"vae_type": "AutoencoderKLWan3_8" if kind.vae22 else "AutoencoderKLWan"}
    wan22 = kind.vae22 or kind.two_experts
    return {
        "format": "civitai",
        "pipeline": "Wan",
        "transformer_additional_kwargs": transformer | mapping,
        "vae_kwargs": (vae_type if wan22 else {}) | {
            "vae_subpath": kind.vae_file, "temporal_compression_ratio": 4,
            "spatial_compression_ratio": 16 if kind.vae22 else 8,
        },
        "text_encoder_kwargs": {
            "text_encoder_subpath": TEXT_FILE, "tokenizer_subpath": TOKENIZER_FOLDER, "text_length": 512,
            **_text_sizes(size, vocab), "shared_pos": False, "dropout": 0.0,
        },
        "scheduler_kwargs": {
            "scheduler_subpath": None, "num_train_timesteps": 1000, "shift": kind.shift, "use_dynamic_shifting": False,
            "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096,
        },
        "image_encoder_kwargs": {"image_encoder_subpath": IMAGE_FILE},
    }


def write_tokenizer(folder: str | os.PathLike) -> int:
    """A small tokenizer for any text: common words, single characters, ``<unk>`` for the rest. Returns its size.

    As with the real one, padding is 0, the end of the text is 1, and every text ends with it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "</s>", "<unk>"]
    pieces = [*((word, 0.0) for word in special), *((f"▁{word}", -4.0) for word in dict.fromkeys(_WORDS)),
              ("▁", -6.0), *((character, -8.0) for character in _CHARACTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens(special)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": 512})
    _write_json(folder / "special_tokens_map.json", names)
    return tokenizer.get_vocab_size()


def _save(path: Path, weights: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(weights, path, metadata={"format": "pt"})
    else:
        import torch

        torch.save(weights, path)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_yaml(path: Path, value: Any) -> None:
    import yaml

    path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), encoding="utf-8")
