"""E. LoRA."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import drop, put
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
FEW = 100


def _no_lora(f: Facts) -> Text | None:
    return None if f.lora else T("no LoRA is trained", "不是 LoRA 训练")


def _drop_outs(f: Facts) -> bool:
    return any((f.options.number(name) or 0) > 0 for name in ("rank_drop_out", "module_drop_out"))


def _few(f: Facts) -> bool:
    return f.data is not None and 0 < f.data.rows < FEW


def _e1_blocked(f: Facts) -> Text | None:
    if not f.lora:
        return _no_lora(f)
    return None if f.accepts("use_peft_lora") else T("this script has its own LoRA only", "该脚本只有自带的 LoRA")


def _e1_advice(f: Facts) -> Advice | None:
    if f.options.given("rank", "network_alpha", "target_name") or _drop_outs(f):
        return None
    reason = T("no LoRA settings given: a known good start is rank 64, alpha 32",
               "未给出 LoRA 设置：推荐从 rank=64, alpha=32 开始")
    return Advice(reason, (put("use_peft_lora"), put("rank", 64), put("network_alpha", 32)))


def _e2_advice(f: Facts) -> Advice | None:
    if _drop_outs(f):
        return Advice(T("rank and module dropout exist in the native LoRA only",
                        "rank/module dropout 仅自定义 LoRA 支持"),
                      (drop("use_peft_lora"),))  # fmt: skip
    return None


def _e3_blocked(f: Facts) -> Text | None:
    if not f.lora:
        return _no_lora(f)
    return None if f.accepts("target_name") else T("all linear layers, no flag", "固定为全部线性层")


def _e3_advice(f: Facts) -> Advice | None:
    if f.options.given("lora_skip_name") or f.family is None:
        return None
    reason = T("without targets every linear layer is adapted; attention and MLP are enough",
               "未指定目标时适配全部线性层，注意力与 FFN 即可")
    return Advice(reason, (put("target_name", f.family.targets),), "P1" if f.peft else "P2")


def _dropout_blocked(f: Facts) -> Text | None:
    if not f.lora:
        return _no_lora(f)
    return T("PEFT has no such dropout", "PEFT 不支持该 dropout") if f.peft else None


def _e4_advice(f: Facts) -> Advice | None:
    if not _few(f):
        return None
    reason = T("{0} clips: the adapter may learn them by heart", "仅 {0} 个样本，容易过拟合")
    return Advice(reason.format(f.data.rows if f.data else 0), (put("rank_drop_out", 0.1),))


def _e5_advice(f: Facts) -> Advice | None:
    if not _few(f):
        return None
    reason = T("{0} clips: skip whole modules now and then", "仅 {0} 个样本，可随机跳过整个 LoRA 模块")
    return Advice(reason.format(f.data.rows if f.data else 0), (put("module_drop_out", 0.1),))


def _settings(f: Facts) -> Text:
    return same(f"rank {f.options.integer('rank')}, alpha {f.options.integer('network_alpha')}")


def _dropout(name: str):
    def enabled(f: Facts) -> Text | None:
        value = f.options.number(name) or 0
        return same(f"--{name} {value:g}") if value > 0 else None

    return enabled


ROWS = (
    Check(
        "E1", T("PEFT LoRA", "PEFT LoRA"), ("use_peft_lora", "rank", "network_alpha"),
        T("adapted layers, rank, alpha, share of trainable parameters", "适配层数、rank、alpha、可训练参数占比"),
        T("adapters by the PEFT library; files load wherever PEFT files do", "HuggingFace PEFT 库实现，文件通用"),
        "checklist E",
        lambda f: _settings(f) if f.peft else None,
        _e1_advice, _e1_blocked, "P2", 30, off=T("the native LoRA is used", "使用自定义 LoRA"),
    ),
    Check(
        "E2", T("native (Kohya style) LoRA", "自定义 LoRA（Kohya 风格）"), ("rank", "network_alpha"),
        T("adapted layers", "适配层数"),
        T("Kohya keys, rank and module dropout", "Kohya 键名，支持 rank/module dropout"),
        "checklist E",
        lambda f: None if f.peft else _settings(f),
        _e2_advice, _no_lora, "P1", 35, off=T("PEFT is used", "使用 PEFT"),
    ),
    Check(
        "E3", T("LoRA targets", "LoRA 目标模块"), ("target_name",),
        T("layers matched by each target; a target that matches nothing is an error",
          "每个目标匹配的层数；匹配不到即为错误"),
        T("which layers learn; fewer layers are smaller and faster", "决定训练哪些层；层越少越小越快"),
        "checklist E",
        lambda f: same(f.options.text("target_name") or "--target_name") if f.options.given("target_name") else None,
        _e3_advice, _e3_blocked, "P2", 28, off=T("all linear layers but the skipped ones", "除跳过项外的全部线性层"),
    ),
    Check(
        "E4", T("rank dropout", "Rank Dropout"), ("rank_drop_out",),
        T("dropout value on the modules", "模块上的 dropout 取值"),
        T("regularizes: random rank dimensions rest in each step", "随机丢弃 LoRA 的 rank 维度，正则化"),
        "checklist E",
        _dropout("rank_drop_out"), _e4_advice, _dropout_blocked, "P2", 26,
    ),
    Check(
        "E5", T("module dropout", "Module Dropout"), ("module_drop_out",),
        T("dropout value on the modules", "模块上的 dropout 取值"),
        T("regularizes: whole adapter modules rest in each step", "随机跳过整个 LoRA 模块，防过拟合"),
        "checklist E",
        _dropout("module_drop_out"), _e5_advice, _dropout_blocked, "P2", 25,
    ),
)  # fmt: skip
