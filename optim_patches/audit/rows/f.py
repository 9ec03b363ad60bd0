"""F. Attention kernels. All are found by their packages; ``VIDEOX_ATTENTION_TYPE`` forces one."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import run
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
_BOTH = ("train", "infer")
_CPU = T("needs a CUDA device", "需要 CUDA 设备")
_OLD = T("needs an Ampere or newer card", "需要 Ampere 及更新的显卡")
FA2 = "pip install flash-attn --no-build-isolation"
FA3 = "cd flash-attention/hopper && python setup.py install"


def forced(f: Facts) -> bool:
    """The environment picks something other than FlashAttention."""
    return f.attention not in ("", "FLASH_ATTENTION")


def _flash_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return _CPU
    return _OLD if f.capability(8) is False else None


def _f1_enabled(f: Facts) -> Text | None:
    if forced(f) or not f.has("flash_attn") or (f.hopper and f.has("flash_attn_interface")):
        return None
    return T("flash_attn found", "已检测到 flash_attn")


def _f1_advice(f: Facts) -> Advice | None:
    if forced(f) or f.has("flash_attn") or (f.hopper and f.has("flash_attn_interface")):
        return None
    if f.has("flash_attn") is None:
        reason = T("not known whether the training machine has flash_attn; attention is 2-3x slower without",
                   "无法确认训练机是否已安装 flash_attn；未安装时注意力慢 2-3 倍")  # fmt: skip
    else:
        reason = T("flash_attn not found; attention is 2-3x slower without", "未检测到 flash_attn；注意力会慢 2-3 倍")
    return Advice(reason, (run(FA2),))


def _f2_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return _CPU
    return T("for Hopper cards (H100, H200, H20)", "仅用于 Hopper 显卡（H100/H200/H20）") if f.hopper is False else None


def _f2_enabled(f: Facts) -> Text | None:
    return same("flash_attn_interface") if f.has("flash_attn_interface") and not forced(f) else None


def _f2_advice(f: Facts) -> Advice | None:
    if f.hopper and not f.has("flash_attn_interface") and not forced(f):
        return Advice(T("Hopper card without FlashAttention 3", "Hopper 显卡未使用 FA3"), (run(FA3),))
    return None


def _f3_blocked(f: Facts) -> Text | None:
    blocked = _flash_blocked(f)
    if blocked is not None:
        return blocked
    return T("one sample per batch: no unequal lengths", "batch 为 1，没有不等长序列") if f.batch == 1 else None


def _f3_advice(f: Facts) -> Advice | None:
    if f.flash is False:
        return Advice(T("batches of {0} are padded without FlashAttention",
                        "未安装 FlashAttention 时 batch {0} 需要填充").format(f.batch),
                      (run(FA2),))  # fmt: skip
    return None


def _f4_blocked(f: Facts) -> Text | None:
    if f.launch.kind == "train":
        return T("has no backward: training falls back to FlashAttention", "没有反向传播：训练时回退到 FlashAttention")
    return _CPU if f.cpu else None


def _f4_enabled(f: Facts) -> Text | None:
    return same("sageattention") if f.has("sageattention") and f.attention in ("", "SAGE_ATTENTION") else None


def _f4_advice(f: Facts) -> Advice | None:
    if f.attention in ("", "SAGE_ATTENTION") and not f.has("sageattention"):
        return Advice(T("not found; quantized attention speeds up sampling",
                        "未检测到；量化注意力可加速推理"), (run("pip install sageattention"),))
    return None


def _f5_blocked(f: Facts) -> Text | None:
    if f.script_id.startswith("longcatvideo") and f.target == "upstream":
        return T("this model's cross attention needs FlashAttention", "该模型的交叉注意力必须使用 FlashAttention")
    return None


def _f5_enabled(f: Facts) -> Text | None:
    if f.cpu or f.capability(8) is False:
        return T("the fallback is right for this device", "该设备使用 SDPA 即可")
    if f.flash is False or (forced(f) and f.attention != "SAGE_ATTENTION"):
        return T("fallback in use", "正在使用 SDPA 兜底")
    return None


def _f5_advice(f: Facts) -> Advice | None:
    if f.attention == "SAGE_ATTENTION" and f.training:
        return Advice(T("VIDEOX_ATTENTION_TYPE names a kernel without backward",
                        "VIDEOX_ATTENTION_TYPE 指定了没有反向的内核"),
                      (run("unset VIDEOX_ATTENTION_TYPE"),))  # fmt: skip
    return None


def _f6_blocked(f: Facts) -> Text | None:
    return None if f.script_id.startswith("turbodiffusion") else T("TurboDiffusion only", "仅 TurboDiffusion 模型")


def _f6_enabled(f: Facts) -> Text | None:
    if f.cpu or f.has("triton") is False:
        return None
    return T("part of the model, top-k 0.1", "模型自带，topk=0.1")


def _f6_advice(f: Facts) -> Advice | None:
    if not f.cpu and f.has("triton") is False:
        return Advice(T("the kernel needs Triton", "该内核需要 Triton"), (run("pip install triton"),))
    return None


ROWS = (
    Check(
        "F1", T("FlashAttention 2", "Flash Attention 2"), (),
        T("attention calls dispatched to it in one step", "一步中派发到 FA2 的注意力调用数"),
        T("attention 2-3 times faster than the fallback, no score matrix in memory",
          "注意力比兜底方案快 2-3 倍，不保存注意力矩阵"),
        "checklist F",
        _f1_enabled, _f1_advice, _flash_blocked, "P0", 98, _BOTH,
        T("another kernel is in use", "正在使用其他内核"),
    ),
    Check(
        "F2", T("FlashAttention 3", "Flash Attention 3"), (),
        T("attention calls dispatched to it in one step", "一步中派发到 FA3 的注意力调用数"),
        T("faster than FlashAttention 2 on Hopper", "Hopper 上优于 FA2"),
        "checklist F",
        _f2_enabled, _f2_advice, _f2_blocked, "P1", 75, _BOTH, T("not found", "未检测到"),
    ),
    Check(
        "F3", T("variable-length attention", "Variable-Length FA"), (),
        T("variable-length calls in one step", "一步中变长注意力调用数"),
        T("no padding between samples of unequal length", "不等长序列无需填充，Bucket 训练时自动使用"),
        "checklist F",
        lambda f: T("automatic", "自动启用") if f.flash and not forced(f) else None,
        _f3_advice, _f3_blocked, "P2", 20, _BOTH, T("not known whether FlashAttention is there",
                                                    "无法确认 FlashAttention"),
    ),
    Check(
        "F4", T("SageAttention", "SageAttention"), (),
        T("must be 0 calls in a training step", "训练步中必须为 0 次"),
        T("quantized attention for inference and validation", "推理与验证用的量化注意力"),
        "checklist F",
        _f4_enabled, _f4_advice, _f4_blocked, "P2", 40, ("train", "infer"), T("another kernel is forced",
                                                                              "已指定其他内核"),
    ),
    Check(
        "F5", T("PyTorch SDPA", "PyTorch SDPA"), (),
        T("calls dispatched to it and which of its backends", "派发到 SDPA 的调用数及其后端"),
        T("works everywhere; slower than FlashAttention on CUDA", "到处可用；在 CUDA 上慢于 FA"),
        "checklist F",
        _f5_enabled, _f5_advice, _f5_blocked, "P1", 60, _BOTH, T("FlashAttention comes first",
                                                                 "优先使用 FlashAttention"),
    ),
    Check(
        "F6", T("sparse linear attention", "Sparse Linear Attention"), (),
        T("sparse calls and top-k", "稀疏注意力调用数与 top-k"),
        T("looks at 10 % of the key blocks", "仅关注 10% 的 key block"),
        "checklist F",
        _f6_enabled, _f6_advice, _f6_blocked, "P0", 50, _BOTH, T("no CUDA device", "没有 CUDA 设备"),
    ),
)  # fmt: skip
