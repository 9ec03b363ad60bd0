"""The cache of a run: opened from the flags, fingerprints taken, and which encoders the run can do without."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videox_fun.data import cache as caching
from videox_fun.data import cache_plan, cache_sources
from videox_fun.data.cache import IMAGE, LATENTS, TEXT, EncodingCache, LatentLayout
from videox_fun.data.cache_store import CacheStore, FileFacts, replace_file, total_bytes
from videox_fun.data.module import DataModule
from videox_fun.training.context import RunContext

logger = logging.getLogger(__name__)

#: Flags that change a batch after the loader: its frame count is not known when the entry would be read.
_LATER_CUTS = ("random_frame_crop", "keep_all_node_same_token_length", "auto_tile_batch_size")


def cache_folder(ctx: RunContext) -> Path:
    return Path(ctx.args.cache_dir_latents or Path(ctx.args.output_dir) / "cache")


def open_cache(
    ctx: RunContext, data: DataModule, encoders: Mapping[str, Mapping[str, Any]], *, layout: LatentLayout | None = None
) -> EncodingCache | None:
    """The cache that ``--cache_latents`` and ``--cache_text`` ask for, attached to ``data``.

    ``encoders`` says per kind of entry what decides its values: paths (hashed) and plain values; ``layout`` how large
    posteriors are.
    """
    args = ctx.args
    wanted = [LATENTS, IMAGE] if args.cache_latents else []
    wanted += [TEXT] if args.cache_text else []
    if not wanted:
        return None
    if args.cache_text and args.enable_text_encoder_in_dataloader:
        raise ValueError("--cache_text and --enable_text_encoder_in_dataloader both say where prompts are encoded; "
                         "leave the second one out.")
    if args.cache_text and getattr(args, "train_text_encoder", False):
        raise ValueError("--cache_text keeps prompt embeddings fixed; leave --train_text_encoder out.")
    folder = cache_folder(ctx)
    store = CacheStore(folder)
    if args.cache_budget_gb is not None:
        used = total_bytes(store.entries()) if folder.is_dir() else 0
        store.room = max(args.cache_budget_gb * 2**30 - used, 0) / ctx.world
    cache = EncodingCache(store, FileFacts(folder), layout=layout)
    with ctx.accelerator.main_process_first():
        for kind in wanted:
            if kind in encoders:
                parts = {name: cache.files.fingerprint(value) if isinstance(value, Path) else value
                         for name, value in encoders[kind].items()}
                cache.encoders[kind] = caching.fingerprint({**parts, "dtype": str(ctx.weight_dtype)})
    later = [f"--{name} cuts batches" for name in _LATER_CUTS if getattr(args, name, False)]
    why = cache_sources.unlisted(data) or next(iter(later), None)
    cache.skip_decoding = cache.caches(LATENTS) and why is None
    cache_sources.attach(cache, data, clip_starts=args.cache_clip_starts)
    logger.info("cache: %s in %s", ", ".join(sorted(cache.encoders)), folder)
    if cache.caches(LATENTS) and why is not None:
        logger.info("cache: clips are still decoded and the VAE stays loaded, because %s; everything else that was "
                    "stored is read.", why)
    return cache


def spared(ctx: RunContext, cache: EncodingCache | None, data: DataModule | None) -> frozenset[str]:
    """Which of "vae", "image_encoder" and "text_encoder" can be left out: every entry asked for exists."""
    if cache is None or data is None:
        return frozenset()
    needing = [name for name in ("validation_prompts", "validation_data_meta") if getattr(ctx.args, name, None)]
    if needing:
        logger.info("cache: --%s needs the encoders; they are loaded.", needing[0])
        return frozenset()
    found = set()
    if cache.skip_decoding:
        coverage = cache_plan.coverage(cache, data)
        whole = coverage.total > 0 and not coverage.missing
        logger.info("cache: %s%s", coverage.text(), "; the VAE is not loaded" if whole else "")
        room = cache.store.room
        if room is not None and coverage.missing_bytes > room * ctx.world:
            logger.warning("cache: %.2f GiB of them do not fit in --cache_budget_gb %g: these are encoded at each use, "
                           "and the VAE stays loaded.", coverage.missing_bytes / 2**30 - room * ctx.world / 2**30,
                           ctx.args.cache_budget_gb)  # fmt: skip
        if whole:
            found.add("vae")
            if cache.caches(IMAGE):
                found.add("image_encoder")
    if cache.caches(TEXT):
        texts = cache_plan.captions(data)
        missing = sum(not cache.holds_text(text) for text in texts)
        logger.info("cache: %d of %d captions exist%s", len(texts) - missing, len(texts),
                    "" if missing else "; the text encoder is not loaded")
        if not missing and read_text_config(cache) is not None:
            found.add("text_encoder")
    return frozenset(found)


def _config_file(cache: EncodingCache) -> Path:
    return cache.store.root / TEXT / f"encoder-{cache.encoders[TEXT][:32]}.json"


def write_text_config(cache: EncodingCache, config: Mapping[str, Any]) -> None:
    """Keep the sizes of the text encoder: adapters of the denoiser start from random numbers drawn after its own."""
    plain = {key: value for key, value in config.items() if not key.startswith("_")}
    if read_text_config(cache) == plain:
        return
    try:
        replace_file(_config_file(cache), json.dumps(plain).encode("utf-8"))
    except OSError as error:
        logger.warning("%s cannot be written (%s): the text encoder will be loaded again.", _config_file(cache), error)


def read_text_config(cache: EncodingCache) -> dict[str, Any] | None:
    try:
        return json.loads(_config_file(cache).read_text("utf-8"))
    except (OSError, ValueError):
        return None
