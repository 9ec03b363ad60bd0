"""Launchers and sharding: what wastes devices, stops the run or loses the result."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optim_patches.audit.edits import config, drop, launcher, put, undo_launcher
from optim_patches.audit.facts import Facts
from optim_patches.audit.project import Project
from optim_patches.audit.rules import Hit, Rule
from optim_patches.audit.text import Text

T = Text
_ANY = ("train", "config")


def _wrap_class(f: Facts, _: Project) -> Iterator[Hit]:
    if not f.fsdp or not f.blocks:
        return
    right = (launcher("fsdp_transformer_layer_cls_to_wrap", ",".join(f.blocks)),)
    wanted = f.distribution.fsdp_wrap
    missing = [name for name in wanted if name not in f.blocks]
    if missing:
        text = T("the model of {0} has no {1}; its blocks are {2}", "{0} 的模型中没有 {1}；其 block 类为 {2}")
        yield Hit(text.format(f.script_id, ", ".join(missing), ", ".join(f.blocks)), right)
    elif not wanted and f.distribution.fsdp_policy in ("", "TRANSFORMER_BASED_WRAP"):
        text = T("FSDP without a class to wrap keeps the whole model in one unit; wrap {0}",
                 "FSDP 未指定包裹类，整个模型成为一个单元；应包裹 {0}")
        yield Hit(text.format(", ".join(f.blocks)), right)


def _both(f: Facts, _: Project) -> Iterator[Hit]:
    options = f.launch.launcher_options
    if (options.on("use_deepspeed") or options.given("deepspeed_config_file")) and options.on("use_fsdp"):
        yield Hit(T("the launcher is told to use DeepSpeed and FSDP", "启动器同时启用了 DeepSpeed 与 FSDP"),
                  (undo_launcher("use_deepspeed"), undo_launcher("deepspeed_config_file")))  # fmt: skip


def _script_only(f: Facts, _: Project) -> Iterator[Hit]:
    for name, kind in (("use_deepspeed", "deepspeed"), ("use_fsdp", "fsdp")):
        if f.options.on(name) and f.distribution.kind != kind and not f.launch.launcher_options.given("config_file"):
            text = T("--{0} stands behind the script's name: it must stand before it, or nothing is sharded",
                     "--{0} 写在脚本名之后：应写在脚本名之前，否则不会分片")
            yield Hit(text.format(name), (drop(name), launcher(name)))


def _saved_weights(f: Facts, _: Project) -> Iterator[Hit]:
    if f.zero == 3 and f.distribution.gather_16bit != "true":
        text = T("ZeRO-3 saves shards: without zero3_save_16bit_model build the weights with zero_to_bf16.py",
                 "ZeRO-3 只保存分片：未开启 zero3_save_16bit_model 时须用 zero_to_bf16.py 合并权重")
        edits = (launcher("zero3_save_16bit_model", "true"),) if f.distribution.gather_16bit != "false" else ()
        yield Hit(text, edits)


def _deepspeed_missing(f: Facts, _: Project) -> Iterator[Hit]:
    if f.distribution.kind == "deepspeed" and f.has("deepspeed") is False:
        yield Hit(T("deepspeed is not installed here", "当前环境未安装 deepspeed"))


def _zero3_ema(f: Facts, _: Project) -> Iterator[Hit]:
    if f.zero == 3 and f.full and f.options.on("use_ema"):
        yield Hit(T("--use_ema is refused under ZeRO-3", "ZeRO-3 下不支持 --use_ema"), (drop("use_ema"),))


def _mesh(f: Facts, _: Project) -> Iterator[Hit]:
    mesh, world = f.distribution.mesh, f.world
    product = math.prod(mesh.values())
    if mesh and world and product != world:
        sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        text = T("{0} = {1} devices, but {2} processes are started: {3} would be wasted or the run stops",
                 "{0} = {1} 个设备，但启动了 {2} 个进程：会浪费 {3} 个或直接报错")  # fmt: skip
        rest = product // mesh.get("dp_shard", 1)
        edits = (launcher("parallelism_config_dp_shard_size", world // rest),) if world % rest == 0 else ()
        yield Hit(text.format(sizes, product, world, abs(world - product)), edits)
    hybrid = f.distribution.fsdp_strategy.startswith("HYBRID")
    if hybrid and f.nodes <= 1 and not mesh:
        text = T("{0} on one node copies nothing: FULL_SHARD is the same with less setup",
                 "单机使用 {0} 没有副本可言：等同于 FULL_SHARD")
        edits = (launcher("fsdp_sharding_strategy", "FULL_SHARD"),)
        yield Hit(text.format(f.distribution.fsdp_strategy), edits, "warning")


def _devices(f: Facts, _: Project) -> Iterator[Hit]:
    visible = f.launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or not all(part.strip().isdigit() for part in visible.split(",")):
        return
    count, local = len(visible.split(",")), (f.distribution.processes or 0) // max(f.nodes, 1)
    if local and local != count:
        text = T("CUDA_VISIBLE_DEVICES shows {0} devices, {1} processes are started per node",
                 "CUDA_VISIBLE_DEVICES 有 {0} 卡，每节点却启动 {1} 个进程")
        yield Hit(text.format(count, local), severity="error" if local > count else "")


def _cpu_processes(f: Facts, _: Project) -> Iterator[Hit]:
    asked = (f.distribution.processes or 1) > 1 or f.distribution.kind in ("fsdp", "deepspeed")
    if f.cpu and asked and f.launch.launcher == "accelerate":
        yield Hit(T("accelerate launch on a CPU silently runs one process, unsharded; use torchrun and "
                    "ACCELERATE_USE_CPU=true",
                    "accelerate launch 在 CPU 上会静默地只运行一个进程；请用 torchrun 并设置 "
                    "ACCELERATE_USE_CPU=true"))  # fmt: skip


def _refused_fields(f: Facts, _: Project) -> Iterator[Hit]:
    fields = f.distribution.ignored_fields
    if fields:
        text = T("accelerate stops when its file names a DeepSpeed file and sets {0}; move these there",
                 "accelerate 配置指定 DeepSpeed 文件时又设置了 {0}，会报错；请移到该文件中")
        yield Hit(text.format(", ".join(fields)))


def _batch_mismatch(f: Facts, _: Project) -> Iterator[Hit]:
    if f.launch.kind != "train":
        return
    for name, value, flag in (
        ("train_micro_batch_size_per_gpu", f.distribution.micro_batch, "train_batch_size"),
        ("gradient_accumulation_steps", f.distribution.accumulation, "gradient_accumulation_steps"),
    ):
        given = f.options.integer(flag)
        if f.distribution.kind == "deepspeed" and value is not None and given is not None and value != given:
            text = T("the DeepSpeed file sets {0} to {1}, the command --{2} to {3}",
                     "DeepSpeed 文件中 {0}={1}，命令行 --{2}={3}")
            yield Hit(text.format(name, value, flag, given), (config(name, "auto"),))


def _stage2_offload(f: Facts, _: Project) -> Iterator[Hit]:
    if f.zero in (1, 2) and f.distribution.offload_param:
        yield Hit(T("offload_param works with stage 3 only", "offload_param 仅在 stage 3 有效"))


def _offload_adam(f: Facts, _: Project) -> Iterator[Hit]:
    name = next((n for n in ("use_8bit_adam", "use_came") if f.options.on(n)), None)
    if name is None or not f.distribution.offload_optimizer or not f.distribution.force_cpu_optimizer:
        return
    text = T("--{0} while the optimizer is offloaded: DeepSpeed stops unless zero_force_ds_cpu_optimizer is false, "
             "and no device memory is saved",
             "优化器已卸载时使用 --{0}：除非 zero_force_ds_cpu_optimizer=false，DeepSpeed 会报错，且不省显存")
    if f.distribution.inferred:
        yield Hit(text.format(name), severity="info")
    else:
        yield Hit(text.format(name), (drop(name),))


def _files(f: Facts, _: Project) -> Iterator[Hit]:
    for name in f.distribution.missing:
        text = T("{0} is not within reach; its settings are not known here", "{0} 不在可读取的范围内，无法得知其设置")
        if f.distribution.inferred:
            text = T("{0} is not within reach; its stage was taken from its name",
                     "{0} 不在可读取的范围内，按文件名推断其 stage")
        yield Hit(text.format(name))
    for problem in f.distribution.unread:
        yield Hit(problem, severity="error")


def _world(f: Facts, _: Project) -> Iterator[Hit]:
    launched = f.distribution.processes
    if f.launch.launcher == "python" and (f.gpu_count or 1) > 1:
        text = T("started with python: one of the {0} devices is used; start with accelerate launch",
                 "用 python 启动：{0} 卡中只用 1 卡；请改用 accelerate launch")
        yield Hit(text.format(f.gpu_count))
    elif launched and f.gpu_count and launched < f.gpu_count * f.nodes:
        text = T("{0} processes on {1} devices", "{0} 个进程，但有 {1} 卡")
        own = f.launch.launcher_options.given("num_processes")
        edits = (launcher("num_processes", f.gpu_count * f.nodes),) if own else ()
        yield Hit(text.format(launched, f.gpu_count * f.nodes), edits)


def _tile(f: Facts, _: Project) -> Iterator[Hit]:
    if f.sharded and f.options.on("auto_tile_batch_size"):
        yield Hit(T("--auto_tile_batch_size is switched off under ZeRO-3 and FSDP",
                    "ZeRO-3/FSDP 下 --auto_tile_batch_size 会被关闭"),
                  (drop("auto_tile_batch_size"),))  # fmt: skip


def _seed_ranks(f: Facts, _: Project) -> Iterator[Hit]:
    if f.options.given("seed"):
        return
    if f.target == "upstream":
        text = T("without --seed these scripts stop with a TypeError at start",
                 "不加 --seed 时该脚本启动即报 TypeError")
        yield Hit(text, (put("seed", 42),), "error")
    else:
        yield Hit(T("no --seed: one is drawn and logged, the run cannot be repeated without looking it up",
                    "未指定 --seed：会随机生成并记录，否则无法复现"))  # fmt: skip


RULES = (
    Rule("fsdp-wrap-class", "error", T("FSDP wraps a class the model lacks", "FSDP 包裹类不存在"), _wrap_class),
    Rule("deepspeed-and-fsdp", "error", T("two sharding engines", "同时启用两种分片引擎"), _both),
    Rule("sharding-behind-script", "error", T("launcher flag behind the script", "启动器参数位置错误"), _script_only),
    Rule("accelerate-refuses-fields", "error", T("settings accelerate refuses",
                                                 "accelerate 拒绝的设置"), _refused_fields, _ANY),
    Rule("zero3-saved-weights", "warning", T("ZeRO-3 without full weights", "ZeRO-3 不保存完整权重"), _saved_weights),
    Rule("zero3-ema", "error", T("EMA under ZeRO-3", "ZeRO-3 与 EMA 冲突"), _zero3_ema),
    Rule("deepspeed-not-installed", "warning", T("DeepSpeed missing", "缺少 DeepSpeed"), _deepspeed_missing),
    Rule("mesh-size", "error", T("device mesh does not fit", "设备网格与进程数不符"), _mesh),
    Rule("device-count", "warning", T("devices and processes differ", "设备数与进程数不符"), _devices),
    Rule("unused-devices", "warning", T("devices left idle", "有显卡闲置"), _world),
    Rule("cpu-one-process", "error", T("several processes on a CPU", "CPU 上的多进程"), _cpu_processes),
    Rule("deepspeed-batch", "error", T("batch sizes differ", "batch 设置不一致"), _batch_mismatch),
    Rule("zero2-offload-param", "warning", T("parameter offload below stage 3",
                                             "stage 3 以下的参数卸载"), _stage2_offload, _ANY),
    Rule("offload-optimizer", "warning", T("optimizer that cannot be offloaded", "无法卸载的优化器"), _offload_adam),
    Rule("auto-tile-sharded", "warning", T("auto tile under sharding", "分片下的自动 Tile"), _tile),
    Rule("no-seed", "info", T("no seed", "未指定随机种子"), _seed_ranks),
    Rule("config-file", "info", T("configuration file", "配置文件"), _files, _ANY),
)
