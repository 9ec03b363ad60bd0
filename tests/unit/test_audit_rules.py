"""Every contradiction is found in the launch that has it, and not in the one that was put right."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from optim_patches.audit.edits import apply_edits
from optim_patches.audit.facts import Surroundings, facts_from_config, facts_from_launch
from optim_patches.audit.launch import find_launches
from optim_patches.audit.media import probe
from optim_patches.audit.project import ConfigFile, Project, load_project
from optim_patches.audit.rules import Finding, findings, rules
from tests.unit.audit_kit import FSDP, OFFLOAD, ZERO2, ZERO3, make_facts, write

FULL, REWARD, DISTILL = "wan2.1_fun/train", "wan2.1_fun/train_reward_lora", "wan2.1/train_distill"
UP = {"target": "upstream"}
FIX = "--trainable_modules ."


def c(flags: str = "", expect: str = "", **kwargs: Any) -> tuple[str, str, dict[str, Any]]:
    """A command; ``expect`` is a part of the finding's English text."""
    return flags, expect, kwargs


CASES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "unknown-flag": [
        c("--validation_pathes x", "did you mean --validation_paths"),
        c("--zzz_unheard_of 3", "stops at start"),
        c("--backprop", "belongs to other scripts"),
    ],
    "flag-unknown-upstream": [
        c("--rank_drop_out=0.1 --abnormal_norm_clip_start=9", "--rank_drop_out", **UP),
        c("--compile", "taken here"),
    ],
    "bad-value": [
        c("--mixed_precision=fp32", "none of no, fp16, bf16"),
        c("--rank=12.5", "whole number"),
        c("--learning_rate=fast", "wants a number"),
        c("--rank", "has no value"),
        c("--video_sample_n_frames=0", "at least 1"),
    ],
    "missing-flag": [
        c("", "--pretrained_model_name_or_path is missing", without="pretrained_model_name_or_path"),
        c("", "--train_data_meta", without="train_data_meta"),
        c("", "--config_path", without="config_path"),
        c("", "--trainable_modules", script=FULL),
    ],
    "stray-words": [c("loose words", "loose words")],
    "repeated-flag": [c("--rank=8 --rank=16", "last value 16")],
    "dead-flag": [
        c("--snr_loss", "no script"), c("--use_ema", "LoRA scripts"), c("--train_text_encoder", "never learns"),
        c("--fix_sample_size 64 64", "--enable_bucket only"), c("--motion_sub_loss_ratio=0.3", "--motion_sub_loss"),
        c("--lr_warmup_steps=9", "constant_with_warmup"), c("--multi_stream", "overlap", without="train_mode"),
        c("--enable_bucket --fix_sample_size 64 64 --random_hw_adapt", "--fix_sample_size switches"),
        c("--training_with_video_token_length", "--random_hw_adapt"),
        c("--selective_ac=0.5 --gradient_checkpointing", "precedence", script="wan2.1/train"),
        c("--motion_sub_loss", "distillation", script=DISTILL),
        c("--use_peft_lora --rank_drop_out=0.1", "PEFT"),
        c("--uniform_sampling --weighting_scheme=logit_normal", "--uniform_sampling replaces"),
    ],
    "warmup-too-long": [
        c("--lr_scheduler=cosine --lr_warmup_steps=60 --max_train_steps=100", "60 %"),
        c("--lr_scheduler=cosine --max_train_steps=100", "500 steps in a run of 100"),
    ],
    "prefetch-without-workers": [c("--prefetch_factor=4", "refuses")],
    "text-encoder-in-loader": [
        c("--enable_text_encoder_in_dataloader --enable_bucket --dataloader_num_workers=4", "per worker (4)"),
        c("--enable_text_encoder_in_dataloader", "--enable_bucket only"),
        c("--enable_text_encoder_in_dataloader --enable_bucket", "does not work", script=DISTILL),
    ],
    "cache-random-sizes": [c("--cache_latents --random_hw_adapt", "with --random_hw_adapt the cache holds an entry"),
                           c("--cache_latents --random_frame_crop", "the VAE stays loaded")],
    "hub-token": [c("--report_to=wandb --hub_token=x", "logged")],
    "frame-count": [c("--video_sample_n_frames=48", "cut to 45")],
    "precision-mismatch": [c("--mixed_precision=bf16", "fp16", launcher="--mixed_precision fp16")],
    "bf16-on-old-card": [c("--mixed_precision=bf16", "V100", gpu="V100")],
    "fp16-weights": [
        c("--mixed_precision=fp16", "refuses fp16 gradients", **UP),
        c("--mixed_precision=fp16", "overflow"),
    ],
    "bf16-small-updates": [c(f"--mixed_precision=bf16 --learning_rate=2e-5 {FIX}", "fp32 master", script=FULL)],
    "two-optimizers": [c("--use_8bit_adam --use_came", "--use_8bit_adam --use_came")],
    "sage-in-training": [c("", "no backward", env="VIDEOX_ATTENTION_TYPE=SAGE_ATTENTION")],
    "cuda-graph-random-sizes": [c("--cuda_graph --random_hw_adapt", "one shape")],
    "cuda-graph-checkpointing": [c("--cuda_graph --gradient_checkpointing", "refuses both")],
    "cuda-graph-twice": [
        c("--cuda_graph --compile --compile_mode=reduce-overhead", "captures graphs itself"),
    ],
    "quantization-conflict": [
        c(f"--qlora {FIX}", "trains them", script=FULL),
        c("--qlora", "sharded", launcher=ZERO3, gpus=8),
        c("--fp8", "8.9"), c("--qlora --fp8", "both replace", gpu="H100"),
    ],
    "fp8-inference-in-training": [c("", "no gradient", calls="convert_model_weight_to_float8")],
    "cuda-only": [c("--liger --fp8", "--liger --fp8", gpu="cpu")],
    "sequence-parallel-size": [
        c("--sequence_parallel_size=8", "12 heads; legal: 2, 3, 4, 6, 12", gpus=8),
        c("--sequence_parallel_size=3", "does not divide the 8 processes", gpus=8),
    ],
    "fsdp-wrap-class": [
        c(FIX, "CogVideoXBlock", script=FULL, gpus=8, launcher=FSDP.replace("WanAttentionBlock", "CogVideoXBlock")),
        c(FIX, "BaseWanAttentionBlock", script="wan2.1_vace/train", gpus=8, launcher=FSDP, without="train_mode"),
        c(FIX, "one unit", script=FULL, gpus=8,
          launcher="--use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    ],
    "deepspeed-and-fsdp": [c(FIX, "DeepSpeed and FSDP", script=FULL, gpus=8, launcher=f"{FSDP} --use_deepspeed")],
    "sharding-behind-script": [c("--use_fsdp", "behind the script", gpus=8)],
    "zero3-saved-weights": [c(FIX, "zero_to_bf16", script=FULL, gpus=8, launcher=ZERO3)],
    "zero3-ema": [c(f"--use_ema {FIX}", "refused", script=FULL, gpus=8, launcher=ZERO3)],
    "deepspeed-not-installed": [c("", "not installed", gpus=8, launcher=ZERO2, packages="flash_attn")],
    "mesh-size": [
        c(FIX, "2 would be wasted", script=FULL, gpus=8,
          launcher=f"{FSDP} --num_processes 8 --parallelism_config_dp_shard_size 3 "
          "--parallelism_config_dp_replicate_size 2"),
        c(FIX, "copies nothing", script=FULL, gpus=8, launcher=FSDP.replace("FULL_SHARD", "HYBRID_SHARD")),
    ],
    "device-count": [c("", "shows 2 devices", env="CUDA_VISIBLE_DEVICES=0,1", launcher="--num_processes 4", gpus=4)],
    "unused-devices": [
        c("", "one of the 8 devices", program="python", gpus=8),
        c("", "2 processes on 8", launcher="--num_processes 2", gpus=8),
    ],
    "cpu-one-process": [c("", "one process", gpu="cpu", launcher="--num_processes 2", gpus=1)],
    "offload-optimizer": [c(f"--use_8bit_adam {FIX}", "offloaded", script=FULL, gpus=2, launcher=OFFLOAD)],
    "auto-tile-sharded": [c("--auto_tile_batch_size", "switched off", gpus=8, launcher=ZERO3)],
    "no-seed": [c("", "drawn", without="seed"), c("", "TypeError", without="seed", **UP)],
    "config-file": [c("", "from its name", gpus=8, launcher=ZERO2)],
    "mode-vs-weights": [
        c("", "image-to-video checkpoint", without="train_mode"),
        c("", "text-to-video checkpoint", script="wan2.1/train_lora", model="Wan2.1-T2V-1.3B"),
        c("", "belong to this task", script="wan2.1_fun/train_control_lora"),
    ],
    "boundary-vs-weights": [
        c("--boundary_type=high --transformer_path w/low_noise_model/x.safetensors", "low-noise",
          script="wan2.2_fun/train_lora", model="Wan2.2-Fun-A14B-InP"),
        c("--boundary_type=low", "one expert", script="wan2.2/train_lora", model="Wan2.2-TI2V-5B"),
        c("", "all noise levels", script="wan2.2_fun/train_lora", model="Wan2.2-Fun-A14B-InP", **UP),
    ],
    "lora-targets": [
        c("--target_name=to_q,to_k,q", "to_q, to_k"),
        c("--target_name=to_q,ff.0,ff.2", "ff.0, ff.2", script="hunyuanvideo/train_lora"),
    ],
    "batch-above-one": [
        c(f"--train_batch_size=2 {FIX}", "VACE", script="wan2.1_vace/train", without="train_mode train_batch_size"),
        c("--train_batch_size=2", "negative prompt", script=DISTILL, without="train_batch_size", **UP),
        c("--train_batch_size=2", "items 0 and 1", script=REWARD, without="train_batch_size", **UP),
    ],
    "reward-setup": [
        c("--reward_fn=HPSv3Reward", "no gradient", script=REWARD),
        c("", "aesthetic_loss_fn", script=REWARD, **UP),
        c("", "--prompt_path", script=REWARD),
    ],
    "upstream-crash": [
        c("--use_peft_lora --resume_from_checkpoint=latest", "PEFT LoRA crashes", **UP),
        c("--denoising_step_indices_list 1000 500", "becomes text", script=DISTILL, **UP),
        c("", "CLIP context", script="wan2.1_fun/train_control_lora", without="train_mode", **UP),
        c("--random_frame_crop --video_sample_n_frames=81", "81 frames become 21", **UP),
    ],
    "critic-rate": [c("--learning_rate_critic=1e-5", "no effect", script=DISTILL, **UP)],
}  # fmt: skip
#: Rules whose cases need files; their tests are below.
WITH_FILES = {
    "accelerate-refuses-fields", "deepspeed-batch", "zero2-offload-param", "unknown-config-keys", "missing-image-keys",
    "metadata-file", "unused-videos", "metadata-keys", "metadata-sizes", "broken-files", "stills-for-video",
    "short-clips", "mixed-rates", "upscaling", "resume-without-state",
}  # fmt: skip
PARAMETERS = [
    pytest.param(rule, *case, id=f"{rule}-{number}")
    for rule, cases in CASES.items()
    for number, case in enumerate(cases)
]


def found(rule_id: str, facts, project: Project | None = None) -> list[Finding]:
    return [finding for finding in findings(facts, project or Project()) if finding.rule.id == rule_id]


@pytest.mark.parametrize(("rule_id", "flags", "expect", "kwargs"), PARAMETERS)
def test_rule(rule_id: str, flags: str, expect: str, kwargs: dict[str, Any]) -> None:
    facts = make_facts(flags, **kwargs)
    hits = found(rule_id, facts)
    assert any(expect in hit.text.en for hit in hits), [hit.text.en for hit in hits]
    for hit in hits:
        assert hit.text.en and hit.text.zh and hit.text.en != hit.text.zh
        assert not re.search(r"[\u4e00-\u9fff]|\{\d", hit.text.en)
        assert "{" not in hit.text.zh.replace("{}", "")


def test_the_offered_changes_put_it_right() -> None:
    changed = 0
    for rule_id, flags, expect, kwargs in (parameter.values for parameter in PARAMETERS):
        facts = make_facts(flags, **kwargs)
        hits = [hit for hit in found(rule_id, facts) if expect in hit.text.en]
        edits = [edit for hit in hits for edit in hit.edits if edit.where in ("script", "launcher")]
        if not edits:
            continue
        changed += 1
        text = apply_edits(facts.launch.text, [(facts.launch, edits)]).text
        around = Surroundings(facts.gpu, facts.gpu_count, facts.packages, facts.target)
        after = facts_from_launch(find_launches(text)[0][0], Project(), around)
        assert not [hit for hit in found(rule_id, after) if expect in hit.text.en], (rule_id, text)
    assert changed > 50


def test_every_rule_is_tested() -> None:
    assert {rule.id for rule in rules()} == set(CASES) | WITH_FILES
    assert len({rule.id for rule in rules()}) == len(rules())
    for rule in rules():
        assert re.fullmatch(r"[a-z0-9-]+", rule.id) and rule.severity in ("error", "warning", "info")
        assert rule.title.en and rule.title.zh and rule.title.en != rule.title.zh


def test_a_sound_launch_has_no_findings() -> None:
    facts = make_facts(
        "--mixed_precision=bf16 --allow_tf32 --gradient_checkpointing --low_vram --enable_bucket --rank=64 "
        "--network_alpha=32 --target_name=q,k,v,ffn.0,ffn.2 --dataloader_num_workers=4 "
        "--video_sample_n_frames=49 --lr_scheduler=cosine_with_restarts --lr_warmup_steps=100",
        launcher="--mixed_precision bf16",
    )
    assert findings(facts, Project()) == []


def test_derived_flags_are_overridden_and_switches_named() -> None:
    text = 'ARGS="--use_came --rank 8"\naccelerate launch scripts/wan2.1_fun/train_lora.py --use_8bit_adam $ARGS\n'
    launch = find_launches(text)[0][0]
    from optim_patches.audit.edits import drop, put

    applied = apply_edits(text, [(launch, [put("rank", 64), drop("use_came")])])
    assert applied.text.endswith("$ARGS --rank 64\n")
    assert "--use_came" in applied.notes[0].en
    assert find_launches(applied.text)[0][0].options.integer("rank") == 64


# -- rules that read files ------------------------------------------------------------------------------------------
def with_files(tmp_path: Path, flags: str, **kwargs: Any):
    project = Project(roots=[tmp_path])
    facts = make_facts(flags, project=project, without=kwargs.pop("without", "train_data_meta"), **kwargs)
    return facts, project


def metadata(tmp_path: Path, rows: Any, name: str = "data/meta.json") -> str:
    write(tmp_path / name, rows if isinstance(rows, str) else json.dumps(rows))
    return f"--train_data_meta={name} --train_data_dir=data"


def mp4(width: int = 64, height: int = 32, frames: int = 40, fps: int = 24, *, video: bool = True) -> bytes:
    def box(kind: bytes, *parts: bytes) -> bytes:
        body = b"".join(parts)
        return struct.pack(">I4s", len(body) + 8, kind) + body

    header = bytes(76) + struct.pack(">II", width << 16, height << 16)
    mdhd = bytes(12) + struct.pack(">II", fps * 100, frames * 100) + bytes(4)
    stts = bytes(4) + struct.pack(">III", 1, frames, 100)
    handler = bytes(8) + (b"vide" if video else b"soun") + bytes(13)
    media = box(b"mdia", box(b"mdhd", mdhd), box(b"hdlr", handler), box(b"minf", box(b"stbl", box(b"stts", stts))))
    track = box(b"trak", box(b"tkhd", header), media)
    return box(b"ftyp", b"isom", bytes(4)) + box(b"moov", track) + box(b"mdat", bytes(99))


def clips(tmp_path: Path, *contents: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, content in enumerate(contents):
        write(tmp_path / f"data/{number}.mp4", content)
        rows.append({"file_path": f"{number}.mp4", "text": "x", "type": "video"})
    return rows


def test_headers_of_made_and_real_clips(tmp_path: Path) -> None:
    info = probe(write(tmp_path / "a.mp4", mp4(640, 360, 81, 25)))
    assert (info.width, info.height, info.frames, info.fps, info.problem) == (640, 360, 81, 25.0, "")
    cases = {"empty": b"", "not_media": b"just text in a file", "truncated": mp4()[:-60], "no_video": mp4(video=False)}
    for problem, content in cases.items():
        assert probe(write(tmp_path / "b.mp4", content)).problem == problem


def test_headers_agree_with_a_decoder(goldens: Path) -> None:
    av = pytest.importorskip("av")
    for path in sorted((goldens / "e2e/data/train").glob("0000000[1-6].mp4")):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            expected = (stream.width, stream.height, stream.frames, float(stream.average_rate))
        info = probe(path)
        assert (info.width, info.height, info.frames, info.fps) == expected


def test_metadata_problems(tmp_path: Path) -> None:
    write(tmp_path / "data/metadata.json", "[]")
    facts, project = with_files(tmp_path, "--train_data_meta=data/metadata.jsn")
    (hit,) = found("metadata-file", facts, project)
    assert "data/metadata.jsn does not exist" in hit.text.en and "metadata.json" in hit.text.en
    cases = (("{broken", "cannot be read"), ("[]", "no rows"), ('{"a": 1}', "no list"), ("\xff", "cannot"))
    for content, expect in cases:
        facts, project = with_files(tmp_path, metadata(tmp_path, content))
        assert expect in found("metadata-file", facts, project)[0].text.en
    write(tmp_path / "data/m.json", b"\xff\xfe\x00")
    facts, project = with_files(tmp_path, "--train_data_meta=data/m.json")
    assert "UTF-8" in found("metadata-file", facts, project)[0].text.en
    facts, project = with_files(tmp_path, metadata(tmp_path, '{"file_path": "a"}\n', "data/m.jsonl"), target="upstream")
    assert ".json and .csv only" in found("metadata-file", facts, project)[0].text.en


def test_wrong_keys_are_named_by_row(tmp_path: Path) -> None:
    rows = [{"file_path": "a.png", "text": "x"}, {"filepath": "b.png", "caption": "y"}, 7]
    facts, project = with_files(tmp_path, metadata(tmp_path, rows))
    texts = [hit.text.en for hit in found("metadata-keys", facts, project)]
    assert texts[:2] == ['row 2: "filepath" should be "file_path"', 'row 2: "caption" should be "text"']
    assert "row 3" in texts[2]
    facts, project = with_files(tmp_path, metadata(tmp_path, [{"filepath": "x", "text": "t"}] * 9))
    assert found("metadata-keys", facts, project)[-1].text.en == "and 4 more rows"


def test_rows_without_size_and_csv(tmp_path: Path) -> None:
    table = "file_path,text,type,width,height\na.mp4,x,video,640,360\nb.mp4,y,video,,\n"
    facts, project = with_files(tmp_path, metadata(tmp_path, table, "data/m.csv") + " --enable_bucket")
    assert (facts.data.rows, facts.data.videos, facts.data.unsized) == (2, 2, 1)
    assert "1 of 2 rows" in found("metadata-sizes", facts, project)[0].text.en


def test_videos_without_metadata(tmp_path: Path) -> None:
    clips(tmp_path, mp4(), mp4(), mp4())
    facts, project = with_files(tmp_path, "--train_data_dir=data")
    assert "3 videos in data" in found("unused-videos", facts, project)[0].text.en


def test_broken_files_are_named(tmp_path: Path) -> None:
    rows = clips(tmp_path, mp4(), b"", b"text in a file", mp4()[:-70], mp4(video=False))
    gone = {"file_path": "gone.mp4", "text": "", "type": "video"}
    facts, project = with_files(tmp_path, metadata(tmp_path, [*rows, gone]))
    texts = " / ".join(hit.text.en for hit in found("broken-files", facts, project))
    for part in ("1 of 6", "gone.mp4", "1.mp4 is empty", "2.mp4 is no video", "3.mp4 is cut off", "4.mp4 is without"):
        assert part in texts
    facts, project = with_files(tmp_path, metadata(tmp_path, rows[1:2]))
    assert found("broken-files", facts, project)[0].severity == "error"


def test_short_clips(tmp_path: Path) -> None:
    rows = clips(tmp_path, mp4(frames=64), mp4(frames=64))
    flags = metadata(tmp_path, rows) + " --video_sample_n_frames=65 --video_sample_stride=1"
    (hit,) = found("short-clips", *with_files(tmp_path, flags))
    assert hit.severity == "warning" and "2 of 2 clips" in hit.text.en
    assert [str(edit) for edit in hit.edits] == ["--video_sample_n_frames=61"]
    rows = clips(tmp_path, mp4(frames=64), mp4(frames=200))
    (hit,) = found("short-clips", *with_files(tmp_path, metadata(tmp_path, rows) + " --video_sample_n_frames=65 "
                                              "--video_sample_stride=1"))  # fmt: skip
    assert hit.severity == "info" and not hit.edits


def test_mixed_rates_and_stills(tmp_path: Path) -> None:
    rows = clips(tmp_path, mp4(fps=24), mp4(fps=60))
    assert "24 to 60" in found("mixed-rates", *with_files(tmp_path, metadata(tmp_path, rows)))[0].text.en
    stills = [{"file_path": f"{n}.png", "text": "sks", "width": 64, "height": 64} for n in range(250)]
    (hit,) = found("stills-for-video", *with_files(tmp_path, metadata(tmp_path, stills)))
    assert "all 250 rows are stills" in hit.text.en
    assert not found("stills-for-video", *with_files(tmp_path, metadata(tmp_path, rows)))


def test_sizes_beyond_the_source(tmp_path: Path) -> None:
    rows = [{"file_path": f"{n}.{'mp4' if n else 'png'}", "text": "x", "type": "video" if n else "image",
             "width": 832, "height": 480} for n in range(3)]  # fmt: skip
    flags = metadata(tmp_path, rows) + (
        " --image_sample_size 1280 --video_sample_size 256 --token_sample_size 632 --enable_bucket "
        "--training_with_video_token_length --random_hw_adapt --video_sample_n_frames=81"
    )
    texts = [hit.text.en for hit in found("upscaling", *with_files(tmp_path, flags))]
    assert any("1 of 1 images are enlarged, 832x480 by 2.03" in text for text in texts)
    assert any("2 of 2 videos are enlarged" in text for text in texts)
    assert any("256: 81" in text and "1280: 17" in text for text in texts)
    calm = metadata(tmp_path, rows) + " --video_sample_size=480 --image_sample_size=480"
    assert not found("upscaling", *with_files(tmp_path, calm))


def test_resume_from_exports_only(tmp_path: Path) -> None:
    write(tmp_path / "out/checkpoint-100.safetensors", b"x")
    flags = "--output_dir=out --resume_from_checkpoint=latest"
    (hit,) = found("resume-without-state", *with_files(tmp_path, flags))
    assert "checkpoint-100.safetensors" in hit.text.en and str(hit.edits[0]) == "--save_state"
    (tmp_path / "out/checkpoint-200").mkdir()
    assert not found("resume-without-state", *with_files(tmp_path, flags))
    (hit,) = found("resume-without-state", *with_files(tmp_path, flags.replace("latest", "checkpoint-7")))
    assert "there is checkpoint-200" in hit.text.en


def model_folder(tmp_path: Path, config: dict[str, Any], keys: list[str]) -> None:
    folder = tmp_path / "w/Wan2.1-Fun-1.3B-InP"
    write(folder / "config.json", json.dumps(config))
    header = json.dumps({key: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for key in keys}).encode()
    write(folder / "diffusion_pytorch_model.safetensors", struct.pack("<Q", len(header)) + header)


def test_weights_on_disk_against_the_mode(tmp_path: Path) -> None:
    model_folder(tmp_path, {"dim": 1536, "in_dim": 16, "model_type": "t2v"}, ["blocks.0.ffn.0.weight"])
    facts, project = with_files(tmp_path, "")
    (hit,) = found("mode-vs-weights", facts, project)
    assert hit.severity == "error" and "16 input channels" in hit.text.en
    assert [str(edit) for edit in hit.edits] == ["--train_mode=normal"]
    assert found("missing-image-keys", facts, project)
    assert not found("unknown-config-keys", facts, project)
    model_folder(tmp_path, {"dim": 1536, "in_dim": 36, "temporal_patch": 2}, ["img_emb.proj.0.weight"])
    facts, project = with_files(tmp_path, "")
    assert not found("mode-vs-weights", facts, project) and not found("missing-image-keys", facts, project)
    assert "temporal_patch" in found("unknown-config-keys", facts, project)[0].text.en


def test_deepspeed_and_accelerate_files(tmp_path: Path) -> None:
    write(tmp_path / "ds.json", json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
          "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}))  # fmt: skip
    facts, project = with_files(tmp_path, "", launcher="--use_deepspeed --deepspeed_config_file ds.json", gpus=8)
    assert "train_micro_batch_size_per_gpu to 2" in found("deepspeed-batch", facts, project)[0].text.en
    assert found("zero2-offload-param", facts, project)
    write(tmp_path / "acc.yaml", "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
          "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero_stage: 2\n")  # fmt: skip
    facts, project = with_files(tmp_path, "", launcher="--config_file acc.yaml")
    assert facts.zero == 2 and facts.world == 8 and facts.distribution.precision == "bf16"
    assert "zero_stage, mixed_precision" in found("accelerate-refuses-fields", facts, project)[0].text.en
    write(tmp_path / "bad.yaml", "a: [1\n")
    facts, project = with_files(tmp_path, "", launcher="--config_file bad.yaml")
    assert found("config-file", facts, project)[0].severity == "error"


def test_a_lone_accelerate_file(tmp_path: Path) -> None:
    data = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True,
        "fsdp_transformer_layer_cls_to_wrap": "WanAttentionBlock"}}  # fmt: skip
    facts = facts_from_config(ConfigFile("acc.yaml", "accelerate", data), Surroundings())
    assert facts.fsdp and facts.distribution.full_shard and facts.world == 4
    project = load_project([str(write(tmp_path / "acc.json", json.dumps(data)))])
    assert [config.kind for config in project.configs] == ["accelerate"] and not project.problems
