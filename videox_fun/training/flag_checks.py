"""What a command line can be refused for before anything is loaded.

Each check raises ``ValueError`` with a sentence that names the flag and says what to write instead. Checks that touch
the disk are apart from those that only look at values. Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from videox_fun.training.specs import ScriptSpec
from videox_fun.utils.suggest import describe_missing, did_you_mean

LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
                 "piecewise_constant")
TRAIN_MODES = ("normal", "inpaint", "i2v", "ti2v", "control", "control_ref", "control_camera_ref")

_AT_LEAST_ONE = ("train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_train_steps",
                 "vae_mini_batch", "video_sample_n_frames", "video_sample_stride", "video_sample_size",
                 "image_sample_size", "token_sample_size", "checkpointing_steps", "checkpoints_total_limit",
                 "validation_steps", "validation_epochs", "validation_inference_steps", "validation_loss_steps",
                 "validation_loss_samples", "validation_loss_levels", "train_sampling_steps", "tokenizer_max_length",
                 "rank", "network_alpha")
_AT_LEAST_ZERO = ("dataloader_num_workers", "lr_warmup_steps", "video_repeat", "learning_rate", "learning_rate_low",
                  "max_grad_norm", "max_data_errors", "seed", "abnormal_norm_clip_start", "initial_grad_norm_ratio")
_SHARES = ("text_drop_ratio", "motion_sub_loss_ratio", "selective_ac")
_BELOW_ONE = ("rank_drop_out", "module_drop_out", "neuron_drop_out", "adam_beta1", "adam_beta2")
_NEEDS_BUCKETS = ("fix_sample_size", "random_hw_adapt", "random_ratio_crop", "training_with_video_token_length")


def check_values(args: argparse.Namespace, spec: ScriptSpec) -> None:
    """Refuse values and combinations that cannot work."""
    _check_ranges(args)
    _check_names(args, spec)
    _check_optimizer(args)
    if spec.trainable == "named":
        _check_trainable_modules(args)
    else:
        _check_lora(args)
    _check_validation(args)
    if args.report_to == "wandb" and getattr(args, "hub_token", None):
        raise ValueError("--report_to wandb would record --hub_token; leave --hub_token out.")


def _check_ranges(args: argparse.Namespace) -> None:
    for names, low, words in ((_AT_LEAST_ONE, 1, "1 or more"), (_AT_LEAST_ZERO, 0, "0 or more")):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and value < low:
                raise ValueError(f"--{name} {value}: the value must be {words}.")
    for name in _SHARES:
        value = getattr(args, name, None)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"--{name} {value}: the value is a share and must lie between 0 and 1.")
    for name in _BELOW_ONE:
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"--{name} {value}: the value must be at least 0 and below 1.")
    size = getattr(args, "fix_sample_size", None)
    if size is not None and min(size) < 16:
        raise ValueError(f"--fix_sample_size {size[0]} {size[1]}: height and width must be 16 or more.")


def _check_names(args: argparse.Namespace, spec: ScriptSpec) -> None:
    if args.lr_scheduler not in LR_SCHEDULERS:
        raise ValueError(f"--lr_scheduler {args.lr_scheduler} is not known."
                         f"{did_you_mean(args.lr_scheduler, LR_SCHEDULERS)} Known: {', '.join(LR_SCHEDULERS)}.")
    mode = getattr(args, "train_mode", "normal")
    if mode not in (*TRAIN_MODES, spec.defaults.get("train_mode")):
        raise ValueError(f"--train_mode {mode} is not known.{did_you_mean(mode, TRAIN_MODES)}"
                         f" Known: {', '.join(TRAIN_MODES)}.")


def _check_optimizer(args: argparse.Namespace) -> None:
    if args.use_8bit_adam and args.use_came:
        raise ValueError("--use_8bit_adam and --use_came both choose the optimizer; keep one of them.")
    if args.fused_optimizer and (args.use_8bit_adam or args.use_came):
        other = "--use_8bit_adam" if args.use_8bit_adam else "--use_came"
        raise ValueError(f"--fused_optimizer is AdamW's; {other} has no fused form. Keep one of them.")
    if args.prefetch_factor is not None and args.prefetch_factor < 1:
        raise ValueError(f"--prefetch_factor must be at least 1, not {args.prefetch_factor}.")


def _check_trainable_modules(args: argparse.Namespace) -> None:
    if args.trainable_modules is None and not args.trainable_modules_low_learning_rate:
        raise ValueError("full fine-tuning needs --trainable_modules; '--trainable_modules .' trains every parameter, "
                         "'--trainable_modules attn' those whose name contains attn.")


def _check_lora(args: argparse.Namespace) -> None:
    if args.use_dora and not args.use_peft_lora:
        raise ValueError("--use_dora is PEFT's; add --use_peft_lora.")
    if getattr(args, "train_text_encoder", False) and not args.upstream_compat:
        raise ValueError("--train_text_encoder would train nothing: prompts are encoded without gradients. Leave it "
                         "out. (With --upstream_compat it is accepted and trains nothing, as upstream.)")
    if args.lora_plus_ratio is not None and args.lora_plus_ratio <= 0:
        raise ValueError(f"--lora_plus_ratio {args.lora_plus_ratio}: the value must be above 0; 16 is usual.")


def _check_validation(args: argparse.Namespace) -> None:
    prompts, paths = getattr(args, "validation_prompts", None), getattr(args, "validation_paths", None)
    if paths and not prompts:
        raise ValueError("--validation_paths needs --validation_prompts: one prompt for each path.")
    if paths and prompts and len(paths) != len(prompts):
        raise ValueError(f"--validation_paths has {len(paths)} and --validation_prompts {len(prompts)} entries; give "
                         "one path for each prompt.")


def check_paths(args: argparse.Namespace) -> None:
    """Refuse paths that do not exist, naming what lies beside them."""
    _need(args, "pretrained_model_name_or_path", folder=True)
    if args.pretrained_model_name_or_path is not None and getattr(args, "config_path", "") is None:
        raise ValueError("--config_path is needed: the yaml file for the model's family below config/.")
    _need(args, "config_path")
    for name in ("transformer_path", "vae_path", "init_lora_path"):
        if getattr(args, name, None) and not Path(getattr(args, name)).exists():
            raise ValueError(f"--{name}: {describe_missing(getattr(args, name))}")
    if getattr(args, "train_data_meta", "") is None:
        raise ValueError("--train_data_meta is needed: a csv, json or jsonl file whose rows have file_path, text and "
                         "type.")
    for name in ("train_data_meta", "validation_data_meta"):  # files, folders, or shards behind a pattern or a URL
        meta = getattr(args, name, None)
        if meta and not (meta.endswith(".tar") or "://" in meta or Path(meta).exists()):
            raise ValueError(f"--{name}: {describe_missing(meta)}")
    _need(args, "train_data_dir", folder=True)
    _need(args, "validation_data_dir", folder=True)
    for path in getattr(args, "validation_paths", None) or ():
        if not Path(path).exists():
            raise ValueError(f"--validation_paths: {describe_missing(path)}")


def _need(args: argparse.Namespace, name: str, *, folder: bool = False) -> None:
    value = getattr(args, name, None)
    if not value:
        return
    path = Path(value)
    if not path.exists():
        raise ValueError(f"--{name}: {describe_missing(path)}")
    if folder and not path.is_dir():
        raise ValueError(f"--{name}: {path.absolute()} is a file; a folder is needed.")
    if not folder and path.is_dir():
        raise ValueError(f"--{name}: {path.absolute()} is a folder; a file is needed.")


def without_effect(args: argparse.Namespace) -> list[str]:
    """One line for each flag that another flag makes pointless."""
    lines = _idle_validation(args)
    if not getattr(args, "enable_bucket", True):
        idle = [f"--{name}" for name in _NEEDS_BUCKETS if getattr(args, name, None)]
        if idle:
            lines.append(f"Without --enable_bucket these flags have no effect: {', '.join(idle)}.")
    if getattr(args, "auto_tile_batch_size", False) and not args.training_with_video_token_length:
        lines.append("--auto_tile_batch_size has no effect without --training_with_video_token_length.")
    if getattr(args, "multi_stream", False):
        lines.append("--multi_stream has no effect: the encoders share one CUDA stream.")
    if getattr(args, "selective_ac", 0) and args.gradient_checkpointing:
        lines.append("--selective_ac has no effect beside --gradient_checkpointing, which checkpoints every block.")
    if getattr(args, "initial_grad_norm_ratio", None) is not None and "initial_grad_norm_ratio" in args.explicit:
        if args.abnormal_norm_clip_start is None:
            lines.append("--initial_grad_norm_ratio has no effect without --abnormal_norm_clip_start.")
    return lines


def _idle_validation(args: argparse.Namespace) -> list[str]:
    lines = []
    for needed, names in (
        ("validation_prompts", ("validation_inference_steps", "validation_guidance_scale",
                                "validation_negative_prompt", "validation_clip_image")),
        ("validation_data_meta", ("validation_data_dir", "validation_loss_steps", "validation_loss_samples",
                                  "validation_loss_levels")),
    ):
        idle = [f"--{name}" for name in names if name in args.explicit]
        if idle and not getattr(args, needed, None):
            lines.append(f"Without --{needed} these flags have no effect: {', '.join(idle)}.")
    if getattr(args, "validation_paths", None) and args.train_mode == "normal":
        lines.append("--validation_paths has no effect with --train_mode normal.")
    return lines
