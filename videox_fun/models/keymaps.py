"""Names of the Wan transformer in the native and in the diffusers layout, and their configs.

Both layouts hold the same tensors, so a conversion only renames. Each rule is a pair of regular expressions applied to
a whole key; the first that matches wins, and a key without a rule keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# (native, diffusers); "#" stands for a block number, "%" for the rest of the key (".weight", ".bias").
_PAIRS: tuple[tuple[str, str], ...] = (
    *((f"blocks.#.{native}.{a}%", f"blocks.#.{other}.{b}%")
      for native, other in (("self_attn", "attn1"), ("cross_attn", "attn2"))
      for a, b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"), ("k_img", "add_k_proj"),
                   ("v_img", "add_v_proj"), ("norm_k_img", "norm_added_k"), ("norm_q", "norm_q"),
                   ("norm_k", "norm_k"))),
    ("blocks.#.norm3%", "blocks.#.norm2%"),
    ("blocks.#.ffn.0%", "blocks.#.ffn.net.0.proj%"),
    ("blocks.#.ffn.2%", "blocks.#.ffn.net.2%"),
    ("blocks.#.modulation", "blocks.#.scale_shift_table"),
    ("head.modulation", "scale_shift_table"),
    ("head.head%", "proj_out%"),
    ("text_embedding.0%", "condition_embedder.text_embedder.linear_1%"),
    ("text_embedding.2%", "condition_embedder.text_embedder.linear_2%"),
    ("time_embedding.0%", "condition_embedder.time_embedder.linear_1%"),
    ("time_embedding.2%", "condition_embedder.time_embedder.linear_2%"),
    ("time_projection.1%", "condition_embedder.time_proj%"),
    ("img_emb.proj.0%", "condition_embedder.image_embedder.norm1%"),
    ("img_emb.proj.1%", "condition_embedder.image_embedder.ff.net.0.proj%"),
    ("img_emb.proj.3%", "condition_embedder.image_embedder.ff.net.2%"),
    ("img_emb.proj.4%", "condition_embedder.image_embedder.norm2%"),
)  # fmt: skip


def _compile(pairs: tuple[tuple[str, str], ...]) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for source, target in pairs:
        pattern = re.escape(source).replace(r"\#", r"(?P<n>\d+)").replace("%", r"(?P<rest>\.(?:weight|bias)|)")
        replacement = target.replace("#", r"\g<n>").replace("%", r"\g<rest>")
        rules.append((re.compile(pattern), replacement))
    return rules


_TO_DIFFUSERS = _compile(_PAIRS)
_TO_NATIVE = _compile(tuple((b, a) for a, b in _PAIRS))


def _rename(key: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        if match := pattern.fullmatch(key):
            return match.expand(replacement)
    return key


def native_to_diffusers(key: str) -> str:
    """Diffusers name of a native parameter or module name."""
    return _rename(key, _TO_DIFFUSERS)


def diffusers_to_native(key: str) -> str:
    """Native name of a diffusers parameter or module name."""
    return _rename(key, _TO_NATIVE)


def is_diffusers_state(keys: Mapping[str, Any]) -> bool:
    """Whether the names are those of the diffusers layout."""
    return any(key.startswith("condition_embedder.") or ".attn1.to_q." in key for key in keys)


def to_native_state(state: Mapping[str, T]) -> dict[str, T]:
    """State dict under native names; a native one comes back unchanged."""
    if not is_diffusers_state(state):
        return dict(state)
    return {diffusers_to_native(key): value for key, value in state.items()}


def to_diffusers_state(state: Mapping[str, T]) -> dict[str, T]:
    """State dict under diffusers names."""
    return {native_to_diffusers(key): value for key, value in state.items()}


def is_diffusers_config(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` describes the diffusers class."""
    return "attention_head_dim" in config and "num_attention_heads" in config


def diffusers_config_to_native(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of the native class for a diffusers config; keys without a counterpart stay."""
    if config.get("pos_embed_seq_len") is not None:
        raise ValueError(
            f"pos_embed_seq_len={config['pos_embed_seq_len']}: models with a position embedding on the image tokens "
            "(first-and-last-frame) are not supported"
        )
    if config.get("qk_norm", "rms_norm_across_heads") not in ("rms_norm_across_heads", None):
        raise ValueError(f"qk_norm={config['qk_norm']!r} is not supported; the Wan models use rms_norm_across_heads")
    if config.get("rope_max_seq_len", 1024) != 1024:
        raise ValueError(f"rope_max_seq_len={config['rope_max_seq_len']} is not supported, only 1024")
    width = config["num_attention_heads"] * config["attention_head_dim"]
    image = config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None
    renamed = {"num_attention_heads": "num_heads", "in_channels": "in_dim", "out_channels": "out_dim"}
    replaced = {
        "attention_head_dim", "qk_norm", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len", "rope_max_seq_len",
    }  # fmt: skip
    native = {renamed.get(key, key): value for key, value in config.items() if key not in replaced}
    native.update(
        model_type="i2v" if image else "t2v",
        dim=width,
        hidden_size=width,
        in_channels=config.get("in_channels", 16),
        qk_norm=config.get("qk_norm", "rms_norm_across_heads") is not None,
    )
    return native


_DIFFSYNTH_DROPPED = (
    "has_image_input", "has_ref_conv", "has_image_pos_emb", "require_clip_embedding", "require_vae_embedding",
    "seperated_timestep", "fuse_vae_embedding_in_latents", "_class_name", "_diffusers_version", "_name_or_path",
)  # fmt: skip


def is_diffsynth_config(config: Mapping[str, Any]) -> bool:
    """Whether the config is in DiffSynth's form."""
    return "has_image_input" in config


def diffsynth_config_to_native(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments for a DiffSynth-style config."""
    if config.get("has_image_pos_emb"):
        raise ValueError("has_image_pos_emb: models with a position embedding on the image tokens are not supported")
    native: dict[str, Any] = {
        "cross_attn_type": "cross_attn",
        "qk_norm": True,
        "cross_attn_norm": True,
        "text_len": 512,
        "window_size": (-1, -1),
    }
    native.update({key: value for key, value in config.items() if key not in _DIFFSYNTH_DROPPED})
    native["model_type"] = "i2v" if config["has_image_input"] else "t2v"
    if "has_ref_conv" in config:
        native["add_ref_conv"] = config["has_ref_conv"]
    for source, target in (("in_dim", "in_channels"), ("dim", "hidden_size")):
        if source in native:
            native[target] = native[source]
    return native
