"""``videox-data check``: everything that is wrong with a data set, by row, before a run spends a day on it.

The annotation is read without stopping at the first problem; the rows that are sound go through the same summary as at
the start of a run, with the run's flags, and are then looked at one by one: what is cut off by the crop, what is
enlarged, which control clip does not fit its target, which caption repeats or is cut.
"""

from __future__ import annotations

import difflib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.captions import Count, caption_findings
from videox_fun.data.decode import media_kind
from videox_fun.data.formats import Source, with_id_token
from videox_fun.data.geometry import cover_size
from videox_fun.data.metadata import (
    CONTROL_SCHEMA,
    FILE_SCHEMA,
    TEXT_SCHEMA,
    RowSchema,
    RowStore,
    follow_the_file,
    is_video,
    misspelt,
    read_source,
    row_problems,
)
from videox_fun.data.module import DataModule, DataOptions, build_data
from videox_fun.data.probe import MediaInfo, decode_in_own_process, probe_media
from videox_fun.data.storage import fs_path, is_plain_file
from videox_fun.data.summary import DataSummary, frames_read, info_of_row, outcomes, summarize

_SHOWN = 5
_LOST = 0.25  # share of a picture that a crop may cut off without a word
_SCHEMAS = {"control": CONTROL_SCHEMA, "vace": CONTROL_SCHEMA, "text": TEXT_SCHEMA, "safetensors": FILE_SCHEMA}


@dataclass(frozen=True)
class Finding:
    """One problem of one row. ``error`` rows cannot be trained on as they are."""

    error: bool
    code: str
    where: str
    what: str
    fix: str

    def line(self) -> str:
        text = f"{'error' if self.error else 'warning'}: {self.where}: {self.what}"
        return f"{text}; {self.fix}" if self.fix else text


@dataclass
class CheckReport:
    """What was found. ``module`` reads the sound rows, when there are any."""

    source: str
    rows: int = 0
    findings: list[Finding] = field(default_factory=list)
    summary: DataSummary | None = None
    module: DataModule | None = None
    names: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def errors(self) -> int:
        return sum(finding.error for finding in self.findings)

    def lines(self) -> list[str]:
        """The report as text: errors, warnings (a few of each kind), then the summary of the sound rows."""
        counts = Counter(finding.code for finding in self.findings)
        text = [f"{self.source}: {self.rows} rows, {self.errors} error(s), {len(self.findings) - self.errors} "
                f"warning(s), {self.seconds:.1f} s"]  # fmt: skip
        shown: Counter[str] = Counter()
        for finding in sorted(self.findings, key=lambda finding: (not finding.error, finding.code)):
            shown[finding.code] += 1
            if shown[finding.code] <= _SHOWN:
                text.append(f"  {finding.line()}")
            if shown[finding.code] == _SHOWN and counts[finding.code] > _SHOWN:
                text.append(f"    ... and {counts[finding.code] - _SHOWN} more of this kind ({finding.code})")
        return text + (self.summary.lines() if self.summary is not None else [])

    def as_dict(self) -> dict[str, Any]:
        """All findings and the buckets, for programs."""
        summary = self.summary
        return {
            "source": self.source, "rows": self.rows, "errors": self.errors,
            "findings": [vars(finding) for finding in self.findings],
            "buckets": summary.buckets if summary else {}, "kept": summary.kept if summary else 0,
            "warnings": summary.warnings if summary else [],
        }  # fmt: skip


def check(
    options: DataOptions,
    *,
    count_tokens: Count | None = None,
    max_tokens: int = 512,
    probe_seconds: float | None = None,
    decode: bool = False,
) -> CheckReport:
    """Check the data that ``options`` name. Files are opened for ``probe_seconds`` at most (without it: as long as rows
    lack facts, and for 2 s where they have them). With ``decode`` every clip is decoded from end to end, each in a
    process of its own: what crashes a decoder is found before a run meets it."""
    started = time.monotonic()
    report = CheckReport(str(options.train_data_meta))
    try:
        source = read_source(report.source, data_format=options.data_format)
    except (ValueError, OSError) as error:
        report.findings.append(Finding(True, "unreadable", "the annotation", str(error), ""))
        return report
    report.rows, report.names = len(source.rows), [source.name(index) for index in range(len(source.rows))]
    sound = list(_check_rows(source, options, report.findings))
    if sound:
        store = RowStore(with_id_token(source.rows, options.id_token)).reordered(sound)
        _check_set(replace(options, train_data_meta=store, data_format="auto", id_token=None, video_repeat=0), report,
                   probe_seconds=probe_seconds, count_tokens=count_tokens, max_tokens=max_tokens,
                   decode=decode)  # fmt: skip
    elif not report.findings:
        report.findings.append(Finding(True, "no-rows", "the annotation", "it has no rows", "write some"))
    report.seconds = time.monotonic() - started
    return report


# ---- what the annotation says ----------------------------------------------------------------------------------------
def _check_rows(source: Source, options: DataOptions, findings: list[Finding]) -> Iterator[int]:
    """Indices of rows that can be read."""
    schema = _SCHEMAS.get(options.kind, RowSchema())
    listed: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    for index, row in enumerate(source.rows):
        name = source.name(index)
        problems = list(row_problems(row, schema))
        findings += [Finding(True, "bad-row", name, text, "") for text in problems]
        if problems:
            continue
        absent = list(_absent_files(row, options.train_data_dir, listed))
        findings += [Finding(True, "missing-file", name, what, fix) for what, fix in absent]
        given, kind = row.get("type"), media_kind(row.get("file_path", ""))
        if kind is not None and given is not None and given != kind:
            findings.append(Finding(False, "wrong-type", name, f"type {given!r} for a {kind} file",
                                    f"it is trained as {kind}; write that"))  # fmt: skip
        first = seen.setdefault(str(row.get("file_path")), index)
        if "file_path" in row and first != index:
            findings.append(Finding(False, "same-file", name, f"the file of {source.name(first)} again",
                                    "it is seen twice per epoch"))  # fmt: skip
        if not absent:
            yield index
    findings += [Finding(False, "unknown-key", where, what, fix) for where, what, fix in
                 misspelt(source.rows, schema, source.name)]  # fmt: skip
    follow_the_file([row for row in source.rows if isinstance(row, dict) and isinstance(row.get("file_path"), str)],
                    None)  # fmt: skip


def _absent_files(row: dict[str, Any], folder: str | None, listed: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    paths = [row[key] for key in ("file_path", "control_file_path") if row.get(key)]
    for path in (*paths, *(row.get("object_file_path") or ())):
        full = resolve(path, folder)
        if not is_plain_file(full) or os.path.isfile(fs_path(full)):
            continue
        parent = Path(full).parent
        if str(parent) not in listed:
            listed[str(parent)] = sorted(os.listdir(parent)) if parent.is_dir() else []
        if not listed[str(parent)]:
            yield f"{full} does not exist", f"there is no folder {parent}; set --train_data_dir"
            continue
        close = difflib.get_close_matches(Path(full).name, listed[str(parent)], n=1) if len(listed) < 100 else []
        yield f"{full} does not exist", f"did you mean {close[0]}?" if close else "remove the row or add the file"


# ---- what the files and the flags make of it -------------------------------------------------------------------------
def _check_set(options: DataOptions, report: CheckReport, *, probe_seconds: float | None, count_tokens: Count | None,
               max_tokens: int, decode: bool) -> None:  # fmt: skip
    module = report.module = build_data(options)
    rows = {module.dataset.dataset.source_row(index): row for index, row in enumerate(module.dataset.dataset)}
    if options.kind not in ("text", "safetensors"):
        if probe_seconds is None:
            probe_seconds = 2.0 if all(info_of_row(row) is not None for row in rows.values()) else 3600.0
        report.summary = summarize(module, probe_seconds=probe_seconds, allow_empty=True)
        report.summary.source = report.source
        for number, reason in sorted(report.summary.dropped.items()):
            fix = ("lower --video_sample_stride or leave the row out" if "too short" in reason else
                   "encode it anew or leave the row out")  # fmt: skip
            report.findings.append(Finding(True, "unusable", report.names[number], reason, fix))
        report.findings += _per_row(rows, report, options)
        if decode:
            report.findings += _decoded(rows, report, options)
    captions = {number: row["text"] for number, row in rows.items() if isinstance(row.get("text"), str)}
    report.findings += [Finding(False, code, report.names[number], what, fix) for code, number, what, fix in
                        caption_findings(captions, count_tokens=count_tokens, max_tokens=max_tokens)]  # fmt: skip


def _per_row(rows: Mapping[int, dict[str, Any]], report: CheckReport, options: DataOptions) -> Iterator[Finding]:
    effects: dict[tuple, tuple[float, float]] = {}
    stride = options.video_sample_stride if options.video_sample_fps is None else 1
    rates = Counter(round(info.fps, 1) for info in report.summary.infos.values() if info.fps > 0)
    usual = rates.most_common(1)[0][0] if rates else 0.0
    for number, row in rows.items():
        if number in report.summary.dropped:
            continue
        name, opened = report.names[number], report.summary.infos.get(number)
        info = opened or info_of_row(row)
        if info is None:
            continue
        said = info_of_row({**row, "frames": row.get("frames", info.frames)})
        if opened is not None and said is not None and (said.height, said.width) != (opened.height, opened.width):
            yield Finding(False, "wrong-size", name, f"written {said.width}x{said.height}, the file is "
                          f"{opened.width}x{opened.height}", "videox-data convert writes the right ones")  # fmt: skip
        if opened is not None and opened.suspect:
            yield Finding(False, "damaged", name, "the header contradicts the packets", "encode it anew")
        frames = frames_read(info.frames, info.fps, options) if info.kind == "video" else 1
        key = (info.kind, info.height, info.width, frames)
        if key not in effects:
            effects[key] = _effect(key, options)
        enlarged, lost = effects[key]
        if 1 < frames < options.video_sample_n_frames:
            yield Finding(False, "short-clip", name, f"{info.frames} frames give {frames} of "
                          f"{options.video_sample_n_frames}", "lower --video_sample_stride" if stride > 1 else
                          "lower --video_sample_n_frames or leave it out")  # fmt: skip
        if enlarged > 1.05:
            yield Finding(False, "enlarged", name, f"{info.width}x{info.height} is enlarged x{enlarged:.2f}",
                          "lower --video_sample_size or --image_sample_size")  # fmt: skip
        if lost > _LOST:
            yield Finding(False, "cropped", name, f"the crop cuts off {lost:.0%} of {info.width}x{info.height}",
                          "--enable_bucket keeps the shape of clips")  # fmt: skip
        if options.video_sample_fps is None and info.fps > 0 and not 0.83 < info.fps / max(usual, 1e-6) < 1.2:
            yield Finding(False, "other-rate", name, f"{info.fps:g} frames per second, most clips have {usual:g}",
                          "--video_sample_fps samples by time")  # fmt: skip
        if options.kind in ("control", "vace"):
            yield from _control(row, name, info, options)


def _decoded(rows: Mapping[int, dict[str, Any]], report: CheckReport, options: DataOptions) -> Iterator[Finding]:
    clips = [number for number, row in rows.items() if is_video(row) and number not in report.summary.dropped]

    def work(number: int) -> str | None:
        path = resolve(rows[number]["file_path"], options.train_data_dir)
        try:
            listed, count = probe_media(path, kind="video").frames, decode_in_own_process(path)
        except (ValueError, OSError) as error:
            return str(error)
        return None if count >= listed else f"only {count} of {listed} frames can be decoded"

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for number, problem in zip(clips, pool.map(work, clips), strict=True):
            if problem is not None:
                yield Finding(True, "damaged", report.names[number], problem, "encode it anew or leave the row out")


def _effect(key: tuple[str, int, int, int], options: DataOptions) -> tuple[float, float]:
    """``(largest enlargement, mean share that the crop cuts off)``."""
    kind, height, width, frames = key
    found = list(outcomes(kind, height, width, frames, options))
    lost = []
    for outcome in found:
        crop = (outcome.height, outcome.width)
        covered = crop if options.fix_sample_size is not None else cover_size(height, width, crop)
        lost.append(1 - crop[0] * crop[1] / (covered[0] * covered[1]))
    return max(outcome.scale for outcome in found), sum(lost) / len(lost)


def _control(row: dict[str, Any], name: str, info: MediaInfo, options: DataOptions) -> Iterator[Finding]:
    file = row.get("control_file_path")
    if not file:
        yield Finding(False, "no-control", name, "no control clip", "black is trained as its control")
        return
    kind = media_kind(file)
    if kind is None:
        return
    if kind != info.kind:
        yield Finding(True, "control-kind", name, f"a {kind} as control of a {info.kind}", f"give a {info.kind}")
        return
    try:
        control = probe_media(resolve(file, options.train_data_dir), kind=kind)
    except (ValueError, OSError) as error:
        yield Finding(True, "control-unreadable", name, str(error), "encode it anew")
        return
    if control.frames < info.frames:
        yield Finding(False, "control-short", name, f"the control has {control.frames} frames, the clip {info.frames}",
                      "the clip is not read beyond its control")  # fmt: skip
    if abs(control.width * info.height / (control.height * info.width) - 1) > 0.02:
        yield Finding(False, "control-shape", name, f"the control is {control.width}x{control.height}, the clip "
                      f"{info.width}x{info.height}", "give them one shape: they are cropped apart")  # fmt: skip
