"""Flags that are unknown, dead, repeated, out of range, or missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from optim_patches.audit.edits import Edit, drop, put, run
from optim_patches.audit.facts import Facts
from optim_patches.audit.flagtable import DEAD, any_upstream_flag, known_flags, own_flags, upstream_flags
from optim_patches.audit.launch import Option
from optim_patches.audit.project import Project
from optim_patches.audit.rows.h import scheduler, warmup
from optim_patches.audit.rules import Hit, Rule
from optim_patches.audit.text import Text, same

T = Text
CHOICES = {
    "mixed_precision": ("no", "fp16", "bf16"),
    "boundary_type": ("low", "high", "full"),
    "weighting_scheme": ("sigma_sqrt", "logit_normal", "mode", "cosmap", "none"),
    "backprop_strategy": ("last", "tail", "uniform", "random"),
    "lr_scheduler": ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                     "piecewise_constant"),
}  # fmt: skip
POSITIVE = ("train_batch_size", "gradient_accumulation_steps", "video_sample_n_frames", "video_sample_stride", "rank",
            "video_sample_size", "image_sample_size", "max_train_steps", "vae_mini_batch", "prefetch_factor",
            "sequence_parallel_size")  # fmt: skip


def _unknown(f: Facts, _: Project) -> Iterator[Hit]:
    for option in f.options.items:
        if option.known or option.typed.startswith("$"):
            continue
        near = difflib.get_close_matches(option.name, known_flags(f.script_id), n=1, cutoff=0.7)
        if option.name in any_upstream_flag():
            text = T("{0} belongs to other scripts; this one stops on it", "{0} 属于其他脚本；该脚本会因此报错")
            yield Hit(text.format(option.typed), (drop(option.name),))
        elif near:
            yield Hit(T("{0} is no flag of this script; did you mean --{1}?",
                        "{0} 不是该脚本的参数；是否想写 --{1}？").format(option.typed, near[0]),
                      _respelt(f, option, near[0]))
        else:
            yield Hit(T("{0} is no flag of this script; it stops at start",
                        "{0} 不是该脚本的参数；启动即报错").format(option.typed))


def _respelt(f: Facts, option: Option, name: str) -> tuple[Edit, ...]:
    """The flag that was meant, with the value that was given; where it is given too, only the wrong one goes."""
    if f.options.given(name):
        return (drop(option.name),)
    if len(option.values) > 1:
        return ()
    return drop(option.name), put(name, option.values[0] if option.values else None)


def _only_ours(f: Facts, _: Project) -> Iterator[Hit]:
    theirs = upstream_flags(f.script_id)
    if not theirs:
        return
    added = [option.name for option in f.options.items if option.known and option.name not in theirs]
    added = [name for name in dict.fromkeys(added) if name in own_flags(f.script_id)]
    if not added:
        return
    flags = " ".join(f"--{name}" for name in added)
    if f.target == "upstream":
        text = T("VideoX-Fun's own script stops on {0}; run the same command with this project's scripts, or drop them",
                 "VideoX-Fun 自带脚本不认识 {0}，会报错；请用本项目的同名脚本运行，或删除这些参数")  # fmt: skip
        yield Hit(text.format(flags), tuple(drop(name) for name in added), "error")
    else:
        yield Hit(T("{0}: taken here, unknown to VideoX-Fun's own script",
                    "{0}：本项目支持，VideoX-Fun 自带脚本不认识").format(flags))


def _dead_pairs(f: Facts) -> Iterator[tuple[str, Text]]:
    """Flags that were given and change nothing, with the reason."""
    o = f.options
    for name in sorted(DEAD):
        yield name, T("read by no script", "没有脚本读取它")
    if f.lora:
        yield "use_ema", T("LoRA scripts ignore it", "LoRA 脚本忽略它")
        yield "train_text_encoder", T("text is encoded without gradients, the text encoder never learns",
                                      "文本编码不带梯度，文本编码器不会被训练")
    if f.task == "distill":
        for name in ("motion_sub_loss", "motion_sub_loss_ratio", "report_model_info"):
            yield name, T("distillation ignores it", "蒸馏脚本忽略它")
    if f.task == "reward":
        for name in ("dataloader_num_workers", "report_model_info", "validation_epochs", "video_sample_stride"):
            yield name, T("reward scripts ignore it", "奖励训练脚本忽略它")
    if f.task == "s2v":
        yield "video_repeat", T("speech scripts ignore it", "S2V 脚本忽略它")
    if not o.on("enable_bucket"):
        for name in ("fix_sample_size", "random_ratio_crop"):
            yield name, T("works with --enable_bucket only", "仅在 --enable_bucket 下有效")
    elif o.given("fix_sample_size"):
        for name in ("random_hw_adapt", "training_with_video_token_length"):
            yield name, T("--fix_sample_size switches it off", "--fix_sample_size 会关闭它")
    if not o.on("motion_sub_loss"):
        yield "motion_sub_loss_ratio", T("needs --motion_sub_loss", "需要 --motion_sub_loss")
    if o.on("gradient_checkpointing"):
        yield "selective_ac", T("--gradient_checkpointing takes precedence", "--gradient_checkpointing 优先")
    if scheduler(f) == "constant":
        yield "lr_warmup_steps", T("the constant schedule has no warm-up; use constant_with_warmup",
                                   "constant 没有 warmup；请用 constant_with_warmup")
    if not f.image_conditioned:
        yield "multi_stream", T("text to video has nothing to overlap", "T2V 没有可重叠的编码")
    if f.peft:
        for name in ("rank_drop_out", "module_drop_out"):
            yield name, T("PEFT has no such dropout", "PEFT 不支持该 dropout")
    if not f.lora:
        for name in ("rank_drop_out", "module_drop_out"):
            yield name, T("no LoRA is trained", "不是 LoRA 训练")
    if f.nodes <= 1 and not f.several:
        yield "keep_all_node_same_token_length", T("one process has nobody to wait for", "单进程无需同步")


def _dead(f: Facts, _: Project) -> Iterator[Hit]:
    seen: set[str] = set()
    for name, reason in _dead_pairs(f):
        if f.options.given(name) and name not in seen:
            seen.add(name)
            yield Hit(T("--{0} has no effect: {1}", "--{0} 不起作用：{1}").format(name, reason), (drop(name),))
    if f.options.on("training_with_video_token_length") and not f.options.on("random_hw_adapt"):
        if not f.options.given("fix_sample_size"):
            text = T("--training_with_video_token_length draws sizes only together with --random_hw_adapt",
                     "--training_with_video_token_length 需与 --random_hw_adapt 同用才会选取尺寸")
            yield Hit(text, (put("random_hw_adapt"),))
    if f.options.on("uniform_sampling") and (f.options.text("weighting_scheme") or "none") in ("logit_normal", "mode"):
        text = T("--weighting_scheme {0} draws timesteps, which --uniform_sampling replaces",
                 "--weighting_scheme {0} 控制时间步抽样，已被 --uniform_sampling 取代")
        yield Hit(text.format(f.options.text("weighting_scheme")), (drop("weighting_scheme"),))


def _values(f: Facts, _: Project) -> Iterator[Hit]:
    for option in f.options.items:
        flag = f.options.flags.get(option.name)
        if flag is None or option.opaque or not option.known:
            continue
        if flag.arity and not option.values:
            yield Hit(T("{0} has no value", "{0} 缺少取值").format(option.typed))
            continue
        for value in option.values:
            if flag.kind in ("i", "2i", "+i") and not value.lstrip("+-").isdigit():
                yield Hit(T("{0} wants a whole number, got {1}", "{0} 需要整数，得到 {1}").format(option.typed, value))
            elif flag.kind == "f" and not _number(value):
                yield Hit(T("{0} wants a number, got {1}", "{0} 需要数字，得到 {1}").format(option.typed, value))
        wanted = CHOICES.get(option.name)
        if wanted and option.values and option.values[-1] not in wanted:
            text = T("{0} {1} is none of {2}", "{0} {1} 不在可选值 {2} 中")
            yield Hit(text.format(option.typed, option.values[-1], ", ".join(wanted)))
    for name in POSITIVE:
        value = f.options.integer(name)
        if f.options.given(name) and value is not None and value < 1:
            yield Hit(T("--{0} {1} must be at least 1", "--{0} {1} 至少应为 1").format(name, value))


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _missing(f: Facts, _: Project) -> Iterator[Hit]:
    o = f.options
    if not f.script_id or any(word.opaque and "@" in word.text for word in f.launch.strays):
        return
    theirs = upstream_flags(f.script_id)
    if not o.given("pretrained_model_name_or_path"):
        yield Hit(T("--pretrained_model_name_or_path is missing", "缺少 --pretrained_model_name_or_path"))
    config = theirs.get("config_path")
    if config is not None and config.default is None and not o.given("config_path"):
        yield Hit(T("--config_path is missing: the model's parts cannot be found",
                    "缺少 --config_path：无法定位模型组件"), severity="warning")
    if "train_data_meta" in theirs and not o.given("train_data_meta"):
        yield Hit(T("--train_data_meta is missing: there is nothing to train on",
                    "缺少 --train_data_meta：没有训练数据"))
    if f.full and "trainable_modules" in theirs and not o.given("trainable_modules"):
        severity = "error" if f.target == "upstream" else "warning"
        yield Hit(T("--trainable_modules is missing; VideoX-Fun's script stops without it, \".\" trains everything",
                    "缺少 --trainable_modules；VideoX-Fun 脚本会报错，\".\" 表示全部训练"),
                  (put("trainable_modules", "."),), severity)  # fmt: skip


def _repeated(f: Facts, _: Project) -> Iterator[Hit]:
    values: dict[str, list[tuple[str, ...]]] = {}
    for option in f.options.items:
        values.setdefault(option.name, []).append(option.values)
    for name, given in values.items():
        if len(given) > 1 and len(set(given)) > 1:
            text = T("--{0} is given {1} times; the last value {2} counts", "--{0} 出现 {1} 次；以最后的 {2} 为准")
            yield Hit(text.format(name, len(given), " ".join(given[-1])))


def _strays(f: Facts, _: Project) -> Iterator[Hit]:
    plain = [word.text for word in f.launch.strays if not word.opaque]
    if plain:
        text = T("words that belong to no flag: {0}; the script stops on them", "不属于任何参数的词：{0}；脚本会报错")
        yield Hit(text.format(same(" ".join(plain[:5])[:200])))


def _warmup(f: Facts, _: Project) -> Iterator[Hit]:
    steps = f.steps
    if scheduler(f) == "constant" or not steps or warmup(f) <= 0.2 * steps:
        return
    share = 100 * warmup(f) / steps
    text = T("warm-up of {0} steps in a run of {1} ({2:.0f} %)", "共 {1} 步，warmup 占 {0} 步（{2:.0f}%）")
    better = max(1, steps // 20)
    severity = "error" if warmup(f) >= steps else ""
    yield Hit(text.format(warmup(f), steps, share), (put("lr_warmup_steps", better),), severity)


def _prefetch(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.given("prefetch_factor") and f.workers == 0 and not f.options.hidden("dataloader_num_workers"):
        yield Hit(T("--prefetch_factor without workers: the loader refuses it",
                    "没有 worker 时 --prefetch_factor 会被拒绝"),
                  (put("dataloader_num_workers", 4),))  # fmt: skip


def _text_in_loader(f: Facts, _: Project) -> Iterator[Hit]:
    if not f.options.on("enable_text_encoder_in_dataloader"):
        return
    if not f.options.on("enable_bucket"):
        yield Hit(T(
            "--enable_text_encoder_in_dataloader works with --enable_bucket only",
            "--enable_text_encoder_in_dataloader 仅在 --enable_bucket 下可用"), (put("enable_bucket"),), "error")
    if f.task == "distill" or f.script_id.startswith(("hunyuanvideo", "flux/")):
        yield Hit(T("text encoding in the loader does not work in this script", "该脚本不支持在 DataLoader 中编码文本"),
                  (drop("enable_text_encoder_in_dataloader"),), "error")  # fmt: skip
    elif not f.cpu:
        text = T("the 5B text encoder runs on the CPU inside the loader{0}; --cache_text encodes each caption once",
                 "5B 文本编码器在 DataLoader 中用 CPU 运行{0}；--cache_text 每条提示词只编码一次")  # fmt: skip
        copies = T(", one copy per worker ({0})",
                   "，每个 worker 一份（{0}）").format(f.workers) if f.workers else same("")
        yield Hit(text.format(copies), (drop("enable_text_encoder_in_dataloader"), put("cache_text")))


def _cache_random(f: Facts, _: Project) -> Iterator[Hit]:
    if not f.options.on("cache_latents"):
        return
    cut = [name for name in ("random_frame_crop", "keep_all_node_same_token_length", "auto_tile_batch_size")
           if f.options.on(name)]
    if cut:
        text = T("{0} changes batches after they are read: clips are decoded and the VAE stays loaded, the cache only "
                 "spares encoding", "{0} 在读取后改变批次：仍需解码视频并加载 VAE，缓存只省去编码")
        yield Hit(text.format(" ".join(f"--{name}" for name in cut)))
    drawn = [name for name in ("random_hw_adapt", "random_ratio_crop") if f.options.on(name)]
    if drawn and not f.options.given("cache_budget_gb"):
        text = T("with {0} the cache holds an entry for each size a clip may get; --cache_budget_gb limits it",
                 "{0} 下缓存为每个可能的尺寸各存一份；可用 --cache_budget_gb 限制大小")
        yield Hit(text.format(" ".join(f"--{name}" for name in drawn)))


def _tracker(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.text("report_to") == "wandb" and f.options.given("hub_token"):
        yield Hit(T("--hub_token with --report_to wandb is refused: the token would be logged",
                    "--report_to wandb 时拒绝 --hub_token：token 会被记录"),
                  (drop("hub_token"), run("huggingface-cli login")))  # fmt: skip


def _frames(f: Facts, _: Project) -> Iterator[Hit]:
    if f.still or not f.options.given("video_sample_n_frames") or f.task == "s2v":
        return
    if f.frames % 4 != 1:
        kept = max(1, (f.frames - 1) // 4 * 4 + 1)
        text = T("{0} frames are cut to {1}: the VAE takes 4k+1", "{0} 帧会被截到 {1} 帧：VAE 需要 4k+1 帧")
        yield Hit(text.format(f.frames, kept), (put("video_sample_n_frames", kept),))


RULES = (
    Rule("unknown-flag", "error", T("unknown flag", "未知参数"), _unknown),
    Rule("flag-unknown-upstream", "info", T("flag VideoX-Fun lacks", "VideoX-Fun 没有的参数"), _only_ours),
    Rule("bad-value", "error", T("value out of range", "取值不合法"), _values),
    Rule("missing-flag", "error", T("required flag missing", "缺少必需参数"), _missing),
    Rule("stray-words", "error", T("stray words", "多余的词"), _strays),
    Rule("repeated-flag", "warning", T("flag given twice", "参数重复"), _repeated),
    Rule("dead-flag", "warning", T("flag without effect", "无效参数"), _dead),
    Rule("warmup-too-long", "warning", T("warm-up too long", "warmup 过长"), _warmup),
    Rule("prefetch-without-workers", "error", T("prefetch without workers", "没有 worker 的预取"), _prefetch),
    Rule("text-encoder-in-loader", "warning", T("text encoder in the loader",
                                                "DataLoader 中的文本编码器"), _text_in_loader),
    Rule("cache-random-sizes", "warning", T("cache with random sizes", "缓存与随机尺寸"), _cache_random),
    Rule("hub-token", "error", T("token with wandb", "wandb 与 token"), _tracker),
    Rule("frame-count", "warning", T("frame count", "帧数"), _frames),
)
