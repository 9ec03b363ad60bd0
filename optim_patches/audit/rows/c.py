"""C. Offloading and low memory."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import put
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
_CACHED = T("latents and text are cached; the encoders are not loaded", "latent 与文本已缓存，不加载编码器")


def _c1_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return T("no device memory to save on a CPU", "CPU 训练没有显存可省")
    return _CACHED if f.cached and f.text_cached else None


def _c1_advice(f: Facts) -> Advice | None:
    edits = (put("low_vram"),)
    if f.params is not None and f.params >= 14:
        return Advice(T("always for 14B: encoders stay on the host while the denoiser trains",
                        "14B 必开：训练 DiT 时编码器留在 CPU"),
                      edits)  # fmt: skip
    if f.tight:
        return Advice(T("memory is short", "显存紧张"), edits)
    return None


def _c2_blocked(f: Facts) -> Text | None:
    if f.cached:
        return T("latents are cached", "latent 已缓存")
    return None if f.accepts("vae_mini_batch") else T("this script has no such flag", "该脚本没有此参数")


def _c2_advice(f: Facts) -> Advice | None:
    chunk = f.options.integer("vae_mini_batch") or 32
    if (f.size >= 720 or f.frames >= 81) and chunk > 16:
        reason = T("{0} px, {1} frames with chunks of {2}; it splits the batch, add --vae_tiling for one large clip",
                   "{0} 像素、{1} 帧，分块为 {2}；它按 batch 切分，单个大视频请加 --vae_tiling")  # fmt: skip
        value = 8 if f.size >= 720 and f.frames >= 81 else 16
        return Advice(reason.format(f.size, f.frames, chunk), (put("vae_mini_batch", value),))
    return None


def _c3_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return T("streams need CUDA", "需要 CUDA")
    if not f.accepts("multi_stream"):
        return T("this script has no such flag", "该脚本没有此参数")
    if f.cached:
        return T("latents are cached", "latent 已缓存")
    if not f.image_conditioned:
        return T("text to video encodes one clip per step, nothing to overlap",
                 "T2V 每步只编码一个视频，没有可重叠的工作")
    return None


def _c3_advice(f: Facts) -> Advice | None:
    if f.tight or f.options.on("low_vram"):
        return None
    return Advice(T("clip and condition can be encoded at the same time",
                    "视频与条件可同时编码"), (put("multi_stream"),))


ROWS = (
    Check(
        "C1", T("low VRAM mode", "Low VRAM 模式"), ("low_vram",),
        T("device of VAE, text and image encoders during the denoiser's step",
          "去噪步中 VAE、文本与图像编码器所在设备"),
        T("VAE and text encoder wait on the host; only the denoiser holds device memory",
          "VAE 与文本编码器在 CPU/GPU 间穿梭，训练时只有 DiT 占用显存"),
        "checklist C",
        lambda f: same("--low_vram") if f.options.on("low_vram") else None,
        _c1_advice, _c1_blocked, "P0", 85,
    ),
    Check(
        "C2", T("VAE mini batch", "VAE Mini-Batch"), ("vae_mini_batch",),
        T("largest batch the VAE saw", "VAE 实际见到的最大批量"),
        T("lower peak while encoding (default 32)", "降低编码时的显存峰值（默认 32）"),
        "checklist C",
        lambda f: same(f"--vae_mini_batch {f.options.integer('vae_mini_batch')}")
        if f.options.given("vae_mini_batch") and (f.options.integer("vae_mini_batch") or 32) <= 16 else None,
        _c2_advice, _c2_blocked, "P1", 55, off=T("default chunks of 32", "默认分块 32"),
    ),
    Check(
        "C3", T("multi-stream VAE", "Multi-Stream VAE"), ("multi_stream",),
        T("streams created and overlap measured", "创建的 CUDA stream 与实测重叠"),
        T("clean and condition latents are encoded in parallel (image conditioned training)",
          "并行编码 clean latent 与 mask latent，加速 I2V 场景"),
        "checklist C",
        lambda f: same("--multi_stream") if f.options.on("multi_stream") else None,
        _c3_advice, _c3_blocked, "P2", 30,
    ),
)  # fmt: skip
