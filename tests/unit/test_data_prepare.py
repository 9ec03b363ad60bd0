"""Cuts, measures, filters and captions of raw clips."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.unit.data_kit import grey_frames, make_clip, number_of, write_rows
from videox_fun.data.data_cli import main
from videox_fun.data.decode import VideoReader
from videox_fun.data.prepare.jsonl import read_lines, run_each
from videox_fun.data.prepare.measure import keep, measure
from videox_fun.data.prepare.scenes import scene_starts


def noise(seed: int, *, height: int = 96, width: int = 128) -> np.ndarray:
    """A smooth coloured picture."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def with_text(picture: np.ndarray) -> np.ndarray:
    image = Image.fromarray(picture.copy())
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(20)
    for line in range(4):
        draw.text((4, 4 + 22 * line), "HILL WIND", fill=(255,) * 3, font=font, stroke_width=1, stroke_fill=(0,) * 3)
    return np.asarray(image)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    still = np.repeat(noise(0)[None], 24, 0)
    moving = np.stack([np.roll(noise(0), 4 * number, axis=1) for number in range(24)])
    black = np.concatenate([still[:12], np.zeros_like(still[:12])])
    rough = np.random.default_rng(1).integers(60, 200, (1, 96, 128, 3), dtype=np.uint8).repeat(24, 0)
    text = np.repeat(with_text(noise(0))[None], 24, 0)
    for name, frames in (("still", still), ("moving", moving), ("black", black), ("rough", rough), ("text", text)):
        make_clip(folder / f"{name}.mp4", frames)
    return folder


def test_measures_tell_clips_apart(clips) -> None:
    found = {path.stem: measure(path) for path in clips.glob("*.mp4")}
    assert found["still"]["motion"] < 1 < 5 < found["moving"]["motion"]
    assert found["black"]["black"] > 0.9 and found["still"]["black"] < 0.2
    assert found["rough"]["sharpness"] > 20 * found["still"]["sharpness"]
    assert found["text"]["text_area"] > 0.1 and max(found[n]["text_area"] for n in ("still", "moving")) < 0.02
    assert all(values["seconds"] == pytest.approx(1.0) for values in found.values())


def test_one_frame_has_no_motion_and_is_filtered(tmp_path) -> None:
    """A clip without a measure must not pass as one within the limits."""
    make_clip(tmp_path / "a.mp4", 1)
    assert measure(tmp_path / "a.mp4")["motion"] == 0.0
    Image.fromarray(noise(3)).save(tmp_path / "p.png")
    assert measure(tmp_path / "p.png")["seconds"] == 0.0
    rows = [{"file_path": "x", "measures": {}}, {"file_path": "y"}]
    kept, dropped = keep(rows, {"min_motion": 0.0, "max_black": None})
    assert kept == [] and dropped == {"--min_motion 0": 2}


def test_measure_and_filter_commands_resume(clips, tmp_path, capsys, caplog) -> None:
    (tmp_path / "bad.mp4").write_text("x")
    rows = [{"file_path": str(path), "text": path.stem} for path in sorted(clips.glob("*.mp4"))]
    meta = write_rows(tmp_path / "m.json", [*rows, {"file_path": str(tmp_path / "bad.mp4"), "text": "bad"}])
    out = tmp_path / "measured.jsonl"
    assert main(["measure", str(meta), str(out)]) == 1
    assert "5 clip(s) measured, 1 unreadable" in capsys.readouterr().out
    assert any("bad.mp4" in record.getMessage() for record in caplog.records)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:20])  # killed while writing the fourth
    assert main(["measure", str(meta), str(out)]) == 1
    assert "2 clip(s) measured, 1 unreadable" in capsys.readouterr().out
    assert sorted(row["file_path"] for row in read_lines(out)) == sorted(row["file_path"] for row in rows)
    kept = tmp_path / "kept.json"
    assert main(["filter", str(out), str(kept), "--min_motion", "2", "--max_black", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "1 of 5 row(s) kept" in said and "dropped: --min_motion 2" in said
    assert [(row["text"], "measures" in row) for row in json.loads(kept.read_text())] == [("moving", False)]


def long_video(folder: Path) -> Path:
    """Three scenes of 30, 40 and 20 frames at 10 per second; the second pans and flashes."""
    pan = np.stack([np.roll(noise(2), 2 * number, axis=1) for number in range(40)])
    pan[20] = 255
    parts = [np.repeat(noise(1)[None], 30, 0), pan, np.repeat(noise(3)[None], 20, 0)]
    return make_clip(folder / "long.mp4", np.concatenate(parts), fps=10)


def test_cuts_are_found_and_pans_and_flashes_are_not(tmp_path) -> None:
    starts = scene_starts(long_video(tmp_path))
    assert {0, 30, 70} <= set(starts) and len(starts) <= 4
    assert len([start for start in starts if 30 < start < 70]) <= 1


def test_scenes_and_split_commands(tmp_path, capsys) -> None:
    video = long_video(tmp_path)
    cuts = tmp_path / "cuts.jsonl"
    assert main(["scenes", str(tmp_path), str(cuts), "--detector", "built-in"]) == 0  # a folder without captions
    row = next(read_lines(cuts))
    assert row["file_path"] == str(video) and {0, 30, 70} <= {first for first, _ in row["scenes"]}
    cuts.write_text(json.dumps({**row, "scenes": [[0, 30], [30, 70], [70, 90], [80, 90]]}) + "\n")
    target = tmp_path / "clips"
    for _ in range(2):  # the second time nothing is encoded anew
        assert main(["split", str(cuts), str(target), "--min_seconds", "2", "--max_seconds", "3"]) == 0
        stamps = [path.stat().st_mtime_ns for path in sorted(target.glob("*.mp4"))]
    assert "3 clip(s)" in capsys.readouterr().out
    assert stamps == [path.stat().st_mtime_ns for path in sorted(target.glob("*.mp4"))]
    rows = json.loads((target / "metadata.json").read_text())
    lengths = []
    for row in rows:
        with VideoReader(target / row["file_path"]) as reader:
            lengths.append((len(reader), round(reader.fps)))
    assert lengths == [(30, 10), (30, 10), (20, 10)] and not list(target.glob("*.part.mp4"))


def test_clips_are_cut_at_exact_frames(tmp_path) -> None:
    make_clip(tmp_path / "g.mp4", grey_frames(50), fps=10, options={"g": "25"})
    cuts = tmp_path / "cuts.jsonl"
    cuts.write_text(json.dumps({"file_path": str(tmp_path / "g.mp4"), "fps": 10.0, "scenes": [[7, 47]]}) + "\n")
    assert main(["split", str(cuts), str(tmp_path / "o"), "--min_seconds", "1"]) == 0
    with VideoReader(tmp_path / "o" / "g_0000.mp4") as reader:
        numbers = [number_of(frame) for frame in reader.read(range(40))]
    assert numbers[:2] == [7, 8] and np.abs(np.array(numbers) - np.arange(7, 47)).max() <= 1


def test_pyscenedetect_is_named_when_it_is_missing(tmp_path, monkeypatch, capsys, caplog) -> None:
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    meta = write_rows(tmp_path / "m.json", [{"file_path": str(long_video(tmp_path))}])
    assert main(["scenes", str(meta), str(tmp_path / "c.jsonl"), "--detector", "pyscenedetect"]) == 1
    assert any("PySceneDetect is not installed" in record.getMessage() for record in caplog.records)


def test_captions_come_from_any_command_and_resume(clips, tmp_path, capsys, caplog) -> None:
    script = tmp_path / "say.py"
    script.write_text("import sys, pathlib\nname = pathlib.Path(sys.argv[1]).stem\n"
                      "log = open(sys.argv[2], 'a'); log.write(name + '\\n')\n"
                      "sys.exit('no model') if name == 'text' and 'fail' in sys.argv else print('a clip:', name)\n")
    calls, out = tmp_path / "calls.txt", tmp_path / "c.jsonl"
    rows = [{"file_path": path.name} for path in sorted(clips.glob("*.mp4"))]
    meta = write_rows(tmp_path / "m.json", rows)
    command = f"{sys.executable} {script} {{file}} {calls}"
    words = ["caption", str(meta), str(out), "--train_data_dir", str(clips), "--workers", "2", "--run"]
    assert main([*words, command + " fail"]) == 1
    assert "4 caption(s) written, 1 failed" in capsys.readouterr().out
    assert any("text.mp4: the command ended with 1: no model" in record.getMessage() for record in caplog.records)
    assert main([*words, command]) == 0
    assert calls.read_text().split().count("still") == 1 and calls.read_text().split().count("text") == 2
    assert {row["file_path"]: row["text"] for row in read_lines(out)} == {
        f"{name}.mp4": f"a clip: {name}" for name in ("black", "moving", "rough", "still", "text")
    }
    assert main([*words, "describe it"]) == 2
    assert "write {file} where the clip's name goes" in capsys.readouterr().err


def test_a_line_that_is_not_json_is_named(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"file_path": "a"}\nnonsense\n{"half')
    with pytest.raises(ValueError, match=r"x\.jsonl: line 2 is not valid JSON"):
        run_each([], tmp_path / "x.jsonl", lambda row: row)
