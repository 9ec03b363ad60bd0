"""G. Data pipeline."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import put
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
FEW = 100
_NO_FLAG = T("this script has no such flag", "该脚本没有此参数")
_FIXED = T("--fix_sample_size turns it off", "--fix_sample_size 会关闭它")
_CACHED = T("sizes are fixed by the prepared files", "预编码文件已固定尺寸")
_ONE_NODE = T("one node", "单机训练")


def _no_data(f: Facts) -> Text | None:
    return T("reward training reads prompts only", "奖励训练只读取提示词") if f.task == "reward" else None


def _needs(flag: str):
    def blocked(f: Facts) -> Text | None:
        return None if f.accepts(flag) else _NO_FLAG

    return blocked


def _switch(name: str):
    return lambda f: same(f"--{name}") if f.options.on(name) else None


def wants_workers(f: Facts) -> bool:
    """Data is decoded in the training process although workers could do it."""
    return f.workers == 0 and not (f.cached and f.options.given("dataloader_num_workers"))


def _g1_advice(f: Facts) -> Advice | None:
    if not wants_workers(f):
        return None
    value = 8 if f.several else 4
    reason = T("0 workers: the device waits while videos are decoded", "workers 为 0：GPU 等待视频解码")
    return Advice(reason, (put("dataloader_num_workers", value),))


def _g2_advice(f: Facts) -> Advice | None:
    if wants_workers(f):
        return Advice(T("comes with --dataloader_num_workers", "设置 --dataloader_num_workers 后自动启用"))
    return None


def _g3_blocked(f: Facts) -> Text | None:
    return _no_data(f) or _needs("enable_bucket")(f)


def _g3_advice(f: Facts) -> Advice | None:
    mixed = f.data.mixed_ratio if f.data is not None else None
    if mixed is False:
        return None
    if mixed:
        reason = T("aspect ratios differ; without buckets everything is cropped to a square",
                   "宽高比不一；不分桶会全部裁成正方形")
        return Advice(reason, (put("enable_bucket"),), "P0")
    reason = T("without buckets every clip is cropped to a square", "不分桶时每个视频都被裁成正方形")
    return Advice(reason, (put("enable_bucket"),))


def _g4_blocked(f: Facts) -> Text | None:
    if not f.accepts("random_hw_adapt"):
        return _NO_FLAG
    if f.cached and not f.options.on("cache_latents"):
        return _CACHED
    if f.options.on("cuda_graph"):
        return T("CUDA graphs need fixed shapes", "CUDA Graph 需要固定形状")
    return _FIXED if f.options.given("fix_sample_size") and f.options.on("enable_bucket") else None


def _g4_advice(f: Facts) -> Advice | None:
    if f.options.on("training_with_video_token_length"):
        reason = T("token-length training draws sizes only together with it",
                   "按 Token 长度训练需同时启用它才会选取尺寸")
        return Advice(reason, (put("random_hw_adapt"),), "P1")
    return None


def _g5_blocked(f: Facts) -> Text | None:
    if not f.accepts("training_with_video_token_length"):
        return _NO_FLAG
    if f.cached and not f.options.on("cache_latents"):
        return _CACHED
    return _FIXED if f.options.given("fix_sample_size") and f.options.on("enable_bucket") else None


def _g5_advice(f: Facts) -> Advice | None:
    if f.data is not None and f.data.mixed_length and f.data.mixed_ratio:
        reason = T("clips of {0} to {1} frames: keep the tokens of a batch constant",
                   "视频 {0}~{1} 帧：保持每批 Token 数恒定")
        text = reason.format(min(f.data.lengths), max(f.data.lengths))
        return Advice(text, (put("training_with_video_token_length"), put("random_hw_adapt")))
    return None


def _g6_blocked(f: Facts) -> Text | None:
    if not f.accepts("auto_tile_batch_size"):
        return _NO_FLAG
    return T("not used under full sharding", "完全分片（ZeRO-3/FSDP）下不生效") if f.sharded else None


def _g6_advice(f: Facts) -> Advice | None:
    stills = f.data is not None and f.data.images > 0 and f.data.videos > 0
    if f.options.on("training_with_video_token_length") or stills:
        reason = T("short sequences (stills, small sizes) leave the device idle", "短序列（图片、小尺寸）会让 GPU 空闲")
        return Advice(reason, (put("auto_tile_batch_size"),))
    return None


def _g7_blocked(f: Facts) -> Text | None:
    if not f.accepts("keep_all_node_same_token_length"):
        return _NO_FLAG
    return _ONE_NODE if f.nodes <= 1 else None


def _g7_advice(f: Facts) -> Advice | None:
    if f.random_sizes or f.options.on("training_with_video_token_length"):
        reason = T("{0} nodes with random sizes wait for the slowest", "{0} 个节点尺寸随机，会互相等待")
        return Advice(reason.format(f.nodes), (put("keep_all_node_same_token_length"),))
    return None


def _g8_enabled(f: Facts) -> Text | None:
    stride = f.options.integer("video_sample_stride")
    if f.options.given("video_sample_stride") and (stride is None or stride > 1):
        return same(f"--video_sample_stride {stride if stride is not None else '?'}")
    return None


def _g8_advice(f: Facts) -> Advice | None:
    rates = f.data.rates if f.data is not None else []
    if not f.options.given("video_sample_stride"):
        reason = T("the default of 4 silently keeps every 4th frame; say what you want",
                   "默认值 4 会静默地每 4 帧取 1 帧，请显式指定")
        value = max(1, round(max(rates) / 16)) if rates else 1 if f.frames <= 17 else 2
        return Advice(reason, (put("video_sample_stride", value),))
    if rates and min(rates) >= 48:
        reason = T("clips of {0:g} frames per second", "视频帧率 {0:g} fps").format(min(rates))
        return Advice(reason, (put("video_sample_stride", max(2, round(min(rates) / 16))),))
    return None


def _g9_blocked(f: Facts) -> Text | None:
    if not f.accepts("random_frame_crop"):
        return _NO_FLAG
    if f.options.on("cache_latents"):
        return T("cached latents hold all their frames", "缓存的 latent 含全部帧")
    return _CACHED if f.cached else None


def _g9_advice(f: Facts) -> Advice | None:
    if f.data is not None and 0 < f.data.videos < FEW and not f.options.on("cuda_graph"):
        reason = T("{0} videos: other lengths are a cheap augmentation", "仅 {0} 个视频：随机帧数是廉价的数据增强")
        return Advice(reason.format(f.data.videos), (put("random_frame_crop"),))
    return None


def text_only(f: Facts) -> bool:
    """Distillation from prompts: no clip is ever encoded."""
    return f.task == "distill" and f.mode == "normal"


def _g10_blocked(f: Facts) -> Text | None:
    if text_only(f):
        return T("trains from prompts, no clip is encoded", "仅用提示词训练，不编码视频")
    return _no_data(f)


def _g10_advice(f: Facts) -> Advice | None:
    if f.random_sizes or f.seen_once:
        return None
    reason = T("every step encodes the same clips again; encode them once",
               "每一步都在重复编码相同的视频；可预先编码一次")
    return Advice(reason, (put("cache_latents"),))


def _ratio(f: Facts) -> float:
    value = f.options.number("text_drop_ratio", 0.1)
    return 0.1 if value is None else value


def _g11_enabled(f: Facts) -> Text | None:
    if _ratio(f) > 0:
        default = T("default 0.1", "默认 0.1")
        return same(f"{_ratio(f):g}") if f.options.given("text_drop_ratio") else default
    return None


def _g11_advice(f: Facts) -> Advice | None:
    if f.family is not None and f.family.guidance_distilled:
        return None
    reason = T("guidance at inference needs training without text now and then",
               "推理时使用 CFG 需要训练中偶尔丢弃文本")
    return Advice(reason, (put("text_drop_ratio", 0.1),))


ROWS = (
    Check(
        "G1", T("loader workers", "DataLoader Workers"), ("dataloader_num_workers",),
        T("workers alive, share of step time spent waiting for data", "存活的 worker 数，等待数据占步时的比例"),
        T("videos are decoded beside the training step", "多进程解码视频，不阻塞训练"),
        "checklist G",
        lambda f: same(f"--dataloader_num_workers {f.workers}") if f.workers > 0 else None,
        _g1_advice, _no_data, "P0", 88, off=T("0 on purpose: latents are cached", "已缓存 latent，无需 worker"),
    ),
    Check(
        "G2", T("persistent workers", "Persistent Workers"), ("dataloader_num_workers",),
        T("attribute of the loader", "loader 的属性"),
        T("workers are not restarted every epoch", "复用 worker 进程，避免每 epoch 重启"),
        "checklist G",
        lambda f: T("automatic with workers", "有 worker 时自动启用") if f.workers > 0 else None,
        _g2_advice, _no_data, "P2", 10, off=T("no workers", "没有 worker"), follows="G1",
    ),
    Check(
        "G3", T("bucket sampling", "Bucket 采样"), ("enable_bucket",),
        T("buckets in use, samples kept and dropped per bucket, share of padding",
          "使用的桶、每桶保留/丢弃的样本、填充占比"),
        T("clips keep their aspect ratio; less is cropped away", "按宽高比分桶，减少裁剪与填充浪费"),
        "checklist G",
        _switch("enable_bucket"), _g3_advice, _g3_blocked, "P1", 72,
        off=T("all clips have one aspect ratio", "数据宽高比一致"),
    ),
    Check(
        "G4", T("random size adaptation", "随机分辨率适配"), ("random_hw_adapt",),
        T("sizes drawn", "实际抽取的尺寸"),
        T("augmentation by size, less compute on average", "数据增强，并平均减少计算"),
        "checklist G",
        _switch("random_hw_adapt"), _g4_advice, _g4_blocked, "P2", 18,
    ),
    Check(
        "G5", T("token-length training", "视频 Token 长度训练"), ("training_with_video_token_length",),
        T("tokens per step: least, median, most", "每步 Token 数的最小/中位/最大值"),
        T("long clips become smaller, short ones larger: constant work per step",
          "在固定 Token 预算内动态调整分辨率和帧数"),
        "checklist G",
        _switch("training_with_video_token_length"), _g5_advice, _g5_blocked, "P2", 22,
    ),
    Check(
        "G6", T("auto tile batch", "自动 Tile Batch"), ("auto_tile_batch_size",),
        T("tiling factors used", "实际使用的 tile 倍数"),
        T("short sequences are repeated 2 or 4 times with other noise",
          "短序列自动增大 batch（2x/4x），提高 GPU 利用率"),
        "checklist G",
        _switch("auto_tile_batch_size"), _g6_advice, _g6_blocked, "P2", 24,
    ),
    Check(
        "G7", T("equal token length over nodes", "保持节点同 Token 长度"), ("keep_all_node_same_token_length",),
        T("tokens per rank", "每个 rank 的 Token 数"),
        T("no node waits for another", "各节点 Token 数相近，防止 straggler"),
        "checklist G",
        _switch("keep_all_node_same_token_length"), _g7_advice, _g7_blocked, "P1", 45,
    ),
    Check(
        "G8", T("frame stride", "视频采样步长"), ("video_sample_stride",),
        T("source rate and sampled rate", "源帧率与采样后的帧率"),
        T("longer spans of time from the same number of frames", "跳帧采样，用相同帧数覆盖更长时间"),
        "checklist G",
        _g8_enabled, _g8_advice, _needs("video_sample_stride"), "P2", 21, off=T("every frame", "逐帧采样"),
    ),
    Check(
        "G9", T("random frame crop", "随机帧裁剪"), ("random_frame_crop",),
        T("frame counts drawn", "实际抽取的帧数"),
        T("90 % full length, 10 % shorter: augmentation", "90% 概率取最大帧数，10% 随机少取，数据增强"),
        "checklist G",
        _switch("random_frame_crop"), _g9_advice, _g9_blocked, "P2", 12,
    ),
    Check(
        "G10", T("pre-encoded data set", "预编码数据集"), ("cache_latents",),
        T("VAE and text forwards in a step: 0 when on", "一步中 VAE 与文本编码器的前向次数：启用时为 0"),
        T("no VAE in the step; several times faster when encoding dominates", "跳过 VAE 前向，训练速度大幅提升"),
        "checklist G",
        lambda f: same("--cache_latents" if f.options.on("cache_latents") else "ImageVideoSafetensorsDataset")
        if f.cached else None,
        _g10_advice, _g10_blocked, "P0", 92, off=T("sizes are random, or each clip is read once",
                                                   "尺寸随机，或每个样本只读一次"),
    ),
    Check(
        "G11", T("text dropout", "文本 Dropout"), ("text_drop_ratio",),
        T("share of empty prompts drawn", "空提示词的比例"),
        T("trains the unconditional branch of guidance", "训练 classifier-free guidance 的无条件分支"),
        "checklist G",
        _g11_enabled, _g11_advice, _no_data, "P2", 27, off=T("off; this family samples without guidance",
                                                             "已关闭；该系列推理不使用 CFG"),
    ),
)  # fmt: skip
