"""Live checks of group I that a patch answers for when it is asked for; here is what they say without that patch.

CUDA graphs are counted where they are captured and replayed, whoever captured them (``torch.compile`` does so in some
modes). TeaCache keeps its own count of computed and skipped calls.
"""

from __future__ import annotations

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
from optim_patches.audit.text import Text, size

FEW_TOKENS = 4096
LONG_RUN = 200
LONG_CLIP_TOKENS = 50_000
LARGE_LATENT = 90  # 720 pixels
WORTHWHILE_SAMPLING = 10
GRAPH_MODES = ("reduce-overhead", "max-autotune")
TEACACHE_FLAGS = ("train_teacache", "enable_teacache", "teacache")
NOT_ASKED = Text("not asked for", "未要求")


@check("I3")
def cuda_graphs(view: View) -> LiveRow:
    counts, shapes = view.counts, view.facts.shapes
    asked = view.asked("cuda_graph") if view.value("cuda_graph") else None
    if asked is None and view.value("compile") and view.value("compile_mode") in GRAPH_MODES:
        asked = view.asked("compile_mode")
    evidence = Text(
        f"{counts.graph_captures} graphs captured, {counts.graph_replays} replays, {len(shapes)} shapes",
        f"捕获 {counts.graph_captures} 个图，重放 {counts.graph_replays} 次，{len(shapes)} 种形状",
    )
    facts = {"captures": counts.graph_captures, "replays": counts.graph_replays}
    if counts.graph_replays:
        return row("I3", ENABLED, evidence, asked or Text("automatic", "自动"), sites=counts.graph_captures,
                   exercised=True, **facts)  # fmt: skip
    if asked is not None:
        why = evidence if view.cuda else Text("there is no CUDA device", "没有 CUDA 设备")
        return row("I3", INERT, why, asked, sites=0, exercised=False, **facts)
    if not view.cuda:
        return row("I3", NOT_APPLICABLE, Text("needs a CUDA device", "需要 CUDA 设备"))
    if len(shapes) > 1:
        return row("I3", NOT_APPLICABLE, Text(f"{len(shapes)} shapes drawn", f"出现 {len(shapes)} 种形状"))
    small = max(view.tokens(), default=LONG_CLIP_TOKENS) <= FEW_TOKENS and view.facts.total_steps > LONG_RUN
    return row("I3", RECOMMENDED if small else DISABLED, evidence)


@check("I4")
def qlora(view: View) -> LiveRow:
    if view.trainable().get("kind") not in ("lora", "peft"):
        return row("I4", NOT_APPLICABLE, Text("full fine-tuning", "全参微调"))
    total = sum(p.numel() * p.element_size() for _, p in view.base_parameters())
    evidence = Text(f"base weights take {size(total)}: {counted(view.dtype_counts())}",
                    f"基础权重占 {size(total)}：{counted(view.dtype_counts())}")  # fmt: skip
    limit = view.device_memory()
    return row("I4", RECOMMENDED if limit and total > 0.7 * limit else DISABLED, evidence, base_bytes=total)


@check("I5")
def vae_tiling(view: View) -> LiveRow:
    if not view.counts.vae_batches:
        return row("I5", NOT_APPLICABLE, Text("the VAE encoded nothing", "VAE 未编码"))
    side = max((max(height, width) for height, width in view.sizes()), default=0)
    evidence = Text(f"whole frames of up to {side} latents", f"整帧编码，最大 {side} 个潜变量")
    return row("I5", RECOMMENDED if side >= LARGE_LATENT else DISABLED, evidence)


@check("I7")
def fp8(view: View) -> LiveRow:
    if not view.cuda or view.capability() < (8, 9):
        return row("I7", NOT_APPLICABLE, Text("needs compute capability 8.9", "需要计算能力 8.9"))
    tokens = max(view.tokens(), default=0)
    evidence = Text(f"{tokens} tokens per sample", f"每样本 {tokens} 个 token")
    return row("I7", RECOMMENDED if tokens > FEW_TOKENS else DISABLED, evidence)


@check("I12")
def sequence_parallel(view: View) -> LiveRow:
    if view.facts.world == 1:
        return row("I12", NOT_APPLICABLE, Text("one process", "单进程"))
    tokens = max(view.tokens(), default=0)
    evidence = Text(f"each of {view.facts.world} processes holds all {tokens} tokens of its clip",
                    f"{view.facts.world} 个进程各持有其片段的全部 {tokens} 个 token")  # fmt: skip
    return row("I12", RECOMMENDED if tokens > LONG_CLIP_TOKENS else DISABLED, evidence)


@check("I13")
def teacache(view: View) -> LiveRow:
    asked = [flag for flag in TEACACHE_FLAGS if view.value(flag)]
    if not view.has("reward_fn"):
        why = Text("reward training only", "仅奖励训练")
        return row("I13", INERT if asked else NOT_APPLICABLE, why, view.asked(*asked),
                   exercised=False if asked else None)  # fmt: skip
    caches = [c for model in view.target.denoisers().values() if (c := getattr(model, "teacache", None)) is not None]
    skipped, computed = sum(c.skipped for c in caches), sum(c.computed for c in caches)
    evidence = Text(f"{skipped} denoiser calls skipped, {computed} computed",
                    f"跳过 {skipped} 次、计算 {computed} 次去噪调用")  # fmt: skip
    if asked or caches:
        return row("I13", ENABLED if skipped else INERT, evidence, view.asked(*asked), sites=len(caches),
                   exercised=skipped > 0, skipped=skipped, computed=computed)  # fmt: skip
    long = int(view.value("num_inference_steps", 0) or 0) > WORTHWHILE_SAMPLING
    return row("I13", RECOMMENDED if long else DISABLED, NOT_ASKED)
