"""Rows with everything filled in, and rows written in the formats that people use.

``fill_facts`` opens files (a few at a time) and adds what rows lack: type, width, height, frames and frames per
second, so that a run neither probes nor guesses. The writers put a set down as an annotation file, as CogVideo's
lists, as a folder with captions or as tar shards; what a format cannot hold is refused by row.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.decode import media_kind
from videox_fun.data.metadata import to_rate, to_size
from videox_fun.data.probe import probe_media
from videox_fun.data.storage import fs_path, in_shard, is_plain_file, is_url, open_media

Rows = Sequence[dict[str, Any]]
ANNOTATIONS = (".json", ".jsonl", ".csv")


def fill_facts(rows: list[dict[str, Any]], *, folder: str | None = None, workers: int | None = None) -> dict[int, str]:
    """Add missing facts to ``rows`` in place. Returns the reason for each row whose file cannot be read."""
    lacking = [number for number, row in enumerate(rows) if not _complete(row)]
    failures: dict[int, str] = {}
    with ThreadPoolExecutor(max_workers=workers or min(os.cpu_count() or 1, 8)) as pool:
        for number, facts in zip(lacking, pool.map(lambda number: _facts(rows[number], folder), lacking), strict=True):
            if isinstance(facts, str):
                failures[number] = facts
            else:
                rows[number].update(facts)
    return failures


def _complete(row: dict[str, Any]) -> bool:
    sized = to_size(row.get("width")) is not None and to_size(row.get("height")) is not None
    if media_kind(row["file_path"]) != "video":
        return sized and "type" in row
    return sized and to_size(row.get("frames")) is not None and to_rate(row.get("fps")) is not None and "type" in row


def _facts(row: dict[str, Any], folder: str | None) -> dict[str, Any] | str:
    kind = media_kind(row["file_path"]) or row.get("type", "image")
    try:
        info = probe_media(resolve(row["file_path"], folder), kind=kind)
    except (ValueError, OSError) as error:
        return str(error)
    facts = {"type": info.kind, "width": info.width, "height": info.height}
    return {**facts, "frames": info.frames, "fps": round(info.fps, 4)} if info.kind == "video" else facts


def write_rows(rows: Rows, target: str | Path, *, data_format: str, folder: str | None = None,
               shard_mb: int = 512) -> int:  # fmt: skip
    """Write ``rows`` to ``target``; ``folder`` is where their relative paths start. Returns the number of rows."""
    writers: dict[str, Callable[..., None]] = {"videox": _annotation, "cogvideo": _lists, "folder": _folder,
                                               "webdataset": _shards}  # fmt: skip
    target = Path(target)
    if data_format not in writers:
        raise ValueError(f"cannot write the format {data_format!r}; there are {', '.join(writers)}")
    if data_format == "videox" and target.suffix.lower() not in ANNOTATIONS:
        raise ValueError(f"{target}: annotation files end with {', '.join(ANNOTATIONS)}; --to names another format")
    (target.parent if data_format == "videox" else target).mkdir(parents=True, exist_ok=True)
    if data_format == "webdataset":
        _shards(rows, target, folder, shard_mb)
    else:
        writers[data_format](rows, target, folder)
    return len(rows)


def _annotation(rows: Rows, target: Path, folder: str | None) -> None:
    suffix = target.suffix.lower()
    if suffix == ".json":
        text = json.dumps(list(rows), ensure_ascii=False, indent=1) + "\n"
    elif suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        text = _csv(rows, target)
    replace_text(target, text)


def replace_text(target: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one."""
    half = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    half.write_bytes(text.encode("utf-8", "surrogatepass"))
    os.replace(half, target)


def _csv(rows: Rows, target: Path) -> str:
    for number, row in enumerate(rows, 1):
        nested = [key for key, value in row.items() if isinstance(value, list | dict)]
        if nested:
            raise ValueError(f"{target}: row {number} has a list in {nested[0]!r}, which a csv file cannot hold; "
                             "write .json or .jsonl")  # fmt: skip
    out = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _lists(rows: Rows, target: Path, folder: str | None) -> None:
    kinds = {media_kind(row["file_path"]) or row.get("type", "image") for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"{target}: CogVideo's lists hold videos or pictures, these rows have both")
    blank = [str(number) for number, row in enumerate(rows, 1) if not row["text"].strip()]
    if blank:
        raise ValueError(f"{target}: CogVideo's lists cannot hold empty captions (row {', '.join(blank[:10])})")
    paths = []
    for number, row in enumerate(rows, 1):
        if in_shard(row["file_path"]):
            raise ValueError(f"{target}: row {number} is a member of a shard; --to folder unpacks it")
        path = resolve(row["file_path"], folder)
        paths.append(path if is_url(path) else os.path.relpath(path, target))
    replace_text(target / "prompts.txt", "".join(" ".join(row["text"].split()) + "\n" for row in rows))
    replace_text(target / ("videos.txt" if kinds == {"video"} else "images.txt"), "".join(f"{p}\n" for p in paths))


def _folder(rows: Rows, target: Path, folder: str | None) -> None:
    for number, row in enumerate(rows):
        source = resolve(row["file_path"], folder)
        name = target / f"{number:06d}{os.path.splitext(source)[1].lower()}"
        if name.exists():
            name.unlink()
        if is_plain_file(source):
            try:
                os.link(fs_path(source), name)
            except OSError:  # another disk, or a file system without links
                shutil.copyfile(fs_path(source), name)
        else:
            with open_media(source) as handle, open(name, "wb") as out:
                shutil.copyfileobj(handle, out)
        replace_text(name.with_suffix(".txt"), row["text"] + "\n")


def _shards(rows: Rows, target: Path, folder: str | None, shard_mb: int) -> None:
    shard, written, archive = 0, 0, None
    try:
        for number, row in enumerate(rows):
            if archive is None or written >= shard_mb * 2**20:
                if archive is not None:
                    archive.close()
                archive, written = tarfile.open(target / f"shard-{shard:06d}.tar", "w"), 0
                shard += 1
            for name, data in _members(row, f"{number:08d}", folder):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                written += len(data)
    finally:
        if archive is not None:
            archive.close()


def _members(row: dict[str, Any], key: str, folder: str | None) -> Iterator[tuple[str, bytes]]:
    for field, part in (("file_path", ""), ("control_file_path", ".control")):
        if row.get(field):
            source = resolve(row[field], folder)
            with open_media(source) as handle:
                yield f"{key}{part}{os.path.splitext(source)[1].lower()}", handle.read()
    yield f"{key}.txt", row["text"].encode("utf-8", "surrogatepass")
    facts = {name: row[name] for name in ("width", "height", "frames", "fps") if name in row}
    yield f"{key}.json", json.dumps(facts).encode()
