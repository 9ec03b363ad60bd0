"""A small network with Wan's layer names, for LoRA tests that need no real denoiser."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from videox_fun.training.specs import get_spec

TARGETS = "q,k,v,ffn.0,ffn.2"


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(context), self.v(context)))


class Block(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = Attention(dim), Attention(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn), nn.GELU(), nn.Linear(ffn, dim))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x), self.norm(x))
        x = x + self.cross_attn(self.norm(x), context)
        return x + self.ffn(self.norm(x))


class ToyWan(nn.Module):
    """Blocks with Wan's names, an embedding before and a head after them."""

    def __init__(self, dim: int = 16, ffn: int = 32, layers: int = 2, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.text_embedding = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, ffn) for _ in range(layers))
        self.head = nn.ModuleDict({"head": nn.Linear(dim, dim)})

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        context = self.text_embedding(context)
        for block in self.blocks:
            if self.gradient_checkpointing:
                x = checkpoint(block, x, context, use_reentrant=False)
            else:
                x = block(x, context)
        return self.head["head"](x)


def toy(seed: int = 0, **sizes: Any) -> ToyWan:
    """A toy with the same random weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ToyWan(**sizes)


def toy_inputs(dim: int = 16) -> tuple[Tensor, Tensor]:
    """A batch of two sequences and their contexts."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 7, dim, generator=generator), torch.randn(2, 5, dim, generator=generator)


def randomize(module: nn.Module, seed: int = 1) -> None:
    """Give every adapter matrix noticeable values (a new adapter does nothing)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def lora_args(**changes: Any) -> argparse.Namespace:
    """Flags of a LoRA script, as far as trainables read them."""
    values: dict[str, Any] = {
        "rank": 4, "network_alpha": 2, "target_name": TARGETS, "lora_skip_name": None, "use_peft_lora": False,
        "train_text_encoder": False, "learning_rate": 1e-4, "upstream_compat": False,
        "training_with_video_token_length": False, "allow_partial_load": False, "master_weights_fp32": False,
        "rank_drop_out": None, "module_drop_out": None, "neuron_drop_out": None, "lora_plus_ratio": None,
        "use_dora": False, "lora_exact_match": False,
    }
    return argparse.Namespace(**{**values, **changes})


def context(args: argparse.Namespace, *, script: str = "wan2.1_fun/train_lora",
            weight_dtype: torch.dtype = torch.float32, **options: Any) -> SimpleNamespace:
    """What a trainable reads of the run context."""
    spec = get_spec(script)
    spec = SimpleNamespace(id=spec.id, trainable=spec.trainable, options={**spec.options, **options})
    return SimpleNamespace(args=args, spec=spec, weight_dtype=weight_dtype, compat=bool(args.upstream_compat))
