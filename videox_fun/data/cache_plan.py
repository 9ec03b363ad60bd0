"""Which entries of the cache a run may ask for, before it starts.

``planned`` lists each (start frame, size, length) that the flags can give a row; ``entries_of`` what is stored of one
of them: the clip, its control clip, its masked clips, references and features, as far as the fields of the collate
draw from a list. With all of them present the encoders need not be loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from videox_fun.data.cache import EncodingCache, Entry
from videox_fun.data.collate import Plan
from videox_fun.data.geometry import cover_size, legal_frames
from videox_fun.data.metadata import is_video
from videox_fun.data.resize import short_side_size
from videox_fun.data.summary import frames_read, outcomes

if TYPE_CHECKING:
    from videox_fun.data.cache_sources import ClipSources
    from videox_fun.data.module import DataModule

logger = logging.getLogger(__name__)


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
        found.append((item, row["file_path"], _within_control(dataset, row, facts)))
    # A batch is as long as its shortest clip.
    lengths = {_sampled(facts, options) for _, _, facts in found} if options.train_batch_size > 1 else set()
    for item, name, facts in found:
        yield from ((entry, facts) for entry in _of_row(item, name, facts, data, lengths))


def _within_control(dataset: Any, row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A clip is read as far as its control clip goes."""
    limit = dataset._control_length(row) if hasattr(dataset, "_control_length") else None
    media = facts["media"]
    return facts if limit is None else {**facts, "media": {**media, "frames": min(media["frames"], limit)}}


def _sampled(facts: dict[str, Any], options: Any) -> int:
    if facts["media"]["kind"] == "image":
        return 1
    return frames_read(facts["media"]["frames"], facts["media"]["fps"], options)


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


def example_of(data: DataModule, entry: Planned, facts: dict[str, Any]) -> dict[str, Any]:
    """The item of a planned entry, with frames that nobody has decoded yet."""
    dataset, sources = data.dataset, data.dataset.sources
    row = dataset.dataset[entry.item]
    frames = (sources.clip_at(dataset, entry.name, entry.indices, facts) if entry.video
              else sources.picture_of(dataset, entry.name))
    found = {"pixel_values": frames, "data_type": "video" if entry.video else "image", "mask_name": entry.name,
             "text": "", "idx": entry.item}  # fmt: skip
    if data.options.kind in ("control", "vace"):
        found["control_pixel_values"] = sources.control(dataset, row, frames)
    return found


def plan_of(data: DataModule, entry: Planned, example: dict[str, Any]) -> Plan:
    return Plan(crop_to=(entry.height, entry.width), frames=entry.frames,
                first_size=tuple(example["pixel_values"].shape[1:3]),
                stretch=data.options.fix_sample_size is not None)  # fmt: skip


def drawn_values(data: DataModule, example: dict[str, Any], plan: Plan) -> list[list[Any]]:
    """What the fields may draw, so that each value of each field occurs."""
    values = [field.possible(example, plan) for field in data.collate_fn.fields]
    return [[own[turn % len(own)] for own in values] for turn in range(max(map(len, values), default=1))]


def entries_of(
    cache: EncodingCache, data: DataModule, entry: Planned, facts: dict[str, Any], *,
    example: dict[str, Any] | None = None,
) -> list[tuple[list[Any], dict[str, Entry]]]:
    """``(values drawn, entries)`` of a planned clip, for each outcome of the draws."""
    if not data.options.enable_bucket:
        origin = planned_origin(cache, data, entry, facts)
        geometry = {"frames": entry.frames, "height": entry.height, "width": entry.width}
        found = {"moments": cache.entry(origin, **geometry)}
        if data.options.inpaint:
            part = cache.masked_part(known=(1 if entry.frames > 1 else 0, 0))
            found["masked_moments"] = cache.entry(origin, **geometry, part=part)
        return [([], found)]
    example = example or example_of(data, entry, facts)
    plan = plan_of(data, entry, example)
    return [(values, data.collate_fn.entries(cache, example, plan, values))
            for values in drawn_values(data, example, plan)]


@dataclass
class Coverage:
    """What a run may ask for: entries, how many are missing, how many clips they belong to, room they need."""

    clips: int = 0
    total: int = 0
    missing: int = 0
    bytes: int = 0
    missing_bytes: int = 0

    def text(self) -> str:
        per = f", {self.total / self.clips:.1f} per clip" if self.clips else ""
        return (f"{self.total - self.missing} of {self.total} entries of {self.clips} clips exist{per}; all together "
                f"take {self.bytes / 2**30:.2f} GiB")  # fmt: skip


def coverage(cache: EncodingCache, data: DataModule) -> Coverage:
    """Rows of damaged clips that only decoding can judge count as missing."""
    found, clips = Coverage(), set()
    for entry, facts in planned(cache, data):
        clips.add(entry.name)
        seen = {}
        for _, entries in entries_of(cache, data, entry, facts):
            for wanted in entries.values():
                if cache.caches(wanted.kind):
                    seen[(wanted.kind, str(sorted(wanted.key.items())), str(wanted.origin))] = wanted
        for wanted in seen.values():
            held, size = cache.holds(wanted), cache.bytes_of(wanted)
            found.total, found.missing = found.total + 1, found.missing + (not held)
            found.bytes, found.missing_bytes = found.bytes + size, found.missing_bytes + (0 if held else size)
    found.clips = len(clips)
    return found


def captions(data: DataModule) -> list[str]:
    """Every prompt that the flags can give, each once, the empty prompt first."""
    found = {"": None} if data.options.text_drop_ratio > 0 else {}
    rows = data.dataset.dataset
    for index in range(len(rows)):
        found.setdefault(rows[index].get("text", ""), None)
    return list(found)
