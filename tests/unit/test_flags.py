"""Command lines: equal to the recorded interface, refused with a useful sentence, remembered when explicit."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import Path

import pytest

from videox_fun.training.flag_table import GROUPS, select
from videox_fun.training.flags import build_parser, parse_args
from videox_fun.training.specs import SCRIPTS, ScriptSpec, get_spec

BASE = ["--pretrained_model_name_or_path", "models/Wan2.1-Fun-V1.1-1.3B-InP"]
FULL = [*BASE, "--trainable_modules", "."]

SCENARIOS = {
    "1.3B LoRA, one 24 GB card": ("wan2.1_fun/train_lora", """
        --config_path config/wan2.1/wan_civitai.yaml --pretrained_model_name_or_path models/Wan2.1-Fun-V1.1-1.3B-InP
        --train_data_dir datasets/internal_datasets/ --train_data_meta datasets/internal_datasets/metadata.json
        --image_sample_size=512 --video_sample_size=512 --token_sample_size=512 --video_sample_n_frames=49
        --train_batch_size=1 --gradient_accumulation_steps=4 --dataloader_num_workers=4 --num_train_epochs=100
        --learning_rate=1e-4 --rank=64 --network_alpha=32 --train_mode="inpaint" --target_name="q,k,v,ffn.0,ffn.2"
        --mixed_precision="bf16" --allow_tf32 --gradient_checkpointing --low_vram --enable_bucket --use_8bit_adam
        --lr_scheduler="cosine_with_restarts" --lr_warmup_steps=100""",
        {"rank": 64, "network_alpha": 32, "train_mode": "inpaint", "target_name": "q,k,v,ffn.0,ffn.2",
         "use_8bit_adam": True, "lr_warmup_steps": 100, "video_sample_n_frames": 49}),
    "14B LoRA, ZeRO-2": ("wan2.1_fun/train_lora", """
        --config_path config/wan2.1/wan_civitai.yaml --pretrained_model_name_or_path models/Wan2.1-Fun-V1.1-14B-InP
        --train_data_dir datasets/ --train_data_meta datasets/metadata.json --image_sample_size=1024
        --video_sample_size=512 --token_sample_size=512 --video_sample_n_frames=81 --train_batch_size=1
        --gradient_accumulation_steps=2 --dataloader_num_workers=8 --num_train_epochs=100 --learning_rate=1e-4
        --rank=128 --network_alpha=64 --train_mode="inpaint" --target_name="q,k,v,ffn.0,ffn.2"
        --mixed_precision="bf16" --allow_tf32 --gradient_checkpointing --low_vram --enable_bucket
        --auto_tile_batch_size --uniform_sampling --abnormal_norm_clip_start=100
        --lr_scheduler="cosine_with_restarts" --lr_warmup_steps=200""",
        {"abnormal_norm_clip_start": 100, "initial_grad_norm_ratio": 5, "auto_tile_batch_size": True,
         "uniform_sampling": True, "image_sample_size": 1024}),
    "14B full, FSDP": ("wan2.1_fun/train", """
        --config_path config/wan2.1/wan_civitai.yaml --pretrained_model_name_or_path models/Wan2.1-Fun-V1.1-14B-InP
        --train_data_dir datasets/ --train_data_meta datasets/metadata.json --trainable_modules "."
        --image_sample_size=512 --video_sample_size=512 --token_sample_size=512 --video_sample_n_frames=49
        --train_batch_size=1 --gradient_accumulation_steps=4 --dataloader_num_workers=8 --num_train_epochs=100
        --learning_rate=2e-5 --mixed_precision="bf16" --allow_tf32 --gradient_checkpointing --low_vram
        --enable_bucket --uniform_sampling --abnormal_norm_clip_start=100 --lr_scheduler="cosine_with_restarts"
        --lr_warmup_steps=500""",
        {"trainable_modules": ["."], "learning_rate": 2e-5, "abnormal_norm_clip_start": 100}),
    "14B full, ZeRO-3 offload": ("wan2.1_fun/train", """
        --config_path config/wan2.1/wan_civitai.yaml --pretrained_model_name_or_path models/Wan2.1-Fun-V1.1-14B-InP
        --trainable_modules "." --image_sample_size=320 --video_sample_size=320 --token_sample_size=320
        --video_sample_n_frames=49 --train_batch_size=1 --gradient_accumulation_steps=8 --dataloader_num_workers=4
        --learning_rate=2e-5 --mixed_precision="bf16" --gradient_checkpointing --low_vram --vae_mini_batch=8
        --use_8bit_adam --enable_bucket""",
        {"vae_mini_batch": 8, "gradient_accumulation_steps": 8, "train_data_meta": None}),
}


def parse(script: str, words: list[str], **kwargs: bool) -> argparse.Namespace:
    kwargs.setdefault("check_paths", False)
    return parse_args(get_spec(script), words, **kwargs)


def refusal(capsys: pytest.CaptureFixture[str], script: str, words: list[str], **kwargs: bool) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(script, words, **kwargs)
    assert stop.value.code == 2
    return capsys.readouterr().err


def describe(action: argparse.Action) -> dict[str, object]:
    switch = isinstance(action, argparse._StoreTrueAction)
    return {
        "action": "store_true" if switch else "store",
        "type": None if switch else (action.type or str).__name__,
        "default": action.default,
        "choices": list(action.choices) if action.choices else None,
        "nargs": None if switch else action.nargs,
        "required": action.required,
    }


def recorded(row: dict[str, object]) -> dict[str, object]:
    switch = row.get("action") == "store_true"
    return {
        "action": row.get("action", "store"),
        "type": None if switch else row.get("type", "str"),
        "default": row.get("default", False if switch else None),
        "choices": row.get("choices"),
        "nargs": row.get("nargs"),
        "required": row.get("required", False),
    }


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_parser_equals_the_recorded_interface(script: str, data_dir: Path) -> None:
    tables = json.loads((data_dir / "upstream_flags.json").read_text())
    table = tables[f"scripts/{script}.py"]
    parser = build_parser(get_spec(script))
    actions = {name: action for action in parser._actions for name in action.option_strings}
    assert {name: describe(actions[name]) for name in table} == {name: recorded(row) for name, row in table.items()}
    additions = set(actions) - set(table) - {"-h", "--help"}
    assert all(parser.flags[name].own for name in additions), additions
    assert len({action.dest for action in parser._actions}) == len(parser._actions)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_commands_parse(name: str) -> None:
    script, words, expected = SCENARIOS[name]
    args = parse(script, shlex.split(words))
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.low_vram and args.mixed_precision == "bf16"


def test_every_original_abbreviation_keeps_its_meaning(data_dir: Path) -> None:
    table = json.loads((data_dir / "upstream_flags.json").read_text())["scripts/wan2.1/train_lora.py"]
    parser = build_parser(get_spec("wan2.1/train_lora"))
    checked = 0
    for name in table:
        for end in range(3, len(name)):
            prefix = name[:end]
            if prefix not in table and [other for other in table if other.startswith(prefix)] == [name]:
                assert parser._expand(f"{prefix}=1") == f"{name}=1"
                checked += 1
    assert checked > 500
    assert parser._expand("--upstream") == "--upstream_compat"


def test_ambiguous_abbreviation_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "wan2.1/train_lora", [*BASE, "--validation", "x"])
    assert "--validation_prompts" in err and "--validation_paths" in err


def test_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "wan2.1_fun/train_lora", [*BASE, "--validation_pathes", "x"])
    assert "unknown flag --validation_pathes; did you mean --validation_paths?" in err
    assert len(err.splitlines()) == 2


def test_flag_of_another_script_names_that_script(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "wan2.1/train", [*FULL, "--rank", "8"])
    assert "scripts/wan2.1/train.py has no flag --rank" in err and "scripts/wan2.1_fun/train_lora.py" in err


def test_launcher_flag_after_the_script_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "wan2.1/train", [*FULL, "--deepspeed_config_file", "x.json"])
    assert "before the path of the script" in err


def test_value_after_a_switch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "wan2.1/train", [*FULL, "--enable_bucket", "true"])
    assert "unexpected value 'true'" in err


def test_explicit_holds_what_was_given_even_at_its_default() -> None:
    args = parse("wan2.1_fun/train_lora", [*BASE, "--rank", "128", "--enable_buck", "--seed=3"])
    assert args.explicit == {"pretrained_model_name_or_path", "rank", "enable_bucket", "seed"}
    assert args.rank == 128 and args.network_alpha == 64 and args.enable_bucket and args.seed == 3


def test_list_defaults_are_not_shared() -> None:
    first = parse("wan2.1/train", FULL)
    first.trainable_modules_low_learning_rate.append("x")
    assert parse("wan2.1/train", FULL).trainable_modules_low_learning_rate == []


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("wan2.1/train_lora", [*BASE, "--use_8bit_adam", "--use_came"], ("--use_8bit_adam", "--use_came")),
        ("wan2.1/train", BASE, ("--trainable_modules",)),
        ("wan2.1/train_lora", [], ("--pretrained_model_name_or_path",)),
        ("wan2.1/train_lora", [*BASE, "--lr_scheduler", "cosin"], ("Did you mean cosine?",)),
        ("wan2.1/train_lora", [*BASE, "--train_mode", "inpant"], ("Did you mean inpaint?",)),
        ("wan2.1/train_lora", [*BASE, "--train_batch_size", "0"], ("--train_batch_size 0", "1 or more")),
        ("wan2.1/train_lora", [*BASE, "--rank_drop_out", "1"], ("--rank_drop_out 1.0", "below 1")),
        ("wan2.1/train_lora", [*BASE, "--adam_beta2", "1"], ("--adam_beta2",)),
        ("wan2.1/train_lora", [*BASE, "--text_drop_ratio", "1.5"], ("--text_drop_ratio 1.5", "between 0 and 1")),
        ("wan2.1/train_lora", [*BASE, "--seed", "-3"], ("--seed -3",)),
        ("wan2.1/train_lora", [*BASE, "--fix_sample_size", "8", "512"], ("--fix_sample_size 8 512",)),
        ("wan2.1/train_lora", [*BASE, "--validation_paths", "a.png"], ("--validation_prompts",)),
        ("wan2.1/train_lora", [*BASE, "--validation_prompts", "a", "b", "--validation_paths", "a.png"],
         ("1 and --validation_prompts 2",)),
        ("wan2.1/train_lora", [*BASE, "--report_to", "wandb", "--hub_token", "x"], ("--hub_token",)),
        ("wan2.1/train_lora", [*BASE, "--mixed_precision", "fp8"], ("--mixed_precision", "bf16")),
    ],
)
def test_refusals_name_the_flag_and_the_way_out(capsys: pytest.CaptureFixture[str], script: str, words: list[str],
                                                expected: tuple[str, ...]) -> None:
    err = refusal(capsys, script, words)
    for text in expected:
        assert text in err


def _inputs(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "metadata.json").write_text("[]")
    (tmp_path / "clips" / "other.txt").write_text("")
    (tmp_path / "wan.yaml").write_text("{}")
    return ["--pretrained_model_name_or_path", str(tmp_path / "model"), "--config_path", str(tmp_path / "wan.yaml"),
            "--train_data_dir", str(tmp_path / "clips"), "--train_data_meta", str(tmp_path / "clips" / "metadata.json")]


def test_existing_paths_pass(tmp_path: Path) -> None:
    args = parse("wan2.1/train_lora", _inputs(tmp_path), check_paths=True)
    assert args.train_data_meta.endswith("metadata.json")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--train_data_meta", "{}/clips/metadata.jsn"], ("clips/metadata.jsn does not exist", "metadata.json")),
        (["--train_data_meta", "{}/clips/metadata.jsonl"], ("metadata.jsonl", "Its folder has: metadata.json.")),
        (["--train_data_meta", "{}/clip/metadata.json"], ("right as far as {}",)),
        (["--train_data_dir", "{}/wan.yaml"], ("is a file; a folder is needed",)),
        (["--config_path", "{}/model"], ("is a folder; a file is needed",)),
        (["--pretrained_model_name_or_path", "{}/modle"], ("Its folder has: model",)),
        (["--transformer_path", "{}/none.safetensors"], ("--transformer_path",)),
        (["--validation_prompts", "a", "--validation_paths", "{}/a.png"], ("--validation_paths", "a.png")),
    ],
)
def test_missing_paths_show_what_lies_near(capsys: pytest.CaptureFixture[str], tmp_path: Path, change: list[str],
                                           expected: tuple[str, ...]) -> None:
    words = _inputs(tmp_path) + [word.format(tmp_path) for word in change]
    err = refusal(capsys, "wan2.1/train_lora", words, check_paths=True)
    for text in expected:
        assert text.format(tmp_path) in err


@pytest.mark.parametrize("missing", ["--train_data_meta", "--config_path"])
def test_needed_files_are_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path, missing: str) -> None:
    words = _inputs(tmp_path)
    at = words.index(missing)
    del words[at:at + 2]
    assert f"{missing} is needed" in refusal(capsys, "wan2.1/train_lora", words, check_paths=True)


def test_ignored_flags_give_one_warning_line(caplog: pytest.LogCaptureFixture) -> None:
    words = [*BASE, "--snr_loss", "--noise_offset", "0.1", "--use_ema", "--push_to_hub"]
    with caplog.at_level(logging.WARNING):
        parse("wan2.1/train_lora", words)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    for name in ("--snr_loss", "--noise_offset", "--use_ema", "--push_to_hub"):
        assert name in lines[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        parse("wan2.1/train", [*FULL, "--use_ema"])
    assert caplog.records == []


def test_flags_without_effect_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse("wan2.1/train_lora", [*BASE, "--random_hw_adapt", "--auto_tile_batch_size", "--multi_stream",
                                    "--initial_grad_norm_ratio", "3"])
    text = "\n".join(record.getMessage() for record in caplog.records)
    for name in ("--multi_stream", "--random_hw_adapt", "--auto_tile_batch_size", "--initial_grad_norm_ratio"):
        assert name in text


def test_other_ranks_do_not_repeat_warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING):
        parse("wan2.1/train_lora", [*BASE, "--snr_loss"])
    assert caplog.records == []


def test_spec_can_add_and_remove_single_flags_and_change_defaults() -> None:
    spec = ScriptSpec("x/train", "x:X", "flow_match", "lora",
                      ("model", "optim", "logging", "lora", "--selective_ac", "!--vae_path"),
                      defaults={"tokenizer_max_length": 226})
    parser = build_parser(spec)
    assert "--selective_ac" in parser.flags and "--vae_path" not in parser.flags
    assert parser.get_default("tokenizer_max_length") == 226
    with pytest.raises(ValueError, match="Unknown flag group 'modle'"):
        select(("modle",))
    with pytest.raises(ValueError, match="no group declares"):
        select(("--nothing",))
    with pytest.raises(ValueError, match="removes --rank"):
        select(("model", "!--rank"))
    with pytest.raises(ValueError, match="sets defaults for flags it does not have: rank"):
        build_parser(ScriptSpec("x/train", "x:X", "flow_match", "named", ("model",), defaults={"rank": 1}))


def test_every_flag_has_help_and_a_group_title() -> None:
    from videox_fun.training.flag_table import GROUP_TITLES

    for group, flags in GROUPS.items():
        assert group in GROUP_TITLES
        for flag in flags:
            assert len(flag.help) > 8 and flag.help.endswith("."), flag.name


def test_help_lists_groups_and_marks_flags_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("wan2.1/train_lora", ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "accepted for compatibility, without effect" in text and "optimization layer" in text
    assert "No effect in this script." in " ".join(text.split())
