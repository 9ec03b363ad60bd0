"""Encoded clips and captions instead of encoders: what an entry is named by.

A clip's entry is named by the hash of the file's content, the frames read, how they were shrunk, resized and cropped,
and the fingerprint of the VAE (weights, type, options); a caption's by its text, the fingerprint of encoder and
tokenizer, and the token count. A *part* of a clip (the clip behind a mask, one frame as a reference) adds what it is.
A changed file or setting therefore makes another entry; old ones stay until ``videox-cache gc``. Random sizes, crops
and start frames need no special case: the name says what was drawn.

``cache_sources`` says where entries take the place of pixels, ``cache_plan`` which ones a run will ask for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.data.cache_store import CacheStore, FileFacts, digest

if TYPE_CHECKING:
    from videox_fun.data.cache_sources import LazyFrames
    from videox_fun.data.collate import Plan

LATENTS, TEXT, IMAGE = "latents", "text", "image"


@dataclass(frozen=True)
class LatentLayout:
    """What decides the size of a stored posterior: ``values`` per point (mean and log-variance), shrinkage, bytes."""

    values: int
    spatial: int
    temporal: int
    itemsize: int

    def bytes(self, *, frames: int, height: int, width: int) -> int:
        points = ((frames - 1) // self.temporal + 1) * (height // self.spatial) * (width // self.spatial)
        return points * self.values * self.itemsize


@dataclass(frozen=True)
class Entry:
    """Where something encoded lies: its kind, key and origin, and the name of its tensor."""

    kind: str
    key: dict[str, Any]
    origin: dict[str, Any]

    @property
    def tensor(self) -> str:
        return "moments" if self.kind == LATENTS else "features"


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
        layout: of stored posteriors, to say how much room they need.
        hits, misses: entries asked for since the start, by kind.
    """

    store: CacheStore
    files: FileFacts
    encoders: dict[str, str] = field(default_factory=dict)
    skip_decoding: bool = False
    layout: LatentLayout | None = None
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def caches(self, kind: str) -> bool:
        return kind in self.encoders

    # -- clips -------------------------------------------------------------------------------------------------------
    def clip_key(
        self, origin: dict[str, Any], *, frames: int, height: int, width: int, part: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The name of a clip's posterior at a size, or of a part of it."""
        return {"encoder": self.encoders[LATENTS], "resize": list(origin["resize"]), "frames": frames,
                "height": height, "width": width, **(part or {})}  # fmt: skip

    @staticmethod
    def masked_part(clip: str = "", number: int = -1, *, known: Sequence[int] | None = None) -> dict[str, Any] | None:
        """A masked clip: by the counts of known frames at both ends, or by its mask's number; else ``None``."""
        if number >= 0:
            return {"masked": {"clip": clip, "number": number}}
        return None if known is None else {"masked": list(known)}

    @staticmethod
    def reference_part(index: int, *, padded: bool = False) -> dict[str, Any]:
        """One frame of a clip as a reference picture."""
        return {"reference": [index, padded]}

    def entry(self, origin: dict[str, Any], **geometry: Any) -> Entry:
        """The entry of a clip with its ``resize``; ``geometry`` as ``clip_key`` takes it."""
        return Entry(LATENTS, self.clip_key(origin, **geometry), origin_key(origin))

    def clip_entry(
        self, clip: LazyFrames, plan: Plan, *, part: dict[str, Any] | None = None, frames: int | None = None,
        target: Sequence[int] | None = None,
    ) -> Entry:
        """The entry of a clip in a batch; ``target`` is the size of the clip that decides the resize."""
        resize = plan.resize_to(*(target or clip.shape[1:3]))
        count = min(plan.frames, len(clip)) if frames is None else frames
        height, width = plan.crop_to
        return self.entry({**clip.origin, "resize": list(resize)}, frames=count, height=height, width=width, part=part)

    def picture_entry(self, clip: LazyFrames, plan: Plan, *, index: int = 0) -> Entry:
        """The features of one frame of a clip."""
        origin = {**clip.origin, "resize": list(plan.resize_to(*clip.shape[1:3]))}
        return self.features_entry(origin, height=plan.crop_to[0], width=plan.crop_to[1], index=index)

    def features_entry(self, origin: dict[str, Any], *, height: int, width: int, index: int) -> Entry:
        key = {"encoder": self.encoders.get(IMAGE, ""), "resize": list(origin["resize"]), "height": height,
               "width": width, "frame": index}  # fmt: skip
        return Entry(IMAGE, key, origin_key(origin))

    def read(self, entry: Entry) -> torch.Tensor | None:
        """A stored posterior ``[2C, T, h, w]`` or features, or ``None``."""
        found = self.store.read(entry.kind, entry.key, origin=entry.origin)
        return found[entry.tensor] if found is not None else None

    def write(self, entry: Entry, value: torch.Tensor) -> None:
        self.store.write(entry.kind, entry.key, {entry.tensor: value}, origin=entry.origin)

    def holds(self, entry: Entry) -> bool:
        return self.store.intact(entry.kind, entry.key, origin=entry.origin)

    def bytes_of(self, entry: Entry) -> int:
        """About how much room an entry takes; 0 when that is not known."""
        if self.layout is None or entry.kind != LATENTS:
            return 0
        return self.layout.bytes(**{name: entry.key[name] for name in ("frames", "height", "width")})

    def read_batch(self, entries: Sequence[dict[str, Entry]]) -> dict[str, list[torch.Tensor]] | None:
        """What a batch's entries hold, or ``None`` when one is missing."""
        found: dict[str, list[torch.Tensor]] = {}
        for example in entries:
            for name, entry in example.items():
                value = self.read(entry)
                if value is None:
                    return None
                found.setdefault(name, []).append(value)
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
