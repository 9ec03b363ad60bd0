"""Every command line flag, declared once.

A row is a name, one line of help and the keyword arguments of ``ArgumentParser.add_argument``. Rows lie in groups; a
script's command line is the groups named in its ``ScriptSpec.flag_groups``, with the defaults of
``ScriptSpec.defaults``. An entry of ``flag_groups`` that starts with ``--`` adds a single flag of any group, and one
that starts with ``!--`` takes a single flag away, so a script that differs from its relatives by one flag needs no
group of its own.

The groups up to ``ignored`` hold the flags that scripts written for this interface already use: their names, types,
defaults and choices are frozen by ``tests/unit/test_flags.py``. The groups ``own*`` hold this project's additions, and
the optimization layer contributes the flags of its patches itself. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from videox_fun.data.storage import DATA_FORMATS


@dataclass(frozen=True)
class Flag:
    """One command line flag.

    Attributes:
        name: the option string with its dashes.
        help: one line, in words a user of the script understands.
        kwargs: keyword arguments for ``add_argument`` (type, default, choices, nargs, action, required).
        group: the group the row was declared in.
        own: true for flags that are an addition of this project; an abbreviation that fits a flag of the original
            interface keeps its meaning even when an addition starts with the same letters.
    """

    name: str
    help: str
    kwargs: Mapping[str, Any]
    group: str = ""
    own: bool = False

    @property
    def dest(self) -> str:
        """Attribute name in the parsed namespace."""
        return self.name.removeprefix("--")

    @property
    def takes_value(self) -> bool:
        """False for switches."""
        return not str(self.kwargs.get("action", "")).startswith("store_")


Row = tuple[str, str, dict[str, Any]]


def _switch(name: str, text: str, **kwargs: Any) -> Row:
    return name, text, {"action": "store_true", **kwargs}


def _value(name: str, text: str, kind: type = str, default: Any = None, **kwargs: Any) -> Row:
    return name, text, {"type": kind, "default": default, **kwargs}


def _words(name: str, text: str, default: Any = None, **kwargs: Any) -> Row:
    return name, text, {"nargs": "+", "default": default, **kwargs}


GROUP_TITLES: dict[str, str] = {
    "model": "model files",
    "data": "data and sampling of clips",
    "optim": "optimizer and gradients",
    "schedule": "length of the run, noise levels, loss",
    "checkpoint": "checkpoints",
    "validation": "validation during training",
    "logging": "logging",
    "runtime": "precision, memory, distribution",
    "lora": "LoRA",
    "full": "full fine-tuning",
    "selective_ac": "fractional activation checkpointing",
    "ignored": "accepted for compatibility, without effect",
    "own": "additions of this project",
    "own_validation": "validation (additions of this project)",
    "own_lora": "additions for LoRA",
    "own_named": "additions for full fine-tuning",
    "own_cache": "encode once (additions of this project)",
    "patches": "optimization layer",
}

_ROWS: dict[str, tuple[Row, ...]] = {
    "model": (
        _value("--pretrained_model_name_or_path", "Local folder of the base model; sub-paths come from the yaml.",
               required=True),
        _value("--config_path", "Yaml file naming the model's parts: the one for the model's family below config/."),
        _value("--transformer_path", "Weights loaded over the base transformer before training starts."),
        _value("--vae_path", "Weights loaded over the base VAE."),
        _value("--tokenizer_max_length", "Prompts are padded and cut to this many tokens.", int, 512),
        _value("--train_mode", "Conditioning: normal (text only), inpaint, i2v, ti2v, control, control_ref, "
               "control_camera_ref.", default="normal"),
    ),
    "data": (
        _value("--train_data_dir", "Folder that relative paths in the annotation file start from."),
        _value("--train_data_meta", "Annotation file (csv, json or jsonl): file_path, text, type, optional sizes."),
        _value("--train_batch_size", "Clips per process and micro-step.", int, 16),
        _value("--dataloader_num_workers", "Worker processes that decode clips; 0 decodes in the training process.",
               int, 0),
        _value("--video_sample_size", "Base edge length of videos, in pixels.", int, 512),
        _value("--image_sample_size", "Base edge length of images, in pixels.", int, 512),
        _value("--token_sample_size", "Edge length that, with the frame count, sets the token budget.", int, 512),
        _value("--video_sample_stride", "Take every n-th frame of a video.", int, 4),
        _value("--video_sample_n_frames", "Most frames taken from a video.", int, 17),
        _value("--video_repeat", "Repeat video rows this many times after the image rows; 0 keeps the file's order.",
               int, 0),
        _value("--fix_sample_size", "Height and width for every clip (needs --enable_bucket).", int, nargs=2),
        _switch("--enable_bucket", "Batch clips of similar aspect ratio instead of cropping squares."),
        _switch("--random_ratio_crop", "Crop to a randomly drawn aspect ratio."),
        _switch("--random_hw_adapt", "Randomly lower the resolution of a batch."),
        _switch("--random_frame_crop", "Sometimes train on fewer frames of the clip."),
        _switch("--training_with_video_token_length", "Trade resolution against frames within the token budget."),
        _switch("--auto_tile_batch_size", "Repeat small batches 2x or 4x so that they use the token budget."),
        _switch("--keep_all_node_same_token_length", "Draw the same clip length on all ranks in each step."),
        _switch("--enable_text_encoder_in_dataloader", "Encode prompts while batches are collated, on the CPU."),
    ),
    "optim": (
        _value("--learning_rate", "Peak learning rate.", float, 1e-4),
        _switch("--scale_lr", "Multiply the learning rate by accumulation x batch x processes.", default=False),
        _value("--lr_scheduler", "constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, "
               "piecewise_constant.", default="constant"),
        _value("--lr_warmup_steps", "Optimizer steps over which the learning rate rises.", int, 500),
        _switch("--use_8bit_adam", "AdamW with 8-bit state (bitsandbytes)."),
        _switch("--use_came", "The CAME optimizer (came-pytorch)."),
        _value("--adam_beta1", "AdamW: decay of the gradient average.", float, 0.9),
        _value("--adam_beta2", "AdamW: decay of the squared-gradient average.", float, 0.999),
        _value("--adam_weight_decay", "AdamW: decoupled weight decay.", float, 1e-2),
        _value("--adam_epsilon", "AdamW: term added to the denominator.", float, 1e-8),
        _value("--max_grad_norm", "Gradients are scaled down to at most this norm.", float, 1.0),
        _switch("--use_ema", "Average the weights over the steps (full fine-tuning; ignored for LoRA)."),
    ),
    "schedule": (
        _value("--seed", "Seed of the run; drawn and logged when it is not given.", int),
        _value("--num_train_epochs", "Passes over the data when --max_train_steps is not given.", int, 100),
        _value("--max_train_steps", "Optimizer steps to run.", int),
        _value("--gradient_accumulation_steps", "Micro-steps per optimizer step.", int, 1),
        _value("--train_sampling_steps", "Number of noise levels that uniform sampling draws from.", int, 1000),
        _switch("--uniform_sampling", "Draw noise levels uniformly, spread over the ranks."),
        _value("--weighting_scheme", "Distribution of noise levels and weight of the loss.", default="none",
               choices=["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"]),
        _value("--logit_mean", "logit_normal: mean.", float, 0.0),
        _value("--logit_std", "logit_normal: standard deviation.", float, 1.0),
        _value("--mode_scale", "mode: scale.", float, 1.29),
        _switch("--motion_sub_loss", "Mix in a loss on the differences of neighbouring latent frames."),
        _value("--motion_sub_loss_ratio", "Share of that loss.", float, 0.25),
    ),
    "checkpoint": (
        _value("--output_dir", "Folder for checkpoints, logs and samples.", default="sd-model-finetuned"),
        _value("--checkpointing_steps", "Save every n optimizer steps.", int, 500),
        _value("--checkpoints_total_limit", "Keep at most this many checkpoints.", int),
        _value("--resume_from_checkpoint", "'latest', the name of a checkpoint under --output_dir, or a path."),
    ),
    "validation": (
        _value("--validation_prompts", "Prompts sampled during training.", nargs="+"),
        _value("--validation_paths", "Start images or control videos, one per prompt.", nargs="+"),
        _value("--validation_steps", "Sample every n optimizer steps.", int, 2000),
        _value("--validation_epochs", "Sample every n epochs.", int, 5),
    ),
    "logging": (
        _value("--report_to", "Tracker: tensorboard, wandb, comet_ml and others, all, or none.", default="tensorboard"),
        _value("--logging_dir", "Tracker folder below --output_dir.", default="logs"),
        _value("--tracker_project_name", "Project name shown by the tracker.", default="text2image-fine-tune"),
    ),
    "runtime": (
        _value("--mixed_precision", "no (fp32), fp16 or bf16; the launcher's choice when not given.",
               choices=["no", "fp16", "bf16"]),
        _switch("--allow_tf32", "Allow TF32 matrix products on Ampere and newer."),
        _switch("--gradient_checkpointing", "Recompute activations of each block in the backward pass."),
        _switch("--low_vram", "Keep VAE and encoders on the CPU while the transformer runs."),
        _value("--vae_mini_batch", "Clips encoded by the VAE at a time.", int, 32),
        _switch("--multi_stream", "Accepted; the encoders share one CUDA stream."),
        _switch("--use_deepspeed", "Set by the launcher when DeepSpeed is configured."),
        _switch("--use_fsdp", "Set by the launcher when FSDP is configured."),
        _value("--local_rank", "Set by the launcher; the environment variable LOCAL_RANK wins.", int, -1),
    ),
    "lora": (
        _value("--rank", "Rank of the low-rank update.", int, 128),
        _value("--network_alpha", "Scale of the update is alpha / rank.", int, 64),
        _value("--target_name", "Comma list of names; linear layers whose path contains one of them are adapted."),
        _value("--lora_skip_name", "Comma list of names; layers whose path contains one of them are left alone."),
        _switch("--use_peft_lora", "Adapt with the PEFT library; --target_name then means exact layer names."),
        _switch("--train_text_encoder", "Refused: prompts are encoded without gradients, so it would train nothing."),
        _switch("--save_state", "Save a resumable state folder instead of a bare LoRA file."),
    ),
    "full": (
        ("--trainable_modules", "Parameters whose name contains one of these words are trained; '.' trains all.",
         {"nargs": "+"}),
        _words("--trainable_modules_low_learning_rate", "Like --trainable_modules, at half the learning rate.",
               default=[]),
        _value("--abnormal_norm_clip_start", "Step from which gradient norms far above the limit are cut further.",
               int, 1000),
        _value("--initial_grad_norm_ratio", "The gradient limit starts at this multiple of --max_grad_norm.", int, 5),
        _switch("--report_model_info", "Write gradient norms of the parameters to TensorBoard."),
    ),
    "selective_ac": (
        _value("--selective_ac", "Checkpoint this share of the blocks when --gradient_checkpointing is off.", float, 0),
    ),
    "ignored": (
        _value("--cache_dir", "Download cache."),
        _value("--revision", "Hub revision."),
        _value("--non_ema_revision", "Hub revision of raw weights."),
        _value("--variant", "Hub weight variant."),
        _switch("--push_to_hub", "Upload after training."),
        _value("--hub_token", "Hub token; refused together with --report_to wandb, which would record it."),
        _value("--hub_model_id", "Hub repository."),
        _value("--max_train_samples", "Cut the data set.", int),
        _switch("--random_flip", "Mirror images."),
        _value("--noise_offset", "Offset noise.", float, 0),
        _value("--input_perturbation", "Perturb the input noise.", float, 0),
        _value("--prediction_type", "Prediction target."),
        _switch("--snr_loss", "Weight by signal-to-noise ratio."),
    ),
    "own": (
        _switch("--upstream_compat", "Reproduce known defects of VideoX-Fun where a correction changes numbers."),
        _value("--text_drop_ratio", "Share of prompts replaced by the empty prompt.", float, 0.1),
        _value("--max_data_errors", "Stop after this many unreadable rows (else when none is readable).", int),
        _switch("--fused_optimizer", "Update all tensors of AdamW in one kernel (torch's fused implementation)."),
        _value("--bucket_mode", "Batches of an epoch: upstream keeps rows that fill no batch for later; complete "
               "sees every row once; balanced also lets ranks work on batches of like cost.", default="upstream",
               choices=["upstream", "complete", "balanced"]),
        _value("--data_format", "What --train_data_meta is: an annotation file, a folder of lists (prompts.txt, "
               "videos.txt), a folder of clips with NAME.txt, or tar shards; auto looks at it.", default="auto",
               choices=list(DATA_FORMATS)),
        _value("--id_token", "Word put in front of every caption and validation prompt, for a concept to bind to."),
        _value("--video_sample_fps", "Sample clips at this many frames per second, by their time stamps, instead of "
               "every n-th frame.", float),
        _value("--prefetch_factor", "Batches that each loader worker reads ahead (2 unless given).", int),
        _switch("--allow_partial_load", "Train although weights are missing from the checkpoint or left over."),
        _switch("--allow_resume_changes", "Resume although settings of the saved run differ."),
        _switch("--master_weights_fp32", "Keep trained parameters in fp32 whatever the compute precision is."),
    ),
    "own_validation": (
        _value("--validation_inference_steps", "Denoising steps of the clips drawn for --validation_prompts.", int, 25),
        _value("--validation_guidance_scale", "Guidance of these clips; 1 turns it off.", float, 4.5),
        _value("--validation_negative_prompt", "Their negative prompt; the model's usual one when not given."),
        _switch("--validation_clip_image", "Show the start images of --validation_paths to the image encoder too."),
        _value("--validation_data_meta", "Annotation file of clips that are not trained on: their loss at fixed noise "
               "is logged as validation_loss."),
        _value("--validation_data_dir", "Folder of its relative paths; --train_data_dir when not given."),
        _value("--validation_loss_steps", "Measure it every n optimizer steps (and before and after the run); every "
               "--validation_steps when not given.", int),
        _value("--validation_loss_samples", "Measure at most this many of these clips.", int, 16),
        _value("--validation_loss_levels", "Measure each at this many noise levels.", int, 4),
    ),
    "own_lora": (
        _value("--rank_drop_out", "Probability of dropping a rank of the update.", float),
        _value("--module_drop_out", "Probability of skipping an adapted layer's update.", float),
        _value("--neuron_drop_out", "Dropout on the low-rank activations.", float),
        _switch("--lora_exact_match", "--target_name names whole layers (k is not part of blocks), as PEFT reads it."),
        _value("--lora_plus_ratio", "LoRA+: up matrices learn at this multiple of --learning_rate, often 16.", float),
        _switch("--use_dora", "DoRA: a learned magnitude per row beside the two matrices (with --use_peft_lora)."),
        _value("--init_lora_path", "Start from this LoRA file, of any known format, at step 0."),
        _value("--abnormal_norm_clip_start", "Step from which gradient norms far above the limit are cut further; "
               "off when not given.", int),
        _value("--initial_grad_norm_ratio", "The gradient limit starts at this multiple of --max_grad_norm "
               "(with --abnormal_norm_clip_start).", int, 5),
    ),
    "own_named": (
        _value("--learning_rate_low", "Learning rate of --trainable_modules_low_learning_rate; half of --learning_rate "
               "when not given.", float),
    ),
    "own_cache": (
        _switch("--cache_latents", "Keep the posteriors of encoded clips (and CLIP features) on disk and read them."),
        _switch("--cache_text", "Keep prompt embeddings on disk and read them."),
        _value("--cache_dir_latents", "Folder of the cache; 'cache' below --output_dir when not given."),
        _value("--cache_clip_starts", "Clips start at one of this many frames, evenly spread; 0 is any frame, which a "
               "cache of long clips seldom finds again.", int, 0),
        _value("--cache_mask_draws", "Each clip is masked by one of this many masks of its own, whose latents are "
               "kept too; 0 draws masks anew and keeps the VAE.", int, 0),
        _value("--cache_budget_gb", "The cache grows up to this size; what does not fit is encoded at each use.",
               float),
    ),
}

GROUPS: dict[str, tuple[Flag, ...]] = {
    group: tuple(Flag(name, text, kwargs, group, group.startswith("own")) for name, text, kwargs in rows)
    for group, rows in _ROWS.items()
}

# Flags that do nothing with one kind of training although their group is in use there.
IGNORED_WITH: dict[str, frozenset[str]] = {"lora": frozenset({"--use_ema"})}


def own_groups(trainable: str) -> tuple[str, ...]:
    """Groups of additions that every script with this trainable kind has."""
    return tuple(group for group in ("own", "own_validation", f"own_{trainable}", "own_cache") if group in GROUPS)


def find_flag(name: str) -> Flag | None:
    """The first declaration of a flag over all groups."""
    return next((flag for flags in GROUPS.values() for flag in flags if flag.name == name), None)


def select(groups: tuple[str, ...]) -> list[Flag]:
    """Flags of the named groups in order, after the single additions and removals described at the top."""
    removed = {entry[1:] for entry in groups if entry.startswith("!--")}
    chosen: dict[str, Flag] = {}
    for entry in groups:
        if entry.startswith("!--"):
            continue
        if entry.startswith("--"):
            flag = find_flag(entry)
            if flag is None:
                raise ValueError(f"flag_groups names the flag {entry}, which no group declares.")
            chosen.setdefault(entry, flag)
            continue
        if entry not in GROUPS:
            raise ValueError(f"Unknown flag group '{entry}'. Known: {', '.join(GROUPS)}.")
        for flag in GROUPS[entry]:
            chosen.setdefault(flag.name, flag)
    unknown = removed - chosen.keys()
    if unknown:
        raise ValueError(f"flag_groups removes {', '.join(sorted(unknown))}, which the named groups do not contain.")
    return [flag for name, flag in chosen.items() if name not in removed]
