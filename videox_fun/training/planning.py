"""The memory plan of a training run, and what is done with it.

Before the process group starts, ``--optimize`` and ``--auto_fit`` change flags; what they set counts as given on the
command line. After the data are known and before weights load, the run is planned for the sizes it will really see:
``--plan`` prints that and ends, and a run that cannot fit is refused with what would make it fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from optim_patches.plan.fit import fit, fits
from optim_patches.plan.phases import Plan, make_plan
from optim_patches.plan.report import draw, fit_lines, summary, table, write_json
from optim_patches.plan.runs import Machines, spec_from_args
from optim_patches.plan.spec import RunSpec, Sample
from optim_patches.plan.traces import Traces

if TYPE_CHECKING:
    from videox_fun.data.module import DataModule
    from videox_fun.training.context import RunContext
    from videox_fun.training.specs import ScriptSpec

logger = logging.getLogger(__name__)

PLAN_JSON = "plan.json"
_SIZES = 4  # of many bucket sizes, the largest are planned
_REFUSALS = ("auto", "refuse")


class PlanShown(Exception):
    """``--plan`` has printed the plan; there is nothing left to do."""


def adapt(model: nn.Module, run: RunSpec) -> None:
    """Give a network without weights the adapters of a run."""
    from optim_patches.plan.denoiser import on_device

    chosen, device = run.adapters, next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    assert chosen is not None
    with device:
        if chosen.peft:
            _peft(model, run)
        else:
            from videox_fun.utils.lora_network import create_network

            network = create_network(1.0, chosen.rank, chosen.alpha, None, model, target_name=chosen.targets,
                                     skip_name=chosen.skips, exact_target=chosen.exact)
            network.apply_to(None, model, False, True)
            model.network = on_device(network, device, dtype).requires_grad_(True)


def _peft(model: nn.Module, run: RunSpec) -> None:
    """PEFT's layers. It moves what it makes with ``Module.to``, which a fake mode cannot do: so on the meta device."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from optim_patches.plan.denoiser import on_device
    from videox_fun.utils.lora_network import split_names

    chosen = run.adapters
    targets = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and any(
        name == target or name.endswith("." + target) for target in split_names(chosen.targets))]
    config = LoraConfig(r=chosen.rank, lora_alpha=chosen.alpha, target_modules=targets, use_dora=chosen.dora)
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    with unset_fake_temporarily(), torch.device("meta"):
        inject_adapter_in_model(config, on_device(model, torch.device("meta")), low_cpu_mem_usage=True)
    on_device(model, device)
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith("lora_"):
            on_device(module, device, dtype)  # as the trainer keeps what it trains
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


# ---- before anything starts --------------------------------------------------------------------------------------


def change_flags(spec: ScriptSpec, args: argparse.Namespace) -> None:
    """Do what ``--optimize`` and ``--auto_fit`` say, on the parsed flags."""
    if getattr(args, "optimize", None):
        from videox_fun.training.optimize import apply_advice

        apply_advice(spec, args)
    if getattr(args, "auto_fit", None) is None:
        return
    if args.auto_fit <= 0:
        raise ValueError(f"--auto_fit {args.auto_fit:g}: give the memory of the device in GB.")
    device = "cuda" if args.plan_gpu_gb or _cuda() else "cpu"
    if device == "cpu":
        logger.warning("--auto_fit: there is no GPU here; changes are chosen as for one of %g GB.", args.auto_fit)
    traces = Traces(adapt)
    run = describe(spec, args, device="cuda")
    found = fit(run, traces, device_gb=args.auto_fit, packages=_packages())
    for line in fit_lines(found, device_gb=args.auto_fit):
        logger.info("%s", line)
    if not found.fits:
        raise ValueError("--auto_fit: " + "; ".join(fit_lines(found, device_gb=args.auto_fit)))
    for change in found.changes:
        set_flags(args, change.flags)


def set_flags(args: argparse.Namespace, flags: Any) -> None:
    """Set flags as if they had been given."""
    for name, value in dict(flags).items():
        setattr(args, name, value)
        args.explicit = frozenset({*args.explicit, name})


def describe(
    spec: ScriptSpec, args: argparse.Namespace, *, device: str, machines: Machines | None = None,
    samples: list[Sample] | None = None, denoiser_config: dict[str, Any] | None = None,
) -> RunSpec:  # fmt: skip
    """The planner's view of a parsed command line."""
    from omegaconf import OmegaConf

    from videox_fun.training.launch import load_config

    config = OmegaConf.to_container(load_config(args.config_path))
    if not args.mixed_precision:
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        args = argparse.Namespace(**{**vars(args), "mixed_precision": launched})
    return spec_from_args(args, script_id=spec.id, config=config, device=device,
                          machines=machines or machines_of(os.environ), samples=samples,
                          denoiser_config=denoiser_config)  # fmt: skip


def machines_of(environ: Any) -> Machines:
    """What the launcher says about processes and sharding."""
    world, local = int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_WORLD_SIZE", "0"))
    local = local or world
    if environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        from optim_patches.plan.zero import read_zero

        return read_zero(environ, world=world, local=local)
    if environ.get("ACCELERATE_USE_FSDP") == "true":
        strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        stage = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2}.get(strategy, 0)
        offload = environ.get("FSDP_OFFLOAD_PARAMS", "false") == "true"
        return Machines(world, local, "fsdp", stage, offload, offload)
    return Machines(world, local)


# ---- before weights ----------------------------------------------------------------------------------------------


def before_weights(ctx: RunContext, data: DataModule | None, denoiser_config: dict[str, Any]) -> Plan | None:
    """Plan the run where that is wanted. Raises ``PlanShown`` or, for a run that cannot fit, ``ValueError``."""
    args, cuda = ctx.args, ctx.device.type == "cuda"
    policy = args.plan_policy if args.plan_policy != "auto" else ("auto" if cuda else "off")
    if policy == "off" and not args.plan:
        return None
    device = "cuda" if cuda or args.plan_gpu_gb else "cpu"
    traces = Traces(adapt)
    try:
        run = describe(ctx.spec, args, device=device, samples=samples_of(args, data), denoiser_config=denoiser_config)
        plan = make_plan(run, traces)
    except Exception as error:  # a plan that cannot be made must not keep a run from starting
        if args.plan or args.plan_policy == "refuse":
            raise ValueError(f"No memory plan can be made of this run: {error}") from error
        logger.warning("No memory plan can be made of this run: %s", error)
        return None
    device_gb, host_gb = capacity(args, cuda=cuda)
    if ctx.is_main:
        _show(args, plan, device_gb, host_gb)
    if args.plan:
        raise PlanShown
    if fits(plan, device_gb=device_gb):
        if host_gb is not None and plan.host_bytes > host_gb * 1e9:
            logger.warning("This run is predicted to need %.0f GB of host memory, and there are %.0f GB.",
                           plan.host_bytes / 1e9, host_gb)
        return plan
    found = fit(run, traces, device_gb=device_gb, packages=_packages())
    text = " ".join([f"This run is predicted to need {plan.device_bytes / 1e9:.1f} GB and the device has "
                     f"{device_gb:.1f} GB.", *fit_lines(found, device_gb=device_gb)])
    if policy in _REFUSALS:
        raise ValueError(f"{text} (--auto_fit {device_gb:.4g} applies this; --plan_policy warn runs as it is.)")
    logger.warning("%s", text)
    return plan


def samples_of(args: argparse.Namespace, data: DataModule | None) -> list[Sample] | None:
    """The largest of the sizes that the data will be given."""
    if data is None:
        return None
    outcomes = {(o.frames, o.height, o.width) for group in data.summary().groups for o in group.outcomes}
    largest = sorted(outcomes, key=lambda size: size[0] * size[1] * size[2], reverse=True)[:_SIZES]
    return [Sample(frames, height // 16 * 16, width // 16 * 16, args.train_batch_size)
            for frames, height, width in largest] or None


def capacity(args: argparse.Namespace, *, cuda: bool) -> tuple[float | None, float | None]:
    """GB of the device (free now, or ``--plan_gpu_gb``) and of the host."""
    device = args.plan_gpu_gb
    if device is None and cuda:
        import torch

        device = torch.cuda.mem_get_info()[0] / 1e9
    return device, host_memory()


def host_memory() -> float | None:
    """GB of memory this machine has, or its control group allows."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        pass
    return total / 1e9


def _show(args: argparse.Namespace, plan: Plan, device_gb: float | None, host_gb: float | None) -> None:
    lines = summary(plan, device_gb=device_gb, host_gb=host_gb)
    if args.plan:
        sys.stdout.write("\n".join([*table(plan), "", *lines]) + "\n")
    else:
        for line in lines:
            logger.info("%s", line)
    written = [write_json(plan, Path(args.output_dir) / PLAN_JSON)]
    if args.plan_png:
        written.append(draw(plan, Path(args.plan_png), device_gb=device_gb))
    for path in written:
        logger.info("written: %s", path)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _packages() -> frozenset[str]:
    from optim_patches.audit.facts import installed_packages

    return installed_packages()
