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

from videox_fun.data.cache import IMAGE, LATENTS, TEXT, EncodingCache, Entry, known_frames

Encode = Callable[[torch.Tensor], torch.Tensor]


def sample_posterior(moments: torch.Tensor, *, mini_batch: int) -> torch.Tensor:
    """Latents drawn from posteriors ``[B, 2C, T, h, w]``, in the chunks and the order of live encoding."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    return torch.cat([DiagonalGaussianDistribution(chunk).sample() for chunk in moments.split(mini_batch)])


def batch_moments(
    cache: EncodingCache, batch: dict, *, encode: Encode, device: torch.device, ready: str = "moments",
    pixels: str = "pixel_values", source: str = "source", parts: Sequence[dict[str, Any] | None] | None = None,
) -> torch.Tensor:
    """Posteriors ``[B, 2C, T, h, w]`` of one of a batch's clips, as :func:`clip_moments` finds them.

    ``ready``, ``pixels`` and ``source`` are the batch's keys: of posteriors that the loader found, of the clips, and of
    where they come from. ``("control_moments", "control_pixel_values", "control_source")`` are those of control clips,
    ``("masked_moments", "mask_pixel_values", "source")`` with :func:`masked_parts` those of masked ones,
    ``("ref_moments", "ref_pixel_values", "source")`` with :func:`reference_parts` those of references.
    """
    if ready in batch:
        cache.count(_counted(ready), hits=len(batch[ready]))
        return batch[ready].to(device)
    return clip_moments(cache, batch[source], batch[pixels], encode=encode, parts=parts, kind=_counted(ready))


def _counted(ready: str) -> str:
    return LATENTS if ready == "moments" else ready.removesuffix("_moments")


def masked_parts(cache: EncodingCache, batch: dict) -> list[dict[str, Any] | None]:
    """Names of a batch's masked clips; ``None`` for a mask that is not worth storing."""
    if "mask_number" in batch:
        return [cache.masked_part(source["name"], number)
                for source, number in zip(batch["source"], batch["mask_number"], strict=True)]
    return [cache.masked_part(known=known_frames(mask)) for mask in batch["mask"]]


def reference_parts(cache: EncodingCache, batch: dict, *, padded: bool = False) -> list[dict[str, Any] | None]:
    """Names of a batch's reference frames."""
    return [cache.reference_part(int(index), padded=padded) for index in batch["clip_idx"]]


def clip_moments(
    cache: EncodingCache, sources: Sequence[dict[str, Any]], pixels_BFCHW: torch.Tensor, *, encode: Encode,
    parts: Sequence[dict[str, Any] | None] | None = None, kind: str = LATENTS,
) -> torch.Tensor:
    """Posteriors ``[B, 2C, T, h, w]``.

    Args:
        cache: the store.
        sources: where each clip comes from, as the collate says.
        pixels_BFCHW: the clips.
        encode: pixels to posteriors, one or more clips at a time.
        parts: which part of its clip each is; ``None`` in it is not stored.
        kind: the name it is counted under.
    """
    frames, height, width = pixels_BFCHW.shape[1], *pixels_BFCHW.shape[-2:]
    entries: list[Entry | None] = []
    for source, part in zip(sources, parts if parts is not None else [{}] * len(sources), strict=True):
        named = {"frames": frames, "height": height, "width": width, "part": part}
        entries.append(None if part is None else cache.entry(source, **named))
    found = [None if entry is None else cache.read(entry) for entry in entries]
    missing = [position for position, moments in enumerate(found) if moments is None]
    cache.count(kind, hits=len(found) - len(missing), misses=len(missing))
    if missing:
        for position, moments in zip(missing, encode(pixels_BFCHW[missing]), strict=True):
            found[position], entry = moments, entries[position]
            if entry is not None:
                cache.write(entry, moments)
    return torch.stack([moments.to(pixels_BFCHW.device) for moments in found])


def picture_features(
    cache: EncodingCache, batch: dict, *, encode: Encode, device: torch.device
) -> list[torch.Tensor]:
    """Features ``[1, L, D]`` of each ``clip_pixel_values``; ``encode`` is called for one picture at a time."""
    if "clip_features" in batch:
        cache.count(IMAGE, hits=len(batch["clip_features"]))
        return list(batch["clip_features"].to(device).split(1))
    pictures = batch["clip_pixel_values"]
    height, width = pictures.shape[1:3]
    indices = batch["clip_idx"].tolist() if "clip_idx" in batch else [0] * len(pictures)
    found, missing = [], 0
    for picture, source, index in zip(pictures, batch["source"], indices, strict=True):
        entry = cache.features_entry(source, height=height, width=width, index=index)
        features = cache.read(entry)
        if features is None:
            missing += 1
            features = encode(picture)[0]
            cache.write(entry, features)
        found.append(features.to(device)[None])
    cache.count(IMAGE, hits=len(found) - missing, misses=missing)
    return found


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
