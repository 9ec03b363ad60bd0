"""Builders for audit tests: a launch command on a described machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optim_patches.audit.facts import Facts, Surroundings, facts_from_launch
from optim_patches.audit.hardware import parse_gpu
from optim_patches.audit.metadata import DataFacts
from optim_patches.audit.project import CodeFacts, Project, load_project

PACKAGES = "flash_attn bitsandbytes liger_kernel triton deepspeed peft"
BASE = {
    "pretrained_model_name_or_path": "w/Wan2.1-Fun-1.3B-InP",
    "config_path": "config/wan2.1/wan_civitai.yaml",
    "train_data_meta": "meta-that-is-elsewhere.json",
    "train_mode": "inpaint",
    "train_batch_size": "1",
    "seed": "1",
}


def command(
    flags: str = "", *, script: str = "wan2.1_fun/train_lora", launcher: str = "", env: str = "", program: str = "",
    model: str | None = None, without: str = "",
) -> str:  # fmt: skip
    """A launch command: the base flags, minus ``without``, plus ``flags``."""
    base = {**BASE, **({"pretrained_model_name_or_path": f"w/{model}"} if model else {})}
    kept = [f"--{name}={value}" for name, value in base.items() if name not in without.split()]
    start = program or f"accelerate launch {launcher}"
    path = script if "/" in script and script.startswith(("scripts", "examples")) else f"scripts/{script}.py"
    return " ".join(part for part in (env, start.strip(), path, *kept, flags) if part)


def make_facts(
    flags: str = "",
    *,
    gpu: str | None = "A100 80GB",
    gpus: int | None = 1,
    packages: str | None = PACKAGES,
    goal: str = "balanced",
    target: str = "own",
    host_ram: float | None = None,
    data: dict[str, Any] | None = None,
    calls: str = "",
    project: Project | None = None,
    **launch: Any,
) -> Facts:
    """Facts of a command on a machine. ``data`` fills :class:`DataFacts`, ``calls`` names calls of the script."""
    project = project or Project()
    loaded = load_project([], commands=[command(flags, **launch)])
    project.launches, project.problems = loaded.launches, loaded.problems
    around = Surroundings(
        parse_gpu(gpu) if gpu else None, gpus, None if packages is None else frozenset(packages.split()), target, goal,
        host_ram,
    )  # fmt: skip
    facts = facts_from_launch(project.launches[0], project, around)
    if data is not None:
        facts.data = DataFacts("meta.json", **data)
    if calls:
        facts.code = CodeFacts(calls=set(calls.split()), keywords=set(calls.split()))
    return facts


def write(path: Path, text: str | bytes) -> Path:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


FIXED = "--fix_sample_size 256 256 --enable_bucket --video_sample_size=256 --video_sample_n_frames=17"
ZERO2 = "--use_deepspeed --deepspeed_config_file /nowhere/zero_stage2_config.json"
ZERO3 = "--use_deepspeed --deepspeed_config_file /nowhere/zero_stage3_config.json"
OFFLOAD = "--use_deepspeed --deepspeed_config_file /nowhere/zero_stage3_config_cpu_offload.json"
FSDP = ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_transformer_layer_cls_to_wrap WanAttentionBlock "
        "--fsdp_backward_prefetch BACKWARD_PRE --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP")  # fmt: skip
