"""H. Training strategy."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import config, put
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
LONG = 2000
_NO_FLAG = T("this script has no such flag", "该脚本没有此参数")
_LORA = T("full fine-tuning only", "仅用于全参微调")
NOT_DIFFERENTIABLE = ("HPSv3Reward", "VideoAlignReward")


def scheduler(f: Facts) -> str:
    return f.options.text("lr_scheduler") or "constant"


def warmup(f: Facts) -> int:
    value = f.options.integer("lr_warmup_steps", 500)
    return 500 if value is None else value


def _long(f: Facts) -> bool:
    if f.steps is not None:
        return f.steps >= LONG
    return (f.options.integer("num_train_epochs") or 100) >= 50


def _h1_advice(f: Facts) -> Advice | None:
    if not _long(f):
        return None
    reason = T("a long run with a {0} rate", "长训练使用 {0} 学习率").format(scheduler(f))
    edits = [put("lr_scheduler", "cosine_with_restarts")]
    if not f.options.given("lr_warmup_steps"):
        edits.append(put("lr_warmup_steps", min(500, max(10, (f.steps or 2000) // 20))))
    return Advice(reason, tuple(edits))


def _h2_blocked(f: Facts) -> Text | None:
    return T("the constant schedule has no warm-up", "constant 调度没有 warmup") if scheduler(f) == "constant" else None


def _h2_enabled(f: Facts) -> Text | None:
    if warmup(f) <= 0:
        return None
    return same(str(warmup(f))) if f.options.given("lr_warmup_steps") else T("default 500", "默认 500")


def _h2_advice(f: Facts) -> Advice | None:
    if f.global_batch >= 8:
        reason = T("global batch {0} without warm-up", "全局 batch {0}，没有 warmup").format(f.global_batch)
        return Advice(reason, (put("lr_warmup_steps", min(500, max(10, (f.steps or 2000) // 20))),))
    return None


def norm(f: Facts) -> float | None:
    return f.options.number("max_grad_norm", 1.0)


def unclipped(f: Facts) -> bool:
    """Under DeepSpeed clipping comes from its file alone."""
    return f.zero > 0 and not f.distribution.inferred and not f.distribution.missing and f.distribution.clipping is None


def _h3_enabled(f: Facts) -> Text | None:
    value = norm(f)
    if unclipped(f) or value is None or not 0 < value <= 1:
        return None
    return same(f"{value:g}") if f.options.given("max_grad_norm") else T("default 1.0", "默认 1.0")


def _h3_advice(f: Facts) -> Advice | None:
    if unclipped(f):
        reason = T("the DeepSpeed file has no gradient_clipping, so nothing is clipped",
                   "DeepSpeed 配置没有 gradient_clipping，不会裁剪")
        return Advice(reason, (config("gradient_clipping", "auto"),), "P1")
    value = norm(f)
    if value is None:
        return None
    if value <= 0 and f.lora:
        return None
    reason = T("{0:g} lets through the spikes of video training", "{0:g} 挡不住视频训练的梯度尖峰").format(value)
    return Advice(reason, (put("max_grad_norm", 1.0),))


def _h4_blocked(f: Facts) -> Text | None:
    if f.task in ("distill", "reward"):
        return T("other objective", "该目标不使用")
    return None if f.accepts("abnormal_norm_clip_start") else _NO_FLAG


def _h4_enabled(f: Facts) -> Text | None:
    start = f.options.integer("abnormal_norm_clip_start")
    if f.options.given("abnormal_norm_clip_start"):
        return same(f"--abnormal_norm_clip_start {start}") if start is None or start > 0 else None
    if f.full and not f.big and f.options.flags.get("abnormal_norm_clip_start"):
        return T("default: from step 1000", "默认从第 1000 步开始")
    return None


def _h4_advice(f: Facts) -> Advice | None:
    if f.params is not None and f.params >= 14:
        return Advice(T("14B: catch gradient spikes from step 100 on", "14B：从第 100 步起自动裁剪梯度尖峰"),
                      (put("abnormal_norm_clip_start", 100),))  # fmt: skip
    return None


def _h5_blocked(f: Facts) -> Text | None:
    if f.lora:
        return T("LoRA scripts accept the flag and ignore it", "LoRA 脚本接受该参数但忽略它")
    if f.zero == 3:
        return T("refused under ZeRO-3", "ZeRO-3 下不支持")
    return None if f.accepts("use_ema") else _NO_FLAG


def _h5_advice(f: Facts) -> Advice | None:
    if f.tight or f.short:
        return None
    return Advice(T("steadier weights for about one more copy of the trained parameters",
                    "更稳定，代价约 1x 可训练参数的显存"),
                  (put("use_ema"),))  # fmt: skip


def expert(f: Facts) -> bool:
    """One of two noise experts is trained, whose range only uniform sampling respects in VideoX-Fun."""
    return f.accepts("boundary_type") and (f.options.text("boundary_type") or "full") != "full" and f.params != 5.0


def _h6_advice(f: Facts) -> Advice | None:
    edits = (put("uniform_sampling"),)
    if expert(f):
        return Advice(T("the noise expert sees only its own range with it",
                        "启用后该噪声专家只训练自己的噪声区间"), edits, "P0")
    if f.several:
        return Advice(T("{0} devices draw independently otherwise", "否则 {0} 卡各自独立采样").format(f.world), edits)
    return None


def _h7_blocked(f: Facts) -> Text | None:
    if not f.accepts("motion_sub_loss"):
        return _NO_FLAG
    if f.task == "distill":
        return T("distillation ignores it", "蒸馏脚本忽略该参数")
    return T("single frames", "单帧没有运动") if f.frames <= 1 else None


def _h7_enabled(f: Facts) -> Text | None:
    if not f.options.on("motion_sub_loss"):
        return None
    return same(f"--motion_sub_loss, {f.options.text('motion_sub_loss_ratio') or '?'}")


def _h7_advice(f: Facts) -> Advice | None:
    if f.goal != "quality":
        return None
    return Advice(T("frame differences count in the loss", "对帧间差分额外计算损失，鼓励时间一致性"),
                  (put("motion_sub_loss"), put("motion_sub_loss_ratio", 0.25)))  # fmt: skip


def _h8_enabled(f: Facts) -> Text | None:
    scheme = f.options.text("weighting_scheme")
    return same(scheme) if scheme not in (None, "none") else None


def _h8_advice(f: Facts) -> Advice | None:
    if f.goal == "quality" and f.full and not f.options.on("uniform_sampling") and not f.several and not expert(f):
        reason = T("middle noise levels carry most of the detail", "中等噪声水平对细节最重要")
        return Advice(reason, (put("weighting_scheme", "logit_normal"),))
    return None


def _h9_blocked(f: Facts) -> Text | None:
    if f.lora:
        return _LORA
    return None if f.accepts("trainable_modules_low_learning_rate") else _NO_FLAG


def _h9_advice(f: Facts) -> Advice | None:
    chosen = f.options.values("trainable_modules")
    if f.goal == "quality" and chosen and "." not in chosen:
        reason = T("only {0} are trained; the rest may follow at half the rate",
                   "只训练 {0}；其余模块可用一半学习率跟随")
        return Advice(reason.format(same(", ".join(chosen))), (put("trainable_modules_low_learning_rate", "."),))
    return None


def _h10_blocked(f: Facts) -> Text | None:
    return None if f.task == "reward" else T("reward scripts only", "仅奖励训练脚本")


def _h10_enabled(f: Facts) -> Text | None:
    name = f.options.text("reward_fn") or "HPSReward"
    if f.options.on("backprop") and f.options.given("reward_fn") and name not in NOT_DIFFERENTIABLE:
        return same(f"{name}, {f.options.text('backprop_strategy')}")
    return None


def _h10_advice(f: Facts) -> Advice | None:
    if f.options.text("reward_fn") in NOT_DIFFERENTIABLE:
        return None
    reason = T("without --backprop and --reward_fn no gradient reaches the adapter",
               "缺少 --backprop 或 --reward_fn 时没有梯度")
    edits = [put("backprop")]
    if not f.options.given("backprop_strategy") and not f.options.given("backprop_step_list"):
        edits.append(put("backprop_strategy", "tail"))
    if not f.options.given("reward_fn"):
        edits.append(put("reward_fn", "HPSReward"))
    return Advice(reason, tuple(edits), "P0")


def _switch(name: str):
    return lambda f: same(f"--{name}") if f.options.on(name) else None


def _needs(flag: str):
    return lambda f: None if f.accepts(flag) else _NO_FLAG


ROWS = (
    Check(
        "H1", T("learning rate schedule", "学习率调度"), ("lr_scheduler",),
        T("schedule object and rate at 0, 25, 50, 75 and 100 %", "调度器对象，0/25/50/75/100% 处的学习率"),
        T("cosine_with_restarts suits long runs", "cosine_with_restarts 适合长训练"),
        "checklist H",
        lambda f: same(scheduler(f)) if scheduler(f) not in ("constant", "constant_with_warmup") else None,
        _h1_advice, priority="P2", impact=33, off=T("constant, fine for a short run", "constant，短训练可用"),
    ),
    Check(
        "H2", T("warm-up", "Warmup"), ("lr_warmup_steps",),
        T("step of the highest rate", "学习率峰值所在步"),
        T("large batches start gently", "大 batch 训练需要充分 warmup"),
        "checklist H",
        _h2_enabled, _h2_advice, _h2_blocked, "P1", 38,
    ),
    Check(
        "H3", T("gradient clipping", "梯度裁剪"), ("max_grad_norm",),
        T("steps in which the norm was cut", "发生裁剪的步数"),
        T("bounds the step after a bad batch", "限制异常 batch 的更新幅度"),
        "checklist H",
        _h3_enabled, _h3_advice, priority="P1", impact=42, off=T("clipping is off", "未裁剪"),
    ),
    Check(
        "H4", T("abnormal-norm clipping", "异常梯度范数裁剪"), ("abnormal_norm_clip_start",),
        T("moving average of the norm and events", "范数移动平均与触发次数"),
        T("spikes above the running average are cut further", "用历史移动平均检测并裁剪梯度尖峰"),
        "checklist H",
        _h4_enabled, _h4_advice, _h4_blocked, "P1", 41,
    ),
    Check(
        "H5", T("EMA", "EMA"), ("use_ema",),
        T("shadow parameters and updates", "影子参数与更新次数"),
        T("averaged weights are steadier; costs one copy of the trained parameters",
          "指数移动平均更稳定，增加约 1x 可训练参数的显存"),
        "checklist H",
        _switch("use_ema"), _h5_advice, _h5_blocked, "P2", 32, off=T("memory is short or the run is",
                                                                     "显存紧张或训练很短"),
    ),
    Check(
        "H6", T("uniform timestep sampling", "均匀时间步采样"), ("uniform_sampling",),
        T("interval of timesteps per rank", "每个 rank 的时间步区间"),
        T("ranks cover the noise schedule evenly", "各 worker 均匀覆盖 noise schedule"),
        "checklist H",
        _switch("uniform_sampling"), _h6_advice, _needs("uniform_sampling"), "P1", 44,
    ),
    Check(
        "H7", T("motion sub loss", "运动子损失"), ("motion_sub_loss", "motion_sub_loss_ratio"),
        T("its share of the loss", "占总损失的比例"),
        T("steadier motion", "对帧间差分计算 MSE，鼓励时间一致性"),
        "checklist H",
        _h7_enabled, _h7_advice, _h7_blocked, "P2", 29,
    ),
    Check(
        "H8", T("timestep weighting", "时间步加权"), ("weighting_scheme",),
        T("histogram of the timesteps drawn", "抽取时间步的直方图"),
        T("puts the work where the model learns most", "把训练量放在最有效的噪声区间"),
        "checklist H",
        _h8_enabled, _h8_advice, _needs("weighting_scheme"), "P2", 19,
    ),
    Check(
        "H9", T("two learning rates", "双学习率"), ("trainable_modules_low_learning_rate",),
        T("parameter groups with rate and size", "参数组的学习率与大小"),
        T("new modules learn fast, old ones slowly", "不同模块使用不同学习率"),
        "checklist H",
        lambda f: same(", ".join(f.options.values("trainable_modules_low_learning_rate")))
        if f.options.values("trainable_modules_low_learning_rate") else None,
        _h9_advice, _h9_blocked, "P2", 16,
    ),
    Check(
        "H10", T("reward LoRA", "Reward LoRA"), ("reward_fn", "backprop", "backprop_strategy"),
        T("mean reward per step, sampling steps with gradient", "每步平均奖励，有梯度的采样步"),
        T("preference tuning without videos", "基于人类偏好的无数据训练"),
        "checklist H",
        _h10_enabled, _h10_advice, _h10_blocked, "P1", 60, off=T("this reward has no gradient", "该奖励模型不可微"),
    ),
)  # fmt: skip
