"""Everything that is encoded besides the clip itself: masked clips, controls, references, features; and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import real_runs
from tests.unit.data_kit import Streams, grey_frames, make_clip, open_loader, save_image, write_rows
from tests.unit.test_cache import CACHED, run
from videox_fun.conditioning import cached
from videox_fun.data import cache_cli, cache_plan, cache_sources
from videox_fun.data.cache import IMAGE, LATENTS, EncodingCache, LatentLayout
from videox_fun.data.cache_store import CacheStore, FileFacts
from videox_fun.data.decode import VideoReader
from videox_fun.data.masks import stated_mask
from videox_fun.data.module import DataOptions
from videox_fun.training.entry import prepare_cache


# ---- inpainting in whole runs ----
@pytest.mark.parametrize(("script", "draws"), [(real_runs.LORA, 2), ("wan2.1/train_lora", 0)])
def test_conditioned_runs_leave_all_encoders_out(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, script: str, draws: int
) -> None:
    """Stated masks, or masks that always keep the first frame: the losses are those of live encoding."""
    model = real_runs.checkpoint(tmp_path_factory, "ckpt_inp")
    shared = {"train_mode": "inpaint", "cache_clip_starts": 1, "cache_mask_draws": draws,
              "train_batch_size": 2 if draws else 1}
    spec = real_runs.get_spec(script)

    def trainer(name: str, **changes: Any) -> Any:
        words = real_runs.command(script, model, tmp_path / name, **{**shared, **changes})
        found = real_runs.RealRun(real_runs.build_trainer(spec, real_runs.parse_args(spec, words)))
        found.trainer.setup()
        log = found.trainer.run_logger.log
        found.trainer.run_logger.log = lambda values, step: (found.logged.append((step, dict(values))),
                                                             log(values, step))
        return found

    folder = {"cache_dir_latents": tmp_path / "cache"}
    live = trainer("live")
    sources = cache_sources.ClipSources(EncodingCache(CacheStore(tmp_path / "x"), FileFacts(tmp_path / "x")))
    live.trainer.data.dataset.sources, live.trainer.data.dataset.clip_starts = sources, 1  # the same start frames
    live.go()
    assert prepare_cache(script, real_runs.command(script, model, tmp_path / "pre", **shared, **folder)) == 0
    warm = trainer("warm", **folder, **CACHED)
    parts = warm.trainer.components
    assert parts.vae is None and parts.text_encoder is None and parts.image_encoder is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(VideoReader, "read", lambda *_, **__: pytest.fail("a clip was decoded"))
        warm.go()
    np.testing.assert_allclose(warm.losses, live.losses, rtol=0, atol=1e-6)
    assert set(warm.trainer.ctx.cache.rates()) == {LATENTS, "masked", IMAGE, "text"}
    assert set(warm.trainer.ctx.cache.rates().values()) == {1.0} and parts.vae is None


def test_a_budget_is_kept_and_said(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = real_runs.checkpoint(tmp_path_factory)
    monkeypatch.setattr("videox_fun.training.entry._configure_logging", lambda: None)  # keeps the records here
    caplog.set_level("INFO")
    budget = 40_000  # of about 9 entries of 16 KiB
    shared = {"cache_clip_starts": 2, "cache_dir_latents": tmp_path / "cache", "cache_latents": True,
              "cache_budget_gb": budget / 2**30}
    words = real_runs.command(real_runs.LORA, model, tmp_path / "pre", **shared)
    assert prepare_cache(real_runs.LORA, words) == 0
    entries = list((tmp_path / "cache" / LATENTS).rglob("*.safetensors"))
    assert entries and sum(path.stat().st_size for path in entries) <= budget
    assert "--cache_budget_gb allows" in caplog.text
    caplog.clear()
    live = run(model, tmp_path / "live", cache_clip_starts=2, cache_latents=True,
               cache_dir_latents=tmp_path / "other").go()
    partly = run(model, tmp_path / "partly", **shared)
    assert "do not fit in --cache_budget_gb" in caplog.text and partly.trainer.components.vae is not None
    partly.go()
    np.testing.assert_allclose(partly.losses, live.losses, rtol=0, atol=1e-6)
    assert sorted((tmp_path / "cache" / LATENTS).rglob("*.safetensors")) == sorted(entries)


def test_stated_masks_move_no_random_stream_and_differ_by_clip() -> None:
    streams = Streams(3)
    before = streams.snapshot()
    masks = {name: [stated_mask(name, number, (9, 3, 32, 32)) for number in range(6)] for name in ("a", "b")}
    after = streams.snapshot()
    assert before[0] == after[0] and torch.equal(before[2], after[2]) and (before[1][1] == after[1][1]).all()
    assert all(torch.equal(mask, stated_mask("a", number, (9, 3, 32, 32))) for number, mask in enumerate(masks["a"]))
    assert any(not torch.equal(a, b) for a, b in zip(masks["a"], masks["b"], strict=True))


# ---- a control model in miniature ----
def control_set(folder: Path) -> Path:
    """Clips with a control of another size and a shorter one, a clip without, a picture with."""
    for name, frames in (("a", grey_frames(14)), ("b", grey_frames(14, start=20)), ("c", grey_frames(9, start=40))):
        make_clip(folder / f"{name}.mp4", frames)
    make_clip(folder / "a_control.mp4", grey_frames(14, height=48, width=96, start=7))
    make_clip(folder / "b_control.mp4", grey_frames(10, start=9))
    save_image(folder / "d.png", height=32, width=64, level=90)
    save_image(folder / "d_control.png", height=32, width=64, level=200)
    rows = [("a.mp4", "a_control.mp4"), ("b.mp4", "b_control.mp4"), ("c.mp4", None), ("d.png", "d_control.png")]
    return write_rows(folder / "metadata.json", [
        {"file_path": name, "control_file_path": control, "text": name, "type": "video" if "mp4" in name else "image"}
        for name, control in rows
    ])


def control_options(folder: Path, **changes: Any) -> DataOptions:
    return DataOptions(**{
        "train_data_meta": str(folder / "metadata.json"), "train_data_dir": str(folder), "video_sample_size": 32,
        "image_sample_size": 32, "video_sample_n_frames": 5, "video_sample_stride": 2, "enable_bucket": True,
        "kind": "control", "control_mode": "control_ref", "control_ref_image": "random", "add_inpaint_info": True,
        "cache_mask_draws": 2, "seed": 5, **changes,
    })  # fmt: skip


def encode(pixels_BFCHW: torch.Tensor) -> torch.Tensor:
    """A posterior with a mean and a variance that depend on the pixels."""
    pooled = torch.nn.functional.avg_pool3d(pixels_BFCHW.float().transpose(1, 2), (1, 8, 8))
    return torch.cat([pooled, -1 - pooled.abs()], dim=1)


class ToyRecipe:
    """Conditioning as a control script has it: clip, control, masked clip, reference, picture features."""

    def __init__(self, cache: EncodingCache | None) -> None:
        self.cache = cache
        self.encoded = 0

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.encoded += 1
        return encode(pixels)

    def _part(self, batch: dict, ready: str, pixels: str, source: str, parts: Any = None) -> torch.Tensor:
        moments = (self._encode(batch[pixels]) if self.cache is None else cached.batch_moments(
            self.cache, batch, encode=self._encode, device=torch.device("cpu"), ready=ready, pixels=pixels,
            source=source, parts=parts))  # fmt: skip
        return cached.sample_posterior(moments, mini_batch=1)

    def fill(self, _ctx: Any, _components: Any, batch: dict) -> float:
        cache = self.cache
        values = [
            self._part(batch, "moments", "pixel_values", "source"),
            self._part(batch, "control_moments", "control_pixel_values", "control_source"),
            self._part(batch, "masked_moments", "mask_pixel_values", "source",
                       cache and cached.masked_parts(cache, batch)),
            self._part(batch, "ref_moments", "ref_pixel_values", "source",
                       cache and cached.reference_parts(cache, batch)),
            batch["mask"].float(),
        ]  # fmt: skip

        def features(picture: torch.Tensor) -> torch.Tensor:
            return picture.float().mean(dim=(0, 1))[None, None]

        pictures = ([features(picture) for picture in batch["clip_pixel_values"]] if cache is None else
                    cached.picture_features(cache, batch, encode=features, device=torch.device("cpu")))  # fmt: skip
        return sum(value.double().mean().item() for value in [*values, *pictures])


def losses(options: DataOptions, cache: EncodingCache | None) -> tuple[list[float], list[set[str]], ToyRecipe]:
    recipe, streams = ToyRecipe(cache), Streams(11)
    loader, module, _ = open_loader(options, streams=streams)
    if cache is not None:
        cache.skip_decoding = cache_sources.unlisted(module) is None
        cache_sources.attach(cache, module)
    found, keys = [], []
    for epoch in range(4):
        for batch, _ in loader.epoch(epoch):
            keys.append(set(batch))
            found.append(recipe.fill(None, None, batch))
    return found, keys, recipe


def make_cache(root: Path) -> EncodingCache:
    return EncodingCache(CacheStore(root), FileFacts(root), {LATENTS: "vae", IMAGE: "clip"},
                         layout=LatentLayout(6, spatial=8, temporal=1, itemsize=4))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_control_losses_are_those_of_live_encoding(tmp_path: Path, batch_size: int) -> None:
    control_set(tmp_path)
    options = control_options(tmp_path, train_batch_size=batch_size)
    live, _, _ = losses(options, None)
    filling, _, first = losses(options, make_cache(tmp_path / "cache"))
    again, keys, second = losses(options, make_cache(tmp_path / "cache"))
    np.testing.assert_allclose(filling, live, rtol=0, atol=1e-6)
    np.testing.assert_allclose(again, live, rtol=0, atol=1e-6)
    assert len(set(live)) == len(live) and second.encoded == 0 < first.encoded
    assert all("pixel_values" not in own and {"control_moments", "ref_moments", "clip_features"} <= own for own in keys)


def test_planned_entries_of_a_control_set_are_all_that_a_run_asks_for(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from videox_fun.training.precompute import Filled, _fill_clips

    control_set(tmp_path)
    options, cache = control_options(tmp_path), make_cache(tmp_path / "cache")
    _, module, _ = open_loader(options)
    cache.skip_decoding = True
    cache_sources.attach(cache, module)
    before = cache_plan.coverage(cache, module)
    assert before.missing == before.total > 40 and before.clips == 4
    ctx = SimpleNamespace(cache=cache, rank=0, world=1, device=torch.device("cpu"))
    filled = Filled()
    _fill_clips(ctx, ToyRecipe(cache), None, module, filled)
    after = cache_plan.coverage(cache, module)
    assert after.missing == 0 and after.total == before.total and not filled.failed
    live, _, _ = losses(options, None)
    warm, keys, recipe = losses(options, make_cache(tmp_path / "cache"))
    np.testing.assert_allclose(warm, live, rtol=0, atol=1e-6)
    assert recipe.encoded == 0 and all("pixel_values" not in own for own in keys)
    sizes = [path.stat().st_size for path in (tmp_path / "cache" / LATENTS).rglob("*.safetensors")]
    assert after.bytes <= sum(sizes) <= after.bytes + 2000 * len(sizes)
    assert cache_cli.main(["gc", str(tmp_path / "cache")]) == 0
    assert not list(cache_cli.removable(tmp_path / "cache"))


def test_what_cannot_be_listed_is_decoded_and_said(tmp_path: Path) -> None:
    control_set(tmp_path)
    _, module, _ = open_loader(control_options(tmp_path, cache_mask_draws=0))
    assert "--cache_mask_draws" in cache_sources.unlisted(module)
    _, module, _ = open_loader(control_options(tmp_path, kind="vace"))
    assert "subject" in cache_sources.unlisted(module)
    _, module, _ = open_loader(control_options(tmp_path, enable_bucket=False))
    with pytest.raises(ValueError, match="needs --enable_bucket"):
        cache_sources.attach(make_cache(tmp_path / "cache"), module)
