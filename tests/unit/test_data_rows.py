"""Annotation files: formats, checks, compact storage; the smaller datasets."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch

from tests.unit.data_kit import Streams, clip_rows, make_clip, open_loader, save_image, seed_streams, write_rows
from videox_fun.data.dataset_image_video import ImageVideoControlDataset, ImageVideoSafetensorsDataset, TextDataset
from videox_fun.data.decode import VideoReader
from videox_fun.data.metadata import load_rows
from videox_fun.data.module import DataOptions


def test_case_21_wrong_keys_are_named_with_the_right_ones(tmp_path) -> None:
    meta = write_rows(tmp_path / "m.json", [{"filepath": "a.png", "caption": "x"}])
    with pytest.raises(ValueError) as caught:
        load_rows(meta)
    text = str(caught.value)
    assert "row 1: the key 'file_path' is missing; found 'filepath', rename it to 'file_path'" in text
    assert "row 1: the key 'text' is missing; found 'caption', rename it to 'text'" in text


def test_near_misses_of_optional_keys_are_warned_about(tmp_path, caplog) -> None:
    rows = [{"file_path": "a.mp4", "text": "x", "hight": 32, "width": 64, "source": "web"}] * 3
    load_rows(write_rows(tmp_path / "m.json", rows))
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["row 1: unknown key 'hight' is ignored; did you mean 'height'?"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file_path": "", "text": "x"}, "row 2: 'file_path' must be a path, got ''"),
        ({"file_path": "a.mp4", "text": None}, "row 2: 'text' is null; write \"\" for an empty caption"),
        ({"file_path": "a.mp4", "text": 3}, "row 2: 'text' must be a string, got 3"),
        ({"file_path": "a.mp4", "text": "x", "width": "wide"}, "'width' must be a positive whole number, got 'wide'"),
        ({"file_path": "a.mp4", "text": "x", "height": -4}, "'height' must be a positive whole number, got -4"),
        ("a.mp4", "row 2: is a str, expected an object"),
    ],
)
def test_bad_values_are_named(tmp_path, row, message) -> None:
    meta = write_rows(tmp_path / "m.json", [{"file_path": "ok.mp4", "text": "ok"}, row])
    with pytest.raises(ValueError, match=re.escape(message)):
        load_rows(meta)


def test_columns_of_another_project_are_named(tmp_path) -> None:
    csv = tmp_path / "m.csv"
    csv.write_text('video,prompt\ntest.png,"dog"\n')
    with pytest.raises(ValueError, match=r"found 'video', rename it to 'file_path'[\s\S]*rename it to 'text'"):
        load_rows(csv)


def test_case_27_rows_are_compact_and_readers_leave_nothing_behind(tmp_path) -> None:
    caption = "a long caption " * 20
    rows = [{"file_path": f"{number}.mp4", "text": caption, "type": "video"} for number in range(2000)]
    store = load_rows(write_rows(tmp_path / "m.json", rows))
    held = store._bytes.nbytes + store._ends.nbytes + store._order.nbytes
    assert held < 1.3 * sum(len(json.dumps(row)) for row in rows)
    assert store[1999] == rows[1999] and store[3:5] == rows[3:5]
    path = make_clip(tmp_path / "a.mp4", 12)
    threads = threading.active_count()
    for _ in range(200):
        with VideoReader(path) as reader:
            reader.read([11])
    assert threading.active_count() == threads


@pytest.mark.parametrize("name", ["metadata.jsn", "metadata.jsonl"])
def test_case_28_a_misspelt_annotation_file_lists_near_matches(tmp_path, name) -> None:
    clip_rows(tmp_path, [5])
    with pytest.raises(ValueError) as caught:
        load_rows(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert f"did you mean {tmp_path / 'metadata.json'}?" in str(caught.value)


def test_unknown_format_and_invalid_json_are_explained(tmp_path) -> None:
    (tmp_path / "m.txt").write_text("x")
    with pytest.raises(ValueError, match=r"annotation files end with \.json, \.jsonl, \.csv, not '\.txt'"):
        load_rows(tmp_path / "m.txt")
    (tmp_path / "m.json").write_text('[{"file_path": "a.mp4",\n "text": }]')
    with pytest.raises(ValueError, match="not valid JSON at line 2"):
        load_rows(tmp_path / "m.json")
    (tmp_path / "m.jsonl").write_text('{"file_path": "a.mp4", "text": "x"}\n\n{"file_path": 1}\n')
    with pytest.raises(ValueError, match=r"row 2 \(line 3\): 'file_path' must be a path, got 1"):
        load_rows(tmp_path / "m.jsonl")
    (tmp_path / "d.json").write_text("{}")
    with pytest.raises(ValueError, match="a list of objects, this is a dict"):
        load_rows(tmp_path / "d.json")


def test_json_lines_equal_json(tmp_path) -> None:
    rows = [{"file_path": f"{number}.mp4", "text": f"é{number}", "type": "video"} for number in range(3)]
    lines = tmp_path / "m.jsonl"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert list(load_rows(lines)) == list(load_rows(write_rows(tmp_path / "m.json", rows)))


def test_text_and_safetensors_datasets(tmp_path) -> None:
    from safetensors.torch import save_file

    texts = TextDataset(str(write_rows(tmp_path / "t.json", [{"text": "a"}, {"text": "b"}])))
    assert [texts[index]["text"] for index in range(3)] == ["a", "b", "a"]
    save_file({"latents": torch.ones(2, 3)}, tmp_path / "x.safetensors")
    meta = write_rows(tmp_path / "s.json", [{"file_path": "x.safetensors"}])
    item = ImageVideoSafetensorsDataset(str(meta), str(tmp_path))[0]
    assert torch.equal(item["latents"], torch.ones(2, 3))
    options_ = DataOptions(kind="text", train_data_meta=str(tmp_path / "t.json"), train_batch_size=2)
    loader, module, _ = open_loader(options_, streams=Streams(0))
    assert sorted(next(loader.epoch(0))[0]["text"]) == ["a", "b"]
    assert module.summary().rows == 2


def test_subjects_are_shuffled_in_a_copy(tmp_path) -> None:
    for number in range(3):
        save_image(tmp_path / f"{number}.png", height=16, width=16, level=60 * number)
    make_clip(tmp_path / "a.mp4", 9)
    rows = [{"file_path": "a.mp4", "text": "x", "control_file_path": None,
             "object_file_path": ["0.png", "1.png", "2.png"]}]  # fmt: skip
    meta = write_rows(tmp_path / "m.json", rows)
    dataset = ImageVideoControlDataset(str(meta), str(tmp_path), enable_bucket=True, video_sample_stride=1,
                                       enable_subject_info=True)  # fmt: skip
    orders = []
    for _ in range(2):
        seed_streams(5)
        subjects = dataset[0]["subject_image"]
        assert subjects.shape == (3, 32, 64, 3)
        orders.append([int(picture[16, 32, 0]) for picture in subjects])
    assert orders[0] == orders[1] and sorted(orders[0]) == [0, 60, 120]
