"""D. Memory over several devices."""

from __future__ import annotations

from optim_patches.audit.checks import Advice, Check
from optim_patches.audit.edits import Edit, launcher, undo_launcher
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text, same

T = Text
ZERO2 = "config/zero_stage2_config.json"
ZERO3 = "config/zero_stage3_config.json"
OFFLOAD = "config/zero_stage3_config_cpu_offload.json"
_KINDS = ("train", "config")
_FSDP_FLAGS = ("use_fsdp", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_sharding_strategy",
               "fsdp_state_dict_type", "fsdp_backward_prefetch", "fsdp_cpu_ram_efficient_loading")  # fmt: skip


def deepspeed_edits(f: Facts, file: str, *, zero3: bool = False) -> tuple[Edit, ...]:
    """Start under DeepSpeed with a configuration file."""
    edits = [undo_launcher(name) for name in _FSDP_FLAGS if f.launch.launcher_options.given(name)]
    edits += [launcher("use_deepspeed"), launcher("deepspeed_config_file", file)]
    if zero3:
        edits += [launcher("zero_stage", 3), launcher("zero3_save_16bit_model", "true"),
                  launcher("zero3_init_flag", "true")]  # fmt: skip
    return tuple(edits)


def fsdp_edits(f: Facts) -> tuple[Edit, ...]:
    """Start under FSDP with the block classes of this model."""
    drop = ("use_deepspeed", "deepspeed_config_file", "zero_stage", "zero3_save_16bit_model", "zero3_init_flag")
    edits = [undo_launcher(name) for name in drop if f.launch.launcher_options.given(name)]
    return (
        *edits,
        launcher("use_fsdp"),
        launcher("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        launcher("fsdp_transformer_layer_cls_to_wrap", ",".join(f.blocks)),
        launcher("fsdp_sharding_strategy", "FULL_SHARD"),
        launcher("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        launcher("fsdp_backward_prefetch", "BACKWARD_PRE"),
        launcher("fsdp_cpu_ram_efficient_loading", "False"),
    )


def _single(f: Facts) -> Text | None:
    return T("one device", "单卡") if f.world == 1 else None


def needs_offload(f: Facts) -> bool:
    """Full fine-tuning whose sharded share is still larger than the card."""
    if not f.full or f.memory is None or f.params is None or f.params < 5:
        return False
    shared = 8 * f.params / (f.world or 1)  # bf16 weights, gradients and both Adam moments: 8 bytes a parameter
    return shared > 0.6 * f.memory


def _d1_blocked(f: Facts) -> Text | None:
    if f.fsdp or f.zero == 3:
        return T("parameters are sharded already", "已使用参数分片")
    return _single(f) if f.zero != 2 else None


def _d1_advice(f: Facts) -> Advice | None:
    if f.lora and f.several and f.zero < 2 and (f.params or 0) >= 5:
        reason = T("LoRA of a {0:g}B model on {1} devices", "{0:g}B 模型 LoRA，{1} 卡")
        return Advice(reason.format(f.params, f.world), deepspeed_edits(f, ZERO2))
    return None


def _d2_blocked(f: Facts) -> Text | None:
    if f.lora:
        return T("LoRA keeps little state; ZeRO-2 is enough", "LoRA 状态很小，ZeRO-2 即可")
    if f.fsdp:
        return T("FSDP is used", "已使用 FSDP")
    return _single(f) if f.zero != 3 else None


def _d2_advice(f: Facts) -> Advice | None:
    if f.full and f.several and f.big and not f.blocks and not needs_offload(f):
        reason = T("full fine-tuning of a large model whose block class is not known here",
                   "大模型全参微调，block 类未知，无法用 FSDP")
        return Advice(reason, deepspeed_edits(f, ZERO3, zero3=True))
    return None


def _d3_blocked(f: Facts) -> Text | None:
    if f.lora:
        return T("LoRA has little state to move", "LoRA 状态很小，无需卸载")
    if f.fsdp and not needs_offload(f):
        return T("FSDP shards it already", "已使用 FSDP 分片")
    return None


def _d3_advice(f: Facts) -> Advice | None:
    if not needs_offload(f):
        return None
    reason = T("weights, gradients and Adam of {0:g}B are about {1:.0f} GB over {2} x {3:.0f} GB; "
               "needs about {4:.0f} GB of host memory",
               "{0:g}B 的权重、梯度与 Adam 约 {1:.0f}GB，显存为 {2} x {3:.0f}GB；需约 {4:.0f}GB 主机内存")
    text = reason.format(f.params, 8 * (f.params or 0), f.world or 1, f.memory, 18 * (f.params or 0))
    return Advice(text, deepspeed_edits(f, OFFLOAD, zero3=True), "P0")


def _d3_enabled(f: Facts) -> Text | None:
    if f.zero == 3 and f.distribution.offload:
        return same(f"ZeRO-3, {f.distribution.offload}")
    return None


def _d4_blocked(f: Facts) -> Text | None:
    if f.lora:
        return T("LoRA trains few parameters; ZeRO-2 is enough", "LoRA 训练参数少，ZeRO-2 即可")
    if f.zero == 3:
        return T("ZeRO-3 is used", "已使用 ZeRO-3")
    return _single(f) if not f.fsdp else None


def _d4_advice(f: Facts) -> Advice | None:
    if f.fsdp:
        reason = T("FSDP runs with {0}", "FSDP 策略为 {0}").format(f.distribution.fsdp_strategy)
        return Advice(reason, (launcher("fsdp_sharding_strategy", "FULL_SHARD"),), "P1") if f.tight else None
    if f.full and f.several and f.big and f.blocks and not needs_offload(f):
        reason = T("full fine-tuning of {0:g}B on {1} devices; steadier than ZeRO-3",
                   "{0:g}B 全参微调，{1} 卡；比 ZeRO-3 更稳定")
        return Advice(reason.format(f.params, f.world), fsdp_edits(f), "P0")
    return None


def _d5_blocked(f: Facts) -> Text | None:
    if not f.fsdp:
        return T("without FSDP there is nothing to prefetch", "未使用 FSDP")
    if f.distribution.fsdp_version == 2:
        return T("FSDP2 prefetches by itself", "FSDP2 自动预取")
    return None


def _d5_advice(f: Facts) -> Advice | None:
    if f.distribution.fsdp_prefetch == "NO_PREFETCH" and f.tight:
        return None
    return Advice(T("the next block's parameters can travel during the backward", "反向计算时可同时预取下一层参数"),
                  (launcher("fsdp_backward_prefetch", "BACKWARD_PRE"),))  # fmt: skip


ROWS = (
    Check(
        "D1", T("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2"), ("use_deepspeed", "deepspeed_config_file"),
        T("zero stage of the engine", "DeepSpeed 引擎的 zero stage"),
        T("gradients and optimizer state are shared over the devices", "分片梯度与优化器状态，LoRA 多卡首选"),
        "checklist D",
        lambda f: same("ZeRO-2") if f.zero == 2 else None,
        _d1_advice, _d1_blocked, "P1", 65, _KINDS,
    ),
    Check(
        "D2", T("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3"), ("use_deepspeed", "deepspeed_config_file"),
        T("zero stage, share of parameters held by this rank", "zero stage 与本 rank 持有的参数比例"),
        T("parameters, gradients and optimizer state are shared; weights are converted with zero_to_bf16.py afterwards",
          "分片参数、梯度与优化器状态；训练后用 zero_to_bf16.py 转换权重"),
        "checklist D",
        lambda f: same("ZeRO-3") if f.zero == 3 else None,
        _d2_advice, _d2_blocked, "P0", 80, _KINDS,
    ),
    Check(
        "D3", T("ZeRO-3 with CPU offload", "ZeRO-3 + CPU Offload"), ("use_deepspeed", "deepspeed_config_file"),
        T("offload devices in the engine's configuration", "引擎配置中的 offload 设备"),
        T("optimizer state and parameters live in host memory: fits where nothing else does, slow",
          "优化器与参数放在主机内存：极端显存不足时可用，较慢"),
        "checklist D",
        _d3_enabled, _d3_advice, _d3_blocked, "P1", 82, _KINDS,
    ),
    Check(
        "D4", T("FSDP full shard", "FSDP Full Shard"), ("use_fsdp", "fsdp_sharding_strategy"),
        T("wrapped units equal the blocks; class that was wrapped", "被包裹单元数等于 block 数；实际包裹的类"),
        T("parameters, gradients and optimizer state are shared block by block", "按 block 分片参数、梯度与优化器状态"),
        "checklist D",
        lambda f: same("FULL_SHARD") if f.distribution.full_shard else None,
        _d4_advice, _d4_blocked, "P0", 81, _KINDS,
    ),
    Check(
        "D5", T("FSDP backward prefetch", "FSDP Backward Prefetch"), ("fsdp_backward_prefetch",),
        T("value in the plugin (FSDP1), explicit prefetch (FSDP2)", "FSDP1 插件中的取值，FSDP2 的显式预取"),
        T("communication overlaps with the backward", "通信与反向计算重叠"),
        "checklist D",
        lambda f: same("BACKWARD_PRE") if f.distribution.fsdp_prefetch in ("BACKWARD_PRE", "1") else None,
        _d5_advice, _d5_blocked, "P1", 50, _KINDS, off=T("off to save one block's memory",
                                                         "为节省一个 block 的显存而关闭"),
    ),
)  # fmt: skip
