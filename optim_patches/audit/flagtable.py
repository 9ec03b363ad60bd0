"""Which flags each training script of VideoX-Fun takes, and the flags this project adds.

The 65 command lines differ in few places, so the table is a list of groups: a rule that selects scripts (names and
wildcards; ``all`` starts from every script, ``-x`` takes out, ``+x`` puts back) and the flags those scripts have.
A flag is ``name:kind=default``; kinds are b (switch), i, f, s, ``+s``/``+i`` (one or more) and ``2i`` (exactly two).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache

SCRIPTS: dict[str, str] = {
    "cogvideox_fun": "train train_control train_lora train_reward_lora",
    "fantasytalking": "train",
    "flashhead": "train_s2v train_s2v_lora",
    "flux": "train train_lora",
    "flux2": "train train_lora",
    "flux2_fun": "train_control train_control_distill",
    "hunyuanvideo": "train train_lora",
    "infinitetalk": "train_s2v train_s2v_lora",
    "longcatvideo": "train train_avatar train_avatar_lora train_lora",
    "ltx2.3": "train train_lora",
    "ltx2": "train train_lora",
    "mova": "train train_lora",
    "qwenimage": "train train_edit train_edit_lora train_lora",
    "qwenimage_fun": "train_control",
    "qwenimage_instantx": "train_control",
    "turbodiffusion": "train_distill",
    "wan2.1": "train train_distill train_distill_lora train_lora train_reward_lora",
    "wan2.1_fun": "train train_control train_control_lora train_lora train_reward_lora",
    "wan2.1_vace": "train",
    "wan2.2": "train train_animate train_animate_lora train_distill train_distill_lora train_lora train_s2v "
    "train_s2v_lora",
    "wan2.2_fun": "train train_control train_control_lora train_lora train_reward_lora",
    "wan2.2_vace_fun": "train",
    "z_image": "train train_distill train_distill_lora train_lora",
    "z_image_fun": "train_control train_control_distill",
}

GROUPS: tuple[tuple[str, str], ...] = (
    (
        "all",
        "adam_beta1:f=0.9 adam_beta2:f=0.999 adam_epsilon:f=1e-08 adam_weight_decay:f=0.01 allow_tf32:b "
        "checkpointing_steps:i=500 checkpoints_total_limit:i gradient_accumulation_steps:i=1 "
        "gradient_checkpointing:b learning_rate:f=0.0001 local_rank:i=-1 logging_dir:s=logs low_vram:b "
        "lr_scheduler:s=constant lr_warmup_steps:i=500 max_grad_norm:f=1.0 max_train_steps:i mixed_precision:s "
        "num_train_epochs:i=100 output_dir:s=sd-model-finetuned pretrained_model_name_or_path:s "
        "report_to:s=tensorboard resume_from_checkpoint:s revision:s scale_lr:b seed:i "
        "tracker_project_name:s=text2image-fine-tune train_batch_size:i=16 transformer_path:s use_8bit_adam:b "
        "use_came:b use_deepspeed:b vae_path:s validation_epochs:i=5 validation_steps:i=2000 variant:s",
    ),
    ("all -cogvideox_fun/*reward*", "dataloader_num_workers:i=0 hub_model_id:s hub_token:s push_to_hub:b"),
    ("all -wan2.1*/*reward*", "non_ema_revision:s"),
    ("all -flashhead/*", "validation_prompts:+s"),
    ("all -wan*reward*", "prediction_type:s"),
    (
        "all -*reward*",
        "cache_dir:s enable_bucket:b input_perturbation:f=0 max_train_samples:i multi_stream:b noise_offset:f=0 "
        "random_flip:b random_hw_adapt:b random_ratio_crop:b snr_loss:b train_data_dir:s train_data_meta:s "
        "train_sampling_steps:i=1000 uniform_sampling:b vae_mini_batch:i=32",
    ),
    ("all -*reward* +wan2.2_fun/*reward* -cogvideox_fun/train_control", "use_fsdp:b"),
    ("all -*reward* -flashhead/*", "enable_text_encoder_in_dataloader:b"),
    ("all -*reward* -cogvideox_fun/*", "fix_sample_size:2i"),
    ("all -wan2.1*/*reward* -wan*_distill* -turbodiffusion/* -qwenimage_instantx/*", "use_ema:b"),
    (
        "all -*reward* -wan*_distill* -turbodiffusion/* -cogvideox_fun/*",
        "logit_mean:f=0.0 logit_std:f=1.0 mode_scale:f=1.29 weighting_scheme:s=none",
    ),
    (
        "all -*reward* -flashhead/* -flux/* -flux2/train_lora -z_image/*distill* -z_image/*lora",
        "tokenizer_max_length:i=512",
    ),
    ("all -*reward* -*s2v* -*avatar* -*animate* -fantasytalking/*", "image_sample_size:i=512"),
    ("all -*reward* -flux* -qwenimage/* -z_image/train -z_image/train_lora", "token_sample_size:i=512"),
    (
        "all -cogvideox_fun/*reward* -wan2.1*/*reward* -flux* -qwenimage/* -qwenimage_fun/* -z_image/train "
        "-z_image/train_lora",
        "video_sample_size:i=512",
    ),
    (
        "all -cogvideox_fun/* -hunyuanvideo/* -longcatvideo/*lora -ltx* -mova/* -qwenimage_instantx/* -z_image/*",
        "config_path:s",
    ),
    (
        "all -cogvideox_fun/*reward* -wan2.1*/*reward* -flux* -qwen* -z_image*",
        "video_sample_n_frames:i=17 video_sample_stride:i=4",
    ),
    (
        "all -*reward* -flux* -qwen* -z_image*",
        "auto_tile_batch_size:b keep_all_node_same_token_length:b motion_sub_loss:b motion_sub_loss_ratio:f=0.25 "
        "random_frame_crop:b training_with_video_token_length:b",
    ),
    ("all -*reward* -flux* -qwen* -z_image* -fantasytalking/*", "video_repeat:i=0"),
    (
        "all -*lora +wan2.1*/*distill_lora +wan2.1*/*reward* +wan2.2/*distill_lora +z_image/*distill_lora "
        "-wan2.2/train_animate",
        "report_model_info:b",
    ),
    ("all -*lora +infinitetalk/*lora +wan2.2/*s2v_lora", "trainable_modules:+s trainable_modules_low_learning_rate:+s"),
    (
        "all -*reward* -*s2v* -*avatar* -fantasytalking/* -flux/* -flux2/* -hunyuanvideo/* -longcatvideo/* "
        "-qwenimage/* -z_image/train -z_image/train_lora",
        "validation_paths:+s",
    ),
    (
        "all -*lora -wan*_distill -turbodiffusion/* -z_image/*distill",
        "abnormal_norm_clip_start:i=1000 initial_grad_norm_ratio:i=5",
    ),
    ("*lora", "network_alpha:i=64 rank:i=128"),
    ("*lora -flashhead/*", "train_text_encoder:b"),
    ("*lora -*s2v*", "save_state:b"),
    ("*lora -cogvideox_fun/* -wan2.1*/*reward*", "lora_skip_name:s"),
    ("*lora -*reward*", "target_name:s use_peft_lora:b"),
    ("wan2.2* mova/*", "boundary_type:s=low"),
    ("*reward* flux* hunyuanvideo/* qwenimage_*", "guidance_scale:f=3.5"),
    ("*s2v* *avatar* fantasytalking/* qwenimage/*edit*", "validation_image_paths:+s"),
    ("*s2v* *avatar* fantasytalking/*", "validation_audio_paths:+s"),
    (
        "flux2/train flux2_fun/* qwenimage/train qwenimage/train_lora qwenimage_* z_image/train z_image_fun/*",
        "prompt_template_encode:s prompt_template_encode_start_idx:i=34",
    ),
    ("*distill *distill_lora", "real_guidance_scale:f=6.0"),
    (
        "*distill *distill_lora -flux2_fun/*",
        "denoising_step_indices_list:+s=1000,750,500,250 fake_guidance_scale:f=0.0 gen_update_interval:i=5 "
        "learning_rate_critic:f=0.0001",
    ),
    ("wan*distill* turbodiffusion/*", "negative_prompt:s"),
    ("ltx* mova/*", "i2v_noise_scale:f=0.0 i2v_ratio:f=0.5"),
    ("*_fun/train_control* -cogvideox_fun/* -flux* -qwen* -z_image*", "add_full_ref_image_in_self_attention:b"),
    ("wan2.2_fun/train_control* z_image_fun/*", "add_inpaint_info:b"),
    ("wan2.1_fun/train_control* wan2.2_fun/train_control* wan*vace* wan2.2/*s2v*", "control_ref_image:s=first_frame"),
    ("flashhead/* infinitetalk/*", "audio_encoder_path:s"),
    ("infinitetalk/* wan2.2/*s2v*", "motion_frames:i=73"),
    (
        "*reward*",
        "backprop:b backprop_num_steps:i=5 backprop_random_end_step:i=50 backprop_random_start_step:i=0 "
        "backprop_step_list:+i backprop_strategy:s=last eta:f=0.0 num_decoded_latents:i=3 num_inference_steps:i=50 "
        "num_sampled_frames:i prompt_path:s=normal reward_fn:s=aesthetic_loss_fn reward_fn_kwargs:s "
        "stop_latent_model_input_gradient:b train_sample_height:i=384 train_sample_width:i=672 "
        "validation_batch_size:i=1 validation_prompt_path:s validation_sample_height:i=512 "
        "validation_sample_width:i=512 video_length:i=49",
    ),
    ("*reward* -wan2.2_fun/*", "vae_gradient_checkpointing:b"),
    ("z_image*distill*", "randomize_step_indices:b sigma_max:f=80.0 use_trigflow:b"),
    ("longcatvideo/train longcatvideo/train_avatar wan2.1/train", "selective_ac:f=0"),
    ("mova/*", "boundary_ratio:f=0.9 train_components:s=all transformer_high_path:s"),
    ("hunyuanvideo/*", "image_embed_interleave:i=4 num_hidden_layers_to_skip:i=2"),
    ("longcatvideo/*avatar*", "pretrained_avatar_model_name_or_path:s"),
    (
        "qwenimage_instantx/*",
        "cn_pretrained_model_name_or_path:s=InstantX/Qwen-Image-ControlNet-Union controlnet_path:s",
    ),
    ("cogvideox_fun/train_control", "not_sigma_loss:b"),
    ("fantasytalking/*", "pretrained_audio_model_name_or_path:s"),
    (
        "cogvideox_fun/train cogvideox_fun/train_lora flux2/train flux2_fun/* hunyuanvideo/* "
        "longcatvideo/train longcatvideo/train_lora qwenimage/*edit* turbodiffusion/* wan2.1/* wan2.1_fun/* "
        "wan2.2/* wan2.2_fun/* z_image_fun/* -*reward* -*s2v* -*animate*",
        "train_mode:s=normal",
    ),
)

#: Where a script's default differs from the group's.
DEFAULTS: dict[str, dict[str, str]] = {
    "cogvideox_fun/train": {"tokenizer_max_length": "226"},
    "cogvideox_fun/train_control": {"tokenizer_max_length": "226"},
    "cogvideox_fun/train_lora": {"tokenizer_max_length": "226"},
    "cogvideox_fun/train_reward_lora": {"guidance_scale": "6.0", "num_train_epochs": "200", "reward_fn": "HPSReward"},
    "flux2_fun/train_control_distill": {"real_guidance_scale": "4.0"},
    "hunyuanvideo/train": {"guidance_scale": "6", "tokenizer_max_length": "256"},
    "hunyuanvideo/train_lora": {"guidance_scale": "6", "tokenizer_max_length": "256"},
    "infinitetalk/train_s2v": {"motion_frames": "25"},
    "mova/train": {"boundary_type": "full"},
    "mova/train_lora": {"boundary_type": "full"},
    "qwenimage/train": {"tokenizer_max_length": "1024"},
    "qwenimage/train_edit": {"tokenizer_max_length": "1024", "train_mode": "qwen_image_edit"},
    "qwenimage/train_edit_lora": {"tokenizer_max_length": "1024", "train_mode": "qwen_image_edit"},
    "qwenimage/train_lora": {"tokenizer_max_length": "1024"},
    "qwenimage_fun/train_control": {"tokenizer_max_length": "1024"},
    "qwenimage_instantx/train_control": {"tokenizer_max_length": "1024"},
    "wan2.1/train_reward_lora": {"guidance_scale": "6.0"},
    "wan2.1_fun/train_control": {"train_mode": "control"},
    "wan2.1_fun/train_control_lora": {"train_mode": "control"},
    "wan2.1_fun/train_reward_lora": {"guidance_scale": "6.0"},
    "wan2.2/train_s2v": {"boundary_type": "full"},
    "wan2.2/train_s2v_lora": {"boundary_type": "full"},
    "wan2.2_fun/train_control": {"train_mode": "control"},
    "wan2.2_fun/train_control_lora": {"train_mode": "control"},
    "wan2.2_fun/train_reward_lora": {"guidance_scale": "6.0"},
    "z_image/train_distill": {"real_guidance_scale": "4"},
    "z_image/train_distill_lora": {"real_guidance_scale": "4"},
    "z_image_fun/train_control": {"config_path": "config/z_image/z_image_control.yaml"},
    "z_image_fun/train_control_distill": {"real_guidance_scale": "1.5"},
}

#: Flags that VideoX-Fun's scripts lack and this project's scripts take; rules as in ``GROUPS``.
OWN: tuple[tuple[str, str], ...] = (
    (
        "all",
        "text_drop_ratio:f=0.1 abnormal_norm_clip_start:i=1000 initial_grad_norm_ratio:f=5 master_weights_fp32:b "
        "allow_partial_load:b allow_resume_changes:b max_data_errors:i upstream_compat:b audit:s=default "
        "audit_lang:s=en compile:b compile_mode:s compile_backend:s compile_dynamic:s compile_fullgraph:b liger:b "
        "vae_tiling:b fp8:b fp8_base:b sequence_parallel_size:i=1 cache_latents:b cache_text:b cache_dir_latents:s "
        "cache_clip_starts:i=0 cache_mask_draws:i=0 cache_budget_gb:f bucket_mode:s=upstream fused_optimizer:b "
        "prefetch_factor:i data_format:s=auto id_token:s video_sample_fps:f validation_inference_steps:i=25 "
        "validation_guidance_scale:f=4.5 validation_negative_prompt:s validation_clip_image:b validation_data_meta:s "
        "validation_data_dir:s validation_loss_steps:i validation_loss_samples:i=16 validation_loss_levels:i=4",
    ),
    ("*lora", "rank_drop_out:f module_drop_out:f neuron_drop_out:f lora_exact_match:b lora_plus_ratio:f use_dora:b "
     "init_lora_path:s"),
    ("all -*lora", "learning_rate_low:f"),
)

#: Accepted by every script and read by none.
DEAD = frozenset(
    "cache_dir hub_model_id input_perturbation max_train_samples noise_offset prediction_type push_to_hub random_flip "
    "snr_loss variant".split()
)


@dataclass(frozen=True)
class Flag:
    """One command line flag.

    Attributes:
        name: without the dashes.
        kind: b (switch), i, f, s, ``+s``, ``+i`` or ``2i``.
        default: as typed, None where there is none.
    """

    name: str
    kind: str
    default: str | None = None

    @property
    def arity(self) -> int:
        """Values it takes: 0, 1, 2, or -1 for one or more."""
        return {"b": 0, "+s": -1, "+i": -1, "2i": 2}.get(self.kind, 1)


@lru_cache(maxsize=1)
def script_ids() -> tuple[str, ...]:
    """``wan2.1_fun/train_lora`` and the 64 others."""
    return tuple(f"{family}/{name}" for family, names in SCRIPTS.items() for name in names.split())


def _select(rule: str) -> frozenset[str]:
    chosen: set[str] = set()
    for term in rule.split():
        pattern = term.lstrip("+-")
        matched = {i for i in script_ids() if pattern == "all" or fnmatchcase(i, pattern)}
        chosen = chosen - matched if term.startswith("-") else chosen | matched
    return frozenset(chosen)


def _parse(body: str) -> Iterable[Flag]:
    for token in body.split():
        name, _, rest = token.partition(":")
        kind, equals, default = rest.partition("=")
        yield Flag(name, kind, default if equals else None)


@cache
def upstream_flags(script_id: str) -> Mapping[str, Flag]:
    """The flags of one of VideoX-Fun's scripts; empty for a script it does not have."""
    flags: dict[str, Flag] = {}
    for rule, body in _selected():
        if script_id in rule:
            flags.update({flag.name: flag for flag in body})
    for name, default in DEFAULTS.get(script_id, {}).items():
        flags[name] = Flag(name, flags[name].kind, default)
    return flags


@lru_cache(maxsize=1)
def _selected() -> tuple[tuple[frozenset[str], tuple[Flag, ...]], ...]:
    return tuple((_select(rule), tuple(_parse(body))) for rule, body in GROUPS)


@lru_cache(maxsize=1)
def any_upstream_flag() -> Mapping[str, Flag]:
    """Every flag of any script."""
    return {flag.name: flag for _, body in _selected() for flag in body}


@lru_cache(maxsize=1)
def _patch_flags() -> Mapping[str, Flag]:
    """The flags of the registered patches, empty where there is no patch layer."""
    try:
        from optim_patches.registry import all_flags

        patched = all_flags()
    except (ImportError, AttributeError):
        return {}
    flags = {}
    for flag in patched:
        kind = "b" if flag.action == "store_true" else "i" if flag.type is int else "f" if flag.type is float else "s"
        if flag.nargs in ("+", "*"):
            kind = "+s"
        default = None if flag.default is None or kind == "b" else str(flag.default)
        flags[flag.dest] = Flag(flag.dest, kind, default)
    return flags


@cache
def own_flags(script_id: str) -> Mapping[str, Flag]:
    """The flags this project adds to a script; for unknown scripts all of them."""
    flags: dict[str, Flag] = {}
    for rule, body in OWN:
        if script_id in _select(rule) or script_id not in script_ids():
            flags.update({flag.name: flag for flag in _parse(body)})
    return {**flags, **_patch_flags()}


def known_flags(script_id: str) -> Mapping[str, Flag]:
    """What this project's script accepts; for unknown scripts every flag there is."""
    base = upstream_flags(script_id) or any_upstream_flag()
    return {**own_flags(script_id), **base}
