"""Random weights for tiny checkpoints.

Two recipes. ``reference_weights`` is the plain formula of the recorded reference runs: one normal draw per tensor,
scaled by its kind. The ``demo_*`` weights are meant to be trained: signals keep their size through every layer, latents
of natural pictures have about mean 0 and deviation 1, and the denoiser's head is part answer, part noise, so that the
loss of an adapter falls within some tens of steps: by 40 % in 80 steps at rank 16 and learning rate 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from videox_fun.utils.tiny_shapes import Params, Shape

Weights = dict[str, Tensor]


def reference_weights(params: Params, *, seed: int, identity: Collection[str] = ()) -> Weights:
    """Tensors of the recorded reference runs; ``identity`` names matrices that are 1 on the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in params:
        draw = torch.randn(shape, generator=generator)
        if name in identity:
            value = torch.eye(shape[0])
        elif len(shape) >= 2 and "modulation" not in name and "gamma" not in name:
            value = draw * (0.8 / math.prod(shape[1:]) ** 0.5)
        elif name.endswith("bias"):
            value = draw * 0.05
        elif "norm" in name or "gamma" in name or name.endswith("weight"):
            value = 1 + 0.1 * draw
        else:
            value = draw * 0.3
        weights[name] = value.contiguous()
    return weights


def _unit_gain(name: str, shape: Shape, draw: Tensor) -> Tensor:
    """Norms 1, biases 0, and matrices that keep the variance of their input."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith("gamma") or len(shape) == 1:
        return torch.ones(shape)
    return draw / math.prod(shape[1:]) ** 0.5


def _draw(params: Params, seed: int, rule: Callable[[str, Shape, Tensor], Tensor]) -> tuple[Weights, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: rule(name, shape, torch.randn(shape, generator=generator)) for name, shape in params}
    return weights, generator


def demo_transformer(params: Params, *, seed: int) -> Weights:
    """A denoiser whose head reads back half of what its patch embedding wrote, mixed with an unrelated output."""

    def rule(name: str, shape: Shape, draw: Tensor) -> Tensor:
        if name.endswith("modulation"):
            value = 0.02 * draw
            if shape[1] == 6:
                value[:, [2, 5]] += 1  # the gates of attention and feed-forward: open
            return value
        value = _unit_gain(name, shape, draw)
        if name.endswith(("self_attn.o.weight", "cross_attn.o.weight", "ffn.2.weight")):
            return 0.3 * value
        return 0.2 * value if name == "time_projection.1.weight" else value

    weights, generator = _draw(params, seed, rule)
    embedding, head = weights["patch_embedding.weight"], weights["head.head.weight"]
    dim, channels = embedding.shape[0], head.shape[0] // 4
    seen, unrelated = (_orthonormal(dim, head.shape[0], generator) for _ in range(2))
    gain = (dim / min(head.shape)) ** 0.5
    embedding.mul_(0.3)[:, :channels] = seen.reshape(dim, channels, 1, 2, 2) * gain
    # The head lists the four positions of a patch first, the embedding its channels.
    read_back = seen.reshape(dim, channels, 4).permute(2, 1, 0).reshape(head.shape) / gain
    head.copy_(0.5 * read_back + unrelated.T * (head.shape[0] / min(head.shape)) ** 0.5)
    return weights


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A matrix whose shorter side lists orthogonal directions of length 1."""
    basis = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=generator))[0]
    return basis if rows >= columns else basis.T


def demo_text_encoder(params: Params, *, seed: int, num_heads: int) -> Weights:
    """Embeddings of size 1; queries are small because the scores are not scaled."""

    def rule(name: str, shape: Shape, draw: Tensor) -> Tensor:
        if name == "token_embedding.weight":
            return draw
        value = _unit_gain(name, shape, draw)
        return value * (num_heads / shape[0]) ** 0.5 if name.endswith("attn.q.weight") else value

    return _draw(params, seed, rule)[0]


def demo_image_encoder(params: Params, *, seed: int) -> Weights:
    """Both halves with unit gain."""

    def rule(name: str, shape: Shape, draw: Tensor) -> Tensor:
        if name == "log_scale":
            return torch.tensor(math.log(1 / 0.07))
        if name.endswith(("cls_embedding", "pos_embedding")):
            return 0.3 * draw
        return _unit_gain(name, shape, draw)

    return _draw(params, seed, rule)[0]


def demo_vae(params: Params, *, seed: int, mean: Sequence[float], std: Sequence[float]) -> Weights:
    """A VAE whose posterior has the statistics that latents are normalised with, and little noise."""

    def rule(name: str, shape: Shape, draw: Tensor) -> Tensor:
        value = _unit_gain(name, shape, draw)
        return 0.5 * value if name.endswith(("residual.6.weight", "middle.1.proj.weight")) else value

    weights, _ = _draw(params, seed, rule)
    latents = len(mean)
    means, deviations = torch.tensor(mean), torch.tensor(std)
    # SiLU of a unit normal has a mean square of 0.356.
    weights["encoder.head.2.weight"] /= 0.356**0.5
    posterior = torch.cat([deviations, torch.zeros(latents)])
    weights["conv1.weight"] = torch.diag(posterior).reshape(weights["conv1.weight"].shape)
    weights["conv1.bias"] = torch.cat([means, torch.full((latents,), -6.0)])
    weights["conv2.weight"] = torch.diag(1 / deviations).reshape(weights["conv2.weight"].shape)
    weights["conv2.bias"] = -means / deviations
    return weights


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """Contiguous copies in ``dtype``."""
    return {name: value.to(dtype).contiguous() for name, value in weights.items()}
