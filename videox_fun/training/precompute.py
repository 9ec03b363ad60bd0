"""Filling the cache before training: every entry that a script's flags can ask for, with the script's own encoders.

Entries are named as in training, so whatever exists is skipped and a run that was stopped goes on where it was. The
processes share the clips out; a clip is decoded once for all of its sizes. Captions are encoded first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from videox_fun.data import cache as caching
from videox_fun.data.cache import LATENTS, TEXT, Planned
from videox_fun.data.collate import Plan
from videox_fun.data.fields import InpaintField
from videox_fun.data.transforms import prepare_frames, square_frames, square_image
from videox_fun.recipes.base import Recipe
from videox_fun.training.context import RunContext

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


@dataclass
class Progress:
    """Says every few seconds how far it is and how long it will take."""

    what: str
    total: int
    done: int = 0
    encoded: int = 0
    started: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def step(self, *, encoded: bool) -> None:
        self.done += 1
        self.encoded += encoded
        now = time.monotonic()
        if now - self.said < _EVERY_S and self.done < self.total:
            return
        self.said = now
        left = (now - self.started) / self.done * (self.total - self.done)
        logger.info("%s: %d of %d (%d encoded, %d were there), %.0f s left", self.what, self.done, self.total,
                    self.encoded, self.done - self.encoded, left)


@dataclass
class Filled:
    """What a process did: entries encoded and found, by kind, and rows that could not be read."""

    encoded: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def precompute(ctx: RunContext, recipe: Recipe) -> Filled:
    """Fill the cache of a run that is set up like training. Raises ``ValueError`` for what cannot be cached."""
    if getattr(ctx.args, "vae_tiling", False):
        raise ValueError("--vae_tiling changes latents and is applied in training only: let the run fill its cache "
                         "on first use.")
    recipe.check(ctx)
    data = recipe.data(ctx)
    cache = ctx.cache
    if data is None or cache is None:
        raise ValueError(f"{ctx.spec.path} has nothing to cache; give --cache_latents, --cache_text or both.")
    skip = {role for role, kind in (("vae", LATENTS), ("text_encoder", TEXT)) if not cache.caches(kind)}
    components = recipe.encoders(ctx, skip=ctx.spared | skip)
    ctx.residency.place(*components.frozen().values())
    filled = Filled()
    if cache.caches(TEXT):
        texts = caching.captions(data)[ctx.rank :: ctx.world]
        _fill_texts(ctx, recipe, components, texts, filled)
    if cache.caches(LATENTS):
        _fill_clips(ctx, recipe, components, data, filled)
    ctx.accelerator.wait_for_everyone()
    for reason in filled.failed:
        logger.warning("not cached: %s", reason)
    return filled


def _fill_texts(ctx: RunContext, recipe: Recipe, components: Any, texts: Sequence[str], filled: Filled) -> None:
    progress = Progress("captions", len(texts))
    for text in texts:
        missing = not ctx.cache.holds_text(text)
        if missing:
            recipe.fill(ctx, components, {"text": [text]})
        progress.step(encoded=missing)
    filled.encoded[TEXT], filled.found[TEXT] = progress.encoded, progress.done - progress.encoded


def _fill_clips(ctx: RunContext, recipe: Recipe, components: Any, data: Any, filled: Filled) -> None:
    entries = list(caching.planned(ctx.cache, data))
    groups = [list(group) for _, group in groupby(entries, key=lambda pair: (pair[0].item, pair[0].indices))]
    own = groups[ctx.rank :: ctx.world]
    progress = Progress("clips", sum(map(len, own)))
    logger.info("clips: %d entries of %d decoded clips planned, %d of them for this process", len(entries), len(groups),
                progress.total)
    if len(groups) > 4 * len({entry.item for entry, _ in entries}):
        logger.info("Most of these differ in their first frame only; --cache_clip_starts N (in training too) keeps N "
                    "starts per clip.")
    for group in own:
        frames = None
        for entry, facts in group:
            origin = caching.planned_origin(ctx.cache, data, entry, facts)
            missing = not all(_held(ctx, data, entry, origin))
            if missing:
                try:
                    frames = frames if frames is not None else _decode(ctx, data, entry, facts)
                    recipe.fill(ctx, components, _batch(ctx, data, entry, origin, frames))
                except (OSError, ValueError) as error:
                    filled.failed.append(f"{entry.name}: {error}")
                    missing = False
            progress.step(encoded=missing)
    filled.encoded[LATENTS], filled.found[LATENTS] = progress.encoded, progress.done - progress.encoded


def _held(ctx: RunContext, data: Any, entry: Planned, origin: dict[str, Any]) -> Iterator[bool]:
    geometry = {"frames": entry.frames, "height": entry.height, "width": entry.width}
    yield ctx.cache.holds_clip(origin, **geometry)
    if data.options.inpaint:
        yield ctx.cache.holds_clip(origin, masked=(1, 0) if entry.frames > 1 else (0, 0), **geometry)


def _decode(ctx: RunContext, data: Any, entry: Planned, facts: dict[str, Any]) -> Any:
    dataset = data.dataset
    if entry.video:
        return dataset.sources.clip_at(dataset, entry.name, entry.indices, facts).load()
    return dataset.sources.picture(dataset, entry.name).load()


def _batch(ctx: RunContext, data: Any, entry: Planned, origin: dict[str, Any], frames: Any) -> dict[str, Any]:
    """A batch of one clip as the collate makes it; masked clips know their first frame."""
    crop = (entry.height, entry.width)
    if data.options.enable_bucket:
        pixels = prepare_frames(frames[: entry.frames], resize_to=entry.resize, crop_to=crop)
    elif entry.video:
        pixels = square_frames(frames[: entry.frames], size=entry.height)
    else:
        from PIL import Image

        pixels = square_image(Image.fromarray(frames[0]), size=entry.height)
    lists: dict[str, list] = {"pixel_values": [pixels], "mask": [], "mask_pixel_values": [], "clip_pixel_values": []}
    if data.options.inpaint:
        InpaintField(image_start_only=True)({}, pixels, Plan(crop, entry.frames, crop), lists)
    batch = {key: torch.stack(values).to(ctx.device) for key, values in lists.items() if values}
    return {**batch, "source": [origin]}
