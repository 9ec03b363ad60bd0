"""``--vae_tiling``: off is untouched, small frames give the same bits, large frames nearly, memory follows the tile."""

from __future__ import annotations

import argparse
import math

import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory import LiveBytes
from optim_patches.base import Target
from optim_patches.vae_tiling import VaeTilingPatch, spans, windows
from tests.unit.real_runs import CLIPS, checkpoint
from videox_fun.models.wan_vae import AutoencoderKLWan, encode_videos
from videox_fun.models.wan_vae3_8 import AutoencoderKLWan3_8

# dB for encoding and decoding with tiles of 128 pixels that overlap by 32. The weights are random; with such the
# attention over the whole frame, the one part that tiles do not share, weighs more than in a trained network.
# Measured: 38.8 and 30.5, 34.7 and 20.8 (the second VAE has only eight latents in such a tile).
LEAST_PSNR = {"AutoencoderKLWan": (37, 29), "AutoencoderKLWan3_8": (33, 19.5)}
VAES = {"ckpt_t2v": (AutoencoderKLWan, "Wan2.1_VAE.pth"), "ckpt_5b": (AutoencoderKLWan3_8, "Wan2.2_VAE.pth")}


@pytest.fixture(scope="module", params=list(VAES))
def vae(request, tmp_path_factory):
    cls, name = VAES[request.param]
    folder = checkpoint(tmp_path_factory, request.param)
    return cls.from_pretrained(str(folder / name), additional_kwargs={}).eval()


def frames(height: int, width: int, count: int = 5) -> torch.Tensor:
    """The first frames of a real clip, ``[1, 3, F, H, W]`` in [-1, 1]."""
    pictures = []
    with av.open(str(CLIPS / "train" / "00000001.mp4")) as container:
        for frame in container.decode(video=0):
            pictures.append(torch.from_numpy(np.array(frame.to_ndarray(format="rgb24"))))
            if len(pictures) == count:
                break
    clip = torch.stack(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    return F.interpolate(clip, size=(height, width), mode="bilinear").transpose(0, 1)[None]


def target_of(vae, *, size: int = 128, overlap: int = 32) -> Target:
    args = argparse.Namespace(vae_tiling=True, vae_tile_size=size, vae_tile_overlap=overlap)
    return Target(args=args, models={"vae": vae})


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB, over the range of ``b``."""
    span = float(b.max() - b.min())
    return 10 * math.log10(span**2 / float((a - b).square().mean()))


@torch.no_grad()
def test_large_frames_differ_little_and_undo_restores(vae):
    pixels = frames(192, 256)
    before = vae.encode(pixels)[0].mode()
    video = vae.decode(before).sample
    patch, target = VaeTilingPatch(), target_of(vae)
    assert patch.check(target).ok
    applied = patch.apply(target)
    tiled, again, tiled_video = vae.encode(pixels)[0].mode(), vae.encode(pixels)[0].mode(), vae.decode(before).sample
    evidence = patch.evidence(target, applied)
    applied.undo()
    assert torch.equal(vae.encode(pixels)[0].mode(), before)
    assert torch.equal(tiled, again)
    assert tiled.shape == before.shape
    encode_db, decode_db = LEAST_PSNR[type(vae).__name__]
    assert psnr(tiled, before) > encode_db
    assert psnr(tiled_video, video) > decode_db
    assert evidence.exercised and evidence.facts["encode_tiles"] > 2 and evidence.facts["decode_tiles"] > 1


@torch.no_grad()
def test_frames_within_a_tile_give_the_same_bits_and_count_as_inert(vae):
    pixels = frames(96, 128)
    before = vae.encode(pixels)[0].mode()
    patch, target = VaeTilingPatch(), target_of(vae)
    applied = patch.apply(target)
    assert torch.equal(vae.encode(pixels)[0].mode(), before)
    assert not patch.evidence(target, applied).exercised
    applied.undo()


@torch.no_grad()
@pytest.mark.parametrize("operation", ["encode_moments", "decode_latents"])
def test_memory_follows_the_tile(vae, operation):
    held, ratio = [*vae.parameters(), *vae.buffers()], vae.model.spatial_compression_ratio

    def peak(height: int, width: int) -> int:
        """Beyond the result, which has the size of the frame."""
        pixels = frames(height, width)
        latents = torch.randn(1, vae.latent_channels, 2, height // ratio, width // ratio)
        source = pixels if operation == "encode_moments" else latents
        result = pixels if operation == "decode_latents" else latents
        tracker = LiveBytes()
        tracker.ignore([*held, source])
        with tracker:
            getattr(vae, operation)(source)
        return tracker.peak - 4 * result.numel()

    small, large = peak(96, 128), peak(192, 256)
    applied = VaeTilingPatch().apply(target_of(vae, size=64, overlap=16))
    tiled_small, tiled_large = peak(96, 128), peak(192, 256)
    applied.undo()
    assert large > 3 * small
    # Four times the frame, nearly the same peak. (The tiles of the small one are a little smaller than they may be.)
    assert tiled_large < 1.5 * tiled_small and tiled_large < 0.15 * large


@torch.no_grad()
def test_a_batch_gives_the_numbers_of_its_samples(vae):
    pixels = torch.cat([frames(128, 160), -frames(128, 160)])
    applied = VaeTilingPatch().apply(target_of(vae, size=96, overlap=32))
    together = encode_videos(vae, pixels, mini_batch=2, generator=torch.Generator().manual_seed(0))
    moments = vae.encode_moments(pixels)
    singles = torch.cat([vae.encode_moments(sample) for sample in pixels.split(1)])
    applied.undo()
    assert torch.equal(moments, singles) and together.shape[0] == 2


@torch.no_grad()
def test_bfloat16_stays_in_range_and_near_float32(vae):
    latents = torch.randn(1, vae.latent_channels, 2, *(128 // vae.model.spatial_compression_ratio,) * 2)
    target = target_of(vae, size=96, overlap=32)
    applied = VaeTilingPatch().apply(target)
    exact = vae.decode_latents(latents)
    low = vae.bfloat16().decode_latents(latents.bfloat16())
    vae.float()
    applied.undo()
    assert low.dtype == torch.bfloat16 and float(low.abs().max()) <= 1
    assert psnr(low.float(), exact) > 30


def test_gradients_pass_through_tiles(vae):
    latents = torch.randn(1, vae.latent_channels, 1, 8, 8)
    size = 4 * vae.model.spatial_compression_ratio
    applied = VaeTilingPatch().apply(target_of(vae, size=size, overlap=0))
    leaf = latents.requires_grad_()
    vae.decode_latents(leaf).sum().backward()
    applied.undo()
    quarter = latents.detach()[..., :4, :4].clone().requires_grad_()
    vae.decode_latents(quarter).sum().backward()
    torch.testing.assert_close(leaf.grad[..., :4, :4], quarter.grad)


def test_a_run_without_a_vae_is_inert_and_an_unknown_vae_is_refused():
    patch, target = VaeTilingPatch(), Target(target_of(None).args, models={"transformer": torch.nn.Identity()})
    assert patch.check(target).ok and patch.planned_sites(target) == ()
    evidence = patch.evidence(target, patch.apply(target))
    assert not evidence.exercised and "no VAE" in evidence.summary
    target.models["vae"] = torch.nn.Identity()
    assert "knows the Wan VAEs" in patch.check(target).reason


def test_undo_puts_back_what_another_patch_had_put_there(vae):
    calls = []
    vae.encode_moments = lambda pixels: calls.append(1) or type(vae).encode_moments(vae, pixels)
    own = vae.encode_moments
    applied = VaeTilingPatch().apply(target_of(vae, size=96, overlap=32))
    with torch.no_grad():
        vae.encode_moments(frames(128, 96))
    applied.undo()
    assert len(calls) == 2 and vae.__dict__["encode_moments"] is own and "decode_latents" not in vae.__dict__
    del vae.encode_moments


@pytest.mark.parametrize(("size", "overlap", "words"), [(100, 32, "--vae_tile_size 96"), (128, 8, "--vae_tile_overlap"),
                                                       (64, 48, "more than half")])
def test_sizes_that_cannot_work_are_refused_before_weights_load(size, overlap, words):
    target = target_of(None, size=size, overlap=overlap)
    target.models.clear()
    verdict = VaeTilingPatch().check(target)
    assert not verdict.ok and words in str(verdict)


@settings(deadline=None)
@given(length=st.integers(1, 300), size=st.integers(4, 64), overlap=st.integers(0, 32), scale=st.sampled_from([1, 8]))
def test_tiles_cover_every_place_and_their_windows_sum_to_one(length, size, overlap, scale):
    overlap = min(overlap, size // 2)
    axis = spans(length, size=size, overlap=overlap)
    assert axis[0].start == 0 and axis[-1].stop == length
    assert all(span.stop - span.start <= size for span in axis)
    assert len({span.stop - span.start for span in axis}) == 1
    assert all(left.stop - right.start >= overlap for left, right in zip(axis, axis[1:], strict=False))
    total = torch.zeros(length * scale)
    for span, window in zip(axis, windows(axis, scale=scale, ramp=overlap * scale), strict=True):
        assert window.shape == ((span.stop - span.start) * scale,) and float(window.min()) >= 0
        total[span.start * scale:span.stop * scale] += window
    torch.testing.assert_close(total, torch.ones(length * scale), rtol=0, atol=1e-5)
