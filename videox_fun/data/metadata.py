"""Annotation files: reading, checking, and keeping the rows.

Rows come from ``.json`` (a list of objects), ``.jsonl`` or ``.csv``, always read as UTF-8, or from the other sources
of ``data.formats``. Every row is checked before anything else is loaded: a missing or misspelt key, an
empty value or an impossible size is reported with the row number and the nearest valid key. The kind of a row follows
its file: a still is a picture and a clip is a video, whatever ``type`` says or does not say.

Rows are kept as JSON text in one byte array (``RowStore``), not as Python objects: worker processes then share the
memory, because reading a row touches no reference count of the others.
"""

from __future__ import annotations

import csv
import difflib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from videox_fun.data.decode import media_kind
from videox_fun.data.formats import Source, detect_format, read_lists, read_shards, with_id_token
from videox_fun.data.storage import DATA_FORMATS, fs_path

logger = logging.getLogger(__name__)

FORMATS = (".json", ".jsonl", ".csv")
_SHOWN = 10  # problems listed in one message

#: Names that other projects use, and what they are called here.
_OTHER_NAMES = {
    "caption": "text", "prompt": "text", "description": "text", "captions": "text",
    "path": "file_path", "file": "file_path", "video": "file_path", "image": "file_path", "filename": "file_path",
    "video_path": "file_path", "image_path": "file_path", "file_name": "file_path", "media": "file_path",
    "control": "control_file_path", "control_video": "control_file_path", "media_type": "type", "kind": "type",
}  # fmt: skip


#: What every row may say about its file; ``videox-data convert`` fills it in.
_FACTS = ("type", "width", "height", "frames", "fps")


@dataclass(frozen=True)
class RowSchema:
    """The keys that a dataset class reads."""

    required: tuple[str, ...] = ("file_path", "text")
    optional: tuple[str, ...] = (*_FACTS, "control_file_path", "object_file_path")
    nullable: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        return self.required + self.optional


TEXT_SCHEMA = RowSchema(required=("text",), optional=())
FILE_SCHEMA = RowSchema(required=("file_path",), optional=("text", *_FACTS))
CONTROL_SCHEMA = RowSchema(
    required=("file_path", "text", "control_file_path"),
    optional=(*_FACTS, "object_file_path"),
    nullable=("control_file_path",),
)


class RowStore(Sequence):
    """An immutable list of row dictionaries in compact form."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        encoded = [json.dumps(row).encode("ascii") for row in rows]
        self._ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._order = np.arange(len(encoded))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self._order[index]
        start = self._ends[row - 1] if row else 0
        return json.loads(self._bytes[start : self._ends[row]].tobytes().decode("ascii"))

    def source_row(self, index: int) -> int:
        """The row of the annotation file that item ``index`` comes from."""
        return int(self._order[index])

    @property
    def source_rows(self) -> int:
        return len(self._ends)

    def reordered(self, order: Sequence[int]) -> RowStore:
        """Another view: item ``i`` is row ``order[i]`` of the file (rows may repeat)."""
        view = object.__new__(RowStore)
        view._ends, view._bytes, view._order = self._ends, self._bytes, np.asarray(order, dtype=np.int64)
        return view


def is_video(row: dict[str, Any]) -> bool:
    return row.get("type", "image") == "video"


def repeat_videos(rows: RowStore, video_repeat: int) -> RowStore:
    """All pictures once, then all videos ``video_repeat`` times; 0 keeps the rows as they are."""
    if video_repeat <= 0:
        return rows
    kinds = [is_video(row) for row in rows]
    pictures = [index for index, video in enumerate(kinds) if not video]
    videos = [index for index, video in enumerate(kinds) if video]
    return rows.reordered(pictures + videos * video_repeat)


def load_rows(
    path: str | Path | RowStore,
    *,
    schema: RowSchema = RowSchema(),
    upstream_compat: bool = False,
    data_format: str = "auto",
    id_token: str | None = None,
) -> RowStore:
    """Read and check an annotation (see ``data.formats``). Raises ``ValueError`` that names rows, keys and fixes.

    Rows that were read and checked before are returned as they are.
    """
    if isinstance(path, RowStore):
        return path
    source = read_source(path, data_format=data_format)
    if not source.rows:
        raise ValueError(f"{path}: the annotation file has no rows")
    problems = check_rows(source.rows, schema=schema, where=source.name)
    if problems and (not upstream_compat or len({line.split(":")[0] for line in problems}) == len(source.rows)):
        raise ValueError(_list(f"{path}: {len(problems)} problem(s) in the annotation file", problems))
    for line in problems:
        logger.warning("%s: %s", path, line)
    if not upstream_compat:
        follow_the_file(source.rows, source.name)
    return RowStore(with_id_token(source.rows, id_token))


def read_source(path: str | Path, *, data_format: str = "auto") -> Source:
    """The rows of an annotation file, a folder or shards as they are written there, unchecked."""
    text = str(path)
    if data_format not in DATA_FORMATS:
        raise ValueError(f"--data_format must be one of {', '.join(DATA_FORMATS)}, got {data_format!r}")
    found = detect_format(text) if data_format == "auto" else data_format
    if found == "webdataset":
        return read_shards(text)
    location = Path(text)
    if not location.exists():
        raise ValueError(_not_found(location))
    if found == "cogvideo":
        return read_lists(text)
    if found == "folder":
        return Source(rows_of_folder(location))
    if not location.is_file():
        raise ValueError(f"{location}: expected an annotation file ({', '.join(FORMATS)}), this is a folder; "
                         "--data_format cogvideo, folder or webdataset read folders")  # fmt: skip
    return _read(location)


def _read(location: Path) -> Source:
    try:
        return _parse(location)
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{location}: not an annotation: it is nested too deeply") from None


def _parse(location: Path) -> Source:
    suffix = location.suffix.lower()
    with open(fs_path(location), encoding="utf-8-sig", newline="") as handle:
        if suffix == ".csv":
            return _read_csv(location, handle)
        if suffix == ".jsonl":
            return _read_jsonl(location, handle)
        if suffix != ".json":
            raise ValueError(
                f"{location}: annotation files end with {', '.join(FORMATS)}, not {suffix!r}{_near(location)}"
            )
        try:
            rows = json.load(handle)
        except json.JSONDecodeError as error:
            raise ValueError(f"{location}: not valid JSON at line {error.lineno}: {error.msg}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{location}: a .json annotation is a list of objects, this is a {type(rows).__name__}")
    return Source(rows)


def _read_csv(location: Path, handle: Iterable[str]) -> Source:
    try:
        return Source([_drop_blank_cells(row) for row in csv.DictReader(handle)])
    except csv.Error as error:
        raise ValueError(f"{location}: not a readable csv file ({error})") from error


def _read_jsonl(location: Path, lines: Iterable[str]) -> Source:
    rows, numbers = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{location}: line {number} is not valid JSON: {error.msg}") from error
        numbers.append(number)
    return Source(rows, [f"row {index + 1} (line {number})" for index, number in enumerate(numbers)])


def _drop_blank_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A blank csv cell means that the value is absent; a blank caption is a caption."""
    return {key: value for key, value in row.items() if key == "text" or (key is not None and value not in ("", None))}


def check_rows(
    rows: Sequence[Any], *, schema: RowSchema, where: Callable[[int], str] = lambda index: f"row {index + 1}"
) -> list[str]:
    """One line per problem, each with the row, the key and what to write instead."""
    problems: list[str] = []
    for index, row in enumerate(rows):
        problems.extend(f"{where(index)}: {text}" for text in row_problems(row, schema))
    for name, what, fix in misspelt(rows, schema, where):
        logger.warning("%s: %s; %s", name, what, fix)
    return problems


def row_problems(row: Any, schema: RowSchema) -> Iterator[str]:
    """What makes a row unusable, each with what to write instead."""
    if not isinstance(row, dict):
        yield f"is a {type(row).__name__}, expected an object with {schema.required}"
        return
    unknown = [key for key in row if key not in schema.known]
    for key in schema.required:
        if key not in row:
            guess = [name for name in unknown if _nearest(name, schema) == key]
            hint = f"; found {guess[0]!r}, rename it to {key!r}" if guess else ""
            yield f"the key {key!r} is missing{hint} (keys of this row: {', '.join(map(repr, row)) or 'none'})"
        elif row[key] is None and key not in schema.nullable:
            yield f"{key!r} is null" + ('; write "" for an empty caption' if key == "text" else "")
        elif key == "file_path" and not (isinstance(row[key], str) and row[key].strip()):
            yield f"{key!r} must be a path, got {row[key]!r}"
        elif key == "text" and not isinstance(row[key], str):
            yield f"{key!r} must be a string, got {row[key]!r}"
    for key in (key for key in row if isinstance(key, str) and key.endswith("_path") and key in schema.known):
        if isinstance(row[key], str) and not is_path(row[key]):
            yield f"{key!r} holds characters that no file name can hold: {row[key]!r}"
        elif row[key] is not None and key not in ("file_path", "object_file_path") and not isinstance(row[key], str):
            yield f"{key!r} must be a path, got {row[key]!r}"
    for key in ("width", "height", "frames"):
        if row.get(key) not in (None, "") and to_size(row[key]) is None:
            yield f"{key!r} must be a positive whole number, got {row[key]!r} (or leave it out: the file is probed)"
    objects = row.get("object_file_path")
    if objects is not None and not (isinstance(objects, list) and all(isinstance(item, str) for item in objects)):
        yield f"'object_file_path' must be a list of paths, got {objects!r}"


def to_size(value: Any) -> int | None:
    """A count from a number or a numeric string."""
    number = to_rate(value)
    return int(number) if number is not None and number == int(number) else None


def to_rate(value: Any) -> float | None:
    """A positive number from a number or a numeric string."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 < number < float("inf") else None


def is_path(text: str) -> bool:
    """Whether the text can name a file at all."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _nearest(name: str, schema: RowSchema) -> str | None:
    other = _OTHER_NAMES.get(str(name).lower())
    if other in schema.known:
        return other
    close = difflib.get_close_matches(str(name).lower(), schema.known, n=1, cutoff=0.75)
    return close[0] if close else None


def misspelt(
    rows: Sequence[Any], schema: RowSchema, where: Callable[[int], str]
) -> Iterator[tuple[str, str, str]]:
    """``(row, what, fix)``. Unknown keys are allowed (people keep notes in rows); slips are named once."""
    seen: set[str] = set()
    for index, row in enumerate(rows):
        for key in row if isinstance(row, dict) else ():
            if key in schema.known or key in seen:
                continue
            seen.add(key)
            guess = _nearest(key, schema)
            if guess is not None and guess not in row:
                yield where(index), f"unknown key {key!r} is ignored", f"did you mean {guess!r}?"


def follow_the_file(rows: list[dict[str, Any]], where: Callable[[int], str] | None) -> None:
    """Set ``type`` by the file's ending, and (with ``where``) say where it differed."""
    changed: dict[str, list[str]] = {}
    for index, row in enumerate(rows):
        kind = media_kind(row["file_path"]) if "file_path" in row else None
        if kind is None:
            continue
        given = row.get("type")
        if where is not None and given is not None and given != kind:
            changed.setdefault(f"type {given!r} for a {kind} file: treated as {kind}", []).append(where(index))
        row["type"] = kind
    for what, rows_named in changed.items():
        logger.warning("%s, e.g. %s (%d row(s))", what, rows_named[0], len(rows_named))


def rows_of_folder(folder: Path) -> list[dict[str, Any]]:
    """Rows from a folder (searched recursively): each picture or clip with its ``NAME.txt`` caption."""
    media, strays = scan_folder(folder)
    if strays:
        logger.info("%s: %d other file(s) ignored, e.g. %s", folder, len(strays), strays[0].name)
    captions = {path: path.with_suffix(".txt") for path in media}
    without = [path.name for path, caption in captions.items() if not caption.is_file()]
    if not media:
        raise ValueError(f"{folder}: no pictures or videos in this folder")
    if without:
        videos = sum(media_kind(path) == "video" for path in media)
        raise ValueError(
            f"{folder}: found {videos} video(s) and {len(media) - videos} picture(s), but {len(without)} of them have "
            f"no caption: expected e.g. {Path(without[0]).with_suffix('.txt').name} beside {without[0]}. Write the "
            "captions, or give an annotation file (.json, .jsonl, .csv) to --train_data_meta."
        )
    return [
        {
            "file_path": str(path.absolute()),
            "text": captions[path].read_text("utf-8-sig").strip(),
            "type": media_kind(path),
        }
        for path in media
    ]


def scan_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """``(media files, other files)`` below a folder, sorted; hidden files and captions are neither."""
    media: list[Path] = []
    strays: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if media_kind(path) is not None and not path.name.startswith("."):
            media.append(path)
        elif path.suffix.lower() != ".txt":
            strays.append(path)
    return media, strays


def explain_missing_meta(train_data_dir: str | None) -> str:
    """Why a run without ``--train_data_meta`` cannot start, with what was found in the data folder."""
    text = "--train_data_meta is not given"
    if train_data_dir and Path(train_data_dir).is_dir():
        media, _ = scan_folder(Path(train_data_dir))
        videos = sum(media_kind(path) == "video" for path in media)
        text += (
            f"; {train_data_dir} holds {videos} video(s) and {len(media) - videos} picture(s). To use them, put a "
            f"NAME.txt caption beside each and pass --train_data_meta {train_data_dir}, or write an annotation file "
            'like [{"file_path": "a.mp4", "text": "a caption", "type": "video"}]'
        )
    return text


def _not_found(location: Path) -> str:
    return f"annotation file not found: {location}{_near(location)}"


def _near(location: Path) -> str:
    folder = location.parent
    if not folder.is_dir():
        return f" (the folder {folder} does not exist)"
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in FORMATS]
    close = difflib.get_close_matches(location.name, names, n=3, cutoff=0.5) or sorted(names)[:3]
    return f"; did you mean {', '.join(str(folder / name) for name in close)}?" if close else ""


def _list(title: str, lines: Sequence[str]) -> str:
    more = f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return title + ":\n  " + "\n  ".join(lines[:_SHOWN]) + more
