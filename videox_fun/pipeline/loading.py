"""From a model folder and its configuration file to a pipeline that can sample.

Which pipeline it is follows from the denoiser's input channels: text to video, a mask and a masked video, or control.
Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from videox_fun.pipeline.wan_base import WanPipelineBase
from videox_fun.utils.utils import filter_kwargs

SAMPLERS = ("Flow", "Flow_Unipc", "Flow_DPM++")
LATENT_CHANNELS, INPAINT_CHANNELS = 16, 36

# The negative prompt that Wan's samples are made with.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，"
    "背景人很多，倒着走"
)


def config_section(config: Any, name: str) -> dict[str, Any]:
    """A mapping of the configuration file as plain values, empty when absent."""
    from omegaconf import OmegaConf

    part = config.get(name)
    return OmegaConf.to_container(part) if part is not None else {}


def make_scheduler(config: Any, *, sampler: str = "Flow") -> Any:
    """A new sampler with the configuration file's numbers.

    Euler takes its shift from the file; the other two get theirs as an argument of the pipeline.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    from videox_fun.utils.fm_solvers import FlowDPMSolverMultistepScheduler
    from videox_fun.utils.fm_solvers_unipc import FlowUniPCMultistepScheduler

    classes = {"Flow": FlowMatchEulerDiscreteScheduler, "Flow_Unipc": FlowUniPCMultistepScheduler,
               "Flow_DPM++": FlowDPMSolverMultistepScheduler}
    if sampler not in classes:
        raise ValueError(f"Unknown sampler '{sampler}'. Known: {', '.join(SAMPLERS)}.")
    kwargs = config_section(config, "scheduler_kwargs")
    if sampler != "Flow":
        kwargs["shift"] = 1
    return classes[sampler](**filter_kwargs(classes[sampler], kwargs))


def wan_pipeline_class(input_channels: int) -> type[WanPipelineBase]:
    """The pipeline for a denoiser that takes this many channels."""
    from videox_fun.pipeline.pipeline_wan import WanPipeline
    from videox_fun.pipeline.pipeline_wan_fun_control import WanFunControlPipeline
    from videox_fun.pipeline.pipeline_wan_fun_inpaint import WanFunInpaintPipeline

    known = {LATENT_CHANNELS: WanPipeline, INPAINT_CHANNELS: WanFunInpaintPipeline}
    return known.get(input_channels, WanFunControlPipeline)


def assemble(
    *, transformer: nn.Module, vae: nn.Module, text_encoder: nn.Module | None, tokenizer: Any, scheduler: Any,
    image_encoder: nn.Module | None = None,
) -> WanPipelineBase:
    """The pipeline that fits loaded parts."""
    cls = wan_pipeline_class(transformer.config.in_dim)
    parts = {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": vae, "transformer": transformer,
             "scheduler": scheduler}
    if "clip_image_encoder" in cls.__init__.__code__.co_varnames:
        parts["clip_image_encoder"] = image_encoder
    return cls(**parts)


def read_config(folder: Path, config_path: Path | None) -> Any:
    """The configuration file: the given one, or ``wan.yaml`` in the model folder."""
    from omegaconf import OmegaConf

    path = config_path or folder / "wan.yaml"
    if not path.is_file():
        given = "" if config_path else " Give --config_path: the yaml file for the model's family below config/."
        raise ValueError(f"The configuration file {path} does not exist.{given}")
    try:
        return OmegaConf.load(path)
    except Exception as error:
        raise ValueError(f"{path} is not a readable yaml file: {error}") from error


def load_wan_pipeline(
    folder: str | Path, *, config_path: str | Path | None = None, transformer_path: str | Path | None = None,
    vae_path: str | Path | None = None, dtype: torch.dtype = torch.bfloat16, sampler: str = "Flow",
) -> WanPipelineBase:
    """Load every part of a Wan 2.1 model, on the host.

    Args:
        folder: model folder.
        config_path: configuration file; ``wan.yaml`` in the folder when not given.
        transformer_path: weights loaded over the denoiser's, for example of a full fine-tuning.
        vae_path: VAE file instead of the folder's.
        dtype: of all parts.
        sampler: one of ``SAMPLERS``.

    Raises:
        ValueError: a file is missing or does not fit, named in the text.
    """
    from transformers import AutoTokenizer

    from videox_fun.models.loading import load_weights
    from videox_fun.models.wan_image_encoder import CLIPModel
    from videox_fun.models.wan_text_encoder import WanT5EncoderModel
    from videox_fun.models.wan_transformer3d import WanTransformer3DModel
    from videox_fun.models.wan_vae import AutoencoderKLWan

    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"The model folder {root} does not exist.")
    config = read_config(root, Path(config_path) if config_path else None)
    scheduler = make_scheduler(config, sampler=sampler)
    parts = {section: config_section(config, section) for section in (
        "transformer_additional_kwargs", "vae_kwargs", "text_encoder_kwargs", "image_encoder_kwargs")}

    def path_of(section: str, key: str) -> Path:
        path = root / parts[section].get(key, key.removesuffix("_subpath"))
        if not path.exists():
            raise ValueError(f"{path} ({section}.{key} of the configuration file) does not exist.")
        return path

    channels = _input_channels(path_of("transformer_additional_kwargs", "transformer_subpath"))
    files = {"vae": Path(vae_path) if vae_path else path_of("vae_kwargs", "vae_subpath"),
             "text": path_of("text_encoder_kwargs", "text_encoder_subpath"),
             "tokenizer": path_of("text_encoder_kwargs", "tokenizer_subpath")}
    if channels != LATENT_CHANNELS:
        files["image"] = path_of("image_encoder_kwargs", "image_encoder_subpath")
    transformer = WanTransformer3DModel.from_pretrained(
        str(path_of("transformer_additional_kwargs", "transformer_subpath")), torch_dtype=dtype, strict=True,
        transformer_additional_kwargs=parts["transformer_additional_kwargs"],
    )
    if transformer_path:
        load_weights(transformer, transformer_path, strict=True)
    pipeline = assemble(
        transformer=transformer, scheduler=scheduler,
        vae=AutoencoderKLWan.from_pretrained(str(files["vae"]), additional_kwargs=parts["vae_kwargs"],
                                             torch_dtype=dtype),
        text_encoder=WanT5EncoderModel.from_pretrained(
            str(files["text"]), additional_kwargs=parts["text_encoder_kwargs"], low_cpu_mem_usage=True,
            torch_dtype=dtype),
        tokenizer=AutoTokenizer.from_pretrained(files["tokenizer"], local_files_only=True),
        image_encoder=CLIPModel.from_pretrained(str(files["image"]), torch_dtype=dtype) if "image" in files else None,
    )
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return pipeline


def _input_channels(folder: Path) -> int:
    """What the denoiser takes, from its configuration."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; it describes the denoiser.")
    stated = json.loads(path.read_text(encoding="utf-8"))
    return int(stated.get("in_dim", stated.get("in_channels", LATENT_CHANNELS)))
