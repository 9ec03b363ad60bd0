"""The cache of encodings: never a wrong entry, never a damaged one, and training that cannot tell the difference."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit import real_runs
from videox_fun.data import cache_cli, cache_plan, cache_sources
from videox_fun.data.cache import LATENTS, TEXT, EncodingCache, known_frames
from videox_fun.data.cache_store import CacheStore, FileFacts, read_entry
from videox_fun.data.demo import encode_clip
from videox_fun.data.module import DataOptions, build_data
from videox_fun.training.entry import prepare_cache

KEY = {"encoder": "e" * 64, "text": "abc"}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"embedding": torch.full((3, 4), value, dtype=torch.bfloat16)}


def make_cache(root: Path, **encoders: str) -> EncodingCache:
    return EncodingCache(CacheStore(root), FileFacts(root), encoders or {LATENTS: "vae", TEXT: "t5"},
                         skip_decoding=True)


# ---- files ----
def test_an_entry_comes_back_with_type_and_values(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    assert store.read(TEXT, KEY) is None and not store.intact(TEXT, KEY)
    assert store.write(TEXT, KEY, tensors()) and store.intact(TEXT, KEY)
    found = store.read(TEXT, KEY)["embedding"]
    assert found.dtype is torch.bfloat16 and torch.equal(found, tensors()["embedding"])
    assert not list(tmp_path.rglob("*.tmp"))


def test_every_part_of_the_key_separates(tmp_path: Path) -> None:
    store, origin = CacheStore(tmp_path), {"sha256": "1", "indices": [0, 2]}
    base = {"encoder": "v", "frames": 5, "height": 64, "width": 32}
    keys = [base, {**base, "height": 32, "width": 64}, {**base, "frames": 1}, {**base, "encoder": "w"},
            {**base, "masked": [1, 0]}]
    paths = {store.path(LATENTS, key, origin=origin) for key in keys}
    paths |= {store.path(LATENTS, base, origin={**origin, "indices": [1, 3]}), store.path("other", base, origin=origin),
              store.path(LATENTS, base, origin={**origin, "sha256": "2"}), store.path(LATENTS, base)}
    assert len(paths) == len(keys) + 4


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_a_truncated_entry_is_a_miss_that_is_named_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    store = CacheStore(tmp_path)
    store.write(TEXT, KEY, tensors())
    path = store.path(TEXT, KEY)
    os.truncate(path, int(path.stat().st_size * share))
    assert store.read(TEXT, KEY) is None and not store.intact(TEXT, KEY)
    assert str(path) in caplog.text and path.exists()
    assert store.write(TEXT, KEY, tensors(2.0))
    assert store.read(TEXT, KEY)["embedding"][0, 0] == 2


def test_a_file_under_another_entrys_name_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, other = CacheStore(tmp_path), {**KEY, "text": "xyz"}
    store.write(TEXT, KEY, tensors())
    store.path(TEXT, other).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(store.path(TEXT, KEY), store.path(TEXT, other))
    assert store.read(TEXT, other) is None and "another key" in caplog.text


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = CacheStore(tmp_path / "file")
    assert not store.write(TEXT, KEY, tensors()) and not store.write(TEXT, KEY, tensors())
    assert caplog.text.count("cannot be written") == 1


def _write_many(root: str, value: float) -> None:
    store = CacheStore(Path(root))
    for _ in range(40):
        for number in range(3):
            store.write(TEXT, {**KEY, "text": str(number)}, {"embedding": torch.full((64, 64), value)})


def test_writers_at_the_same_time_do_not_corrupt(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), float(value))) for value in (1, 2)]
    for writer in writers:
        writer.start()
    store, reads = CacheStore(tmp_path), 0
    while any(writer.is_alive() for writer in writers) or not reads:
        found = store.read(TEXT, {**KEY, "text": "1"})
        if found is not None:
            reads += 1
            assert found["embedding"].unique().numel() == 1
    assert [writer.exitcode for writer in writers] == [0, 0] and not store.problems
    assert all(cache_cli.problem_of(path) is None for path in store.entries()) and len(list(store.entries())) == 3


def test_a_changed_file_gets_another_hash_and_an_unchanged_one_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    first = FileFacts(tmp_path / "c").of(path)["sha256"]
    with monkeypatch.context() as patched:
        patched.setattr("videox_fun.data.cache_store.hash_file", lambda path: pytest.fail("hashed again"))
        assert FileFacts(tmp_path / "c").of(path)["sha256"] == first
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))  # the clock went back: any other time means another file
    assert FileFacts(tmp_path / "c").of(path)["sha256"] != first


def test_fingerprint_of_a_folder_follows_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    facts, seen = FileFacts(tmp_path / "c"), set()
    seen.add(facts.fingerprint(folder))
    (folder / "weights.safetensors").write_bytes(b"x")
    seen.add(facts.fingerprint(folder))
    (folder / "weights.safetensors").rename(folder / "other.safetensors")
    seen.add(facts.fingerprint(folder))
    assert len(seen) == 3


# ---- what an entry stands for ----
def frames_of(color: int, count: int = 9) -> np.ndarray:
    return np.full((count, 32, 32, 3), color, np.uint8)


def media(folder: Path) -> Path:
    """A picture and a clip of the same name, and a picture whose name looks like a sized copy."""
    folder.mkdir(exist_ok=True)
    Image.fromarray(frames_of(10)[0]).save(folder / "cat_01.png")
    encode_clip(folder / "cat_01.mp4", frames_of(120))
    Image.fromarray(frames_of(200)[0]).save(folder / "cat_01_0512.png")
    rows = [{"file_path": name, "text": name} for name in ("cat_01.png", "cat_01.mp4", "cat_01_0512.png")]
    (folder / "metadata.json").write_text(json.dumps(rows))
    return folder


def data_of(folder: Path, **options: Any):
    return build_data(DataOptions(**{
        "train_data_meta": str(folder / "metadata.json"), "train_data_dir": str(folder), "video_sample_size": 32,
        "image_sample_size": 32, "video_sample_n_frames": 5, "video_sample_stride": 1, "enable_bucket": True, **options,
    }))


def test_case_16_pictures_and_clips_of_one_name_do_not_collide(tmp_path: Path) -> None:
    data, cache = data_of(media(tmp_path / "set")), make_cache(tmp_path / "cache")
    cache_sources.attach(cache, data, clip_starts=1)
    plans = list(cache_plan.planned(cache, data))
    assert [(entry.name, entry.frames) for entry, _ in plans] == [("cat_01.png", 1), ("cat_01.mp4", 5),
                                                                   ("cat_01_0512.png", 1)]
    for number, (entry, facts) in enumerate(plans):
        origin = cache_plan.planned_origin(cache, data, entry, facts)
        cache.write(cache.entry(origin, frames=entry.frames, height=32, width=32), torch.full((2,), float(number)))
    for number, (entry, _) in enumerate(plans):
        batch = data.collate_fn([data.dataset[entry.item]])
        assert "pixel_values" not in batch and batch["moments"].tolist() == [[number, number]]
        assert batch["source"][0]["name"] == entry.name


def test_case_18_repeated_rows_are_planned_once(tmp_path: Path) -> None:
    data, cache = data_of(media(tmp_path / "set"), video_repeat=20), make_cache(tmp_path / "cache")
    cache_sources.attach(cache, data, clip_starts=1)
    assert len(data.dataset) == 22 and len(list(cache_plan.planned(cache, data))) == 3
    assert cache_plan.coverage(cache, data).total == 3


def test_a_changed_clip_size_or_model_is_another_entry(tmp_path: Path) -> None:
    folder = media(tmp_path / "set")

    def missing(**changes: Any) -> int:
        encoder = changes.pop("encoder", "vae")
        data, cache = data_of(folder, **changes), make_cache(tmp_path / "cache", latents=encoder)
        cache_sources.attach(cache, data, clip_starts=1)
        for entry, facts in list(cache_plan.planned(cache, data)) if fill else ():
            origin = cache_plan.planned_origin(cache, data, entry, facts)
            cache.write(cache.entry(origin, frames=entry.frames, height=entry.height, width=entry.width), torch.ones(2))
        return cache_plan.coverage(cache, data).missing

    fill = True
    assert missing() == 0
    fill = False
    assert missing() == 0
    assert missing(encoder="another vae") == 3
    assert missing(video_sample_size=48, image_sample_size=48) == 3
    assert missing(video_sample_n_frames=9) == 1 and missing(video_sample_stride=2) == 1
    encode_clip(folder / "cat_01.mp4", frames_of(50))
    assert missing() == 1


def test_every_drawn_clip_is_planned(tmp_path: Path, seeded: None) -> None:
    folder = media(tmp_path / "set")
    for starts in (0, 2):
        data, cache = data_of(folder), make_cache(tmp_path / "cache")
        cache_sources.attach(cache, data, clip_starts=starts)
        plan = {entry.indices for entry, _ in cache_plan.planned(cache, data) if entry.video}
        drawn = {tuple(data.dataset[1]["pixel_values"].origin["indices"]) for _ in range(60)}
        assert drawn == plan and len(plan) == (starts or 5)


def test_a_damaged_clip_is_met_by_the_dataset_not_by_the_collate(tmp_path: Path) -> None:
    folder = media(tmp_path / "set")
    rows = [{"file_path": name, "text": name} for name in ("cat_01.mp4", "broken.mp4")]
    (folder / "metadata.json").write_text(json.dumps(rows))
    (folder / "broken.mp4").write_bytes((folder / "cat_01.mp4").read_bytes()[:-200])
    data, cache = data_of(folder, text_drop_ratio=0.0), make_cache(tmp_path / "cache")
    cache_sources.attach(cache, data)
    assert data.dataset[1]["text"] == "cat_01.mp4" and data.dataset.bad_rows.rows() == [1]
    assert {entry.name for entry, _ in cache_plan.planned(cache, data)} == {"cat_01.mp4"}


def test_captions_hold_the_empty_prompt_when_prompts_are_dropped(tmp_path: Path) -> None:
    folder = media(tmp_path / "set")
    assert cache_plan.captions(data_of(folder))[0] == "" and len(cache_plan.captions(data_of(folder))) == 4
    assert "" not in cache_plan.captions(data_of(folder, text_drop_ratio=0.0))


@pytest.mark.parametrize(
    ("known", "expected"),
    [([0, 0, 0], (0, 0)), ([1, 0, 0], (1, 0)), ([1, 0, 1], (1, 1)), ([1, 1, 1], (3, 0)), ([0, 1, 0], None),
     ([0.5, 0, 0], None), ([0, 0, 1], (0, 1))],
)
def test_masks_that_know_whole_frames_at_the_ends_have_a_name(known: list[float], expected: Any) -> None:
    mask = torch.ones(3, 1, 2, 2)
    for frame, share in enumerate(known):
        mask[frame].view(-1)[: int(4 * share)] = 0
    assert known_frames(mask) == expected


# ---- whole runs ----
def run(model: Path, output: Path, **changes: Any) -> real_runs.RealRun:
    found = real_runs.RealRun(real_runs.build_trainer(
        real_runs.get_spec(real_runs.LORA),
        real_runs.parse_args(real_runs.get_spec(real_runs.LORA),
                             real_runs.command(real_runs.LORA, model, output, **{"max_train_steps": 3, **changes})),
    ))
    found.trainer.setup()
    log = found.trainer.run_logger.log
    found.trainer.run_logger.log = lambda values, step: (found.logged.append((step, dict(values))), log(values, step))
    return found


CACHED = {"cache_latents": True, "cache_text": True}


@pytest.mark.parametrize(("name", "mode"), [("ckpt_t2v", "normal"), ("ckpt_inp", "inpaint")])
def test_losses_with_the_cache_are_those_without(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str, mode: str
) -> None:
    model, folder = real_runs.checkpoint(tmp_path_factory, name), tmp_path / "cache"
    live = run(model, tmp_path / "live", train_mode=mode).go()
    filling = run(model, tmp_path / "fill", train_mode=mode, cache_dir_latents=folder, **CACHED).go()
    warm = run(model, tmp_path / "warm", train_mode=mode, cache_dir_latents=folder, **CACHED).go()
    assert filling.trainer.ctx.cache.hits[LATENTS] < 3 and warm.trainer.ctx.cache.rates()[LATENTS] == 1
    for cached in (filling, warm):
        np.testing.assert_allclose(cached.losses, live.losses, rtol=0, atol=1e-6)
    assert len(set(live.losses)) == 3


def test_a_filled_cache_leaves_the_encoders_out_and_changes_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = real_runs.checkpoint(tmp_path_factory)
    monkeypatch.setattr("videox_fun.training.entry._configure_logging", lambda: None)  # keeps the records here
    shared = {"cache_clip_starts": 2, "cache_dir_latents": tmp_path / "cache", "audit": "log"}
    live = run(model, tmp_path / "live", **{**shared, "audit": "off", "cache_latents": True,
                                             "cache_dir_latents": tmp_path / "other"}).go()
    words = real_runs.command(real_runs.LORA, model, tmp_path / "pre", **shared)
    caplog.set_level(logging.INFO)
    assert prepare_cache(real_runs.LORA, words) == 0
    entries = list((tmp_path / "cache" / LATENTS).rglob("*.safetensors"))
    assert 6 <= len(entries) <= 12 and len(list((tmp_path / "cache" / TEXT).rglob("*.safetensors"))) == 7
    stamps = {path: path.stat().st_mtime_ns for path in entries}
    assert prepare_cache(real_runs.LORA, words) == 0
    assert {path: path.stat().st_mtime_ns for path in entries} == stamps  # nothing is encoded twice

    warm = run(model, tmp_path / "warm", **shared, **CACHED)
    assert warm.trainer.components.vae is None and warm.trainer.components.text_encoder is None
    warm.go()
    np.testing.assert_allclose(warm.losses, live.losses, rtol=0, atol=1e-6)
    assert set(warm.trainer.ctx.cache.rates().values()) == {1.0}
    rows = {row["id"]: row for row in json.loads((tmp_path / "warm" / "audit.json").read_text())["rows"]}
    assert rows["G10"]["state"] == rows["I6"]["state"] == "enabled"
    assert "found in the cache: latents 3/3; the VAE is not loaded" in json.dumps(rows["G10"])
    assert "the text encoder is not loaded" in json.dumps(rows["I6"])

    # An entry that is lost after the start: the encoder is loaded then, and nothing else changes.
    late = run(model, tmp_path / "late", **{**shared, "audit": "off"}, **CACHED)
    for path in entries:
        os.truncate(path, 100)
    late.go()
    np.testing.assert_allclose(late.losses, live.losses, rtol=0, atol=1e-6)
    assert "the VAE is loaded after all" in caplog.text and late.trainer.components.vae is not None


@pytest.mark.parametrize("way", ["first use", "precompute"])
def test_case_16_mixed_sets_train_from_one_folder_as_without_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, way: str
) -> None:
    model, folder = real_runs.checkpoint(tmp_path_factory), media(tmp_path / "set")
    rows = json.loads((folder / "metadata.json").read_text())
    (folder / "pictures.json").write_text(json.dumps([row for row in rows if row["file_path"].endswith(".png")]))
    for meta in ("metadata.json", "pictures.json"):
        options = {"train_data_dir": folder, "train_data_meta": folder / meta, "image_sample_size": 32,
                   "video_sample_size": 32, "video_sample_stride": 1}
        live = run(model, tmp_path / f"live {meta}", **options).go()
        options |= {"cache_dir_latents": tmp_path / "cache", "cache_latents": True}
        if way == "precompute":
            words = real_runs.command(real_runs.LORA, model, tmp_path / "p", **options)
            assert prepare_cache(real_runs.LORA, words) == 0
        cached = run(model, tmp_path / f"cached {meta}", **options).go()
        np.testing.assert_allclose(cached.losses, live.losses, rtol=0, atol=1e-6)
        hits = cached.trainer.ctx.cache.rates()[LATENTS]
        assert hits == 1 if way == "precompute" or meta == "pictures.json" else hits == 0


@pytest.mark.parametrize("way", ["first use", "precompute"])
def test_case_17_another_vae_with_the_same_folder_is_encoded_anew(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, way: str
) -> None:
    first = real_runs.checkpoint(tmp_path_factory)
    second = tmp_path / "other_model"
    shutil.copytree(first, second)
    weights = torch.load(second / "Wan2.1_VAE.pth", weights_only=True)
    torch.save({key: value * 1.5 for key, value in weights.items()}, second / "Wan2.1_VAE.pth")
    options = {"max_train_steps": 1, "cache_dir_latents": tmp_path / "cache", "cache_latents": True,
               "cache_clip_starts": 1}
    if way == "precompute":
        assert prepare_cache(real_runs.LORA, real_runs.command(real_runs.LORA, first, tmp_path / "a", **options)) == 0
    else:
        run(first, tmp_path / "a", **options).go()
    live = run(second, tmp_path / "live", **{**options, "cache_dir_latents": tmp_path / "other"}).go()
    cached = run(second, tmp_path / "b", **options).go()
    assert cached.trainer.ctx.cache.hits[LATENTS] == 0 and cached.losses == pytest.approx(live.losses, abs=1e-6)
    again = run(first, tmp_path / "c", **options).go()
    assert again.trainer.ctx.cache.hits[LATENTS] == 1
    larger = run(first, tmp_path / "d", **{**options, "video_sample_size": 96, "image_sample_size": 96}).go()
    assert larger.trainer.ctx.cache.hits[LATENTS] == 0


def test_two_places_that_encode_prompts_are_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = real_runs.refusal(real_runs.checkpoint(tmp_path_factory), tmp_path / "out", cache_text=True,
                             enable_text_encoder_in_dataloader=True)
    assert "--enable_text_encoder_in_dataloader" in text and "--cache_text" in text


# ---- the tool ----
def test_the_tool_lists_checks_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, facts = CacheStore(tmp_path / "c"), FileFacts(tmp_path / "c")
    source = tmp_path / "clip.bin"
    source.write_bytes(b"clip")
    origin = {"sha256": facts.of(source)["sha256"]}
    for number in range(3):
        store.write(TEXT, {**KEY, "text": str(number)}, tensors())
    store.write(LATENTS, {"encoder": "v" * 20}, {"moments": torch.ones(2)}, origin=origin)
    assert cache_cli.main(["ls", str(store.root)]) == 0
    assert "3 entries" in capsys.readouterr().out
    assert cache_cli.main(["verify", str(store.root)]) == 0

    flipped = store.path(TEXT, {**KEY, "text": "1"})
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut = store.path(TEXT, {**KEY, "text": "2"})
    os.truncate(cut, 50)
    assert cache_cli.main(["verify", str(store.root)]) == 1
    out = capsys.readouterr().out
    assert str(flipped) in out and str(cut) in out and "4 entries, 2 damaged" in out

    source.write_bytes(b"another clip")
    assert cache_cli.main(["gc", str(store.root)]) == 0
    listed = capsys.readouterr().out
    assert "would remove" in listed and str(cut) in listed and "gone or has changed" in listed and cut.exists()
    assert cache_cli.main(["gc", str(store.root), "--delete"]) == 0
    assert not cut.exists() and flipped.exists() and len(list(store.entries())) == 2
    with pytest.raises(ValueError, match="not those that were written"):
        read_entry(flipped, check_values=True)
