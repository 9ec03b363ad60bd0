"""Encoding shared by the processes that see the same batch (sequence parallelism): each does a part, all get all.

Posteriors are shared, not samples of them, so that each process still draws from its own stream, which equals that of
the others. What a process does not find in the batch afterwards it encodes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from videox_fun.training.context import RunContext


def encode(
    ctx: RunContext, batch: dict, *, clips: Mapping[str, str], moments: Callable[[Tensor], Tensor],
    embed: Callable[[list[str]], list[Tensor]],
) -> dict:
    """The batch with ``embeddings`` and the posteriors that ``clips`` names, each with the batch's key of its pixels.

    Without a sequence group the batch is left alone. So it is with a cache, which each process reads by itself: one may
    have stored an entry meanwhile that another still misses, and the lists of work have to agree.
    """
    if ctx.shared_work is None or ctx.cache is not None:
        return batch
    jobs: list[Callable[[], Tensor]] = []
    places: list[str] = []
    for ready, pixels in clips.items():
        chunks = batch[pixels].split(ctx.args.vae_mini_batch)
        jobs += [partial(moments, chunk) for chunk in chunks]
        places += [ready] * len(chunks)
    if "encoder_hidden_states" not in batch:
        jobs += [partial(_first, embed, prompt) for prompt in batch["text"]]
        places += ["embeddings"] * len(batch["text"])
    found: dict[str, list[Tensor]] = {}
    for place, result in zip(places, ctx.shared_work.run(jobs), strict=True):
        found.setdefault(place, []).append(result)
    return batch | {name: values if name == "embeddings" else torch.cat(values) for name, values in found.items()}


def _first(embed: Callable[[list[str]], list[Tensor]], prompt: str) -> Tensor:
    return embed([prompt])[0]
