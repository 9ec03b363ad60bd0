"""Live checks of groups A to E: precision, recomputation, residency, sharding, adapters."""

from __future__ import annotations

import os
import re
from collections import Counter

import torch

from optim_patches.audit.live_view import (
    DISABLED,
    ENABLED,
    INERT,
    NOT_APPLICABLE,
    RECOMMENDED,
    LiveRow,
    View,
    check,
    counted,
    row,
)
from optim_patches.audit.text import Text, same, size

LARGE_MODEL = 5_000_000_000
LONG_CLIP = 13  # latent frames of a clip of 49


def _precision(view: View, *, dtype: str, row_id: str, flag: str) -> LiveRow | None:
    """The row of a 16-bit format that was asked for, or ``None`` when it was not."""
    if view.value("mixed_precision") != flag:
        return None
    counts, probe = view.dtype_counts(), view.counts
    seen = dtype in counts or dtype in probe.autocast or dtype in probe.input_dtypes
    evidence = Text(
        f"base weights {counted(counts)}; block inputs {counted(probe.input_dtypes)}; "
        f"autocast {counted(probe.autocast)}",
        f"基础权重 {counted(counts)}；块输入 {counted(probe.input_dtypes)}；autocast {counted(probe.autocast)}",
    )
    ran = dtype in probe.autocast or dtype in probe.input_dtypes
    return row(row_id, ENABLED if seen else INERT, evidence, view.asked("mixed_precision"),
               sites=counts.get(dtype, 0), exercised=ran)  # fmt: skip


@check("A1")
def bf16(view: View) -> LiveRow:
    asked = _precision(view, dtype="bfloat16", row_id="A1", flag="bf16")
    if asked is not None:
        return asked
    capable = not view.cuda or view.capability() >= (8, 0)
    evidence = Text(f"base weights {counted(view.dtype_counts())}", f"基础权重 {counted(view.dtype_counts())}")
    if view.value("mixed_precision") == "fp16":
        return row("A1", DISABLED, evidence, view.asked("mixed_precision"))
    return row("A1", RECOMMENDED if capable else NOT_APPLICABLE, evidence, view.asked("mixed_precision"))


@check("A2")
def fp16(view: View) -> LiveRow:
    asked = _precision(view, dtype="float16", row_id="A2", flag="fp16")
    if asked is None:
        old = view.cuda and view.capability() < (8, 0)
        return row("A2", RECOMMENDED if old else NOT_APPLICABLE, Text("not asked for", "未要求"))
    skipped = sum(getattr(stats, "skipped", 0) for stats in view.facts.clip.values())
    scale = view.facts.loss_scale
    extra = Text(f"; loss scale {scale}, {skipped} skipped steps", f"；损失缩放 {scale}，跳过 {skipped} 步")
    facts = {"loss_scale": scale, "skipped_steps": skipped}
    return LiveRow("A2", asked.state, asked.evidence + extra, asked.requested, asked.sites, asked.exercised, facts)


@check("A3")
def tf32(view: View) -> LiveRow:
    wide = view.dtype_counts().get("float32", 0)
    if not view.cuda:
        if view.value("allow_tf32"):
            return row("A3", INERT, Text("there is no CUDA matmul in this run", "本次运行没有 CUDA 矩阵乘"),
                       view.asked("allow_tf32"), sites=0, exercised=False)  # fmt: skip
        return row("A3", NOT_APPLICABLE, Text("no CUDA", "无 CUDA"))
    setting = torch.backends.cuda.matmul.allow_tf32
    evidence = Text(f"matmul setting {setting}; {wide} float32 weights",
                    f"矩阵乘设置 {setting}；{wide} 个 float32 权重")  # fmt: skip
    if view.value("allow_tf32"):
        return row("A3", ENABLED if setting else INERT, evidence, view.asked("allow_tf32"), exercised=bool(wide))
    capable = view.capability() >= (8, 0)
    state = RECOMMENDED if capable and wide else DISABLED if capable else NOT_APPLICABLE
    return row("A3", state, evidence)


@check("A4")
def fp8_weights(view: View) -> LiveRow:
    number = sum(count for dtype, count in view.dtype_counts().items() if dtype.startswith("float8"))
    evidence = Text(f"{number} float8 weights in the trained network", f"被训练网络中有 {number} 个 float8 权重")
    return row("A4", ENABLED if number else NOT_APPLICABLE, evidence, sites=number)


def _optimizer_state(view: View) -> tuple[str, int, Counter[str], int]:
    """Class, bytes, dtypes of the state, and what float32 moments of the same parameters would take."""
    names, total, dtypes, wide = [], 0, Counter(), 0
    for optimizer in view.optimizers():
        names.append(type(optimizer).__name__)
        for parameter, state in optimizer.state.items():
            wide += 8 * parameter.numel()
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    total += value.numel() * value.element_size()
                    dtypes[str(value.dtype).removeprefix("torch.")] += 1
    return ", ".join(names), total, dtypes, wide


def _optimizer_row(view: View, row_id: str, *, flag: str, marks: tuple[str, ...]) -> LiveRow:
    name, total, dtypes, wide = _optimizer_state(view)
    evidence = Text(
        f"{name}: state {size(total)} ({counted(dtypes)}); Adam in float32 would take {size(wide)}",
        f"{name}：状态 {size(total)}（{counted(dtypes)}）；float32 Adam 需要 {size(wide)}",
    )
    right = any(mark in name for mark in marks)
    facts = {"state_bytes": total, "adam_bytes": wide, "narrow_tensors": dtypes["uint8"] + dtypes["int8"]}
    if view.value(flag):
        return row(row_id, ENABLED if right else INERT, evidence, view.asked(flag), sites=len(view.optimizers()),
                   exercised=right and total > 0, **facts)  # fmt: skip
    return row(row_id, ENABLED if right else DISABLED, evidence, **facts)


@check("A5")
def adam_8bit(view: View) -> LiveRow:
    result = _optimizer_row(view, "A5", flag="use_8bit_adam", marks=("8bit",))
    if result.state == ENABLED and result.facts["state_bytes"] and not result.facts["narrow_tensors"]:
        why = Text("; every tensor is too small (under 4096 values) and keeps float32 state",
                   "；所有张量都太小（不足 4096 个值），状态仍为 float32")  # fmt: skip
        return row("A5", INERT, result.evidence + why, result.requested, sites=0, exercised=False, **result.facts)
    if result.state == DISABLED and result.facts["adam_bytes"] > 4 << 30 and view.cuda:
        return LiveRow("A5", RECOMMENDED, result.evidence, result.requested, facts=result.facts)
    return result


@check("A6")
def came(view: View) -> LiveRow:
    return _optimizer_row(view, "A6", flag="use_came", marks=("CAME",))


@check("B1")
def checkpointing(view: View) -> LiveRow:
    counts = view.counts
    asked = bool(view.value("gradient_checkpointing"))
    if not counts.blocks_visible:
        evidence = Text("recomputation happens inside the compiled network", "重计算发生在编译后的网络内部")
        return row("B1", ENABLED if asked else DISABLED, evidence, view.asked("gradient_checkpointing"))
    touched = len(counts.recomputed_blocks)
    evidence = Text(
        f"{touched} of {counts.blocks} blocks recomputed; {counts.recomputed_calls} recomputations",
        f"重计算 {touched}/{counts.blocks} 个块；共 {counts.recomputed_calls} 次",
    )
    facts = {"sites": touched, "exercised": counts.recomputed_calls > 0, "recomputations": counts.recomputed_calls}
    if asked:
        return row("B1", ENABLED if touched else INERT, evidence, view.asked("gradient_checkpointing"), **facts)
    if view.value("selective_ac"):
        return row("B1", DISABLED, Text("fractional, see B2", "分数检查点，见 B2"))
    heavy = view.parameter_count() > LARGE_MODEL or max(view.frames(), default=0) >= LONG_CLIP
    return row("B1", RECOMMENDED if heavy else DISABLED, evidence, **facts)


@check("B2")
def fractional(view: View) -> LiveRow:
    if not view.has("selective_ac"):
        return row("B2", NOT_APPLICABLE, Text("this script has no --selective_ac", "该脚本没有 --selective_ac"))
    share = view.value("selective_ac")
    if not share:
        return row("B2", DISABLED, Text("not asked for", "未要求"))
    asked = view.asked("selective_ac")
    if view.value("gradient_checkpointing"):
        evidence = Text("--gradient_checkpointing recomputes every block", "--gradient_checkpointing 已重计算全部块")
        return row("B2", INERT, evidence, asked)
    touched, blocks = len(view.counts.recomputed_blocks), view.counts.blocks
    evidence = Text(f"{touched} of {blocks} blocks recomputed, share {share} asked for",
                    f"重计算 {touched}/{blocks} 个块，要求比例 {share}")  # fmt: skip
    return row("B2", ENABLED if touched else INERT, evidence, asked, sites=touched, exercised=touched > 0)


@check("B3")
def accumulation(view: View) -> LiveRow:
    number = int(view.value("gradient_accumulation_steps", 1) or 1)
    steps, micro = view.facts.steps, view.facts.micro_steps
    ratio = micro / steps if steps else 0.0
    evidence = Text(f"{micro} micro-steps for {steps} optimizer steps", f"{steps} 个优化步共 {micro} 个微步")
    if number <= 1:
        return row("B3", DISABLED, evidence, micro_per_step=ratio)
    return row("B3", ENABLED if ratio > 1 else INERT, evidence, view.asked("gradient_accumulation_steps"),
               exercised=ratio > 1, micro_per_step=ratio)  # fmt: skip


@check("C1")
def low_vram(view: View) -> LiveRow:
    devices = {role: counted(counts) for role, counts in view.counts.encoder_devices.items()}
    listing = "; ".join(f"{role}: {text}" for role, text in sorted(devices.items()))
    if not devices:
        return row("C1", NOT_APPLICABLE, Text("no encoder is loaded", "未加载编码器"), view.asked("low_vram"))
    evidence = Text(f"during the denoiser's step {listing}", f"去噪步骤期间 {listing}")
    resident = any(view.device in counts for counts in view.counts.encoder_devices.values())
    if view.value("low_vram"):
        if not view.cuda:
            evidence = Text("everything is on the CPU, there is nothing to move", "全部在 CPU 上，无需搬移")
            return row("C1", INERT, evidence, view.asked("low_vram"), sites=0, exercised=False)
        return row("C1", INERT if resident else ENABLED, evidence, view.asked("low_vram"), sites=len(devices),
                   exercised=not resident)  # fmt: skip
    large = view.parameter_count() > LARGE_MODEL
    return row("C1", RECOMMENDED if large and view.cuda else DISABLED, evidence)


@check("C2")
def vae_mini_batch(view: View) -> LiveRow:
    seen = view.counts.vae_batches
    asked = view.asked("vae_mini_batch")
    if not seen:
        return row("C2", NOT_APPLICABLE, Text("the VAE encoded nothing", "VAE 未编码"), asked)
    limit, largest = int(view.value("vae_mini_batch", 0) or 0), max(seen)
    evidence = Text(f"largest batch the VAE saw: {largest}, in {sum(seen.values())} calls",
                    f"VAE 见到的最大批：{largest}，共 {sum(seen.values())} 次调用")  # fmt: skip
    kept = not limit or largest <= limit
    return row("C2", ENABLED if kept else INERT, evidence, asked, exercised=kept, largest_batch=largest)


@check("C3")
def multi_stream(view: View) -> LiveRow:
    if not view.has("multi_stream"):
        return row("C3", NOT_APPLICABLE, Text("this script has no --multi_stream", "该脚本没有 --multi_stream"))
    streams = view.facts.vae_streams
    evidence = Text(f"{streams} CUDA streams used for encoding", f"编码使用 {streams} 个 CUDA 流")
    if view.value("multi_stream"):
        return row("C3", ENABLED if streams else INERT, evidence, view.asked("multi_stream"), sites=streams,
                   exercised=streams > 0)  # fmt: skip
    inpaint = view.value("train_mode", "normal") != "normal"
    if view.cuda and inpaint and view.counts.vae_batches:
        return row("C3", RECOMMENDED, evidence)
    return row("C3", NOT_APPLICABLE, Text("text-to-video, CPU or cached latents", "文生视频、CPU 或已缓存潜变量"))


def _wanted(view: View, *, flag: str, variable: str) -> bool:
    return bool(view.value(flag)) or os.environ.get(variable, "").lower() == "true"


def _zero(view: View, row_id: str, *, stage: int) -> LiveRow:
    facts = view.facts
    active = int(facts.deepspeed.get("zero_optimization", {}).get("stage", 0)) if facts.deepspeed else 0
    wanted = _wanted(view, flag="use_deepspeed", variable="ACCELERATE_USE_DEEPSPEED")
    if facts.distributed == "DEEPSPEED":
        evidence = Text(f"DeepSpeed stage {active}, {facts.world} processes",
                        f"DeepSpeed 阶段 {active}，{facts.world} 进程")  # fmt: skip
        on = active == stage
        return row(row_id, ENABLED if on else DISABLED, evidence, same("launcher"), exercised=on)
    evidence = Text(f"distributed type {facts.distributed}, {facts.world} processes",
                    f"分布式类型 {facts.distributed}，{facts.world} 进程")  # fmt: skip
    if wanted and row_id == "D1":
        return row(row_id, INERT, evidence, same("--use_deepspeed"), sites=0, exercised=False)
    lora = view.trainable().get("kind") in ("lora", "peft")
    fits = facts.world > 1 and (lora if stage == 2 else not lora)
    return row(row_id, RECOMMENDED if fits and view.cuda and not facts.fsdp else NOT_APPLICABLE, evidence)


@check("D1")
def zero2(view: View) -> LiveRow:
    return _zero(view, "D1", stage=2)


@check("D2")
def zero3(view: View) -> LiveRow:
    return _zero(view, "D2", stage=3)


@check("D3")
def zero_offload(view: View) -> LiveRow:
    section = view.facts.deepspeed.get("zero_optimization", {}) if view.facts.deepspeed else {}
    devices = {key: section.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")}
    active = any(device not in ("none", None) for device in devices.values())
    if not section:
        return row("D3", NOT_APPLICABLE, Text("no DeepSpeed", "未使用 DeepSpeed"))
    return row("D3", ENABLED if active else DISABLED, same(str(devices)), same("launcher"), exercised=active)


@check("D4")
def fsdp(view: View) -> LiveRow:
    wanted = _wanted(view, flag="use_fsdp", variable="ACCELERATE_USE_FSDP")
    models = view.target.models.values()
    units = Counter(
        type(getattr(module, "_fsdp_wrapped_module", module)).__name__
        for model in models for module in model.modules() if type(module).__name__.startswith(("FSDP", "FullySharded"))
    )  # fmt: skip
    evidence = Text(f"{sum(units.values())} sharded units: {counted(units)}; {view.facts.distributed}",
                    f"{sum(units.values())} 个分片单元：{counted(units)}；{view.facts.distributed}")  # fmt: skip
    if wanted or units:
        return row("D4", ENABLED if units else INERT, evidence, same("--use_fsdp"), sites=sum(units.values()),
                   exercised=bool(units))  # fmt: skip
    full = view.trainable().get("kind") == "named"
    suits = view.facts.world > 1 and full and view.cuda and view.facts.distributed != "DEEPSPEED"
    return row("D4", RECOMMENDED if suits else NOT_APPLICABLE, evidence)


@check("D5")
def fsdp_prefetch(view: View) -> LiveRow:
    value = view.facts.fsdp.get("prefetch") if view.facts.fsdp else None
    if not view.facts.fsdp:
        return row("D5", NOT_APPLICABLE, Text("no FSDP", "未使用 FSDP"))
    value = None if value in ("None", "NO_PREFETCH") else value
    return row("D5", ENABLED if value else RECOMMENDED, Text(f"backward prefetch {value}", f"反向预取 {value}"),
               same("launcher"), exercised=bool(value))  # fmt: skip


def _adapter_row(view: View, row_id: str, *, kind: str, requested: Text) -> LiveRow:
    facts = view.trainable()
    if facts.get("kind") not in ("lora", "peft"):
        return row(row_id, NOT_APPLICABLE, Text("full fine-tuning", "全参微调"))
    adapters = view.adapters()
    share = 100 * facts.get("trainable_parameters", 0) / max(facts.get("total_parameters", 1), 1)
    rank, alpha = facts.get("rank"), facts.get("alpha")
    evidence = Text(
        f"{len(adapters)} adapted layers, rank {rank}, alpha {alpha}, {share:.2f} % trainable",
        f"{len(adapters)} 个适配层，rank {rank}，alpha {alpha}，可训练 {share:.2f} %",
    )
    if facts["kind"] != kind:
        return row(row_id, DISABLED, Text("the other kind of LoRA is used", "使用了另一种 LoRA"))
    return row(row_id, ENABLED if adapters else INERT, evidence, requested, sites=len(adapters),
               exercised=_adapters_moved(view))  # fmt: skip


def _adapters_moved(view: View) -> bool:
    """Whether an adapter's up matrix left zero, its initial value: the adapters got gradients and were stepped."""
    for name, parameter in view.denoiser.named_parameters() if view.denoiser is not None else ():
        if ("lora_up" in name or "lora_B" in name) and parameter.numel() and bool(parameter.detach().any()):
            return True
    return False


@check("E1")
def peft_lora(view: View) -> LiveRow:
    return _adapter_row(view, "E1", kind="peft", requested=view.asked("use_peft_lora", "rank", "network_alpha"))


@check("E2")
def native_lora(view: View) -> LiveRow:
    return _adapter_row(view, "E2", kind="lora", requested=view.asked("rank", "network_alpha"))


@check("E3")
def lora_targets(view: View) -> LiveRow:
    if view.trainable().get("kind") not in ("lora", "peft"):
        return row("E3", NOT_APPLICABLE, Text("full fine-tuning", "全参微调"))
    names = list(view.adapters())
    targets = [part.strip() for part in (view.value("target_name") or "").split(",") if part.strip()]
    ends = Counter(re.sub(r"^\w+\.\d+\.", "", name) for name in names)
    if not targets:
        evidence = Text(f"all linear layers: {counted(ends)}", f"全部线性层：{counted(ends)}")
        return row("E3", ENABLED, evidence, Text("default", "默认"), sites=len(names), exercised=bool(names))
    inside = view.trainable()["kind"] == "lora" and not view.value("lora_exact_match")
    matched = {t: sum(t in name if inside else _matches(name, t) for name in names) for t in targets}
    idle = [target for target, number in matched.items() if not number and target != "all-linear"]
    evidence = Text(f"layers per target {counted(matched)}", f"各目标匹配层数 {counted(matched)}")
    return row("E3", INERT if idle else ENABLED, evidence, view.asked("target_name"), sites=len(names),
               exercised=bool(names) and not idle, matched=matched)  # fmt: skip


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _dropout(view: View, row_id: str, *, flag: str, attribute: str) -> LiveRow:
    value = view.value(flag)
    if view.trainable().get("kind") not in ("lora", "peft"):
        return row(row_id, NOT_APPLICABLE, Text("full fine-tuning", "全参微调"))
    on = [m for m in view.adapters().values() if getattr(m, attribute, None)]
    evidence = Text(f"{len(on)} adapters have it, value {value}", f"{len(on)} 个适配器启用，取值 {value}")
    if not value:
        return row(row_id, DISABLED, evidence, sites=len(on))
    return row(row_id, ENABLED if on else INERT, evidence, view.asked(flag), sites=len(on), exercised=bool(on))


@check("E4")
def rank_dropout(view: View) -> LiveRow:
    return _dropout(view, "E4", flag="rank_drop_out", attribute="rank_dropout")


@check("E5")
def module_dropout(view: View) -> LiveRow:
    return _dropout(view, "E5", flag="module_drop_out", attribute="module_dropout")


