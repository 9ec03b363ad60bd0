"""Which settings make a run what it is, and how a saved run's compare with this one's.

Every state stores them; a resume with other values is named flag by flag and refused, because it would silently be
another run. Flags that only change speed, logging or length are not listed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videox_fun.training.checkpoint_io import CheckpointError, read_marker
from videox_fun.training.checkpoint_scan import Kind, latest_state, scan

logger = logging.getLogger(__name__)

_ADAPTER = ("rank", "network_alpha", "target_name", "lora_skip_name", "use_peft_lora", "train_text_encoder",
            "rank_drop_out", "module_drop_out", "neuron_drop_out", "lora_plus_ratio", "use_dora",
            "lora_exact_match")
_TRAINED = ("trainable_modules", "trainable_modules_low_learning_rate", "master_weights_fp32", "use_ema")
OPTIMIZER_SETTINGS = ("learning_rate", "learning_rate_low", "learning_rate_critic", "scale_lr", "lr_scheduler",
                      "lr_warmup_steps", "adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon")
_LENGTH = ("max_train_steps", "num_train_epochs")
_OPTIMIZER_KIND = ("use_8bit_adam", "use_came")
_GRADIENTS = ("max_grad_norm", "abnormal_norm_clip_start", "initial_grad_norm_ratio")
_DATA = ("train_batch_size", "gradient_accumulation_steps", "enable_bucket", "video_sample_size", "image_sample_size",
         "token_sample_size", "video_sample_stride", "video_sample_n_frames", "video_repeat", "random_ratio_crop",
         "fix_sample_size", "random_hw_adapt", "training_with_video_token_length", "random_frame_crop",
         "auto_tile_batch_size", "keep_all_node_same_token_length", "text_drop_ratio", "tokenizer_max_length",
         "enable_text_encoder_in_dataloader", "video_sample_fps", "id_token")
_OBJECTIVE = ("train_mode", "uniform_sampling", "train_sampling_steps", "weighting_scheme", "logit_mean", "logit_std",
              "mode_scale", "motion_sub_loss", "motion_sub_loss_ratio", "boundary_type", "control_ref_image",
              "gen_update_interval", "real_guidance_scale", "fake_guidance_scale", "denoising_step_indices_list")
_RUN = ("seed", "mixed_precision", "upstream_compat")
SETTINGS = (*_ADAPTER, *_TRAINED, *OPTIMIZER_SETTINGS, *_OPTIMIZER_KIND, *_GRADIENTS, *_DATA, *_OBJECTIVE, *_RUN)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def data_fingerprint(args: argparse.Namespace) -> str | None:
    """Hash of the annotation file: other rows or captions make another run, another path does not."""
    meta = getattr(args, "train_data_meta", None)
    if not meta or not Path(meta).is_file():
        return None
    digest = hashlib.sha256()
    with open(meta, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def run_settings(args: argparse.Namespace, *, script: str, world: int) -> dict[str, Any]:
    """The settings to store with a state, by flag name."""
    values = {f"--{name}": _plain(getattr(args, name)) for name in SETTINGS if hasattr(args, name)}
    values["script"] = script
    values["number of processes"] = world
    values["--train_data_meta (content)"] = data_fingerprint(args)
    values["--dataloader_num_workers (any)"] = bool(getattr(args, "dataloader_num_workers", 0))
    if not str(getattr(args, "lr_scheduler", "constant")).startswith("constant"):
        name = "max_train_steps" if getattr(args, "max_train_steps", None) else "num_train_epochs"
        values[f"--{name}"] = getattr(args, name, None)
    return values


def changed_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """``name -> (saved, asked)`` of what differs; names that one side does not know are left out."""
    return {name: (saved[name], value) for name, value in current.items() if name in saved and saved[name] != value}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name}: saved {old}, asked {new}" for name, (old, new) in changes.items())


def optimizer_changed(changes: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether learning rate, schedule or Adam constants are among the changes."""
    return any(name == f"--{flag}" for name in changes for flag in (*OPTIMIZER_SETTINGS, *_LENGTH))


def saved_seed(args: argparse.Namespace) -> int | None:
    """Seed of the state that ``--resume_from_checkpoint`` will pick.

    A run started without ``--seed`` drew one; resuming it without the flag must go on with that one, before anything
    is seeded. ``None`` when there is nothing to resume or no seed is recorded.
    """
    asked = getattr(args, "resume_from_checkpoint", None)
    if not asked:
        return None
    output_dir = Path(args.output_dir)
    if asked == "latest":
        entry = latest_state([e for e in scan(output_dir) if e.kind is Kind.STATE])
        folder = entry.path if entry else None
    else:
        folder = next((p for p in (output_dir / Path(asked).name, Path(asked)) if p.is_dir()), None)
    if folder is None:
        return None
    try:
        marker = read_marker(folder)
    except CheckpointError:
        return None
    return ((marker or {}).get("settings") or {}).get("--seed")
