"""Five scenarios as ready commands, filled with the user's paths."""

from __future__ import annotations

from dataclasses import dataclass

from optim_patches.audit.text import Text

_FUN_CONFIG = "config/wan2.1/wan_civitai.yaml"
_COMMON = (
    ("pretrained_model_name_or_path", "$MODEL_NAME"),
    ("train_data_dir", "$DATASET_NAME"),
    ("train_data_meta", "$DATASET_META_NAME"),
)
_TARGETS = "q,k,v,ffn.0,ffn.2"


@dataclass(frozen=True)
class Scenario:
    """One scenario.

    Attributes:
        gpu, gpus: the machine it is written for.
        launcher: options of ``accelerate launch`` after the precision.
        flags: options of the script; None for a switch.
    """

    number: int
    title: Text
    gpu: str
    gpus: int
    model: str
    script: str
    launcher: tuple[tuple[str, str | None], ...]
    flags: tuple[tuple[str, str | None], ...]


def _flags(text: str) -> tuple[tuple[str, str | None], ...]:
    pairs = []
    for token in text.split():
        name, equals, value = token.partition("=")
        pairs.append((name, value if equals else None))
    return tuple(pairs)


_FSDP = _flags(
    "use_fsdp fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP fsdp_transformer_layer_cls_to_wrap=WanAttentionBlock "
    "fsdp_sharding_strategy=FULL_SHARD fsdp_state_dict_type=SHARDED_STATE_DICT fsdp_backward_prefetch=BACKWARD_PRE "
    "fsdp_cpu_ram_efficient_loading=False"
)
_CONFIG = (("config_path", _FUN_CONFIG),)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        1, Text("Wan2.1-Fun 1.3B LoRA, one 24 GB card", "Wan2.1-Fun 1.3B LoRA — 单卡 24GB (RTX 4090)"), "RTX 4090", 1,
        "models/Diffusion_Transformer/Wan2.1-Fun-V1.1-1.3B-InP", "scripts/wan2.1_fun/train_lora.py", (),
        _CONFIG + _COMMON + _flags(
            "image_sample_size=512 video_sample_size=512 token_sample_size=512 video_sample_n_frames=49 "
            "train_batch_size=1 gradient_accumulation_steps=4 dataloader_num_workers=4 num_train_epochs=100 "
            f"learning_rate=1e-4 rank=64 network_alpha=32 train_mode=inpaint target_name={_TARGETS} "
            "mixed_precision=bf16 allow_tf32 gradient_checkpointing low_vram enable_bucket use_8bit_adam "
            "lr_scheduler=cosine_with_restarts lr_warmup_steps=100"),
    ),
    Scenario(
        2, Text("Wan2.1-Fun 14B LoRA, 8 x A100 80 GB, ZeRO-2", "Wan2.1-Fun 14B LoRA — 8xA100 80GB + DeepSpeed ZeRO-2"),
        "A100 80GB", 8, "models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP", "scripts/wan2.1_fun/train_lora.py",
        _flags("use_deepspeed deepspeed_config_file=config/zero_stage2_config.json"),
        _CONFIG + _COMMON + _flags(
            "image_sample_size=1024 video_sample_size=512 token_sample_size=512 video_sample_n_frames=81 "
            "train_batch_size=1 gradient_accumulation_steps=2 dataloader_num_workers=8 num_train_epochs=100 "
            f"learning_rate=1e-4 rank=128 network_alpha=64 train_mode=inpaint target_name={_TARGETS} "
            "mixed_precision=bf16 allow_tf32 gradient_checkpointing low_vram enable_bucket auto_tile_batch_size "
            "uniform_sampling abnormal_norm_clip_start=100 lr_scheduler=cosine_with_restarts lr_warmup_steps=200"),
    ),
    Scenario(
        3, Text("Wan2.1-Fun 14B full fine-tuning, 8 x A100 80 GB, FSDP",
                "Wan2.1-Fun 14B 全参微调 — 8xA100 80GB + FSDP"),
        "A100 80GB", 8, "models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP", "scripts/wan2.1_fun/train.py", _FSDP,
        _CONFIG + _COMMON + _flags(
            "trainable_modules=. image_sample_size=512 video_sample_size=512 token_sample_size=512 "
            "video_sample_n_frames=49 train_batch_size=1 gradient_accumulation_steps=4 dataloader_num_workers=8 "
            "num_train_epochs=100 learning_rate=2e-5 train_mode=inpaint mixed_precision=bf16 allow_tf32 "
            "gradient_checkpointing low_vram enable_bucket uniform_sampling abnormal_norm_clip_start=100 "
            "lr_scheduler=cosine_with_restarts lr_warmup_steps=500"),
    ),
    Scenario(
        4, Text("Wan2.1-Fun 14B full fine-tuning, 2 x 24 GB, ZeRO-3 with CPU offload",
                "Wan2.1-Fun 14B 全参 — 2x24GB (RTX 4090) + ZeRO-3 CPU Offload"),
        "RTX 4090", 2, "models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP", "scripts/wan2.1_fun/train.py",
        _flags("use_deepspeed deepspeed_config_file=config/zero_stage3_config_cpu_offload.json zero_stage=3 "
               "zero3_save_16bit_model=true zero3_init_flag=true"),
        _CONFIG + _COMMON + _flags(
            "trainable_modules=. image_sample_size=320 video_sample_size=320 token_sample_size=320 "
            "video_sample_n_frames=49 train_batch_size=1 gradient_accumulation_steps=8 dataloader_num_workers=4 "
            "learning_rate=2e-5 train_mode=inpaint mixed_precision=bf16 gradient_checkpointing low_vram "
            "vae_mini_batch=8 enable_bucket"),
    ),
    Scenario(
        5, Text("CogVideoX-Fun 5B LoRA, one A100 80 GB", "CogVideoX-Fun 5B LoRA — 单卡 A100 80GB"), "A100 80GB", 1,
        "models/Diffusion_Transformer/CogVideoX-Fun-V1.1-5b-InP", "scripts/cogvideox_fun/train_lora.py", (),
        _COMMON + _flags(
            "image_sample_size=512 video_sample_size=512 video_sample_n_frames=49 train_batch_size=1 "
            "gradient_accumulation_steps=4 dataloader_num_workers=4 learning_rate=1e-4 rank=64 network_alpha=32 "
            "train_mode=inpaint mixed_precision=bf16 allow_tf32 gradient_checkpointing low_vram enable_bucket "
            "use_8bit_adam"),
    ),
)  # fmt: skip


def get_scenario(number: int) -> Scenario:
    """One scenario by its number."""
    for scenario in SCENARIOS:
        if scenario.number == number:
            return scenario
    raise ValueError(f"There is no scenario {number}; there are 1 to {len(SCENARIOS)}.")


def render(
    scenario: Scenario,
    *,
    model: str | None = None,
    data_dir: str = "datasets/internal_datasets/",
    meta: str = "datasets/internal_datasets/metadata.json",
    output_dir: str = "output_dir",
) -> str:
    """The scenario as a shell script with the given paths."""
    lines = [
        f'export MODEL_NAME="{_safe(model or scenario.model)}"',
        f'export DATASET_NAME="{_safe(data_dir)}"',
        f'export DATASET_META_NAME="{_safe(meta)}"',
        "",
    ]
    command = ['accelerate launch --mixed_precision="bf16"']
    command += [_spell(name, value, " ") for name, value in scenario.launcher]
    command.append(scenario.script)
    command += [_spell(name, value, "=") for name, value in scenario.flags]
    command += [_spell("output_dir", output_dir, "="), "--seed=42"]
    return "\n".join(lines) + "\n" + " \\\n  ".join(command) + "\n"


def _spell(name: str, value: str | None, glue: str) -> str:
    if value is None:
        return f"--{name}"
    if value.startswith("$"):
        return f'--{name}{glue}"{value}"'
    plain = value.replace("-", "").replace(".", "").replace("_", "")
    return f"--{name}{glue}{value}" if plain.isalnum() else f'--{name}{glue}"{_safe(value)}"'


def _safe(text: str) -> str:
    """Text inside double quotes of a shell script: nothing in it is expanded."""
    return "".join("\\" + char if char in '"\\$`' else char for char in text)
