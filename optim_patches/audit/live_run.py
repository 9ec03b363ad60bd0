"""Live checks of groups F and G: attention backends and the data pipeline."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

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
from optim_patches.audit.text import Text, same

ATTENTION_VARIABLE = "VIDEOX_ATTENTION_TYPE"
WAIT_SHARE = 0.05


def _attention(view: View, row_id: str, *, backend: str, package: str, capable: bool, advice: Text) -> LiveRow:
    """A kernel that is used when it is installed: nobody asks for it but the environment variable."""
    calls = view.probe.attention()
    number = calls.get(backend, 0)
    wanted = os.environ.get(ATTENTION_VARIABLE, "").upper() == backend
    requested = same(f"{ATTENTION_VARIABLE}={backend}") if wanted else Text("automatic", "自动")
    evidence = Text(f"{number} calls; all backends: {counted(calls)}", f"{number} 次调用；全部后端：{counted(calls)}")
    if number:
        return row(row_id, ENABLED, evidence, requested, exercised=True, calls=calls)
    if wanted:
        return row(row_id, INERT, evidence, requested, exercised=False, calls=calls)
    if not capable:
        return row(row_id, NOT_APPLICABLE, evidence, requested, exercised=False)
    installed = importlib.util.find_spec(package) is not None
    return row(row_id, DISABLED if installed else RECOMMENDED, evidence if installed else evidence + advice, requested,
               exercised=False)  # fmt: skip


@check("F1")
def flash2(view: View) -> LiveRow:
    newer = any(name in view.probe.attention() for name in ("FLASH_ATTENTION_3", "FLASH_ATTENTION_4"))
    capable = view.capability() >= (8, 0) and not newer
    return _attention(view, "F1", backend="FLASH_ATTENTION_2", package="flash_attn", capable=capable,
                      advice=same("; pip install flash-attn"))  # fmt: skip


@check("F2")
def flash3(view: View) -> LiveRow:
    return _attention(
        view, "F2", backend="FLASH_ATTENTION_3", package="flash_attn_interface", capable=view.capability()[0] == 9,
        advice=Text("; install flash-attn 3 (Hopper)", "；安装 flash-attn 3（Hopper）"),
    )  # fmt: skip


@check("F3")
def varlen(view: View) -> LiveRow:
    calls = view.probe.attention()
    flash = sum(number for name, number in calls.items() if name.startswith("FLASH"))
    if not view.counts.padded_calls:
        evidence = Text("no padded batch in these steps", "这些步骤中没有填充批次")
        return row("F3", NOT_APPLICABLE, evidence, Text("automatic", "自动"))
    evidence = Text(
        f"{view.counts.padded_calls} padded block calls; FlashAttention ran {flash} times, SDPA masks padding",
        f"{view.counts.padded_calls} 次填充调用；FlashAttention 运行 {flash} 次，SDPA 以掩码处理填充",
    )
    return row("F3", ENABLED if flash else DISABLED, evidence, Text("automatic", "自动"), exercised=flash > 0)


@check("F4")
def sage(view: View) -> LiveRow:
    number = view.probe.attention().get("SAGE_ATTENTION", 0)
    evidence = Text(f"{number} calls in training steps (it has no backward, 0 is right)",
                    f"训练步骤中 {number} 次调用（无反向，应为 0）")  # fmt: skip
    return row("F4", INERT if number else NOT_APPLICABLE, evidence, exercised=number > 0)


@check("F5")
def sdpa(view: View) -> LiveRow:
    calls = view.probe.attention()
    number = calls.get("SDPA", 0)
    if not calls:
        return row("F5", NOT_APPLICABLE, Text("no attention call of ours was seen", "未见到本项目的注意力调用"))
    evidence = Text(f"{number} calls (once per graph where compiled)", f"{number} 次调用（编译图内各计一次）")
    if view.cuda:
        cuda = torch.backends.cuda
        kernels = {"flash": cuda.flash_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled(),
                   "memory efficient": cuda.mem_efficient_sdp_enabled(), "math": cuda.math_sdp_enabled()}  # fmt: skip
        allowed = ", ".join(name for name, on in kernels.items() if on)
        evidence += Text(f"; kernels it may choose: {allowed}", f"；可选内核：{allowed}")
    return row("F5", ENABLED if number else DISABLED, evidence, Text("fall-back", "兜底"), exercised=number > 0)


@check("F6")
def sparse(view: View) -> LiveRow:
    models = view.target.denoisers().values()
    layers = [m for model in models for m in model.modules() if "SparseLinearAttention" in type(m).__name__]
    calls = sum(number for name, number in view.probe.attention().items() if "SPARSE" in name)
    if not layers:
        return row("F6", NOT_APPLICABLE, Text("TurboDiffusion models only", "仅 TurboDiffusion 模型"))
    topk = sorted({str(value) for layer in layers if (value := getattr(layer, "topk", None)) is not None})
    evidence = Text(f"{len(layers)} sparse layers, {calls} sparse calls, top-k {', '.join(topk) or '-'}",
                    f"{len(layers)} 个稀疏层，{calls} 次稀疏调用，top-k {', '.join(topk) or '-'}")  # fmt: skip
    return row("F6", ENABLED if calls else INERT, evidence, Text("automatic", "自动"), sites=len(layers),
               exercised=calls > 0)  # fmt: skip


def _torch_loader(view: View) -> Any:
    return getattr(view.target.loader, "_torch_loader", None)


def _alive(view: View) -> int:
    if view.facts.loader_workers is not None:
        return view.facts.loader_workers
    iterator = getattr(_torch_loader(view), "_iterator", None)
    return sum(worker.is_alive() for worker in getattr(iterator, "_workers", ()))


@check("G1")
def workers(view: View) -> LiveRow:
    facts = view.facts
    share = facts.data_wait_s / facts.seconds if facts.seconds else 0.0
    wanted = int(view.value("dataloader_num_workers", 0) or 0)
    alive = _alive(view)
    evidence = Text(f"{alive} workers alive; {100 * share:.1f} % of the time waiting for data",
                    f"{alive} 个 worker；{100 * share:.1f} % 时间等待数据")  # fmt: skip
    asked = view.asked("dataloader_num_workers")
    if wanted:
        return row("G1", ENABLED if alive else INERT, evidence, asked, sites=alive, exercised=alive > 0, share=share)
    state = RECOMMENDED if share > WAIT_SHARE or view.cuda else DISABLED
    return row("G1", state, evidence, asked, sites=0, exercised=False, share=share)


@check("G2")
def persistent(view: View) -> LiveRow:
    loader = _torch_loader(view)
    if loader is None:
        return row("G2", NOT_APPLICABLE, Text("no workers", "无 worker"))
    value = bool(getattr(loader, "persistent_workers", False))
    return row("G2", ENABLED if value else RECOMMENDED, Text(f"loader attribute {value}", f"加载器属性 {value}"),
               Text("automatic", "自动"), exercised=value)  # fmt: skip


def _shape_list(view: View) -> Text:
    shapes = view.facts.shapes
    listing = ", ".join(f"{number}x {'x'.join(map(str, s[2:]))}" for s, number in sorted(shapes.items())[:4])
    more = f" +{len(shapes) - 4}" if len(shapes) > 4 else ""
    return Text(f"{len(shapes)} latent shapes drawn: {listing}{more}", f"{len(shapes)} 种潜变量形状：{listing}{more}")


def _kept(view: View) -> Text:
    """Rows of the data set that are used, by bucket; known to the main process."""
    summary = view.target.extras.get("data_summary")
    sizes = getattr(summary, "buckets", None)
    if not sizes:
        return same("")
    few, many = min(sizes.values()), max(sizes.values())
    return Text(f"; {summary.kept} of {summary.rows} rows kept in {len(sizes)} buckets of {few} to {many}",
                f"；{summary.rows} 行保留 {summary.kept} 行，{len(sizes)} 个桶各 {few} 至 {many} 行")  # fmt: skip


@check("G3")
def buckets(view: View) -> LiveRow:
    if not view.value("enable_bucket"):
        return row("G3", DISABLED, _shape_list(view))
    return row("G3", ENABLED, _shape_list(view) + _kept(view), view.asked("enable_bucket"), sites=len(view.sizes()),
               exercised=bool(view.facts.shapes))  # fmt: skip


def _drawn(view: View, row_id: str, *, flag: str, values: list[Any], what: Text) -> LiveRow:
    """A flag that makes something vary; it shows only when enough steps were seen."""
    if not view.has(flag):
        return row(row_id, NOT_APPLICABLE, Text(f"this script has no --{flag}", f"该脚本没有 --{flag}"))
    listing = ", ".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values[:6])
    evidence = Text(f"{what.en}: {listing}", f"{what.zh}：{listing}")
    if not view.value(flag):
        return row(row_id, DISABLED, evidence)
    if view.value("fix_sample_size") and view.value("enable_bucket") and flag in FIXED_BY_SIZE:
        evidence = Text("--fix_sample_size fixes the size", "--fix_sample_size 已固定尺寸")
        return row(row_id, INERT, evidence, view.asked(flag), exercised=False)
    return row(row_id, ENABLED, evidence, view.asked(flag), exercised=bool(values))


#: ``--fix_sample_size`` with buckets switches these off.
FIXED_BY_SIZE = ("random_hw_adapt", "training_with_video_token_length")


@check("G4")
def random_size(view: View) -> LiveRow:
    return _drawn(view, "G4", flag="random_hw_adapt", values=view.sizes(), what=Text("latent sizes", "潜变量尺寸"))


@check("G5")
def token_length(view: View) -> LiveRow:
    return _drawn(view, "G5", flag="training_with_video_token_length", values=view.tokens(),
                  what=Text("tokens per sample", "每样本 token 数"))  # fmt: skip


@check("G6")
def auto_tile(view: View) -> LiveRow:
    if view.value("auto_tile_batch_size") and not view.value("training_with_video_token_length"):
        evidence = Text("needs --training_with_video_token_length", "需要 --training_with_video_token_length")
        return row("G6", INERT, evidence, view.asked("auto_tile_batch_size"), exercised=False)
    batches = sorted({shape[0] for shape in view.facts.shapes})
    return _drawn(view, "G6", flag="auto_tile_batch_size", values=view.facts.tiling or batches,
                  what=Text("batch sizes drawn", "批大小"))  # fmt: skip


@check("G7")
def same_tokens(view: View) -> LiveRow:
    result = _drawn(view, "G7", flag="keep_all_node_same_token_length", values=view.tokens(),
                    what=Text("tokens per sample", "每样本 token 数"))  # fmt: skip
    if result.state == DISABLED:
        return row("G7", DISABLED if view.facts.world > 1 else NOT_APPLICABLE, result.evidence)
    return result


@check("G8")
def stride(view: View) -> LiveRow:
    if not view.has("video_sample_stride"):
        return row("G8", NOT_APPLICABLE, Text("no video data", "无视频数据"))
    number = view.value("video_sample_stride")
    evidence = Text(f"every {number}. frame of a clip is used", f"每 {number} 帧取一帧")
    return row("G8", ENABLED if number and number > 1 else DISABLED, evidence, view.asked("video_sample_stride"))


@check("G9")
def frame_crop(view: View) -> LiveRow:
    return _drawn(view, "G9", flag="random_frame_crop", values=view.frames(), what=Text("latent frames", "潜变量帧数"))


def cache_share(view: View, *kinds: str) -> Text:
    """How many entries of the cache were there when asked for."""
    hits, misses = view.facts.cache.get("hits", {}), view.facts.cache.get("misses", {})
    shares = ", ".join(f"{kind} {hits.get(kind, 0)}/{hits.get(kind, 0) + misses.get(kind, 0)}" for kind in kinds
                       if kind in hits or kind in misses)
    return Text(f"; found in the cache: {shares}", f"；缓存命中：{shares}") if shares else same("")


@check("G10")
def cached_latents(view: View) -> LiveRow:
    calls, micro = view.counts.encoder_calls, max(view.counts.denoiser_steps, 1)
    per_step = {role: round(number / micro, 2) for role, number in sorted(calls.items())}
    listing = ", ".join(f"{role} {number}" for role, number in per_step.items()) or "0"
    evidence = Text(f"encoder calls per micro-step: {listing}", f"每微步编码器调用：{listing}")
    evidence += cache_share(view, "latents", "masked", "control", "ref", "image")
    if view.value("cache_latents") and "vae" not in view.target.models:
        evidence += Text("; the VAE is not loaded", "；未加载 VAE")
    if view.value("cache_latents"):
        return row("G10", ENABLED, evidence, view.asked("cache_latents"), exercised=not calls.get("vae", 0) or None,
                   per_step=per_step)  # fmt: skip
    if calls.get("vae", 0):
        return row("G10", RECOMMENDED, evidence, exercised=False, per_step=per_step)
    return row("G10", ENABLED, evidence, exercised=True, per_step=per_step)


@check("G11")
def text_dropout(view: View) -> LiveRow:
    value, facts = float(view.value("text_drop_ratio", 0.1) or 0), view.facts
    share = 100 * facts.text_dropped / facts.texts if facts.texts else 0.0
    evidence = Text(f"{facts.text_dropped} of {facts.texts} prompts were empty ({share:.0f} %)",
                    f"{facts.texts} 条提示词中 {facts.text_dropped} 条为空（{share:.0f} %）")  # fmt: skip
    return row("G11", ENABLED if value else DISABLED, evidence, view.asked("text_drop_ratio"),
               exercised=facts.text_dropped > 0 or None)  # fmt: skip
