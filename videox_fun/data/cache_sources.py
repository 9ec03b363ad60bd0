"""Where the cache of encodings takes the place of pixels.

``ClipSources`` hands the dataset frames that are decoded only when somebody looks at them, with the origin they come
from. The collate draws the batch's geometry from their shapes, and its fields what else is random. When all entries of
the batch exist, they are added and no picture is decoded. Otherwise the step encodes and stores what is missing. Every
draw is made as without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from videox_fun.data.cache import LATENTS, EncodingCache, origin_key
from videox_fun.data.decode import CONTROL_BACKGROUND, IMAGE_BACKGROUND
from videox_fun.data.metadata import is_video
from videox_fun.data.probe import probe_media
from videox_fun.data.resize import short_side_size

if TYPE_CHECKING:
    from videox_fun.data.dataset_image_video import ImageVideoDataset
    from videox_fun.data.module import DataModule

#: Stands for the hash of a control clip that is not there: black frames.
NO_CONTROL = "black"


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


class ClipSources:
    """Reads a dataset's files by way of the cache; see the module's text."""

    def __init__(self, cache: EncodingCache) -> None:
        self.cache = cache

    def look(self, path: str, *, kind: str, compat: bool) -> dict[str, Any]:
        """Facts about a media file: ``sha256`` and ``media`` (sides, frames, suspect)."""

        def probe(absolute: str) -> dict[str, Any]:
            info = probe_media(absolute, kind=kind, upstream_compat=compat)
            return {"kind": kind, "compat": compat, "height": info.height, "width": info.width, "frames": info.frames,
                    "fps": info.fps, "suspect": info.suspect}  # fmt: skip

        facts = self.cache.files.of(path, probe)
        media = facts["media"]
        if media["kind"] != kind or media["compat"] != compat or "fps" not in media:
            facts = {**facts, "media": probe(path)}
        return facts

    def clip(self, dataset: ImageVideoDataset, name: str, *, at_most: int | None = None) -> LazyFrames:
        """A clip with drawn frames. It is decoded now when none of its entries exist, so that damage is met here."""
        facts = self.look(dataset.path_of(name), kind="video", compat=dataset.upstream_compat)
        if facts["media"]["suspect"]:
            frames, indices, _ = dataset.read_clip(name, at_most=at_most)
            return LazyFrames(frames.shape, self.origin(dataset, name, facts, indices), lambda: frames)
        length = facts["media"]["frames"]
        return self.checked(self.clip_at(dataset, name, dataset.draw_indices(min(length, at_most or length), name),
                                         facts))

    def clip_at(self, dataset: ImageVideoDataset, name: str, indices: Any, facts: dict[str, Any]) -> LazyFrames:
        media = facts["media"]
        height, width = short_side_size(media["height"], media["width"], dataset.larger_side_of_image_and_video)

        def read() -> np.ndarray:
            with dataset.open_clip(name) as reader:
                return reader.read(indices, transform=dataset._shrink)

        return LazyFrames((len(indices), height, width, 3), self.origin(dataset, name, facts, indices), read)

    def picture(self, dataset: ImageVideoDataset, name: str) -> LazyFrames:
        return self.checked(self.picture_of(dataset, name))

    def picture_of(self, dataset: ImageVideoDataset, name: str, *, control: bool = False) -> LazyFrames:
        from videox_fun.data.decode import load_image

        path, compat = dataset.path_of(name), dataset.upstream_compat
        facts = self.look(path, kind="image", compat=compat)
        background = CONTROL_BACKGROUND if control else IMAGE_BACKGROUND

        def read() -> np.ndarray:
            return np.array(load_image(path, upstream_compat=compat, background=background))[None]

        origin = {**self.origin(dataset, name, facts, None), **({"background": "control"} if control else {})}
        return LazyFrames((1, facts["media"]["height"], facts["media"]["width"], 3), origin, read)

    def control(self, dataset: ImageVideoDataset, row: dict[str, Any], target: LazyFrames) -> LazyFrames:
        """The control of a clip, at the same frames; black when the row has none, or has camera poses."""
        name = row.get("control_file_path")
        if name and not is_video(row):
            return self.picture_of(dataset, name, control=True)
        if name and not (name.lower().endswith(".txt") and dataset.enable_camera_info):
            facts = self.look(dataset.path_of(name), kind="video", compat=dataset.upstream_compat)
            return self.clip_at(dataset, name, np.asarray(target.origin["indices"]), facts)
        black = {"name": "", "sha256": NO_CONTROL, "kind": target.origin["kind"], "indices": None, "short_side": None,
                 "compat": dataset.upstream_compat}  # fmt: skip
        return LazyFrames(target.shape, black, lambda: np.zeros(target.shape, np.uint8))

    def checked(self, frames: LazyFrames) -> LazyFrames:
        """``frames``, decoded now unless an entry shows that it was possible before."""
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
    """Let ``data`` read by way of the cache. Raises ``ValueError`` for data sets whose clips cannot be cached."""
    if not cache.caches(LATENTS):
        return
    options = data.options
    if options.kind in ("text", "safetensors"):
        raise ValueError(f"--cache_latents: a data set of the kind {options.kind!r} has no clips to encode; leave it "
                         "out. --cache_text works.")  # fmt: skip
    if options.kind != "image_video" and not options.enable_bucket:
        raise ValueError("--cache_latents with control clips needs --enable_bucket.")
    data.dataset.sources = ClipSources(cache)
    data.dataset.clip_starts = clip_starts
    if cache.skip_decoding and hasattr(data.collate_fn, "cache"):
        data.collate_fn.cache = cache


def unlisted(data: DataModule) -> str | None:
    """Why batches cannot be made of stored entries alone, or ``None``."""
    fields = getattr(data.collate_fn, "fields", None)
    if fields is None:
        return "masks are drawn without --enable_bucket" if data.options.inpaint else None
    names = [type(field).__name__ for field in fields if not field.listed]
    if "InpaintField" in names:
        return "masks are drawn anew (--cache_mask_draws N keeps N per clip)"
    return "subject pictures are encoded at each use" if names else None
