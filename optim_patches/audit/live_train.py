"""Live checks of groups H and I: training strategy and deep optimizations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from optim_patches.audit.live_run import cache_share
from optim_patches.audit.live_view import (
    DISABLED,
    ENABLED,
    INERT,
    NOT_APPLICABLE,
    RECOMMENDED,
    REFUSED,
    LiveRow,
    View,
    check,
    row,
)
from optim_patches.audit.text import Text, same
from optim_patches.registry import Outcome

LONG_WARMUP = 0.2
LONG_RUN = 200
NO_WARMUP = ("constant",)


@check("H1")
def schedule(view: View) -> LiveRow:
    facts = view.facts
    now = ", ".join(f"{rate:.3g}" for rate in facts.lr)
    curve = ", ".join(f"{rate:.3g}" for rate in facts.lr_curve)
    evidence = Text(f"rate now {now}" + (f"; at 0/25/50/75/100 %: {curve}" if curve else ""),
                    f"当前学习率 {now}" + (f"；0/25/50/75/100 %：{curve}" if curve else ""))  # fmt: skip
    name = view.value("lr_scheduler", "constant")
    if name != "constant":
        return row("H1", ENABLED, evidence, view.asked("lr_scheduler"), exercised=bool(facts.lr))
    return row("H1", RECOMMENDED if facts.total_steps > 1000 else DISABLED, evidence, view.asked("lr_scheduler"))


@check("H2")
def warmup(view: View) -> LiveRow:
    steps, total = int(view.value("lr_warmup_steps", 0) or 0), view.facts.total_steps
    asked = view.asked("lr_warmup_steps")
    evidence = Text(f"{steps} of {total} steps", f"{total} 步中的 {steps} 步")
    if view.value("lr_scheduler", "constant") in NO_WARMUP:
        why = Text("the constant schedule has no warm-up", "constant 调度没有预热")
        return row("H2", INERT if view.given("lr_warmup_steps") and steps else DISABLED, why, asked, exercised=False)
    if not steps:
        return row("H2", DISABLED, evidence, asked)
    if total and steps > LONG_WARMUP * total:
        evidence = evidence + Text("; more than 20 % of the run", "；超过总步数的 20 %")
    return row("H2", ENABLED, evidence, asked, exercised=True)


def _clip_totals(view: View) -> dict[str, float]:
    stats = list(view.facts.clip.values())
    totals = {key: sum(getattr(s, key, 0) for s in stats) for key in ("steps", "clipped", "abnormal", "skipped")}
    totals["average_norm"] = max((getattr(s, "average_norm", 0.0) for s in stats), default=0.0)
    return totals


@check("H3")
def clipping(view: View) -> LiveRow:
    limit, totals = float(view.value("max_grad_norm", 0) or 0), _clip_totals(view)
    evidence = Text(
        f"{totals['clipped']} of {totals['steps']} steps clipped, mean norm {totals['average_norm']:.3g}",
        f"{totals['steps']} 步中裁剪 {totals['clipped']} 步，平均范数 {totals['average_norm']:.3g}",
    )
    state = ENABLED if limit > 0 else RECOMMENDED
    return row("H3", state, evidence, view.asked("max_grad_norm"), exercised=totals["steps"] > 0, **totals)


@check("H4")
def abnormal(view: View) -> LiveRow:
    start = view.value("abnormal_norm_clip_start")
    totals = _clip_totals(view)
    evidence = Text(f"{totals['abnormal']} abnormal norms so far", f"至今 {totals['abnormal']} 次异常范数")
    if start is None:
        large = view.parameter_count() > 5_000_000_000
        return row("H4", RECOMMENDED if large else DISABLED, evidence)
    if view.facts.distributed in ("DEEPSPEED", "FSDP"):
        why = Text(f"{view.facts.distributed} clips by the plain rule", f"{view.facts.distributed} 使用普通裁剪")
        state = INERT if view.given("abnormal_norm_clip_start") else DISABLED
        return row("H4", state, why, view.asked("abnormal_norm_clip_start"), exercised=False)
    return row("H4", ENABLED, evidence, view.asked("abnormal_norm_clip_start"), exercised=totals["steps"] > 0)


@check("H5")
def ema(view: View) -> LiveRow:
    shadow = view.facts.ema
    if shadow is None:
        why = Text("no shadow weights are kept in this run", "本次运行未保存影子权重")
        return row("H5", INERT if view.value("use_ema") else DISABLED, why, view.asked("use_ema"), sites=0)
    number, updates = len(getattr(shadow, "shadow", ())), int(getattr(shadow, "optimization_step", 0))
    evidence = Text(f"{number} shadow tensors, {updates} updates", f"{number} 个影子张量，更新 {updates} 次")
    state = ENABLED if updates else INERT
    return row("H5", state, evidence, view.asked("use_ema"), sites=number, exercised=updates > 0)


@check("H6")
def uniform(view: View) -> LiveRow:
    world = view.facts.world
    evidence = Text(f"{world} {'process shares' if world == 1 else 'processes share'} the schedule",
                    f"{world} 个进程划分噪声表")  # fmt: skip
    if drawn := _timesteps(view):
        evidence += Text(f"; this one drew {min(drawn):.0f} to {max(drawn):.0f}",
                         f"；本进程抽到 {min(drawn):.0f} 至 {max(drawn):.0f}")  # fmt: skip
    if view.value("uniform_sampling"):
        return row("H6", ENABLED, evidence, view.asked("uniform_sampling"), exercised=bool(_timesteps(view)) or None)
    return row("H6", RECOMMENDED if world > 1 else DISABLED, evidence)


@check("H7")
def motion(view: View) -> LiveRow:
    if not view.value("motion_sub_loss"):
        return row("H7", DISABLED, Text("not asked for", "未要求"))
    frames, ratio = view.frames(), view.value("motion_sub_loss_ratio")
    asked = view.asked("motion_sub_loss", "motion_sub_loss_ratio")
    if frames and max(frames) <= 2:
        why = Text(f"needs more than 2 latent frames, drawn: {frames}", f"需要多于 2 个潜变量帧，实际：{frames}")
        return row("H7", INERT, why, asked, exercised=False)
    share = view.facts.motion_share
    part = "" if share is None else f" ({100 * share:.0f} %)"
    evidence = Text(f"share {ratio} of the loss{part}", f"占损失 {ratio}{part}")
    return row("H7", ENABLED if ratio else INERT, evidence, asked, exercised=bool(frames) or None)


def _timesteps(view: View) -> list[float]:
    if view.facts.timesteps:
        return view.facts.timesteps
    return [float(value) for tensor in view.counts.timesteps for value in tensor.detach().float().flatten()[:64]]


@check("H8")
def weighting(view: View) -> LiveRow:
    values = _timesteps(view)
    bins = Counter(min(int(value // 250), 3) for value in values)
    listing = ", ".join(f"{250 * k}-{250 * (k + 1)}: {bins.get(k, 0)}" for k in range(4))
    evidence = Text(f"timesteps drawn {listing}", f"时间步分布 {listing}")
    scheme = view.value("weighting_scheme", "none")
    return row("H8", ENABLED if scheme not in ("none", None) else DISABLED, evidence, view.asked("weighting_scheme"),
               exercised=bool(values) or None)  # fmt: skip


@check("H9")
def two_rates(view: View) -> LiveRow:
    groups = view.facts.groups
    listing = "; ".join(f"{tensors} tensors, {number} parameters at {rate:.3g}" for tensors, number, rate in groups)
    zh = "；".join(f"{tensors} 个张量，{number} 参数，学习率 {rate:.3g}" for tensors, number, rate in groups)
    evidence = Text(listing or "no parameter groups", zh or "无参数组")
    words = view.value("trainable_modules_low_learning_rate")
    if not view.has("trainable_modules_low_learning_rate") or view.trainable().get("kind") != "named":
        return row("H9", NOT_APPLICABLE, evidence)
    if not words:
        return row("H9", DISABLED, evidence)
    used = len({rate for tensors, _, rate in groups if tensors}) > 1
    return row("H9", ENABLED if used else INERT, evidence, view.asked("trainable_modules_low_learning_rate"),
               sites=groups[-1][0] if groups else 0, exercised=used)  # fmt: skip


@check("H10")
def reward(view: View) -> LiveRow:
    if not view.has("reward_fn"):
        return row("H10", NOT_APPLICABLE, Text("not a reward script", "不是奖励脚本"))
    asked = view.asked("reward_fn", "backprop_strategy")
    if view.facts.reward is None:
        return row("H10", ENABLED, same(str(view.value("reward_fn"))), asked)
    evidence = Text(f"mean reward {view.facts.reward:.4g}; {view.facts.reward_steps} steps with a reward",
                    f"平均奖励 {view.facts.reward:.4g}；{view.facts.reward_steps} 步有奖励")  # fmt: skip
    moved = view.facts.reward_steps > 0
    return row("H10", ENABLED if moved else INERT, evidence, asked, exercised=moved)


@check("I1")
def compiled(view: View) -> LiveRow:
    long = view.cuda and view.facts.total_steps > LONG_RUN
    return row("I1", RECOMMENDED if long else DISABLED, Text("not asked for", "未要求"))


@check("I2")
def liger(view: View) -> LiveRow:
    if view.cuda:
        return row("I2", RECOMMENDED, Text("not asked for", "未要求"))
    return row("I2", NOT_APPLICABLE, Text("Triton kernels need CUDA", "Triton 内核需要 CUDA"))


@check("I6")
def cached_text(view: View) -> LiveRow:
    calls = view.counts.encoder_calls.get("text_encoder", 0)
    loaded = "text_encoder" in view.target.models
    evidence = Text(f"{calls} text encoder calls in {view.counts.denoiser_steps} micro-steps",
                    f"{view.counts.denoiser_steps} 个微步中文本编码器调用 {calls} 次")  # fmt: skip
    evidence += cache_share(view, "text")
    if not loaded:
        evidence = Text("the text encoder is not loaded", "未加载文本编码器") + cache_share(view, "text")
        return row("I6", ENABLED, evidence, view.asked("cache_text"), exercised=True)
    if view.value("cache_text"):
        return row("I6", ENABLED, evidence, view.asked("cache_text"), exercised=not calls or None)
    return row("I6", RECOMMENDED if calls else ENABLED, evidence, exercised=not calls)


@check("I8")
def zeropp(view: View) -> LiveRow:
    section = view.facts.deepspeed.get("zero_optimization", {}) if view.facts.deepspeed else {}
    on = {key: True for key in ("zero_quantized_weights", "zero_quantized_gradients") if section.get(key) is True}
    if isinstance(parts := section.get("zero_hpz_partition_size"), int) and parts > 1:
        on["zero_hpz_partition_size"] = parts
    if not section:
        return row("I8", NOT_APPLICABLE, Text("no DeepSpeed", "未使用 DeepSpeed"))
    return row("I8", ENABLED if on else DISABLED, same(str(on or "-")), same("launcher"), exercised=bool(on))


@check("I9")
def nvme(view: View) -> LiveRow:
    section = view.facts.deepspeed.get("zero_optimization", {}) if view.facts.deepspeed else {}
    on = [k for k in ("offload_optimizer", "offload_param") if section.get(k, {}).get("device") == "nvme"]
    if not section:
        return row("I9", NOT_APPLICABLE, Text("no DeepSpeed", "未使用 DeepSpeed"))
    return row("I9", ENABLED if on else DISABLED, same(", ".join(on) or "-"), same("launcher"), exercised=bool(on))


@check("I10")
def fused_optimizer(view: View) -> LiveRow:
    paths = {type(o).__name__: _path(o) for o in view.optimizers()}
    listing = ", ".join(f"{name}: {path}" for name, path in paths.items())
    fused = "fused" in paths.values() or any("Fused" in name for name in paths)
    evidence = Text(f"update path {listing}", f"更新路径 {listing}")
    if view.value("fused_optimizer"):
        return row("I10", ENABLED if fused else INERT, evidence, view.asked("fused_optimizer"), exercised=fused)
    plain = view.cuda and any(name in ("AdamW", "Adam") for name in paths)
    return row("I10", ENABLED if fused else RECOMMENDED if plain else DISABLED, evidence, exercised=fused)


def _path(optimizer: Any) -> str:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    if group.get("fused"):
        return "fused"
    tensors = group.get("params", ())
    on_device = any(isinstance(p, torch.Tensor) and p.is_cuda for p in tensors)
    if group.get("foreach") or ("foreach" in group and group["foreach"] is None and on_device):
        return "foreach"
    return "one tensor at a time" if "foreach" in group else "the library's own"


@check("I11")
def prefetch(view: View) -> LiveRow:
    loader = getattr(view.target.loader, "_torch_loader", None)
    if loader is None:
        why = Text("no workers", "无 worker")
        asked = view.value("prefetch_factor")
        return row("I11", INERT if asked else NOT_APPLICABLE, why, view.asked("prefetch_factor") if asked else same(""))
    depth = getattr(loader, "prefetch_factor", None)
    asked = view.value("prefetch_factor")
    evidence = Text(f"{depth} batches per worker in flight", f"每个 worker 预取 {depth} 批")
    state = ENABLED if asked else DISABLED
    return row("I11", state, evidence, view.asked("prefetch_factor"), exercised=bool(depth))


def patch_row(outcome: Outcome, *, row_id: str, requested: Text) -> LiveRow:
    """The row of a patch that was asked for."""
    states = {"refused": REFUSED, "inert": INERT, "pending": INERT, "exercised": ENABLED}
    state = states[outcome.state]
    if outcome.state == "refused":
        return row(row_id, state, same(str(outcome.verdict)), requested, sites=0, exercised=False)
    if outcome.applied is None or outcome.evidence is None:
        why = Text("its stage was never reached", "未到达其阶段")
        return row(row_id, state, why, requested, sites=0, exercised=False)
    return row(row_id, state, same(outcome.evidence.summary), requested, sites=len(outcome.applied.sites),
               exercised=outcome.evidence.exercised, **outcome.evidence.facts)  # fmt: skip


