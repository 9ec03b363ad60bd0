"""Each of the 62 rows in each of its states, on static input."""

from __future__ import annotations

import re
from typing import Any

import pytest

from optim_patches.audit.checks import CATEGORIES, DENOMINATORS, State, evaluate, evaluate_check, get_check, registry
from optim_patches.audit.edits import CONFIG, LAUNCHER, SCRIPT, SHELL
from optim_patches.audit.facts import PACKAGES as KNOWN_PACKAGES
from optim_patches.audit.flagtable import known_flags
from tests.unit.audit_kit import FIXED, FSDP, OFFLOAD, ZERO2, ZERO3, make_facts

FULL, LORA, REWARD = "wan2.1_fun/train", "wan2.1_fun/train_lora", "wan2.1_fun/train_reward_lora"
INFER = "examples/wan2.1_fun/predict_t2v.py"
BIG = "Wan2.1-Fun-14B-InP"
NONE = "triton"
FEW = {"rows": 20, "videos": 20}
MIXED = {"rows": 900, "videos": 500, "images": 400, "lengths": [20, 200],
         "sizes": [(1280, 720, "video"), (720, 1280, "video")]}  # fmt: skip
LONG = "--max_train_steps=5000"
HOPPER = {"gpu": "H100"}


Case = tuple[str, dict[str, Any]]


def c(flags: str = "", **kwargs: Any) -> tuple[str, dict[str, Any]]:
    return flags, kwargs


# enabled, disabled, recommended, not applicable
CASES: dict[str, tuple[Case, Case, Case, Case]] = {
    "A1": (c("--mixed_precision=bf16"), c("--mixed_precision=fp16", gpu=None), c(), c("", gpu="V100")),
    "A2": (c("--mixed_precision=fp16", gpu="T4"), c("--mixed_precision=bf16", gpu=None), c("", gpu="V100"), c()),
    "A3": (c("--allow_tf32"), c(goal="quality"), c(), c("", gpu="cpu")),
    "A4": (c(script=INFER, calls="convert_model_weight_to_float8"), c(script=INFER),
           c(script=INFER, model=BIG, gpu="RTX 4090"), c()),
    "A5": (c("--use_8bit_adam"), c(), c(gpu="RTX 4090"), c("--use_came")),
    "A6": (c("--use_came"), c(), c(gpu="RTX 4090", packages="came_pytorch"), c("--use_8bit_adam")),
    "B1": (c("--gradient_checkpointing"), c(), c(model=BIG), c("--selective_ac=0.5", script="wan2.1/train")),
    "B2": (c("--selective_ac=0.5", script="wan2.1/train"), c(script="wan2.1/train"),
           c("--gradient_checkpointing", script="wan2.1/train", model="Wan2.1-1.3B"), c(target="upstream")),
    "B3": (c("--gradient_accumulation_steps=4"), c("--gradient_accumulation_steps=1"), c(),
           c(script="wan2.1/train_distill")),
    "C1": (c("--low_vram"), c(), c(model=BIG), c("--cache_latents --cache_text")),
    "C2": (c("--vae_mini_batch=8"), c(), c("--video_sample_size=720"), c("--cache_latents")),
    "C3": (c("--multi_stream"), c("--low_vram"), c(), c(without="train_mode")),
    "D1": (c(launcher=ZERO2, gpus=8), c(gpus=8), c(gpus=8, model=BIG), c(gpus=1)),
    "D2": (c(launcher=ZERO3, gpus=8, script=FULL), c(gpus=8, script=FULL),
           c(gpus=8, script="custom_family/train", model="Thing-14B"), c(gpus=8)),
    "D3": (c(launcher=OFFLOAD, gpus=2, script=FULL), c(gpus=8, script=FULL),
           c(gpus=2, gpu="RTX 4090", script=FULL, model=BIG), c()),
    "D4": (c(launcher=FSDP, gpus=8, script=FULL), c(gpus=8, script=FULL), c(gpus=8, script=FULL, model=BIG), c(gpus=8)),
    "D5": (c(launcher=FSDP, gpus=8, script=FULL),
           c(launcher=FSDP.replace("BACKWARD_PRE", "NO_PREFETCH"), gpus=8, script=FULL, goal="memory"),
           c(launcher=FSDP.replace("BACKWARD_PRE", "NO_PREFETCH"), gpus=8, script=FULL), c()),
    "E1": (c("--use_peft_lora --rank=64"), c("--rank=64"), c(), c(script=FULL)),
    "E2": (c(), c("--use_peft_lora"), c("--use_peft_lora --rank_drop_out=0.1"), c(script=FULL)),
    "E3": (c("--target_name=q,k"), c("--lora_skip_name=x"), c(), c(script=REWARD)),
    "E4": (c("--rank_drop_out=0.1"), c(), c(data=FEW), c("--use_peft_lora")),
    "E5": (c("--module_drop_out=0.1"), c(), c(data=FEW), c(script=FULL)),
    "F1": (c(), c(packages="flash_attn_interface", **HOPPER), c(packages=NONE), c(gpu="cpu")),
    "F2": (c(packages="flash_attn_interface", **HOPPER), c(gpu=None, packages=None), c(**HOPPER), c()),
    "F3": (c("--train_batch_size=2"), c("--train_batch_size=2", packages=None),
           c("--train_batch_size=2", packages=NONE), c()),
    "F4": (c(script=INFER, packages="sageattention"), c(script=INFER, env="VIDEOX_ATTENTION_TYPE=SDPA"),
           c(script=INFER), c()),
    "F5": (c(packages=NONE), c(), c(env="VIDEOX_ATTENTION_TYPE=SAGE_ATTENTION"),
           c(script="longcatvideo/train", target="upstream")),
    "F6": (c(script="turbodiffusion/train_distill"), c(script="turbodiffusion/train_distill", gpu="cpu"),
           c(script="turbodiffusion/train_distill", packages="flash_attn"), c()),
    "G1": (c("--dataloader_num_workers=4"), c("--dataloader_num_workers=0 --cache_latents"), c(), c(script=REWARD)),
    "G2": (c("--dataloader_num_workers=4"), c("--dataloader_num_workers=0 --cache_latents"), c(), c(script=REWARD)),
    "G3": (c("--enable_bucket"), c(data={"rows": 2, "sizes": [(64, 32, "video"), (64, 32, "video")]}), c(data=MIXED),
           c(script=REWARD)),
    "G4": (c("--random_hw_adapt"), c(), c("--training_with_video_token_length"), c(FIXED)),
    "G5": (c("--training_with_video_token_length"), c(), c(data=MIXED), c(FIXED)),
    "G6": (c("--auto_tile_batch_size"), c(), c(data=MIXED), c(launcher=ZERO3, gpus=8)),
    "G7": (c("--keep_all_node_same_token_length", launcher="--num_machines 2"), c(launcher="--num_machines 2"),
           c("--random_hw_adapt", launcher="--num_machines 2"), c()),
    "G8": (c("--video_sample_stride=2"), c("--video_sample_stride=1"), c(), c(script="flux/train")),
    "G9": (c("--random_frame_crop"), c(), c(data=FEW), c("--cache_latents")),
    "G10": (c("--cache_latents"), c("--random_hw_adapt"), c(), c(script="wan2.1/train_distill", without="train_mode")),
    "G11": (c(), c("--text_drop_ratio=0", script="flux/train"), c("--text_drop_ratio=0"), c(script=REWARD)),
    "H1": (c("--lr_scheduler=cosine"), c("--max_train_steps=100"), c(LONG), c(script=INFER)),
    "H2": (c("--lr_scheduler=cosine"), c("--lr_scheduler=cosine --lr_warmup_steps=0"),
           c("--lr_scheduler=cosine --lr_warmup_steps=0", gpus=8), c()),
    "H3": (c(), c("--max_grad_norm=0"), c("--max_grad_norm=5"), c(script=INFER)),
    "H4": (c("--abnormal_norm_clip_start=50"), c(), c(model=BIG), c(target="upstream")),
    "H5": (c("--use_ema", script=FULL), c(script=FULL, gpu="RTX 4090"), c(script=FULL), c("--use_ema")),
    "H6": (c("--uniform_sampling"), c(), c(gpus=8), c(script=REWARD)),
    "H7": (c("--motion_sub_loss"), c(), c(goal="quality"), c(script="flux/train")),
    "H8": (c("--weighting_scheme=logit_normal"), c(), c(goal="quality", script=FULL), c(script=REWARD)),
    "H9": (c("--trainable_modules_low_learning_rate ffn", script=FULL), c(script=FULL),
           c("--trainable_modules attn", goal="quality", script=FULL), c()),
    "H10": (c("--backprop --reward_fn=HPSReward", script=REWARD),
            c("--backprop --reward_fn=HPSv3Reward", script=REWARD), c(script=REWARD), c()),
    "I1": (c("--compile"), c("--max_train_steps=100"), c(), c(FIXED + " --cuda_graph")),
    "I2": (c("--liger"), c("--max_train_steps=100"), c(), c(gpu="cpu")),
    "I3": (c("--cuda_graph"), c("--video_sample_n_frames=81"), c(FIXED), c("--random_hw_adapt")),
    "I4": (c("--qlora"), c(), c(model=BIG, gpu="RTX 4090"), c(script=FULL)),
    "I5": (c("--vae_tiling"), c(), c("--video_sample_size=768"), c("--cache_latents")),
    "I6": (c("--cache_text"), c("--max_train_steps=10", data={"rows": 500}), c(), c("--train_text_encoder")),
    "I7": (c("--fp8", **HOPPER), c(**HOPPER), c("--video_sample_n_frames=81", model=BIG, **HOPPER), c()),
    "I8": (c(launcher=f"{ZERO3} --num_machines 2", gpus=8, script=FULL), c(launcher=f"{ZERO2} --num_machines 2"),
           c(launcher=f"{ZERO3} --num_machines 2", gpus=8, script=FULL), c()),
    "I9": (c(launcher=OFFLOAD.replace("cpu", "nvme"), script=FULL), c(launcher=OFFLOAD, script=FULL),
           c(launcher=OFFLOAD, script=FULL, model=BIG, host_ram=64), c()),
    "I10": (c("--fused_optimizer"), c(launcher=ZERO2, gpus=8), c(), c("--use_8bit_adam")),
    "I11": (c("--dataloader_num_workers=4 --prefetch_factor=4"), c("--dataloader_num_workers=4 --cache_latents"),
            c("--dataloader_num_workers=4"), c()),
    "I12": (c("--sequence_parallel_size=4", gpus=8), c(gpus=8),
            c("--video_sample_n_frames=81 --video_sample_size=720", gpus=8), c()),
    "I13": (c("--train_teacache", script=REWARD), c("--num_inference_steps=4", script=REWARD), c(script=REWARD), c()),
}  # fmt: skip
STATES = (State.ENABLED, State.DISABLED, State.RECOMMENDED, State.NOT_APPLICABLE)


def parameters() -> list[Any]:
    return [
        pytest.param(row_id, state, case, id=f"{row_id}-{state.value.replace(' ', '_')}")
        for row_id, cases in CASES.items()
        for state, case in zip(STATES, cases, strict=True)
    ]


@pytest.mark.parametrize(("row_id", "state", "case"), parameters())
def test_state(row_id: str, state: State, case: tuple[str, dict[str, Any]]) -> None:
    flags, kwargs = case
    facts = make_facts(flags, **kwargs)
    if row_id == "I8" and state is State.ENABLED:
        facts.distribution.zeropp = ("zero_quantized_weights",)
    row = evaluate_check(get_check(row_id), facts)
    assert row.state is state, (row.state, row.reason.en)
    assert row.reason.en and row.reason.zh
    assert bool(row.priority) == (state is State.RECOMMENDED)
    if state is not State.RECOMMENDED:
        assert row.edits == ()


def test_every_row_has_its_four_cases() -> None:
    assert list(CASES) == [check.id for check in registry()]
    assert len(parameters()) == 4 * 62


def test_denominators() -> None:
    counts = dict.fromkeys(CATEGORIES, 0)
    for check in registry():
        counts[check.category] += 1
    assert counts == DENOMINATORS
    assert list(counts.values()) == [6, 3, 3, 5, 5, 6, 11, 10, 13]
    assert sum(counts.values()) == 62


@pytest.mark.parametrize("check", registry(), ids=lambda check: check.id)
def test_texts_are_complete(check) -> None:
    for text in (check.title, check.live, check.effect, check.off):
        assert text.en.strip() and text.zh.strip()
    assert not re.search(r"[\u4e00-\u9fff]", check.title.en + check.live.en + check.effect.en + check.off.en)
    assert re.search(r"[\u4e00-\u9fff]", check.live.zh + check.effect.zh)
    assert check.source and check.priority in ("P0", "P1", "P2")
    known = known_flags("") | {name: None for name in ("use_deepspeed", "deepspeed_config_file", "use_fsdp",
                               "fsdp_sharding_strategy", "fsdp_backward_prefetch", "dynamo_backend",
                               "enable_teacache", "teacache")}  # fmt: skip
    assert set(check.flags) <= set(known), check.flags


def test_recommended_changes_are_legal() -> None:
    """Script edits name flags that the script takes; every recommendation says how, or comes with another one."""
    seen = 0
    for row_id, cases in CASES.items():
        flags, kwargs = cases[2]
        facts = make_facts(flags, **kwargs)
        row = evaluate_check(get_check(row_id), facts)
        for edit in row.edits:
            seen += 1
            assert edit.where in (SCRIPT, LAUNCHER, SHELL, CONFIG)
            if edit.where == SCRIPT and not edit.remove:
                assert facts.accepts(edit.name), edit
        assert row.edits or row.check.follows or row_id == "A4"
    assert seen > 60


def test_an_opaque_value_counts_as_set() -> None:
    row = evaluate_check(get_check("G1"), make_facts('--dataloader_num_workers="$N"'))
    assert row.state is State.ENABLED and "shell" in row.reason.en
    assert evaluate_check(get_check("I11"), make_facts("--dataloader_num_workers=$N")).state is State.RECOMMENDED


def test_requested_without_effect_is_marked() -> None:
    row = evaluate_check(get_check("H5"), make_facts("--use_ema"))
    assert row.state is State.NOT_APPLICABLE and row.requested


def test_upstream_scripts_are_not_offered_our_flags() -> None:
    rows = {row.id: row for row in evaluate(make_facts(target="upstream"))}
    assert rows["I1"].state is State.RECOMMENDED and rows["I1"].edits == ()
    assert [edit.name for edit in rows["G1"].edits] == ["dataloader_num_workers"]
    own = {row.id: row for row in evaluate(make_facts())}
    assert [edit.name for edit in own["I1"].edits] == ["compile"]


def test_what_checkpointing_may_keep() -> None:
    def row(flags: str, **kwargs: Any) -> Any:
        return evaluate_check(get_check("B2"), make_facts(f"--gradient_checkpointing {flags}", **kwargs))

    assert row("--checkpointing_keep=attention").state is State.ENABLED
    assert row("--checkpointing_budget_gb=8").reason.en == "--checkpointing_budget_gb 8"
    assert [edit.name for edit in row("").edits] == ["checkpointing_fraction"]
    assert row("--block_swap=20").edits == ()
    long = row("--video_sample_n_frames=81 --video_sample_size=512", model=BIG, gpu="H200")
    assert [edit.name for edit in long.edits] == ["checkpointing_keep"] and "tokens" in long.reason.en
    old = row("", script="wan2.1/train", target="upstream")
    assert [edit.name for edit in old.edits] == ["gradient_checkpointing", "selective_ac"]


def test_config_files_alone_answer_the_sharding_rows(tmp_path) -> None:
    from optim_patches.audit.facts import Surroundings, facts_from_config
    from optim_patches.audit.project import ConfigFile

    config = ConfigFile("ds.json", "deepspeed", {"bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme"}, "zero_quantized_weights": True}})  # fmt: skip
    rows = {row.id: row for row in evaluate(facts_from_config(config, Surroundings()))}
    assert {i for i, row in rows.items() if row.state is State.ENABLED} == {"A1", "D2", "D3", "I9"}
    assert rows["G1"].state is State.NOT_APPLICABLE
    assert "launch command" in rows["G1"].reason.en


def test_packages_are_only_looked_for() -> None:
    from optim_patches.audit.facts import installed_packages

    assert installed_packages() <= set(KNOWN_PACKAGES)
