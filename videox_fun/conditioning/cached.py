"""Encoders behind a cache: what is stored is read, the rest is encoded and stored.

The draws are those of live encoding. A clip's posterior is stored, not a sample of it, so each step still samples, in
chunks of the same size and order. Captions are encoded one by one, so that an embedding does not depend on the batch
it was first met in. An encoder that is needed although it was left out (a damaged entry, a clip that no plan foresaw)
is loaded then, by the callable it is handed in as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from videox_fun.data.cache import IMAGE, LATENTS, TEXT, EncodingCache

Encode = Callable[[torch.Tensor], torch.Tensor]


def sample_posterior(moments: torch.Tensor, *, mini_batch: int) -> torch.Tensor:
    """Latents drawn from posteriors ``[B, 2C, T, h, w]``, in the chunks and the order of live encoding."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return torch.cat([DiagonalGaussianDistribution(chunk).sample() for chunk in moments.split(mini_batch)])


def batch_moments(cache: EncodingCache, batch: dict, *, encode: Encode, device: torch.device) -> torch.Tensor:
    """Posteriors of a batch's clips: as the loader found them, or from the store, or encoded and stored."""
    if "moments" in batch:
        cache.count(LATENTS, hits=len(batch["moments"]))
        return batch["moments"].to(device)
    return clip_moments(cache, batch["source"], batch["pixel_values"], encode=encode)


def clip_moments(
    cache: EncodingCache, sources: Sequence[dict[str, Any]], pixels_BFCHW: torch.Tensor, *, encode: Encode,
    masked: Sequence[tuple[int, int] | None] | None = None,
) -> torch.Tensor:
    """Posteriors ``[B, 2C, T, h, w]``.

    Args:
        cache: the store.
        sources: where each clip comes from, as the collate says.
        pixels_BFCHW: the clips.
        encode: pixels to posteriors, one or more clips at a time.
        masked: for masked clips, the known frames at both ends; ``None`` in it is a mask that is not worth storing.
    """
    frames, height, width = pixels_BFCHW.shape[1], *pixels_BFCHW.shape[-2:]
    geometry = [{"frames": frames, "height": height, "width": width} for _ in sources]
    if masked is not None:
        geometry = [{**place, "masked": tag} for place, tag in zip(geometry, masked, strict=True)]
    stored = [tag is not None for tag in masked] if masked is not None else [True] * len(sources)
    found: list[torch.Tensor | None] = [
        cache.read_clip(source, **place) if keep else None
        for source, place, keep in zip(sources, geometry, stored, strict=True)
    ]
    missing = [position for position, moments in enumerate(found) if moments is None]
    cache.count(LATENTS if masked is None else "masked", hits=len(found) - len(missing), misses=len(missing))
    if missing:
        for position, moments in zip(missing, encode(pixels_BFCHW[missing]), strict=True):
            found[position] = moments
            if stored[position]:
                cache.write_clip(moments, sources[position], **geometry[position])
    return torch.stack([moments.to(pixels_BFCHW.device) for moments in found])


def prompts(
    cache: EncodingCache, texts: Sequence[str], *, encode: Callable[[str], torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Embeddings ``[L_i, D]``; ``encode`` is called for one caption at a time."""
    result, missing = [], 0
    for text in texts:
        embedding = cache.read_text(text)
        if embedding is None:
            missing += 1
            embedding = encode(text)
            cache.write_text(text, embedding)
        result.append(embedding.to(device))
    cache.count(TEXT, hits=len(texts) - missing, misses=missing)
    return result


class CachedImageEncoder:
    """An image encoder that looks up pictures it has seen. Called like the encoder: with a list of one picture."""

    def __init__(self, cache: EncodingCache, encoder: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        self.cache = cache
        self.encoder = encoder

    def __call__(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        (pixels,) = pictures
        key = self.cache.picture_key(pixels)
        found = self.cache.store.read(IMAGE, key)
        self.cache.count(IMAGE, hits=int(found is not None), misses=int(found is None))
        if found is not None:
            return found["features"].to(pixels.device)
        features = self.encoder(pictures)
        self.cache.store.write(IMAGE, key, {"features": features})
        return features
