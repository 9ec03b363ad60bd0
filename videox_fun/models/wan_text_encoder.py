"""The UMT5 encoder of Wan under its published names, so that weights load and text adapters are named without a map.

A block adds attention and a gated feed-forward to the hidden states, each after an RMS norm. Scores are not scaled; a
table of learned biases per distance bucket and head is added to them, by default one table per block. Attention runs
through PyTorch's SDPA: it never keeps the ``[B, heads, L, L]`` scores in half precision nor their softmax, and differs
from the explicit computation by rounding only (about 4e-6 in float32 for outputs of size 1).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

from videox_fun.models.encoder_files import NativeWeights, adopt, count_blocks, read_tensors, shape_of

MAX_DISTANCE = 128


def fp16_clamp(x: Tensor) -> Tensor:
    """Keep float16 activations finite; their sums can pass the largest float16 number in the big encoder."""
    if x.dtype is not torch.float16:
        return x
    limit = torch.finfo(torch.float16).max - 1000
    return x.clamp(-limit, limit)


class GELU(nn.Module):
    """GELU by the tanh formula."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")


class T5LayerNorm(nn.Module):
    """RMS norm with a weight and no bias."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.dim,), self.weight, self.eps)


class T5RelativeEmbedding(nn.Module):
    """A bias per head for the signed distance from query to key.

    Half of the buckets serve keys after the query. In each half, near distances have a bucket of their own, the rest
    share buckets that grow with the logarithm of the distance up to ``max_dist``.
    """

    def __init__(self, num_buckets: int, num_heads: int, max_dist: int = MAX_DISTANCE) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.num_heads = num_heads
        self.max_dist = max_dist
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def forward(self, lq: int, lk: int) -> Tensor:
        """Biases ``[1, heads, lq, lk]``."""
        device = self.embedding.weight.device
        distances = torch.arange(1 - lq, lk, device=device)
        per_distance = self.embedding(self._buckets(distances))
        offsets = torch.arange(lk, device=device) - torch.arange(lq, device=device)[:, None] + lq - 1
        return per_distance[offsets].permute(2, 0, 1)[None]

    def _buckets(self, distances: Tensor) -> Tensor:
        half = self.num_buckets // 2
        exact = half // 2
        size = distances.abs()
        # Distance 0 has a bucket of its own; it is raised to 1 only to keep the logarithm finite.
        growth = torch.log(size.clamp(min=1).float() / exact) / math.log(self.max_dist / exact)
        far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(size < exact, size, far) + half * (distances > 0).long()


class T5Attention(nn.Module):
    """Multi-head attention without biases and without scaling of the scores."""

    def __init__(self, dim: int, dim_attn: int, num_heads: int, dropout: float = 0.1) -> None:
        if dim_attn % num_heads:
            raise ValueError(f"dim_attn ({dim_attn}) must be a multiple of num_heads ({num_heads}).")
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim_attn, bias=False)
        self.k = nn.Linear(dim, dim_attn, bias=False)
        self.v = nn.Linear(dim, dim_attn, bias=False)
        self.o = nn.Linear(dim_attn, dim, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """``bias`` is added to the scores and broadcasts to ``[B, heads, L, L]``."""
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0, scale=1.0
        )
        return self.o(x.transpose(1, 2).flatten(2))


class T5FeedForward(nn.Module):
    """Feed-forward whose hidden units are multiplied by a GELU gate."""

    def __init__(self, dim: int, dim_ffn: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(dim, dim_ffn, bias=False), GELU())
        self.fc1 = nn.Linear(dim, dim_ffn, bias=False)
        self.fc2 = nn.Linear(dim_ffn, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.dropout(self.fc1(x) * self.gate(x))))


class T5SelfAttention(nn.Module):
    """One block of the encoder."""

    def __init__(
        self, dim: int, dim_attn: int, dim_ffn: int, num_heads: int, num_buckets: int, shared_pos: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.norm1 = T5LayerNorm(dim)
        self.attn = T5Attention(dim, dim_attn, num_heads, dropout)
        self.norm2 = T5LayerNorm(dim)
        self.ffn = T5FeedForward(dim, dim_ffn, dropout)
        self.pos_embedding = None if shared_pos else T5RelativeEmbedding(num_buckets, num_heads)

    def forward(self, x: Tensor, keep: Tensor | None, shared_bias: Tensor | None) -> Tensor:
        bias = shared_bias if self.pos_embedding is None else self.pos_embedding(x.shape[1], x.shape[1])
        if keep is not None:
            bias = bias.masked_fill(~keep, torch.finfo(bias.dtype).min)
        x = fp16_clamp(x + self.attn(self.norm1(x), bias))
        return fp16_clamp(x + self.ffn(self.norm2(x)))


class WanT5EncoderModel(NativeWeights, ModelMixin, ConfigMixin):
    """Token ids to text embeddings.

    Args:
        vocab, dim, dim_attn, dim_ffn, num_heads, num_layers, num_buckets: sizes.
        shared_pos: one table of position biases for all blocks instead of one per block.
        dropout: active in training mode only.
    """

    @register_to_config
    def __init__(
        self, vocab: int, dim: int, dim_attn: int, dim_ffn: int, num_heads: int, num_layers: int, num_buckets: int,
        shared_pos: bool = True, dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, dim)
        self.pos_embedding = T5RelativeEmbedding(num_buckets, num_heads) if shared_pos else None
        # Not "dropout": an attribute with the name of a config entry reads as that entry.
        self.edge_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            T5SelfAttention(dim, dim_attn, dim_ffn, num_heads, num_buckets, shared_pos, dropout)
            for _ in range(num_layers)
        )
        self.norm = T5LayerNorm(dim)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        """Embeddings ``[B, L, dim]``, the only entry of a tuple; ``attention_mask`` is 1 for tokens, 0 for padding."""
        if input_ids is None:
            raise ValueError("input_ids is required.")
        x = self.edge_dropout(self.token_embedding(input_ids))
        keep = None if attention_mask is None else attention_mask[:, None, None, :] > 0
        length = input_ids.shape[1]
        bias = None if self.pos_embedding is None else self.pos_embedding(length, length)
        for block in self.blocks:
            x = block(x, keep, bias)
        return (self.edge_dropout(self.norm(x)),)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_path: str | os.PathLike, additional_kwargs: Mapping[str, Any] | None = None,
        low_cpu_mem_usage: bool = False, torch_dtype: torch.dtype = torch.bfloat16,
    ) -> WanT5EncoderModel:
        """Load a published file.

        Args:
            pretrained_model_path: ``.pth`` or ``.safetensors``.
            additional_kwargs: ``text_encoder_kwargs`` of the configuration file; sizes it leaves out come from the
                weights, keys that the constructor lacks are ignored.
            low_cpu_mem_usage: accepted; the weights are in memory once either way.
            torch_dtype: dtype of the parameters.
        """
        tensors = read_tensors(pretrained_model_path)
        accepted = set(inspect.signature(cls.__init__).parameters) - {"self"}
        kwargs = {key: value for key, value in (additional_kwargs or {}).items() if key in accepted}
        with torch.device("meta"):
            model = cls(**{**cls._sizes(tensors, source=str(pretrained_model_path)), **kwargs})
        adopt(model, tensors, source=str(pretrained_model_path), dtype=torch_dtype)
        return model.eval()

    @classmethod
    def _sizes(cls, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Any]:
        def shape(key: str) -> torch.Size:
            return shape_of(tensors, key, what="a Wan text encoder", source=source)

        table = "pos_embedding.embedding.weight"
        shared = table in tensors
        buckets, heads = shape(table if shared else f"blocks.0.{table}")
        vocab, dim = shape("token_embedding.weight")
        return {
            "vocab": vocab, "dim": dim, "dim_attn": shape("blocks.0.attn.q.weight")[0],
            "dim_ffn": shape("blocks.0.ffn.fc1.weight")[0], "num_heads": heads,
            "num_layers": count_blocks(tensors, "blocks."), "num_buckets": buckets, "shared_pos": shared,
            "dropout": 0.0,
        }

    def native_state_dict(self) -> dict[str, Tensor]:
        return dict(self.state_dict())
