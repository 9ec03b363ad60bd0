"""Small networks with the class names and the forward structure of the Wan transformer, for the patch tests."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class WanRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight


class WanLayerNorm(nn.LayerNorm):
    def __init__(self, dim: int, *, affine: bool = False) -> None:
        super().__init__(dim, eps=1e-6, elementwise_affine=affine)


class WanSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = WanRMSNorm(dim), WanRMSNorm(dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        source = x if context is None else context
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(source))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, self.v(source)))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WanAttentionBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = WanLayerNorm(dim), WanLayerNorm(dim)
        self.norm3 = WanLayerNorm(dim, affine=True)
        self.self_attn, self.cross_attn = WanSelfAttention(dim, heads), WanSelfAttention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / math.sqrt(dim))

    def forward(self, x: torch.Tensor, e: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + e).chunk(6, dim=1)
        x = x + self.self_attn(self.norm1(x) * (1 + scale1) + shift1) * gate1
        x = x + self.cross_attn(self.norm3(x), context)
        return x + self.ffn(self.norm2(x) * (1 + scale2) + shift2) * gate2


class WanTransformer3DModel(nn.Module):
    """Takes tokens ``[B, L, dim]``, times ``[B]`` and text ``[B, T, dim]``."""

    def __init__(self, *, dim: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.dim = dim
        self.time = nn.Linear(dim, 6 * dim)
        self.blocks = nn.ModuleList(WanAttentionBlock(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, dim)
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        freqs = torch.arange(self.dim, dtype=x.dtype, device=x.device) / self.dim
        e = self.time(torch.sin(t[:, None] * freqs)).unflatten(-1, (6, self.dim))
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, e, context, use_reentrant=False)
            else:
                x = block(x, e, context)
        return self.head(x)


class LoraLinear(nn.Module):
    """A Kohya-style adapter: lives outside the base network and takes over a linear layer's forward."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_down = nn.Linear(base.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_up.weight, std=0.1)
        self.base_forward = base.forward
        base.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_forward(x) + self.lora_up(self.lora_down(x))


def attach_lora(model: nn.Module, *, rank: int = 4) -> nn.ModuleList:
    """Freeze ``model`` and give each linear layer inside its blocks an adapter."""
    model.requires_grad_(False)
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks.")]
    return nn.ModuleList(LoraLinear(layer, rank) for layer in layers)


def make_model(*, seed: int = 0, **sizes: int) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**sizes)


def make_batch(model: WanTransformer3DModel, *, tokens: int = 24, batch: int = 2, seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    dtype = model.head.weight.dtype
    x, context = draw(batch, tokens, model.dim).to(dtype), draw(batch, 7, model.dim).to(dtype)
    return x, (draw(batch).abs() * 500).to(dtype), context
