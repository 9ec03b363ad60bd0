"""The process's surroundings: accelerate, seeds, number formats.

accelerate supplies the process group, DDP, FSDP and DeepSpeed. Mixed precision is ours except under FSDP and DeepSpeed,
which bring their own: weights are held in the training type, so that no autocast has to convert them in every step.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.training.checkpoint_settings import saved_seed
from videox_fun.training.context import RunContext
from videox_fun.training.deepspeed_config import check_deepspeed_file, settle_deepspeed
from videox_fun.training.fsdp_config import keep_input_types, settle_fsdp
from videox_fun.training.residency import Residency
from videox_fun.training.state import RngStreams
from videox_fun.training.tracking import check_report_to

if TYPE_CHECKING:
    from accelerate import Accelerator

    from videox_fun.training.specs import ScriptSpec

logger = logging.getLogger(__name__)

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_COLLECTIVE_TIMEOUT = timedelta(hours=2)  # one rank may decode, save or sample while the others wait


def load_config(path: str | None) -> Any:
    """Read the model configuration; ``ValueError`` names the file when it is missing or not YAML."""
    from omegaconf import OmegaConf

    if path is None:
        return OmegaConf.create({})
    if not Path(path).is_file():
        raise ValueError(f"--config_path {path}: there is no such file.")
    try:
        return OmegaConf.load(path)
    except Exception as error:
        raise ValueError(f"--config_path {path} is not a readable YAML file: {error}") from error


def make_accelerator(args: argparse.Namespace) -> tuple[Accelerator, str]:
    """The accelerator and the precision in effect (``no``, ``fp16`` or ``bf16``)."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration

    configured = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and configured != "none":
        check_deepspeed_file(configured)
    settle_fsdp()
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = args.mixed_precision or (launched if launched in DTYPES else "no")
    if args.mixed_precision and launched in DTYPES and launched not in ("no", args.mixed_precision):
        logger.warning("The launcher says --mixed_precision %s, the script %s: the script's is used.", launched,
                       args.mixed_precision)
    sharded = any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
    accelerator = Accelerator(
        # As a plugin: a bare number gives way to one in the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps),
        mixed_precision=precision if sharded else "no",
        log_with=None if args.report_to in (None, "none") else args.report_to,
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, logging_dir=str(Path(args.output_dir) / args.logging_dir)
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT)],
    )
    if precision == "bf16" and accelerator.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ValueError(f"--mixed_precision bf16: {torch.cuda.get_device_name()} has no bfloat16. Use fp16.")
    keep_input_types(getattr(accelerator.state, "fsdp_plugin", None))
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        settle_deepspeed(plugin.deepspeed_config, args)
    return accelerator, precision


def agree_on_seed(args: argparse.Namespace, accelerator: Accelerator) -> int:
    """The given seed, that of the run being resumed, or one drawn on rank 0 and logged so that it can be repeated."""
    if args.seed is None:
        args.seed = saved_seed(args)
    if args.seed is not None:
        return args.seed
    drawn = torch.tensor([random.SystemRandom().randrange(2**31)], device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(drawn, src=0)
    logger.info("No --seed was given; drew --seed %d.", int(drawn))
    return int(drawn)


def make_context(spec: ScriptSpec, args: argparse.Namespace) -> RunContext:
    """Start the process group and seed every stream."""
    from optim_patches.registry import PatchManager

    config = load_config(args.config_path)
    check_report_to(args)
    accelerator, precision = make_accelerator(args)
    args.mixed_precision = precision
    args.seed = agree_on_seed(args, accelerator)
    if accelerator.is_main_process:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    rng = RngStreams(args.seed, rank=accelerator.process_index, device=accelerator.device)
    rng.seed_globals()
    if args.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    return RunContext(
        spec=spec, args=args, accelerator=accelerator, weight_dtype=DTYPES[precision], config=config, rng=rng,
        patches=PatchManager(args), residency=Residency(accelerator.device, low_vram=args.low_vram),
    )


def join_sequence_groups(ctx: RunContext) -> None:
    """Give the processes that share the tokens of a sample the same streams. To be called before anything is drawn."""
    outcome = ctx.patches.outcome("ulysses")
    if outcome is None or not outcome.verdict.ok:
        return
    from videox_fun.dist.mesh import make_mesh
    from videox_fun.dist.shared_work import SharedWork

    ctx.sequence_size = ctx.args.sequence_parallel_size
    group = make_mesh(ctx.layout, device=ctx.device.type).get_group("sequence")
    ctx.shared_work = SharedWork(group, device=ctx.device)
    ctx.rng = RngStreams(ctx.args.seed, rank=ctx.layout.data_rank, device=ctx.device)
    ctx.rng.seed_globals()


def sharding_stage(accelerator: Accelerator) -> int:
    """0 without sharding of gradients or weights, else the ZeRO stage that DeepSpeed or FSDP corresponds to."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        return int(plugin.zero_stage)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is None:
        return 0
    strategy = getattr(fsdp.sharding_strategy, "name", None)
    return {None: 3, "FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(strategy, 0)
