"""A. Mixed precision and quantization."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import Edit, launcher, put, run
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text

T = Text


def precision_edits(facts: Facts, value: str) -> tuple[Edit, ...]:
    """Script and launcher must agree."""
    edits = [put("mixed_precision", value)]
    if facts.launch.launcher == "accelerate" and not facts.launch.launcher_options.given("config_file"):
        edits.append(launcher("mixed_precision", value))
    return tuple(edits)


def _a1_blocked(f: Facts) -> Text | None:
    if f.capability(8) is False and not f.cpu:
        return T("this card has no bf16 matrix units; use fp16", "该显卡没有 bf16 矩阵单元，请使用 fp16")
    return None


def _a1_advice(f: Facts) -> Advice | None:
    if f.launch.kind == "config" or f.precision is None or (f.precision == "fp16" and f.capability(8) is None):
        return None
    reason = T("runs in {0}; bf16 halves memory and needs no loss scale", "当前为 {0}；bf16 显存减半且无需 loss scale")
    return Advice(reason.format(f.precision), precision_edits(f, "bf16"))


def _a2_blocked(f: Facts) -> Text | None:
    if f.cpu or f.capability(8):
        return T("bf16 is better on this device", "该设备使用 bf16 更好")
    return None


def _a2_advice(f: Facts) -> Advice | None:
    if f.capability(8) is False:
        reason = T("{0} has fp16 matrix units only", "{0} 只有 fp16 矩阵单元")
        return Advice(reason.format(f.gpu.name if f.gpu else ""), precision_edits(f, "fp16"))
    return None


def _a3_blocked(f: Facts) -> Text | None:
    if f.cpu or f.capability(8) is False:
        return T("TF32 needs an Ampere or newer card", "TF32 需要 Ampere 及更新的显卡")
    return None


def _a3_advice(f: Facts) -> Advice | None:
    if f.goal == "quality":
        return None
    return Advice(T("fp32 matmuls (time embedding, norms, VAE) run without it",
                    "FP32 矩阵乘法（时间嵌入、VAE 等）未加速"), (put("allow_tf32"),))


def _a4_advice(f: Facts) -> Advice | None:
    if f.big and (f.memory or 99) <= 24:
        return Advice(T("14B weights in bf16 do not fit on this card for inference",
                        "14B 的 bf16 权重在该显卡上放不下"))
    return None


def came_only(f: Facts) -> bool:
    """bitsandbytes is known to be missing and CAME is there."""
    return f.has("bitsandbytes") is False and f.has("came_pytorch") is True


def wants_8bit(f: Facts) -> bool:
    """Whether the optimizer's state should shrink by 8-bit Adam."""
    taken = f.options.on("use_came") or f.options.on("fused_optimizer") or f.options.on("use_8bit_adam")
    return f.tight and not taken and not f.cpu and not came_only(f) and not f.distribution.offload_optimizer


def _a5_blocked(f: Facts) -> Text | None:
    if f.options.on("use_came"):
        return T("CAME is the optimizer of this run", "本次训练使用 CAME 优化器")
    return None


def _a5_advice(f: Facts) -> Advice | None:
    if not wants_8bit(f):
        return None
    edits = (put("use_8bit_adam"),)
    if f.has("bitsandbytes") is False:
        edits = (run("pip install bitsandbytes"), *edits)
    return Advice(T("memory is short; the optimizer's state halves", "显存紧张；优化器状态减半"), edits)


def _a6_blocked(f: Facts) -> Text | None:
    if f.options.on("use_8bit_adam"):
        return T("8-bit Adam is the optimizer of this run", "本次训练使用 8-bit Adam")
    return None


def _a6_advice(f: Facts) -> Advice | None:
    if f.tight and came_only(f) and not f.options.on("fused_optimizer"):
        reason = T("memory is short and bitsandbytes is missing", "显存紧张且未安装 bitsandbytes")
        return Advice(reason, (put("use_came"),))
    return None


ROWS = (
    Check(
        "A1", T("BF16 mixed precision", "BF16 混合精度"), ("mixed_precision",),
        T("dtypes of the base parameters, and the autocast dtype seen in a block's matmul",
          "基础参数的 dtype 统计，以及 block 中矩阵乘法实际看到的 autocast dtype"),
        T("half the memory of fp32 weights and activations, matrix units at full speed, no loss scale",
          "权重与激活显存减半，矩阵单元全速运行，无需 loss scale"),
        "checklist A",
        lambda f: T("--mixed_precision bf16", "--mixed_precision bf16") if f.precision == "bf16" else None,
        _a1_advice, _a1_blocked, "P0", 95, ("train", "config"),
    ),
    Check(
        "A2", T("FP16 mixed precision", "FP16 混合精度"), ("mixed_precision",),
        T("dtypes of the base parameters, whether a grad scaler is there, its scale and skipped steps",
          "基础参数的 dtype 统计，grad scaler 是否存在、当前 scale 与跳过的步数"),
        T("half the memory on cards without bf16; needs a loss scale, weights that ship as bf16 may overflow",
          "没有 bf16 的显卡上显存减半；需要 loss scale，以 bf16 发布的权重可能溢出"),
        "checklist A",
        lambda f: T("--mixed_precision fp16", "--mixed_precision fp16") if f.precision == "fp16" else None,
        _a2_advice, _a2_blocked, "P0", 94, ("train", "config"),
    ),
    Check(
        "A3", T("TF32", "TF32"), ("allow_tf32",),
        T("the backend's matmul precision, and fp32 matmuls seen in a step",
          "后端的 matmul 精度设置，以及一步中的 fp32 矩阵乘法"),
        T("faster fp32 matmuls with 10-bit mantissa inputs; no memory saved",
          "FP32 矩阵乘法以 TF32 计算，更快；不节省显存"),
        "checklist A",
        lambda f: T("--allow_tf32", "--allow_tf32") if f.options.on("allow_tf32") else None,
        _a3_advice, _a3_blocked, "P0", 40, off=T("quality comes first: fp32 matmuls keep their precision",
                                                 "质量优先：FP32 矩阵乘保持精度"),
    ),
    Check(
        "A4", T("FP8 weight quantization (inference)", "FP8 推理量化"), (),
        T("float8 weights counted in the sampling model", "采样模型中 float8 权重的数量"),
        T("half the weight memory of bf16 at inference", "推理时权重显存为 bf16 的一半"),
        "checklist A",
        lambda f: T("convert_model_weight_to_float8 is called", "调用了 convert_model_weight_to_float8")
        if f.calls("convert_model_weight_to_float8", "convert_weight_dtype_wrapper") else None,
        _a4_advice, kinds=("infer",), priority="P1", impact=60,
        off=T("not called", "未调用"),
    ),
    Check(
        "A5", T("8-bit Adam", "8-bit Adam"), ("use_8bit_adam",),
        T("class of the optimizer, dtype of its state, bytes against fp32 Adam",
          "优化器类、状态 dtype、状态字节数与 fp32 Adam 之比"),
        T("optimizer state at a quarter of fp32 Adam, half of bf16 Adam",
          "优化器状态为 fp32 Adam 的 1/4、bf16 Adam 的 1/2"),
        "checklist A",
        lambda f: T("--use_8bit_adam", "--use_8bit_adam") if f.options.on("use_8bit_adam") else None,
        _a5_advice, _a5_blocked, "P1", 70,
    ),
    Check(
        "A6", T("CAME optimizer", "CAME 优化器"), ("use_came",),
        T("class of the optimizer and bytes of its state", "优化器类与状态字节数"),
        T("factored second moments: less state than Adam, other learning rates",
          "二阶矩分解存储：状态小于 Adam，学习率需重调"),
        "checklist A",
        lambda f: T("--use_came", "--use_came") if f.options.on("use_came") else None,
        _a6_advice, _a6_blocked, "P2", 50,
    ),
)  # fmt: skip
