"""Sampling against recorded runs: noise levels, latents after every step, work done per step, frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.parity.test_vae import tiny_weights
from tests.parity.test_wan_transformer import build, clip_features
from videox_fun.models.wan_vae import AutoencoderKLWan
from videox_fun.pipeline import WanFunControlPipeline, WanFunInpaintPipeline, WanPipeline
from videox_fun.utils.fm_solvers_unipc import FlowUniPCMultistepScheduler
from videox_fun.utils.utils import filter_kwargs

LATENT_ATOL, FRAME_ATOL = 1e-4, 1e-4
TRANSFORMERS = {"wan21_t2v": "wan21_t2v", "wan21_inpaint": "wan21_fun_inp", "wan21_control": "wan21_fun_control_ref"}
SCHEDULERS = {"Flow": FlowMatchEulerDiscreteScheduler, "Flow_Unipc": FlowUniPCMultistepScheduler}
KEPT = ("wan21_t2v.Flow", "wan21_t2v.Flow_Unipc", "wan21_t2v.cfg_skip0.5", "wan21_t2v.teacache",
        "wan21_t2v.teacache_last_step_quirk", "wan21_inpaint.i2v_first_frame", "wan21_inpaint.t2v_all_masked")
OTHERS = ("wan21_t2v.Flow_shift3", "wan21_t2v.nocfg_B2_5steps", "wan21_inpaint.i2v_noclip",
          "wan21_inpaint.first_last", "wan21_control.ref")


class FixedImageEncoder(nn.Module):
    """Gives the features that the recorded runs used for any picture."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def forward(self, pictures: list[Tensor]) -> Tensor:
        return clip_features(len(pictures))


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> AutoencoderKLWan:
    path = tmp_path_factory.mktemp("vae") / "wan21.pth"
    torch.save(tiny_weights("wan21_vae"), path)
    return AutoencoderKLWan.from_pretrained(path)


def make_pipeline(run: str, record: dict[str, Any], weights: Path, vae: AutoencoderKLWan) -> Any:
    scheduler = SCHEDULERS[record["scheduler"]]
    parts = {
        "tokenizer": None, "text_encoder": None, "vae": vae,
        "transformer": build(weights, TRANSFORMERS[run.partition(".")[0]]),
        "scheduler": scheduler(**filter_kwargs(scheduler, record["scheduler_kwargs"])),
    }
    classes = {"WanPipeline": WanPipeline, "WanFunInpaintPipeline": WanFunInpaintPipeline,
               "WanFunControlPipeline": WanFunControlPipeline}
    cls = classes[record["pipeline"]]
    if cls is not WanPipeline:
        parts["clip_image_encoder"] = FixedImageEncoder()
    pipeline = cls(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def conditions(run: str, io: dict[str, Tensor]) -> dict[str, Any]:
    """What each recorded run saw besides the prompt."""
    family, _, case = run.partition(".")
    picture = torch.zeros(3, 32, 48)  # the recorded encoder gives the same features for every picture
    if family == "wan21_control":
        return {"control_video": io["in.control_u8"] / 255.0, "ref_image": io["in.ref_u8"] / 255.0,
                "clip_image": picture}
    if family != "wan21_inpaint":
        return {}
    mask = torch.full((1, 1, 9, 32, 48), 255.0)
    if case == "t2v_all_masked":
        return {"video": torch.zeros(1, 3, 9, 32, 48), "mask_video": mask}
    mask[:, :, 0] = 0
    if case == "first_last":
        mask[:, :, -1] = 0
    return {"video": io["in.video_u8"] / 255.0, "mask_video": mask,
            "clip_image": picture if case == "i2v_first_frame" else None}


def prepare_denoiser(run: str, transformer: Any) -> None:
    case = run.partition(".")[2]
    if case == "cfg_skip0.5":
        transformer.enable_cfg_skip(0.5, 4)
    if case == "teacache":
        transformer.enable_teacache([0.1, 0.0], 8, 0.25, num_skip_start_steps=2, offload=False)
    if case == "teacache_last_step_quirk":
        transformer.enable_teacache([0.1, 0.0], 8, 0.2, num_skip_start_steps=2, offload=False, upstream_compat=True)


class Steps:
    """Latents after each step, and how many samples went through the first block in it."""

    def __init__(self, pipeline: Any) -> None:
        self.latents: list[Tensor] = []
        self.samples: list[int] = []
        self.running = 0
        pipeline.transformer.blocks[0].register_forward_hook(self._count)

    def _count(self, block: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.running += output.shape[0]

    def __call__(self, pipeline: Any, index: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict:
        self.latents.append(tensors["latents"].clone())
        self.samples.append(self.running)
        self.running = 0
        return {}


def sample(run: str, record: dict[str, Any], io: dict[str, Tensor], pipeline: Any) -> tuple[Steps, Tensor]:
    steps, batch = Steps(pipeline), record["batch"]
    result = pipeline(
        prompt_embeds=[io["prompt_embeds.0"]] * batch, negative_prompt_embeds=[io["negative_prompt_embeds.0"]] * batch,
        height=record["height"], width=record["width"], num_frames=record["frames"],
        num_inference_steps=record["steps"], guidance_scale=record["guidance_scale"],
        shift=record["shift_argument"], latents=io["initial_latents"], callback_on_step_end=steps,
        output_type="numpy" if "frames" in io else "latent", **conditions(run, io),
    )
    return steps, result.videos


def check_run(run: str, folder: Path, weights: Path, vae: AutoencoderKLWan) -> None:
    record = json.loads((folder / "pipe_index.json").read_text())[run]
    io = load_file(folder / f"pipe.{run}.io.safetensors")
    pipeline = make_pipeline(run, record, weights, vae)
    prepare_denoiser(run, pipeline.transformer)
    steps, videos = sample(run, record, io, pipeline)
    timesteps = pipeline.scheduler.timesteps.float().tolist()
    assert timesteps == pytest.approx(record["timesteps"], abs=1e-3)
    assert pipeline.scheduler.sigmas.float().tolist() == pytest.approx(record["sigmas"], abs=1e-6)
    for index, latents in enumerate(steps.latents):
        torch.testing.assert_close(latents, io[f"latents_after_step.{index}"], atol=LATENT_ATOL, rtol=0)
    assert steps.samples == record["block0_calls_per_step"]
    if "frames" in io:
        torch.testing.assert_close(videos, io["frames"].float(), atol=FRAME_ATOL, rtol=0)


@pytest.mark.parametrize("run", KEPT)
def test_recorded_run_kept_here(data_dir: Path, vae: AutoencoderKLWan, run: str) -> None:
    check_run(run, data_dir / "pipelines", data_dir / "wan", vae)


@pytest.mark.parametrize("run", OTHERS)
def test_recorded_run(goldens: Path, vae: AutoencoderKLWan, run: str) -> None:
    check_run(run, goldens / "families", goldens / "wan", vae)
