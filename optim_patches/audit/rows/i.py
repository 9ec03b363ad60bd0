"""I. Deep optimizations: what this project adds to VideoX-Fun's scripts."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import config, put, run
from optim_patches.audit.facts import Facts
from optim_patches.audit.rows.a import wants_8bit
from optim_patches.audit.rows.b import fraction
from optim_patches.audit.text import Text, same

T = Text
_CPU = T("needs a CUDA device", "需要 CUDA 设备")
TEACACHE = ("train_teacache", "enable_teacache", "teacache")


def _switch(name: str, *calls: str):
    def enabled(f: Facts) -> Text | None:
        if f.options.on(name):
            return same(f"--{name}")
        return same(next(iter(calls))) if calls and f.calls(*calls) else None

    return enabled


def _i1_enabled(f: Facts) -> Text | None:
    backend = f.distribution.dynamo
    if backend and backend.lower() != "no":
        return same(f"--dynamo_backend {backend}")
    return _switch("compile", "torch.compile")(f)


def _i1_blocked(f: Facts) -> Text | None:
    if f.options.on("cuda_graph") and not f.options.on("compile"):
        return T("CUDA graphs are captured instead", "已改用 CUDA Graph 捕获")
    return None


def _i1_advice(f: Facts) -> Advice | None:
    if f.short or f.cpu:
        return None
    return Advice(T("blocks run operator by operator", "block 仍逐算子执行"), (put("compile"),))


def _i2_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return T("Triton kernels need CUDA", "Triton 内核需要 CUDA")
    if f.family is not None and f.family.liger is None:
        return T("this model has no layer that Liger covers", "该模型没有 Liger 可替换的层")
    return None


def _i2_advice(f: Facts) -> Advice | None:
    if f.short:
        return None
    covered = f.family.liger if f.family is not None and f.family.liger is not None else T("norms", "归一化层")
    edits = (put("liger"),)
    if f.has("liger_kernel") is False:
        edits = (run("pip install liger-kernel"), *edits)
    return Advice(T("covers {0} in this model", "可覆盖该模型的 {0}").format(covered), edits)


def _i3_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return _CPU
    if f.options.on("gradient_checkpointing") or fraction(f) > 0:
        return T("a graph keeps what gradient checkpointing computes again", "图会保留梯度检查点要重算的内容")
    return T("sizes are drawn anew for each batch", "每批尺寸随机") if f.random_sizes else None


def _i3_advice(f: Facts) -> Advice | None:
    if f.fixed_shape and f.tokens <= 4096 and not f.short and f.batch * f.tokens <= 8192:
        reason = T("fixed shapes with {0} tokens: kernel launches dominate",
                   "形状固定且仅 {0} 个 Token：启动开销占主导")
        return Advice(reason.format(f.tokens), (put("cuda_graph"),))
    return None


def base_fits(f: Facts) -> bool:
    """Whether bf16 base weights leave room for training on one card."""
    return f.memory is None or f.params is None or 2 * f.params <= 0.7 * f.memory


def _i4_blocked(f: Facts) -> Text | None:
    if not f.lora:
        return T("full fine-tuning needs trainable weights", "全参微调需要可训练的权重")
    return T("quantized weights cannot be sharded", "量化权重无法分片") if f.sharded else None


def _i4_advice(f: Facts) -> Advice | None:
    if base_fits(f):
        return None
    reason = T("{0:g}B in bf16 is {1:.0f} GB on a card of {2:.0f} GB; about {3:.0f} GB in 4 bits",
               "{0:g}B 的 bf16 权重为 {1:.0f}GB，显卡只有 {2:.0f}GB；4-bit 约 {3:.0f}GB")  # fmt: skip
    edits = (put("qlora"),)
    if f.has("bitsandbytes") is False:
        edits = (run("pip install bitsandbytes"), *edits)
    text = reason.format(f.params, 2 * (f.params or 0), f.memory, 0.7 * (f.params or 0))
    return Advice(text, edits, "P0")


def _i5_blocked(f: Facts) -> Text | None:
    if f.cached:
        return T("latents are cached", "latent 已缓存")
    if f.family is not None and not f.family.wan_vae:
        return T("this family's VAE has tiling of its own", "该系列的 VAE 自带 tiling")
    return None


def _i5_advice(f: Facts) -> Advice | None:
    if f.size >= 720:
        reason = T("{0} pixels: encoding sets the peak", "{0} 像素：编码决定显存峰值").format(f.size)
        return Advice(reason, (put("vae_tiling"),))
    return None


def _i6_blocked(f: Facts) -> Text | None:
    if f.options.on("train_text_encoder"):
        return T("the text encoder is trained", "正在训练文本编码器")
    return T("no text encoder is loaded", "不加载文本编码器") if f.script_id.startswith("flashhead") else None


def _i6_advice(f: Facts) -> Advice | None:
    if f.seen_once:
        return None
    reason = T("captions are fixed; encode them once and do not load the text encoder",
               "提示词固定：编码一次，训练时不加载文本编码器")
    return Advice(reason, (put("cache_text"),), "P0" if f.tight or f.big else "P1")


def _i7_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return _CPU
    return T("needs compute capability 8.9", "需要计算能力 8.9") if f.capability(8, 9) is False else None


def _i7_advice(f: Facts) -> Advice | None:
    if f.capability(8, 9) and (f.params or 0) >= 5 and f.tokens >= 8192 and not f.options.on("qlora") and base_fits(f):
        reason = T("{0:g}B with {1} tokens: large matrix products", "{0:g}B、{1} 个 Token：大矩阵乘法占主导")
        return Advice(reason.format(f.params, f.tokens), (put("fp8"),))
    return None


def _i8_blocked(f: Facts) -> Text | None:
    if f.zero == 0:
        return T("DeepSpeed only", "仅 DeepSpeed")
    return T("one node: links are fast", "单机：带宽充足") if f.nodes <= 1 else None


def _i8_advice(f: Facts) -> Advice | None:
    if f.zero != 3:
        return None
    edits = (config("zero_optimization.zero_quantized_weights", "true"),
             config("zero_optimization.zero_quantized_gradients", "true"))  # fmt: skip
    return Advice(T("{0} nodes exchange parameters every step", "{0} 个节点每步交换参数").format(f.nodes), edits)


def _i9_blocked(f: Facts) -> Text | None:
    return None if f.zero == 3 else T("ZeRO-3 only", "仅 ZeRO-3")


def _i9_advice(f: Facts) -> Advice | None:
    need = 18 * (f.params or 0)
    if f.distribution.offload and f.host_ram is not None and f.params is not None and f.host_ram < need:
        reason = T("offload needs about {0:.0f} GB of host memory, there are {1:.0f}",
                   "卸载需约 {0:.0f}GB 主机内存，仅有 {1:.0f}GB")
        edits = (config("zero_optimization.offload_optimizer.device", "nvme"),
                 config("zero_optimization.offload_optimizer.nvme_path", "/local_nvme"))  # fmt: skip
        return Advice(reason.format(need, f.host_ram), edits)
    return None


def _i10_blocked(f: Facts) -> Text | None:
    if f.cpu:
        return _CPU
    if f.options.on("use_8bit_adam") or f.options.on("use_came"):
        return T("another optimizer is used", "使用了其他优化器")
    return T("the optimizer runs on the host", "优化器在 CPU 上运行") if f.distribution.offload else None


def _i10_enabled(f: Facts) -> Text | None:
    if f.distribution.optimizer.lower() in ("adam", "adamw", "fusedadam") and f.zero:
        return same("DeepSpeed FusedAdam")
    return _switch("fused_optimizer", "FusedAdam")(f)


def _i10_advice(f: Facts) -> Advice | None:
    if f.zero or wants_8bit(f):
        return None
    return Advice(T("AdamW updates tensor by tensor", "AdamW 逐张量更新"), (put("fused_optimizer"),))


def _i11_blocked(f: Facts) -> Text | None:
    if f.task == "reward":
        return T("reward training reads prompts only", "奖励训练只读取提示词")
    return T("no workers", "没有 worker") if f.workers == 0 and not f.options.hidden("dataloader_num_workers") else None


def _i11_advice(f: Facts) -> Advice | None:
    if f.cached:
        return None
    return Advice(T("two batches per worker are fetched ahead by default", "默认每个 worker 仅预取 2 个 batch"),
                  (put("prefetch_factor", 4),))  # fmt: skip


def degree(f: Facts) -> int | None:
    """The largest sequence-parallel size that divides devices and heads, None when there is none."""
    if f.world is None or f.heads is None:
        return None
    return next((n for n in (8, 4, 2) if f.world % n == 0 and f.heads % n == 0), None)


def _i12_blocked(f: Facts) -> Text | None:
    if f.still:
        return T("still images are short", "图片序列很短")
    if f.world == 1:
        return T("one device", "单卡")
    if f.world and f.heads and degree(f) is None:
        reason = T("no size divides {0} devices and {1} heads", "没有同时整除 {0} 卡与 {1} 个注意力头的大小")
        return reason.format(f.world, f.heads)
    return None


def _i12_enabled(f: Facts) -> Text | None:
    size = f.options.integer("sequence_parallel_size") or 1
    return same(f"--sequence_parallel_size {size}") if size > 1 else None


def _i12_advice(f: Facts) -> Advice | None:
    size = degree(f)
    if f.frames >= 81 and f.size >= 720 and size:
        reason = T("{0} tokens per clip: share them over {1} devices", "每个视频 {0} 个 Token：由 {1} 卡分担")
        return Advice(reason.format(f.tokens, size), (put("sequence_parallel_size", size),))
    return None


def _i13_blocked(f: Facts) -> Text | None:
    return None if f.task == "reward" else T("reward LoRA only", "仅 Reward LoRA")


def _i13_enabled(f: Facts) -> Text | None:
    return next((same(f"--{name}") for name in TEACACHE if f.options.on(name)), None)


def _i13_advice(f: Facts) -> Advice | None:
    steps = f.options.integer("num_inference_steps") or 50
    if steps < 20:
        return None
    reason = T("{0} denoising steps per training step, most without gradient",
               "每个训练步 {0} 个去噪步，多数没有梯度").format(steps)
    return Advice(reason, (put("train_teacache"),))


ROWS = (
    Check(
        "I1", T("torch.compile", "torch.compile"), ("compile", "dynamo_backend"),
        T("compiled units, graphs, graph breaks, recompilations after warm-up",
          "编译单元、图数、graph break、预热后的重编译次数"),
        T("fused operators, throughput +10-30 % on CUDA", "算子融合，吞吐 +10~30%"),
        "checklist I",
        _i1_enabled, _i1_advice, _i1_blocked, "P1", 78, off=T("too short to pay off, or no CUDA",
                                                              "训练太短或没有 CUDA"),
    ),
    Check(
        "I2", T("Liger kernels", "Liger Kernel"), ("liger",),
        T("modules replaced by class, kernel launches in one step", "按类统计的替换模块数，一步内的内核启动数"),
        T("fused norms: fewer passes over memory; the gain depends on the share of norms",
          "融合归一化等算子：减少访存，收益取决于这些层的占比"),
        "checklist I",
        _switch("liger"), _i2_advice, _i2_blocked, "P1", 58, off=T("too short to pay off", "训练太短"),
    ),
    Check(
        "I3", T("CUDA graphs", "CUDA Graph"), ("cuda_graph",),
        T("graphs captured and replayed per shape", "每种形状捕获与重放的图"),
        T("removes launch overhead where sequences are short", "Kernel launch 开销 -90%（小 batch 时显著）"),
        "checklist I",
        _switch("cuda_graph"), _i3_advice, _i3_blocked, "P2", 36, off=T("matrix products dominate at this size",
                                                                        "该尺寸下矩阵乘法占主导"),
    ),
    Check(
        "I4", T("QLoRA (4 bit)", "QLoRA (4-bit)"), ("qlora",),
        T("4-bit layers, bytes of base weights before and after", "4-bit 层数，基础权重量化前后的字节数"),
        T("14B base weights from about 28 to about 10 GB", "14B 权重从约 28GB 降至约 10GB"),
        "checklist I",
        _switch("qlora", "BitsAndBytesConfig"), _i4_advice, _i4_blocked, "P1", 84, off=T("bf16 weights fit",
                                                                                         "bf16 权重放得下"),
    ),
    Check(
        "I5", T("Wan VAE spatial tiling", "Wan VAE 空间 Tiling"), ("vae_tiling",),
        T("tiles per encode and decode, peak memory of the VAE", "每次编码/解码的 tile 数，VAE 显存峰值"),
        T("VAE memory -75 % at 720p and above", "高分辨率（>=720P）VAE 显存 -75%"),
        "checklist I",
        _switch("vae_tiling"), _i5_advice, _i5_blocked, "P1", 57,
    ),
    Check(
        "I6", T("cached text embeddings", "预编码 Text Embeddings"), ("cache_text",),
        T("whether the text encoder is loaded, forwards counted", "是否加载文本编码器，前向次数"),
        T("no text encoder in memory (about 5 GB) and none in the step", "跳过文本编码器前向，节省约 5GB 显存"),
        "checklist I",
        lambda f: same("--cache_text" if f.options.on("cache_text") else "ImageVideoSafetensorsDataset")
        if f.text_cached else None,
        _i6_advice, _i6_blocked, "P1", 86, off=T("each caption is read once at most", "每条提示词最多读取一次"),
    ),
    Check(
        "I7", T("FP8 training", "FP8 训练"), ("fp8",),
        T("float8 linears, scaled matmuls in one step", "float8 线性层数，一步内的 scaled matmul 次数"),
        T("matrix products up to twice as fast; attention stays as it is", "GEMM 速度最高翻倍，注意力不变"),
        "checklist I",
        _switch("fp8", "convert_to_float8_training", "fp8_autocast"), _i7_advice, _i7_blocked, "P2", 37,
        off=T("not known or too small to pay off", "设备未知或规模太小"),
    ),
    Check(
        "I8", T("ZeRO++ quantized communication", "ZeRO++ 量化通信"), ("deepspeed_config_file",),
        T("keys in the engine's configuration", "引擎配置中的相应键"),
        T("traffic between nodes -50 to -75 %", "多机通信量 -50~75%"),
        "checklist I",
        lambda f: same(", ".join(f.distribution.zeropp)) if f.distribution.zeropp else None,
        _i8_advice, _i8_blocked, "P2", 34, ("train", "config"), T("only ZeRO-3 moves parameters",
                                                                  "仅 ZeRO-3 需要传输参数"),
    ),
    Check(
        "I9", T("NVMe offload (ZeRO-Infinity)", "NVMe Offload（ZeRO-Infinity）"), ("deepspeed_config_file",),
        T("aio device in the engine's configuration", "引擎配置中的 aio 设备"),
        T("optimizer state beyond host memory", "突破 CPU 内存限制"),
        "checklist I",
        lambda f: same("nvme") if f.distribution.offload == "nvme" else None,
        _i9_advice, _i9_blocked, "P1", 31, ("train", "config"), T("host memory suffices or is not known",
                                                                  "主机内存足够或未知"),
    ),
    Check(
        "I10", T("fused optimizer", "Fused Optimizer"), ("fused_optimizer",),
        T("fused or foreach path of the optimizer", "优化器的 fused/foreach 路径"),
        T("fewer kernel calls, speed +5-10 %", "Kernel 调用次数减少，速度 +5~10%"),
        "checklist I",
        _i10_enabled, _i10_advice, _i10_blocked, "P2", 23, off=T("DeepSpeed or 8-bit Adam takes its place",
                                                                 "由 DeepSpeed 或 8-bit Adam 代替"),
    ),
    Check(
        "I11", T("prefetch factor", "DataLoader prefetch_factor"), ("prefetch_factor",),
        T("attribute of the loader, depth of its queue", "loader 的属性与队列深度"),
        T("loading and training overlap when decoding times vary", "数据加载与训练重叠"),
        "checklist I",
        lambda f: same(f"--prefetch_factor {f.options.text('prefetch_factor') or '?'}")
        if f.options.given("prefetch_factor") else (same("prefetch_factor=") if f.code is not None
                                                    and "prefetch_factor" in f.code.keywords else None),
        _i11_advice, _i11_blocked, "P2", 17, off=T("cached data loads fast", "缓存数据加载很快"),
    ),
    Check(
        "I12", T("sequence-parallel training", "序列并行训练"), ("sequence_parallel_size",),
        T("mesh, tokens per rank, all-to-all calls in one step",
          "设备网格、每 rank Token 数、一步内的 all-to-all 次数"),
        T("one clip's tokens over several devices: long video at high resolution",
          "单个视频的 Token 分布到多卡：超长高分辨率视频的显存突破"),
        "checklist I",
        _i12_enabled, _i12_advice, _i12_blocked, "P1", 48,
    ),
    Check(
        "I13", T("TeaCache in training", "训练时 TeaCache"), TEACACHE,
        T("denoiser calls computed and skipped", "计算与跳过的去噪调用数"),
        T("faster sampling inside reward training", "Reward LoRA 训练加速"),
        "checklist I",
        _i13_enabled, _i13_advice, _i13_blocked, "P2", 15, off=T("few sampling steps", "采样步数很少"),
    ),
)  # fmt: skip
