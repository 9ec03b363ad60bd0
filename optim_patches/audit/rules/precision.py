"""Precision, optimizer and kernels that exclude each other or the device."""

from __future__ import annotations

from collections.abc import Iterator

from optim_patches.audit.edits import drop, launcher, put, run
from optim_patches.audit.facts import Facts
from optim_patches.audit.project import Project
from optim_patches.audit.rows.a import precision_edits
from optim_patches.audit.rows.i import degree
from optim_patches.audit.rules import Hit, Rule
from optim_patches.audit.text import Text

T = Text


def _mismatch(f: Facts, _: Project) -> Iterator[Hit]:
    script, outer = f.options.text("mixed_precision"), f.distribution.precision
    if f.options.given("mixed_precision") and script and outer and script != outer:
        text = T("the launcher says {0}, the script {1}; the model follows the script, DeepSpeed and FSDP do not",
                 "启动器为 {0}，脚本为 {1}；模型按脚本，DeepSpeed/FSDP 按启动器")  # fmt: skip
        own = f.launch.launcher_options.given("mixed_precision")
        yield Hit(text.format(outer, script), (launcher("mixed_precision", script),) if own else ())


def _old_card(f: Facts, _: Project) -> Iterator[Hit]:
    if f.precision == "bf16" and f.capability(8) is False and not f.cpu:
        text = T("{0} emulates bf16 slowly or not at all; use fp16", "{0} 不支持 bf16 加速，请使用 fp16")
        yield Hit(text.format(f.gpu.name if f.gpu else ""), precision_edits(f, "fp16"))


def _fp16_weights(f: Facts, _: Project) -> Iterator[Hit]:
    if f.precision != "fp16":
        return
    if f.target == "upstream":
        yield Hit(T("these scripts cast trained weights to fp16, and the gradient scaler then refuses fp16 gradients",
                    "该脚本把可训练权重转成 fp16，GradScaler 会拒绝 fp16 梯度并报错"),
                  precision_edits(f, "bf16") if f.capability(8) is not False else (), "error")  # fmt: skip
    elif f.capability(8) is not False and f.script_id.startswith("wan"):
        yield Hit(T("the weights ship as bf16; values beyond 65504 overflow in fp16",
                    "权重以 bf16 发布，超过 65504 的值会在 fp16 中溢出"),
                  precision_edits(f, "bf16") if f.capability(8) else ())  # fmt: skip


def _small_updates(f: Facts, _: Project) -> Iterator[Hit]:
    rate = f.options.number("learning_rate", 1e-4) or 0
    plain = f.distribution.kind in ("none", "ddp")
    if f.full and f.precision == "bf16" and plain and rate < 5e-5 and not f.options.on("master_weights_fp32"):
        text = T("full fine-tuning in pure bf16 at {0:g}: updates below 1/512 of a weight are lost; "
                 "keep fp32 master weights",
                 "纯 bf16 全参微调、学习率 {0:g}：小于权重 1/512 的更新会被舍入掉；请保留 fp32 主权重")
        yield Hit(text.format(rate), (put("master_weights_fp32"),))


def _two_optimizers(f: Facts, _: Project) -> Iterator[Hit]:
    chosen = [name for name in ("use_8bit_adam", "use_came", "fused_optimizer") if f.options.on(name)]
    if len(chosen) > 1:
        text = T("{0} name different optimizers; only the first takes effect", "{0} 指定了不同的优化器，只有第一个生效")
        names = " ".join(f"--{name}" for name in chosen)
        yield Hit(text.format(names), tuple(drop(name) for name in chosen[1:]))


def _sage(f: Facts, _: Project) -> Iterator[Hit]:
    if f.attention.startswith("SAGE"):
        text = T("VIDEOX_ATTENTION_TYPE={0}: this kernel has no backward; training falls back or goes wrong in silence",
                 "VIDEOX_ATTENTION_TYPE={0}：该内核没有反向，训练会回退或静默出错")  # fmt: skip
        yield Hit(text.format(f.attention), (run("unset VIDEOX_ATTENTION_TYPE"),))


def _graph_shapes(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.on("cuda_graph") and f.random_sizes:
        text = T("--cuda_graph records a graph for one shape, but sizes are drawn anew for each batch",
                 "--cuda_graph 每种形状录制一个图，但每批尺寸都随机")
        yield Hit(text, (drop("cuda_graph"),))


def _graph_checkpointing(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.on("cuda_graph") and f.options.on("gradient_checkpointing"):
        text = T("--cuda_graph keeps what --gradient_checkpointing computes again; the run refuses both",
                 "--cuda_graph 会保留 --gradient_checkpointing 要重算的内容，二者同时使用会被拒绝")
        yield Hit(text, (drop("cuda_graph"),))


def _graph_compile(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.on("cuda_graph") and "reduce-overhead" in (f.options.text("compile_mode") or ""):
        yield Hit(T("--compile_mode reduce-overhead captures graphs itself",
                    "--compile_mode reduce-overhead 已自带 CUDA Graph"),
                  (drop("cuda_graph"),))  # fmt: skip


def _quantized(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.on("qlora") and f.full:
        yield Hit(T("--qlora freezes 4-bit weights; this script trains them",
                    "--qlora 会冻结 4-bit 权重，而该脚本要训练它们"),
                  (drop("qlora"),))  # fmt: skip
    if f.options.on("qlora") and f.sharded:
        yield Hit(T("--qlora with ZeRO-3 or FSDP: 4-bit weights cannot be sharded here",
                    "--qlora 与 ZeRO-3/FSDP 冲突：4-bit 权重无法分片"),
                  (drop("qlora"),))  # fmt: skip
    if f.options.on("qlora") and f.options.on("fp8"):
        yield Hit(T("--qlora and --fp8 both replace the linear layers",
                    "--qlora 与 --fp8 都会替换线性层"), (drop("fp8"),))
    if f.options.on("fp8") and f.capability(8, 9) is False:
        yield Hit(T("--fp8 needs compute capability 8.9 or higher", "--fp8 需要计算能力 8.9 及以上"), (drop("fp8"),))


def _fp8_inference(f: Facts, _: Project) -> Iterator[Hit]:
    if f.calls("convert_model_weight_to_float8"):
        yield Hit(T("the training script calls convert_model_weight_to_float8: these weights have no gradient",
                    "训练脚本调用了 convert_model_weight_to_float8：这种权重没有梯度"))  # fmt: skip


def _cuda_only(f: Facts, _: Project) -> Iterator[Hit]:
    if not f.cpu:
        return
    asked = [name for name in ("liger", "cuda_graph", "fp8", "fused_optimizer", "multi_stream") if f.options.on(name)]
    if asked:
        text = T("{0} need CUDA; on this device they are refused or do nothing",
                 "{0} 需要 CUDA，在该设备上会被拒绝或无效")
        yield Hit(text.format(" ".join(f"--{name}" for name in asked)), tuple(drop(name) for name in asked))


def _sequence(f: Facts, _: Project) -> Iterator[Hit]:
    size = f.options.integer("sequence_parallel_size") or 1
    if size <= 1:
        return
    best = degree(f)
    edits = (put("sequence_parallel_size", best),) if best else ()
    if f.world is not None and f.world % size:
        text = T("--sequence_parallel_size {0} does not divide the {1} processes",
                 "--sequence_parallel_size {0} 不能整除进程数 {1}")
        yield Hit(text.format(size, f.world), edits)
    elif f.heads is not None and f.heads % size:
        legal = ", ".join(str(n) for n in range(2, f.heads + 1) if f.heads % n == 0)
        text = T("--sequence_parallel_size {0} does not divide the {1} heads; legal: {2}",
                 "--sequence_parallel_size {0} 不能整除 {1} 个注意力头；可用：{2}")
        yield Hit(text.format(size, f.heads, legal), edits)


RULES = (
    Rule("precision-mismatch", "warning", T("launcher and script disagree on precision",
                                            "启动器与脚本精度不一致"), _mismatch),
    Rule("bf16-on-old-card", "error", T("bf16 on a card without it", "显卡不支持 bf16"), _old_card),
    Rule("fp16-weights", "warning", T("fp16 training of bf16 weights", "用 fp16 训练 bf16 权重"), _fp16_weights),
    Rule("bf16-small-updates", "warning", T("updates lost in bf16", "bf16 舍入丢失更新"), _small_updates),
    Rule("two-optimizers", "error", T("several optimizers", "同时指定多个优化器"), _two_optimizers),
    Rule("sage-in-training", "error", T("attention without backward", "没有反向的注意力内核"), _sage),
    Rule("cuda-graph-random-sizes", "error", T("CUDA graphs with changing shapes",
                                               "CUDA Graph 与可变尺寸"), _graph_shapes),
    Rule("cuda-graph-checkpointing", "error", T("CUDA graphs with recomputation",
                                                "CUDA Graph 与梯度检查点"), _graph_checkpointing),
    Rule("cuda-graph-twice", "warning", T("graphs captured twice", "重复捕获 CUDA Graph"), _graph_compile),
    Rule("quantization-conflict", "error", T("quantization that cannot train", "量化方式与训练冲突"), _quantized),
    Rule("fp8-inference-in-training", "error", T("inference quantization in training",
                                                 "训练中使用推理量化"), _fp8_inference),
    Rule("cuda-only", "warning", T("CUDA features on a CPU", "在 CPU 上使用 CUDA 特性"), _cuda_only),
    Rule("sequence-parallel-size", "error", T("sequence-parallel size", "序列并行大小不合法"), _sequence),
)
