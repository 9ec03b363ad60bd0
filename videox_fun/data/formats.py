"""Rows from what people have: annotation files, CogVideo's lists, folders with captions, WebDataset shards.

``read_source`` returns rows with the keys that the datasets read, and for each row a name to call it by in messages.
Which format a source has is told by ``--data_format``; "auto" looks at the source: an annotation file by its ending, a
folder with ``videos.txt`` as CogVideo's, shards by ``.tar``, any other folder as clips with ``NAME.txt`` captions.

Rows of shards name their clip by shard, place and member (``data.storage``), so nothing is unpacked, and they are read
from wherever the shards lie. Reading all headers of many remote shards takes a while: ``videox-data convert`` writes
the rows to a file once, and training starts from that.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from videox_fun.data.decode import media_kind
from videox_fun.data.storage import fs_path, is_url, member_name, members, open_media

logger = logging.getLogger(__name__)

_PROMPTS = ("prompts.txt", "prompt.txt")
_CAPTION_KEYS = ("text", "caption", "prompt")
#: What a member beside a clip may say about it.
_KEPT = ("width", "height", "frames", "fps")
_SHOWN = 10


@dataclass
class Source:
    """Rows and their names in messages (``row 3 (line 4)``)."""

    rows: list[Any]
    names: list[str] = field(default_factory=list)

    def name(self, index: int) -> str:
        return self.names[index] if self.names else f"row {index + 1}"


def detect_format(source: str) -> str:
    """The format of an annotation file, folder or set of shards."""
    if source.endswith(".tar"):
        return "webdataset"
    folder = Path(source)
    if folder.is_dir():
        if (folder / "videos.txt").is_file():
            return "cogvideo"
        has_shards = any(name.endswith(".tar") for name in os.listdir(folder))
        return "webdataset" if has_shards else "folder"
    if folder.name == "videos.txt":
        return "cogvideo"
    return "videox"


def read_lists(source: str) -> Source:
    """CogVideo's ``prompts.txt`` and ``videos.txt`` (or ``images.txt`` alone), paired line by line.

    Paths start from the folder of the list. Blank lines and different counts are refused: every later clip would get
    its neighbour's caption. An ``images.txt`` beside ``videos.txt`` is checked and kept as ``first_frame_path``;
    image-to-video training takes its picture from the clip itself.
    """
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    prompts = next((folder / name for name in _PROMPTS if (folder / name).is_file()), None)
    if prompts is None:
        raise ValueError(f"{folder}: no prompts.txt (or prompt.txt) with one caption per line")
    lists = {name: folder / f"{name}.txt" for name in ("videos", "images")}
    lists = {name: file for name, file in lists.items() if file.is_file()}
    if not lists:
        raise ValueError(f"{folder}: no videos.txt (or images.txt) with one path per line")
    lines = {"prompts": _lines(prompts), **{name: _lines(file) for name, file in lists.items()}}
    counts = {name: len(found) for name, found in lines.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name}.txt has {count}" for name, count in counts.items())
        raise ValueError(f"{folder}: the lists are paired line by line and must be equally long, but {said} lines")
    media = "videos" if "videos" in lists else "images"
    rows = []
    for number, (caption, path) in enumerate(zip(lines["prompts"], lines[media], strict=True)):
        row = {"file_path": _below(folder, path), "text": caption, "type": "video" if media == "videos" else "image"}
        if media == "videos" and "images" in lines:
            row["first_frame_path"] = _below(folder, lines["images"][number])
        rows.append(row)
    _require_files(folder, rows)
    return Source(rows, [f"line {number + 1}" for number in range(len(rows))])


def _lines(file: Path) -> list[str]:
    with open(fs_path(file), encoding="utf-8-sig") as handle:
        lines = [line.strip() for line in handle.read().rstrip().splitlines()]
    blank = [str(number) for number, line in enumerate(lines, 1) if not line]
    if blank:
        raise ValueError(f"{file}: blank line(s) {', '.join(blank[:_SHOWN])}. Lines are paired by their number: write "
                         "a caption (or path) there, or remove that line from all lists")  # fmt: skip
    return lines


def _below(folder: Path, path: str) -> str:
    return path if is_url(path) else str((folder / path).absolute())


def _require_files(folder: Path, rows: list[dict[str, Any]]) -> None:
    missing = [f"line {number}: {row[key]}" for number, row in enumerate(rows, 1)
               for key in ("file_path", "first_frame_path") if key in row and not is_url(row[key])
               and not os.path.isfile(fs_path(row[key]))]  # fmt: skip
    if missing:
        more = f"\n  ... and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(f"{folder}: {len(missing)} listed file(s) do not exist:\n  " + "\n  ".join(missing[:_SHOWN])
                         + more)  # fmt: skip


# ---- shards ----------------------------------------------------------------------------------------------------------
def shards_of(source: str) -> list[str]:
    """The shards that a folder, a pattern (``{000..041}``, ``*``) or a single name means, sorted."""
    found: list[str] = []
    for name in _expand_braces(source):
        if is_url(name):
            found.append(name)
        elif Path(name).is_dir():
            found += sorted(str(path) for path in Path(name).glob("*.tar"))
        else:
            found += sorted(glob.glob(name)) or [name]
    missing = [name for name in found if not is_url(name) and not os.path.isfile(name)]
    if missing or not found:
        raise ValueError(f"{source}: {'shard not found: ' + missing[0] if missing else 'no .tar shards here'}")
    return found


def _expand_braces(text: str) -> list[str]:
    """``a-{000..002}.tar`` as three names, ``{a,b}`` as two."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", text)
    if match is None:
        return [text]
    if match[3] is not None:
        parts = match[3].split(",")
    else:
        width = len(match[1]) if match[1].startswith("0") else 0
        parts = [f"{number:0{width}d}" for number in range(int(match[1]), int(match[2]) + 1)]
    return [name for part in parts for name in _expand_braces(text[: match.start()] + part + text[match.end() :])]


def read_shards(source: str) -> Source:
    """One row per sample of WebDataset shards: a clip or picture, with ``.txt`` or ``.json`` beside it.

    ``KEY.control.EXT`` is the control clip of ``KEY``. Samples without a clip are counted and left out.
    """
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    without: list[str] = []
    for shard in shards_of(source):
        for key, group in groupby(members(shard), key=lambda member: _key(member[0])):
            row = _sample(shard, list(group))
            if row is None:
                without.append(f"{shard}: {key}")
                continue
            rows.append(row)
            names.append(f"row {len(rows)} ({os.path.basename(shard)}: {key})")
    if without:
        logger.warning("%s: %d sample(s) without a clip or picture are left out, e.g. %s", source, len(without),
                       without[0])  # fmt: skip
    return Source(rows, names)


def _key(member: str) -> str:
    folder, _, name = member.rpartition("/")
    return f"{folder}/{name.split('.', 1)[0]}"


def _sample(shard: str, group: list[tuple[str, int, int]]) -> dict[str, Any] | None:
    parts = {_extension(name): (name, at, size) for name, at, size in group}
    media = sorted((ext for ext in parts if media_kind("x." + ext) and "." not in ext),
                   key=lambda ext: media_kind("x." + ext) != "video")  # fmt: skip
    if not media:
        return None

    def full(ext: str) -> str:
        name, at, size = parts[ext]
        return member_name(shard, at, size, name)

    def read(ext: str) -> str:
        with open_media(full(ext)) as handle:
            return handle.read().decode("utf-8-sig")

    row: dict[str, Any] = {"file_path": full(media[0]), "type": media_kind("x." + media[0])}
    facts: dict[str, Any] = {}
    if "json" in parts:
        try:
            facts = json.loads(read("json"))
        except ValueError as error:
            raise ValueError(f"{shard}: {parts['json'][0]} is not valid JSON ({error})") from None
        if not isinstance(facts, dict):
            raise ValueError(f"{shard}: {parts['json'][0]} must hold an object, holds a {type(facts).__name__}")
        row.update({name: facts[name] for name in _KEPT if name in facts})
    if "txt" in parts:
        row["text"] = read("txt").strip()
    else:
        captions = [facts[name] for name in _CAPTION_KEYS if name in facts]
        row.update({"text": captions[0]} if captions else {})
    control = [ext for ext in parts if ext.startswith("control.")]
    if control:
        row["control_file_path"] = full(control[0])
    return row


def _extension(member: str) -> str:
    return member.rpartition("/")[2].partition(".")[2].lower()


# ---- what all formats share ------------------------------------------------------------------------------------------
def with_id_token(rows: list[Any], id_token: str | None) -> Iterator[Any]:
    """Rows whose captions start with the token that names what is learnt."""
    for row in rows:
        if id_token and isinstance(row, dict) and isinstance(row.get("text"), str):
            row = {**row, "text": f"{id_token} {row['text']}".strip()}
        yield row
