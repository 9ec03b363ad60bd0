"""What the audit must know about a model family: sizes, block classes, heads, which norms Liger covers.

A family is recognized from the folder of the training script. Sizes come from the checkpoint's name (``14B``, ``A14B``,
``5b``), else from the family's usual size. Sharding by block class needs the names of the classes that really occur in
the model: VACE, for example, has no plain ``WanAttentionBlock``, only two subclasses of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from optim_patches.audit.text import Text

WAN_TARGETS = "q,k,v,ffn.0,ffn.2"
_WAN_NORMS = Text("q/k RMSNorm and LayerNorm (no gated MLP here)", "q/k RMSNorm 与 LayerNorm（该模型没有 SwiGLU）")
_RMS = Text("RMSNorm", "RMSNorm")
_RMS_SWIGLU = Text("RMSNorm and SwiGLU", "RMSNorm 与 SwiGLU")
_WAN_HEADS = {1.3: 12, 5.0: 24, 14.0: 40}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        key: folder below ``scripts/``.
        name: as the report writes it.
        blocks: classes of the transformer blocks, as FSDP must wrap them.
        params: usual size in billions of parameters.
        heads: attention heads by size; an empty mapping means unknown.
        targets: LoRA targets that match in this family.
        image: still images only.
        quantum: pixels per token side (VAE ratio times patch).
        liger: layers that Liger kernels cover, None when there are none.
        wan_vae: uses a VAE that ``--vae_tiling`` handles.
        guidance_distilled: trained without classifier-free guidance.
    """

    key: str
    name: str
    blocks: tuple[str, ...]
    params: float
    heads: Mapping[float, int] = field(default_factory=dict)
    targets: str = WAN_TARGETS
    image: bool = False
    quantum: int = 16
    liger: Text | None = _WAN_NORMS
    wan_vae: bool = True
    guidance_distilled: bool = False


def _wan(key: str, name: str, *blocks: str, params: float = 14.0) -> Family:
    return Family(key, name, blocks or ("WanAttentionBlock",), params, _WAN_HEADS)


def _other(key: str, name: str, blocks: str, params: float, heads: int, **kwargs: object) -> Family:
    options: dict[str, object] = {"targets": "to_q,to_k,to_v", "wan_vae": False, "liger": _RMS, **kwargs}
    return Family(key, name, tuple(blocks.split()), params, {params: heads}, **options)  # type: ignore[arg-type]


_VACE = ("BaseWanAttentionBlock", "VaceWanAttentionBlock")
_FLUX = "FluxTransformerBlock FluxSingleTransformerBlock"
_FLUX2 = "Flux2TransformerBlock Flux2SingleTransformerBlock"
_HUNYUAN = "HunyuanVideoTransformerBlock HunyuanVideoSingleTransformerBlock"

FAMILIES: dict[str, Family] = {
    family.key: family
    for family in (
        _wan("wan2.1", "Wan2.1"),
        _wan("wan2.1_fun", "Wan2.1-Fun"),
        _wan("wan2.1_vace", "Wan2.1-VACE", *_VACE),
        _wan("wan2.2", "Wan2.2"),
        _wan("wan2.2_fun", "Wan2.2-Fun"),
        _wan("wan2.2_vace_fun", "Wan2.2-VACE", *_VACE),
        _wan("turbodiffusion", "TurboDiffusion"),
        _wan("fantasytalking", "FantasyTalking", "AudioAttentionBlock"),
        _wan("infinitetalk", "InfiniteTalk"),
        _wan("flashhead", "FlashHead", "FlashHeadAttentionBlock", params=1.3),
        _wan("mova", "MOVA"),
        _other("longcatvideo", "LongCatVideo", "LongCatSingleStreamBlock", 13.6, 32, wan_vae=True, liger=_RMS_SWIGLU,
               targets="qkv,q_linear,kv_linear,w1,w2,w3"),
        Family("cogvideox_fun", "CogVideoX-Fun", ("CogVideoXBlock",), 5.0, {2.0: 30, 5.0: 48},
               "to_q,to_k,to_v,ff.net.0.proj,ff.net.2", wan_vae=False, liger=Text("LayerNorm", "LayerNorm")),
        _other("hunyuanvideo", "HunyuanVideo", _HUNYUAN, 13.0, 24, guidance_distilled=True),
        _other("ltx2", "LTX-2", "LTX2VideoTransformerBlock", 19.0, 32, quantum=32),
        _other("ltx2.3", "LTX-2.3", "LTX2VideoTransformerBlock", 22.0, 32, quantum=32),
        _other("flux", "Flux", _FLUX, 12.0, 24, image=True, guidance_distilled=True),
        _other("flux2", "Flux.2", _FLUX2, 32.0, 48, image=True, guidance_distilled=True, liger=_RMS_SWIGLU),
        _other("flux2_fun", "Flux.2-Fun", "BaseFlux2TransformerBlock Flux2ControlTransformerBlock "
               "Flux2SingleTransformerBlock", 32.0, 48, image=True, guidance_distilled=True, liger=_RMS_SWIGLU),
        _other("qwenimage", "Qwen-Image", "QwenImageTransformerBlock", 20.0, 24, image=True),
        _other("qwenimage_fun", "Qwen-Image-Fun", "BaseQwenImageTransformerBlock QwenImageControlTransformerBlock",
               20.0, 24, image=True),
        _other("qwenimage_instantx", "Qwen-Image-InstantX", "QwenImageTransformerBlock", 20.0, 24, image=True),
        _other("z_image", "Z-Image", "ZImageTransformerBlock", 6.0, 30, image=True, liger=_RMS_SWIGLU),
        _other("z_image_fun", "Z-Image-Fun", "BaseZImageTransformerBlock ZImageControlTransformerBlock", 6.0, 30,
               image=True, liger=_RMS_SWIGLU),
    )
}  # fmt: skip

#: Scripts whose model has other blocks than the rest of their family.
SCRIPT_BLOCKS: dict[str, tuple[str, ...]] = {
    "wan2.2/train_s2v": ("WanS2VAttentionBlock",),
    "wan2.2/train_s2v_lora": ("WanS2VAttentionBlock",),
    "longcatvideo/train_avatar": ("LongCatAvatarSingleStreamBlock",),
    "longcatvideo/train_avatar_lora": ("LongCatAvatarSingleStreamBlock",),
}

#: Constructor arguments of the Wan transformers; anything else in config.json is ignored by the class.
WAN_CONFIG_KEYS = frozenset(
    "model_type patch_size text_len in_dim dim ffn_dim freq_dim text_dim out_dim num_heads num_layers window_size "
    "qk_norm cross_attn_norm eps in_channels hidden_size add_control_adapter in_dim_control_adapter "
    "downscale_factor_control_adapter add_ref_conv in_dim_ref_conv cross_attn_type vace_layers vace_in_dim "
    "motion_encoder_dim use_img_emb".split()
)
#: Keys of the other published layout of the same models; they are translated when the model is loaded.
TRANSLATED_CONFIG_KEYS = frozenset(
    "has_image_input has_ref_conv has_image_pos_emb require_clip_embedding require_vae_embedding seperated_timestep "
    "fuse_vae_embedding_in_latents".split()
)

_SIZE = re.compile(r"(?<![\w.])A?(\d+(?:\.\d+)?)[bB](?![a-zA-Z])")


def size_from_name(name: str) -> float | None:
    """Billions of parameters from a checkpoint name: ``Wan2.2-TI2V-5B`` gives 5.0."""
    sizes = _SIZE.findall(name.replace("_", "-").replace("/", " /"))
    return float(sizes[-1]) if sizes else None


def size_from_config(config: Mapping[str, object]) -> float | None:
    """Billions of parameters of a Wan transformer from the width in its config.json."""
    width = config.get("dim", config.get("hidden_size"))
    return {1536: 1.3, 3072: 5.0, 5120: 14.0}.get(width) if isinstance(width, int) else None


def block_classes(script_id: str, family: Family | None) -> tuple[str, ...]:
    """The block classes of the model that a script trains."""
    return SCRIPT_BLOCKS.get(script_id, family.blocks if family else ())


def heads(family: Family | None, params: float | None) -> int | None:
    """Attention heads of a family at a size, None when unknown."""
    if family is None or not family.heads or params is None:
        return None
    return family.heads.get(params)
