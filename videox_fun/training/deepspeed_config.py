"""Looks through a DeepSpeed configuration before anything loads.

DeepSpeed passes over a top-level key that it does not know, so that a slip of the pen costs a run without the thing
asked for; inside a section it stops, minutes later. Here a key that is misspelt or stands in the wrong section is an
error that names the right one. A key that resembles nothing known is only warned of: DeepSpeed may be newer than this
list. Settings that need each other (ZeRO++ and stage 3, NVMe and its path) are checked as well.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from videox_fun.utils.suggest import describe_missing, nearest

logger = logging.getLogger(__name__)

_OFFLOAD = ("device", "nvme_path", "buffer_count", "buffer_size", "pin_memory")
_FREE = "*"  # a section whose keys belong to somebody else: an optimizer's parameters, a tracker's settings
#: Keys by section. A section inside another is named with a dot.
KEYS: dict[str, tuple[str, ...]] = {
    "": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
        "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
        "communication_data_type", "seq_parallel_communication_data_type", "disable_allgather", "dump_state",
        "wall_clock_breakdown", "memory_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "graph_harvesting", "use_data_before_expert_parallel", "bf16", "bfloat16", "fp16", "amp", "torch_autocast",
        "optimizer", "scheduler", "zero_optimization", "activation_checkpointing", "aio", "flops_profiler",
        "comms_logger", "checkpoint", "data_types", "autotuning", "compile", "elasticity", "nebula",
        "hybrid_engine", "tensor_parallel", "data_efficiency", "curriculum_learning", "compression_training",
        "progressive_layer_drop", "eigenvalue", "tensorboard", "wandb", "csv_monitor", "comet", "pipeline",
        "sparse_attention", "sequence_parallel_size", "timers", "dataloader_drop_last", "weight_quantization",
    ),
    "bf16": ("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
             "bf16_optimizer_states"),
    "bfloat16": ("enabled", "immediate_grad_update", "check_grad_overflow"),
    "fp16": ("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
             "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
    "optimizer": ("type", "params", "legacy_fusion"), "optimizer.params": (_FREE,),
    "scheduler": ("type", "params"), "scheduler.params": (_FREE,),
    "zero_optimization": (
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
        "offload_param", "offload_optimizer", "sub_group_size", "cpu_offload", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "zenflow", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zeropp_loco_param", "mics_shard_size",
        "mics_hierarchical_params_gather", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    ),
    "zero_optimization.offload_param": (*_OFFLOAD, "max_in_cpu"),
    "zero_optimization.offload_optimizer": (*_OFFLOAD, "pipeline", "pipeline_read", "pipeline_write", "fast_init",
                                            "ratio", "super_offload", "cpuadam_cores_perc"),
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit", "overlap_events",
            "use_gds"),
    "activation_checkpointing": ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing",
                                 "number_checkpoints", "synchronize_checkpoint_boundary", "profile"),
    "flops_profiler": ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
                       "recompute_fwd_factor"),
    "comms_logger": ("enabled", "verbose", "prof_all", "prof_ops", "debug"),
    "checkpoint": ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
    "data_types": ("grad_accum_dtype",),
}  # fmt: skip
_ZEROPP = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")


def check_deepspeed_file(path: str | Path) -> None:
    """Read and look through a configuration file.

    Raises:
        ValueError: the file is missing or no JSON, or holds a key that stands for another one. All slips are named.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"DeepSpeed's configuration: {describe_missing(path)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"DeepSpeed's configuration {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"DeepSpeed's configuration {path} must be a JSON object.")
    check_deepspeed(config, name=str(path))


def check_deepspeed(config: Mapping[str, Any], *, name: str) -> None:
    """Look through a configuration that was read already. See :func:`check_deepspeed_file`."""
    errors: list[str] = []
    for section, key in _unknown(config):
        where = f"in {section}" if section else "at the top level"
        right = _right_place(section, key)
        if right:
            errors.append(f"{key!r} {where}: {right}")
        else:
            logger.warning("%s: %r %s is no key that is known here; DeepSpeed may ignore or refuse it.", name, key,
                           where)
    errors += _unmet(config)
    if errors:
        raise ValueError(f"DeepSpeed's configuration {name}: " + " ".join(errors))


def settle_deepspeed(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Put the script's own numbers where DeepSpeed's configuration leaves them open.

    DeepSpeed divides each loss by its number of micro-steps, so that number must be the trainer's. 1 is what
    ``accelerate launch`` passes unless it is told; another number contradicts the script and is named.
    """
    if config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        config["train_micro_batch_size_per_gpu"] = args.train_batch_size
    steps = args.gradient_accumulation_steps
    if config.get("gradient_accumulation_steps") not in (None, "auto", 1, steps):
        logger.warning("DeepSpeed's configuration says gradient_accumulation_steps %s, the script %d: the script's is "
                       "used.", config["gradient_accumulation_steps"], steps)
    config["gradient_accumulation_steps"] = steps
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = float(args.max_grad_norm)
    elif not config.get("gradient_clipping"):
        logger.warning("DeepSpeed clips gradients itself, and its configuration has no gradient_clipping: "
                       "--max_grad_norm %g does nothing. Add \"gradient_clipping\": \"auto\".", args.max_grad_norm)
    elif float(config["gradient_clipping"]) != float(args.max_grad_norm):
        logger.warning("DeepSpeed's configuration clips gradients at %s, so --max_grad_norm %g does nothing.",
                       config["gradient_clipping"], args.max_grad_norm)


def _unknown(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    known = KEYS.get(section)
    if known is None or _FREE in known:
        return
    for key, value in config.items():
        inner = f"{section}.{key}" if section else key
        if key not in known:
            if not key.startswith("_") and "comment" not in key:
                yield section, key
        elif isinstance(value, Mapping):
            yield from _unknown(value, inner)


def _right_place(section: str, key: str) -> str:
    """What to write instead of an unknown key, or an empty string when nothing is near."""
    homes = [home for home, keys in KEYS.items() if key in keys and home != section]
    if homes and len(homes) <= 4:
        return f"it belongs {' or '.join(f'into {home}' if home else 'to the top level' for home in homes)}."
    match = nearest(key, KEYS[section], cutoff=0.75)
    if match:
        return f"did you mean {match!r}?"
    for home, keys in KEYS.items():
        match = nearest(key, keys, cutoff=0.85)
        if match:
            return f"did you mean {match!r}{f' in {home}' if home else ' at the top level'}?"
    return ""


def _unmet(config: Mapping[str, Any]) -> list[str]:
    """Settings that lack what they need."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    unmet = []
    on = [key for key in _ZEROPP if zero.get(key) not in (None, False, 0, 1) or zero.get(key) is True]
    if on and zero.get("stage") not in (3, "auto"):
        unmet.append(f"{on[0]!r} is ZeRO++ and needs zero_optimization.stage 3, not {zero.get('stage', 'none')}.")
    for part in ("offload_param", "offload_optimizer"):
        section = zero.get(part)
        if not isinstance(section, Mapping):
            continue
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            unmet.append(f"{part} to nvme needs nvme_path, a folder on the fast disk.")
        if section.get("device") == "nvme" and zero.get("stage") not in (3, "auto"):
            unmet.append(f"{part} to nvme needs zero_optimization.stage 3, not {zero.get('stage', 'none')}.")
        if part == "offload_param" and section.get("device") == "cpu" and zero.get("stage") in (0, 1, 2):
            unmet.append("offload_param needs zero_optimization.stage 3; below it weights are not split.")
    return list(dict.fromkeys(unmet))
