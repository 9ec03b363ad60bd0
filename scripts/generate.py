"""Sample clips from a Wan 2.1 model folder, with LoRA files if there are any.

    python scripts/generate.py --model models/Wan2.1-Fun-V1.1-1.3B-InP --config_path config/wan2.1/wan_civitai.yaml \
        --prompt "A dog runs on the beach." --start_image dog.png --lora_path output/checkpoint-1000.safetensors

Writes one mp4 per prompt and seed. ``--compare`` also draws every clip without the LoRA files, from the same noise, and
puts both under each other in ``comparison.png``. A wan.yaml in the model folder makes ``--config_path`` unnecessary.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_AREA, _RATIO = 480 * 832, 832 / 480  # of a clip whose size is not given
_SAMPLERS = ("Flow", "Flow_Unipc", "Flow_DPM++")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FAILED, _USAGE = 1, 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--pretrained_model_name_or_path", "--model", dest="model", type=Path, required=True, help="model folder")
    add("--config_path", type=Path, help="yaml file of the model's family")
    add("--transformer_path", type=Path, help="weights over the denoiser's, for example of a full fine-tuning")
    add("--vae_path", type=Path, help="VAE file instead of the folder's")
    add("--lora_path", type=Path, nargs="+", default=[], help="LoRA files of any format, merged in this order")
    add("--lora_weight", type=float, nargs="+", default=[], help="strength of each (1 where not given)")

    add("--prompt", nargs="+", required=True, help="one clip for each")
    add("--negative_prompt", help="what to avoid (default: the model's usual one)")
    add("--start_image", type=Path, help="first frame, for models with an image input")
    add("--end_image", type=Path, help="last frame, besides a first")
    add("--video", type=Path, help="clip to change, with --mask_image")
    add("--mask_image", type=Path, help="white where --video is made anew")
    add("--height", type=int, help="(default: of the start image's shape, or 480)")
    add("--width", type=int, help="(default: of the start image's shape, or 832)")
    add("--num_frames", type=int, default=81, help="4k+1 (default 81)")
    add("--fps", type=float, default=16, help="of the written file (default 16)")

    add("--sampler", choices=_SAMPLERS, default="Flow", help="(default Flow)")
    add("--num_inference_steps", type=int, default=50, help="(default 50)")
    add("--guidance_scale", type=float, default=6.0, help="1 turns guidance off (default 6)")
    add("--shift", type=float, default=5.0, help="of Flow_Unipc and Flow_DPM++ (default 5)")
    add("--seed", type=int, help="(default: drawn and shown)")
    add("--num_videos", type=int, default=1, help="clips per prompt, with seeds counted up (default 1)")

    add("--teacache", type=float, default=0.0, help="skip steps that change little; threshold, for example 0.1")
    add("--teacache_start", type=int, default=5, help="first steps that are never skipped (default 5)")
    add("--cfg_skip", type=float, default=0.0, help="share of the last steps without guidance")
    add("--riflex_k", type=int, default=0, help="stretch this time frequency for long clips; 6 for Wan")
    add("--offload", choices=("none", "model", "sequential"), default="none",
        help="keep parts (model) or layers (sequential) on the host until they are used")
    add("--dtype", choices=sorted(_DTYPES), help="(default bf16 on a GPU, fp32 otherwise)")
    add("--device", help="(default: the GPU if there is one)")

    add("--output", type=Path, default=Path("samples"), help="folder (default samples)")
    add("--compare", action="store_true", help="also without LoRA, side by side in comparison.png")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded."""
    for name in ("model", "config_path", "transformer_path", "vae_path", "start_image", "end_image", "video",
                 "mask_image"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            raise ValueError(f"--{name}: {path} does not exist.")
    for path in args.lora_path:
        if not path.is_file():
            raise ValueError(f"--lora_path: {path} is not a file.")
    if args.lora_weight and len(args.lora_weight) != len(args.lora_path):
        raise ValueError(f"--lora_weight has {len(args.lora_weight)} and --lora_path {len(args.lora_path)} entries.")
    if args.compare and not args.lora_path:
        raise ValueError("--compare needs --lora_path: there is nothing to compare with.")
    if args.compare and args.offload != "none":
        raise ValueError("--compare changes the weights between two rounds; use it without --offload.")
    if args.end_image and not args.start_image:
        raise ValueError("--end_image needs --start_image.")
    if (args.video is None) != (args.mask_image is None):
        raise ValueError("--video and --mask_image belong together.")
    if args.video and args.start_image:
        raise ValueError("Give either --video or --start_image.")
    if (args.height is None) != (args.width is None):
        raise ValueError("Give --height and --width together.")
    for name in ("num_frames", "num_inference_steps", "num_videos"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be 1 or more.")
    if not 0 <= args.cfg_skip <= 1:
        raise ValueError("--cfg_skip is a share and must lie between 0 and 1.")


def say(text: str) -> None:
    print(text, flush=True)


def load(args: argparse.Namespace) -> Any:
    """The pipeline on its device, with the switches that save work."""
    import torch

    from videox_fun.models.cache_utils import get_teacache_coefficients
    from videox_fun.pipeline.loading import load_wan_pipeline

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.offload != "none" and device.type == "cpu":
        raise ValueError(f"--offload {args.offload} keeps parts away from a GPU, and there is none. Leave it out.")
    dtype = getattr(torch, _DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")])
    say(f"Loading {args.model} ({str(dtype).removeprefix('torch.')}, {device}) ...")
    pipeline = load_wan_pipeline(
        args.model, config_path=args.config_path, transformer_path=args.transformer_path, vae_path=args.vae_path,
        dtype=dtype, sampler=args.sampler,
    )
    transformer = pipeline.transformer
    if args.teacache:
        coefficients = get_teacache_coefficients(str(args.model))
        if coefficients is None:
            raise ValueError(f"--teacache: no fit is known for '{args.model.name}'. It is recognised by the folder's "
                             "name, for example Wan2.1-T2V-14B.")
        start = min(args.teacache_start, args.num_inference_steps)
        transformer.enable_teacache(coefficients, args.num_inference_steps, args.teacache, start, offload=False)
    transformer.enable_cfg_skip(args.cfg_skip, args.num_inference_steps)
    if args.riflex_k:
        head = transformer.dim // transformer.num_heads
        frequencies = head // 2 - 2 * (head // 6)
        if not 1 <= args.riflex_k <= frequencies:
            raise ValueError(f"--riflex_k must lie between 1 and {frequencies}, the time frequencies of this model.")
        transformer.enable_riflex(k=args.riflex_k, L_test=(args.num_frames - 1) // pipeline.temporal_ratio + 1)
    return pipeline


def place(pipeline: Any, args: argparse.Namespace) -> None:
    """To the device, or offloaded. After merging, which changes weights on the host."""
    if args.offload == "model":
        pipeline.enable_model_cpu_offload(device=args.device or "cuda")
    elif args.offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=args.device or "cuda")
    else:
        import torch

        pipeline.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def size_of(args: argparse.Namespace, pipeline: Any) -> tuple[int, int]:
    """Height and width of the clips."""
    from videox_fun.pipeline.wan_base import nearest_size
    from videox_fun.utils.utils import get_image, read_video

    if args.height is not None:
        return args.height, args.width
    ratio = _RATIO
    if args.start_image:
        picture = get_image(args.start_image)
        ratio = picture.width / picture.height
    elif args.video:
        height, width = read_video(args.video, limit=1).shape[1:3]
        ratio = width / height
    step = pipeline.size_step
    return nearest_size((_AREA / ratio) ** 0.5, step), nearest_size((_AREA * ratio) ** 0.5, step)


def shot_of(args: argparse.Namespace, pipeline: Any) -> dict[str, Any]:
    """Size and conditions as the pipeline's arguments."""
    from videox_fun.pipeline import WanFunInpaintPipeline, WanPipeline
    from videox_fun.utils.utils import get_image_to_video_latent, get_video_to_video_latent

    if not isinstance(pipeline, WanPipeline | WanFunInpaintPipeline):
        raise ValueError(f"{args.model} is a control model; use videox_fun.pipeline.{type(pipeline).__name__}.")
    if isinstance(pipeline, WanPipeline) and (args.start_image or args.video):
        raise ValueError(f"{args.model} is a text-to-video model and takes no --start_image or --video.")
    height, width = size_of(args, pipeline)
    ratio = pipeline.temporal_ratio
    shot: dict[str, Any] = {}
    frames = args.num_frames
    if args.video:
        video, mask, _, _ = get_video_to_video_latent(args.video, frames, (height, width),
                                                      validation_video_mask=args.mask_image)
        frames = (video.shape[2] - 1) // ratio * ratio + 1
        shot = {"video": video[:, :, :frames], "mask_video": mask[:, :, :frames]}
    frames = (frames - 1) // ratio * ratio + 1
    if args.start_image:
        video, mask, picture = get_image_to_video_latent(args.start_image, args.end_image, frames, (height, width))
        shot = {"video": video, "mask_video": mask, "clip_image": picture}
    if frames != args.num_frames:
        say(f"{frames} frames instead of {args.num_frames}: the model makes {ratio}k+1 frames"
            f"{' of the clip' if args.video else ''}.")
    return {"height": height, "width": width, "num_frames": frames, **shot}


def file_name(number: int, prompt: str, seed: int, *, base: bool = False) -> str:
    """A name that every file system takes."""
    words = re.sub(r"[^\w]+", "-", prompt).strip("-")[:40].strip("-").lower() or "clip"
    return f"{number:02d}-{words}-seed{seed}{'-without-lora' if base else ''}.mp4"


def draw(pipeline: Any, args: argparse.Namespace, shot: dict[str, Any], *, base: bool = False) -> list[Any]:
    """All clips, written; each has a generator of its own, so none depends on the others."""
    import torch

    from videox_fun.pipeline.loading import NEGATIVE_PROMPT
    from videox_fun.utils.utils import save_videos_grid

    clips = []
    for number, prompt in enumerate(args.prompt):
        for seed in range(args.seed, args.seed + args.num_videos):
            pipeline.set_progress_bar_config(desc=f"{'without LoRA, ' if base else ''}prompt {number}, seed {seed}")
            video = pipeline(
                prompt=prompt, negative_prompt=NEGATIVE_PROMPT if args.negative_prompt is None
                else args.negative_prompt, num_inference_steps=args.num_inference_steps, shift=args.shift,
                guidance_scale=args.guidance_scale, generator=torch.Generator("cpu").manual_seed(seed), **shot,
            ).videos
            path = args.output / file_name(number, prompt, seed, base=base)
            save_videos_grid(video, path, fps=args.fps)
            say(f"  {os.path.relpath(path)}")
            clips.append(video[0])
    return clips


def merge(pipeline: Any, args: argparse.Namespace) -> None:
    from videox_fun.utils.lora_utils import merge_lora

    for path, weight in zip(args.lora_path, args.lora_weight or [1.0] * len(args.lora_path), strict=True):
        say(f"Merging {path} at {weight:g} ...")
        merge_lora(pipeline, path, weight)


def check_lora(pipeline: Any, args: argparse.Namespace) -> None:
    """Refuse files that do not fit. At strength 0 nothing changes."""
    from videox_fun.utils.lora_utils import merge_lora

    for path in args.lora_path:
        merge_lora(pipeline, path, 0.0)


def compare(args: argparse.Namespace, without: list[Any], with_lora: list[Any]) -> Path:
    """The sheet, with how much the LoRA files changed."""
    from videox_fun.utils.contact_sheet import make_comparison_sheet

    captions = [f"{prompt} (seed {seed})" for prompt in args.prompt
                for seed in range(args.seed, args.seed + args.num_videos)]
    groups = []
    for caption, before, after in zip(captions, without, with_lora, strict=True):
        change = (after - before).abs().mean().item()
        say(f"Mean change of pixels by the LoRA: {100 * change:.1f} % ({caption})")
        groups.append((caption, [("without LoRA", before), ("with LoRA", after)]))
    names = ", ".join(path.name for path in args.lora_path)
    return make_comparison_sheet(groups, args.output / "comparison.png", title=f"Without and with {names}")


def run(args: argparse.Namespace) -> None:
    check(args)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**31)
        say(f"Seed {args.seed}")
    pipeline = load(args)
    shot = shot_of(args, pipeline)
    without: list[Any] = []
    if args.compare:
        check_lora(pipeline, args)
        place(pipeline, args)
        without = draw(pipeline, args, shot, base=True)
    merge(pipeline, args)
    place(pipeline, args)
    clips = draw(pipeline, args, shot)
    if args.compare:
        say(f"Comparison: {os.path.relpath(compare(args, without, clips))}")


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except ValueError as error:
        if os.environ.get("VIDEOX_TRACEBACK"):
            raise
        print(f"generate.py: {error}", file=sys.stderr)
        return _USAGE
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        print("generate.py: the device is out of memory. Use --offload model (or sequential), fewer --num_frames, or "
              "a smaller --height and --width.", file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
