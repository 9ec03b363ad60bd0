"""Model and data folders: is everything there, whole, and what it seems to be. Only headers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optim_patches.audit.configs import load_mapping
from optim_patches.audit.metadata import DataFacts, read_data
from optim_patches.audit.project import read_text
from optim_patches.audit.text import Text, same, size
from optim_patches.audit.weights import read_header
from optim_patches.doctor.findings import ERROR, INFO, OK, WARNING, Finding

T = Text
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
_LFS = b"version https://git-lfs"
_SHOWN = 3
_BROKEN = {
    "empty": T("is empty", "为空"),
    "truncated": T("is cut off", "不完整"),
    "no_video": T("holds no video", "不含视频"),
    "not_media": T("is no video or picture", "不是视频或图片"),
}


def look_at_model(folder: Path, config: Path | None = None) -> list[Finding]:
    """Weights, indices and configuration of a model folder, and the paths that a YAML of ``--config_path`` names."""
    title = T(f"model {folder}", f"模型 {folder}")
    if not folder.is_dir():
        where = next((p for p in folder.absolute().parents if p.is_dir()), Path("/"))
        beside = ", ".join(sorted(p.name for p in where.iterdir())[:6]) or "-"
        return [
            Finding(
                "inputs",
                "model",
                ERROR,
                title,
                T("does not exist", "不存在"),
                T(f"{where} holds: {beside}", f"{where} 中有：{beside}"),
            )
        ]
    files = sorted(path for path in folder.rglob("*") if path.suffix in _WEIGHTS and path.is_file())
    problems = [
        Finding("inputs", "weights", ERROR, same(str(path.relative_to(folder))), why)
        for path in files
        if (why := _weight_problem(path)) is not None
    ]
    problems += [*_missing_shards(folder), *_bad_configs(folder)]
    if config is not None:
        problems += _subpaths(folder, config)
    if not files:
        problems.append(
            Finding(
                "inputs",
                "model",
                ERROR,
                title,
                T("holds no weights", "没有权重文件"),
                T("download the model again", "请重新下载模型"),
            )
        )
    if problems:
        return problems
    total = sum(path.stat().st_size for path in files)
    return [
        Finding(
            "inputs",
            "model",
            OK,
            title,
            T(
                f"{len(files)} weight files, {size(total)}, all whole",
                f"{len(files)} 个权重文件，{size(total)}，均完整",
            ),
        )
    ]


def _weight_problem(path: Path) -> Text | None:
    """Why a weight file cannot be loaded, as far as its size and header tell."""
    again = T(": download it again", "：请重新下载")
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        return same(str(error.strerror))
    if length == 0:
        return T("is empty", "为空") + again
    if head.startswith(_LFS):
        return T("is a pointer of Git LFS, not the file", "是 Git LFS 指针而非文件本身") + T(
            ": run git lfs pull", "：请执行 git lfs pull"
        )
    if path.suffix != ".safetensors":
        return None
    header = read_header(path)
    if header is None:
        return T("is no safetensors file", "不是 safetensors 文件") + again
    needed = 8 + int.from_bytes(head[:8], "little") + _data_length(header)
    if length < needed:
        return (
            T(f"is cut off: {size(length)} of {size(needed)}", f"不完整：{size(length)}，应为 {size(needed)}") + again
        )
    return None


def _data_length(header: dict[str, Any]) -> int:
    ends = [
        entry["data_offsets"][1]
        for entry in header.values()
        if isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list) and len(entry["data_offsets"]) == 2
    ]
    return max((end for end in ends if isinstance(end, int)), default=0)


def _read_json(path: Path) -> Any:
    text, problem = read_text(path)
    if text is None:
        return problem
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return T("cannot be parsed as JSON", "无法解析为 JSON")


def _missing_shards(folder: Path) -> Iterator[Finding]:
    for index in sorted(folder.rglob("*.index.json")):
        data = _read_json(index)
        shards = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(shards, dict):
            continue
        absent = sorted({str(name) for name in shards.values()} - {path.name for path in index.parent.iterdir()})
        if absent:
            listing = ", ".join(absent[:_SHOWN])
            yield Finding(
                "inputs",
                "shards",
                ERROR,
                same(str(index.relative_to(folder))),
                T(f"{len(absent)} shards are missing: {listing}", f"缺少 {len(absent)} 个分片：{listing}"),
                T("download the model again", "请重新下载模型"),
            )


def _bad_configs(folder: Path) -> Iterator[Finding]:
    for path in sorted(folder.rglob("config.json")):
        data = _read_json(path)
        if not isinstance(data, dict):
            why = data if isinstance(data, Text) else T("holds no mapping", "不是键值映射")
            yield Finding("inputs", "config", ERROR, same(str(path.relative_to(folder))), why)


def _subpaths(folder: Path, config: Path) -> Iterator[Finding]:
    """Parts that the YAML names and the folder lacks."""
    text, problem = read_text(config)
    data, problem = load_mapping(text, config.name) if text is not None else (None, problem)
    if data is None:
        yield Finding("inputs", "config_path", ERROR, same(str(config)), problem or T("cannot be read", "无法读取"))
        return
    for section, values in data.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if str(key).endswith("_subpath") and isinstance(value, str) and not (folder / value).exists():
                yield Finding(
                    "inputs",
                    "subpath",
                    ERROR,
                    same(f"{section}.{key}"),
                    T(f"{folder / value} does not exist", f"{folder / value} 不存在"),
                )


def look_at_data(meta: Path, root: Path | None = None) -> list[Finding]:
    """A metadata file and the headers of the files it names."""
    title = T(f"data {meta}", f"数据 {meta}")
    if meta.is_dir():
        listing = ", ".join(
            sorted(path.name for path in meta.iterdir() if path.suffix in (".json", ".jsonl", ".csv"))[:_SHOWN]
        )
        return [
            Finding(
                "inputs",
                "data",
                ERROR,
                title,
                T("is a folder", "是文件夹"),
                T(
                    f"name the metadata file{f': {listing}' if listing else ''}",
                    f"请指定元数据文件{f'：{listing}' if listing else ''}",
                ),
            )
        ]
    facts = read_data(meta, root)
    if facts.error is not None:
        return [Finding("inputs", "data", ERROR, title, facts.error)]
    if not facts.rows:
        return [Finding("inputs", "data", ERROR, title, T("has no rows", "没有数据行"))]
    problems = list(_data_problems(facts))
    text = T(
        f"{facts.rows} rows: {facts.videos} videos, {facts.images} pictures; {facts.checked} files looked at",
        f"{facts.rows} 行：视频 {facts.videos}，图片 {facts.images}；检查文件 {facts.checked} 个",
    )
    if facts.lengths:
        text += T(
            f"; {min(facts.lengths)} to {max(facts.lengths)} frames",
            f"；{min(facts.lengths)} 至 {max(facts.lengths)} 帧",
        )
    return [Finding("inputs", "data", OK if not problems else INFO, title, text), *problems]


def _data_problems(facts: DataFacts) -> Iterator[Finding]:
    if facts.missing:
        state = ERROR if len(facts.missing) == facts.checked else WARNING
        yield Finding(
            "inputs",
            "missing",
            state,
            T("missing files", "缺失文件"),
            _some(facts.missing),
            T(
                "relative paths start at --train_data_dir (--data_dir here)",
                "相对路径以 --train_data_dir（此处 --data_dir）为起点",
            ),
        )
    for name, problem in facts.broken[:_SHOWN]:
        yield Finding("inputs", "broken", WARNING, same(name), _BROKEN.get(problem, same(problem)))
    if len(facts.broken) > _SHOWN:
        yield Finding("inputs", "broken", WARNING, T("broken files", "损坏文件"), same(len(facts.broken)))
    for number, found, wanted in facts.wrong_keys[:_SHOWN]:
        yield Finding(
            "inputs",
            "keys",
            ERROR,
            T(f"row {number}", f"第 {number} 行"),
            T(
                f"has no '{wanted}'" + (f", but '{found}'" if found else ""),
                f"缺少 '{wanted}'" + (f"，但有 '{found}'" if found else ""),
            ),
        )
    if facts.mixed_rate:
        yield Finding(
            "inputs",
            "rates",
            INFO,
            T("frame rates", "帧率"),
            same(f"{min(facts.rates):g} - {max(facts.rates):g} fps"),
            T("one --video_sample_stride gives clips of different speed", "同一 --video_sample_stride 下速度不一"),
        )


def _some(names: list[str]) -> Text:
    listing, more = ", ".join(names[:_SHOWN]), len(names) - _SHOWN
    return same(listing) + (T(f" and {more} more", f" 等 {len(names)} 个") if more > 0 else same(""))
