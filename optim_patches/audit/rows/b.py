"""B. Activation recomputation."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import drop, put
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text


def fraction(f: Facts) -> float:
    """Value of the fraction flag."""
    return f.options.number("selective_ac") or 0.0


KEPT = ("checkpointing_keep", "checkpointing_fraction", "checkpointing_budget_gb")
LONG = 8192  # tokens from which self-attention is a large part of a block's work


def _b1_blocked(f: Facts) -> Text | None:
    if fraction(f) > 0 and not f.options.on("gradient_checkpointing"):
        return T("fractional checkpointing is on instead", "已改用分数梯度检查点")
    return None


def _b1_advice(f: Facts) -> Advice | None:
    reasons = []
    if f.big:
        reasons.append(f"{f.params:g}B")
    if f.frames >= 49:
        reasons.append(f"{f.frames} frames")
    if reasons or f.tight:
        reason = T("needed for {0}", "{0} 必开").format(same(", ".join(reasons) or "short memory"))
        return Advice(reason, (put("gradient_checkpointing"),))
    return None


def _b2_blocked(f: Facts) -> Text | None:
    if not any(f.accepts(name) for name in ("selective_ac", *KEPT)) and not f.calls("apply_checkpointing"):
        return T("this script has no fraction flag", "该脚本没有分数检查点参数")
    return None


def _b2_enabled(f: Facts) -> Text | None:
    if f.options.on("gradient_checkpointing"):
        given = next((name for name in KEPT if f.options.given(name)), None)
        return same(f"--{given} {f.options.text(given) or '?'}") if given else None
    if fraction(f) > 0:
        return same(f"--selective_ac {fraction(f):g}")
    return T("apply_checkpointing is called",
             "代码调用了 apply_checkpointing") if f.calls("apply_checkpointing") else None


def _b2_advice(f: Facts) -> Advice | None:
    guess, memory = f.memory_guess, f.memory
    if f.goal == "memory" or guess is None or memory is None or not f.options.on("gradient_checkpointing"):
        return None
    swapped = f.options.given("block_swap") or f.options.given("block_swap_gb")  # needs every block recomputed
    if guess < 0.4 * memory and not f.options.given("selective_ac") and not swapped:
        reason = T("{0:.0f} GB card, about {1:.0f} GB used: recompute half of the blocks only",
                   "显卡 {0:.0f}GB，约用 {1:.0f}GB：只重计算一半的 block")  # fmt: skip
        half = (put("checkpointing_fraction", 0.5),) if f.accepts("checkpointing_fraction") else (
            drop("gradient_checkpointing"), put("selective_ac", 0.5))
        return Advice(reason.format(memory, guess), half)
    if guess < 0.7 * memory and f.tokens >= LONG and f.accepts("checkpointing_keep"):
        reason = T("{0} tokens: keep what self-attention computed, one tensor per block",
                   "{0} 个 Token：保留自注意力的结果，每个 block 多一个张量")  # fmt: skip
        return Advice(reason.format(f.tokens), (put("checkpointing_keep", "attention"),))
    return None


def _b3_blocked(f: Facts) -> Text | None:
    if f.task == "distill":
        return T("generator and critic share gradient state when accumulating", "累积时生成器与判别器会共享梯度状态")
    return None


def _b3_advice(f: Facts) -> Advice | None:
    if f.batch > 1 and f.tight:
        reason = T("batch {0} on a small card: same global batch with 1 x {0}",
                   "小显存上 batch 为 {0}：改为 1 x {0} 累积")
        edits = (put("train_batch_size", 1), put("gradient_accumulation_steps", f.batch))
        return Advice(reason.format(f.batch), edits, "P1")
    if f.global_batch < 4 and not f.options.given("gradient_accumulation_steps"):
        reason = T("global batch is {0}; gradients of single clips are noisy", "全局 batch 仅 {0}，单样本梯度噪声大")
        return Advice(reason.format(f.global_batch), (put("gradient_accumulation_steps", 4),))
    return None


ROWS = (
    Check(
        "B1", T("gradient checkpointing", "标准梯度检查点"), ("gradient_checkpointing",),
        T("blocks checkpointed of blocks present, recomputations counted in one step",
          "已检查点的 block 数/总数，一步内的重计算次数"),
        T("about 60 % less activation memory for about 30 % more compute", "以约 30% 的计算换约 60% 的激活显存"),
        "checklist B",
        lambda f: same("--gradient_checkpointing") if f.options.on("gradient_checkpointing") else None,
        _b1_advice, _b1_blocked, "P0", 90,
    ),
    Check(
        "B2", T("fractional checkpointing", "分数梯度检查点"), ("selective_ac", *KEPT),
        T("checkpointed blocks equal the fraction of all blocks and are evenly spread",
          "检查点 block 数等于比例乘总数，且均匀分布"),
        T("between full recomputation and none: trades memory left over for speed",
          "介于全量重计算与不重计算之间，用剩余显存换速度"),
        "checklist B",
        _b2_enabled, _b2_advice, _b2_blocked, "P2", 45,
    ),
    Check(
        "B3", T("gradient accumulation", "梯度累积"), ("gradient_accumulation_steps",),
        T("micro-steps per optimizer step", "每个优化器步的微步数"),
        T("a larger batch without more memory", "等效增大 batch size 而不增加显存"),
        "checklist B",
        lambda f: same(f"{f.accumulation}") if f.accumulation > 1 else None,
        _b3_advice, _b3_blocked, "P2", 35,
    ),
)  # fmt: skip
