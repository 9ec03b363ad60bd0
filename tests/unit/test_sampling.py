"""Samplers, the denoising loop and what saves work in it."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor, nn

from videox_fun import pipeline as pipelines
from videox_fun.data.collate import Plan
from videox_fun.data.fields import InpaintField
from videox_fun.models.cache_utils import CachedSampling, TeaCache, get_teacache_coefficients
from videox_fun.models.wan_transformer3d import WanTransformer3DModel
from videox_fun.models.wan_vae import AutoencoderKLWan
from videox_fun.pipeline import WanFunControlPipeline, WanFunInpaintPipeline, WanPipeline
from videox_fun.pipeline.loading import SAMPLERS, make_scheduler
from videox_fun.pipeline.pipeline_wan_fun_control import pack_camera
from videox_fun.pipeline.wan_base import nearest_size
from videox_fun.pipeline.wan_images import fit, per_video, resize_mask
from videox_fun.utils.cfg_optimization import cfg_skip
from videox_fun.utils.fm_solvers import get_sampling_sigmas, retrieve_timesteps

CONFIG = OmegaConf.create({"scheduler_kwargs": {"num_train_timesteps": 1000, "shift": 5.0,
                                                "use_dynamic_shifting": False, "scheduler_subpath": None}})


def denoiser(in_dim: int = 16, **kwargs: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(model_type="i2v" if in_dim == 36 else "t2v", in_dim=in_dim, dim=24, ffn_dim=32,
                                  freq_dim=16, text_dim=8, num_heads=2, num_layers=2, text_len=8, **kwargs)
    nn.init.normal_(model.head.head.weight, std=0.2)
    return model.eval()


class FakeVae(nn.Module):
    """Latents are pixels of the four-frame grid, so the pipelines' own work can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(latent_channels=16, temporal_compression_ratio=4, spatial_compression_ratio=8)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.encoded: list[Tensor] = []

    def encode(self, pixels: Tensor) -> tuple:
        self.encoded.append(pixels)
        mean = pixels[:, :1, ::4, ::8, ::8].repeat(1, 16, 1, 1, 1)
        return (SimpleNamespace(mode=lambda: mean),)

    def decode(self, latents: Tensor) -> Any:
        frames = latents[:, :3].repeat_interleave(4, 2)[:, :, 3:]
        return SimpleNamespace(sample=frames.repeat_interleave(8, 3).repeat_interleave(8, 4).clamp(-1, 1))


def make(cls: type, transformer: nn.Module, sampler: str = "Flow", **parts: Any) -> Any:
    pipe = cls(tokenizer=None, text_encoder=None, vae=FakeVae(), transformer=transformer,
               scheduler=make_scheduler(CONFIG, sampler=sampler), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


TEXT = {"prompt_embeds": [torch.ones(3, 8)], "negative_prompt_embeds": [torch.zeros(2, 8)]}
SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3,
                         "output_type": "latent"}


def draw(pipe: Any, seed: int = 0, **changes: Any) -> Tensor:
    return pipe(**{**TEXT, **SMALL, "generator": torch.Generator().manual_seed(seed), **changes}).videos


# ---- noise levels ---------------------------------------------------------------------------------------------------


def test_noise_levels_of_each_sampler() -> None:
    """The recorded ones: Euler shifts twice, the other two cut times to whole numbers."""
    found = {}
    for sampler in SAMPLERS:
        pipe = make(WanPipeline, denoiser(), sampler)
        found[sampler] = pipe.set_timesteps(4, torch.device("cpu"), None, 5).tolist()
    assert found["Flow"] == pytest.approx([1000, 909.707, 717.317, 24.414], abs=1e-3)
    assert found["Flow_Unipc"] == [999, 937, 833, 624]
    assert found["Flow_DPM++"] == [1000, 937, 833, 625]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_samplers_are_exact_for_a_straight_path(sampler: str, steps: int) -> None:
    """With the velocity of one clean sample every sampler ends on that sample, whatever the number of steps."""
    scheduler = make_scheduler(CONFIG, sampler=sampler)
    if sampler == "Flow_Unipc":
        scheduler.set_timesteps(steps, shift=3)
    elif sampler == "Flow_DPM++":
        retrieve_timesteps(scheduler, sigmas=get_sampling_sigmas(steps, 3))
    else:
        scheduler.set_timesteps(steps)
    clean = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(2))
    sigma = scheduler.sigmas[0]
    x = (1 - sigma) * clean + sigma * noise
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = (x - clean) / scheduler.sigmas[index]
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
    torch.testing.assert_close(x, clean, atol=2e-4, rtol=0)


@pytest.mark.parametrize("sampler", ["Flow_Unipc", "Flow_DPM++"])
def test_second_order_samplers_come_closer_than_euler(sampler: str) -> None:
    """On a curved path: dx/dsigma of a Gaussian of variance 4, whose end is known."""
    def end(name: str, steps: int) -> float:
        scheduler = make_scheduler(CONFIG, sampler=name)
        levels = get_sampling_sigmas(steps, 3)
        if name == "Flow_Unipc":
            scheduler.set_timesteps(steps, shift=3)
        else:
            retrieve_timesteps(scheduler, sigmas=levels if name == "Flow_DPM++" else levels.tolist())
        x = torch.tensor([[1.0]])
        for index, timestep in enumerate(scheduler.timesteps):
            s = scheduler.sigmas[index]
            variance = (1 - s) ** 2 * 4 + s**2
            x = scheduler.step(x * (s - 4 * (1 - s)) / variance, timestep, x, return_dict=False)[0]
        return x.item()

    config, CONFIG.scheduler_kwargs.shift = CONFIG.scheduler_kwargs.shift, 1.0
    try:
        errors = {name: abs(end(name, 12) - 2.0) for name in ("Flow", sampler)}
    finally:
        CONFIG.scheduler_kwargs.shift = config
    assert errors[sampler] < 0.5 * errors["Flow"]


def test_a_sampler_is_refused_by_name_and_takes_only_its_arguments() -> None:
    with pytest.raises(ValueError, match="Unknown sampler 'Euler'. Known: Flow, Flow_Unipc, Flow_DPM"):
        make_scheduler(CONFIG, sampler="Euler")
    with pytest.raises(ValueError, match="takes no timesteps; give num_inference_steps and shift"):
        draw(make(WanPipeline, denoiser(), "Flow_Unipc"), timesteps=[999.0, 500.0])
    with pytest.raises(ValueError, match="either timesteps or sigmas"):
        retrieve_timesteps(FlowMatchEulerDiscreteScheduler(), timesteps=[1.0], sigmas=[1.0])


# ---- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seed_decides_the_clip(sampler: str) -> None:
    pipe = make(WanPipeline, denoiser(), sampler)
    assert torch.equal(draw(pipe, 1), draw(pipe, 1)) and torch.isfinite(draw(pipe, 1)).all()
    assert not torch.equal(draw(pipe, 1), draw(pipe, 2))


def test_a_batch_equals_its_clips() -> None:
    pipe = make(WanPipeline, denoiser())
    texts = [torch.ones(3, 8), torch.full((5, 8), 0.5)]
    both = draw(pipe, prompt_embeds=texts, negative_prompt_embeds=[torch.zeros(2, 8)] * 2,
                generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)])
    for index, text in enumerate(texts):
        alone = draw(pipe, prompt_embeds=[text], seed=3 + index)
        torch.testing.assert_close(both[index:index + 1], alone, atol=1e-5, rtol=0)
    padded = draw(pipe, prompt_embeds=torch.ones(1, 3, 8), negative_prompt_embeds=torch.zeros(1, 2, 8))
    assert torch.equal(padded, draw(pipe))


def test_several_clips_per_prompt() -> None:
    clips = draw(make(WanPipeline, denoiser()), num_videos_per_prompt=3)
    assert clips.shape[0] == 3 and not torch.equal(clips[0], clips[1])


def test_guidance_is_linear_and_off_at_one() -> None:
    pipe = make(WanPipeline, denoiser())
    one = SMALL | {"num_inference_steps": 1}
    plain, two, three = (draw(pipe, guidance_scale=scale, **one) for scale in (1, 2, 3))
    negative = draw(pipe, guidance_scale=1, prompt_embeds=TEXT["negative_prompt_embeds"], **one)
    torch.testing.assert_close(two - plain, plain - negative, atol=1e-4, rtol=0)
    torch.testing.assert_close(three - two, two - plain, atol=1e-4, rtol=0)


def test_callback_sees_every_step_and_may_stop_or_change() -> None:
    pipe = make(WanPipeline, denoiser())
    seen: list[int] = []

    def stop(pipe: Any, index: int, timestep: Tensor, tensors: dict) -> dict:
        seen.append(index)
        pipe._interrupt = index == 1
        return {"latents": torch.zeros_like(tensors["latents"])}

    assert draw(pipe, callback_on_step_end=stop).abs().max() == 0 and seen == [0, 1]
    with pytest.raises(ValueError, match="not \\['x'\\]"):
        draw(pipe, callback_on_step_end=stop, callback_on_step_end_tensor_inputs=["x"])


def test_bad_calls_are_explained() -> None:
    pipe = make(WanPipeline, denoiser())
    with pytest.raises(ValueError, match="multiples of 16, not 40x32. Nearest: 32x32"):
        draw(pipe, height=40)
    with pytest.raises(ValueError, match="either prompt or prompt_embeds"):
        pipe(**SMALL)
    with pytest.raises(ValueError, match="1 negative prompts were given for 2 prompts"):
        draw(pipe, prompt_embeds=[torch.ones(3, 8)] * 2)
    with pytest.raises(ValueError, match="2 generators were given for 1 videos"):
        draw(pipe, generator=[torch.Generator(), torch.Generator()])
    with pytest.raises(ValueError, match="a text or a list of texts"):
        pipe(prompt=3, **SMALL)
    assert nearest_size(5, 16) == 16 and nearest_size(90, 16) == 96


def test_names_of_the_package() -> None:
    assert pipelines.WanFunPipeline is WanPipeline and pipelines.WanI2VPipeline is WanFunInpaintPipeline
    assert set(dir(pipelines)) >= {"WanFunControlPipeline", "WanPipeline"}
    with pytest.raises(AttributeError, match="has no 'WanPipe'"):
        _ = pipelines.WanPipe


def test_parts_that_work_outside_forward_are_fetched_under_offloading() -> None:
    """Encoding and decoding do not go through ``forward``, where the offload hooks sit."""
    pipe = make(WanPipeline, denoiser())
    fetched: list[nn.Module] = []
    pipe.vae._hf_hook = SimpleNamespace(pre_forward=fetched.append, execution_device="cpu")
    assert draw(pipe, output_type="numpy").shape == (1, 3, 5, 32, 32) and fetched == [pipe.vae]


# ---- conditions -----------------------------------------------------------------------------------------------------


def test_case_121_masked_pixels_are_those_of_training() -> None:
    """The clip that the VAE sees is the same in training and in use."""
    pixels = torch.rand(5, 3, 32, 32) * 2 - 1
    np.random.seed(1)
    batch: dict[str, list] = defaultdict(list)
    InpaintField(image_start_only=False, with_clip=False)({}, pixels, Plan((32, 32), 5, (32, 32)), batch)
    mask, expected = batch["mask"][0], batch["mask_pixel_values"][0]
    pipe = make(WanFunInpaintPipeline, denoiser(36), clip_image_encoder=None)
    video = ((pixels + 1) / 2).transpose(0, 1)[None]
    pipe.prepare_mask_latents(video, mask.float().transpose(0, 1)[None] * 255, torch.zeros(1, 16, 2, 4, 4))
    seen = pipe.vae.encoded[0][0].transpose(0, 1)
    torch.testing.assert_close(seen, expected.float(), atol=1e-6, rtol=0)
    assert 0 < mask.float().mean() < 1 and (seen[mask.expand_as(seen) == 1] == 0).all()


def test_mask_channels_say_what_is_known() -> None:
    pipe = make(WanFunInpaintPipeline, denoiser(36), clip_image_encoder=None)
    latents, video = torch.zeros(2, 16, 2, 4, 4), torch.rand(1, 3, 5, 32, 32)
    mask = torch.full((1, 1, 5, 32, 32), 255.0)
    nothing = pipe.prepare_mask_latents(video, mask, latents)
    assert nothing.shape == (2, 20, 2, 4, 4) and nothing.abs().max() == 0
    mask[:, :, 0] = 0
    first = pipe.prepare_mask_latents(video, mask, latents)
    assert first[:, :4, 0].min() == 1 and first[:, :4, 1].max() == 0 and torch.equal(first[0], first[1])
    assert torch.equal(first, pipe.prepare_mask_latents(video, mask / 255, latents))  # masks of 0 and 1 too
    mask[:, :, -1] = 0
    assert pipe.prepare_mask_latents(video, mask, latents)[0, :4, 1, 0, 0].tolist() == [0, 0, 0, 1]


def test_inpaint_calls() -> None:
    pipe = make(WanFunInpaintPipeline, denoiser(36), clip_image_encoder=None)
    video, mask = torch.rand(1, 3, 5, 20, 20), torch.full((1, 1, 5, 20, 20), 255.0)
    assert torch.equal(draw(pipe), draw(pipe, video=video, mask_video=mask))  # nothing known: the clip does not matter
    mask[:, :, 0] = 0
    assert not torch.equal(draw(pipe), draw(pipe, video=video, mask_video=mask))
    with pytest.raises(ValueError, match="give both or neither"):
        draw(pipe, video=video)
    with pytest.raises(ValueError, match="video has 5 and mask_video 5 frames, but 9 are sampled"):
        draw(pipe, video=video, mask_video=mask, num_frames=9)
    with pytest.raises(ValueError, match="no clip_image_encoder"):
        draw(pipe, clip_image=Image.new("RGB", (8, 8)))


def test_control_inputs() -> None:
    transformer = denoiser(48, add_ref_conv=True)
    pipe = make(WanFunControlPipeline, transformer, clip_image_encoder=None)
    transformer.embed_context = lambda context, clip: WanTransformer3DModel.embed_context(transformer, context)
    seen: list[dict] = []
    forward = transformer.forward
    transformer.forward = lambda **kw: (seen.append(kw), forward(**kw))[1]
    picture = torch.ones(1, 3, 1, 32, 32)
    draw(pipe, control_video=torch.ones(1, 3, 5, 32, 32), start_image=picture * 0.5, ref_image=picture)
    y = seen[0]["y"]
    assert y.shape == (1, 32, 2, 4, 4) and y[:, :16].min() == 1
    assert seen[0]["full_ref"].shape == (1, 16, 4, 4) and seen[0]["full_ref"].min() == 1
    draw(pipe)
    assert seen[-1]["y"].abs().max() == 0 and seen[-1]["full_ref"].abs().max() == 0
    with pytest.raises(ValueError, match="control_video has 9 frames"):
        draw(pipe, control_video=torch.ones(1, 3, 9, 32, 32))
    with pytest.raises(ValueError, match="no reference convolution"):
        draw(make(WanFunControlPipeline, denoiser(48), clip_image_encoder=None), ref_image=picture)


def test_camera_rays_are_grouped_by_latent_frames() -> None:
    rays = torch.arange(5.0).view(1, 1, 5, 1, 1) + 100 * torch.arange(6.0).view(1, 6, 1, 1, 1)
    packed = pack_camera(rays)
    assert packed.shape == (1, 24, 2, 1, 1)
    assert packed[0, :8, 1, 0, 0].tolist() == [1, 2, 3, 4, 101, 102, 103, 104]
    assert packed[0, :8, 0, 0, 0].tolist() == [0, 0, 0, 0, 100, 100, 100, 100]
    with pytest.raises(ValueError, match="4k\\+1 frames are needed"):
        pack_camera(rays[:, :, :4])


def test_resizing_and_repeating_conditions() -> None:
    video = torch.rand(2, 3, 5, 8, 8)
    assert fit(video, 8, 8) is video and fit(video, 16, 24).shape == (2, 3, 5, 16, 24)
    hard = fit((video > 0.5).float(), 16, 16, mode="nearest")
    assert set(hard.unique().tolist()) == {0.0, 1.0}
    assert per_video(video, torch.zeros(4, 1))[:, 0, 0, 0, 0].tolist() == pytest.approx(
        video[:, 0, 0, 0, 0].repeat_interleave(2).tolist())
    with pytest.raises(ValueError, match="for 2 videos, but 3 are sampled"):
        per_video(video, torch.zeros(3, 1))
    mask = torch.rand(1, 4, 3, 8, 8)
    assert resize_mask(mask, torch.zeros(1, 1, 3, 4, 4), False).shape == (1, 4, 3, 4, 4)
    assert resize_mask(mask, torch.zeros(1, 1, 1, 4, 4)).shape == (1, 4, 1, 4, 4)


# ---- saved work -----------------------------------------------------------------------------------------------------


class Doubled(CachedSampling):
    """A denoiser that a foreign loop calls with ``[negative, prompt]``."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    @cfg_skip()
    def forward(self, x: Tensor, t: Tensor, context: list[Tensor], scale: float = 2.0, **kwargs: Any) -> Tensor:
        self.rows.append(len(x))
        assert len(t) == len(context) == len(x)
        return x * scale + torch.stack([row.sum() for row in context]).view(-1, 1)


def test_cfg_skip_halves_a_doubled_batch_in_its_steps_only() -> None:
    model = Doubled()
    x, t, context = torch.arange(4.0).view(4, 1), torch.zeros(4), [torch.full((2,), float(i)) for i in range(4)]
    model.enable_cfg_skip(0.5, 4)
    with torch.no_grad():
        full = model.forward(x, t, context)
        model.current_steps = 2
        half = model.forward(x, t=t, context=context)
        told = model.forward(x, t, context, cond_flag=True)
        odd = model.forward(x[:3], t[:3], context[:3])
    grad = model.forward(x, t, context)
    assert model.rows == [4, 2, 4, 3, 4]
    assert torch.equal(half, torch.cat([full[2:], full[2:]])) and torch.equal(told, full) and torch.equal(grad, full)
    assert torch.equal(odd, full[:3])
    model.disable_cfg_skip()
    assert not model.skips_guidance()


def test_cfg_skip_reaches_the_real_denoiser() -> None:
    model = denoiser()
    args = {"x": torch.randn(2, 16, 1, 4, 4), "t": torch.full((2,), 500.0), "context": [torch.ones(2, 8)] * 2}
    model.enable_cfg_skip(1.0, 2)
    with torch.no_grad():
        out = model(**args)
        alone = model(**{k: v[1:] for k, v in args.items()}, cond_flag=True)
    assert torch.equal(out[0], out[1])
    torch.testing.assert_close(out[1:], alone)


def test_teacache_saves_blocks_and_starts_over_with_every_run() -> None:
    model = denoiser()
    pipe = make(WanPipeline, model)
    exact = draw(pipe, num_inference_steps=6)
    model.enable_teacache([1.0, 0.0], 6, 1e9, num_skip_start_steps=1)
    cached = draw(pipe, num_inference_steps=6)
    assert model.teacache.computed == 2 and model.teacache.skipped == 10
    assert torch.equal(draw(pipe, num_inference_steps=6), cached)
    # A run that is broken off leaves nothing behind, not even for another size.
    draw(pipe, num_inference_steps=6, callback_on_step_end=lambda pipe, *a: setattr(pipe, "_interrupt", True) or {})
    assert draw(pipe, num_inference_steps=6, height=48).shape[-2] == 6
    assert torch.equal(draw(pipe, num_inference_steps=6), cached)
    model.enable_teacache([1.0, 0.0], 6, 0.0)
    assert torch.equal(draw(pipe, num_inference_steps=6), exact)
    model.disable_teacache()
    assert torch.equal(draw(pipe, num_inference_steps=6), exact)


def test_teacache_is_for_sampling_only() -> None:
    model = denoiser()
    model.enable_teacache([1.0, 0.0], 2, 1e9)
    model(x=torch.randn(1, 16, 1, 4, 4), t=torch.tensor([5.0]), context=[torch.ones(2, 8)]).sum().backward()
    assert model.teacache.computed == 0 and model.blocks[0].self_attn.q.weight.grad.abs().sum() > 0


def test_teacache_settings() -> None:
    with pytest.raises(ValueError, match="num_steps must be positive"):
        TeaCache([1.0], 0)
    with pytest.raises(ValueError, match="between 0 and num_steps"):
        TeaCache([1.0], 4, num_skip_start_steps=5)
    assert get_teacache_coefficients("models/Wan2.1-Fun-1.3B-InP")[0] == pytest.approx(-5.21862437e04)
    assert get_teacache_coefficients("Wan2.1-I2V-14B-720P") != get_teacache_coefficients("Wan2.1-I2V-14B-480P")
    assert len(get_teacache_coefficients("Wan2.1-T2V-14B")) == 5 and get_teacache_coefficients("CogVideoX") is None
    one, two = Doubled(), Doubled()
    one.enable_teacache([1.0], 4, 0.1)
    one.enable_cfg_skip(0.25, 4)
    two.share_teacache(one)
    two.share_cfg_skip(one)
    assert two.teacache is one.teacache and two.cfg_skip_ratio == 0.25
    one.enable_cfg_skip(0, 4)
    assert one.cfg_skip_ratio is None


def test_real_vae_sizes(tmp_path) -> None:
    """Clips of the real VAE have 4k+1 frames of the asked size."""
    from tests.parity.test_vae import tiny_weights

    torch.save(tiny_weights("wan21_vae"), tmp_path / "vae.pth")
    pipe = make(WanPipeline, denoiser())
    pipe.vae = AutoencoderKLWan.from_pretrained(tmp_path / "vae.pth")
    clip = draw(pipe, num_frames=6, output_type="numpy", num_inference_steps=1)
    assert clip.shape == (1, 3, 5, 32, 32) and clip.min() >= 0 and clip.max() <= 1
    assert pipe(**{**TEXT, **SMALL}, return_dict=False).shape == (1, 16, 2, 4, 4)
