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

from videox_fun.data import cache_plan
from videox_fun.data.cache import LATENTS, TEXT
from videox_fun.data.cache_plan import Planned
from videox_fun.data.collate import Plan
from videox_fun.data.fields import InpaintField
from videox_fun.data.transforms import square_frames, square_image
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
        texts = cache_plan.captions(data)[ctx.rank :: ctx.world]
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
    entries = list(cache_plan.planned(ctx.cache, data))
    groups = [list(group) for _, group in groupby(entries, key=lambda pair: (pair[0].item, pair[0].indices))]
    own = groups[ctx.rank :: ctx.world]
    progress = Progress("clips", sum(map(len, own)))
    logger.info("clips: %d sizes and lengths of %d decoded clips planned, %d of them for this process", len(entries),
                len(groups), progress.total)
    if len(groups) > 4 * len({entry.item for entry, _ in entries}):
        logger.info("Most of these differ in their first frame only; --cache_clip_starts N (in training too) keeps N "
                    "starts per clip.")
    for group in own:
        example = cache_plan.example_of(data, *group[0])  # decoded once, when the first of its entries is missing
        for entry, facts in group:
            encoded = False
            try:
                for batch in _missing(ctx, data, entry, facts, example):
                    recipe.fill(ctx, components, batch)
                    encoded = True
            except (OSError, ValueError) as error:
                filled.failed.append(f"{entry.name}: {error}")
                encoded = False
            progress.step(encoded=encoded)
    filled.encoded[LATENTS], filled.found[LATENTS] = progress.encoded, progress.done - progress.encoded


def _missing(ctx: RunContext, data: Any, entry: Planned, facts: dict[str, Any], example: Any) -> Iterator[dict]:
    """Batches of one clip that make the entries which do not exist yet."""
    cache = ctx.cache
    for values, entries in cache_plan.entries_of(cache, data, entry, facts, example=example):
        wanted = [own for own in entries.values() if cache.caches(own.kind) and not cache.holds(own)]
        if not wanted:
            continue
        if cache.store.room is not None and sum(map(cache.bytes_of, wanted)) > cache.store.room:
            cache.store.full()
            continue
        if data.options.enable_bucket:
            collate, plan = data.collate_fn, cache_plan.plan_of(data, entry, example)
            batch = collate.assemble([example], plan, [values])
            batch.pop("text")
        else:
            batch = _square(cache_plan.planned_origin(cache, data, entry, facts), entry, example, data)
        yield {key: value.to(ctx.device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _square(origin: dict[str, Any], entry: Planned, example: dict[str, Any], data: Any) -> dict[str, Any]:
    """A batch of one clip as it is without buckets; masked clips know their first frame."""
    frames = example["pixel_values"].load()
    if entry.video:
        pixels = square_frames(frames[: entry.frames], size=entry.height)
    else:
        from PIL import Image

        pixels = square_image(Image.fromarray(frames[0]), size=entry.height)
    lists: dict[str, list] = {"pixel_values": [pixels], "mask": [], "mask_pixel_values": [], "clip_pixel_values": []}
    if data.options.inpaint:
        crop = (entry.height, entry.width)
        InpaintField(image_start_only=True)({}, pixels, Plan(crop, entry.frames, crop), lists)
    return {**{key: torch.stack(values) for key, values in lists.items() if values}, "source": [origin]}
