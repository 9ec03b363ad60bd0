"""Names in LoRA files: which tensor of which layer a key means.

A key is a *stem* (which layer) and a *part* (down, up or alpha). Tools disagree on both. The part is read with a few
patterns. The stem is never taken apart by guessing where an underscore was a dot: ``to_out_0`` or ``k_img`` would be
read wrongly. Instead every module name of the target model is written down in all the ways tools write it, and the
stem is looked up there (:class:`ModuleIndex`). What is not found is reported, never dropped.

This module knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Prefixes that wrappers and tools put before the real module name; several may be stacked.
WRAPPER_PREFIXES = (
    "module.", "pipe.dit.", "pipe.transformer.", "base_model.model.", "model.diffusion_model.", "diffusion_model.",
    "transformer.", "transformer_2.", "dit.", "unet.", "model.", "network.", "_orig_mod.",
)
# Inserted in the middle of names by torch.compile, activation checkpointing, FSDP and PEFT.
WRAPPER_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "base_layer.")
FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_unet_", "lycoris_")
TEXT_FLAT_PREFIXES = ("lora_te__", "lora_te_", "lora_te1_", "lora_te2_")
TEXT_PREFIXES = ("text_encoder.", "text_encoder_2.")

_ADAPTER = r"(?:\.(?!weight$)[^.]+)?"
_PARTS = (
    ("down", re.compile(rf"^(?P<stem>.+)\.lora_(?:A|down){_ADAPTER}(?:\.weight)?$")),
    ("up", re.compile(rf"^(?P<stem>.+)\.lora_(?:B|up){_ADAPTER}(?:\.weight)?$")),
    ("down", re.compile(r"^(?P<stem>.+)[._]lora\.down\.weight$")),
    ("up", re.compile(r"^(?P<stem>.+)[._]lora\.up\.weight$")),
    ("alpha", re.compile(r"^(?P<stem>.+)\.alpha$")),
)
# Adapters that are more than a pair of matrices. Dropping the extra tensor would change the result without a word.
_FOREIGN = (
    ("DoRA", re.compile(r"\.(dora_scale|lora_magnitude_vector(\..+)?)$")),
    ("LoHa", re.compile(r"\.hada_")),
    ("LoKr", re.compile(r"\.lokr_")),
    ("OFT", re.compile(r"\.oft_")),
    ("GLoRA", re.compile(r"\.[ab][12]\.weight$")),
    ("LoCon with a middle (Tucker) matrix", re.compile(r"\.lora_mid(\.weight)?$")),
    ("LoRA with a bias", re.compile(r"\.(lora_(A|B|up|down)(\.[^.]+)?\.bias|lora_bias|bias_(values|indices|size))$")),
    ("embedding LoRA", re.compile(r"\.lora_embedding_[AB]")),
    ("whole-weight difference", re.compile(r"\.(diff|diff_b|set_weight|w_norm|b_norm)$")),
    ("reshaped LoRA", re.compile(r"\.reshape_weight$")),
)

# Wan module names, native -> diffusers. A block's names follow its "blocks.N." prefix.
_BLOCK_NAMES = {
    **{f"{ours}.{part}": f"{theirs}.{name}"
       for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
       for part, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))},
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_TOP_NAMES = {
    **{f"{part}_embedding.{index}": f"condition_embedder.{part}_embedder.linear_{number}"
       for part in ("text", "time") for index, number in ((0, 1), (2, 2))},
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
}
_BLOCK_NAMES_BACK = {theirs: ours for ours, theirs in _BLOCK_NAMES.items()}
_TOP_NAMES_BACK = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
_BLOCK = re.compile(r"^((?:vace_)?blocks\.\d+\.)(.+)$")
_MAX_WAN_BLOCKS = 64


def _rename(name: str, blocks: dict[str, str], top: dict[str, str]) -> str | None:
    match = _BLOCK.match(name)
    if match is None:
        return top.get(name)
    renamed = blocks.get(match.group(2))
    return None if renamed is None else match.group(1) + renamed


def to_diffusers_name(name: str) -> str | None:
    """Diffusers' name of a native Wan module, or ``None`` if it has none."""
    return _rename(name, _BLOCK_NAMES, _TOP_NAMES)


def to_native_name(name: str) -> str | None:
    """Native name of a diffusers Wan module, or ``None`` if it has none."""
    return _rename(name, _BLOCK_NAMES_BACK, _TOP_NAMES_BACK)


def wan_module_names() -> list[str]:
    """Every Wan module that can carry a LoRA, for when no model is at hand to read the names from."""
    blocks = [f"{kind}.{index}.{name}" for kind in ("blocks", "vace_blocks") for index in range(_MAX_WAN_BLOCKS)
              for name in _BLOCK_NAMES]
    return [*_TOP_NAMES, *blocks]


def flatten(name: str) -> str:
    """A module name as Kohya-style files write it."""
    return name.replace(".", "_")


def strip_infixes(name: str) -> str:
    """Remove what torch.compile, checkpointing, FSDP and PEFT insert into names."""
    for infix in WRAPPER_INFIXES:
        name = name.replace(infix, "")
    return name


def unwrap(name: str) -> str:
    """A module name without the prefixes and infixes of wrappers."""
    *_, (bare, _prefix) = _unwrapped(strip_infixes(name))
    return bare


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into stem and part (``down``, ``up``, ``alpha``); ``None`` if it is no LoRA key."""
    for part, pattern in _PARTS:
        match = pattern.match(key)
        if match is not None:
            return match.group("stem"), part
    return None


def foreign_kinds(keys: Iterable[str]) -> dict[str, str]:
    """Adapter kinds in ``keys`` that are not plain LoRA, each with one example key."""
    found: dict[str, str] = {}
    for key in keys:
        for kind, pattern in _FOREIGN:
            if pattern.search(key):
                found.setdefault(kind, key)
    return found


@dataclass(frozen=True)
class Resolved:
    """Where a stem points.

    Attributes:
        name: real module name.
        component: ``transformer`` or ``text_encoder``.
        style: how the file wrote it: ``kohya``, ``comfyui`` (dotted after ``diffusion_model.``), ``peft`` (dotted)
            or ``diffusers``.
    """

    name: str
    component: str
    style: str


class ModuleIndex:
    """Real module names of a model, findable by every spelling in use."""

    def __init__(self, names: Iterable[str], *, text_names: Iterable[str] = ()) -> None:
        self.names = tuple(names)
        self.text_names = tuple(text_names)
        self._dotted: dict[str, Resolved] = {}
        self._flat: dict[str, dict[str, set[str]]] = {"transformer": {}, "text_encoder": {}}
        known = set(self.names)
        for name in self.names:
            self._add(name, name, "transformer", "diffusers" if to_native_name(name) else "peft")
        for name in self.names:
            for alias, style in ((to_diffusers_name(name), "diffusers"), (to_native_name(name), "peft")):
                if alias is not None and alias not in known:
                    self._add(alias, name, "transformer", style)
        for name in self.text_names:
            self._flat["text_encoder"].setdefault(flatten(name), set()).add(name)

    def _add(self, spelling: str, name: str, component: str, style: str) -> None:
        self._dotted.setdefault(spelling, Resolved(name, component, style))
        self._flat[component].setdefault(flatten(spelling), set()).add(name)

    def resolve(self, stem: str) -> Resolved | None:
        """The module a stem means, or ``None``. Raises ``ValueError`` when two modules share the spelling."""
        for spelling, prefix in _unwrapped(strip_infixes(stem)):
            found = self._dotted.get(spelling)
            if found is not None:
                comfy = prefix.endswith("diffusion_model.") and found.style == "peft"
                return Resolved(found.name, found.component, "comfyui") if comfy else found
        for prefixes, component in ((TEXT_FLAT_PREFIXES, "text_encoder"), (FLAT_PREFIXES, "transformer")):
            for prefix in prefixes:
                if stem.startswith(prefix):
                    name = self._lookup_flat(stem[len(prefix):], component, stem)
                    if name is not None:
                        return Resolved(name, component, "kohya")
        return self._resolve_text(stem)

    def is_text(self, stem: str) -> bool:
        """Whether a stem belongs to a text encoder by its prefix, known or not."""
        return stem.startswith(TEXT_FLAT_PREFIXES) or stem.startswith(TEXT_PREFIXES)

    def _resolve_text(self, stem: str) -> Resolved | None:
        for prefix in TEXT_PREFIXES:
            if stem.startswith(prefix) and stem[len(prefix):] in self.text_names:
                return Resolved(stem[len(prefix):], "text_encoder", "peft")
        return None

    def _lookup_flat(self, flat: str, component: str, stem: str) -> str | None:
        names = self._flat[component].get(flat, set())
        if len(names) > 1:
            raise ValueError(f"LoRA key '{stem}' could mean any of {sorted(names)}: the underscore spelling is "
                             "ambiguous for this model. Convert the file to a dotted format first.")
        return next(iter(names), None)


def _unwrapped(stem: str) -> Iterator[tuple[str, str]]:
    """The stem itself, then the stem with one more known wrapper prefix taken off, each with what was taken off."""
    prefix = ""
    while True:
        yield stem, prefix
        taken = next((p for p in WRAPPER_PREFIXES if stem.startswith(p)), None)
        if taken is None:
            return
        stem, prefix = stem[len(taken):], prefix + taken
