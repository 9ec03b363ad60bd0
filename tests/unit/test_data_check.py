"""``videox-data check`` and ``convert``: every problem by row, and sets that survive a change of format."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data_kit import grey_frames, make_clip, save_image, write_rows
from videox_fun.data.captions import caption_findings
from videox_fun.data.check import CheckReport, check
from videox_fun.data.contact_sheet import sheet_rows, write_sheet
from videox_fun.data.data_cli import main
from videox_fun.data.metadata import load_rows
from videox_fun.data.module import DataOptions, build_data
from videox_fun.data.probe import _decode_apart

ROOT = Path(__file__).resolve().parents[2]


def report_of(meta: Path, **over) -> CheckReport:
    options = {"train_data_meta": str(meta), "train_data_dir": str(meta.parent), "video_sample_size": 64,
               "image_sample_size": 64, "video_sample_stride": 1, "video_sample_n_frames": 9, "enable_bucket": True,
               "text_drop_ratio": 0.0}  # fmt: skip
    return check(DataOptions(**{**options, **over}))


def found(report: CheckReport) -> dict[str, list[str]]:
    by_code: dict[str, list[str]] = {}
    for finding in report.findings:
        by_code.setdefault(finding.code, []).append(finding.line())
    return by_code


@pytest.fixture(scope="module")
def messy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("messy")
    make_clip(folder / "good.mp4", grey_frames(20, height=64, width=64))
    make_clip(folder / "slow.mp4", grey_frames(20, height=64, width=64), fps=8)
    make_clip(folder / "short.mp4", grey_frames(4, height=64, width=64))
    make_clip(folder / "tiny.mp4", grey_frames(20, height=32, width=32))
    (folder / "text.mp4").write_text("not a video")
    save_image(folder / "wide.png", height=64, width=640)
    rows = [
        {"file_path": "good.mp4", "text": "a dog runs over the meadow"},
        {"file_path": "good.mp4", "text": "A dog runs  over the meadow"},
        {"file_path": "slow.mp4", "text": "ok"},
        {"file_path": "short.mp4", "text": " "},
        {"file_path": "tiny.mp4", "text": "word " * 600},
        {"file_path": "text.mp4", "text": "a text file"},
        {"file_path": "goood.mp4", "text": "a name with a slip"},
        {"file_path": "wide.png", "text": "a very wide picture", "type": "video", "width": 64, "height": 640},
        {"filepath": "x.mp4", "text": "wrong key"},
        "no row at all",
    ]
    return write_rows(folder / "m.json", rows)


def test_every_problem_is_named_with_its_row_and_a_fix(messy) -> None:
    report = report_of(messy)
    codes = found(report)
    expected = {
        "bad-row": [r"row 9: the key 'file_path' is missing; found 'filepath', rename it", r"row 10: is a str"],
        "missing-file": [r"row 7: .*goood\.mp4 does not exist; did you mean good\.mp4\?"],
        "unusable": [r"row 6: text\.mp4: .*cannot be opened as a video.*; encode it anew or leave the row out"],
        "wrong-type": [r"row 8: type 'video' for a image file; it is trained as image"],
        "wrong-size": [r"row 8: written 64x640, the file is 640x64; videox-data convert"],
        "same-file": [r"row 2: the file of row 1 again"],
        "same-caption": [r"row 1: the same caption as row 2"],
        "short-caption": [r"row 3: the caption is only 'ok'"],
        "empty-caption": [r"row 4: the caption is empty"],
        "long-caption": [r"row 5: the caption has 600 words, 512 tokens are read; shorten it"],
        "short-clip": [r"row 4: 4 frames give 4 of 9; lower --video_sample_n_frames"],
        "enlarged": [r"row 5: 32x32 is enlarged x2\.00; lower --video_sample_size"],
        "cropped": [r"row 8: the crop cuts off \d+% of 640x64"],
        "other-rate": [r"row 3: 8 frames per second, most clips have 24; --video_sample_fps"],
    }
    for code, patterns in expected.items():
        lines = codes.get(code, [])
        assert len(lines) == len(patterns), (code, lines)
        for pattern, line in zip(patterns, lines, strict=True):
            assert re.search(pattern, line), (pattern, line)
    assert set(codes) == {*expected, "unknown-key"}
    assert report.errors == 4 and report.summary.kept == 6
    assert report.summary.buckets == {"image 4": 1, "video 1": 5}  # the bucket follows the row
    text = "\n".join(report.lines())
    assert text.startswith(f"{messy}: 10 rows, 4 error(s), {len(report.findings) - 4} warning(s)")


def test_a_square_crop_of_a_wide_clip_is_said(tmp_path) -> None:
    make_clip(tmp_path / "a.mp4", grey_frames(9, height=64, width=128))
    meta = write_rows(tmp_path / "m.json", [{"file_path": "a.mp4", "text": "a wide clip"}])
    assert "cropped" not in found(report_of(meta))
    lines = found(report_of(meta, enable_bucket=False))["cropped"]
    assert re.search("cuts off 50% of 128x64; --enable_bucket", lines[0])


def test_control_clips_that_do_not_fit(tmp_path) -> None:
    make_clip(tmp_path / "a.mp4", grey_frames(20, height=64, width=64))
    make_clip(tmp_path / "short.mp4", grey_frames(10, height=64, width=64))
    make_clip(tmp_path / "wide.mp4", grey_frames(20, height=32, width=64))
    save_image(tmp_path / "p.png", height=64, width=64)
    controls = ["a.mp4", "short.mp4", "wide.mp4", "p.png", None, "gone.mp4"]
    rows = [{"file_path": "a.mp4", "text": f"clip number {n}", "control_file_path": c} for n, c in enumerate(controls)]
    codes = found(report_of(write_rows(tmp_path / "m.json", rows), kind="control"))
    assert re.search("row 2: the control has 10 frames, the clip 20", codes["control-short"][0])
    assert re.search("row 3: the control is 64x32, the clip 64x64", codes["control-shape"][0])
    assert re.search("row 4: a image as control of a video", codes["control-kind"][0])
    assert re.search("row 5: no control clip; black is trained", codes["no-control"][0])
    assert re.search(r"row 6: .*gone\.mp4 does not exist", codes["missing-file"][0])


def test_clips_that_break_in_the_middle_are_found_by_decoding(tmp_path, monkeypatch) -> None:
    """Bytes changed in place: header, index and packets still agree."""
    noise = np.random.default_rng(0).integers(0, 255, (30, 64, 64, 3), dtype=np.uint8)
    whole = make_clip(tmp_path / "a.mkv", noise, codec="ffv1").read_bytes()
    data = bytearray(whole)
    for place in range(len(data) // 2, len(data) - 2000, 97):
        data[place] ^= 0xFF
    (tmp_path / "bad.mkv").write_bytes(bytes(data))
    rows = [{"file_path": f"{name}.mkv", "text": f"clip {name}"} for name in ("a", "bad")]
    meta = write_rows(tmp_path / "m.json", rows)
    options = DataOptions(train_data_meta=str(meta), train_data_dir=str(tmp_path), video_sample_stride=1)
    codes = found(check(options, decode=True))
    assert len(codes["damaged"]) == 1 and codes["damaged"][0].startswith("error: row 2: ")
    monkeypatch.setattr("videox_fun.data.probe._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr("videox_fun.data.probe._decode_apart", _decode_apart.__wrapped__)
    crashed = found(check(options, decode=True))["damaged"]
    assert any("row 1: " in line and "the decoder crashes on this file (signal 11)" in line for line in crashed)


def test_tokens_are_counted_with_the_runs_tokenizer() -> None:
    captions = {0: "eins zwei drei", 1: "vier"}
    cut = [row for code, row, _, _ in caption_findings(captions, count_tokens=len, max_tokens=6)
           if code == "long-caption"]  # fmt: skip
    assert cut == [0]


def test_the_annotation_itself(tmp_path) -> None:
    lines = found(report_of(tmp_path / "none.json"))["unreadable"]
    assert lines[0].startswith("error: the annotation: annotation file not found")
    assert report_of(write_rows(tmp_path / "m.json", [])).errors == 1
    report = report_of(write_rows(tmp_path / "b.json", [{"file_path": "x.mp4", "text": "x y"}]))
    assert report.errors == 1 and report.summary is None and report.module is None


def test_captions_are_looked_at_before_a_run(messy) -> None:
    rows = [row for row in json.loads(messy.read_text())[:5]]
    meta = write_rows(messy.parent / "five.json", rows)
    lines = build_data(DataOptions(train_data_meta=str(meta), train_data_dir=str(meta.parent))).summary().lines()
    assert any("1 caption(s) to look at (same caption), e.g. row 1: the same caption as" in line for line in lines)
    assert any("(empty caption), e.g. row 4" in line for line in lines)


# ---- contact sheet ---------------------------------------------------------------------------------------------------
def test_sheet_shows_the_frames_that_are_trained(tmp_path) -> None:
    """Left third red, right third blue: a square crop of a clip twice as wide shows neither."""
    pictures = np.full((9, 64, 128, 3), 90, np.uint8)
    pictures[:, :, :30] = (255, 0, 0)
    pictures[:, :, 98:] = (0, 0, 255)
    make_clip(tmp_path / "a.mp4", pictures)
    (tmp_path / "bad.mp4").write_text("x")
    rows = [{"file_path": "a.mp4", "text": "eine <Wiese> 草"}, {"file_path": "bad.mp4", "text": "broken"}]
    meta = write_rows(tmp_path / "m.json", rows)
    means = {}
    for bucket in (True, False):
        options = DataOptions(train_data_meta=str(meta), train_data_dir=str(tmp_path), video_sample_size=64,
                              image_sample_size=64, video_sample_stride=1, video_sample_n_frames=9,
                              enable_bucket=bucket, text_drop_ratio=0.0, inpaint=True)  # fmt: skip
        state = np.random.get_state()[1].copy()
        shown = list(sheet_rows(build_data(options), rows=4, frames=3))
        assert np.array_equal(state, np.random.get_state()[1])
        assert [len(strip) for strip in shown[0].strips.values()] == [3, 3] and "trained" in shown[0].strips
        assert shown[1].strips == {} and "cannot be opened" in shown[1].error
        means[bucket] = shown[0].strips["trained"][0].reshape(-1, 3).mean(0)
    assert means[True][0] > 100 and abs(means[False] - 90).max() < 12
    page = write_sheet(shown, tmp_path / "sheet.html").read_text("utf-8")
    assert "eine &lt;Wiese&gt; 草" in page and page.count("data:image/png;base64,") == 6 and "class='e'" in page
    image = Image.open(write_sheet(shown, tmp_path / "sheet.png"))
    assert image.height > 200 and np.asarray(image).std() > 10
    with pytest.raises(ValueError, match=r"a contact sheet is a \.png or an \.html file"):
        write_sheet(shown, tmp_path / "sheet.jpg")


# ---- the command -----------------------------------------------------------------------------------------------------
def test_check_command(messy, tmp_path, capsys) -> None:
    sheet, out = tmp_path / "s.html", tmp_path / "r.json"
    words = ["check", str(messy), "--train_data_dir", str(messy.parent), "--enable_bucket", "--video_sample_size", "64",
             "--image_sample_size", "64", "--video_sample_n_frames", "9", "--video_sample_stride", "1",
             "--sheet", str(sheet), "--json", str(out)]  # fmt: skip
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "error: row 7:" in said and "bucket video 1: 5 row(s)" in said and "contact sheet of" in said
    assert json.loads(out.read_text("utf-8"))["errors"] == 4 and sheet.stat().st_size > 1000
    rows = json.loads(messy.read_text())[:1]
    assert main(["check", str(write_rows(messy.parent / "one.json", rows)), "--train_data_dir", str(messy.parent)]) == 0
    assert main(["check", str(messy), "--tokenizer", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("back", ["videox", "cogvideo", "folder", "webdataset"])
def test_a_set_survives_each_format(tmp_path, back, capsys) -> None:
    for number, length in enumerate((9, 13)):
        make_clip(tmp_path / "in" / f"{number}.mp4", grey_frames(length, start=20 * number), fps=12 + number)
    rows = [{"file_path": "0.mp4", "text": "eins, \"zwei\""}, {"file_path": "1.mp4", "text": "三 und vier"}]
    meta = write_rows(tmp_path / "in" / "m.json", rows)
    target = tmp_path / "out" / ("m.csv" if back == "videox" else "")
    extra = ["--relative_to", str(tmp_path)] if back == "videox" else []
    assert main(["convert", str(meta), str(target), "--to", back, "--train_data_dir", str(meta.parent), *extra]) == 0
    assert "2 row(s) written" in capsys.readouterr().out
    again = tmp_path / "again.jsonl"
    assert main(["convert", str(target), str(again),
                 *(["--train_data_dir", str(tmp_path)] if back == "videox" else [])]) == 0  # fmt: skip
    loaded = list(load_rows(again))
    assert [row["text"] for row in loaded] == [row["text"] for row in rows]
    facts = [tuple(float(row[key]) for key in ("width", "height", "frames", "fps")) for row in loaded]
    assert facts == [(64, 32, 9, 12), (64, 32, 13, 13)]
    options = DataOptions(train_data_meta=str(again), train_data_dir=str(tmp_path), video_sample_stride=1,
                          video_sample_n_frames=5, text_drop_ratio=0.0)  # fmt: skip
    levels = [float(build_data(options).dataset[index]["pixel_values"].mean()) for index in range(2)]
    assert levels[0] < levels[1]


def test_what_a_format_cannot_hold_is_refused(tmp_path, capsys) -> None:
    make_clip(tmp_path / "a.mp4", 5)
    save_image(tmp_path / "b.png", height=32, width=64)
    mixed = write_rows(tmp_path / "x.json", [{"file_path": "a.mp4", "text": "x"}, {"file_path": "b.png", "text": "y"}])
    blank = write_rows(tmp_path / "y.json", [{"file_path": "a.mp4", "text": ""}])
    bare = write_rows(tmp_path / "z.json", [{"file_path": "a.mp4"}])
    nested = write_rows(tmp_path / "n.json", [{"file_path": "a.mp4", "text": "x", "object_file_path": ["b.png"]}])
    for meta, words, says in (
        (mixed, ["o", "--to", "cogvideo"], "hold videos or pictures"),
        (blank, ["o", "--to", "cogvideo"], "cannot hold empty captions (row 1)"),
        (bare, ["o", "--to", "folder"], "1 row(s) have no caption"),
        (nested, ["o.csv"], "row 1 has a list in 'object_file_path'"),
        (mixed, ["o.txt"], "annotation files end with"),
    ):
        target = [str(tmp_path / words[0]), *words[1:]]
        assert main(["convert", str(meta), *target, "--train_data_dir", str(tmp_path)]) == 2
        assert says in capsys.readouterr().err


def test_the_script_that_adds_sizes(tmp_path, capsys) -> None:
    make_clip(tmp_path / "a.mp4", 5)
    (tmp_path / "bad.mp4").write_text("x")
    meta = write_rows(tmp_path / "m.json", [{"file_path": "a.mp4", "text": "x"}, {"file_path": "bad.mp4", "text": "y"}])
    script = runpy.run_path(str(ROOT / "scripts/process_json_add_width_and_height.py"), run_name="script")
    words = ["--input_file", str(meta), "--output_file", str(meta), "--data_root", str(tmp_path)]
    assert script["main"](words) == 1
    assert "row 2 is left out" in capsys.readouterr().out
    assert json.loads(meta.read_text()) == [{"file_path": "a.mp4", "text": "x", "type": "video", "width": 64,
                                             "height": 32, "frames": 5, "fps": 24.0}]  # fmt: skip
