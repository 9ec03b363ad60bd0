"""What the training data is, as far as the metadata file and the headers of some clips tell.

Reads the json, jsonl or csv that ``--train_data_meta`` names, counts videos, stills and sizes, names rows with wrong
keys, and looks at the headers of up to ``MAX_PROBED`` clips for frame counts, rates and broken files.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optim_patches.audit.media import VIDEO_SUFFIXES, MediaInfo, probe
from optim_patches.audit.text import Text

MAX_BYTES = 256 << 20
MAX_PROBED = 200
KEYS = ("file_path", "text", "type", "width", "height", "control_file_path", "object_file_path", "audio_path",
        "face_file_path", "background_file_path", "mask_file_path", "ref_file_path", "prompt")  # fmt: skip

_ALIASES = {
    "file_path": ("path", "video", "image", "filepath", "filename"),
    "text": ("caption", "captions", "prompt"),
}


@dataclass
class DataFacts:
    """Facts of one data set.

    Attributes:
        unsized: rows without width and height.
        wrong_keys: row number (from 1), the key found, the key meant.
        missing: files named but absent, as far as looked at.
        broken: file name and what its header says (``empty``, ``truncated``, ``no_video``, ``not_media``).
        lengths, rates: frames and frames per second of the clips whose headers were read.
    """

    path: str
    rows: int = 0
    videos: int = 0
    images: int = 0
    unsized: int = 0
    sizes: list[tuple[int, int, str]] = field(default_factory=list)
    wrong_keys: list[tuple[int, str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    checked: int = 0
    error: Text | None = None

    @property
    def mixed_ratio(self) -> bool | None:
        """Whether rows differ in aspect ratio by more than 5 %; None when sizes are unknown."""
        ratios = [height / width for width, height, _ in self.sizes]
        return max(ratios) / min(ratios) > 1.05 if ratios else None

    @property
    def mixed_length(self) -> bool:
        return bool(self.lengths) and max(self.lengths) >= 2 * max(min(self.lengths), 1)

    @property
    def mixed_rate(self) -> bool:
        return bool(self.rates) and max(self.rates) > 1.2 * min(self.rates)


def read_data(path: Path, root: Path | None) -> DataFacts:
    """Facts of the data set described by a metadata file; problems with the file become ``error``."""
    facts = DataFacts(str(path))
    try:
        if path.stat().st_size > MAX_BYTES:
            limit = MAX_BYTES >> 20
            facts.error = Text(f"larger than {limit} MB, not read", f"大于 {limit} MB，未读取")
            return facts
        text = path.read_text(encoding="utf-8-sig")
        rows = list(_rows(text, path.suffix.lower()))
    except UnicodeDecodeError:
        facts.error = Text("not UTF-8 text", "不是 UTF-8 文本")
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        facts.error = Text(f"cannot be read: {reason}", f"无法读取：{reason}")
    else:
        _count(rows, facts)
        _look(rows, root if root is not None else path.parent, facts)
    return facts


def _rows(text: str, suffix: str) -> Iterator[Any]:
    if suffix == ".csv":
        yield from csv.DictReader(io.StringIO(text))
    elif suffix in (".jsonl", ".txt"):
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line) if suffix == ".jsonl" else {"text": line}
    else:
        data = json.loads(text)
        if not isinstance(data, list):
            raise ValueError("the file holds no list of rows")
        yield from data


def _count(rows: list[Any], facts: DataFacts) -> None:
    facts.rows = len(rows)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            facts.wrong_keys.append((number, type(row).__name__, "file_path"))
            continue
        for wanted in ("file_path", "text"):
            if wanted not in row and not (wanted == "text" and "prompt" in row):
                found = _nearest(wanted, [str(key) for key in row if key not in KEYS])
                if found or (wanted == "file_path" and "prompt" not in row and "text" not in row):
                    facts.wrong_keys.append((number, found, wanted))
        video = _is_video(row)
        facts.videos += video
        facts.images += not video
        size = _size(row)
        if size is None:
            facts.unsized += 1
        else:
            facts.sizes.append((*size, "video" if video else "image"))


def _nearest(wanted: str, keys: list[str]) -> str:
    named = next((key for key in keys if key.lower() in _ALIASES[wanted]), "")
    return named or next(iter(difflib.get_close_matches(wanted, keys, n=1, cutoff=0.6)), "")


def _is_video(row: Mapping[str, Any]) -> bool:
    kind = row.get("type")
    if isinstance(kind, str) and kind:
        return kind == "video"
    return Path(str(row.get("file_path", ""))).suffix.lower() in VIDEO_SUFFIXES


def _size(row: Mapping[str, Any]) -> tuple[int, int] | None:
    try:
        width, height = int(float(row["width"])), int(float(row["height"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return (width, height) if 0 < width < 1 << 20 and 0 < height < 1 << 20 else None


def _look(rows: list[Any], root: Path, facts: DataFacts) -> None:
    """Headers of some files, evenly spread over the rows."""
    step = max(1, len(rows) // MAX_PROBED)
    for row in rows[::step][:MAX_PROBED]:
        name = row.get("file_path") if isinstance(row, Mapping) else None
        if not isinstance(name, str) or not name or "\0" in name:
            continue
        facts.checked += 1
        try:
            info = probe(root / name)
        except OSError:
            facts.missing.append(name)
            continue
        _note(name, row, info, facts)


def _note(name: str, row: Mapping[str, Any], info: MediaInfo, facts: DataFacts) -> None:
    if info.problem:
        facts.broken.append((name, info.problem))
        return
    if info.frames:
        facts.lengths.append(info.frames)
    if info.fps:
        facts.rates.append(info.fps)
    if info.width and info.height and _size(row) is None:
        facts.sizes.append((info.width, info.height, "video"))
