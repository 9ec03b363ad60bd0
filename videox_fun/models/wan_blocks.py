"""The layers of the Wan transformers: norms, attention modules, the block and the output head.

Attribute names are the keys of the published checkpoints. The places that an optimization may want to replace are
modules of their own with a plain forward: ``WanRMSNorm`` (``norm_q``, ``norm_k``), ``WanLayerNorm`` (``norm1``,
``norm2`` with modulation, ``norm3``) and ``GatedResidual`` (``gate_attn``, ``gate_ffn``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from videox_fun.models.attention_utils import attention
from videox_fun.models.wan_ops import apply_rope, gated_residual, gelu_tanh, layer_norm, modulated_norm, rms_norm
from videox_fun.models.wan_rope import rope_apply_qk

IMAGE_TOKENS = 257  # CLIP ViT-H/14: 16 x 16 patches and the class token


class WanRMSNorm(nn.Module):
    """RMS norm over the full width (not per head)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class WanLayerNorm(nn.LayerNorm):
    """Layer norm with float32 statistics; given ``shift`` and ``scale`` it also modulates."""

    def __init__(self, dim: int, eps: float = 1e-6, elementwise_affine: bool = False) -> None:
        super().__init__(dim, elementwise_affine=elementwise_affine, eps=eps)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        if shift is None or scale is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return modulated_norm(x, shift, scale, self.eps)


class WanGELU(nn.GELU):
    """The tanh form of GELU, in the form that compiles best."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return gelu_tanh(x)


class GatedResidual(nn.Module):
    """``x + y * gate``; no parameters."""

    def forward(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return gated_residual(x, y, gate)


class WanSelfAttention(nn.Module):
    """Self-attention over all tokens of the video, with rotary positions."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True,
        eps: float = 1e-6,
    ) -> None:
        if dim % num_heads:
            raise ValueError(f"the width {dim} is not a multiple of num_heads={num_heads}")
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.window_size = tuple(window_size)
        self.qk_norm = qk_norm
        self.eps = eps
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = WanRMSNorm(dim, eps=eps) if qk_norm else nn.Identity()
        self.norm_k = WanRMSNorm(dim, eps=eps) if qk_norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        """``[B, L, dim]`` to ``[B, L, heads, head_dim]``."""
        return x.unflatten(2, (self.num_heads, self.head_dim))

    def project_qkv(self, x: Tensor, freqs: Tensor, grid_sizes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries and keys, and values, ``[B, L, heads, head_dim]`` each."""
        q, k, v = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(x))), self.heads(self.v(x))
        if freqs.is_complex():
            return *rope_apply_qk(q, k, grid_sizes, freqs), v
        return apply_rope(q, freqs), apply_rope(k, freqs), v

    def forward(
        self,
        x: Tensor,
        seq_lens: Tensor | None,
        grid_sizes: Tensor | None,
        freqs: Tensor,
        dtype: torch.dtype | None = None,
        t: Tensor | int = 0,
    ) -> Tensor:
        """``freqs`` is the table of the grid ``[L, head_dim/2, 2]``, or the complex axis tables with ``grid_sizes``.

        ``seq_lens`` masks padding, ``None`` when there is none. ``dtype`` casts for the attention itself.
        """
        q, k, v = self.project_qkv(x, freqs, grid_sizes)
        out = attention(q, k, v, k_lens=seq_lens, window_size=self.window_size, dtype=dtype)
        return self.o(out.flatten(2))


class WanT2VCrossAttention(WanSelfAttention):
    """Attention from the video to the text tokens."""

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        context_lens: Tensor | None = None,
        dtype: torch.dtype | None = None,
        t: Tensor | int = 0,
    ) -> Tensor:
        q, k, v = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(context))), self.v(context)
        out = attention(q, k, self.heads(v), k_lens=context_lens, dtype=dtype)
        return self.o(out.flatten(2))


class WanI2VCrossAttention(WanSelfAttention):
    """Attention to the image tokens (first 257 of the context) plus attention to the text, each with own keys."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, num_heads, window_size, qk_norm, eps)
        self.k_img = nn.Linear(dim, dim)
        self.v_img = nn.Linear(dim, dim)
        self.norm_k_img = WanRMSNorm(dim, eps=eps) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        context_lens: Tensor | None = None,
        dtype: torch.dtype | None = None,
        t: Tensor | int = 0,
    ) -> Tensor:
        image, text = context[:, :IMAGE_TOKENS], context[:, IMAGE_TOKENS:]
        q = self.heads(self.norm_q(self.q(x)))
        k, v = self.heads(self.norm_k(self.k(text))), self.heads(self.v(text))
        k_img, v_img = self.heads(self.norm_k_img(self.k_img(image))), self.heads(self.v_img(image))
        out = attention(q, k, v, k_lens=context_lens, dtype=dtype) + attention(q, k_img, v_img, dtype=dtype)
        return self.o(out.flatten(2))


class WanCrossAttention(WanT2VCrossAttention):
    """Cross-attention of the Wan 2.2 models: text only."""


WAN_CROSSATTENTION_CLASSES: dict[str, type[WanSelfAttention]] = {
    "t2v_cross_attn": WanT2VCrossAttention,
    "i2v_cross_attn": WanI2VCrossAttention,
    "cross_attn": WanCrossAttention,
}


class WanAttentionBlock(nn.Module):
    """Modulated self-attention, cross-attention and modulated feed-forward, each added to the stream."""

    def __init__(
        self,
        cross_attn_type: str,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True,
        cross_attn_norm: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.ffn_dim = ffn_dim
        self.num_heads = num_heads
        self.norm1 = WanLayerNorm(dim, eps)
        self.self_attn = WanSelfAttention(dim, num_heads, window_size, qk_norm, eps)
        self.norm3 = WanLayerNorm(dim, eps, elementwise_affine=True) if cross_attn_norm else nn.Identity()
        cross_attention = WAN_CROSSATTENTION_CLASSES[cross_attn_type]
        self.cross_attn = cross_attention(dim, num_heads, (-1, -1), qk_norm, eps)
        self.norm2 = WanLayerNorm(dim, eps)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), WanGELU(), nn.Linear(ffn_dim, dim))
        self.gate_attn = GatedResidual()
        self.gate_ffn = GatedResidual()
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor | None,
        grid_sizes: Tensor | None,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None = None,
        dtype: torch.dtype | None = None,
        t: Tensor | int = 0,
    ) -> Tensor:
        """``x [B, L, dim]``; ``e [B, 6, dim]`` or, one per token, ``[B, L, 6, dim]``; ``context [B, tokens, dim]``."""
        if e.dim() == 3:
            e = e.unsqueeze(1)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation.unsqueeze(1) + e).unbind(2)
        y = self.self_attn(self.norm1(x, shift_a, scale_a), seq_lens, grid_sizes, freqs, dtype, t=t)
        x = self.gate_attn(x, y, gate_a)
        x = x + self.cross_attn(self.norm3(x), context, context_lens, dtype, t=t)
        y = self.ffn(self.norm2(x, shift_f, scale_f))
        return self.gate_ffn(x, y, gate_f)


class Head(nn.Module):
    """Modulated norm and projection of each token to its patch of pixels."""

    def __init__(self, dim: int, out_dim: int, patch_size: tuple[int, int, int], eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.out_dim = out_dim
        self.patch_size = tuple(patch_size)
        self.norm = WanLayerNorm(dim, eps)
        self.head = nn.Linear(dim, patch_size[0] * patch_size[1] * patch_size[2] * out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """``e [B, dim]`` or, one per token, ``[B, L, dim]``."""
        if e.dim() == 2:
            e = e.unsqueeze(1)
        shift, scale = (self.modulation.unsqueeze(1) + e.unsqueeze(2)).unbind(2)
        return self.head(self.norm(x, shift, scale))


class MLPProj(nn.Module):
    """Brings CLIP image tokens to the width of the model."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            WanLayerNorm(in_dim, eps=1e-5, elementwise_affine=True),
            nn.Linear(in_dim, in_dim),
            nn.GELU(),
            nn.Linear(in_dim, out_dim),
            WanLayerNorm(out_dim, eps=1e-5, elementwise_affine=True),
        )

    def forward(self, image_embeds: Tensor) -> Tensor:
        return self.proj(image_embeds)
