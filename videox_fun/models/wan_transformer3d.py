"""The Wan 2.1 / 2.2 video denoiser.

A forward has three parts, so that variants can replace one of them:

``embed``       latents, time, text, image and camera to an :class:`Embedded` (tokens and what the blocks need);
``run_blocks``  the transformer blocks, one call of ``run_block`` each (gradient checkpointing lives there);
``decode``      drop the tokens that were only context, output head, patches back to pixels.

Nothing in a forward waits for the GPU: the batch shares one grid, so lengths are shapes, and the rotary table of a grid
is built once. Padding up to ``seq_len`` would be masked in attention and thrown away afterwards, so it is not computed
at all, unless ``attend_padding`` is set, which reproduces the unmasked result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.single_file_model import FromOriginalModelMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from videox_fun.models.cache_utils import CachedSampling
from videox_fun.models.wan_blocks import (
    WAN_CROSSATTENTION_CLASSES,
    GatedResidual,
    Head,
    MLPProj,
    WanAttentionBlock,
    WanCrossAttention,
    WanI2VCrossAttention,
    WanLayerNorm,
    WanRMSNorm,
    WanSelfAttention,
    WanT2VCrossAttention,
)
from videox_fun.models.wan_camera_adapter import SimpleAdapter
from videox_fun.models.wan_rope import (
    RopeTable,
    get_1d_rotary_pos_embed_riflex,
    rope_apply,
    rope_apply_qk,
    rope_params,
)
from videox_fun.utils.cfg_optimization import cfg_skip

__all__ = [
    "Embedded",
    "Flops",
    "GatedResidual",
    "Head",
    "MLPProj",
    "Wan2_2Transformer3DModel",
    "WanAttentionBlock",
    "WanCrossAttention",
    "WanI2VCrossAttention",
    "WanLayerNorm",
    "WanRMSNorm",
    "WanSelfAttention",
    "WanT2VCrossAttention",
    "WanTransformer3DModel",
    "get_1d_rotary_pos_embed_riflex",
    "rope_apply",
    "rope_apply_qk",
    "rope_params",
    "sinusoidal_embedding_1d",
]

CLIP_DIM = 1280


def sinusoidal_embedding_1d(dim: int, position: Tensor) -> Tensor:
    """``[N]`` positions to ``[N, dim]``: cosines, then sines, of ``position * 10000^(-i / (dim/2))``, in float64."""
    if dim % 2:
        raise ValueError(f"a sinusoidal embedding needs an even dimension, got {dim}")
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=position.device) / half
    angles = torch.outer(position.to(torch.float64), torch.pow(10000, -exponents))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward (a multiplication and an addition count as two)."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        return self.linear + self.attention


@dataclass(frozen=True)
class Embedded:
    """What the blocks work on."""

    tokens: Tensor  # [B, L, dim]
    e: Tensor  # time embedding for the head, [B, dim] or [B, L, dim]
    e0: Tensor  # modulation for the blocks, [B, 6, dim] or [B, L, 6, dim]
    context: Tensor  # image tokens (if any) and text, [B, tokens, dim]
    freqs: Tensor  # rotary table, [L, head_dim/2, 2]
    grid: tuple[int, int, int]  # frames, rows, columns of all tokens, reference frames included
    output_grid: tuple[int, int, int]  # of the tokens to be decoded
    skip: int = 0  # reference tokens in front of them


class WanTransformer3DModel(CachedSampling, ModelMixin, ConfigMixin, FromOriginalModelMixin):
    """Wan 2.1: text to video, image to video, Fun inpainting, Fun control (reference, camera)."""

    _supports_gradient_checkpointing = True
    _no_split_modules = ["WanAttentionBlock"]
    _repeated_blocks = ["WanAttentionBlock"]
    _image_branch = True  # image-to-video models project CLIP tokens

    @register_to_config
    def __init__(
        self, model_type: str = "t2v", patch_size: tuple[int, int, int] = (1, 2, 2), text_len: int = 512,
        in_dim: int = 16, dim: int = 2048, ffn_dim: int = 8192, freq_dim: int = 256, text_dim: int = 4096,
        out_dim: int = 16, num_heads: int = 16, num_layers: int = 32, window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True, cross_attn_norm: bool = True, eps: float = 1e-6, in_channels: int = 16,
        hidden_size: int = 2048, add_control_adapter: bool = False, in_dim_control_adapter: int = 24,
        downscale_factor_control_adapter: int = 8, add_ref_conv: bool = False, in_dim_ref_conv: int = 16,
        cross_attn_type: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if cross_attn_type is None:
            cross_attn_type = "i2v_cross_attn" if model_type == "i2v" else "t2v_cross_attn"
        if cross_attn_type not in WAN_CROSSATTENTION_CLASSES:
            known = ", ".join(WAN_CROSSATTENTION_CLASSES)
            raise ValueError(f"cross_attn_type={cross_attn_type!r} is unknown; use one of {known}")
        self.model_type = model_type
        self.patch_size = tuple(patch_size)
        self.text_len = text_len
        self.in_dim = in_dim
        self.dim = dim
        self.ffn_dim = ffn_dim
        self.freq_dim = freq_dim
        self.text_dim = text_dim
        self.out_dim = out_dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.cross_attn_type = cross_attn_type

        self.patch_embedding = nn.Conv3d(in_dim, dim, kernel_size=self.patch_size, stride=self.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim * 6))
        self.blocks = nn.ModuleList(
            WanAttentionBlock(cross_attn_type, dim, ffn_dim, num_heads, window_size, qk_norm, cross_attn_norm, eps)
            for _ in range(num_layers)
        )
        self.head = Head(dim, out_dim, self.patch_size, eps)
        if model_type == "i2v" and self._image_branch:
            self.img_emb = MLPProj(CLIP_DIM, dim)
        if add_control_adapter:
            self.control_adapter = SimpleAdapter(
                in_dim_control_adapter,
                dim,
                kernel_size=self.patch_size[1:],
                stride=self.patch_size[1:],
                downscale_factor=downscale_factor_control_adapter,
            )
        if add_ref_conv:
            self.ref_conv = nn.Conv2d(
                in_dim_ref_conv, dim, kernel_size=self.patch_size[1:], stride=self.patch_size[1:]
            )
        self.rope = RopeTable(dim // num_heads)
        self.attend_padding = False
        self.gradient_checkpointing = False
        self.load_report: Any = None
        self.init_weights()

    # ---- weights -------------------------------------------------------------------------------------------------

    def init_weights(self) -> None:
        """Initial values of a model that is trained from nothing."""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter)

    @torch.no_grad()
    def init_parameter(self, name: str, parameter: Tensor) -> None:
        """Initial value of one parameter; also used for what a checkpoint lacks."""
        if name.endswith("modulation"):
            nn.init.normal_(parameter, std=self.dim**-0.5)
        elif name.endswith("bias") or name == "head.head.weight":
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif name.startswith(("text_embedding.", "time_embedding.")):
            nn.init.normal_(parameter, std=0.02)
        elif name.startswith(("control_adapter.", "ref_conv.")):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        else:
            nn.init.xavier_uniform_(parameter.flatten(1))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_path: str | Path,
        subfolder: str | None = None,
        transformer_additional_kwargs: Mapping[str, Any] | None = None,
        low_cpu_mem_usage: bool = False,
        torch_dtype: torch.dtype = torch.bfloat16,
        *,
        strict: bool = False,
        allow_partial: bool = False,
    ) -> WanTransformer3DModel:
        """Load a folder (native or diffusers layout) or a file; see ``videox_fun.models.loading.load_transformer``."""
        from videox_fun.models.loading import load_transformer

        return load_transformer(
            cls,
            pretrained_model_path,
            subfolder=subfolder,
            additional_kwargs=transformer_additional_kwargs,
            low_cpu_mem_usage=low_cpu_mem_usage,
            torch_dtype=torch_dtype,
            strict=strict,
            allow_partial=allow_partial,
        )

    def to(self, *args: Any, **kwargs: Any) -> WanTransformer3DModel:
        """Move or cast all weights. The library's own version warns of an empty list of float32 parts at each cast."""
        return nn.Module.to(self, *args, **kwargs)

    # ---- rotary --------------------------------------------------------------------------------------------------

    @property
    def freqs(self) -> Tensor:
        """Complex rotary tables of the three axes side by side, ``[1024, head_dim/2]``."""
        return self.rope.freqs()

    def enable_riflex(self, k: int = 6, L_test: int = 66, L_test_scale: float | None = 4.886) -> None:
        """Stretch the ``k``-th time frequency to ``L_test`` latent frames, for videos longer than trained."""
        self.rope = RopeTable(self.dim // self.num_heads, riflex=(k, L_test, L_test_scale))

    def disable_riflex(self) -> None:
        """Back to the trained frequencies."""
        self.rope = RopeTable(self.dim // self.num_heads)

    # ---- forward -------------------------------------------------------------------------------------------------

    @cfg_skip()
    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        t: Tensor,
        context: Tensor | Sequence[Tensor],
        seq_len: int | None = None,
        clip_fea: Tensor | None = None,
        y: Tensor | Sequence[Tensor] | None = None,
        y_camera: Tensor | None = None,
        full_ref: Tensor | None = None,
        subject_ref: Tensor | None = None,
        cond_flag: bool = True,
    ) -> Tensor:
        """Predicted velocity ``[B, out_dim, T, H, W]`` of noisy latents ``x [B, C, T, H, W]``.

        ``t`` is ``[B]`` or, one per token, ``[B, L]``; ``context`` is text ``[B, l, text_dim]`` or a list of
        ``[l, text_dim]`` with ``l <= text_len``; ``y`` is concatenated to ``x`` on channels; ``clip_fea`` is
        ``[B, 257, 1280]``; ``y_camera`` are rays ``[B, C, T, H*8, W*8]``; ``full_ref [B, C, H, W]`` becomes frame 0;
        ``subject_ref [B, C, n, H, W]`` frames are appended. ``cond_flag`` is only read by caches that tell the guided
        half of a sampling step from the other.
        """
        embedded = self.embed(
            x, t, context, seq_len, clip_fea=clip_fea, y=y, y_camera=y_camera, full_ref=full_ref,
            subject_ref=subject_ref,
        )  # fmt: skip
        tokens = self.cached(embedded.tokens, embedded.e0, lambda: self.run_blocks(embedded), prompted=cond_flag)
        return self.decode(tokens, embedded)

    def embed(
        self,
        x: Tensor | Sequence[Tensor],
        t: Tensor,
        context: Tensor | Sequence[Tensor],
        seq_len: int | None = None,
        *,
        clip_fea: Tensor | None = None,
        y: Tensor | Sequence[Tensor] | None = None,
        y_camera: Tensor | None = None,
        full_ref: Tensor | None = None,
        subject_ref: Tensor | None = None,
    ) -> Embedded:
        """Everything before the blocks."""
        dtype = self.patch_embedding.weight.dtype
        latents = _as_batch(x)
        if y is not None:
            latents = torch.cat([latents, _as_batch(y).to(latents.dtype)], dim=1)
        latents = latents.to(dtype)
        if latents.shape[1] != self.in_dim:
            raise ValueError(
                f"the model takes {self.in_dim} input channels (in_dim) but the latents and conditions have "
                f"{latents.shape[1]}; check the train mode against the checkpoint"
            )
        patches = self.patch_embedding(latents)
        if y_camera is not None:
            patches = patches + self._optional("control_adapter", "y_camera")(y_camera.to(dtype))
        output_grid = tuple(patches.shape[2:])
        frames, skip = output_grid[0], 0
        tokens = patches.flatten(2).transpose(1, 2)
        own = tokens.shape[1]
        if full_ref is not None:
            reference = self._optional("ref_conv", "full_ref")(full_ref.to(dtype)).flatten(2).transpose(1, 2)
            tokens, skip, frames = torch.cat([reference, tokens], dim=1), reference.shape[1], frames + 1
        if subject_ref is not None:
            subjects = self.patch_embedding(subject_ref.to(dtype))
            frames += subjects.shape[2]
            tokens = torch.cat([tokens, subjects.flatten(2).transpose(1, 2)], dim=1)
        length = tokens.shape[1]
        if seq_len is not None and own > seq_len:
            raise ValueError(f"seq_len={seq_len} is shorter than the {own} tokens of the latents")
        padding = seq_len - own if self.attend_padding and seq_len is not None else 0
        tokens = F.pad(tokens, (0, 0, 0, padding)) if padding else tokens.contiguous()
        grid = (frames, *output_grid[1:])
        freqs = self.rope.grid(grid, tokens.device, padding=padding)
        e, e0 = self.embed_time(t, own=own, before=skip, after=length - skip - own + padding)
        context = self.embed_context(context, clip_fea)
        return Embedded(tokens, e, e0, context, freqs, grid, output_grid, skip)

    def embed_time(self, t: Tensor, *, own: int, before: int = 0, after: int = 0) -> tuple[Tensor, Tensor]:
        """Time embedding and modulation. A per-token ``t`` is stretched over added tokens by its last value."""
        dtype = self.time_embedding[0].weight.dtype
        if t.dim() == 2:
            last = t[:, -1:]
            t = torch.cat([last.expand(-1, before), t[:, :own], last.expand(-1, own - min(own, t.shape[1]) + after)], 1)
        embedding = sinusoidal_embedding_1d(self.freq_dim, t.flatten()).to(dtype).unflatten(0, t.shape)
        e = self.time_embedding(embedding)
        e0 = self.time_projection(e).unflatten(-1, (6, self.dim))
        if t.dim() == 1:  # per token it stays in the model's type: 6 * dim float32 numbers per token are too many
            e, e0 = e.float(), e0.float()
        return e, e0

    def embed_context(self, context: Tensor | Sequence[Tensor], clip_fea: Tensor | None = None) -> Tensor:
        """Image tokens, then text padded with zeros to ``text_len`` (unmasked: the models are trained that way)."""
        if not isinstance(context, Tensor):
            context = nn.utils.rnn.pad_sequence(list(context), batch_first=True)
        if context.shape[1] > self.text_len:
            raise ValueError(f"the text has {context.shape[1]} tokens, the model takes {self.text_len} (text_len)")
        context = F.pad(context, (0, 0, 0, self.text_len - context.shape[1]))
        tokens = self.text_embedding(context.to(self.text_embedding[0].weight.dtype))
        if clip_fea is not None:
            image = self._optional("img_emb", "clip_fea")(clip_fea.to(tokens.dtype))
            tokens = torch.cat([image, tokens], dim=1)
        elif self.cross_attn_type == "i2v_cross_attn":
            raise ValueError("an image-to-video model needs clip_fea [B, 257, 1280]; pass zeros for no image")
        return tokens

    def run_blocks(self, embedded: Embedded) -> Tensor:
        """All blocks in order."""
        tokens = embedded.tokens
        for block in self.blocks:
            tokens = self.run_block(block, tokens, embedded)
        return tokens

    def run_block(self, block: nn.Module, tokens: Tensor, embedded: Embedded) -> Tensor:
        """One block, under gradient checkpointing if that is on."""
        arguments = (tokens, embedded.e0, None, None, embedded.freqs, embedded.context)
        return self.checkpointed(block, *arguments)

    def checkpointed(self, module: nn.Module, *arguments: Any) -> Any:
        """Call ``module``; with gradient checkpointing its activations are computed again in the backward."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(module, *arguments)
        return module(*arguments)

    def decode(self, tokens: Tensor, embedded: Embedded) -> Tensor:
        """Head and patches to pixels, of the tokens that belong to the latents."""
        window = slice(embedded.skip, embedded.skip + math.prod(embedded.output_grid))
        e = embedded.e[:, window] if embedded.e.dim() == 3 else embedded.e
        return self.unpatchify(self.checkpointed(self.head, tokens[:, window], e), embedded.output_grid)

    def unpatchify(self, x: Tensor, grid_sizes: Sequence[int]) -> Tensor:
        """``[B, f*h*w, pt*ph*pw*C]`` to ``[B, C, f*pt, h*ph, w*pw]``."""
        x = x.unflatten(1, tuple(grid_sizes)).unflatten(-1, (*self.patch_size, self.out_dim))
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def _optional(self, name: str, argument: str) -> nn.Module:
        module = getattr(self, name, None)
        if module is None:
            raise ValueError(f"{argument} was given but this checkpoint has no {name}")
        return module

    # ---- cost ----------------------------------------------------------------------------------------------------

    def count_tokens(self, latent_shape: Sequence[int], *, reference_frames: int = 0) -> int:
        """Tokens of latents ``(..., T, H, W)``, with added reference frames."""
        (frames, height, width), (pt, ph, pw) = latent_shape[-3:], self.patch_size
        return (frames // pt + reference_frames) * (height // ph) * (width // pw)

    def flops(self, tokens: int, text_tokens: int | None = None, *, batch: int = 1, image_tokens: int = 0) -> Flops:
        """Cost of one forward. The time embedding (one row per sample) is left out."""
        text = self.text_len if text_tokens is None else text_tokens
        context, patch = text + image_tokens, math.prod(self.patch_size)
        block = 6 * tokens * self.dim**2 + 2 * context * self.dim**2 + 2 * tokens * self.dim * self.ffn_dim
        edges = tokens * self.dim * patch * (self.in_dim + self.out_dim) + text * self.dim * (self.text_dim + self.dim)
        image = image_tokens * CLIP_DIM * (CLIP_DIM + self.dim)
        attention = 2 * tokens * (tokens + context) * self.dim
        return Flops(
            linear=2 * batch * (self.num_layers * block + edges + image),
            attention=2 * batch * self.num_layers * attention,
        )


class Wan2_2Transformer3DModel(WanTransformer3DModel):
    """Wan 2.2: text-only cross-attention, no CLIP image tokens."""

    _image_branch = False

    def __init__(
        self, model_type: str = "t2v", patch_size: tuple[int, int, int] = (1, 2, 2), text_len: int = 512,
        in_dim: int = 16, dim: int = 2048, ffn_dim: int = 8192, freq_dim: int = 256, text_dim: int = 4096,
        out_dim: int = 16, num_heads: int = 16, num_layers: int = 32, window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True, cross_attn_norm: bool = True, eps: float = 1e-6, in_channels: int = 16,
        hidden_size: int = 2048, add_control_adapter: bool = False, in_dim_control_adapter: int = 24,
        downscale_factor_control_adapter: int = 8, add_ref_conv: bool = False, in_dim_ref_conv: int = 16,
    ) -> None:  # fmt: skip
        super().__init__(
            model_type=model_type, patch_size=patch_size, text_len=text_len, in_dim=in_dim, dim=dim, ffn_dim=ffn_dim,
            freq_dim=freq_dim, text_dim=text_dim, out_dim=out_dim, num_heads=num_heads, num_layers=num_layers,
            window_size=window_size, qk_norm=qk_norm, cross_attn_norm=cross_attn_norm, eps=eps,
            in_channels=in_channels, hidden_size=hidden_size, add_control_adapter=add_control_adapter,
            in_dim_control_adapter=in_dim_control_adapter,
            downscale_factor_control_adapter=downscale_factor_control_adapter, add_ref_conv=add_ref_conv,
            in_dim_ref_conv=in_dim_ref_conv, cross_attn_type="cross_attn",
        )  # fmt: skip


def _as_batch(x: Tensor | Sequence[Tensor]) -> Tensor:
    return x if isinstance(x, Tensor) else torch.stack(list(x))
