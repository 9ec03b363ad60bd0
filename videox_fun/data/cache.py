"""Encoded clips and captions instead of encoders: what an entry is named by, and which entries a run will ask for.

**Names.** A clip's entry is named by the hash of the file's content, the frames read, how they were shrunk, resized and
cropped, and the fingerprint of the VAE (weights, type, options); a caption's by its text, the fingerprint of encoder
and tokenizer, and the token count. A changed file or setting therefore makes another entry; old ones stay until
``videox-cache gc``. Random sizes, crops and start frames need no special case: the name says what was drawn.

**Where it acts.** ``ClipSources`` hands the dataset frames that are decoded only when somebody looks at them, with the
origin they come from. The collate draws the batch's geometry from their shapes. When all entries of the batch exist, it
adds the stored posteriors as ``moments`` and no picture is decoded. Otherwise the step encodes and stores what is
missing. Every draw is made as without a cache.

**Before the run.** ``planned`` lists each (start frame, size, length) that the flags can give a row. With all of them
present the encoders need not be loaded.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from videox_fun.data.cache_store import CacheStore, FileFacts, digest
from videox_fun.data.geometry import cover_size, legal_frames, sampled_frames
from videox_fun.data.metadata import is_video
from videox_fun.data.probe import probe_media
from videox_fun.data.resize import short_side_size
from videox_fun.data.summary import outcomes

if TYPE_CHECKING:
    from videox_fun.data.dataset_image_video import ImageVideoDataset
    from videox_fun.data.module import DataModule

logger = logging.getLogger(__name__)

LATENTS, TEXT, IMAGE = "latents", "text", "image"


class LazyFrames:
    """``[F, H, W, 3]`` uint8 frames of a known shape that are decoded on first use."""

    def __init__(
        self, shape: tuple[int, int, int, int], origin: dict[str, Any], read: Callable[[], np.ndarray]
    ) -> None:
        self.shape = shape
        self.origin = origin
        self._read = read
        self._frames: np.ndarray | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.load()[index]

    def load(self) -> np.ndarray:
        if self._frames is None:
            frames = self._read()
            if frames.shape != self.shape:
                raise ValueError(f"{self.origin['name']}: decoded as {frames.shape}, but {self.shape} was expected; "
                                 "the file changed while it was read")
            self._frames = frames
        return self._frames


def origin_key(origin: dict[str, Any]) -> dict[str, Any]:
    """The part of an origin that names entries: the file's name is not in it."""
    return {key: value for key, value in origin.items() if key not in ("name", "resize")}


@dataclass
class EncodingCache:
    """The cache of a run.

    Attributes:
        store, files: entries, and facts about source files.
        encoders: fingerprint per kind of entry ("latents", "text", "image"); kinds that are not cached are absent.
        skip_decoding: a batch whose entries all exist is not decoded.
        hits, misses: entries asked for since the start, by kind.
    """

    store: CacheStore
    files: FileFacts
    encoders: dict[str, str] = field(default_factory=dict)
    skip_decoding: bool = False
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def caches(self, kind: str) -> bool:
        return kind in self.encoders

    # -- clips -------------------------------------------------------------------------------------------------------
    def clip_key(
        self, origin: dict[str, Any], *, frames: int, height: int, width: int, masked: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """The name of a clip's posterior at a size. ``masked`` is the count of known frames at both ends."""
        key: dict[str, Any] = {"encoder": self.encoders[LATENTS], "resize": list(origin["resize"]), "frames": frames,
                               "height": height, "width": width}  # fmt: skip
        return key if masked is None else {**key, "masked": list(masked)}

    def read_clip(self, origin: dict[str, Any], **geometry: Any) -> torch.Tensor | None:
        """The stored posterior ``[2C, T, h, w]``, or ``None``."""
        key = self.clip_key(origin, **geometry)
        found = self.store.read(LATENTS, key, origin=origin_key(origin))
        return found["moments"] if found is not None else None

    def write_clip(self, moments: torch.Tensor, origin: dict[str, Any], **geometry: Any) -> None:
        self.store.write(LATENTS, self.clip_key(origin, **geometry), {"moments": moments}, origin=origin_key(origin))

    def holds_clip(self, origin: dict[str, Any], **geometry: Any) -> bool:
        return self.store.intact(LATENTS, self.clip_key(origin, **geometry), origin=origin_key(origin))

    def read_batch(self, examples: Sequence[dict[str, Any]], plan: Any) -> list[torch.Tensor] | None:
        """Posteriors of a batch, or ``None`` when one is missing."""
        found: list[torch.Tensor] = []
        height, width = plan.crop_to
        for example in examples:
            frames = example["pixel_values"]
            if not isinstance(frames, LazyFrames):
                return None
            count = min(plan.frames, len(frames))
            moments = self.read_clip(located(frames, plan), frames=count, height=height, width=width)
            if moments is None:
                return None
            found.append(moments)
        return found

    # -- captions and pictures ---------------------------------------------------------------------------------------
    def text_key(self, text: str) -> dict[str, Any]:
        words = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return {"encoder": self.encoders[TEXT], "text": words}

    def read_text(self, text: str) -> torch.Tensor | None:
        """The stored embedding ``[L, D]``, trimmed to its own length."""
        found = self.store.read(TEXT, self.text_key(text))
        return found["embedding"] if found is not None else None

    def write_text(self, text: str, embedding: torch.Tensor) -> None:
        self.store.write(TEXT, self.text_key(text), {"embedding": embedding})

    def holds_text(self, text: str) -> bool:
        return self.store.intact(TEXT, self.text_key(text))

    def picture_key(self, pixels: torch.Tensor) -> dict[str, Any]:
        """Named by the pixels themselves: whoever makes the picture need not know where it came from."""
        content = pixels.detach().cpu().contiguous()
        values = hashlib.sha256(content.view(-1).view(torch.uint8).numpy().data).hexdigest()
        return {"encoder": self.encoders[IMAGE], "shape": list(content.shape), "type": str(content.dtype),
                "pixels": values}  # fmt: skip

    # -- counting ----------------------------------------------------------------------------------------------------
    def count(self, kind: str, *, hits: int = 0, misses: int = 0) -> None:
        self.hits[kind] += hits
        self.misses[kind] += misses

    def rates(self) -> dict[str, float]:
        """Share of entries that were there when asked for, by kind."""
        kinds = sorted({*self.hits, *self.misses})
        return {kind: self.hits[kind] / max(self.hits[kind] + self.misses[kind], 1) for kind in kinds}

    def report(self) -> str:
        parts = [f"{kind} {self.hits[kind]} of {self.hits[kind] + self.misses[kind]} ({rate:.0%})"
                 for kind, rate in self.rates().items()]  # fmt: skip
        return f"cache {self.store.root}: found " + (", ".join(parts) or "nothing was asked for")


def located(frames: LazyFrames, plan: Any) -> dict[str, Any]:
    """The origin of a clip with the size it is resized to."""
    return {**frames.origin, "resize": list(plan.resize_to(*frames.shape[1:3]))}


class ClipSources:
    """Reads a dataset's files by way of the cache; see the module's text."""

    def __init__(self, cache: EncodingCache) -> None:
        self.cache = cache

    def look(self, path: str, *, kind: str, compat: bool) -> dict[str, Any]:
        """Facts about a media file: ``sha256`` and ``media`` (sides, frames, suspect)."""

        def probe(absolute: str) -> dict[str, Any]:
            info = probe_media(absolute, kind=kind, upstream_compat=compat)
            return {"kind": kind, "compat": compat, "height": info.height, "width": info.width, "frames": info.frames,
                    "suspect": info.suspect}  # fmt: skip

        facts = self.cache.files.of(path, probe)
        if facts["media"]["kind"] != kind or facts["media"]["compat"] != compat:
            facts = {**facts, "media": probe(path)}
        return facts

    def clip(self, dataset: ImageVideoDataset, name: str) -> LazyFrames:
        """A clip with drawn frames. It is decoded now when none of its entries exist, so that damage is met here."""
        path = dataset.path_of(name)
        facts = self.look(path, kind="video", compat=dataset.upstream_compat)
        if facts["media"]["suspect"]:
            frames, indices, _ = dataset.read_clip(name)
            return LazyFrames(frames.shape, self.origin(dataset, name, facts, indices), lambda: frames)
        indices = dataset.draw_indices(facts["media"]["frames"], name)
        return self.clip_at(dataset, name, indices, facts)

    def clip_at(self, dataset: ImageVideoDataset, name: str, indices: np.ndarray, facts: dict[str, Any]) -> LazyFrames:
        media = facts["media"]
        height, width = short_side_size(media["height"], media["width"], dataset.larger_side_of_image_and_video)

        def read() -> np.ndarray:
            with dataset.open_clip(name) as reader:
                return reader.read(indices, transform=dataset._shrink)

        origin = self.origin(dataset, name, facts, indices)
        return self._checked(LazyFrames((len(indices), height, width, 3), origin, read))

    def picture(self, dataset: ImageVideoDataset, name: str) -> LazyFrames:
        from videox_fun.data.decode import load_image

        path, compat = dataset.path_of(name), dataset.upstream_compat
        facts = self.look(path, kind="image", compat=compat)
        media = facts["media"]

        def read() -> np.ndarray:
            return np.array(load_image(path, upstream_compat=compat))[None]

        origin = self.origin(dataset, name, facts, None)
        return self._checked(LazyFrames((1, media["height"], media["width"], 3), origin, read))

    def _checked(self, frames: LazyFrames) -> LazyFrames:
        cache = self.cache
        if not (cache.skip_decoding and cache.store.holds_origin(LATENTS, origin_key(frames.origin))):
            frames.load()
        return frames

    def origin(self, dataset: ImageVideoDataset, name: str, facts: dict[str, Any], indices: Any) -> dict[str, Any]:
        return {
            "name": name, "sha256": facts["sha256"], "kind": facts["media"]["kind"],
            "indices": None if indices is None else [int(index) for index in indices],
            "short_side": None if indices is None else dataset.larger_side_of_image_and_video,
            "compat": dataset.upstream_compat,
        }  # fmt: skip


def attach(cache: EncodingCache, data: DataModule, *, clip_starts: int = 0) -> None:
    """Let ``data`` read by way of the cache. Raises ``ValueError`` for data sets whose clips cannot be cached yet."""
    if not cache.caches(LATENTS):
        return
    if data.options.kind != "image_video":
        raise ValueError(f"--cache_latents cannot cache clips of the kind {data.options.kind!r} yet; leave it out. "
                         "--cache_text works.")  # fmt: skip
    data.dataset.sources = ClipSources(cache)
    data.dataset.clip_starts = clip_starts
    if cache.skip_decoding and hasattr(data.collate_fn, "cache"):
        data.collate_fn.cache = cache


@dataclass(frozen=True)
class Planned:
    """One entry that the flags can ask for: item, frames read, and geometry."""

    item: int
    name: str
    video: bool
    indices: tuple[int, ...] | None
    resize: tuple[int, int]
    height: int
    width: int
    frames: int


def planned(cache: EncodingCache, data: DataModule) -> Iterator[tuple[Planned, dict[str, Any]]]:
    """Every entry that the flags can give each readable row, with the facts of its file."""
    dataset, options = data.dataset, data.options
    sources: ClipSources = dataset.sources
    rows: dict[int, int] = {}
    for item in range(len(dataset)):
        rows.setdefault(dataset.dataset.source_row(item), item)
    found = []
    for source, item in rows.items():
        row = dataset.dataset[item]
        if dataset.bad_rows.known(source):
            continue
        kind = "video" if is_video(row) else "image"
        try:
            facts = sources.look(dataset.path_of(row["file_path"]), kind=kind, compat=dataset.upstream_compat)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("row %d (%s) is not cached: %s", source + 1, row["file_path"], error)
            continue
        found.append((item, row["file_path"], facts))
    # A batch is as long as its shortest clip.
    lengths = {_sampled(facts, options) for _, _, facts in found} if options.train_batch_size > 1 else set()
    for item, name, facts in found:
        yield from ((entry, facts) for entry in _of_row(item, name, facts, data, lengths))


def _sampled(facts: dict[str, Any], options: Any) -> int:
    if facts["media"]["kind"] == "image":
        return 1
    return sampled_frames(facts["media"]["frames"], n_frames=options.video_sample_n_frames,
                          stride=options.video_sample_stride, upstream_compat=options.upstream_compat)  # fmt: skip


def _of_row(item: int, name: str, facts: dict[str, Any], data: DataModule, lengths: set[int]) -> Iterator[Planned]:
    options, media, dataset = data.options, facts["media"], data.dataset
    own = _sampled(facts, options)
    if own == 0 or media["suspect"]:
        return
    video = media["kind"] == "video"
    height, width = media["height"], media["width"]
    seen = short_side_size(height, width, dataset.larger_side_of_image_and_video) if video else (height, width)
    shapes = set()
    for length in {min(own, other) for other in (lengths or {own})}:
        for outcome in outcomes(media["kind"], height, width, length, options):
            crop = (outcome.height, outcome.width)
            whole = options.fix_sample_size is not None
            resize = ((0, 0) if not options.enable_bucket else crop if whole else cover_size(*seen, crop))
            shapes.add((resize, *crop, legal_frames(outcome.frames, outcome.frames, options.temporal_ratio)))
    starts = dataset.possible_indices(media["frames"], name) if video else [None]
    for indices in starts:
        chosen = None if indices is None else tuple(int(index) for index in indices)
        for resize, *shape in sorted(shapes):
            yield Planned(item, name, video, chosen, resize, *shape)


def planned_origin(cache: EncodingCache, data: DataModule, entry: Planned, facts: dict[str, Any]) -> dict[str, Any]:
    """The origin under which a planned entry is stored."""
    found = data.dataset.sources.origin(data.dataset, entry.name, facts, entry.indices)
    return {**found, "resize": list(entry.resize)}


def missing_clips(cache: EncodingCache, data: DataModule) -> tuple[int, int]:
    """``(missing, planned)`` entries of a data set; rows of damaged clips that only decoding can judge count too."""
    missing = total = 0
    for entry, facts in planned(cache, data):
        total += 1
        origin = planned_origin(cache, data, entry, facts)
        missing += not cache.holds_clip(origin, frames=entry.frames, height=entry.height, width=entry.width)
    return missing, total


def captions(data: DataModule) -> list[str]:
    """Every prompt that the flags can give, each once, the empty prompt first."""
    found = {"": None} if data.options.text_drop_ratio > 0 else {}
    rows = data.dataset.dataset
    for index in range(len(rows)):
        found.setdefault(rows[index].get("text", ""), None)
    return list(found)


def known_frames(mask_F1HW: torch.Tensor) -> tuple[int, int] | None:
    """``(a, b)`` when the first ``a`` and the last ``b`` frames are known and the rest is generated, else ``None``.

    A mask without known frames is (0, 0), one that knows everything is (F, 0).
    """
    flat = mask_F1HW.flatten(1)
    generated, known = flat.ne(0).all(dim=1), flat.eq(0).all(dim=1)
    if not bool((generated | known).all()):
        return None
    frames = known.tolist()
    if all(frames):
        return len(frames), 0
    first, last = frames.index(False), frames[::-1].index(False)
    return None if any(frames[first : len(frames) - last]) else (first, last)


def fingerprint(parts: dict[str, Any]) -> str:
    return digest({"parts": parts})
