"""Distribution of a run, from launcher flags and from accelerate and DeepSpeed configuration files.

Flags win over the accelerate file, as they do for accelerate itself. A DeepSpeed file that cannot be read still tells
its stage by VideoX-Fun's file names (``zero_stage3_config_cpu_offload.json``); the result then says ``inferred``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optim_patches.audit.launch import Options
from optim_patches.audit.text import Text

MAX_YAML = 128 << 10
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
#: Fields that accelerate refuses in its own file once that names a DeepSpeed file.
_REFUSED = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
            "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
            "zero3_save_16bit_model")  # fmt: skip
Reader = Callable[[str], "str | None"]


@dataclass
class Distribution:
    """How a run is spread.

    Attributes:
        kind: ``none``, ``ddp``, ``deepspeed`` or ``fsdp``.
        stage: ZeRO stage, 0 without DeepSpeed, None when it could not be told.
        zeropp: the ZeRO++ keys that are on.
        inferred: the stage comes from a file name, the file itself was not read.
        missing: configuration files named but not found.
        mesh: sizes of accelerate's parallelism axes that were given, for example ``dp_shard``.
        force_cpu_optimizer: DeepSpeed insists on its own optimizer when it offloads the state.
        gather_16bit: whether ZeRO-3 gathers full weights when saving: ``true``, ``false``, ``auto`` or empty.
        ignored_fields: settings of an accelerate file that it refuses beside a DeepSpeed file.
        unread: problems with configuration files.
    """

    kind: str = "none"
    precision: str | None = None
    processes: int | None = None
    machines: int = 1
    stage: int | None = 0
    offload_optimizer: str = ""
    offload_param: str = ""
    zeropp: tuple[str, ...] = ()
    aio: bool = False
    clipping: Any = None
    optimizer: str = ""
    config_file: str = ""
    inferred: bool = False
    fsdp_version: int = 1
    fsdp_strategy: str = ""
    fsdp_wrap: tuple[str, ...] = ()
    fsdp_policy: str = ""
    fsdp_prefetch: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    gather_16bit: str = ""
    micro_batch: int | None = None
    accumulation: int | None = None
    ignored_fields: tuple[str, ...] = ()
    force_cpu_optimizer: bool = True
    dynamo: str = ""
    cpu: bool = False
    missing: list[str] = field(default_factory=list)
    unread: list[Text] = field(default_factory=list)

    @property
    def offload(self) -> str:
        """``nvme``, ``cpu`` or an empty string."""
        devices = {self.offload_optimizer, self.offload_param}
        return "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else ""

    @property
    def full_shard(self) -> bool:
        return self.kind == "fsdp" and self.fsdp_strategy in ("FULL_SHARD", "1", "")


def load_mapping(text: str, name: str) -> tuple[dict[str, Any] | None, Text | None]:
    """A JSON or YAML mapping, or None with the reason. Nothing in the file is executed."""
    if len(text) > MAX_YAML and not name.endswith(".json"):
        return None, Text(f"{name} is too large for a configuration; not read", f"{name} 对配置文件来说过大，未读取")
    try:
        if name.endswith(".json") or text.lstrip().startswith("{"):
            data = json.loads(text)
        else:
            data = _load_yaml(text)
    except ModuleNotFoundError:
        hint = "pip install pyyaml"
        return None, Text(f"{name} needs PyYAML to be read: {hint}", f"读取 {name} 需要 PyYAML：{hint}")
    except RecursionError:
        return None, Text(f"{name} is nested too deeply to be a configuration.", f"{name} 嵌套过深，不是配置文件。")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, Text(f"{name} cannot be parsed: {reason}", f"{name} 无法解析：{reason}")
    if not isinstance(data, dict):
        return None, Text(f"{name} holds no mapping of settings.", f"{name} 不是键值配置。")
    return data, None


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def config_kind(data: Mapping[str, Any]) -> str:
    """``deepspeed``, ``accelerate``, ``model`` (VideoX-Fun's yaml) or ``""``."""
    if "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data:
        return "deepspeed"
    if {"distributed_type", "deepspeed_config", "fsdp_config", "num_processes"} & set(data):
        return "accelerate"
    if {"transformer_additional_kwargs", "vae_kwargs", "text_encoder_kwargs"} & set(data):
        return "model"
    return ""


def read_accelerate(data: Mapping[str, Any]) -> Distribution:
    """Distribution by the settings of an accelerate file alone."""
    result = Distribution()
    _apply_accelerate(data, result)
    return result


def read_distribution(launcher: str, options: Options, script: Options, read: Reader) -> Distribution:
    """Distribution of a launch. ``read`` returns the text of a file named on the command line, or None."""
    result = Distribution()
    settings = _accelerate_file(options, result, read)
    _apply_accelerate(settings, result)
    _apply_flags(launcher, options, script, result)
    if result.config_file:
        apply_deepspeed_file(result, read)
    if result.kind == "none" and ((result.processes or 1) > 1 or result.machines > 1 or options.on("multi_gpu")):
        result.kind = "ddp"
    return result


def _accelerate_file(options: Options, result: Distribution, read: Reader) -> dict[str, Any]:
    name = options.text("config_file")
    if not name:
        return {}
    text = read(name)
    if text is None:
        result.missing.append(name)
        return {}
    data, problem = load_mapping(text, name)
    if problem is not None:
        result.unread.append(problem)
    return data or {}


def _apply_accelerate(data: Mapping[str, Any], result: Distribution) -> None:
    """Settings of an accelerate configuration file."""
    kind = str(data.get("distributed_type", "")).upper()
    result.kind = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}.get(kind, "none")
    result.precision = _text(data.get("mixed_precision")) or None
    result.processes = _int(data.get("num_processes"))
    result.machines = _int(data.get("num_machines")) or 1
    result.cpu = data.get("use_cpu") is True
    dynamo = data.get("dynamo_config")
    if isinstance(dynamo, Mapping):
        result.dynamo = _text(dynamo.get("dynamo_backend"))
    deepspeed = data.get("deepspeed_config")
    if isinstance(deepspeed, Mapping):
        result.kind = "deepspeed"
        result.stage = _int(deepspeed.get("zero_stage"))
        result.offload_optimizer = _device(deepspeed.get("offload_optimizer_device"))
        result.offload_param = _device(deepspeed.get("offload_param_device"))
        result.clipping = deepspeed.get("gradient_clipping")
        result.config_file = _text(deepspeed.get("deepspeed_config_file"))
        result.gather_16bit = _text(deepspeed.get("zero3_save_16bit_model")).lower()
        if result.config_file:
            refused = [name for name in _REFUSED if name in deepspeed]
            refused += ["mixed_precision"] if result.precision else []
            result.ignored_fields = tuple(refused)
    fsdp = data.get("fsdp_config")
    if isinstance(fsdp, Mapping) and fsdp:
        result.kind = "fsdp"
        _apply_fsdp({str(key): value for key, value in fsdp.items()}, result)


def _apply_fsdp(data: Mapping[str, Any], result: Distribution) -> None:
    result.fsdp_version = _int(data.get("fsdp_version")) or result.fsdp_version
    strategy = _text(data.get("fsdp_sharding_strategy")).upper() or result.fsdp_strategy
    if result.fsdp_version == 2 and "fsdp_reshard_after_forward" in data:
        strategy = "FULL_SHARD" if _text(data["fsdp_reshard_after_forward"]).lower() == "true" else "SHARD_GRAD_OP"
    result.fsdp_strategy = strategy
    result.fsdp_policy = _text(data.get("fsdp_auto_wrap_policy")).upper() or result.fsdp_policy
    result.fsdp_prefetch = _text(data.get("fsdp_backward_prefetch")).upper() or result.fsdp_prefetch
    wrap = data.get("fsdp_transformer_layer_cls_to_wrap")
    if wrap:
        names = ",".join(map(_text, wrap)) if isinstance(wrap, (list, tuple)) else _text(wrap)
        result.fsdp_wrap = tuple(name.strip() for name in names.split(",") if name.strip())


def _apply_flags(launcher: str, options: Options, script: Options, result: Distribution) -> None:
    result.precision = options.text("mixed_precision") or result.precision
    for name in ("num_processes", "nproc_per_node", "num_gpus"):
        result.processes = options.integer(name) or result.processes
    result.machines = options.integer("num_machines") or options.integer("nnodes") or result.machines
    if launcher == "torchrun" and result.processes:
        result.processes *= result.machines
    result.cpu = result.cpu or options.on("cpu") or options.on("use_cpu")
    result.dynamo = options.text("dynamo_backend") or result.dynamo
    file = options.text("deepspeed_config_file") or script.text("deepspeed")
    stage = options.integer("zero_stage")
    if options.on("use_deepspeed") or file or stage is not None or launcher == "deepspeed":
        result.kind = "deepspeed"
        result.stage = stage if stage is not None else None if file is None and result.stage == 0 else result.stage
        result.config_file = file or result.config_file
        result.offload_optimizer = _device(options.text("offload_optimizer_device")) or result.offload_optimizer
        result.offload_param = _device(options.text("offload_param_device")) or result.offload_param
        result.clipping = options.number("gradient_clipping") or result.clipping
        result.gather_16bit = (options.text("zero3_save_16bit_model") or result.gather_16bit).lower()
    result.mesh = {axis: size for axis in _AXES if (size := options.integer(f"parallelism_config_{axis}_size"))}
    fsdp = {option.name: option.values[-1] for option in options.items if option.values}
    if options.on("use_fsdp") or any(name.startswith("fsdp_") for name in fsdp):
        result.kind = "fsdp"
        result.stage = 0
        _apply_fsdp(fsdp, result)


def apply_deepspeed_file(result: Distribution, read: Reader) -> None:
    """Read the DeepSpeed file a distribution names; without it, infer the stage from VideoX-Fun's file names."""
    text = read(result.config_file)
    data, problem = load_mapping(text, result.config_file) if text is not None else (None, None)
    if problem is not None:
        result.unread.append(problem)
    if data is not None:
        apply_deepspeed(data, result)
        return
    if text is None:
        result.missing.append(result.config_file)
    name = result.config_file.rsplit("/", 1)[-1].lower()
    for stage in (1, 2, 3):
        if f"stage{stage}" in name or f"zero{stage}" in name or f"zero_{stage}" in name:
            result.stage, result.inferred = stage, True
    if "offload" in name:
        device = "nvme" if "nvme" in name else "cpu"
        result.offload_optimizer = result.offload_optimizer or device
        result.offload_param = result.offload_param or (device if result.stage == 3 else "")


def apply_deepspeed(data: Mapping[str, Any], result: Distribution) -> None:
    """Settings of a DeepSpeed configuration."""
    result.kind = "deepspeed"
    zero = data.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = _int(zero.get("stage"))
    result.stage = stage if stage is not None else result.stage or 0
    for key, attribute in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_param")):
        part = zero.get(key)
        if isinstance(part, Mapping):
            setattr(result, attribute, _device(part.get("device")))
    keys = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")
    hpz = _int(zero.get(keys[2])) or 1
    result.zeropp = tuple(key for key in keys[:2] if zero.get(key) is True) + (keys[2:] if hpz > 1 else ())
    result.force_cpu_optimizer = data.get("zero_force_ds_cpu_optimizer") is not False
    gather = _text(zero.get("stage3_gather_16bit_weights_on_model_save")).lower()
    result.gather_16bit = gather if gather in ("true", "false") else result.gather_16bit or gather
    result.micro_batch = _int(data.get("train_micro_batch_size_per_gpu"))
    result.accumulation = _int(data.get("gradient_accumulation_steps"))
    result.aio = isinstance(data.get("aio"), Mapping)
    result.clipping = data.get("gradient_clipping", result.clipping)
    for name in ("bf16", "fp16"):
        part = data.get(name)
        if isinstance(part, Mapping) and part.get("enabled") is True and result.precision is None:
            result.precision = name
    optimizer = data.get("optimizer")
    result.optimizer = _text(optimizer.get("type")) if isinstance(optimizer, Mapping) else ""


def _int(value: object) -> int | None:
    try:
        return int(_text(value))
    except ValueError:
        return None


def _text(value: object) -> str:
    """Scalars as text. Lists and mappings are nothing: with YAML's aliases their text can grow without bound."""
    return str(value) if isinstance(value, (str, int, float)) else ""


def _device(value: object) -> str:
    text = _text(value).lower()
    return "" if text == "none" else text
