"""The decision tree: out of memory, slow, or bad results.

Each branch asks what the launch already does and takes the first step that is left; a step that is already taken leads
to the next question. What was measured in a finished run (share of time spent waiting for data, spikes of the gradient
norm, memory) answers questions that the command alone cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from optim_patches.audit.edits import Edit, config, drop, launcher, put, run, script_file
from optim_patches.audit.facts import Facts
from optim_patches.audit.flagtable import script_ids
from optim_patches.audit.rows.a import precision_edits
from optim_patches.audit.rows.d import OFFLOAD, ZERO2, deepspeed_edits, fsdp_edits, needs_offload
from optim_patches.audit.rows.f import FA2
from optim_patches.audit.rows.i import base_fits
from optim_patches.audit.text import Text, join, same

T = Text


@dataclass(frozen=True)
class Step:
    """One question with its answer, and what to change because of it."""

    question: Text
    answer: Text
    edits: tuple[Edit, ...] = ()


@dataclass
class Measured:
    """What a finished run says. None: not measured.

    Attributes:
        data_wait: share of time spent waiting for the loader.
        vae_share, text_share: share of time in the VAE and in the text encoder.
        spikes: steps whose gradient norm was more than ten times the median.
        bad_losses: steps with a loss that is no number.
        steps: steps that were logged.
        peak_gib: largest memory.
        mfu, idle, recompiles: of the look back at the run.
        command: the run's own command line.
        inert: ids of rows that were asked for and had no effect.
    """

    data_wait: float | None = None
    vae_share: float | None = None
    text_share: float | None = None
    mfu: float | None = None
    idle: float | None = None
    recompiles: int | None = None
    command: str = ""
    spikes: int | None = None
    bad_losses: int = 0
    steps: int = 0
    peak_gib: float | None = None
    inert: list[str] = field(default_factory=list)

    def lines(self) -> list[Text]:
        """What the run says, in a line or two."""
        parts = [T(f"{self.steps} steps", f"{self.steps} 步")]
        if self.peak_gib is not None:
            parts.append(T(f"peak memory {self.peak_gib:.1f} GiB", f"峰值内存 {self.peak_gib:.1f} GiB"))
        shares = ((self.data_wait, T("waiting for data", "等待数据")), (self.vae_share, T("VAE", "VAE")),
                  (self.text_share, T("text encoder", "文本编码器")), (self.idle, T("device idle", "设备空闲")),
                  (self.mfu, T("MFU", "MFU")))  # fmt: skip
        parts += [name + same(f" {100 * share:.0f} %") for share, name in shares if share is not None]
        found = [T("The run: ", "本次训练：") + join(parts)]
        if self.inert:
            found.append(T("asked for without effect (see its audit.md): ", "已要求但未生效（见其 audit.md）：")
                         + same(", ".join(self.inert)))
        return found


MANY_RECOMPILES = 2
YES, NO = T("yes", "是"), T("no", "否")
_STILL = T("still out of memory?", "仍然 OOM？")


def out_of_memory(f: Facts, again: int = 0) -> Iterator[Step]:
    """Steps against running out of memory. ``again`` skips that many levels that did not help."""
    if f.full:
        yield from _oom_full(f, again)
    else:
        yield Step(T("full fine-tuning?", "当前用全参训练？"), NO)
        yield from _oom_lora(f, again)


def _lora_twin(f: Facts) -> str | None:
    twin = f"{f.script_id}_lora"
    return twin.rsplit("/", 1)[-1] + ".py" if twin in script_ids() else None


def _oom_full(f: Facts, again: int) -> Iterator[Step]:
    question, twin = T("full fine-tuning?", "当前用全参训练？"), _lora_twin(f)
    if twin and again == 0:
        edits = [script_file(twin), put("rank", 64), put("network_alpha", 32)]
        given = ("trainable_modules", "trainable_modules_low_learning_rate", "use_ema", "abnormal_norm_clip_start")
        edits += [drop(name) for name in given if f.options.given(name)]
        if (f.options.number("learning_rate", 1e-4) or 0) < 5e-5:
            edits.append(put("learning_rate", "1e-4"))
        yield Step(question, T("yes: train a LoRA instead", "是：切换为 LoRA"), tuple(edits))
        return
    yield Step(question, T("yes, and there is no LoRA script or it did not help", "是，且没有 LoRA 脚本或仍不够"))
    yield from _savings(f)
    if again > 1 or twin is None:
        yield from _smaller(f)
        if (needs_offload(f) or again > 2) and not (f.zero == 3 and f.distribution.offload_optimizer):
            yield Step(_STILL, T("move optimizer and parameters to the host", "优化器与参数卸载到 CPU"),
                       deepspeed_edits(f, OFFLOAD, zero3=True))  # fmt: skip


def _oom_lora(f: Facts, again: int) -> Iterator[Step]:
    steps = list(_savings(f))
    yield from steps
    if not steps or again:
        yield from _smaller(f)


def _savings(f: Facts) -> Iterator[Step]:
    """What saves memory without changing the result, as far as it is not on already."""
    o = f.options
    if not o.on("gradient_checkpointing") and not (o.number("selective_ac") or 0):
        yield Step(same("--gradient_checkpointing?"), NO, (put("gradient_checkpointing"),))
    if f.accepts("cache_text") and not f.text_cached and not o.on("train_text_encoder"):
        yield Step(T("captions encoded once?", "文本已缓存？"), NO, (put("cache_text"),))
    if not o.on("low_vram") and not (f.cached and f.text_cached):
        yield Step(same("--low_vram?"), NO, (put("low_vram"),))
    if f.lora and not base_fits(f) and not o.on("qlora") and not f.sharded:
        yield Step(T("do the bf16 weights fit?", "bf16 权重放得下吗？"), NO, (put("qlora"),))
    optimizer = any(o.on(name) for name in ("use_8bit_adam", "use_came")) or f.distribution.offload_optimizer
    if not optimizer and not f.cpu:
        yield Step(same("--use_8bit_adam?"), NO, (put("use_8bit_adam"), *_drop_if(f, "fused_optimizer")))
    if not f.cached and f.accepts("vae_mini_batch"):
        chunk = o.integer("vae_mini_batch") or 32
        if chunk > 8:
            yield Step(same(f"--vae_mini_batch {chunk}"), T("halve it", "减半"), (put("vae_mini_batch", chunk // 2),))
    if f.size >= 720 and f.family is not None and f.family.wan_vae and not f.cached and not o.on("vae_tiling"):
        yield Step(same("--vae_tiling?"), NO, (put("vae_tiling"),))
    if f.batch > 1:
        edits = (put("train_batch_size", 1), put("gradient_accumulation_steps", f.batch * f.accumulation))
        yield Step(T(f"batch of {f.batch}", f"batch 为 {f.batch}"), T("1, and accumulate", "改为 1 并累积梯度"), edits)
    if f.lora and f.several and f.zero < 2 and not f.fsdp and (f.params or 0) >= 5:
        yield Step(T("several devices without ZeRO?", "多卡但未用 ZeRO？"), YES, deepspeed_edits(f, ZERO2))


def _drop_if(f: Facts, name: str) -> tuple[Edit, ...]:
    return (drop(name),) if f.options.given(name) else ()


def _smaller(f: Facts) -> Iterator[Step]:
    """Lower resolution, then fewer frames."""
    size = next((s for s in (512, 320, 256) if s < f.size), None)
    if size and f.accepts("video_sample_size"):
        names = [n for n in ("video_sample_size", "image_sample_size", "token_sample_size") if f.options.given(n)]
        names = names or ["video_sample_size"]
        yield Step(_STILL, T(f"lower the resolution: {f.size} -> {size}", f"降低分辨率：{f.size} -> {size}"),
                   tuple(put(name, size) for name in names))  # fmt: skip
    frames = next((n for n in (81, 49, 25) if n < f.frames), None)
    if frames and f.accepts("video_sample_n_frames"):
        yield Step(_STILL, T(f"fewer frames: {f.frames} -> {frames}", f"减少帧数：{f.frames} -> {frames}"),
                   (put("video_sample_n_frames", frames),))  # fmt: skip


def slow(f: Facts, measured: Measured | None = None) -> Iterator[Step]:
    """Steps against a slow run, the largest gain first."""
    measured = measured or Measured()
    if not f.cpu and f.capability(8) is not False:
        known = f.flash
        answer = T("not known", "无法确认") if known is None else YES if known else NO
        yield Step(T("flash-attn installed?", "flash-attn 已安装？"), answer, () if known else (run(FA2),))
    precise = f.precision in ("bf16", "fp16")
    wanted = "fp16" if f.capability(8) is False and not f.cpu else "bf16"
    yield Step(T("mixed precision on?", "混合精度已启用？"), YES if precise else NO,
               () if precise else precision_edits(f, wanted))  # fmt: skip
    yield from _utilization(f, measured)
    yield from _spread(f)
    if (measured.recompiles or 0) > MANY_RECOMPILES and f.options.text("compile_dynamic") != "true":
        yield Step(T("recompilations after warm-up?", "预热后仍在重新编译？"), same(measured.recompiles),
                   (put("compile_dynamic", "true"),))  # fmt: skip
    rest = [name for name in ("compile", "liger") if not f.options.on(name) and not f.cpu and f.accepts(name)]
    plain = not any(f.options.on(name) for name in ("use_8bit_adam", "use_came", "fused_optimizer")) and not f.zero
    if plain and not f.cpu and f.accepts("fused_optimizer"):
        rest.append("fused_optimizer")
    if rest:
        yield Step(T("kernels fused (compile, Liger, optimizer)?", "已使用 torch.compile / Liger / Fused 优化器？"), NO,
                   tuple(put(name) for name in rest))  # fmt: skip


def _utilization(f: Facts, measured: Measured) -> Iterator[Step]:
    wait = measured.data_wait
    waiting = wait is not None and wait > 0.1
    if f.task != "reward" and (f.workers == 0 or (waiting and f.workers < 8)):
        answer = T("decoded in the training process", "由训练进程解码") if wait is None else same(f"{100 * wait:.0f} %")
        yield Step(T("time spent waiting for data?", "DataLoader 瓶颈？"), answer, (put("dataloader_num_workers", 8),))
    if not f.cached and not f.random_sizes and f.task != "reward" and f.accepts("cache_latents"):
        share = same(f"{100 * measured.vae_share:.0f} %") if measured.vae_share is not None else YES
        edits = [put("cache_latents")]
        if not f.text_cached and not f.options.on("train_text_encoder"):
            edits.append(put("cache_text"))
        yield Step(T("clips encoded anew in every step?", "每步都重新编码视频？"), share, tuple(edits))
    mixed = f.data is not None and f.data.images > 0 and f.data.videos > 0
    if (mixed or f.random_sizes) and not f.sharded and not f.options.on("auto_tile_batch_size"):
        edits = (put("auto_tile_batch_size"), put("enable_bucket"))
        yield Step(T("small samples in the mix?", "小 batch 浪费？"), YES, edits)


def _spread(f: Facts) -> Iterator[Step]:
    if not f.several:
        return
    if f.lora and f.zero < 2 and not f.fsdp and (f.params or 0) >= 5:
        yield Step(T("several devices, LoRA", "多卡 LoRA"), T("ZeRO-2", "ZeRO-2"), deepspeed_edits(f, ZERO2))
    elif f.full and f.big and not f.sharded and f.blocks and not needs_offload(f):
        yield Step(T("several devices, full fine-tuning", "多卡全参"), T("FSDP", "FSDP"), fsdp_edits(f))
    elif f.fsdp and f.distribution.fsdp_prefetch != "BACKWARD_PRE" and f.distribution.fsdp_version == 1:
        yield Step(T("FSDP prefetch?", "FSDP 预取？"), NO, (launcher("fsdp_backward_prefetch", "BACKWARD_PRE"),))
    if f.nodes > 1:
        edits = [put("uniform_sampling")]
        if f.random_sizes:
            edits.append(put("keep_all_node_same_token_length"))
        if f.zero == 3:
            edits += [config("zero_optimization.zero_quantized_weights", "true"),
                      config("zero_optimization.zero_quantized_gradients", "true")]  # fmt: skip
        missing = tuple(e for e in edits if e.where != "script" or not f.options.on(e.name))
        yield Step(T("several nodes?", "多机训练？"), YES, missing)


def quality(f: Facts, measured: Measured | None = None) -> Iterator[Step]:
    """Steps against bad results."""
    o, measured = f.options, measured or Measured()
    if measured.bad_losses:
        text = T(f"{measured.bad_losses} steps had no finite loss: halve the learning rate",
                 "出现非有限 loss：学习率减半")
        rate = (o.number("learning_rate", 1e-4) or 1e-4) / 2
        yield Step(T("does the loss stay finite?", "loss 是否有限？"), text, (put("learning_rate", f"{rate:g}"),))
    if f.frames > 1 and f.accepts("motion_sub_loss") and not o.on("motion_sub_loss") and f.task != "distill":
        yield Step(T("motion in the loss?",
                     "启用运动子损失？"), NO, (put("motion_sub_loss"), put("motion_sub_loss_ratio", 0.25)))
    if f.accepts("abnormal_norm_clip_start") and not o.given("abnormal_norm_clip_start"):
        seen = measured.spikes
        answer = NO if seen is None else T(f"{seen} spikes in {measured.steps} steps",
                                           f"{measured.steps} 步中 {seen} 次尖峰")
        if seen is None or seen > 0:
            yield Step(T("gradient spikes caught?",
                         "梯度尖峰已处理？"), answer, (put("abnormal_norm_clip_start", 100),))
    rank = o.integer("rank") or 128
    if f.lora and rank < 128:
        better = 128 if rank >= 64 else 64
        edits = (put("rank", better), put("network_alpha", better // 2))
        yield Step(T(f"LoRA rank {rank}", f"LoRA rank 为 {rank}"), T(f"raise to {better}", f"增大到 {better}"), edits)
    if f.lora and not f.peft and not (o.number("rank_drop_out") or 0) and f.accepts("rank_drop_out"):
        yield Step(T("LoRA regularized?", "LoRA 正则化？"), NO, (put("rank_drop_out", 0.1),))
    if (o.text("lr_scheduler") or "constant").startswith("constant"):
        yield Step(T("learning rate decays?", "学习率衰减？"), NO, (put("lr_scheduler", "cosine_with_restarts"),))
