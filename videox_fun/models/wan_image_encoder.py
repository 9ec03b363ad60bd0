"""The image half of the CLIP model (ViT-H/14) that the image-to-video models of Wan look at.

Frames are stretched to a square, normalised with CLIP's colour statistics and cut into patches. The features are the
hidden states before the last block, class token included: 257 tokens for a 224 pixel square. Blocks have the
published names; the last block, the output norm and the projection are kept so that a saved file is complete.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

from videox_fun.models.encoder_files import (
    NativeWeights,
    adopt,
    count_blocks,
    read_tensors,
    shape_of,
    strip_prefix,
)

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
# Width of a head in ViT-H; the number of heads cannot be read off the shapes.
_HEAD_DIM = 80
_TEXT = "textual."


class SelfAttention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        if dim % num_heads:
            raise ValueError(f"vision_dim ({dim}) must be a multiple of vision_heads ({num_heads}).")
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input."""

    def __init__(self, dim: int, mlp_ratio: float, num_heads: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        hidden = round(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = SelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Pixels to tokens; ``forward`` stops before the last block."""

    def __init__(
        self, image_size: int, patch_size: int, dim: int, mlp_ratio: float, out_dim: int, num_heads: int,
        num_layers: int, norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        tokens = (image_size // patch_size) ** 2 + 1
        self.image_size = image_size
        self.patch_embedding = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size, bias=False)
        self.cls_embedding = nn.Parameter(torch.randn(1, 1, dim) / dim**0.5)
        self.pos_embedding = nn.Parameter(torch.randn(1, tokens, dim) / dim**0.5)
        self.pre_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.transformer = nn.Sequential(
            *(AttentionBlock(dim, mlp_ratio, num_heads, norm_eps) for _ in range(num_layers))
        )
        self.post_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Parameter(torch.randn(dim, out_dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, S, S]`` normalised pixels to ``[N, 1 + patches, dim]``."""
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_embedding.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embedding
        x = self.pre_norm(x)
        for block in self.transformer[:-1]:
            x = block(x)
        return x


class XLMRobertaCLIP(nn.Module):
    """The image half; text weights of a file are not built."""

    def __init__(self, visual: VisionTransformer) -> None:
        super().__init__()
        self.visual = visual
        self.log_scale = nn.Parameter(torch.tensor(2.6592))


class CLIPModel(NativeWeights, ModelMixin, ConfigMixin):
    """Image features for Wan.

    Args: sizes, by default those of the published file.
    """

    @register_to_config
    def __init__(
        self, *, image_size: int = 224, patch_size: int = 14, vision_dim: int = 1280, vision_mlp_ratio: float = 4,
        vision_heads: int = 16, vision_layers: int = 32, embed_dim: int = 1024,
    ) -> None:
        super().__init__()
        self.model = XLMRobertaCLIP(VisionTransformer(
            image_size, patch_size, vision_dim, vision_mlp_ratio, embed_dim, vision_heads, vision_layers,
        ))
        self.textual_weights: dict[str, Tensor] = {}

    def forward(self, videos: Sequence[Tensor]) -> Tensor:
        """Features ``[N, tokens, dim]`` of all frames of ``videos``, each ``[3, F, H, W]`` in [-1, 1]."""
        visual = self.model.visual
        frames = torch.cat([self._square(video.transpose(0, 1), visual.image_size) for video in videos])
        mean, std = (frames.new_tensor(values).view(1, 3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        pixels = (frames.mul(0.5).add(0.5) - mean) / std
        return visual(pixels.to(visual.patch_embedding.weight.dtype))

    @staticmethod
    def _square(frames: Tensor, size: int) -> Tensor:
        # In float32 whatever the weights are: half precision would show in the resized pixels.
        return functional.interpolate(frames.float(), size=(size, size), mode="bicubic", align_corners=False)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_path: str | os.PathLike, transformer_additional_kwargs: Mapping[str, Any] | None = None,
        *, keep_textual: bool = False, torch_dtype: torch.dtype | None = torch.float32,
    ) -> CLIPModel:
        """Load a published file.

        Args:
            pretrained_model_path: ``.pth`` or ``.safetensors``.
            transformer_additional_kwargs: constructor arguments; sizes come from the weights, except ``vision_heads``.
            keep_textual: keep the text weights, which only ``save_native`` uses.
            torch_dtype: dtype of the parameters; None keeps that of the file.
        """
        source = str(pretrained_model_path)
        tensors = strip_prefix(read_tensors(pretrained_model_path), "model.")
        text = {key: value for key, value in tensors.items() if key.startswith(_TEXT)}
        tensors = {key: value for key, value in tensors.items() if not key.startswith(_TEXT)}
        accepted = set(inspect.signature(cls.__init__).parameters) - {"self"}
        kwargs = {key: value for key, value in (transformer_additional_kwargs or {}).items() if key in accepted}
        with torch.device("meta"):
            model = cls(**{**cls._sizes(tensors, source=source, heads=kwargs.get("vision_heads")), **kwargs})
        adopt(model.model, tensors, source=source, dtype=torch_dtype)
        if keep_textual:
            model.textual_weights = text
        return model.eval()

    @classmethod
    def _sizes(cls, tensors: Mapping[str, Tensor], *, source: str, heads: int | None) -> dict[str, Any]:
        def shape(key: str) -> torch.Size:
            return shape_of(tensors, f"visual.{key}", what="a Wan image encoder", source=source)

        dim, _, patch, _ = shape("patch_embedding.weight")
        side = round((shape("pos_embedding")[1] - 1) ** 0.5)
        if heads is None and dim % _HEAD_DIM:
            raise ValueError(f"'{source}' has width {dim}, which tells no number of attention heads. Set vision_heads "
                             "in image_encoder_kwargs of the configuration file.")
        return {
            "image_size": side * patch, "patch_size": patch, "vision_dim": dim,
            "vision_mlp_ratio": shape("transformer.0.mlp.0.weight")[0] / dim,
            "vision_heads": heads or dim // _HEAD_DIM, "vision_layers": count_blocks(tensors, "visual.transformer."),
            "embed_dim": shape("head")[1],
        }

    def native_state_dict(self) -> dict[str, Tensor]:
        return {**self.model.state_dict(), **self.textual_weights}
