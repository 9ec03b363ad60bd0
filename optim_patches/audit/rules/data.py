"""The data against the command: metadata, sizes, lengths, rates, broken files, resume."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from optim_patches.audit.edits import put, run
from optim_patches.audit.facts import Facts
from optim_patches.audit.media import VIDEO_SUFFIXES
from optim_patches.audit.project import Project
from optim_patches.audit.rules import Hit, Rule
from optim_patches.audit.text import Text

T = Text
_PROBLEM = {
    "empty": T("empty", "空文件"),
    "truncated": T("cut off", "被截断"),
    "no_video": T("without a video track", "没有视频轨"),
    "not_media": T("no video or image", "不是媒体文件"),
}


def _meta(f: Facts, project: Project) -> Iterator[Hit]:
    """The metadata file itself: missing, unreadable, or of a kind VideoX-Fun does not read."""
    name = f.options.text("train_data_meta")
    if not name or "$" in name:
        return
    suffix = Path(name).suffix.lower()
    if f.target == "upstream" and suffix not in (".json", ".csv"):
        yield Hit(T("VideoX-Fun reads .json and .csv only, not {0}",
                    "VideoX-Fun 只读取 .json 与 .csv，不支持 {0}").format(name))
    if f.data is not None:
        if f.data.error is not None:
            yield Hit(T("{0}: {1}", "{0}：{1}").format(name, f.data.error))
        elif f.data.rows == 0:
            yield Hit(T("{0} has no rows", "{0} 没有任何行").format(name))
        return
    folder = project.find(str(Path(name).parent), near=f.launch.path)
    if folder is None or not folder.is_dir() or str(Path(name).parent) in ("", "."):
        return
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(Path(name).name, names, n=3, cutoff=0.6)
    text = T("{0} does not exist", "{0} 不存在").format(folder / Path(name).name)
    if near:
        text = text + T("; the folder has {0}", "；同目录下有 {0}").format(", ".join(near))
    yield Hit(text)


def _folder(f: Facts, project: Project) -> Iterator[Hit]:
    """A folder full of clips without a metadata file."""
    name = f.options.text("train_data_dir")
    if f.options.given("train_data_meta") or not name:
        return
    folder = project.find(name, near=f.launch.path)
    if folder is None or not folder.is_dir():
        return
    clips = [entry for entry in folder.iterdir() if entry.suffix.lower() in VIDEO_SUFFIXES][:10_000]
    if clips:
        text = T("{0} videos in {1} are not used: list them in a metadata.json and name it with --train_data_meta",
                 "{1} 中有 {0} 个视频未被使用：请写入 metadata.json 并用 --train_data_meta 指定")  # fmt: skip
        yield Hit(text.format(len(clips), name))


def _keys(f: Facts, _: Project) -> Iterator[Hit]:
    if f.data is None:
        return
    for number, found, wanted in f.data.wrong_keys[:5]:
        if found:
            yield Hit(T("row {0}: \"{1}\" should be \"{2}\"",
                        "第 {0} 行：\"{1}\" 应为 \"{2}\"").format(number, found, wanted))
        else:
            yield Hit(T("row {0} has no \"{1}\"", "第 {0} 行缺少 \"{1}\"").format(number, wanted))
    more = len(f.data.wrong_keys) - 5
    if more > 0:
        yield Hit(T("and {0} more rows", "另有 {0} 行").format(more))


def _unsized(f: Facts, _: Project) -> Iterator[Hit]:
    if f.data is not None and f.data.unsized and f.options.on("enable_bucket"):
        text = T("{0} of {1} rows have no width and height: each file is opened to find its bucket",
                 "{1} 行中有 {0} 行没有 width/height：分桶时要逐个打开文件")
        command = run("python scripts/process_json_add_width_and_height.py --input_file META --output_file META_SIZED")
        yield Hit(text.format(f.data.unsized, f.data.rows), (command,))


def _files(f: Facts, _: Project) -> Iterator[Hit]:
    if f.data is None or not f.data.checked:
        return
    if f.data.missing:
        text = T("{0} of {1} files looked at do not exist, for example {2}",
                 "检查的 {1} 个文件中有 {0} 个不存在，例如 {2}")
        every = len(f.data.missing) == f.data.checked
        severity = "error" if every else ""
        yield Hit(text.format(len(f.data.missing), f.data.checked, f.data.missing[0]), severity=severity)
    for name, problem in f.data.broken[:5]:
        yield Hit(T("{0} is {1}", "{0}：{1}").format(name, _PROBLEM[problem]))
    good = f.data.checked - len(f.data.missing) - len(f.data.broken)
    if good == 0 and f.data.broken:
        yield Hit(T("no file that was looked at can be read", "检查的文件均无法读取"), severity="error")


def _stills(f: Facts, _: Project) -> Iterator[Hit]:
    if f.data is None or not f.data.rows or f.still or f.task not in ("plain", "control"):
        return
    if f.data.videos == 0 and f.mode != "normal":
        text = T("all {0} rows are stills: in --train_mode {1} one frame is its own condition, so nothing is learned",
                 "{0} 行全是图片：--train_mode {1} 下单帧就是条件本身，学不到东西")  # fmt: skip
        yield Hit(text.format(f.data.rows, f.mode))


def _short(f: Facts, _: Project) -> Iterator[Hit]:
    """Clips that have fewer frames than asked for, after the stride."""
    if f.data is None or not f.data.lengths or f.still or f.task == "reward":
        return
    stride = f.options.integer("video_sample_stride") or 4
    counts = [length // stride for length in f.data.lengths]
    short = [count for count in counts if count < f.frames]
    if not short:
        return
    used = max(1, (min(short) - 1) // 4 * 4 + 1)
    text = T("{0} of {1} clips looked at are shorter than {2} frames at stride {3}; the shortest gives {4}",
             "检查的 {1} 个视频中 {0} 个在步长 {3} 下不足 {2} 帧；最短的只有 {4} 帧")  # fmt: skip
    edits = ()
    if len(short) == len(counts):
        edits = (put("video_sample_n_frames", max(1, (max(counts) - 1) // 4 * 4 + 1)),)
    yield Hit(text.format(len(short), len(counts), f.frames, stride, used), edits, "warning" if edits else "info")


def _rates(f: Facts, _: Project) -> Iterator[Hit]:
    if f.data is not None and f.data.mixed_rate:
        text = T("clips of {0:g} to {1:g} frames per second: the stride counts frames, so speeds differ",
                 "帧率从 {0:g} 到 {1:g} fps：步长按帧计，运动速度会不一致")
        yield Hit(text.format(min(f.data.rates), max(f.data.rates)))


def _upscaled(f: Facts, _: Project) -> Iterator[Hit]:
    """Sizes that the command enlarges: the largest size that can be drawn against what the rows have."""
    if f.data is None or not f.data.sizes:
        return
    video = f.options.integer("video_sample_size") or 512
    image = f.options.integer("image_sample_size") or video
    drawn = f.options.on("random_hw_adapt") and f.options.on("training_with_video_token_length")
    sizes = {"video": max(video, image) if drawn else video, "image": image}
    for kind, zh in (("video", "视频"), ("image", "图片")):
        rows = [(w, h) for w, h, of in f.data.sizes if of == kind]
        if not rows or (kind == "video" and f.still):
            continue
        target = sizes[kind]
        factors = [target / (w * h) ** 0.5 for w, h in rows]
        if drawn and kind == "video":  # sizes beyond 1.25 times a clip's mean side are never drawn for it
            factors = [min(factor, 1.25) for factor in factors]
        worst = max(factors)
        if worst > 1.05:
            count = sum(factor > 1.05 for factor in factors)
            w, h = rows[factors.index(worst)]
            text = T("{0} of {1} {2}s are enlarged, {3}x{4} by {5:.2f} to the area of {6}x{6}",
                     "{1} 个{2}中有 {0} 个会被放大，{3}x{4} 放大 {5:.2f} 倍到 {6}x{6} 的面积")  # fmt: skip
            word = T(kind, zh)
            yield Hit(text.format(count, len(rows), word, w, h, worst, target))
    if drawn:
        token = f.options.integer("token_sample_size") or 512
        steps = sorted({*range(video, image + 1, 128), image}) if image > video else [image]
        shown = ", ".join(f"{s}: {int(min(f.frames * token**2 / s**2, f.frames)) // 4 * 4 + 1}" for s in steps[:16])
        yield Hit(T("sizes and frames that will be drawn: {0}",
                    "将会抽取的尺寸与帧数：{0}").format(shown), severity="info")


def _resume(f: Facts, project: Project) -> Iterator[Hit]:
    wanted, output = f.options.text("resume_from_checkpoint"), f.options.text("output_dir")
    if not wanted or not output:
        return
    folder = project.find(output, near=f.launch.path)
    if folder is None or not folder.is_dir():
        return
    entries = [entry for entry in folder.iterdir() if entry.name.startswith("checkpoint")]
    states = [entry.name for entry in entries if entry.is_dir() and re.fullmatch(r"checkpoint-\d+", entry.name)]
    exports = sorted(entry.name for entry in entries if entry.name not in states)
    if wanted == "latest" and exports and not states:
        text = T("latest: {0} holds exported weights only ({1}), no state to resume; --save_state makes one",
                 "latest：{0} 中只有导出的权重（{1}），没有训练状态；需用 --save_state 保存")
        yield Hit(text.format(output, ", ".join(exports[:3])), (put("save_state"),) if f.lora else ())
    elif wanted != "latest" and not (folder / Path(wanted).name).exists():
        near = ", ".join(sorted(states)[:5]) or "-"
        yield Hit(T("{0} is not in {1}; there is {2}", "{1} 中没有 {0}；现有 {2}").format(wanted, output, near))


RULES = (
    Rule("metadata-file", "error", T("metadata file", "元数据文件"), _meta),
    Rule("unused-videos", "error", T("videos without metadata", "视频没有元数据"), _folder),
    Rule("metadata-keys", "error", T("metadata keys", "元数据键名"), _keys),
    Rule("metadata-sizes", "info", T("rows without size", "缺少尺寸的行"), _unsized),
    Rule("broken-files", "warning", T("broken or missing files", "损坏或缺失的文件"), _files),
    Rule("stills-for-video", "warning", T("stills in image-to-video", "图生视频只用图片"), _stills),
    Rule("short-clips", "info", T("short clips", "视频过短"), _short),
    Rule("mixed-rates", "warning", T("mixed frame rates", "帧率不一致"), _rates),
    Rule("upscaling", "warning", T("sizes beyond the source", "尺寸超过素材"), _upscaled),
    Rule("resume-without-state", "error", T("nothing to resume from", "没有可恢复的状态"), _resume),
)
